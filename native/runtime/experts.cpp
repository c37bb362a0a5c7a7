#include "runtime/experts.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

namespace ridgeline {
namespace {

constexpr int64_t kPreparedTogether = 16;    // rows of one tile, which one worker must lay out whole
constexpr int64_t kChunkBytes = 256 * 1024;  // as runtime/linear.cpp has it
constexpr int64_t kColumns = 256;            // of a row, added up at once

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The place of the largest entry, the first of equals.
int64_t largest(const float* x, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

int64_t row_bytes(const KernelTable& kernels, const Matrix& matrix) {
  return round_up(kernels.linear.input_bytes(matrix, 1), kCacheLine);
}

// What can be chosen is above kTaken, also where it is no number.
constexpr float kTaken = -INFINITY;
float choosable(float x) { return x >= -FLT_MAX ? x : -FLT_MAX; }

}  // namespace

void Route::run(const Worker& worker) {
  const int64_t width = operands_.logits->width;
  float* scores = static_cast<float*>(worker.scratch);
  float* choice = scores + width;
  const auto share = worker.share(worker.step.num_tokens);
  for (int64_t t = share.begin; t < share.end; t++) {
    score(operands_.logits->row(t), scores);
    for (int64_t e = 0; e < width; e++)
      choice[e] = choosable(options_.bias ? scores[e] + options_.bias[e] : scores[e]);
    if (options_.num_groups > 1) leave_out_groups(choice, choice + width);
    choose(scores, choice, operands_.ids->row(t), operands_.weights->row(t));
  }
}

void Route::score(const float* logits, float* scores) const {
  const int64_t width = operands_.logits->width;
  if (!options_.softmax) {
    for (int64_t e = 0; e < width; e++) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float most = logits[largest(logits, width)];
  float total = 0;
  for (int64_t e = 0; e < width; e++) total += scores[e] = std::exp(logits[e] - most);
  for (int64_t e = 0; e < width; e++) scores[e] /= total;
}

void Route::leave_out_groups(float* choice, float* groups) const {
  const int64_t count = options_.num_groups, size = operands_.logits->width / count;
  for (int64_t g = 0; g < count; g++) {
    const float* group = choice + g * size;
    const int64_t best = largest(group, size);
    float second = 0;
    if (options_.two_best) {
      second = kTaken;
      for (int64_t i = 0; i < size; i++)
        if (i != best) second = std::max(second, group[i]);
    }
    groups[g] = choosable(group[best] + second);
  }
  for (int64_t n = 0; n < options_.top_groups; n++) groups[largest(groups, count)] = kTaken;
  for (int64_t g = 0; g < count; g++)
    if (groups[g] != kTaken) std::fill_n(choice + g * size, size, kTaken);
}

void Route::choose(const float* scores, float* choice, float* ids, float* weights) const {
  float total = 0;
  for (int64_t n = 0; n < options_.top_k; n++) {
    const int64_t best = largest(choice, operands_.logits->width);
    ids[n] = (float)best;
    total += weights[n] = scores[best];
    choice[best] = kTaken;
  }
  const float factor = options_.normalize ? options_.scale / (total + 1e-20f) : options_.scale;
  for (int64_t n = 0; n < options_.top_k; n++) weights[n] *= factor;
}

Matrix Experts::Product::matrix(int64_t expert) const {
  Matrix matrix = first;
  matrix.data += expert * first.num_panels * first.panel_bytes;
  return matrix;
}

const float* Experts::Product::bias(int64_t expert) const {
  return epilogue.bias ? epilogue.bias + expert * first.num_panels * kPanel : nullptr;
}

int64_t Experts::hidden_stride() const { return round_up(gate_up_.product.first.num_panels * kPanel / 2, kPanel); }

Experts::Sizes Experts::sizes(const KernelTable& kernels, int64_t num_tokens, int workers) const {
  const int64_t pairs = num_tokens * operands_.ids->width, most_hit = std::min(num_experts_, pairs);
  const int64_t own = std::max(row_bytes(kernels, gate_up_.product.first), row_bytes(kernels, down_.product.first));
  constexpr int64_t kFloat = sizeof(float);
  return {round_up(2 * most_hit + 1 + 2 * pairs + num_experts_, kCacheLine / (int64_t)sizeof(int64_t)), own,
          num_tokens == 1 ? own * workers : own * pairs + kInputSlack * most_hit, pairs * hidden_stride() * kFloat,
          pairs * result_stride() * kFloat};
}

void Experts::measure(const KernelTable& kernels, const StepLimits& limits, int workers, Workspace& workspace) const {
  for (const int64_t num_tokens : {(int64_t)1, limits.num_tokens}) {
    const Sizes needed = sizes(kernels, num_tokens, workers);
    workspace.need(memory_->routings, needed.routing * (int64_t)sizeof(int64_t) * workers);
    workspace.need(memory_->inputs, needed.inputs);
    workspace.need(memory_->hidden, needed.hidden);
    workspace.need(memory_->results, needed.results);
  }
}

void Experts::prepare(const KernelTable& kernels, const Step& step, int workers) {
  num_tokens_ = step.num_tokens;
  num_pairs_ = num_tokens_ * operands_.ids->width;
  const Sizes needed = sizes(kernels, num_tokens_, workers);
  routing_stride_ = needed.routing;
  memory_->routings.reserve(routing_stride_ * (int64_t)sizeof(int64_t) * workers);
  gate_up_.product.epilogue.stride = hidden_stride();
  down_.product.epilogue.stride = result_stride();
  memory_->hidden.reserve(needed.hidden);
  memory_->results.reserve(needed.results);
  for (Stage* stage : {&gate_up_, &down_}) stage->row_bytes = row_bytes(kernels, stage->product.first);
  own_bytes_ = needed.own_input;
  memory_->inputs.reserve(needed.inputs);
  if (num_tokens_ == 1)
    for (Stage* stage : {&gate_up_, &down_}) claim(*stage, num_pairs_, 1, workers);
}

void Experts::run(const Worker& worker) {
  if (num_tokens_ == 0) return;
  const Routing routing = sort(worker);
  if (worker.index == 0 && num_tokens_ > 1) {
    int64_t most_rows = 0;
    for (int64_t hit = 0; hit < routing.num_hit; hit++) most_rows = std::max(most_rows, routing.rows(hit));
    for (Stage* stage : {&gate_up_, &down_}) claim(*stage, routing.num_hit, most_rows, worker.count);
  }
  float *hidden = memory_->hidden.as<float>(), *results = memory_->results.as<float>();
  multiply(worker, routing, gate_up_, {operands_.x->data(), operands_.x->stride, routing.token}, hidden);
  worker.barrier();
  multiply(worker, routing, down_, {hidden, gate_up_.product.epilogue.stride, nullptr}, results);
  worker.barrier();
  add_up(worker, routing);
}

// By counting: the rows of an expert are in the order of their tokens.
Routing Experts::sort(const Worker& worker) const {
  const int64_t top_k = operands_.ids->width, most_hit = std::min(num_experts_, num_pairs_);
  int64_t* expert = memory_->routings.as<int64_t>() + worker.index * routing_stride_;
  int64_t* first = expert + most_hit;
  int64_t* token = first + most_hit + 1;
  int64_t* row = token + num_pairs_;
  int64_t* next = row + num_pairs_;  // of each expert, its number of rows and then its next row
  std::fill_n(next, num_experts_, 0);
  for (int64_t t = 0; t < num_tokens_; t++)
    for (int64_t n = 0; n < top_k; n++) next[(int64_t)operands_.ids->row(t)[n]]++;
  int64_t num_hit = 0, rows = 0;
  for (int64_t e = 0; e < num_experts_; e++) {
    if (next[e] == 0) continue;
    expert[num_hit] = e;
    first[num_hit++] = rows;
    rows += std::exchange(next[e], rows);
  }
  first[num_hit] = rows;
  for (int64_t t = 0; t < num_tokens_; t++)
    for (int64_t n = 0; n < top_k; n++) {
      const int64_t r = row[t * top_k + n] = next[(int64_t)operands_.ids->row(t)[n]]++;
      token[r] = t;
    }
  return {num_hit, expert, first, token, row};
}

// Chunks so small that each worker gets several, also where one expert has most of the rows.
void Experts::claim(Stage& stage, int64_t num_hit, int64_t most_rows, int workers) const {
  const Matrix& matrix = stage.product.first;
  const int64_t share = num_pairs_ * matrix.num_panels / (4 * workers * most_rows);
  const int64_t chunk = std::clamp<int64_t>(kChunkBytes / matrix.panel_bytes, 1, std::max<int64_t>(1, share));
  stage.panels.reset(num_hit * matrix.num_panels, chunk, workers);
}

// A single token has a row for each expert, which the workers that want it prepare for themselves. Many rows are
// prepared once and together.
void Experts::multiply(const Worker& worker, const Routing& routing, Stage& stage, const Source& source, float* out) {
  const bool own = num_tokens_ == 1;
  if (!own) {
    prepare_shared(worker, routing, stage, source);
    worker.barrier();
  }
  const LinearKernels& kernels = worker.kernels.linear;
  const int64_t num_panels = stage.product.first.num_panels;
  uint8_t* input = memory_->inputs.as<uint8_t>() + worker.index * own_bytes_;
  int64_t begin, end, prepared = -1;
  while (stage.panels.next(worker.index, begin, end))
    for (int64_t at = begin, stop; at < end; at = stop) {
      const int64_t hit = at / num_panels, start = hit * num_panels, expert = routing.expert[hit];
      stop = std::min(end, start + num_panels);
      if (!own) input = shared_input(routing, stage, hit);
      if (const int64_t row = source.tokens ? 0 : hit; own && row != prepared) {
        prepare_rows(worker, routing, stage, source, hit, 0, 1, input);
        prepared = row;
      }
      Epilogue epilogue = stage.product.epilogue;
      epilogue.bias = stage.product.bias(expert);
      epilogue.out = out + routing.first[hit] * epilogue.stride;
      kernels.multiply(stage.product.matrix(expert), input, routing.rows(hit), at - start, stop - start, exact_batch_,
                       epilogue, worker.scratch);
    }
}

void Experts::prepare_shared(const Worker& worker, const Routing& routing, const Stage& stage,
                             const Source& source) const {
  int64_t total = 0;  // of blocks that one worker prepares
  const auto blocks = [&](int64_t hit) { return (routing.rows(hit) + kPreparedTogether - 1) / kPreparedTogether; };
  for (int64_t hit = 0; hit < routing.num_hit; hit++) total += blocks(hit);
  const auto share = worker.share(total);
  for (int64_t hit = 0, block = 0; hit < routing.num_hit && block < share.end; block += blocks(hit++)) {
    const int64_t from = std::max(share.begin, block) - block, to = std::min(share.end - block, blocks(hit));
    if (from < to)
      prepare_rows(worker, routing, stage, source, hit, from * kPreparedTogether,
                   std::min(to * kPreparedTogether, routing.rows(hit)), shared_input(routing, stage, hit));
  }
}

// Rows [begin, end) of those of an expert.
void Experts::prepare_rows(const Worker& worker, const Routing& routing, const Stage& stage, const Source& source,
                           int64_t hit, int64_t begin, int64_t end, void* input) const {
  const int64_t first = routing.first[hit];
  const float* x = source.tokens ? source.x : source.x + first * source.stride;
  worker.kernels.linear.prepare_input(stage.product.first, {}, x, source.stride,
                                      source.tokens ? source.tokens + first : nullptr, begin, end, routing.rows(hit),
                                      input);
}

uint8_t* Experts::shared_input(const Routing& routing, const Stage& stage, int64_t hit) const {
  return memory_->inputs.as<uint8_t>() + routing.first[hit] * stage.row_bytes + hit * kInputSlack;
}

void Experts::add_up(const Worker& worker, const Routing& routing) const {
  const int64_t top_k = operands_.ids->width, width = operands_.out->width, stride = down_.product.epilogue.stride;
  const int64_t blocks = (width + kColumns - 1) / kColumns;
  const auto share = worker.share(num_tokens_ * blocks);
  for (int64_t i = share.begin; i < share.end; i++) {
    const int64_t t = i / blocks, column = i % blocks * kColumns, count = std::min(kColumns, width - column);
    const float* weights = operands_.weights->row(t);
    float* out = operands_.out->row(t) + column;
    for (int64_t n = 0; n < top_k; n++) {
      const float* result = memory_->results.as<float>() + routing.row[t * top_k + n] * stride + column;
      if (n == 0)
        worker.kernels.rows.scale(result, weights[n], count, out);
      else
        worker.kernels.rows.add_scaled(result, weights[n], count, out);
    }
  }
}

}  // namespace ridgeline
