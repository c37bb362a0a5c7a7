// The paged cache and attention alone, for tests: one layer's memory, and a step's spans over it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

using Result = nb::ndarray<nb::numpy, float, nb::ndim<3>>;

struct Release {
  void operator()(uint8_t* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};
using Memory = std::unique_ptr<uint8_t[], Release>;

Memory allocate(int64_t bytes) {
  Memory memory(static_cast<uint8_t*>(::operator new[]((size_t)bytes, std::align_val_t(64))));
  std::memset(memory.get(), 0, (size_t)bytes);
  return memory;
}

Result new_result(int64_t tokens, int64_t heads, int64_t dims) {
  auto* data = new float[(size_t)(tokens * heads * dims)]();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Result(data, {(size_t)tokens, (size_t)heads, (size_t)dims}, owner);
}

// One layer's keys and values, zeroed.
class KvState {
 public:
  KvState(const std::string& level, const std::string& kind, int32_t num_heads, int32_t head_dim, int32_t block_size,
          int64_t num_blocks, std::optional<int32_t> value_dim, bool values_in_keys)
      : kernels_(kernels_of(level).attention), num_blocks_(num_blocks) {
    require(num_heads > 0 && num_blocks > 0, "a cache needs heads and blocks");
    for (const int32_t dim : {head_dim, value_dim.value_or(head_dim)})
      require(dim > 0 && dim <= kMaxHeadDim, "head_dim and value_dim are 1 to 576, got " + std::to_string(dim));
    const bool scaled = has_scales(kv_kind_of(kind));
    require(!scaled || head_dim <= kMaxScaledHeadDim, kind + " keys have up to 256 entries: sums would overflow");
    require(!values_in_keys || (value_dim.value_or(head_dim) <= head_dim && !scaled),
            "keys hold only shorter values, and those as f32 or bf16");
    require(block_size > 0 && block_size <= 256 && (block_size & (block_size - 1)) == 0,
            "block_size is a power of two up to 256, got " + std::to_string(block_size));
    memory_.layout = {kv_kind_of(kind), num_heads, head_dim, block_size, value_dim.value_or(head_dim), values_in_keys};
    block_bytes_ = kernels_.block_bytes(memory_.layout);
    blocks_ = allocate(num_blocks * block_bytes_);
    memory_.blocks = blocks_.get();
  }

  int64_t block_bytes() const { return block_bytes_; }

  void write(const Array<const int64_t, 1>& slots, const Array<const float, 3>& k, const Array<const float, 3>& v) {
    check_slots(slots);
    const KvLayout& layout = memory_.layout;
    check_tokens(k, slots.size(), layout.head_dim), check_tokens(v, slots.size(), layout.value_dim);
    for (size_t t = 0; t < slots.size(); t++)
      for (int32_t head = 0; head < layout.num_heads; head++) {
        const size_t at = t * (size_t)layout.num_heads + (size_t)head;
        kernels_.kv_write(memory_, slots.data()[t], head, k.data() + at * (size_t)layout.head_dim,
                          v.data() + at * (size_t)layout.value_dim);
      }
  }

  std::pair<Result, Result> read(const Array<const int64_t, 1>& slots) const {
    check_slots(slots);
    const KvLayout& layout = memory_.layout;
    Result k = new_result((int64_t)slots.size(), layout.num_heads, layout.head_dim);
    Result v = new_result((int64_t)slots.size(), layout.num_heads, layout.value_dim);
    for (size_t t = 0; t < slots.size(); t++)
      for (int32_t head = 0; head < layout.num_heads; head++) {
        const size_t at = t * (size_t)layout.num_heads + (size_t)head;
        kernels_.kv_read(memory_, slots.data()[t], head, k.data() + at * (size_t)layout.head_dim,
                         v.data() + at * (size_t)layout.value_dim);
      }
    return {std::move(k), std::move(v)};
  }

  void copy_block(int64_t source, int64_t target) {
    check_block(source), check_block(target);
    if (source == target) return;
    const auto bytes = (size_t)block_bytes_;
    std::memcpy(blocks_.get() + target * block_bytes_, blocks_.get() + source * block_bytes_, bytes);
  }

  // Rows of a span [first_row, first_row + length) at the end of its kv_length tokens. The keys are divided into
  // `splits` parts that are merged, or not at all for 1; a call covers up to `rows_per_call` rows, or all for 0.
  Result attend(const Array<const float, 3>& q, int64_t first_row, int64_t length, int64_t kv_length,
                const Array<const int64_t, 1>& table, int64_t first_token, int64_t bidirectional_block, float scale,
                int32_t window, float softcap, const std::optional<Array<const float, 1>>& sinks,
                const std::optional<Array<const float, 1>>& slopes, bool float32, int64_t splits,
                int64_t rows_per_call) const {
    const KvLayout& layout = memory_.layout;
    const auto rows = (int64_t)q.shape(0), num_heads = (int64_t)q.shape(1);
    require((int64_t)q.shape(2) == layout.head_dim && num_heads > 0 && num_heads % layout.num_heads == 0,
            "q must be [rows, a multiple of " + std::to_string(layout.num_heads) + ", " +
                std::to_string(layout.head_dim) + "]");
    require((!sinks || (int64_t)sinks->size() == num_heads) && (!slopes || (int64_t)slopes->size() == num_heads),
            "sinks and slopes need one entry per query head");
    require(splits > 0 && rows_per_call >= 0 && window >= 0, "splits, rows_per_call or window is out of range");
    const SpanView span = view(rows, first_row, length, kv_length, table, first_token, bidirectional_block);
    const AttentionSpec spec{(int32_t)num_heads,  scale, window, softcap, sinks ? sinks->data() : nullptr,
                             slopes ? slopes->data() : nullptr, float32};
    Result out = new_result(rows, num_heads, layout.value_dim);
    Memory scratch = allocate(kernels_.scratch_bytes);
    const int64_t step = rows_per_call > 0 ? rows_per_call : std::max<int64_t>(length, 1);
    for (int32_t head = 0; head < layout.num_heads; head++)
      for (int64_t begin = 0; begin < length; begin += step)
        run(spec, span, q.data(), out.data(), head, begin, std::min(begin + step, length), splits, scratch.get());
    return out;
  }

 private:
  void run(const AttentionSpec& spec, const SpanView& span, const float* q, float* out, int32_t head, int64_t begin,
           int64_t end, int64_t splits, void* scratch) const {
    const KvLayout& layout = memory_.layout;
    const int64_t stride = (int64_t)spec.num_heads * layout.head_dim, out_stride = (int64_t)spec.num_heads * layout.value_dim;
    if (splits == 1) {
      kernels_.attend(spec, memory_, {span, head, begin, end, span.first_token, span.kv_length}, nullptr, q, stride, out,
                      out_stride, nullptr, scratch);
      return;
    }
    const int64_t part_floats = (end - begin) * spec.num_heads / layout.num_heads * (2 + layout.value_dim);
    std::vector<float> partials((size_t)(splits * part_floats));
    const int64_t blocks = (span.kv_length - span.first_token + layout.block_size - 1) / layout.block_size;
    for (int64_t part = 0; part < splits; part++)
      kernels_.attend(spec, memory_,
                      {span, head, begin, end, span.first_token + blocks * part / splits * layout.block_size,
                       span.first_token + blocks * (part + 1) / splits * layout.block_size},
                      nullptr, q, stride, nullptr, 0, partials.data() + part * part_floats, scratch);
    kernels_.merge(spec, memory_, span, out, out_stride, head, begin, end, partials.data(), splits, part_floats);
  }

  SpanView view(int64_t rows, int64_t first_row, int64_t length, int64_t kv_length,
                const Array<const int64_t, 1>& table, int64_t first_token, int64_t bidirectional_block) const {
    require(bidirectional_block > 0, "bidirectional_block must be at least 1");
    const int64_t block_size = memory_.layout.block_size;
    require(0 <= first_row && 0 < length && first_row + length <= rows, "the span's rows are not within q");
    require(first_token >= 0 && first_token % block_size == 0, "first_token is not a multiple of the block size");
    require(length <= kv_length && first_token < kv_length, "kv_length is too small for the span");
    require((kv_length - first_token + block_size - 1) / block_size <= (int64_t)table.size(), "the table is too short");
    for (size_t i = 0; i < table.size(); i++) check_block(table.data()[i]);
    return {first_row, length, kv_length, first_token, table.data(), bidirectional_block};
  }

  void check_block(int64_t block) const {
    require(0 <= block && block < num_blocks_, "block " + std::to_string(block) + " is not in the cache");
  }
  void check_slots(const Array<const int64_t, 1>& slots) const {
    for (size_t t = 0; t < slots.size(); t++)
      require(0 <= slots.data()[t] && slots.data()[t] < num_blocks_ * memory_.layout.block_size,
              "slot " + std::to_string(slots.data()[t]) + " is not in the cache");
  }
  void check_tokens(const Array<const float, 3>& x, size_t tokens, int64_t dim) const {
    require(x.shape(0) == tokens && (int64_t)x.shape(1) == memory_.layout.num_heads && (int64_t)x.shape(2) == dim,
            "keys must be [slots, heads, head_dim] and values [slots, heads, value_dim]");
  }

  const AttentionKernels& kernels_;
  int64_t num_blocks_, block_bytes_;
  KvMemory memory_{};
  Memory blocks_;
};

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<KvState>(module, "KvState", "One layer's keys and values at one ISA level, for tests.")
      .def(nb::init<const std::string&, const std::string&, int32_t, int32_t, int32_t, int64_t, std::optional<int32_t>,
                    bool>(),
           "level"_a, "kind"_a, "num_heads"_a, "head_dim"_a, "block_size"_a, "num_blocks"_a,
           "value_dim"_a = nb::none(), "values_in_keys"_a = false)
      .def_prop_ro("block_bytes", &KvState::block_bytes, "Bytes of a block, keys and values together.")
      .def("write", &KvState::write, "slots"_a, "k"_a, "v"_a)
      .def("read", &KvState::read, "slots"_a, "Keys [slots, heads, head_dim] and values [slots, heads, value_dim] as float32.")
      .def("copy_block", &KvState::copy_block, "source"_a, "target"_a)
      .def("attend", &KvState::attend, "q"_a, nb::kw_only(), "first_row"_a, "length"_a, "kv_length"_a, "table"_a,
           "first_token"_a = 0, "bidirectional_block"_a = 1, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
           "sinks"_a = nb::none(), "slopes"_a = nb::none(), "float32"_a = false, "splits"_a = 1, "rows_per_call"_a = 0);
}

}  // namespace ridgeline
