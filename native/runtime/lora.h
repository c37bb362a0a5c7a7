// Low-rank adapters on a linear layer, each token with its own (LoRA, arXiv 2106.09685).
#pragma once

#include "runtime/instruction.h"

namespace ridgeline {

// out = y + b (a x) of the token's adapter; y where it has none. `out` may be y.
class Lora final : public Instruction {
 public:
  struct Options {
    const Buffer* x;
    const Buffer* y;
    Buffer* out;
    const float* a;  // [adapters, rank, inputs]
    const float* b;  // [adapters, rank, outputs]
    int64_t count, rank;
  };
  explicit Lora(const Options& options) : options_(options) {}
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  Options options_;
};

}  // namespace ridgeline
