// Instructions over the rows of a step other than matrix products and attention.
#pragma once

#include <optional>
#include <vector>

#include "runtime/instruction.h"

namespace ridgeline {

// A table of rows that ids look up: a plain one, or the packed matrix of a tied head.
struct Table {
  std::optional<Matrix> packed;
  WeightKind kind = WeightKind::f32;  // of the plain rows: f32 or bf16
  const uint8_t* rows = nullptr;
};

class Embed final : public Instruction {
 public:
  enum class Ids : uint8_t { tokens, positions, types };
  // With a `vocab` a token's id is that of its row, plus its type times `vocab`.
  Embed(const Table& table, Ids ids, float scale, Buffer* out, int64_t vocab = 0)
      : table_(table), ids_(ids), scale_(scale), out_(out), vocab_(vocab) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Table table_;
  Ids ids_;
  float scale_;
  Buffer* out_;
  int64_t vocab_;
};

// cos and sin of position * frequency, times `scale`: [T, frequencies] each.
class RopeAngles final : public Instruction {
 public:
  RopeAngles(std::vector<float> frequencies, float scale, Buffer* cos, Buffer* sin)
      : frequencies_(std::move(frequencies)), scale_(scale), cos_(cos), sin_(sin) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  std::vector<float> frequencies_;
  float scale_;
  Buffer *cos_, *sin_;
};

// A row-wise function of one or two buffers.
class RowWise final : public Instruction {
 public:
  enum class Function : uint8_t { normalize, add, add_row, scale, activate, gate, gate_rows, softcap, select };
  struct Operands {
    const Buffer* x;
    const Buffer* y;  // the second operand of add and gate, and the gates of gate_rows, one a row
    Buffer* out;      // may be x
  };
  struct Options {
    Norm norm{};
    Activation activation{};
    float factor = 0;      // of scale; the cap of softcap
    int64_t head_dim = 0;  // normalize: over heads of this many entries, 0: over the row
    const float* row = nullptr;  // of add_row, added to every row of x
  };
  RowWise(Function function, const Operands& operands, const Options& options)
      : function_(function), operands_(operands), options_(options) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Function function_;
  Operands operands_;
  Options options_;
};

// By how much each position turns, and which entries of a head turn: pairs (offset + i, offset + i + pairs), or
// (offset + 2i, offset + 2i + 1).
struct Rotation {
  const Buffer *cos = nullptr, *sin = nullptr;  // null: none
  bool interleaved = false;
  int64_t offset = 0;

  void turn(const Worker& worker, int64_t row, float* head) const {
    worker.kernels.rows.rotate(head + offset, cos->row(row), sin->row(row), cos->width, interleaved);
  }
};

// Every head of x rotated, to `out`, which may be x.
class Rotate final : public Instruction {
 public:
  Rotate(const Rotation& rotation, int64_t head_dim, const Buffer* x, Buffer* out)
      : rotation_(rotation), head_dim_(head_dim), x_(x), out_(out) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Rotation rotation_;
  int64_t head_dim_;
  const Buffer* x_;
  Buffer* out_;
};

// The first token at or after `token` that is not in the block of `block_size` tokens of the one before it: writing a
// block's first token clears the block, so one worker must write all its tokens, in order.
int64_t block_start(const Step& step, int32_t group, int64_t block_size, int64_t token);

// Queries, keys and values by head: normalises and rotates queries and keys in place where asked, and writes keys and
// values to the cache.
class Heads final : public Instruction {
 public:
  struct Options {
    Buffer* q;  // null: keys and values alone
    Buffer* k;
    const Buffer* v;
    Norm q_norm, k_norm;
    Rotation rotation;
    KvMemory memory;
    int32_t group;  // of the cache
  };
  explicit Heads(const Options& options)
      : options_(options), num_queries_(options.q ? (int32_t)(options.q->width / options.memory.layout.head_dim) : 0) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  void head(const Worker& worker, int64_t token, int32_t head) const;
  void write(const Worker& worker, int64_t token, int64_t slot, int32_t kv_head) const;

  Options options_;
  int32_t num_queries_;
};

// Decides the rows that the step samples itself.
class Sample final : public Instruction {
 public:
  // Needs kernels.sample.scratch_bytes(vocab_size) of scratch.
  explicit Sample(int64_t vocab_size) : vocab_size_(vocab_size) {}
  void prepare(const KernelTable& kernels, const Step& step, int workers) override;
  void run(const Worker& worker) override;

 private:
  // Decides fewer rows than workers: all of them weigh the tokens of one.
  void run_shared(const Worker& worker);
  void decide(const Worker& worker, SampleRow* row) const;

  int64_t vocab_size_;
  Claims rows_;
};

}  // namespace ridgeline
