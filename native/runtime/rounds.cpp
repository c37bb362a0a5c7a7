#include "runtime/rounds.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>

namespace ridgeline {
namespace {

constexpr size_t kMaxPending = 64;  // tokens that a drafter computes at once behind what was looked up

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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
  int64_t num_asked = 0;  // tokens of a draft that the drafter makes
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
      spans_.back().num_asked = drafted;
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
    varies_ = drafter.tape && spans == 1;
    if (!varies_) return;
    looks_up_ = !drafter.texts.empty() && drafter.limits.max_tokens;
    drafted_.resize(std::max(drafted_.size(), (size_t)drafter.limits.max_tokens));
    for (int64_t t = step.num_tokens; t <= drafter.limits.max_tokens; t++) {
      tokens_.push_back(0);
      positions_.push_back(0);
      rows_.push_back(rows_[0]);
      rows_.back().num_output += (uint64_t)t;
      rows_.back().logit_row = t;
      rows_.back().trial = nullptr;
    }
    indices_.resize(rows_.size());
    std::iota(indices_.begin(), indices_.end(), 0);
  }

  RoundsRun run() {
    RoundsRun done;
    for (;;) {
      done.highest_slot = std::max(done.highest_slot, step_.highest_slot());
      const double verified_s = now_s();
      verify();
      if (is_plain_) done.plain_s = now_s() - verified_s;
      tell(done.num_rounds++);
      if (matched_) done.lookup_s += now_s() - verified_s;
      if (done.num_rounds == options_.max_rounds || ends() || !goes_on(done)) break;
      move_on();
    }
    const int64_t one = 1;
    if (matched_ || is_plain_) draft_behind(done, &one);  // what waits is computed
    done.seconds = now_s() - began_s_;
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
  void verify() {
    step_.sample_rows = rows_.data();
    tape_.run(step_, 0, tape_.size(), nullptr);
    sampled_.clear();
    for (int64_t t = 0; t < step_.num_tokens; t++) sampled_.push_back(rows_[(size_t)t].token);
    for (Verified& span : spans_) {
      const int64_t first = span.first_row;
      int64_t right = 0;
      while (right < span.num_valid && sampled_[(size_t)(first + right)] == step_.token_ids[first + right + 1]) right++;
      span.num_right = right;
      span.gained += right + 1;
    }
  }

  // Writes down what the step was, and came to.
  void tell(int64_t round) {
    if (options_.tap) options_.tap(round, step_.num_tokens);
    int64_t* const token_ids = options_.token_ids + round * options_.width;
    std::copy_n(step_.token_ids, step_.num_tokens, token_ids);
    std::copy(sampled_.begin(), sampled_.end(), options_.sampled + round * options_.width);
    for (const Verified& span : spans_)
      for (int64_t k = 1 + span.num_valid; k <= span.num_drafted; k++) token_ids[span.first_row + k] = -1;
    if (!options_.told) return;
    options_.told[2 * round] = step_.num_tokens;
    options_.told[2 * round + 1] = matched_ || !looks_up_ || !round ? matched_ : -1 - found_.num_matched;
  }

  // Drafts behind what came; false where rounds end.
  bool goes_on(RoundsRun& done) {
    if (!drafter_.tape) return look_up();
    const bool was_looked_up = matched_ > 0, finds = repeats();
    if (finds && !looks_up_) return false;
    take_in(was_looked_up || is_plain_);
    matched_ = finds && own_tokens_.size() < kMaxPending ? found_.num_matched : 0;
    is_plain_ = !matched_ && !was_looked_up && varies_ && options_.plain_round && !done.plain_s &&
                done.num_rounds >= options_.plain_round;
    Verified& span = spans_[0];
    if (is_plain_) {
      span.num_drafted = 0;
      return true;
    }
    if (!matched_) {
      for (Verified& each : spans_) each.num_drafted = each.num_asked;
      if (was_looked_up) draft_behind(done, lengths_.data());
      else done.drafter_highest_slot = std::max(done.drafter_highest_slot, draft(lengths_.data()));
      return true;
    }
    span.num_drafted = std::min((int64_t)found_.tokens.size(), options_.room[0] - span.gained - 1);
    std::copy_n(found_.tokens.begin(), span.num_drafted, drafted_.begin());
    return true;
  }

  // Has the drafter draft behind what was looked up.
  void draft_behind(RoundsRun& done, const int64_t* lengths) {
    const double drafted_s = now_s();
    done.drafter_highest_slot = std::max(done.drafter_highest_slot, draft(lengths));
    done.lookup_s += now_s() - drafted_s;
  }

  // Whether nothing is to come behind what was verified.
  bool ends() const {
    if (std::atomic_ref(*const_cast<int64_t*>(options_.hurry)).load()) return true;
    if (looks_up_ && now_s() - began_s_ >= options_.max_s) return true;
    for (size_t s = 0; s < spans_.size(); s++) {
      const Verified& span = spans_[s];
      if (span.gained + span.num_asked + 1 > options_.room[s]) return true;
      for (int64_t i = 0; i <= span.num_right; i++) {
        const int64_t token = sampled_[(size_t)(span.first_row + i)];
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
    const auto first = sampled_.begin() + span.first_row;
    const std::vector<int32_t> came(first, first + span.num_right + 1);
    drafter_.texts[s]->extend(came.data(), (int64_t)came.size());
    return drafter_.texts[s]->find_own({(int)max_tokens, drafter_.limits.factor, drafter_.limits.min_probability});
  }

  // Whether a text repeats itself at such length that more is gained by looking up than by the drafter.
  bool repeats() {
    bool any = false;
    for (size_t s = 0; s < drafter_.texts.size(); s++) {
      found_ = found(s, looks_up_ ? drafter_.limits.max_tokens : 1);
      any = any || (found_.agreement == 1 && found_.num_matched >= drafter_.min_matched[s]);
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

  // Adds the tokens that came to what the drafter is to compute.
  void take_in(bool waited) {
    if (!waited) {
      for (auto* each : {&own_tokens_, &own_positions_}) each->clear();
      features_.clear();
      for (auto& slots : own_slots_) slots.clear();
    }
    for (auto* each : {&last_, &starts_, &own_lengths_, &own_ends_}) each->clear();
    own_rows_.clear();
    for (size_t r = 0; r < order_.size(); r++) add_to_draft(r, waited);
  }

  // Has the drafter compute it, and draft so many tokens behind it; returns the highest slot that it writes.
  int64_t draft(const int64_t* lengths) {
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
    chain.lengths = lengths;
    chain.tokens = drafted_.data();
    chain.first = features_.data();
    chain.told = told_.empty() ? nullptr : told_.data();
    return run_chain(*drafter_.tape, own_, chain);
  }

  // What the drafter computes of a span: the tokens that came, but for those which it drafted and has computed.
  void add_to_draft(size_t r, bool waited) {
    const Verified& span = spans_[order_[r]];
    const int64_t was = span.position - drafter_.begins[order_[r]];  // of the newest token, in the drafter's text
    const int64_t num_computed = waited ? 0 : std::min(span.num_right, span.num_drafted - 1);
    const int64_t num_final = std::min(drafter_.max_final, 1 + num_computed);
    const int64_t begin = was + num_final, end = was + span.num_right + 2;
    const int64_t start = waited ? 0 : (int64_t)own_tokens_.size();
    for (int64_t i = num_final - 1; i <= span.num_right; i++) {
      own_tokens_.push_back(sampled_[(size_t)(span.first_row + i)]);
      own_positions_.push_back(was + i + 1);
      const float* tap = options_.taps + (span.first_row + i) * options_.taps_width;
      if (options_.taps) features_.insert(features_.end(), tap, tap + options_.taps_width);
    }
    starts_.push_back(start);
    own_lengths_.push_back((int64_t)own_tokens_.size() - start);
    own_ends_.push_back(end);
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
      tokens[0] = sampled_[(size_t)(span.first_row + span.num_right)];
      span.num_valid = 0;
      for (int64_t k = 0; k < span.num_drafted; k++) {
        const int64_t token = drafted_[(size_t)k * order_.size() + r];
        tokens[k + 1] = std::max<int64_t>(token, 0);
        if (token >= 0 && span.num_valid == k) span.num_valid++;
      }
      const bool is_own = !matched_ && !is_plain_;
      if (span.by_rejection && is_own) add_trials(span, r);
      for (int64_t k = 0; !is_own && k <= span.num_drafted; k++) rows_[(size_t)k].trial = nullptr;
    }
    for (size_t s = 0; s < spans_.size(); s++) {
      Verified& span = spans_[s];
      const int64_t came = span.num_right + 1, end = span.position + came + span.num_drafted + 1;
      span.position += came;
      ends_[s] = end;
      for (int64_t k = 0; k <= span.num_drafted; k++) positions_[(size_t)(span.first_row + k)] = span.position + k;
      const size_t last = varies_ ? rows_.size() - 1 : (size_t)(span.first_row + span.num_drafted);
      for (auto row = (size_t)span.first_row; row <= last; row++) rows_[row].num_output += (uint64_t)came;
      for (size_t g = 0; g < slots_.size(); g++)
        add_slots(step_.groups[g], (int64_t)s, options_.block_size, span.position, end, slots_[g]);
    }
    step_.token_ids = tokens_.data();
    step_.positions = positions_.data();
    step_.kv_length = ends_.data();
    for (size_t g = 0; g < slots_.size(); g++) step_.groups[g].write_slots = slots_[g].data();
    if (!varies_) return;
    length_ = step_.num_tokens = step_.num_rows = step_.num_sample_rows = 1 + spans_[0].num_drafted;
    step_.span_length = &length_;
    step_.logit_rows = indices_.data();
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
  std::vector<int64_t> sampled_;  // in the last step

  const double began_s_ = now_s();

  // Beside a tape, with a single span, whose drafts may be of any length: the match whose drafts the step verifies, or
  // 0, and whether it has none at all.
  bool varies_ = false, looks_up_ = false, is_plain_ = false;
  LookupDraft found_;
  int64_t matched_ = 0, length_ = 0;
  std::vector<int64_t> indices_;

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
