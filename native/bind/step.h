// A step's arrays as Python hands them over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "runtime/step.h"

namespace ridgeline {

template <class T, size_t Dims>
using Array = nanobind::ndarray<T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;

// Throws std::invalid_argument.
void require(bool holds, const char* message);

// The step's arrays, checked against one another, for as long as one step runs.
struct StepArrays {
  Step step{};
  std::vector<nanobind::object> owners;
  std::vector<SampleRow> draws;
};

// Reads a ridgeline.backends.step.StepBatch.
void read_step(nanobind::handle batch, StepArrays& arrays);
// Reads a ridgeline.backends.step.DrawRows, after the step.
void read_draws(nanobind::handle draws, StepArrays& arrays);

}  // namespace ridgeline
