// Linear layers on the tape: a norm, a matrix product and what follows it, in one instruction.
#pragma once

#include "runtime/instruction.h"

namespace ridgeline {

class Linear final : public Instruction {
 public:
  // `select` takes the input's rows by the step's logit rows. `out` may be the residual that the epilogue adds to.
  // `logits`: the step's own logits receive the result instead of a buffer.
  struct Operands {
    const Buffer* in;
    Buffer* out;
    bool select = false;
    bool logits = false;
  };

  // `input` holds the rows as the kernels read them; linear layers share it, for they run one after the other.
  Linear(const Matrix& matrix, const Norm& norm, const Epilogue& epilogue, const Operands& operands,
         AlignedBuffer* input, bool exact_batch)
      : matrix_(matrix),
        norm_(norm),
        epilogue_(epilogue),
        operands_(operands),
        input_(input),
        exact_batch_(exact_batch) {}

  void measure(const KernelTable& kernels, const StepLimits& limits, int workers, Workspace& workspace) const override;
  void prepare(const KernelTable& kernels, const Step& step, int workers) override;
  void run(const Worker& worker) override;

 private:
  bool per_logit_row() const { return operands_.select || operands_.in->rows == Rows::logits; }

  Matrix matrix_;
  Norm norm_;
  Epilogue epilogue_;
  Operands operands_;
  AlignedBuffer* input_;
  bool exact_batch_;
  bool each_prepares_ = false;
  int64_t rows_ = 0;
  int64_t input_stride_ = 0;  // bytes from one worker's input to the next one's, 0 where they share
  Claims panels_;
};

}  // namespace ridgeline
