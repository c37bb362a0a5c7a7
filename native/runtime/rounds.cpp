#include "runtime/rounds.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>

namespace ridgeline {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// The slots of positions `begin .. end` of a span.
void add_slots(const GroupInputs& group, int64_t span, int64_t block_size, int64_t begin, int64_t end,
               std::vector<int64_t>& slots) {
  const int64_t first = group.first_token[span];
  require(begin >= first && (end - 1 - first) / block_size < group.table_width, "rounds go beyond their blocks");
  const int64_t* table = group.tables + span * group.table_width;
  for (int64_t at = begin - first; at < end - first; at++)
    slots.push_back(table[at / block_size] * block_size + at % block_size);
}

// One span of the step that verifies, and what came of it.
struct Verified {
  int64_t first_row, num_drafted;
  int64_t position;   // of its first token
  int64_t num_valid;  // drafted tokens that are some: the others are never right
  int64_t num_right = 0, gained = 0;
  bool by_rejection = false;
};

class Rounds {
 public:
  Rounds(Tape& tape, const Step& step, const RoundsDrafter& drafter, const RoundsOptions& options)
      : tape_(tape), step_(step), drafter_(drafter), options_(options) {
    const auto spans = (size_t)step.num_spans;
    require(spans && !step.adapters && !step.num_echoes && !step.has_masks, "rounds have neither adapters nor masks");
    require(step.num_rows == step.num_tokens && step.num_sample_rows == step.num_tokens, "all tokens are sampled from");
    rows_.assign(step.sample_rows, step.sample_rows + step.num_sample_rows);
    for (int64_t t = 0; t < step.num_tokens; t++) {
      const Trial* trial = rows_[(size_t)t].trial;
      require(step.logit_rows[t] == t && rows_[(size_t)t].logit_row == t, "tokens are sampled from in their order");
      require(!trial || (drafter.tape && trial->block == 0), "a drafter's tokens alone have trials, one by one");
    }
    for (size_t s = 0; s < spans; s++) {
      const int64_t first = step.span_start[s], drafted = step.span_length[s] - 1;
      require(drafted > 0 && step.bidirectional_block[s] == 1, "every span has drafted tokens");
      spans_.push_back({first, drafted, step.positions[first], drafted});
      spans_.back().by_rejection = rows_[(size_t)first].trial;
    }
    tokens_.assign(step.token_ids, step.token_ids + step.num_tokens);
    positions_.assign(step.positions, step.positions + step.num_tokens);
    ends_.assign(step.kv_length, step.kv_length + spans);
    order_.resize(spans);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t a, size_t b) { return spans_[a].num_drafted > spans_[b].num_drafted; });
    for (const size_t s : order_) lengths_.push_back(spans_[s].num_drafted);
    slots_.resize(step.groups.size());
    drafted_.resize((size_t)lengths_[0] * spans);
    if (drafter.tape) arrange_drafter();
  }

  RoundsRun run() {
    RoundsRun done;
    for (;; done.num_rounds++) {
      done.highest_slot = std::max(done.highest_slot, step_.highest_slot());
      verify(done.num_rounds);
      if (done.num_rounds + 1 == options_.max_rounds || ends()) break;
      if (drafter_.tape ? repeats() : !look_up()) break;
      if (drafter_.tape) done.drafter_highest_slot = std::max(done.drafter_highest_slot, draft());
      move_on();
    }
    done.num_rounds++;
    return done;
  }

 private:
  // What of the drafter's first step is the same in each round.
  void arrange_drafter() {
    const auto spans = spans_.size();
    own_slots_.resize(drafter_.groups.size());
    for (const GroupInputs& from : drafter_.groups) {
      auto& [tables, first_token] = own_tables_.emplace_back();
      for (const size_t s : order_) {
        const int64_t* table = from.tables + (int64_t)s * from.table_width;
        tables.insert(tables.end(), table, table + from.table_width);
        first_token.push_back(from.first_token[s]);
      }
      own_.groups.push_back({nullptr, tables.data(), from.table_width, first_token.data()});
    }
    own_.num_spans = own_.num_rows = own_.num_sample_rows = (int64_t)spans;
    own_.adapters = nullptr;
    own_.num_echoes = 0;
    own_.has_masks = false;
    own_.logits = drafter_.logits;
    own_.logits_stride = drafter_.logits_stride;
    ones_.assign(spans, 1);
    if (std::none_of(spans_.begin(), spans_.end(), [](const Verified& span) { return span.by_rejection; })) return;
    trials_.resize(drafted_.size());
    told_.resize(drafted_.size() * (size_t)drafter_.chain.told_stride);
    if (drafter_.chain.token_ids) weights_.resize(drafted_.size() * (size_t)drafter_.chain.vocab_size);
  }

  // Computes a step, and takes in which of its drafted tokens were right.
  void verify(int64_t round) {
    step_.sample_rows = rows_.data();
    tape_.run(step_, 0, tape_.size(), nullptr);
    if (options_.tap) options_.tap(round);
    const int64_t count = step_.num_tokens;
    int64_t* const token_ids = options_.token_ids + round * count;
    std::copy_n(step_.token_ids, count, token_ids);
    int64_t* const sampled = options_.sampled + round * count;
    for (int64_t t = 0; t < count; t++) sampled[t] = rows_[(size_t)t].token;
    sampled_ = sampled;
    for (Verified& span : spans_) {
      const int64_t first = span.first_row;
      std::fill(token_ids + first + 1 + span.num_valid, token_ids + first + 1 + span.num_drafted, -1);
      int64_t right = 0;
      while (right < span.num_valid && sampled_[first + right] == step_.token_ids[first + right + 1]) right++;
      span.num_right = right;
      span.gained += right + 1;
    }
  }

  // Whether nothing is to come behind what was verified.
  bool ends() const {
    if (std::atomic_ref(*const_cast<int64_t*>(options_.hurry)).load()) return true;
    for (size_t s = 0; s < spans_.size(); s++) {
      const Verified& span = spans_[s];
      if (span.gained + span.num_drafted + 1 > options_.room[s]) return true;
      for (int64_t i = 0; i <= span.num_right; i++) {
        const int64_t token = sampled_[span.first_row + i];
        if (token < 0 || token >= drafter_.chain.vocab_size) return true;
        for (int64_t k = 0; k < options_.num_stops; k++)
          if (options_.stops[2 * k] == (int64_t)s && options_.stops[2 * k + 1] == token) return true;
      }
    }
    return false;
  }

  // What may follow what came of a span, by its text.
  LookupDraft found(size_t s, int64_t max_tokens) {
    const Verified& span = spans_[s];
    const std::vector<int32_t> came(sampled_ + span.first_row, sampled_ + span.first_row + span.num_right + 1);
    drafter_.texts[s]->extend(came.data(), (int64_t)came.size());
    return drafter_.texts[s]->find_own({(int)max_tokens, drafter_.limits.factor, drafter_.limits.min_probability});
  }

  // Whether a text repeats itself at such length that more is gained by looking up than by the drafter.
  bool repeats() {
    bool any = false;
    for (size_t s = 0; s < drafter_.texts.size(); s++) {
      const LookupDraft draft = found(s, 1);
      any = any || (draft.agreement == 1 && draft.num_matched >= drafter_.min_matched[s]);
    }
    return any;
  }

  // Looks up drafts behind what came; false where none are worth a round.
  bool look_up() {
    const size_t count = order_.size();
    bool all = true;
    for (size_t r = 0; r < count; r++) {
      const Verified& span = spans_[order_[r]];
      const std::vector<int32_t> tokens = found(order_[r], span.num_drafted).tokens;
      all = all && 2 * span.num_right >= span.num_valid && 2 * (int64_t)tokens.size() >= span.num_drafted;
      for (size_t k = 0; k < (size_t)span.num_drafted; k++) drafted_[k * count + r] = k < tokens.size() ? tokens[k] : -1;
    }
    return all;
  }

  // Has the drafter compute what came, and draft behind it; returns the highest slot that it writes.
  int64_t draft() {
    own_tokens_.clear();
    own_positions_.clear();
    own_rows_.clear();
    starts_.clear();
    own_lengths_.clear();
    own_ends_.clear();
    last_.clear();
    features_.clear();
    for (auto& slots : own_slots_) slots.clear();
    for (size_t r = 0; r < order_.size(); r++) add_to_draft(r);
    for (size_t g = 0; g < own_slots_.size(); g++) own_.groups[g].write_slots = own_slots_[g].data();
    own_.num_tokens = (int64_t)own_tokens_.size();
    own_.token_ids = own_tokens_.data();
    own_.positions = own_positions_.data();
    own_.logit_rows = last_.data();
    own_.span_start = starts_.data();
    own_.span_length = own_lengths_.data();
    own_.kv_length = own_ends_.data();
    own_.bidirectional_block = ones_.data();
    own_.sample_rows = own_rows_.data();
    ChainOptions chain = drafter_.chain;
    chain.lengths = lengths_.data();
    chain.tokens = drafted_.data();
    chain.first = features_.data();
    chain.told = told_.empty() ? nullptr : told_.data();
    return run_chain(*drafter_.tape, own_, chain);
  }

  // What the drafter computes of a span: the tokens that came, but for those which it drafted and has computed.
  void add_to_draft(size_t r) {
    const Verified& span = spans_[order_[r]];
    const int64_t was = span.position - drafter_.begins[order_[r]];  // of the newest token, in the drafter's text
    const int64_t num_final = std::min(drafter_.max_final, 1 + std::min(span.num_right, span.num_drafted - 1));
    const int64_t begin = was + num_final, end = was + span.num_right + 2;
    starts_.push_back((int64_t)own_tokens_.size());
    own_lengths_.push_back(end - begin);
    own_ends_.push_back(end);
    for (int64_t i = num_final - 1; i <= span.num_right; i++) {
      own_tokens_.push_back(sampled_[span.first_row + i]);
      own_positions_.push_back(was + i + 1);
      const float* tap = options_.taps + (span.first_row + i) * options_.taps_width;
      if (options_.taps) features_.insert(features_.end(), tap, tap + options_.taps_width);
    }
    last_.push_back((int64_t)own_tokens_.size() - 1);
    SampleRow row = rows_[(size_t)span.first_row];
    row.num_output += (uint64_t)span.num_right + 1;
    row.logit_row = (int64_t)r;
    row.maxima = row.told = nullptr;
    row.trial = nullptr;
    if (span.by_rejection) row.seed ^= options_.proposal;
    own_rows_.push_back(row);
    for (size_t g = 0; g < own_slots_.size(); g++)
      add_slots(own_.groups[g], (int64_t)r, drafter_.chain.block_size, begin, end, own_slots_[g]);
  }

  // Makes the step that of the tokens which came last, with what was drafted behind them.
  void move_on() {
    for (auto& slots : slots_) slots.clear();
    for (size_t r = 0; r < order_.size(); r++) {
      Verified& span = spans_[order_[r]];
      int64_t* const tokens = tokens_.data() + span.first_row;
      tokens[0] = sampled_[span.first_row + span.num_right];
      span.num_valid = 0;
      for (int64_t k = 0; k < span.num_drafted; k++) {
        const int64_t token = drafted_[(size_t)k * order_.size() + r];
        tokens[k + 1] = std::max<int64_t>(token, 0);
        if (token >= 0 && span.num_valid == k) span.num_valid++;
      }
      if (span.by_rejection) add_trials(span, r);
    }
    for (size_t s = 0; s < spans_.size(); s++) {
      Verified& span = spans_[s];
      const int64_t came = span.num_right + 1, end = span.position + came + span.num_drafted + 1;
      span.position += came;
      ends_[s] = end;
      for (int64_t k = 0; k <= span.num_drafted; k++) {
        positions_[(size_t)(span.first_row + k)] = span.position + k;
        rows_[(size_t)(span.first_row + k)].num_output += (uint64_t)came;
      }
      for (size_t g = 0; g < slots_.size(); g++)
        add_slots(step_.groups[g], (int64_t)s, options_.block_size, span.position, end, slots_[g]);
    }
    step_.token_ids = tokens_.data();
    step_.positions = positions_.data();
    step_.kv_length = ends_.data();
    for (size_t g = 0; g < slots_.size(); g++) step_.groups[g].write_slots = slots_[g].data();
  }

  // Has the drafted tokens of the r-th draft verified by what they were sampled from, by the ids of the model.
  void add_trials(const Verified& span, size_t r) {
    const ChainOptions& chain = drafter_.chain;
    for (int64_t k = 0; k < span.num_drafted; k++) {
      const size_t at = (size_t)k * order_.size() + r;
      const float* weights = told_.data() + at * (size_t)chain.told_stride;
      int64_t size = std::min(chain.told_stride, chain.vocab_size);
      if (chain.token_ids) {  // the others stay 0
        float* const by_id = weights_.data() + at * (size_t)chain.vocab_size;
        for (int64_t i = 0; i < chain.told_stride; i++)
          if (chain.token_ids[i] < chain.vocab_size) by_id[chain.token_ids[i]] = weights[i];
        weights = by_id;
        size = chain.vocab_size;
      }
      trials_[at] = {tokens_[(size_t)(span.first_row + k + 1)], weights, size, 0};
      rows_[(size_t)(span.first_row + k)].trial = k < span.num_valid ? &trials_[at] : nullptr;
    }
  }

  Tape& tape_;
  Step step_;
  const RoundsDrafter& drafter_;
  const RoundsOptions& options_;
  std::vector<Verified> spans_;
  std::vector<SampleRow> rows_;
  std::vector<int64_t> tokens_, positions_, ends_;
  std::vector<std::vector<int64_t>> slots_;
  const int64_t* sampled_ = nullptr;  // in the last step

  // The drafter's, the longest drafts first.
  Step own_{};
  std::vector<size_t> order_;
  std::vector<int64_t> lengths_, drafted_, ones_, own_tokens_, own_positions_, starts_, own_lengths_, own_ends_, last_;
  std::vector<SampleRow> own_rows_;
  std::vector<float> features_, told_, weights_;
  std::vector<Trial> trials_;
  std::vector<std::vector<int64_t>> own_slots_;
  std::deque<std::pair<std::vector<int64_t>, std::vector<int64_t>>> own_tables_;
};

}  // namespace

RoundsRun run_rounds(Tape& tape, const Step& step, const RoundsDrafter& drafter, const RoundsOptions& options) {
  return Rounds(tape, step, drafter, options).run();
}

}  // namespace ridgeline
