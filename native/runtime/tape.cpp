#include "runtime/tape.h"

#include <algorithm>
#include <bit>
#include <chrono>

namespace ridgeline {
namespace {

// What `prepare` reads and writes of an instruction is fetched for so many instructions ahead.
constexpr size_t kFetchedBytes = 512, kFetchedAhead = 6;

// A step's weights drive the instructions out of the caches, and to wait for each in turn would take longer than all of
// `prepare`.
void fetch(const Instruction* instruction) {
  for (size_t at = 0; at < kFetchedBytes; at += kCacheLine)
    __builtin_prefetch(reinterpret_cast<const char*>(instruction) + at, 1);
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Tape::Tape(const KernelTable& kernels, Pool* pool, bool deterministic)
    : kernels_(kernels), pool_(pool), deterministic_(deterministic) {
  need_scratch(std::max(kernels.linear.scratch_bytes, kernels.attention.scratch_bytes));
}

void Tape::need_scratch(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  const int64_t stride = (bytes + kPage - 1) / kPage * kPage + kCacheLine;  // workers' scratch in different cache sets
  scratch_stride_ = std::max(scratch_stride_, stride);
}

Buffer* Tape::add_buffer(Rows rows, int64_t width) {
  buffers_.push_back({rows, width, (width + kPanel - 1) / kPanel * kPanel});
  return &buffers_.back();
}

Buffer* Tape::add_slice(const Buffer* buffer, int64_t offset, int64_t width) {
  const Buffer* whole = buffer->slice_of ? buffer->slice_of : buffer;
  buffers_.push_back({buffer->rows, width, buffer->stride, {}, whole, buffer->offset + offset});
  return &buffers_.back();
}

SharedPlan* Tape::add_plan(const PlanKey& key) {
  for (SharedPlan& plan : plans_)
    if (plan.key == key) return &plan;
  SharedPlan& plan = plans_.emplace_back();
  plan.key = key;
  plan.fixed_split = deterministic_;
  return &plan;
}

LatentPlan* Tape::add_latent_plan(const LatentKey& key) {
  for (LatentPlan& plan : latent_plans_)
    if (plan.key == key) return &plan;
  return &latent_plans_.emplace_back(key, deterministic_);
}

int64_t Tape::allocated_bytes() const {
  int64_t bytes = scratch_.bytes() + linear_input_.bytes() + experts_memory_.bytes();
  for (const Buffer& buffer : buffers_) bytes += buffer.memory.bytes();
  for (const SharedPlan& plan : plans_) bytes += plan.partials.bytes();
  for (const LatentPlan& plan : latent_plans_) bytes += plan.bytes();
  return bytes;
}

int64_t Tape::workspace_bytes(const StepLimits& limits, int num_threads) const {
  Workspace workspace;
  workspace.need(scratch_, scratch_stride_ * num_threads);
  for (const Buffer& buffer : buffers_) {
    if (buffer.slice_of) continue;
    const int64_t rows = buffer.rows == Rows::tokens ? limits.num_tokens : limits.num_rows;
    workspace.need(buffer.memory, rows * buffer.stride * (int64_t)sizeof(float));
  }
  for (const SharedPlan& plan : plans_) workspace.need(plan.partials, plan.most_bytes(limits, num_threads));
  for (const auto& instruction : instructions_) instruction->measure(kernels_, limits, num_threads, workspace);
  return workspace.bytes();
}

void Tape::prepare(const Step& step) {
  scratch_.reserve(scratch_stride_ * pool_->size());
  for (Buffer& buffer : buffers_) {
    if (buffer.slice_of) continue;
    const int64_t rows = buffer.rows == Rows::tokens ? step.num_tokens : step.num_rows;
    buffer.memory.reserve(rows * buffer.stride * (int64_t)sizeof(float));
  }
  for (SharedPlan& plan : plans_) plan.make(step, pool_->size());
  for (LatentPlan& plan : latent_plans_) plan.make(step, pool_->size());
  for (size_t i = 0; i < instructions_.size(); i++) {
    if (i + kFetchedAhead < instructions_.size()) fetch(instructions_[i + kFetchedAhead].get());
    instructions_[i]->prepare(kernels_, step, pool_->size());
  }
}

void Tape::run(const Step& step, int64_t begin, int64_t end, double* seconds) {
  if (begin == 0) prepare(step);
  if (begin == end) return;
  step_ = &step;
  begin_ = begin;
  end_ = end;
  seconds_ = seconds;
  const auto body = [](void* tape, int worker) { static_cast<Tape*>(tape)->work(worker); };
  Team* const team = seconds || begin > 0 || end < size() ? nullptr : team_of(step);
  const bool alone = team && team->alone();
  num_workers_ = alone ? 1 : pool_->size();
  const double start = now_s(), held_up = pool_->held_up_s();
  alone ? pool_->run_alone(body, this) : pool_->run(body, this);
  if (team) team->observe(now_s() - start, pool_->held_up_s() - held_up);
}

Team* Tape::team_of(const Step& step) {
  const auto bits = (size_t)std::bit_width((uint64_t)step.num_tokens);
  return pool_->size() > 1 && bits < teams_.size() ? &teams_[bits] : nullptr;
}

void Tape::work(int worker) {
  void* scratch = scratch_.as<uint8_t>() + worker * scratch_stride_;
  const Worker self{kernels_, *pool_, *step_, worker, num_workers_, scratch, scratch_.as<void>()};
  double last = seconds_ && worker == 0 ? now_s() : 0;
  for (int64_t i = begin_; i < end_; i++) {
    instructions_[(size_t)i]->run(self);
    if (i + 1 < end_ || seconds_) pool_->barrier();
    if (seconds_ && worker == 0) {
      const double now = now_s();
      seconds_[i] = now - last;
      last = now;
    }
  }
}

}  // namespace ridgeline
