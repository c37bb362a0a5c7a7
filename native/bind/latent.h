// The tape's instructions for latent attention, for bind/runtime.cpp. `Builder` has the tape, and its buffers by number.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bind/arguments.h"
#include "bind/matrix.h"
#include "runtime/latent.h"

namespace ridgeline::latent_bindings {

using namespace nanobind::literals;

template <class Builder>
void latent_write(Builder& at, int latent, int key, const KvMemory& memory, int group) {
  const KvLayout& layout = memory.layout;
  const Buffer *latents = at.buffer(latent), *keys = at.buffer(key);
  require(layout.values_in_keys && latents->width == layout.value_dim &&
              latents->width + keys->width == layout.head_dim,
          "a latent and its key are what the cache keeps");
  at.tape().add(std::make_unique<LatentWrite>(latents, keys, memory, group));
}

template <class Builder>
void latent_attention(Builder& at, int num_heads, float scale, const NativeMatrix& absorb, const NativeMatrix& expand,
                      const KvMemory& memory, int group, int q, int out) {
  const KvLayout& layout = memory.layout;
  const int64_t rope = layout.head_dim - layout.value_dim;
  const LatentSizes sizes{num_heads, layout.value_dim, rope, at.buffer(q)->width / num_heads - rope,
                          at.buffer(out)->width / num_heads};
  require(layout.values_in_keys && sizes.nope > 0 && sizes.key() <= kMaxHeadDim && sizes.value <= kMaxHeadDim,
          "latent attention has a latent cache, and keys and values of up to 576 entries");
  require(absorb.matrix.inputs == sizes.nope && absorb.matrix.num_panels == num_heads * sizes.latent_panels() &&
              expand.matrix.inputs == sizes.latent &&
              expand.matrix.num_panels == num_heads * (sizes.nope_panels() + sizes.value_panels()),
          "the matrices of latent attention have whole panels for every head");
  LatentPlan* plan = at.tape().add_latent_plan({sizes, layout.kind, group, layout.block_size});
  at.tape().add(std::make_unique<LatentAttention>(LatentWeights{absorb.matrix, expand.matrix}, scale, memory, plan,
                                                  at.buffer(q), at.buffer(out)));
}

template <class Builder>
void bind(nanobind::class_<Builder>& tape) {
  tape.def("latent_write", &latent_write<Builder>, "latent"_a, "key"_a, "memory"_a, "group"_a)
      .def("latent_attention", &latent_attention<Builder>, "num_heads"_a, "scale"_a, "absorb"_a, "expand"_a, "memory"_a,
           "group"_a, "q"_a, "out"_a);
}

}  // namespace ridgeline::latent_bindings
