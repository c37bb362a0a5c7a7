// A step's arrays as Python hands them over.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bind/arguments.h"
#include "runtime/step.h"

namespace ridgeline {

// The options of the rows to draw, as they are when a step begins.
struct DrawArrays {
  const int64_t* logit_row;
  const float* temperature;
  const int32_t* top_k;
  const double *top_p, *min_p;
  const uint64_t *seed, *num_output;
  size_t count = 0;
};

// A step's arrays, checked against one another and kept alive.
//
// Decoding writes one step after the other into the arrays of the same batch, whose fields are frozen: it is read once.
class StepArrays {
 public:
  // Reads a ridgeline.backends.step.StepBatch, where it is not the last one, and with `draws` its rows to draw.
  Step& read(nanobind::handle batch, bool draws);
  const std::vector<SampleRow>& draws() const { return draws_; }

 private:
  void read_step(nanobind::handle batch);
  void read_draws(nanobind::handle draws);
  void fill_draws();

  nanobind::object batch_;
  Step step_{};
  DrawArrays draw_arrays_{};
  std::vector<nanobind::object> owners_;
  std::vector<SampleRow> draws_;
};

}  // namespace ridgeline
