// Rows of a tape's buffers that a step leaves to Python, side by side.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "bind/arguments.h"
#include "runtime/tape.h"

namespace ridgeline {

class Retained {
 public:
  using Place = std::optional<Array<float, 2>>;  // [T, width]

  void add(const Buffer* buffer) {
    require(buffer->rows == Rows::tokens, "rows that are retained are those of tokens");
    buffers_.push_back(buffer);
    width_ += buffer->width;
  }

  void check(const Place& place, int64_t num_tokens) const {
    require(!place || ((int64_t)place->shape(0) == num_tokens && (int64_t)place->shape(1) == width_),
            "what is retained is a row for each token");
  }

  // Without the GIL: nothing but the place's memory is touched, behind what it has of steps of as many tokens before.
  void write(const Place& place, int64_t num_tokens, int64_t steps_before = 0) const {
    float* to = place ? place->data() + steps_before * num_tokens * width_ : nullptr;
    for (int64_t t = 0; place && t < num_tokens; t++)
      for (const Buffer* buffer : buffers_) to = std::copy_n(buffer->row(t), buffer->width, to);
  }

 private:
  std::vector<const Buffer*> buffers_;
  int64_t width_ = 0;
};

}  // namespace ridgeline
