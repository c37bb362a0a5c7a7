#include "runtime/chain.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace ridgeline {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

struct Group {
  std::vector<int64_t> slots, tables, first_token;
};

// The arrays of the steps behind the first, of one token a row, moved on token by token. A row that has ended computes
// token 0 until its length is reached: its slots are its own.
class Chain {
 public:
  Chain(const Step& first, const ChainOptions& options)
      : first_(first), step_(first), options_(options), count_((size_t)first.num_sample_rows) {
    require(count_ > 0 && !first.adapters && !first.num_echoes, "a chain has neither adapters nor echoes");
    indices_.resize(count_);
    std::iota(indices_.begin(), indices_.end(), 0);
    ones_.assign(count_, 1);
    tokens_.resize(count_);
    ended_.resize(count_);
    rows_.assign(first.sample_rows, first.sample_rows + count_);
    groups_.resize(first.groups.size());
    int64_t span = 0;
    for (size_t i = 0; i < count_; i++, span++) {
      last_rows_.push_back(first.logit_rows[first.sample_rows[i].logit_row]);
      while (span < first.num_spans && first.span_start[span] + first.span_length[span] - 1 != last_rows_[i]) span++;
      require(span < first.num_spans, "in a chain the rows to sample are of last tokens, in order");
      const bool falls = i == 0 || options.lengths[i] <= options.lengths[i - 1];
      require(options.lengths[i] > 0 && falls, "of a chain the longest rows come first");
      ends_.push_back(first.kv_length[span]);
      for (size_t g = 0; g < groups_.size(); g++) take_table(g, span, i);
    }
    for (SampleRow& row : rows_) row.logit_row = &row - rows_.data();
  }

  int64_t run(Tape& tape) {
    int64_t highest = first_.highest_slot();
    feed(tape);
    run_step(tape, first_, 0);
    point();
    for (int64_t k = 1; k < options_.lengths[0]; k++) {
      int64_t left = 0;
      while (left < (int64_t)count_ && options_.lengths[left] > k) left++;
      step_.num_tokens = step_.num_spans = step_.num_rows = step_.num_sample_rows = left;
      for (int64_t i = 0; i < left; i++) highest = std::max(highest, move_on((size_t)i, k));
      run_step(tape, step_, k);
    }
    return highest;
  }

 private:
  // The table of a span, as long as the longest of the step.
  void take_table(size_t g, int64_t span, size_t i) {
    const GroupInputs& from = first_.groups[g];
    const int64_t last = ends_[i] + options_.lengths[i] - 2 - from.first_token[span];
    require(last >= 0 && last / options_.block_size < from.table_width, "a chain goes beyond its blocks");
    const int64_t* table = from.tables + span * from.table_width;
    groups_[g].tables.insert(groups_[g].tables.end(), table, table + from.table_width);
    groups_[g].first_token.push_back(from.first_token[span]);
    groups_[g].slots.push_back(0);
  }

  void point() {
    positions_.assign(ends_.begin(), ends_.end());
    step_.token_ids = tokens_.data();
    step_.positions = positions_.data();
    step_.logit_rows = step_.span_start = indices_.data();
    step_.span_length = step_.bidirectional_block = ones_.data();
    step_.kv_length = ends_.data();
    step_.sample_rows = rows_.data();
    step_.has_masks = false;
    for (size_t g = 0; g < groups_.size(); g++)
      step_.groups[g] = {groups_[g].slots.data(), groups_[g].tables.data(), step_.groups[g].table_width,
                         groups_[g].first_token.data()};
  }

  // Buffers only shrink behind the first step, so what is written between two steps stays where the next one reads it.
  void feed(Tape& tape) {
    const ChainOptions& o = options_;
    if (!o.features) return;
    Step tokens = first_;
    tokens.num_rows = tokens.num_sample_rows = 0;
    o.fold->run(tokens, 0, 0, nullptr);  // sizes the buffers
    for (int64_t t = 0; t < tokens.num_tokens; t++)
      std::copy_n(o.first + t * o.unfolded->width, o.unfolded->width, o.unfolded->row(t));
    o.fold->run(tokens, 0, o.fold->size(), nullptr);
    tape.run(first_, 0, 0, nullptr);
    for (int64_t t = 0; t < tokens.num_tokens; t++)
      std::copy_n(o.folded->row(t), o.features->width, o.features->row(t));
  }

  // Makes row `i` that of the token which it sampled last; returns the highest slot that it writes.
  int64_t move_on(size_t i, int64_t k) {
    const int64_t position = ends_[i], size = options_.block_size;
    int64_t highest = 0;
    positions_[i] = position;
    ends_[i]++;
    rows_[i].num_output++;
    for (size_t g = 0; g < groups_.size(); g++) {
      const int64_t at = position - groups_[g].first_token[i];
      groups_[g].slots[i] = step_.groups[g].tables[(int64_t)i * step_.groups[g].table_width + at / size] * size + at % size;
      highest = std::max(highest, groups_[g].slots[i]);
    }
    if (Buffer* const to = options_.features)
      std::copy_n(options_.feedback->row(k == 1 ? last_rows_[i] : (int64_t)i), to->width, to->row((int64_t)i));
    return highest;
  }

  // Computes a step, the k-th, and takes in what it has sampled.
  void run_step(Tape& tape, const Step& step, int64_t k) {
    const auto left = (size_t)step.num_sample_rows;
    for (size_t i = 0; options_.told && i < left; i++)
      if (step.sample_rows[i].temperature > 0)
        step.sample_rows[i].told = options_.told + (k * (int64_t)count_ + (int64_t)i) * options_.told_stride;
    tape.run(step, 0, tape.size(), nullptr);
    for (size_t i = 0; i < count_; i++) {
      int64_t token = i < left ? step.sample_rows[i].token : -1;
      if (token >= 0 && options_.token_ids) token = options_.token_ids[token];
      ended_[i] = ended_[i] || token < 0 || token >= options_.vocab_size;
      tokens_[i] = ended_[i] ? 0 : token;
      options_.tokens[k * (int64_t)count_ + (int64_t)i] = ended_[i] ? -1 : token;
    }
  }

  const Step& first_;
  Step step_;
  const ChainOptions& options_;
  const size_t count_;
  std::vector<int64_t> indices_, ones_, last_rows_, tokens_, positions_, ends_;
  std::vector<Group> groups_;
  std::vector<SampleRow> rows_;
  std::vector<bool> ended_;
};

}  // namespace

int64_t run_chain(Tape& tape, const Step& step, const ChainOptions& options) {
  return Chain(step, options).run(tape);
}

}  // namespace ridgeline
