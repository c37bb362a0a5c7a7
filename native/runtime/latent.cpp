#include "runtime/latent.h"

#include <algorithm>
#include <cstring>

#include "runtime/rows.h"

namespace ridgeline {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kBlockRows = 64;     // rows that are laid out and multiplied together
constexpr int64_t kPartTokens = 1024;  // whose keys and values of one head stay in a core's cache
constexpr int64_t kMaxParts = 8;       // of a context: more would cost more to merge than the cache saves
constexpr int64_t kRowsPerItem = 128;  // query rows for which expanding the latents once more may pay

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t part_tokens(int64_t kv_length) {
  return std::max(kPartTokens, round_up((kv_length + kMaxParts - 1) / kMaxParts, kBlockRows));
}

int64_t visible_end(const SpanView& span, int64_t row_end) {
  return std::min(span.kv_length - span.length + round_up(row_end, span.bidirectional_block), span.kv_length);
}

}  // namespace

bool LatentSizes::expands(int64_t num_tokens, int64_t kv_length) const {
  const int64_t pairs = num_tokens * (kv_length - num_tokens) + num_tokens * (num_tokens + 1) / 2;
  const int64_t per_row = latent * (nope + value);
  return kv_length * per_row + pairs * (key() + value) < num_tokens * per_row + pairs * (entry() + latent);
}

// Writing a block's first token clears the block: one worker writes all its tokens, in order.
void LatentWrite::run(const Worker& worker) {
  const int64_t* slots = worker.step.groups[(size_t)group_].write_slots;
  if (worker.step.num_echoes && worker.index > 0) return;  // their blocks are written in the order of the tokens too
  const auto share = worker.step.num_echoes ? Worker::Share{0, worker.step.num_tokens} : worker.share(worker.step.num_tokens);
  const int64_t end = block_start(worker.step, group_, memory_.layout.block_size, share.end);
  Echoes echoes = worker.step.echoes(group_);
  alignas(64) float entry[kMaxHeadDim];
  for (int64_t t = block_start(worker.step, group_, memory_.layout.block_size, share.begin); t < end; t++) {
    std::memcpy(entry, latent_->row(t), (size_t)latent_->width * sizeof(float));
    std::memcpy(entry + latent_->width, key_->row(t), (size_t)key_->width * sizeof(float));
    worker.kernels.attention.kv_write(memory_, slots[t], 0, entry, nullptr);
    echoes.of(t, [&](int64_t slot) { worker.kernels.attention.kv_write(memory_, slot, 0, entry, nullptr); });
  }
}

LatentPlan::LatentPlan(const LatentKey& shared, bool deterministic) : key(shared), is_deterministic(deterministic) {
  const LatentSizes& s = key.sizes;
  attention.key = {0, (int32_t)s.num_heads, 1, (int32_t)s.latent, 0, key.block_size};
  attention.fixed_split = deterministic;
}

// Deterministic steps absorb every span: which form is cheaper depends on how a prompt is cut into chunks.
void LatentPlan::make(const Step& step, int workers) {
  const GroupInputs& group = step.groups[(size_t)key.group];
  parts_per_head = (int32_t)((2 * workers + key.sizes.num_heads - 1) / key.sizes.num_heads);
  for (auto* list :
       {&absorbed_rows, &start_, &length_, &kv_length_, &bidirectional_block_, &first_token_, &tables_}) {
    list->clear();
  }
  first_block.assign((size_t)step.num_spans, -1);
  blocks.clear(), items.clear();
  for (int64_t s = 0; s < step.num_spans; s++) {
    const SpanView view = step.span(s, group);
    if (!is_deterministic && key.sizes.expands(view.length, view.kv_length)) expand(view, s);
    else absorb(step, s);
  }
  absorbed = {};
  absorbed.num_tokens = (int64_t)absorbed_rows.size();
  absorbed.num_spans = (int64_t)start_.size();
  absorbed.span_start = start_.data();
  absorbed.span_length = length_.data();
  absorbed.kv_length = kv_length_.data();
  absorbed.bidirectional_block = bidirectional_block_.data();
  absorbed.groups = {{nullptr, tables_.data(), group.table_width, first_token_.data(), nullptr}};
  attention.make(absorbed, workers);
  cut_items(step, workers);
}

void LatentPlan::absorb(const Step& step, int64_t span) {
  const GroupInputs& group = step.groups[(size_t)key.group];
  const SpanView view = step.span(span, group);
  start_.push_back((int64_t)absorbed_rows.size());
  length_.push_back(view.length);
  kv_length_.push_back(view.kv_length);
  bidirectional_block_.push_back(view.bidirectional_block);
  first_token_.push_back(view.first_token);
  tables_.insert(tables_.end(), view.table, view.table + group.table_width);
  for (int64_t row = 0; row < view.length; row++) absorbed_rows.push_back(view.first_row + row);
}

void LatentPlan::expand(const SpanView& view, int64_t span) {
  first_block[(size_t)span] = (int64_t)blocks.size();
  for (int64_t token = 0; token < view.kv_length; token += kBlockRows)
    blocks.push_back({span, token, std::min(token + kBlockRows, view.kv_length)});
}

// Every head of an expanding span is an item, cut by rows only for workers that would have nothing else to do.
void LatentPlan::cut_items(const Step& step, int workers) {
  const int64_t spans = step.num_spans - absorbed.num_spans;
  const int64_t cuts = spans ? std::max<int64_t>(1, workers / (spans * key.sizes.num_heads)) : 1;
  int64_t longest = 0, most_partials = 0;
  for (int64_t s = 0; s < step.num_spans; s++) {
    if (first_block[(size_t)s] < 0) continue;
    const int64_t rows = step.span_length[s], kv_length = step.kv_length[s], part = part_tokens(kv_length);
    const int64_t per_item = std::max(kRowsPerItem, (rows + cuts - 1) / cuts);
    for (int64_t head = 0; head < key.sizes.num_heads; head++)
      for (int64_t row = 0; row < rows; row += per_item)
        items.push_back({s, head, row, std::min(row + per_item, rows)});
    longest = std::max(longest, std::min(part, round_up(kv_length, kBlockRows)));
    const int64_t parts = (kv_length + part - 1) / part;
    if (parts > 1) most_partials = std::max(most_partials, parts * std::min(rows, per_item) * (2 + key.sizes.value));
  }
  partial_floats = most_partials;
  head_table.resize((size_t)(longest / kBlockRows));
  for (size_t i = 0; i < head_table.size(); i++) head_table[i] = (int64_t)i;
}

KvLayout LatentPlan::head_layout() const {
  return {key.kind, 1, (int32_t)key.sizes.key(), (int32_t)kBlockRows, (int32_t)key.sizes.value, false};
}

KvMemory LatentPlan::head_memory(int worker) const {
  return {head_layout(), work.as<uint8_t>() + worker * work_stride + head_at};
}

LatentPlan::Offsets LatentPlan::offsets(const KernelTable& kernels, const LatentWeights& weights, int64_t head_blocks,
                                       int64_t num_partials) const {
  const LatentSizes& s = key.sizes;
  const int64_t input = std::max(kernels.linear.input_bytes(weights.expand, kBlockRows),
                                 kernels.linear.input_bytes(weights.absorb, kBlockRows));
  const int64_t widest = std::max({s.entry(), s.latent_panels() * kPanel, (s.nope_panels() + s.value_panels()) * kPanel});
  const int64_t head_bytes = kernels.attention.block_bytes(head_layout()) * head_blocks;
  Offsets at{};
  at.results = round_up(input, kCacheLine);
  at.head = at.results + round_up(kBlockRows * widest * kFloat, kCacheLine);
  at.partials = at.head + round_up(head_bytes, kCacheLine);
  at.end = at.partials + round_up(num_partials * kFloat, kCacheLine);
  return at;
}

// The more tokens a span expands with, the longer its context may be for that to pay: the spans of a step have no more
// context than the best ratio of the two gives its tokens, and each may begin a block more.
int64_t LatentPlan::most_blocks(const StepLimits& limits) const {
  if (is_deterministic) return 0;
  double most_ratio = 0;
  int64_t shortest = 1;  // span that expands
  for (int64_t blocks = 1; blocks <= (limits.context + kBlockRows - 1) / kBlockRows; blocks++) {
    const int64_t kv_length = std::min(blocks * kBlockRows, limits.context);
    while (shortest <= kv_length && !key.sizes.expands(shortest, kv_length)) shortest++;
    if (shortest > std::min(kv_length, limits.num_tokens)) continue;
    most_ratio = std::max(most_ratio, (double)kv_length / (double)shortest);
  }
  const int64_t spans = std::min(limits.num_spans, limits.num_tokens);
  const int64_t whole = spans * ((limits.context + kBlockRows - 1) / kBlockRows);
  return std::min(whole, (int64_t)((double)limits.num_tokens * most_ratio / (double)kBlockRows) + 1 + spans);
}

void LatentPlan::measure(const KernelTable& kernels, const LatentWeights& weights, const StepLimits& limits,
                         int workers, Workspace& workspace) const {
  const LatentSizes& s = key.sizes;
  const int64_t num_blocks = most_blocks(limits), part = part_tokens(limits.context);
  const int64_t longest = std::min(part, round_up(limits.context, kBlockRows));
  const int64_t parts = std::min(kMaxParts, (limits.context + kPartTokens - 1) / kPartTokens);
  const int64_t partials = parts > 1 ? parts * limits.num_tokens * (2 + s.value) : 0;
  const bool expands = num_blocks > 0;
  workspace.need(attention.partials, attention.most_bytes(limits, workers));
  workspace.need(queries, limits.num_tokens * s.num_heads * s.entry() * kFloat);
  workspace.need(sums, limits.num_tokens * s.num_heads * s.latent * kFloat);
  workspace.need(block_inputs, num_blocks * round_up(kernels.linear.input_bytes(weights.expand, kBlockRows), kCacheLine));
  workspace.need(block_keys, num_blocks * kBlockRows * s.rope * kFloat);
  const Offsets at = offsets(kernels, weights, expands ? longest / kBlockRows : 0, expands ? partials : 0);
  workspace.need(work, at.end * workers);
}

void LatentPlan::reserve(const KernelTable& kernels, const LatentWeights& weights, int workers) {
  const LatentSizes& s = key.sizes;
  const int64_t num_absorbed = (int64_t)absorbed_rows.size(), num_blocks = (int64_t)blocks.size();
  queries.reserve(num_absorbed * s.num_heads * s.entry() * kFloat);
  sums.reserve(num_absorbed * s.num_heads * s.latent * kFloat);
  block_bytes = round_up(kernels.linear.input_bytes(weights.expand, kBlockRows), kCacheLine);
  block_inputs.reserve(num_blocks * block_bytes);
  block_keys.reserve(num_blocks * kBlockRows * s.rope * kFloat);
  const Offsets at = offsets(kernels, weights, (int64_t)head_table.size(), partial_floats);
  results_at = at.results;
  head_at = at.head;
  partials_at = at.partials;
  work_stride = at.end;
  work.reserve(work_stride * workers);
}

void LatentAttention::measure(const KernelTable& kernels, const StepLimits& limits, int workers,
                              Workspace& workspace) const {
  plan_->measure(kernels, weights_, limits, workers, workspace);
}

void LatentAttention::prepare(const KernelTable& kernels, const Step&, int workers) {
  plan_->reserve(kernels, weights_, workers);
  const int64_t units = plan_->absorbed_rows.empty() ? 0 : plan_->key.sizes.num_heads * plan_->parts_per_head;
  blocks_.reset((int64_t)plan_->blocks.size(), 1, workers);
  absorb_units_.reset(units, 1, workers);
  items_.reset((int64_t)(plan_->items.size() + plan_->attention.plan.items.size()), 1, workers);
  project_units_.reset(units, 1, workers);
}

void LatentAttention::run(const Worker& worker) {
  lay_out(worker);
  absorb(worker);
  worker.barrier();
  attend(worker);
  if (plan_->absorbed_rows.empty()) return;
  worker.barrier();
  project(worker);
}

Matrix LatentAttention::of_head(const Panels& panels, int64_t head, int64_t begin, int64_t end) {
  Matrix matrix = panels.matrix;
  matrix.data += (head * panels.per_head + panels.first + begin) * matrix.panel_bytes;
  matrix.num_panels = end - begin;
  matrix.outputs = matrix.num_panels * kPanel;
  return matrix;
}

// x W^T by head for all absorbed rows: write(head, row, column, width, y) takes `width` outputs of a row.
template <class Write>
void LatentAttention::multiply_heads(const Worker& worker, Claims& units, const Panels& panels, const Input& input,
                                     Write write) {
  const LinearKernels& kernels = worker.kernels.linear;
  const int64_t num_rows = (int64_t)plan_->absorbed_rows.size(), parts = plan_->parts_per_head;
  void* prepared = plan_->input(worker.index);
  float* results = plan_->results(worker.index);
  int64_t unit, end;
  while (units.next(worker.index, unit, end)) {
    const int64_t head = unit / parts, part = unit % parts;
    const int64_t begin = panels.count * part / parts;
    const Matrix matrix = of_head(panels, head, begin, panels.count * (part + 1) / parts);
    if (matrix.num_panels == 0) continue;
    const Epilogue epilogue{EpilogueKind::store, Activation::relu, 0.0f, nullptr, results, matrix.outputs};
    for (int64_t first = 0; first < num_rows; first += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, num_rows - first);
      const float* x = input.x + head * input.head_stride + (input.index ? 0 : first * input.stride);
      kernels.prepare_input(matrix, Norm{}, x, input.stride, input.index ? input.index + first : nullptr, 0, rows, rows,
                            prepared);
      kernels.multiply(matrix, prepared, rows, 0, matrix.num_panels, plan_->is_deterministic, epilogue, worker.scratch);
      for (int64_t r = 0; r < rows; r++)
        write(head, first + r, begin * kPanel, matrix.outputs, results + r * matrix.outputs);
    }
  }
}

void LatentAttention::absorb(const Worker& worker) {
  const LatentSizes& s = plan_->key.sizes;
  const int64_t* rows = plan_->absorbed_rows.data();
  const Panels panels{weights_.absorb, s.latent_panels(), 0, s.latent_panels()};
  multiply_heads(worker, absorb_units_, panels, {q_->data(), q_->stride, s.key(), rows},
                 [&](int64_t head, int64_t row, int64_t column, int64_t width, const float* y) {
                   float* to = plan_->queries.as<float>() + (row * s.num_heads + head) * s.entry();
                   std::memcpy(to + column, y, (size_t)std::min(width, s.latent - column) * sizeof(float));
                   if (column) return;
                   const float* rotated = q_->row(rows[row]) + head * s.key() + s.nope;
                   std::memcpy(to + s.latent, rotated, (size_t)s.rope * sizeof(float));
                 });
}

void LatentAttention::project(const Worker& worker) {
  const LatentSizes& s = plan_->key.sizes;
  const Panels panels{weights_.expand, s.nope_panels() + s.value_panels(), s.nope_panels(), s.value_panels()};
  multiply_heads(worker, project_units_, panels,
                 {plan_->sums.as<float>(), s.num_heads * s.latent, s.latent, nullptr},
                 [&](int64_t head, int64_t row, int64_t column, int64_t width, const float* y) {
                   float* to = out_->row(plan_->absorbed_rows[(size_t)row]) + head * s.value + column;
                   std::memcpy(to, y, (size_t)std::min(width, s.value - column) * sizeof(float));
                 });
}

// The latents of the spans that expand, as inputs of the product that all heads take them from.
void LatentAttention::lay_out(const Worker& worker) {
  const LatentSizes& s = plan_->key.sizes;
  const GroupInputs& group = worker.step.groups[(size_t)plan_->key.group];
  const int64_t size = memory_.layout.block_size;
  float* entries = plan_->results(worker.index);
  int64_t index, end;
  while (blocks_.next(worker.index, index, end)) {
    const LatentPlan::Block& block = plan_->blocks[(size_t)index];
    const int64_t* table = worker.step.span(block.span, group).table;
    const int64_t count = block.token_end - block.token_begin;
    float* keys = plan_->block_keys.as<float>() + index * kBlockRows * s.rope;
    for (int64_t i = 0; i < count; i++) {
      const int64_t token = block.token_begin + i;
      float* entry = entries + i * s.entry();
      worker.kernels.attention.kv_read(memory_, table[token / size] * size + token % size, 0, entry, nullptr);
      std::memcpy(keys + i * s.rope, entry + s.latent, (size_t)s.rope * sizeof(float));
    }
    worker.kernels.linear.prepare_input(weights_.expand, Norm{}, entries, s.entry(), nullptr, 0, count, count,
                                        plan_->block_inputs.as<uint8_t>() + index * plan_->block_bytes);
  }
}

void LatentAttention::attend(const Worker& worker) {
  const LatentSizes& s = plan_->key.sizes;
  const AttentionSpec spec{(int32_t)s.num_heads, scale_, 0, 0.0f, nullptr, nullptr};
  const AttentionWork absorbed{spec,
                               memory_,
                               plan_->attention,
                               plan_->absorbed,
                               plan_->queries.as<float>(),
                               s.num_heads * s.entry(),
                               plan_->sums.as<float>(),
                               s.num_heads * s.latent};
  const auto expanding = (int64_t)plan_->items.size();
  int64_t index, end;
  while (items_.next(worker.index, index, end)) {
    if (index < expanding) attend_expanded(worker, plan_->items[(size_t)index]);
    else run_item(worker, absorbed, index - expanding, -1);
  }
}

void LatentAttention::attend_expanded(const Worker& worker, const LatentPlan::Item& item) const {
  const LatentSizes& s = plan_->key.sizes;
  const AttentionKernels& kernels = worker.kernels.attention;
  const AttentionSpec spec{1, scale_, 0, 0.0f, nullptr, nullptr};
  const KvMemory memory = plan_->head_memory(worker.index);
  SpanView span = worker.step.span(item.span, worker.step.groups[(size_t)plan_->key.group]);
  const int64_t part = part_tokens(span.kv_length), keys_end = visible_end(span, item.row_end);
  const int64_t parts = (keys_end + part - 1) / part;
  const int64_t stride = (item.row_end - item.row_begin) * (2 + s.value);
  const float* q = q_->data() + item.head * s.key();
  float* out = out_->data() + item.head * s.value;
  span.table = plan_->head_table.data();
  for (int64_t i = 0; i < parts; i++) {
    const int64_t begin = i * part, end = std::min(begin + part, keys_end);
    expand(worker, item, begin, end);
    span.first_token = begin;
    float* partial = parts > 1 ? plan_->partials(worker.index) + i * stride : nullptr;
    const AttentionPart one{span, 0, item.row_begin, item.row_end, begin, end};
    kernels.attend(spec, memory, one, nullptr, q, q_->stride, out, out_->stride, partial, worker.scratch);
  }
  if (parts > 1)
    kernels.merge(spec, memory, span, out, out_->stride, 0, item.row_begin, item.row_end,
                  plan_->partials(worker.index), parts, stride);
}

// Keys and values of one head for tokens [begin, end) of a span, to the worker's memory.
void LatentAttention::expand(const Worker& worker, const LatentPlan::Item& item, int64_t begin, int64_t end) const {
  const LatentSizes& s = plan_->key.sizes;
  const int64_t count = s.nope_panels() + s.value_panels();
  const Matrix matrix = of_head({weights_.expand, count, 0, count}, item.head, 0, count);
  const KvMemory memory = plan_->head_memory(worker.index);
  float* results = plan_->results(worker.index);
  const Epilogue epilogue{EpilogueKind::store, Activation::relu, 0.0f, nullptr, results, matrix.outputs};
  alignas(64) float key[kMaxHeadDim];
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t index = plan_->first_block[(size_t)item.span] + first / kBlockRows;
    const LatentPlan::Block& block = plan_->blocks[(size_t)index];
    const int64_t rows = block.token_end - block.token_begin;
    const float* shared = plan_->block_keys.as<float>() + index * kBlockRows * s.rope;
    worker.kernels.linear.multiply(matrix, plan_->block_inputs.as<uint8_t>() + index * plan_->block_bytes, rows, 0,
                                   count, false, epilogue, worker.scratch);
    for (int64_t r = 0; r < rows; r++) {
      const float* row = results + r * matrix.outputs;
      std::memcpy(key, row, (size_t)s.nope * sizeof(float));
      std::memcpy(key + s.nope, shared + r * s.rope, (size_t)s.rope * sizeof(float));
      worker.kernels.attention.kv_write(memory, first - begin + r, 0, key, row + s.nope_panels() * kPanel);
    }
  }
}

}  // namespace ridgeline
