#include "bind/step.h"

#include <algorithm>

namespace ridgeline {
namespace {

constexpr int64_t VERSION = 3;  // BLOCK_VERSION of backends/step.py
constexpr size_t HEADER_WORDS = 11;

// Takes arrays off the front of a block, in the order of StepBatch's fields.
class Words {
 public:
  Words(const int64_t* begin, size_t count) : at_(begin), end_(begin + count) {}

  const int64_t* take(int64_t count) {
    require(count >= 0 && count <= end_ - at_, "a step's block is shorter than its header says");
    const int64_t* taken = at_;
    at_ += count;
    return taken;
  }

  template <class T>
  const T* take_as(int64_t count) {
    static_assert(sizeof(T) == sizeof(int64_t));
    return reinterpret_cast<const T*>(take(count));
  }

  bool empty() const { return at_ == end_; }

 private:
  const int64_t *at_, *end_;
};

struct TemperatureAndTopK {
  float temperature;
  int32_t top_k;
};

void read_sample_rows(Words& words, const int64_t* header, int64_t num_rows, std::vector<SampleRow>* rows) {
  const int64_t count = header[4], num_masks = header[8], mask_words = header[9];
  const int64_t* logit_row = words.take(count);
  const auto* pairs = words.take_as<TemperatureAndTopK>(count);
  const double* top_p = words.take_as<double>(count);
  const double* min_p = words.take_as<double>(count);
  const uint64_t* seed = words.take_as<uint64_t>(count);
  const uint64_t* num_output = words.take_as<uint64_t>(count);
  const int64_t* mask_row = words.take(count);
  require(mask_words >= 0 && num_masks >= 0 && (mask_words == 0 || num_masks <= INT64_MAX / 8 / mask_words),
          "a step's masks are larger than any block");
  const uint64_t* masks = words.take_as<uint64_t>(num_masks * mask_words);
  if (!rows) return;
  for (int64_t i = 0; i < count; i++) {
    require(logit_row[i] >= 0 && logit_row[i] < num_rows, "a row to sample is not a row of logits");
    SampleRow& row = rows->emplace_back(SampleRow{});
    row.temperature = pairs[i].temperature;
    row.top_k = pairs[i].top_k;
    row.top_p = static_cast<decltype(row.top_p)>(top_p[i]);
    row.min_p = static_cast<decltype(row.min_p)>(min_p[i]);
    row.seed = seed[i];
    row.num_output = num_output[i];
    row.logit_row = logit_row[i];
    row.token = -1;
    require(mask_row[i] < num_masks, "a row to sample has a mask that is not there");
    if (mask_row[i] < 0) continue;
    row.mask = masks + mask_row[i] * mask_words;
    row.mask_words = mask_words;
  }
}

}  // namespace

void add_trials(const Array<const int64_t, 2>& rows, const Array<const float, 2>& weights,
                std::vector<SampleRow>& sample_rows, std::vector<Trial>& trials) {
  const size_t count = rows.shape(0), width = weights.shape(1);
  require(rows.shape(1) == 3 && weights.shape(0) == count, "a trial is a row, a token and a length, with its weights");
  trials.clear();
  trials.reserve(count);
  int64_t next = -1, left = 0;  // of a block: its next row, and how many there are
  for (size_t k = 0; k < count; k++) {
    const int64_t* trial = rows.data() + 3 * k;
    const float* const from = weights.data() + k * width;
    require(trial[0] >= 0 && trial[0] < (int64_t)sample_rows.size(), "a drafted token is not one of a row to sample");
    require(trial[1] >= 0 && trial[1] < (int64_t)width && from[trial[1]] > 0, "a drafted token has no weight");
    require(sample_rows[(size_t)trial[0]].temperature > 0, "a greedy row has no trial");
    require(left > 0 ? trial[0] == next && trial[2] == -1 : trial[2] >= 0 && trial[2] <= kMaxBlock,
            "the rows that are verified together follow each other");
    left = left > 0 ? left - 1 : trial[2] > 0 ? trial[2] - 1 : 0;
    next = trial[0] + 1;
    trials.push_back({trial[1], from, (int64_t)width, trial[2]});
    sample_rows[(size_t)trial[0]].trial = &trials.back();
  }
  require(left == 0, "the rows that are verified together follow each other");
}

Step& StepReader::read(const Array<const int64_t, 1>& block, bool samples) {
  Words words(block.data(), block.shape(0));
  const int64_t* header = words.take(HEADER_WORDS);
  require(header[0] == VERSION, "a step's block is of another version than this native module: build it again");
  step_.num_tokens = header[1];
  step_.num_spans = header[2];
  step_.num_rows = header[3];
  const int64_t num_copies = header[5], num_groups = header[6];
  const int64_t* widths = words.take(num_groups);
  step_.token_ids = words.take(step_.num_tokens);
  step_.positions = words.take(step_.num_tokens);
  step_.adapters = header[7] ? words.take(step_.num_tokens) : nullptr;
  step_.logit_rows = words.take(step_.num_rows);
  step_.span_start = words.take(step_.num_spans);
  step_.span_length = words.take(step_.num_spans);
  step_.kv_length = words.take(step_.num_spans);
  step_.bidirectional_block = words.take(step_.num_spans);
  require(std::all_of(step_.bidirectional_block, step_.bidirectional_block + step_.num_spans,
                      [](int64_t run) { return run > 0; }),
          "bidirectional_block_S must be at least 1");
  step_.num_echoes = header[10];
  step_.groups.clear();
  for (int64_t g = 0; g < num_groups; g++) {
    require(widths[g] >= 0 && widths[g] <= (int64_t)block.shape(0), "a step's block is shorter than its header says");
    GroupInputs& group = step_.groups.emplace_back();
    group.write_slots = words.take(step_.num_tokens);
    group.first_token = words.take(step_.num_spans);
    group.tables = words.take(step_.num_spans * widths[g]);
    group.table_width = widths[g];
    group.echo_slots = words.take(step_.num_echoes);
  }
  for (int column = 0; column < 3; column++) words.take(num_copies);  // made before the tape runs
  sample_rows_.clear();
  read_sample_rows(words, header, step_.num_rows, samples ? &sample_rows_ : nullptr);
  step_.echo_rows = words.take(step_.num_echoes);
  for (int64_t e = 0; e < step_.num_echoes; e++)
    require(step_.echo_rows[e] >= (e ? step_.echo_rows[e - 1] : 0) && step_.echo_rows[e] < step_.num_tokens,
            "a step's echoes are of its tokens, in order");
  require(words.empty(), "a step's block is longer than its header says");
  step_.sample_rows = sample_rows_.data();
  step_.num_sample_rows = (int64_t)sample_rows_.size();
  step_.has_masks = header[8] > 0;
  return step_;
}

void StepReader::verify(const Array<const int64_t, 2>& rows, const Array<const float, 2>& weights) {
  add_trials(rows, weights, sample_rows_, trials_);
}

}  // namespace ridgeline
