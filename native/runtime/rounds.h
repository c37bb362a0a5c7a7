// A step that verifies drafted tokens, and further ones: a drafter goes on from what came of each.
#pragma once

#include <functional>
#include <limits>

#include "lookup/suffix_index.h"
#include "runtime/chain.h"

namespace ridgeline {

// What a drafter computes with; its rows are those of the spans of the step that verifies. Or without a tape the texts
// of the spans, in which drafts are looked up: rounds end where one has no draft, or one of which most is wrong. With
// a tape rounds end where one of the texts, if any are given, has as long a match as is looked up instead; of a single
// span what follows there is verified at once, `limits.max_tokens` of it, if that is not 0, and the drafter goes on
// behind it.
struct RoundsDrafter {
  std::vector<SuffixIndex*> texts;
  LookupLimits limits;
  const int64_t* min_matched;  // [S] tokens, of texts beside a tape
  Tape* tape;
  ChainOptions chain;  // but for `lengths`, `tokens` and `first`
  std::vector<GroupInputs> groups;  // tables and `first_token` of its cache, with blocks for all rounds
  const int64_t* begins;            // [S] position of the model at which the drafter's text begins
  int64_t max_final;                 // computed tokens of a draft that stay where they were right, at most
  float* logits;                    // [S, logits_stride]
  int64_t logits_stride;
};

struct RoundsOptions {
  int64_t max_rounds;
  int64_t block_size;      // of the model's cache: the tables have blocks for all rounds
  const int64_t* room;     // [S] tokens that a span's text may gain: no round begins that could bring more
  const int64_t* stops;    // [num_stops, 2] a span, and a token that ends it: no round begins behind one
  int64_t num_stops;
  double max_s;            // from when no further round begins, where a tape may look up
  const int64_t* hurry;    // 1 from when no further round is to begin; any thread writes it
  float* taps;             // [T, taps_width] gets, of each step, what the drafter reads; or null: of the longest step
  int64_t taps_width;
  std::function<void(int64_t, int64_t)> tap;  // writes them behind a round, of so many tokens
  int64_t* token_ids;      // [max_rounds, width] gets the tokens of each step
  int64_t* sampled;        // [max_rounds, width] gets what was sampled from its rows
  int64_t width;           // T, or tokens of the longest step
  // [max_rounds, 2] gets the tokens of a step, and the match whose drafts it has; where a drafter's had one before it, of
  // m tokens, -1 - m; or 0. Or null.
  int64_t* told;
  uint64_t proposal;       // what is other in the seeds of drafts that are verified by rejection
  int64_t plain_round;     // from which, of a single span, one has no drafts if none are looked up: it is timed; or 0
};

struct RoundsRun {
  int64_t num_rounds = 0, highest_slot = 0, drafter_highest_slot = 0;
  double seconds = 0;   // of all
  double lookup_s = 0;  // of the steps whose drafts were looked up beside a tape, and of what it computed behind them
  double plain_s = 0;   // of the step that had no drafts
};

// Every token of `step` has a row of logits, and is sampled from in this order: the first of a span is known, the others
// are drafted; where they have trials, a drafter's of later rounds do, each of its own. Throws std::invalid_argument
// where that is not so, and where tables are too short.
RoundsRun run_rounds(Tape& tape, const Step& step, const RoundsDrafter& drafter, const RoundsOptions& options);

}  // namespace ridgeline
