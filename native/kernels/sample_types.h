// What the sampling kernel decides from; filled by the step's caller, one struct per row that is decided natively.
#pragma once

#include <cstdint>

namespace ridgeline {

// Options of one row. `token` is the decision, -1 where no logit is finite.
struct SampleRow {
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: all
  float top_p;        // 1: all
  float min_p;        // 0: all
  uint64_t seed;
  uint64_t num_output;
  int64_t logit_row;
  int64_t token;
};

}  // namespace ridgeline
