// One step's inputs as raw pointers: ridgeline.backends.step.StepBatch without Python. Everything belongs to the caller.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/sample/types.h"
#include "kernels/types.h"

namespace ridgeline {

// The echoes of a step from the first one of a token on.
class Echoes {
 public:
  Echoes(int64_t count, const int64_t* rows, const int64_t* slots) : rows_(rows), slots_(slots), count_(count) {}

  // Calls write(slot) for every echo of `token`, in order. Tokens come in order as well.
  template <class Write>
  void of(int64_t token, Write write) {
    for (; next_ < count_ && rows_[next_] <= token; next_++)
      if (rows_[next_] == token) write(slots_[next_]);
  }

 private:
  const int64_t *rows_, *slots_;
  int64_t count_, next_ = 0;
};

struct GroupInputs {
  const int64_t* write_slots;  // [T]
  const int64_t* tables;       // [S, table_width]
  int64_t table_width;
  const int64_t* first_token;  // [S]
  const int64_t* echo_slots = nullptr;  // [E]
};

struct Step {
  int64_t num_tokens, num_spans, num_rows;
  const int64_t* token_ids;   // [T]
  const int64_t* positions;   // [T]
  const int64_t* logit_rows;  // [R]
  const int64_t* span_start;  // [S]
  const int64_t* span_length;
  const int64_t* kv_length;
  const int64_t* bidirectional_block;
  const int64_t* adapters;    // [T], or null: no token has one
  std::vector<GroupInputs> groups;
  int64_t num_echoes;
  const int64_t* echo_rows;  // [E] tokens, in order, whose keys and values are stored a second time
  float* logits;  // [R, logits_stride]
  int64_t logits_stride;
  SampleRow* sample_rows;
  int64_t num_sample_rows;
  bool has_masks;  // whether rows are sampled through masks, which may be written until a caller that is late comes

  // The highest slot of the cache that the step writes, or 0.
  int64_t highest_slot() const {
    int64_t highest = 0;
    for (const GroupInputs& group : groups) {
      for (int64_t t = 0; t < num_tokens; t++) highest = std::max(highest, group.write_slots[t]);
      for (int64_t e = 0; e < num_echoes; e++) highest = std::max(highest, group.echo_slots[e]);
    }
    return highest;
  }

  Echoes echoes(int32_t group) const { return {num_echoes, echo_rows, groups[(size_t)group].echo_slots}; }

  SpanView span(int64_t index, const GroupInputs& group) const {
    return {span_start[index],         span_length[index],
            kv_length[index],          group.first_token[index],
            group.tables + index * group.table_width, bidirectional_block[index]};
  }
};

// The largest step that a tape may be given, and the longest context in it.
struct StepLimits {
  int64_t num_tokens, num_spans, num_rows, context;
};

}  // namespace ridgeline
