// A step's inputs as Python hands them over: one block of words.
#pragma once

#include <vector>

#include "bind/arguments.h"
#include "runtime/step.h"

namespace ridgeline {

// Gives the rows to sample their trials, which are written to `trials`: ridgeline.backends.step.Trials. Throws
// std::invalid_argument where they do not fit.
void add_trials(const Array<const int64_t, 2>& rows, const Array<const float, 2>& weights,
                std::vector<SampleRow>& sample_rows, std::vector<Trial>& trials);

// Reads blocks of ridgeline.backends.step.StepBatch, one after the other; what is read points into the last of them.
class StepReader {
 public:
  // The step of `block`, and with `samples` its rows to sample. Throws std::invalid_argument where the sizes in the
  // header are not those of the block.
  Step& read(const Array<const int64_t, 1>& block, bool samples);
  // Makes drafted tokens of rows to sample, as ridgeline.backends.step.Trials has them; they point into `weights`.
  void verify(const Array<const int64_t, 2>& rows, const Array<const float, 2>& weights);
  const std::vector<SampleRow>& sample_rows() const { return sample_rows_; }

 private:
  Step step_{};
  std::vector<SampleRow> sample_rows_;
  std::vector<Trial> trials_;
};

}  // namespace ridgeline
