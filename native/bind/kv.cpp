// One state's blocks in the paged cache, at an address that the caller keeps alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "runtime/isa.h"
#include "runtime/warmer.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

using Ids = Array<const int64_t, 1>;

KvMemory kv_memory(const std::string& kind, int num_heads, int head_dim, int block_size, uintptr_t blocks,
                   std::optional<int> latent_dim) {
  require(blocks % 64 == 0, "blocks start at a multiple of 64 bytes");
  require(num_heads > 0 && head_dim > 0 && head_dim <= (has_scales(kv_kind_of(kind)) ? kMaxScaledHeadDim : kMaxHeadDim),
          "a cache has heads of 1 to 576 entries, and of 1 to 256 as int8, fp8 or int4");
  require(!latent_dim || (0 < *latent_dim && *latent_dim <= head_dim && !has_scales(kv_kind_of(kind))),
          "a latent is the first entries of a key, and f32 or bf16");
  require(block_size > 0 && block_size <= 256 && (block_size & (block_size - 1)) == 0,
          "a block's tokens are a power of two up to 256");
  return {{kv_kind_of(kind), num_heads, head_dim, block_size, latent_dim.value_or(head_dim), latent_dim.has_value()},
          reinterpret_cast<uint8_t*>(blocks)};
}

int64_t kv_block_bytes(const KvMemory& memory) { return kernels_of("portable").attention.block_bytes(memory.layout); }

void copy_block(const KvMemory& memory, int64_t source, int64_t target) {
  const int64_t bytes = kv_block_bytes(memory);
  std::memcpy(memory.blocks + target * bytes, memory.blocks + source * bytes, (size_t)bytes);
}

// Writes keys and values of tokens, [T, K, D], at their slots; of latents, the keys alone.
void write_tokens(const std::string& level, const KvMemory& memory, Ids slots, Array<const float, 3> k,
                  Array<const float, 3> v) {
  const KvLayout& layout = memory.layout;
  const auto fits = [&](const auto& x) {
    return x.shape(0) == slots.shape(0) && (int64_t)x.shape(1) == layout.num_heads &&
           (int64_t)x.shape(2) == layout.head_dim;
  };
  require(fits(k) && (layout.values_in_keys || fits(v)), "keys and values are [tokens, heads, head_dim]");
  for (size_t t = 0; t < slots.shape(0); t++)
    for (int32_t head = 0; head < layout.num_heads; head++) {
      const int64_t row = ((int64_t)t * layout.num_heads + head) * layout.head_dim;
      kernels_of(level).attention.kv_write(memory, slots.data()[t], head, k.data() + row, v.data() + row);
    }
}

// Keys and values of tokens at their slots, into k and v [T, K, D].
void read_tokens(const std::string& level, const KvMemory& memory, Ids slots, Array<float, 3> k, Array<float, 3> v) {
  const KvLayout& layout = memory.layout;
  for (size_t t = 0; t < slots.shape(0); t++)
    for (int32_t head = 0; head < layout.num_heads; head++) {
      const int64_t row = ((int64_t)t * layout.num_heads + head) * layout.head_dim;
      kernels_of(level).attention.kv_read(memory, slots.data()[t], head, k.data() + row, v.data() + row);
    }
}

}  // namespace

void bind_kv(nb::module_& module) {
  nb::class_<KvMemory>(module, "KvMemory")
      .def("__init__",
           [](KvMemory* self, const std::string& kind, int num_heads, int head_dim, int block_size, uintptr_t blocks,
              std::optional<int> latent_dim) {
             new (self) KvMemory(kv_memory(kind, num_heads, head_dim, block_size, blocks, latent_dim));
           },
           "kind"_a, "num_heads"_a, "head_dim"_a, "block_size"_a, "blocks"_a, "latent_dim"_a = nb::none())
      .def_prop_ro("num_heads", [](const KvMemory& memory) { return memory.layout.num_heads; })
      .def_prop_ro("head_dim", [](const KvMemory& memory) { return memory.layout.head_dim; }, "Entries of a key.")
      .def_prop_ro("block_bytes", &kv_block_bytes, "Bytes of one block, keys and values together.")
      .def("copy_block", &copy_block, "source"_a, "target"_a)
      .def("write", [](const KvMemory& memory, const std::string& level, Ids slots, Array<const float, 3> k,
                       Array<const float, 3> v) { write_tokens(level, memory, slots, k, v); },
           "level"_a, "slots"_a, "k"_a, "v"_a)
      .def("read", [](const KvMemory& memory, const std::string& level, Ids slots, Array<float, 3> k,
                      Array<float, 3> v) { read_tokens(level, memory, slots, k, v); },
           "level"_a, "slots"_a, "k"_a, "v"_a);
  nb::class_<MemoryWarmer>(module, "MemoryWarmer", "Gives memory its pages before it is used, on a thread of its own.")
      .def(nb::init<>())
      .def("take", &MemoryWarmer::take, "pieces"_a,
           "Begin with pieces, (address, bytes) each; False while busy, and where the system cannot be asked.")
      .def_prop_ro("busy", &MemoryWarmer::busy);
}

}  // namespace ridgeline
