// The tape's instructions for recurrent layers, for bind/runtime.cpp. `Builder` has the tape, and its buffers by number.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>

#include "bind/arguments.h"
#include "bind/matrix.h"
#include "runtime/recurrent.h"

namespace ridgeline::recurrent_bindings {

namespace nb = nanobind;
using namespace nanobind::literals;

inline const float* floats(uintptr_t address) { return reinterpret_cast<const float*>(address); }

inline RecurrenceKind kind_of(const std::string& name) {
  return by_name<RecurrenceKind>("kind of recurrence",
                                 {{"ssd", RecurrenceKind::ssd}, {"delta", RecurrenceKind::delta},
                                  {"retention", RecurrenceKind::retention}}, name);
}

// Raises unless the state has no log, or one as wide as what is logged.
inline void check_log(const StatePart& state, int64_t width) {
  require(!state.log || (state.log_width == width && state.log_rows > 0), "the log does not fit what goes into it");
}

template <class Builder>
void causal_conv(Builder& at, int x, int out, int64_t taps, uintptr_t weight, const StatePart& state, uintptr_t bias,
                 const std::optional<std::string>& activation) {
  const int64_t channels = at.buffer(x)->width;
  require(taps >= 2 && taps <= Convolution::kMaxTaps, "a convolution has 2 to 64 taps");
  require(at.buffer(out)->width == channels && state.size == channels * (taps - 1), "the state does not fit the rows");
  check_log(state, channels);
  const Convolution conv{channels,     taps,
                         floats(weight), bias ? floats(bias) : nullptr,
                         activation.has_value(), activation_of(activation.value_or("silu"))};
  at.tape().add(std::make_unique<CausalConv>(conv, state, at.buffer(x), at.buffer(out)));
}

template <class Builder>
void selective_scan(Builder& at, int x, int dt, int b, int c, int out, uintptr_t rate, uintptr_t skip,
                    const StatePart& state) {
  const int64_t channels = at.buffer(x)->width, size = at.buffer(b)->width;
  require(at.buffer(dt)->width == channels && at.buffer(out)->width == channels && at.buffer(c)->width == size &&
            state.size == channels * size,
        "the operands of a selective scan do not fit one another");
  check_log(state, 2 * channels + size);
  const SelectiveScan scan{channels, size, floats(rate), floats(skip)};
  at.tape().need_scratch(at.kernels().recurrent.scan_scratch_bytes(scan));
  at.tape().add(std::make_unique<Scan>(
      scan, state,
      Scan::Operands{at.buffer(x), at.buffer(dt), at.buffer(b), at.buffer(c), at.buffer(out)}));
}

template <class Builder>
void recur(Builder& at, const std::string& kind_name, int64_t heads, int64_t key_heads, int q, int k, int v,
           std::optional<int> dt, std::optional<int> beta, int out, uintptr_t rate, const StatePart& state,
           uintptr_t dt_bias, uintptr_t skip, float dt_min, float dt_max) {
  const RecurrenceKind kind = kind_of(kind_name);
  require(heads > 0 && key_heads > 0 && heads % key_heads == 0, "heads share keys evenly");
  require(at.buffer(k)->width % key_heads == 0 && at.buffer(v)->width % heads == 0, "a row is whole heads");
  const Recurrence recurrence{kind,           heads,          key_heads,    at.buffer(k)->width / key_heads,
                              at.buffer(v)->width / heads,    floats(rate), floats(dt_bias),
                              floats(skip),   dt_min,         dt_max};
  require(at.buffer(q)->width == at.buffer(k)->width && at.buffer(out)->width == at.buffer(v)->width &&
            state.size == heads * recurrence.key_size * recurrence.value_size,
        "the operands of a recurrence do not fit one another");
  const bool steps = kind != RecurrenceKind::retention;
  require(dt.has_value() == steps && (dt_bias != 0) == steps && beta.has_value() == (kind == RecurrenceKind::delta) &&
            (skip != 0) == (kind == RecurrenceKind::ssd) && (!dt || at.buffer(*dt)->width == heads) &&
            (!beta || at.buffer(*beta)->width == heads),
        "the gates do not fit the kind of recurrence");
  check_log(state, at.buffer(k)->width + at.buffer(v)->width + heads * ((dt ? 1 : 0) + (beta ? 1 : 0)));
  at.tape().need_scratch(at.kernels().recurrent.recur_scratch_bytes(recurrence));
  at.tape().add(std::make_unique<Recur>(
      recurrence, state,
      Recur::Operands{at.buffer(q), at.buffer(k), at.buffer(v), dt ? at.buffer(*dt) : nullptr,
                      beta ? at.buffer(*beta) : nullptr, at.buffer(out)},
      at.tape().deterministic()));
}

template <class Builder>
void gated_norm(Builder& at, int x, int z, int out, int64_t group, float eps, bool norm_before_gate, uintptr_t weight,
                bool shared_weight) {
  const int64_t width = at.buffer(x)->width;
  require(group > 0 && width % group == 0 && at.buffer(z)->width == width && at.buffer(out)->width == width,
        "the operands of a gated norm do not fit one another");
  at.tape().add(std::make_unique<NormGate>(GatedNorm{group, eps, norm_before_gate}, floats(weight), shared_weight,
                                           at.buffer(x), at.buffer(z), at.buffer(out)));
}

template <class Builder>
void bind(nb::module_& module, nb::class_<Builder>& tape) {
  nb::class_<StatePart>(module, "StatePart", "One part of a recurrent state: `size` floats a block from `memory` on; from\n"
                         "`log` on the inputs of `log_rows` tokens a block.")
      .def("__init__",
           [](StatePart* self, uintptr_t memory, int64_t size, int group, uintptr_t log, int64_t log_width,
              int64_t log_rows) {
             new (self) StatePart{reinterpret_cast<float*>(memory), size,     group,
                                  reinterpret_cast<float*>(log),    log_width, log_rows};
           },
           "memory"_a, "size"_a, "group"_a, "log"_a = 0, "log_width"_a = 0, "log_rows"_a = 0);
  tape.def("causal_conv", &causal_conv<Builder>, "x"_a, "out"_a, "taps"_a, "weight"_a, "state"_a, "bias"_a = 0,
           "activation"_a.none() = nb::none(), "`weight` is [taps, channels].")
      .def("selective_scan", &selective_scan<Builder>, "x"_a, "dt"_a, "b"_a, "c"_a, "out"_a, "rate"_a, "skip"_a,
           "state"_a)
      .def("recur", &recur<Builder>, "kind"_a, "heads"_a, "key_heads"_a, "q"_a, "k"_a, "v"_a, "dt"_a.none(),
           "beta"_a.none(), "out"_a, "rate"_a, "state"_a, "dt_bias"_a = 0, "skip"_a = 0, "dt_min"_a = 0.0f,
           "dt_max"_a = std::numeric_limits<float>::infinity())
      .def("gated_norm", &gated_norm<Builder>, "x"_a, "z"_a, "out"_a, "group"_a, "eps"_a, "norm_before_gate"_a,
           "weight"_a, "shared_weight"_a);
}

}  // namespace ridgeline::recurrent_bindings
