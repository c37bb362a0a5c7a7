// Rounds of drafting and verifying for Python: a method of Tape.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/chain.h"
#include "bind/started.h"
#include "runtime/rounds.h"

namespace ridgeline::rounds_bindings {

// The tape of a drafter, the size of its blocks, from which token on there are none that both models have, what is meant
// by the ids that it samples, how many computed tokens of a draft stay, its logits [S, width], and its own vocabulary.
template <class Builder>
using Drafter = std::tuple<Builder*, int64_t, int64_t, std::optional<Array<const int64_t, 1>>, int64_t, Array<float, 2>,
                           int64_t>;
// As of a chain, but for what the first step reads: that is written to the last array.
template <class Builder>
using Features = std::tuple<int, int, Builder*, int, int, Array<float, 2>>;
// Tokens of a draft that is looked up in the text of a single span, at most, factor, least share of places, seconds from
// when no further round begins, and the round from which one has no drafts, or 0.
using Lookup = std::tuple<int, double, double, double, int64_t>;
using Tables = std::vector<std::pair<Array<const int64_t, 2>, Array<const int64_t, 1>>>;

template <class Builder>
RoundsDrafter drafter_of(const Drafter<Builder>& drafter, const std::optional<Features<Builder>>& features,
                         const Tables& tables, const Array<const int64_t, 2>& spans, int64_t num_spans) {
  const auto& [tape, block_size, vocab_size, token_ids, max_final, logits, own_vocab] = drafter;
  require(block_size > 0 && max_final > 0, "a block has tokens, and one of a draft stays");
  require(!token_ids || (int64_t)token_ids->shape(0) >= own_vocab, "every id means a token");
  require((int64_t)logits.shape(0) == num_spans, "a drafter has a row of logits for each span");
  RoundsDrafter found{{}, {}, nullptr, &tape->tape(), {}, {}, spans.data(), max_final, logits.data(),
                      (int64_t)logits.shape(1)};
  found.chain.block_size = block_size;
  found.chain.vocab_size = vocab_size;
  found.chain.token_ids = token_ids ? token_ids->data() : nullptr;
  found.chain.told_stride = own_vocab;
  if (features) {
    const auto& [to, from, fold, reads, writes, taps] = *features;
    chain_bindings::feed(found.chain, *tape, to, from, *fold, reads, writes);
    require((int64_t)taps.shape(1) == found.chain.unfolded->width, "features are made of what is retained");
  }
  for (const auto& [tables_SB, first_token_S] : tables) {
    require((int64_t)tables_SB.shape(0) == num_spans && (int64_t)first_token_S.shape(0) == num_spans,
            "a drafter has a table for each span");
    found.groups.push_back({nullptr, tables_SB.data(), (int64_t)tables_SB.shape(1), first_token_S.data()});
  }
  return found;
}

// What bounds the rounds of a step, and where their tokens go.
inline RoundsOptions options_of(int64_t width, int64_t block_size, const int64_t* room,
                                const Array<const int64_t, 2>& stops, const Array<const int64_t, 1>& hurry,
                                const Array<int64_t, 2>& token_ids, const Array<int64_t, 2>& sampled) {
  require(token_ids.shape(0) > 0 && token_ids.shape(0) == sampled.shape(0) &&
              (int64_t)token_ids.shape(1) == width && (int64_t)sampled.shape(1) == width,
          "one place per round and token is needed");
  require(stops.shape(1) == 2 && hurry.shape(0) == 1 && block_size > 0, "a stop is a span and a token");
  RoundsOptions options{};
  options.max_rounds = (int64_t)token_ids.shape(0);
  options.block_size = block_size;
  options.room = room;
  options.stops = stops.data();
  options.num_stops = (int64_t)stops.shape(0);
  options.hurry = hurry.data();
  options.token_ids = token_ids.data();
  options.sampled = sampled.data();
  options.width = width;
  return options;
}

template <class Builder>
std::tuple<int64_t, int64_t, int64_t, double, double, double> rounds(
    Builder& self, const Array<const int64_t, 1>& block, const Array<float, 2>& logits, int64_t block_size,
    const Drafter<Builder>& drafter, const std::optional<Features<Builder>>& features, const Tables& tables,
    const Array<const int64_t, 2>& spans, const Array<const int64_t, 2>& stops, const Array<const int64_t, 1>& hurry,
    const Array<int64_t, 2>& token_ids, const Array<int64_t, 2>& sampled, const std::optional<Trials>& trials,
    uint64_t proposal, const std::vector<SuffixIndex*>& texts, const Lookup& lookup,
    const Array<int64_t, 2>& told) {
  const auto ran = [&](Tape& tape, const Step& step) {
    require(spans.shape(0) == 3 && (int64_t)spans.shape(1) == step.num_spans, "a span has a begin, room and a match");
    require(texts.empty() || (int64_t)texts.size() == step.num_spans, "a span has a text");
    RoundsDrafter own = drafter_of(drafter, features, tables, spans, step.num_spans);
    own.texts = texts;
    own.min_matched = spans.data() + 2 * step.num_spans;
    const auto& [most, factor, min_probability, max_s, plain_round] = lookup;
    own.limits = {most, factor, min_probability};
    const int64_t longest = std::max(step.num_tokens, (int64_t)most + 1);
    require(most >= 0 && (int64_t)logits.shape(0) >= longest, "a token that is looked up has a row of logits");
    require(told.shape(0) == token_ids.shape(0) && told.shape(1) == 2, "a round has a number of tokens and a match");
    const int64_t* const room = spans.data() + step.num_spans;
    RoundsOptions options = options_of(longest, block_size, room, stops, hurry, token_ids, sampled);
    options.proposal = proposal;
    options.max_s = max_s;
    options.plain_round = plain_round;
    options.told = told.data();
    if (features) {
      const Array<float, 2>& taps = std::get<5>(*features);
      self.retained().check(taps, longest);
      options.taps = taps.data();
      options.taps_width = (int64_t)taps.shape(1);
      options.tap = [&](int64_t, int64_t num_tokens) { self.retained().write(taps, num_tokens); };
    }
    return std::get<0>(drafter)->alone([&](Tape&) {
      const WithoutGil unlocked;
      const RoundsRun run = run_rounds(tape, step, own, options);
      return std::tuple{run.num_rounds, run.highest_slot, run.drafter_highest_slot,
                        run.seconds,    run.lookup_s,     run.plain_s};
    });
  };
  return self.compute(block, logits, ran, trials);
}

template <class Builder>
std::tuple<int64_t, int64_t, double> looked_up(Builder& self, const Array<const int64_t, 1>& block,
                                      const Array<float, 2>& logits, int64_t block_size,
                                      const std::vector<SuffixIndex*>& texts, double factor, double min_probability,
                                      const Array<const int64_t, 1>& room, const Array<const int64_t, 2>& stops,
                                      const Array<const int64_t, 1>& hurry, const Array<int64_t, 2>& token_ids,
                                      const Array<int64_t, 2>& sampled, const Retained::Place& taps) {
  return self.compute(block, logits, [&](Tape& tape, const Step& step) {
    require((int64_t)room.shape(0) == step.num_spans && (int64_t)texts.size() == step.num_spans,
            "a span has a text and room");
    RoundsDrafter drafter{texts, {0, factor, min_probability}, nullptr, nullptr, {}, {}, nullptr, 0, nullptr, 0};
    drafter.chain.vocab_size = std::numeric_limits<int64_t>::max();
    RoundsOptions options = options_of(step.num_tokens, block_size, room.data(), stops, hurry, token_ids, sampled);
    self.retained().check(taps, options.max_rounds * step.num_tokens);
    options.tap = [&](int64_t round, int64_t num_tokens) { self.retained().write(taps, num_tokens, round); };
    const WithoutGil unlocked;
    const RoundsRun run = run_rounds(tape, step, drafter, options);
    return std::tuple{run.num_rounds, run.highest_slot, run.seconds};
  });
}

template <class Builder>
void bind(nanobind::class_<Builder>& tape) {
  using namespace nanobind::literals;
  tape.def("rounds", &rounds<Builder>, "block"_a.noconvert(), "logits"_a, "block_size"_a, "drafter"_a,
           "features"_a.none(), "tables"_a, "spans"_a, "stops"_a, "hurry"_a.noconvert(), "token_ids"_a.noconvert(),
           "sampled"_a.noconvert(), "trials"_a.none(), "proposal"_a,
           "texts"_a, "lookup"_a, "told"_a.noconvert(),
           "Runs a step that verifies drafts, and further ones, which a drafter makes drafts for: runtime/rounds.h. "
           "Returns how many, the highest slots written in both caches, or 0, their seconds, those of lookups, and those "
           "of the step without drafts.");
  tape.def("looked_up", &looked_up<Builder>, "block"_a.noconvert(), "logits"_a, "block_size"_a, "texts"_a, "factor"_a,
           "min_probability"_a, "room"_a, "stops"_a, "hurry"_a.noconvert(), "token_ids"_a.noconvert(),
           "sampled"_a.noconvert(), "taps"_a.none() = nanobind::none(),
           "Does so with drafts that are looked up in the texts of the spans, with the taps of all rounds; returns how "
           "many, the highest slot, and their seconds.");
}

}  // namespace ridgeline::rounds_bindings
