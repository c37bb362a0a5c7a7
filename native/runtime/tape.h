// A program as a flat list of instructions over buffers, built once; a step is one call.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "runtime/attention.h"
#include "runtime/experts.h"
#include "runtime/instruction.h"
#include "runtime/latent.h"
#include "runtime/linear.h"
#include "runtime/rows.h"
#include "runtime/team.h"

namespace ridgeline {

class Tape {
 public:
  // Without a pool a tape can be measured, and not run.
  Tape(const KernelTable& kernels, Pool* pool, bool deterministic);
  ~Tape();

  Buffer* add_buffer(Rows rows, int64_t width);
  // Columns [offset, offset + width) of a buffer.
  Buffer* add_slice(const Buffer* buffer, int64_t offset, int64_t width);
  // Layers with the same key share one plan per step.
  SharedPlan* add_plan(const PlanKey& key);
  // What all layers with experts share.
  ExpertsMemory* experts_memory() { return &experts_memory_; }
  // What all linear layers share.
  AlignedBuffer* linear_input() { return &linear_input_; }
  LatentPlan* add_latent_plan(const LatentKey& key);
  void add(std::unique_ptr<Instruction> instruction) { instructions_.push_back(std::move(instruction)); }

  // Every worker's scratch has at least this many bytes while the tape runs. Not while it does.
  void need_scratch(int64_t bytes);

  int64_t size() const { return (int64_t)instructions_.size(); }
  // Bytes of all that the steps so far have needed: rows between instructions, and the instructions' own memory.
  int64_t allocated_bytes() const;
  // The most that steps within `limits` may need, computed by so many threads.
  int64_t workspace_bytes(const StepLimits& limits, int num_threads) const;
  bool deterministic() const { return deterministic_; }

  // Runs instructions [begin, end) for `step`. The ranges of one step are run in order, the first from 0, which sizes
  // the buffers even where it is empty. With `seconds` not null it receives the time of each instruction, from barrier
  // to barrier.
  void run(const Step& step, int64_t begin, int64_t end, double* seconds);

  // Does `run` of all instructions on the pool's other workers, while the caller is free to do something else, and
  // `finish` what is left of it together with them. What the arguments point to has to stay until then. Where there is
  // no other worker, or one worker is faster than all, everything is done in `finish`. The masks of rows to sample may
  // be written until `finish`: it is the first to read them.
  void start(const Step& step);
  // Without a step that was started it does nothing.
  void finish();

 private:
  void prepare(const Step& step);
  void work(int worker);
  Worker worker(int index, bool all) const;
  void run_body(bool alone);
  int64_t join();
  // What chooses how many workers run the step; null where all do.
  Team* team_of(const Step& step);

  const KernelTable& kernels_;
  Pool* const pool_;
  const bool deterministic_;
  std::deque<Buffer> buffers_;
  std::deque<SharedPlan> plans_;
  ExpertsMemory experts_memory_;
  AlignedBuffer linear_input_;
  std::deque<LatentPlan> latent_plans_;
  std::vector<std::unique_ptr<Instruction>> instructions_;
  AlignedBuffer scratch_;
  int64_t scratch_stride_ = 0;

  // The arguments of the call that runs.
  const Step* step_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  double* seconds_ = nullptr;
  int num_workers_ = 0;

  // A step that was started: worker 0 is late, asks to be let in, and is let in before an instruction.
  bool started_ = false, late_ = false;
  Team* team_ = nullptr;
  double start_s_ = 0, held_up_s_ = 0;
  std::atomic<int64_t> asks_{0};
  std::atomic<int64_t> joins_at_{kNever};
  static constexpr int64_t kNever = -1;

  std::array<Team, 6> teams_;  // by the bits of a step's number of tokens
};

}  // namespace ridgeline
