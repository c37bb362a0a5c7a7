// The sampling kernel alone, for tests: the backend calls it within a step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/step.h"
#include "kernels/sample/types.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(64)); }
};

using Scratch = std::unique_ptr<void, AlignedDelete>;

Scratch scratch_of(const SampleKernels& kernels, int64_t vocab_size) {
  return Scratch(::operator new((size_t)kernels.scratch_bytes(vocab_size), std::align_val_t(64)));
}

// Lists the tokens of a row's largest logits, in memory of its own.
class Likeliest {
 public:
  Likeliest(const std::string& level, int64_t vocab_size)
      : kernels_(kernels_of(level).sample), vocab_size_(vocab_size), scratch_(scratch_of(kernels_, vocab_size)) {
    require(vocab_size > 0 && vocab_size <= kMaxSampledVocab, "so many tokens are not sampled from");
  }

  std::vector<int64_t> of(const Array<float, 2>& logits, int64_t row, int64_t count) {
    const auto width = (int64_t)logits.shape(1);
    require(width >= vocab_size_, "a row has one logit for each token");
    require(row >= 0 && row < (int64_t)logits.shape(0), "no row has this number");
    require(count > 0, "a list has a token at least");
    if (count >= vocab_size_) return {};
    float* const x = logits.data() + row * width;
    const float* maxima = room_for_maxima(x, vocab_size_, width);
    if (maxima && maxima[vocab_size_ / 16] != 1) maxima = nullptr;
    std::vector<int64_t> ids((size_t)count);
    const bool found = kernels_.likeliest(x, vocab_size_, maxima, count, ids.data(), scratch_.get());
    return found ? ids : std::vector<int64_t>{};
  }

 private:
  const SampleKernels& kernels_;
  int64_t vocab_size_;
  Scratch scratch_;
};

std::vector<int64_t> sample(const std::string& level, const Logits& logits, const Column<int64_t>& logit_row,
                            const Column<float>& temperature, const Column<int32_t>& top_k,
                            const Column<double>& top_p, const Column<double>& min_p, const Column<uint64_t>& seed,
                            const Column<uint64_t>& num_output, const std::optional<Masks>& masks,
                            const std::optional<Array<const int64_t, 2>>& trials,
                            const std::optional<Array<const float, 2>>& trial_weights,
                            const std::optional<Array<float, 2>>& told) {
  const SampleKernels& kernels = kernels_of(level).sample;
  const size_t num_rows = logit_row.size();
  const int64_t vocab_size = (int64_t)logits.shape(1);
  if (masks && masks->shape(0) != num_rows)
    throw std::invalid_argument("there is one mask for each of " + std::to_string(num_rows) + " rows, got " +
                                std::to_string(masks->shape(0)));
  for (const size_t size :
       {temperature.size(), top_k.size(), top_p.size(), min_p.size(), seed.size(), num_output.size()})
    if (size != num_rows)
      throw std::invalid_argument("all columns of the rows to sample have one length, " + std::to_string(num_rows) +
                                  ", got " + std::to_string(size));
  if (vocab_size < 1 || vocab_size > kMaxSampledVocab)
    throw std::invalid_argument("a row to sample from has 1 to " + std::to_string(kMaxSampledVocab) + " logits, got " +
                                std::to_string(vocab_size));
  const Scratch scratch = scratch_of(kernels, vocab_size);
  std::vector<SampleRow> rows;
  for (size_t i = 0; i < num_rows; i++) {
    const int64_t r = logit_row.data()[i];
    if (r < 0 || r >= (int64_t)logits.shape(0))
      throw std::invalid_argument("logit row " + std::to_string(r) + " is not one of " +
                                  std::to_string(logits.shape(0)));
    SampleRow row{temperature.data()[i], top_k.data()[i],     top_p.data()[i], min_p.data()[i],
                  seed.data()[i],        num_output.data()[i], r,               -1};
    if (masks) {
      row.mask_words = (int64_t)masks->shape(1);
      row.mask = masks->data() + (int64_t)i * row.mask_words;
    }
    if (told) row.told = told->data() + i * (size_t)vocab_size;
    rows.push_back(row);
  }
  require(!told || (told->shape(0) == num_rows && (int64_t)told->shape(1) == vocab_size), "each row tells all weights");
  std::vector<Trial> drafted;
  if (trials && trial_weights) add_trials(*trials, *trial_weights, rows, drafted);
  std::vector<int64_t> tokens;
  for (SampleRow& row : rows) {
    if (!row.trial)
      kernels.sample(row, logits.data() + row.logit_row * vocab_size, vocab_size, scratch.get());
    else if (row.trial->block >= 0)
      kernels.verify(&row, logits.data(), vocab_size, vocab_size, scratch.get());
    // A row of a block has been decided with the first of it.
  }
  for (const SampleRow& row : rows) tokens.push_back(row.token);
  return tokens;
}

}  // namespace

void bind_sample(nb::module_& module) {
  nb::class_<Likeliest>(module, "Likeliest")
      .def(nb::init<const std::string&, int64_t>(), "level"_a, "vocab_size"_a)
      .def("of", &Likeliest::of, "logits"_a.noconvert(), "row"_a, "count"_a,
           "So many tokens of the largest of a row's float32 logits [R, W], by logit and then by id; none where not all are "
           "finite, or no more of them are there. What else is in the row is what a step left there.");
  module.def("sample", &sample, "level"_a, "logits"_a.noconvert(), "logit_row"_a.noconvert(),
             "temperature"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(),
             "seed"_a.noconvert(), "num_output"_a.noconvert(), "masks"_a.noconvert() = nb::none(),
             "trials"_a.noconvert() = nb::none(), "trial_weights"_a.noconvert() = nb::none(),
             "told"_a.noconvert() = nb::none(), "Tokens sampled from rows of float32 logits [R, V] with the columns of "
             "backends.step.SamplingMetadata, and a mask for each of them; -1 where a row is not finite. Drafted tokens are verified as "
             "backends.step.Trials has them; `told` [rows, V] gets what the other rows are sampled from.");
}

}  // namespace ridgeline
