// Layers with experts for Python: methods of Tape.
#pragma once

#include <string>

#include "bind/arguments.h"
#include "bind/matrix.h"
#include "runtime/experts.h"

namespace ridgeline::expert_bindings {

// `group_score`: "max" or "top2_sum".
template <class Builder>
void route(Builder& self, int logits, int ids, int weights, const std::string& scoring, bool normalize, float scale,
           int64_t num_groups, int64_t top_groups, const std::string& group_score, uintptr_t bias) {
  require(scoring == "softmax" || scoring == "sigmoid", "experts are scored by 'softmax' or 'sigmoid'");
  require(group_score == "max" || group_score == "top2_sum", "groups are scored by 'max' or 'top2_sum'");
  const int64_t count = self.buffer(logits)->width, top_k = self.buffer(ids)->width;
  require(self.buffer(weights)->width == top_k, "a token has as many weights as experts");
  require(0 < top_groups && top_groups <= num_groups && count % num_groups == 0, "the groups do not fit the experts");
  require(top_k <= count / num_groups * top_groups, "a token has more experts than are in its groups");
  self.tape().need_scratch(Route::scratch_bytes(count));
  const Route::Options options{top_k,     scoring == "softmax", normalize, scale, num_groups, top_groups,
                               group_score == "top2_sum", reinterpret_cast<const float*>(bias)};
  const Route::Operands operands{self.buffer(logits), self.buffer(ids), self.buffer(weights)};
  self.tape().add(std::make_unique<Route>(options, operands));
}

// The matrices and biases are those of the first expert. `limit` > 0: the clamped gate of kernels/types.h.
template <class Builder>
void experts(Builder& self, int64_t num_experts, const NativeMatrix& gate_up, const NativeMatrix& down, int x, int ids,
             int weights, int out, const std::string& activation, float limit, float alpha, uintptr_t gate_up_bias,
             uintptr_t down_bias) {
  require(num_experts >= self.buffer(ids)->width, "a token has more experts than there are");
  require(gate_up.matrix.inputs == self.buffer(x)->width && down.matrix.outputs == self.buffer(out)->width &&
              down.matrix.inputs <= gate_up.matrix.num_panels * kPanel / 2,
          "the experts' matrices do not fit their rows");
  const auto product = [](const NativeMatrix& matrix, EpilogueKind kind, uintptr_t bias) {
    return Experts::Product{matrix.matrix, {kind, {}, 0.0f, reinterpret_cast<const float*>(bias), nullptr, 0}};
  };
  Experts::Product first = product(gate_up, EpilogueKind::gate, gate_up_bias);
  first.epilogue.activation = activation_of(activation);
  first.epilogue.limit = limit;
  first.epilogue.alpha = alpha;
  const Experts::Operands operands{self.buffer(x), self.buffer(ids), self.buffer(weights), self.buffer(out)};
  self.tape().add(std::make_unique<Experts>(num_experts, first, product(down, EpilogueKind::store, down_bias), operands,
                                            self.tape().experts_memory(), self.tape().deterministic()));
}

template <class Builder>
void bind(nanobind::class_<Builder>& tape) {
  using namespace nanobind::literals;
  tape.def("route", &route<Builder>, "logits"_a, "ids"_a, "weights"_a, "scoring"_a, "normalize"_a, "scale"_a,
           "num_groups"_a = 1, "top_groups"_a = 1, "group_score"_a = "max", "bias"_a = 0)
      .def("experts", &experts<Builder>, "num_experts"_a, "gate_up"_a, "down"_a, "x"_a, "ids"_a, "weights"_a,
           "out"_a, "activation"_a, "limit"_a = 0.0f, "alpha"_a = 0.0f, "gate_up_bias"_a = 0, "down_bias"_a = 0);
}

}  // namespace ridgeline::expert_bindings
