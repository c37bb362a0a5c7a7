// Recurrent layers on the tape. Each worker takes the same channels or heads of every span, so that spans of any lengths
// divide evenly, and no result depends on the number of workers.
#pragma once

#include <initializer_list>

#include "kernels/recurrent/types.h"
#include "runtime/instruction.h"

namespace ridgeline {

// One part of a layer's recurrent state: `size` floats for each block of a cache group, and where drafts are verified a
// log of `log_rows` tokens' inputs. Tokens without a slot in the group are logged; the group's `first_token` says how
// many before the span are in the log alone.
struct StatePart {
  float* memory;
  int64_t size;
  int32_t group;
  float* log;  // null: there is none
  int64_t log_width, log_rows;

  RecurrentSpan span(const Step& step, int64_t index) const;
  // Logs the tokens of spans that do not go into the state: this worker's columns of each input, null ones left out.
  // Rows that others may still read are others: the log has twice as many as are pending, or logged, at once.
  void write_log(const Worker& worker, std::initializer_list<const Buffer*> inputs) const;
};

class CausalConv final : public Instruction {
 public:
  CausalConv(const Convolution& conv, const StatePart& state, const Buffer* x, Buffer* out)
      : conv_(conv), state_(state), x_(x), out_(out) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Convolution conv_;
  StatePart state_;
  const Buffer* x_;
  Buffer* out_;
};

class Scan final : public Instruction {
 public:
  struct Operands {
    const Buffer *x, *dt, *b, *c;
    Buffer* out;
  };
  Scan(const SelectiveScan& scan, const StatePart& state, const Operands& operands)
      : scan_(scan), state_(state), operands_(operands) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  SelectiveScan scan_;
  StatePart state_;
  Operands operands_;
};

class Recur final : public Instruction {
 public:
  struct Operands {
    const Buffer *q, *k, *v;
    const Buffer *dt, *beta;  // null where the recurrence has none
    Buffer* out;
  };
  Recur(const Recurrence& recurrence, const StatePart& state, const Operands& operands, bool by_token)
      : recurrence_(recurrence), state_(state), operands_(operands), by_token_(by_token) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Recurrence recurrence_;
  StatePart state_;
  Operands operands_;
  bool by_token_;
};

class NormGate final : public Instruction {
 public:
  // `weight` is [group] for all groups of `norm.width` entries, or as wide as the row.
  NormGate(const GatedNorm& norm, const float* weight, bool shared_weight, const Buffer* x, const Buffer* z, Buffer* out)
      : norm_(norm), weight_(weight), shared_weight_(shared_weight), x_(x), z_(z), out_(out) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  GatedNorm norm_;
  const float* weight_;
  bool shared_weight_;
  const Buffer *x_, *z_;
  Buffer* out_;
};

}  // namespace ridgeline
