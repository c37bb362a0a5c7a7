// Steps of a tape between two calls from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>

#include "bind/arguments.h"
#include "bind/retained.h"

namespace ridgeline {

using Trials = std::pair<Array<const int64_t, 2>, Array<const float, 2>>;

// What a step that was started reads and writes.
struct Started {
  Array<const int64_t, 1> block;
  Array<float, 2> logits;
  Array<int64_t, 1> sampled;
  Retained::Place retained;
  std::optional<Trials> trials;
};

// One that goes on from its tokens, which are written into its block once `check` has looked at them.
struct Following {
  Started step;
  int64_t* block;
  std::optional<nanobind::callable> check;
};

}  // namespace ridgeline
