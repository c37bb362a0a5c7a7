// Mixtures of experts on the tape. Which experts a token goes to is known only while a step runs, so every worker finds
// out for itself: sorting a step's choices is cheaper than waiting for another worker to do it.
//
// Numbers of experts travel in float32 rows like everything else; they are small, so they are exact.
#pragma once

#include "runtime/instruction.h"

namespace ridgeline {

// The best experts of each token, best first, and what each counts for. Among equals the lower number wins.
class Route final : public Instruction {
 public:
  struct Options {
    int64_t top_k;
    bool softmax;  // else sigmoid
    bool normalize;
    float scale;
    int64_t num_groups, top_groups;
    bool two_best;      // a group is as good as its two best experts together, else as its best
    const float* bias;  // added to the scores for the choice alone, or null
  };
  struct Operands {
    const Buffer* logits;  // one for each expert
    Buffer *ids, *weights;
  };
  Route(const Options& options, const Operands& operands) : options_(options), operands_(operands) {}
  static int64_t scratch_bytes(int64_t num_experts) { return 3 * num_experts * (int64_t)sizeof(float); }
  void prepare(const KernelTable&, const Step&, int) override {}
  void run(const Worker& worker) override;

 private:
  void score(const float* logits, float* scores) const;
  // Takes the experts of all but the best groups; `groups` is room for a number of each.
  void leave_out_groups(float* choice, float* groups) const;
  void choose(const float* scores, float* choice, float* ids, float* weights) const;

  Options options_;
  Operands operands_;
};

// Who goes where: a step's pairs of a token and an expert, as rows in the order of the experts.
struct Routing {
  int64_t num_hit;        // experts that any token goes to
  const int64_t* expert;  // [num_hit], rising
  const int64_t* first;   // [num_hit + 1] rows
  const int64_t* token;   // [rows]
  const int64_t* row;     // [tokens * top_k] of each pair

  int64_t rows(int64_t hit) const { return first[hit + 1] - first[hit]; }
};

// Memory of a step's rows, which all layers with experts share: they run one after the other.
struct ExpertsMemory {
  AlignedBuffer routings;  // a copy for each worker
  AlignedBuffer inputs;    // of a product, as its kernels read them
  AlignedBuffer hidden;    // float32 rows between the two products
  AlignedBuffer results;   // float32 rows that a token's experts made

  int64_t bytes() const { return routings.bytes() + inputs.bytes() + hidden.bytes() + results.bytes(); }
};

// out = the sum over a token's experts of weight * down(gate epilogue(gate_up(x))), in the order of its choices. An
// expert that no token goes to is not read.
class Experts final : public Instruction {
 public:
  // One of the two products of every expert, whose matrices lie one after the other, and so do their biases.
  struct Product {
    Matrix first;
    Epilogue epilogue;  // `bias` is the first expert's, or null

    Matrix matrix(int64_t expert) const;
    const float* bias(int64_t expert) const;
  };
  struct Operands {
    const Buffer *x, *ids, *weights;  // a token's ids are all different
    Buffer* out;
  };
  Experts(int64_t num_experts, const Product& gate_up, const Product& down, const Operands& operands,
          ExpertsMemory* memory, bool exact_batch)
      : num_experts_(num_experts),
        gate_up_{gate_up, {}},
        down_{down, {}},
        operands_(operands),
        memory_(memory),
        exact_batch_(exact_batch) {}
  void measure(const KernelTable& kernels, const StepLimits& limits, int workers, Workspace& workspace) const override;
  void prepare(const KernelTable& kernels, const Step& step, int workers) override;
  void run(const Worker& worker) override;

 private:
  struct Stage {
    Product product;
    Claims panels;  // of all experts hit, one after the other
    int64_t row_bytes = 0;  // of inputs, but for kInputSlack an expert
  };
  // Float32 rows to multiply: those of `tokens`, or where that is null the routing's own.
  struct Source {
    const float* x;
    int64_t stride;
    const int64_t* tokens;
  };

  // What a step of so many tokens takes of the shared memory.
  struct Sizes {
    int64_t routing;     // int64s of a worker's copy
    int64_t own_input;   // bytes of one row of inputs
    int64_t inputs;      // bytes of all of them
    int64_t hidden, results;
  };
  Sizes sizes(const KernelTable& kernels, int64_t num_tokens, int workers) const;
  int64_t hidden_stride() const;
  int64_t result_stride() const { return down_.product.first.num_panels * kPanel; }

  Routing sort(const Worker& worker) const;
  void claim(Stage& stage, int64_t num_hit, int64_t most_rows, int workers) const;
  void multiply(const Worker& worker, const Routing& routing, Stage& stage, const Source& source, float* out);
  void prepare_shared(const Worker& worker, const Routing& routing, const Stage& stage, const Source& source) const;
  void prepare_rows(const Worker& worker, const Routing& routing, const Stage& stage, const Source& source,
                    int64_t hit, int64_t begin, int64_t end, void* input) const;
  void add_up(const Worker& worker, const Routing& routing) const;
  uint8_t* shared_input(const Routing& routing, const Stage& stage, int64_t hit) const;

  int64_t num_experts_;
  Stage gate_up_, down_;
  Operands operands_;
  ExpertsMemory* memory_;
  bool exact_batch_;
  int64_t num_tokens_ = 0, num_pairs_ = 0;
  int64_t routing_stride_ = 0;  // int64s of a worker's copy
  int64_t own_bytes_ = 0;       // of a worker's input, where each prepares its own
};

}  // namespace ridgeline
