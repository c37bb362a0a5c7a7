// A step, and further ones that compute what it and they have sampled: how a drafter goes on by itself.
#pragma once

#include "runtime/tape.h"

namespace ridgeline {

struct ChainOptions {
  const int64_t* lengths;    // [D] tokens to sample from each row, none more than from the row before
  int64_t* tokens;           // [steps, D] gets what was sampled; -1 from where a row's tokens end
  int64_t block_size;        // of the cache: the tables have blocks for all steps
  const int64_t* token_ids;  // [V] what is meant by the ids that are sampled; null: these themselves
  int64_t vocab_size;        // a token from here on ends its row
  Buffer* features;          // what the program reads beside tokens, or null
  const Buffer* feedback;    // what it reads in the step behind one
  Tape* fold;                // computes what it reads in the first step, `folded`, from `unfolded`
  const Buffer *folded, *unfolded;
  const float* first;        // [T, width of `unfolded`]
  float* told;               // [steps, D, told_stride] gets what rows at a temperature are sampled from, or null
  int64_t told_stride;
};

// The rows to sample of `step` are of the last tokens of some of its spans, in order. Throws std::invalid_argument where
// they are not, and where tables are too short. Returns the highest slot that was written, or 0.
int64_t run_chain(Tape& tape, const Step& step, const ChainOptions& options);

}  // namespace ridgeline
