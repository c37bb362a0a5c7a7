// Attention on the tape: the step's spans cut into items of similar cost, long contexts split and merged.
#pragma once

#include <vector>

#include "runtime/instruction.h"

namespace ridgeline {

// Queries [row_begin, row_end) of a span with the keys [key_begin, key_end), for one KV head. Items of one `merge` are
// partial results; with `merge` < 0 the item is the whole of its rows.
struct AttentionItem {
  int32_t span, head;
  int64_t row_begin, row_end, key_begin, key_end;
  int64_t merge;
  int64_t part;
};

// Partial results of the same rows, in the order of their keys.
struct AttentionMerge {
  int32_t span, head;
  int64_t row_begin, row_end;
  int64_t num_parts;
  int64_t offset;  // floats into the partials
  int64_t stride;  // floats between parts
};

struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<AttentionMerge> merges;
  int64_t partial_floats = 0;
};

// What a plan depends on besides the step; layers that agree in it share the plan.
struct PlanKey {
  int32_t group;  // of the cache
  int32_t num_heads, num_kv_heads, value_dim, window, block_size;
  bool operator==(const PlanKey&) const = default;
};

// With `fixed_split` every row's keys are cut at the same positions whatever else is in the step, so that its result
// is bitwise the same in any batch.
void plan_attention(const PlanKey& key, const Step& step, int workers, bool fixed_split, AttentionPlan& plan);

// A plan, made once per step for all the layers that share it, and the memory for their partial results.
struct SharedPlan {
  PlanKey key;
  bool fixed_split;
  AttentionPlan plan;
  AlignedBuffer partials;
  std::unique_ptr<std::atomic<int64_t>[]> parts_done;
  size_t parts_capacity = 0;

  void make(const Step& step, int workers);
  // At most what `make` reserves for steps within `limits`.
  int64_t most_bytes(const StepLimits& limits, int workers) const;
};

// What the items of a plan are run on. `step` is the one that the plan was made for.
struct AttentionWork {
  const AttentionSpec& spec;
  const KvMemory& memory;
  SharedPlan& plan;
  const Step& step;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
};

// Runs item `index` of the plan, and merges its rows where it is the last of their parts to finish. `next` is the item
// that the worker will probably run after it, or -1.
void run_item(const Worker& worker, const AttentionWork& work, int64_t index, int64_t next);

class Attention final : public Instruction {
 public:
  Attention(const AttentionSpec& spec, const KvMemory& memory, SharedPlan* plan, const Buffer* q, Buffer* out)
      : spec_(spec), memory_(memory), plan_(plan), q_(q), out_(out) {}
  void prepare(const KernelTable& kernels, const Step& step, int workers) override;
  void run(const Worker& worker) override;

 private:
  AttentionSpec spec_;
  KvMemory memory_;
  SharedPlan* plan_;
  const Buffer* q_;
  Buffer* out_;
  Claims items_;
};

}  // namespace ridgeline
