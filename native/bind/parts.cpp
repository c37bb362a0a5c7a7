// What a tape is put together from, and runs on, for Python: the pool, norms and attention, and what tests ask of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/matrix.h"
#include "runtime/checksum.h"
#include "runtime/latent.h"
#include "runtime/map_guard.h"
#include "runtime/pool.h"
#include "runtime/rows.h"
#include "runtime/team.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Norm norm_of(const std::string& kind, float eps, uintptr_t weight, uintptr_t bias, bool by_head) {
  return {norm_kind_of(kind), eps, pointer<const float>(weight), pointer<const float>(bias), by_head};
}

}  // namespace

void bind_parts(nb::module_& module) {
  nb::class_<Norm>(module, "Norm")
      .def("__init__",
           [](Norm* self, const std::string& kind, float eps, uintptr_t weight, uintptr_t bias, bool by_head) {
             new (self) Norm(norm_of(kind, eps, weight, bias, by_head));
           },
           "kind"_a = "none", "eps"_a = 0.0f, "weight"_a = 0, "bias"_a = 0, "by_head"_a = false);
  nb::class_<AttentionSpec>(module, "AttentionSpec")
      .def("__init__",
           [](AttentionSpec* self, int num_heads, float scale, int window, float softcap, uintptr_t sinks,
              uintptr_t slopes, bool float32) {
             new (self) AttentionSpec{num_heads, scale, window, softcap, pointer<const float>(sinks),
                                      pointer<const float>(slopes), float32};
           },
           "num_heads"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a = 0, "slopes"_a = 0,
           "float32"_a = false);
  nb::class_<Team>(module, "Team")
      .def(nb::init<>())
      .def_prop_ro("alone", &Team::alone)
      .def("observe", &Team::observe, "seconds"_a, "held_up"_a = 0.0);
  nb::class_<Pool>(module, "Pool").def(nb::init<int>(), "num_threads"_a).def_prop_ro("size", &Pool::size);
  nb::class_<MapGuard>(module, "MapGuard", "Keeps a process alive whose mapped file is cut off: zeros are read then.")
      .def(nb::init<int, uintptr_t, size_t>(), "fd"_a, "begin"_a, "bytes"_a)
      .def_prop_ro("is_cut", &MapGuard::is_cut);
  module.def(
      "latent_expands",
      [](int64_t num_heads, int64_t latent, int64_t rope, int64_t nope, int64_t value, int64_t num_tokens,
         int64_t kv_length) { return LatentSizes{num_heads, latent, rope, nope, value}.expands(num_tokens, kv_length); },
      "num_heads"_a, "latent"_a, "rope"_a, "nope"_a, "value"_a, "num_tokens"_a, "kv_length"_a,
      "Whether latent attention expands the latents for a span, for tests.");
  module.def(
      "checksums",
      [](const std::vector<std::pair<uintptr_t, int64_t>>& parts, int num_threads) {
        const nb::gil_scoped_release release;
        std::vector<Bytes> bytes;
        for (auto [address, num_bytes] : parts) bytes.push_back({pointer<const uint8_t>(address), num_bytes});
        return checksums(bytes, num_threads);
      },
      "parts"_a, "num_threads"_a, "64-bit checksums of pieces of memory (address, bytes), for finding damage.");
}

}  // namespace ridgeline
