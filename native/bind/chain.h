// Chains of steps for Python: a method of Tape.
#pragma once

#include <optional>
#include <utility>

#include "bind/arguments.h"
#include "bind/gil.h"
#include "runtime/chain.h"

namespace ridgeline::chain_bindings {

// The buffer of features, that which it is fed back from, the tape that computes those of the first step, the buffers
// of this one that it reads and writes, and what it reads.
template <class Builder>
using Features = std::tuple<int, int, Builder*, int, int, Array<const float, 2>>;

// Has a chain read features, which it feeds back; but for those of the first step.
template <class Builder>
void feed(ChainOptions& options, Builder& self, int to, int from, Builder& fold, int reads, int writes) {
  options.features = self.buffer(to);
  options.feedback = self.buffer(from);
  options.fold = &fold.tape();
  options.unfolded = fold.buffer(reads);
  options.folded = fold.buffer(writes);
  require(options.folded->width == options.features->width && options.feedback->width == options.features->width,
          "features are as wide as what they are fed back from, and as what computes the first");
}

template <class Builder>
int64_t chain(Builder& self, const Array<const int64_t, 1>& block, const Array<float, 2>& logits,
              const Array<const int64_t, 1>& lengths, const Array<int64_t, 2>& tokens, int64_t block_size,
              int64_t vocab_size, const std::optional<Array<const int64_t, 1>>& token_ids,
              const std::optional<Features<Builder>>& features, const std::optional<Array<float, 3>>& told,
              int64_t own_vocab) {
  return self.compute(block, logits, [&](Tape& tape, const Step& step) {
    const size_t count = lengths.shape(0);
    require(count > 0 && (int64_t)count == step.num_sample_rows, "one length per row to sample is needed");
    const auto steps = (size_t)lengths.data()[0];
    require(tokens.shape(0) == steps && tokens.shape(1) == count, "one place per step and row is needed");
    require(!told || (told->shape(0) == steps && told->shape(1) == count && (int64_t)told->shape(2) >= own_vocab),
            "weights have a place for each token of each step and row");
    require(!token_ids || (int64_t)token_ids->shape(0) >= own_vocab, "every id means a token");
    require(block_size > 0, "a block has tokens");
    ChainOptions options{};
    options.lengths = lengths.data();
    options.tokens = tokens.data();
    options.block_size = block_size;
    options.token_ids = token_ids ? token_ids->data() : nullptr;
    options.vocab_size = vocab_size;
    options.told = told ? told->data() : nullptr;
    options.told_stride = told ? (int64_t)told->shape(2) : 0;
    if (features) {
      const auto& [to, from, fold, reads, writes, first] = *features;
      feed(options, self, to, from, *fold, reads, writes);
      options.first = first.data();
      require((int64_t)first.shape(0) == step.num_tokens && (int64_t)first.shape(1) == options.unfolded->width,
              "a step has features of each token");
    }
    const WithoutGil unlocked;
    return run_chain(tape, step, options);
  });
}

template <class Builder>
void bind(nanobind::class_<Builder>& tape) {
  using namespace nanobind::literals;
  const auto none = nanobind::none();
  tape.def("chain", &chain<Builder>, "block"_a.noconvert(), "logits"_a, "lengths"_a, "tokens"_a, "block_size"_a,
           "vocab_size"_a, "token_ids"_a.none() = none, "features"_a.none() = none, "told"_a.none() = none,
           "own_vocab"_a = 0,
           "Runs a step, and further ones from what each samples, as many as `lengths` says: runtime/chain.h. "
           "Returns the highest slot written, or 0.");
}

}  // namespace ridgeline::chain_bindings
