// Multi-head latent attention on the tape (DeepSeek-V2, arXiv 2405.04434), each span in the cheaper of two forms.
//
// Absorbed: W_k goes into the queries and W_v comes behind the weighted sum, so that all heads read the same latents,
// each once. Expanded: a head's keys and values are made from the latents first, part by part in a worker's own memory.
#pragma once

#include <vector>

#include "runtime/attention.h"

namespace ridgeline {

// Entries of a latent, of the rotated keys that all heads share, of the rest of a head's key, and of its value.
struct LatentSizes {
  int64_t num_heads, latent, rope, nope, value;

  int64_t key() const { return nope + rope; }
  int64_t entry() const { return latent + rope; }  // what the cache keeps of a token
  int64_t latent_panels() const { return (latent + kPanel - 1) / kPanel; }
  int64_t nope_panels() const { return (nope + kPanel - 1) / kPanel; }
  int64_t value_panels() const { return (value + kPanel - 1) / kPanel; }

  // Whether the last `num_tokens` of `kv_length` take fewer operations expanded: ridgeline.program.ops.latent's rule.
  bool expands(int64_t num_tokens, int64_t kv_length) const;
  bool operator==(const LatentSizes&) const = default;
};

// Matrices whose panels are cut by head. `absorb` [heads * latent, nope] is W_k the other way around; a head of
// `expand` [heads * (nope + value), latent] has its panels of W_k before those of W_v.
struct LatentWeights {
  Matrix absorb, expand;
};

// Keeps [latent | key] of every token.
class LatentWrite final : public Instruction {
 public:
  LatentWrite(const Buffer* latent, const Buffer* key, const KvMemory& memory, int32_t group)
      : latent_(latent), key_(key), memory_(memory), group_(group) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  const Buffer *latent_, *key_;
  KvMemory memory_;
  int32_t group_;
};

// What a plan depends on besides the step.
struct LatentKey {
  LatentSizes sizes;
  KvKind kind;
  int32_t group, block_size;
  bool operator==(const LatentKey&) const = default;
};

// The spans of a step by their form, made once for all the layers that share it, and those layers' working memory.
struct LatentPlan {
  // Tokens whose latents are laid out for a matrix product together.
  struct Block {
    int64_t span, token_begin, token_end;
  };
  // Query rows of one head that expand the latents for themselves.
  struct Item {
    int64_t span, head, row_begin, row_end;
  };

  explicit LatentPlan(const LatentKey& shared, bool deterministic);
  void make(const Step& step, int workers);
  // Says what `make` and `reserve` take at most for steps within `limits`.
  void measure(const KernelTable& kernels, const LatentWeights& weights, const StepLimits& limits, int workers,
               Workspace& workspace) const;
  // Sizes the memory of layers whose `expand` takes `input_bytes` for a block of rows.
  void reserve(const KernelTable& kernels, const LatentWeights& weights, int workers);

  float* results(int worker) const { return (float*)(work.as<uint8_t>() + worker * work_stride + results_at); }
  float* partials(int worker) const { return (float*)(work.as<uint8_t>() + worker * work_stride + partials_at); }
  void* input(int worker) const { return work.as<uint8_t>() + worker * work_stride; }
  int64_t bytes() const {
    return attention.partials.bytes() + queries.bytes() + sums.bytes() + block_inputs.bytes() + block_keys.bytes() +
           work.bytes();
  }
  // One head's expanded keys and values, for `attend` from block 0 on.
  KvMemory head_memory(int worker) const;
  KvLayout head_layout() const;

  LatentKey key;
  bool is_deterministic;
  int32_t parts_per_head;  // of its panels, so that all workers have something to multiply

  std::vector<int64_t> absorbed_rows;  // of the step
  Step absorbed{};                     // its spans that are, their rows side by side
  SharedPlan attention;                // of `absorbed`
  AlignedBuffer queries, sums;         // [absorbed rows][heads][entry], [..][latent]

  std::vector<int64_t> first_block;  // of each span of the step that expands
  std::vector<Block> blocks;
  std::vector<Item> items;
  std::vector<int64_t> head_table;  // block ids of head_memory
  int64_t block_bytes = 0;
  AlignedBuffer block_inputs, block_keys;  // the latents as inputs of `expand`, and [blocks][tokens][rope]

  AlignedBuffer work;  // of each worker
  int64_t work_stride = 0, results_at = 0, head_at = 0, partials_at = 0, partial_floats = 0;

 private:
  // Offsets within a worker's memory, for expanding `head_blocks` blocks at once.
  struct Offsets {
    int64_t results, head, partials, end;
  };
  Offsets offsets(const KernelTable& kernels, const LatentWeights& weights, int64_t head_blocks,
                  int64_t num_partials) const;
  int64_t most_blocks(const StepLimits& limits) const;
  void absorb(const Step& step, int64_t span);
  void expand(const SpanView& view, int64_t span);
  void cut_items(const Step& step, int workers);

  std::vector<int64_t> start_, length_, kv_length_, bidirectional_block_, first_token_, tables_;
};

class LatentAttention final : public Instruction {
 public:
  LatentAttention(const LatentWeights& weights, float scale, const KvMemory& memory, LatentPlan* plan, const Buffer* q,
                  Buffer* out)
      : weights_(weights), scale_(scale), memory_(memory), plan_(plan), q_(q), out_(out) {}
  void measure(const KernelTable& kernels, const StepLimits& limits, int workers, Workspace& workspace) const override;
  void prepare(const KernelTable& kernels, const Step& step, int workers) override;
  void run(const Worker& worker) override;

 private:
  // Panels [first, first + count) of each head.
  struct Panels {
    const Matrix& matrix;
    int64_t per_head, first, count;
  };
  struct Input {
    const float* x;
    int64_t stride, head_stride;
    const int64_t* index;  // rows of x, or null
  };
  static Matrix of_head(const Panels& panels, int64_t head, int64_t begin, int64_t end);
  template <class Write>
  void multiply_heads(const Worker& worker, Claims& units, const Panels& panels, const Input& input, Write write);

  void lay_out(const Worker& worker);
  void absorb(const Worker& worker);
  void attend(const Worker& worker);
  void attend_expanded(const Worker& worker, const LatentPlan::Item& item) const;
  void expand(const Worker& worker, const LatentPlan::Item& item, int64_t begin, int64_t end) const;
  void project(const Worker& worker);

  LatentWeights weights_;
  float scale_;
  KvMemory memory_;
  LatentPlan* plan_;
  const Buffer* q_;
  Buffer* out_;
  Claims blocks_, absorb_units_, items_, project_units_;
};

}  // namespace ridgeline
