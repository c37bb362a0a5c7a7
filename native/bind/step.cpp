#include "bind/step.h"

#include <algorithm>

namespace nb = nanobind;

namespace ridgeline {
namespace {

// Without conversion: the pointers outlive this call, and a converted copy would not.
template <class T, size_t Dims>
Array<T, Dims> hold(std::vector<nb::object>& owners, nb::handle object) {
  Array<T, Dims> array;
  require(nb::try_cast(object, array, false), "a step's arrays are contiguous, of the types that StepBatch names");
  owners.push_back(nb::borrow(object));
  return array;
}

}  // namespace

Step& StepArrays::read(nb::handle batch, bool draws) {
  if (!batch_.is(batch)) {
    batch_.reset();  // what fails half-way is read again
    owners_.clear();
    step_ = {};
    read_step(batch);
    read_draws(batch.attr("draws"));
    batch_ = nb::borrow(batch);
  }
  draws_.clear();
  if (draws) fill_draws();
  step_.draws = draws_.data();
  step_.num_draws = (int64_t)draws_.size();
  return step_;
}

void StepArrays::read_step(nb::handle batch) {
  Step& step = step_;
  const auto ids = [&](const char* name) { return hold<const int64_t, 1>(owners_, batch.attr(name)); };
  const auto tokens = ids("token_ids_T"), positions = ids("positions_T"), rows = ids("logit_rows_R");
  const auto start = ids("span_start_S"), length = ids("span_length_S"), kv_length = ids("kv_length_S");
  const auto mutual = ids("mutual_S");
  require(tokens.shape(0) == positions.shape(0), "a step has one position per token");
  require(start.shape(0) == length.shape(0) && start.shape(0) == kv_length.shape(0) &&
              start.shape(0) == mutual.shape(0),
          "a step has one start, length, KV length and run of mutual tokens per span");
  step.num_tokens = (int64_t)tokens.shape(0);
  step.num_spans = (int64_t)start.shape(0);
  step.num_rows = (int64_t)rows.shape(0);
  step.token_ids = tokens.data();
  step.positions = positions.data();
  step.logit_rows = rows.data();
  step.span_start = start.data();
  step.span_length = length.data();
  step.kv_length = kv_length.data();
  step.mutual = mutual.data();
  require(std::all_of(step.mutual, step.mutual + step.num_spans, [](int64_t run) { return run > 0; }),
          "mutual_S must be at least 1");
  const nb::object adapters = nb::getattr(batch, "adapters_T", nb::none());
  step.adapters = nullptr;
  if (!adapters.is_none()) {
    const auto numbers = hold<const int64_t, 1>(owners_, adapters);
    require(numbers.shape(0) == tokens.shape(0), "a step has one adapter per token");
    step.adapters = numbers.data();
  }
  for (nb::handle group : batch.attr("groups")) {
    const auto slots = hold<const int64_t, 1>(owners_, group.attr("write_slots_T"));
    const auto tables = hold<const int64_t, 2>(owners_, group.attr("tables_SB"));
    const auto first = hold<const int64_t, 1>(owners_, group.attr("first_token_S"));
    require(slots.shape(0) == tokens.shape(0), "a cache group has one slot per token");
    require(tables.shape(0) == start.shape(0) && first.shape(0) == start.shape(0),
            "a cache group has one table and first token per span");
    step.groups.push_back({slots.data(), tables.data(), (int64_t)tables.shape(1), first.data()});
  }
}

void StepArrays::read_draws(nb::handle draws) {
  const auto rows = hold<const int64_t, 1>(owners_, draws.attr("logit_row"));
  const auto temperature = hold<const float, 1>(owners_, draws.attr("temperature"));
  const auto top_k = hold<const int32_t, 1>(owners_, draws.attr("top_k"));
  const auto top_p = hold<const double, 1>(owners_, draws.attr("top_p"));
  const auto min_p = hold<const double, 1>(owners_, draws.attr("min_p"));
  const auto seed = hold<const uint64_t, 1>(owners_, draws.attr("seed"));
  const auto num_output = hold<const uint64_t, 1>(owners_, draws.attr("num_output"));
  const size_t count = rows.shape(0);
  require(temperature.shape(0) == count && top_k.shape(0) == count && top_p.shape(0) == count &&
              min_p.shape(0) == count && seed.shape(0) == count && num_output.shape(0) == count,
          "every option of the rows to draw has one value per row");
  draw_arrays_ = {rows.data(),  temperature.data(), top_k.data(),      top_p.data(),
                  min_p.data(), seed.data(),        num_output.data(), count};
}

void StepArrays::fill_draws() {
  const DrawArrays& from = draw_arrays_;
  for (size_t i = 0; i < from.count; i++) {
    require(from.logit_row[i] >= 0 && from.logit_row[i] < step_.num_rows, "a row to draw is not a row of logits");
    SampleRow& draw = draws_.emplace_back(SampleRow{});
    draw.temperature = from.temperature[i];
    draw.top_k = from.top_k[i];
    draw.top_p = static_cast<decltype(draw.top_p)>(from.top_p[i]);
    draw.min_p = static_cast<decltype(draw.min_p)>(from.min_p[i]);
    draw.seed = from.seed[i];
    draw.num_output = from.num_output[i];
    draw.logit_row = from.logit_row[i];
    draw.token = -1;
  }
}

}  // namespace ridgeline
