#include "runtime/attention.h"

#include <algorithm>

namespace ridgeline {
namespace {

constexpr int64_t kRowsPerItem = 48;      // query rows x heads of a group that one item computes together
constexpr int64_t kItemsPerWorker = 3;    // enough for the claims to even out
constexpr int64_t kSmallestPart = 256;    // keys: a shorter part costs more to merge than it saves
constexpr int64_t kFixedPart = 1024;      // keys per part where the split must not depend on the batch

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Keys {
  int64_t begin, end;
};

int64_t heads_per_item(const PlanKey& key) { return key.num_heads / key.num_kv_heads; }
int64_t rows_per_item(const PlanKey& key) { return std::max<int64_t>(1, kRowsPerItem / heads_per_item(key)); }

// Floats of the partial results of `rows` query rows of an item over one part of the keys.
int64_t part_stride(const PlanKey& key, int64_t rows) {
  return round_up(rows * heads_per_item(key) * (2 + key.value_dim), kCacheLine / (int64_t)sizeof(float));
}

// The keys that rows [row_begin, row_end) of a span see, the start rounded down to a block.
Keys visible(const PlanKey& key, const SpanView& span, int64_t row_begin, int64_t row_end) {
  const int64_t start = span.kv_length - span.length;
  const int64_t run_end = start + round_up(row_end, span.bidirectional_block);
  Keys keys{span.first_token, std::min(run_end, span.kv_length)};
  if (key.window > 0) keys.begin = std::max(keys.begin, start + row_begin - key.window + 1);
  keys.begin = keys.begin / key.block_size * key.block_size;
  return keys;
}

class Planner {
 public:
  Planner(const PlanKey& key, const Step& step, int workers, bool fixed_split, AttentionPlan& plan)
      : key_(key), step_(step), workers_(workers), fixed_split_(fixed_split), plan_(plan) {}

  void run() {
    rows_per_item_ = rows_per_item(key_);
    part_keys_ = fixed_split_ ? kFixedPart : part_of_even_work();
    for (int64_t s = 0; s < step_.num_spans; s++) {
      const SpanView span = step_.span(s, step_.groups[(size_t)key_.group]);
      for (int32_t head = 0; head < key_.num_kv_heads; head++)
        for (int64_t row = 0; row < span.length; row += rows_per_item_)
          add((int32_t)s, head, span, row, std::min(row + rows_per_item_, span.length));
    }
  }

 private:
  // Keys per part so that all workers have something to do, INT64_MAX where whole rows are enough for that.
  int64_t part_of_even_work() const {
    int64_t items = 0, work = 0;
    for (int64_t s = 0; s < step_.num_spans; s++) {
      const SpanView span = step_.span(s, step_.groups[(size_t)key_.group]);
      const int64_t blocks = (span.length + rows_per_item_ - 1) / rows_per_item_;
      const Keys keys = visible(key_, span, 0, span.length);
      items += blocks * key_.num_kv_heads;
      work += blocks * key_.num_kv_heads * (keys.end - keys.begin);
    }
    if (workers_ == 1 || items >= kItemsPerWorker * workers_) return INT64_MAX;
    return round_up(std::max(kSmallestPart, work / (kItemsPerWorker * workers_)), key_.block_size);
  }

  void add(int32_t span_index, int32_t head, const SpanView& span, int64_t row_begin, int64_t row_end) {
    const Keys keys = visible(key_, span, row_begin, row_end);
    const int64_t first = part_keys_ == INT64_MAX ? keys.begin : keys.begin / part_keys_ * part_keys_;
    const int64_t parts = part_keys_ == INT64_MAX ? 1 : (keys.end - first + part_keys_ - 1) / part_keys_;
    AttentionItem item{span_index, head, row_begin, row_end, keys.begin, keys.end, -1, 0};
    if (parts == 1 && !fixed_split_) {
      plan_.items.push_back(item);
      return;
    }
    const int64_t stride = part_stride(key_, row_end - row_begin);
    item.merge = (int64_t)plan_.merges.size();
    plan_.merges.push_back({span_index, head, row_begin, row_end, parts, plan_.partial_floats, stride});
    plan_.partial_floats += parts * stride;
    for (item.part = 0; item.part < parts; item.part++) {
      item.key_begin = std::max(keys.begin, first + item.part * part_keys_);
      item.key_end = std::min(keys.end, first + (item.part + 1) * part_keys_);
      plan_.items.push_back(item);
    }
  }

  const PlanKey& key_;
  const Step& step_;
  const int workers_;
  const bool fixed_split_;
  AttentionPlan& plan_;
  int64_t rows_per_item_ = 0;
  int64_t part_keys_ = 0;
};

int64_t cost_of(const AttentionItem& item) {
  return (item.row_end - item.row_begin) * (item.key_end - item.key_begin);
}

// The costliest first, so that the last item to finish is a short one, and every worker's share alike: of items that
// cost the same, each worker gets neighbours, which read the same keys.
void deal(int workers, std::vector<AttentionItem>& items) {
  const auto costlier = [](const AttentionItem& a, const AttentionItem& b) { return cost_of(a) > cost_of(b); };
  std::stable_sort(items.begin(), items.end(), costlier);
  std::vector<std::vector<AttentionItem>> shares((size_t)workers);
  size_t turn = 0;  // who gets the larger part of a run
  for (size_t begin = 0, end; begin < items.size(); begin = end, turn++) {
    for (end = begin + 1; end < items.size() && cost_of(items[end]) == cost_of(items[begin]);) end++;
    for (size_t i = begin; i < end; i++)
      shares[((i - begin) * shares.size() / (end - begin) + turn) % shares.size()].push_back(items[i]);
  }
  items.clear();
  for (const auto& share : shares) items.insert(items.end(), share.begin(), share.end());
}

}  // namespace

void plan_attention(const PlanKey& key, const Step& step, int workers, bool fixed_split, AttentionPlan& plan) {
  plan.items.clear();
  plan.merges.clear();
  plan.partial_floats = 0;
  Planner(key, step, workers, fixed_split, plan).run();
  deal(workers, plan.items);
}

// Where the split is fixed, every row has a partial result for each part that its keys lie in. Otherwise there are fewer
// items than kItemsPerWorker for each worker; their keys are that many parts, but for what rounding takes from a part,
// and as they begin and end within parts, two more each.
int64_t SharedPlan::most_bytes(const StepLimits& limits, int workers) const {
  const auto parts = [&](int64_t keys, int64_t part) {
    return std::min((limits.context + part - 1) / part, (keys + part - 1) / part + 1);
  };
  const int64_t block_rows = rows_per_item(key);
  int64_t floats = 0;
  if (fixed_split) {
    const int64_t seen = key.window > 0 ? key.window + limits.num_tokens + key.block_size : limits.context;
    const int64_t blocks = std::min(limits.num_tokens, limits.num_tokens / block_rows + limits.num_spans);
    const int64_t padding = kCacheLine / (int64_t)sizeof(float);
    const int64_t rows = limits.num_tokens * heads_per_item(key) * (2 + key.value_dim) + blocks * padding;
    floats = parts(seen, kFixedPart) * key.num_kv_heads * rows;
  } else if (workers > 1 && limits.context > kSmallestPart) {
    const int64_t items = kItemsPerWorker * workers - 1;
    const int64_t even = 3 * kItemsPerWorker * workers * (kSmallestPart + 1) / kSmallestPart;
    const int64_t most_parts = std::min(items * parts(limits.context, kSmallestPart), even);
    floats = most_parts * part_stride(key, std::min(block_rows, limits.num_tokens));
  }
  return floats * (int64_t)sizeof(float);
}

void SharedPlan::make(const Step& step, int workers) {
  plan_attention(key, step, workers, fixed_split, plan);
  partials.reserve(plan.partial_floats * (int64_t)sizeof(float));
  if (plan.merges.size() > parts_capacity) {
    parts_done = std::make_unique<std::atomic<int64_t>[]>(plan.merges.size());
    parts_capacity = plan.merges.size();
  }
}

namespace {

// Whoever finishes the last part of some rows merges them, in the order of the keys, and leaves the count at zero for
// the next layer.
void merge_rows(const Worker& worker, const AttentionWork& work, int64_t index) {
  const AttentionMerge& merge = work.plan.plan.merges[(size_t)index];
  std::atomic<int64_t>& done = work.plan.parts_done[(size_t)index];
  if (done.fetch_add(1) + 1 < merge.num_parts) return;
  done.store(0);
  const SpanView span = work.step.span(merge.span, work.step.groups[(size_t)work.plan.key.group]);
  worker.kernels.attention.merge(work.spec, work.memory, span, work.out, work.out_stride, merge.head, merge.row_begin,
                                 merge.row_end, work.plan.partials.as<float>() + merge.offset, merge.num_parts,
                                 merge.stride);
}

}  // namespace

namespace {

AttentionPart part_of(const AttentionWork& work, const AttentionItem& item) {
  const SpanView span = work.step.span(item.span, work.step.groups[(size_t)work.plan.key.group]);
  return {span, item.head, item.row_begin, item.row_end, item.key_begin, item.key_end};
}

}  // namespace

void run_item(const Worker& worker, const AttentionWork& work, int64_t index, int64_t next) {
  const AttentionItem& item = work.plan.plan.items[(size_t)index];
  float* partial = nullptr;
  if (item.merge >= 0) {
    const AttentionMerge& merge = work.plan.plan.merges[(size_t)item.merge];
    partial = work.plan.partials.as<float>() + merge.offset + item.part * merge.stride;
  }
  AttentionPart ahead;
  if (next >= 0) ahead = part_of(work, work.plan.plan.items[(size_t)next]);
  worker.kernels.attention.attend(work.spec, work.memory, part_of(work, item), next >= 0 ? &ahead : nullptr, work.q,
                                  work.q_stride, work.out, work.out_stride, partial, worker.scratch);
  if (partial) merge_rows(worker, work, item.merge);
}

void Attention::prepare(const KernelTable&, const Step&, int workers) {
  items_.reset((int64_t)plan_->plan.items.size(), 1, workers);
}

void Attention::run(const Worker& worker) {
  const AttentionWork work{spec_,       memory_,     *plan_,       worker.step,
                           q_->data(), q_->stride, out_->data(), out_->stride};
  int64_t index, end;
  while (items_.next(worker.index, index, end)) run_item(worker, work, index, items_.peek(worker.index));
}

}  // namespace ridgeline
