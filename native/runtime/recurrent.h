// Recurrent layers on the tape. Each worker takes the same channels or heads of every span, so that spans of any lengths
// divide evenly, and no result depends on the number of workers.
#pragma once

#include "kernels/recurrent/types.h"
#include "runtime/instruction.h"

namespace ridgeline {

// One part of a layer's recurrent state: `size` floats for each block of a cache group.
struct StatePart {
  float* memory;
  int64_t size;
  int32_t group;

  RecurrentSpan span(const Step& step, int64_t index) const;
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
