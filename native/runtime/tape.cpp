#include "runtime/tape.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace ridgeline {
namespace {

// What `prepare` reads and writes of an instruction is fetched for so many instructions ahead.
constexpr size_t kFetchedBytes = 512, kFetchedAhead = 6;

// A step's weights drive the instructions out of the caches, and to wait for each in turn would take longer than all of
// `prepare`, and as long as meeting at a barrier before each is run.
template <int kToWrite>
void fetch(const Instruction* instruction) {
  for (size_t at = 0; at < kFetchedBytes; at += kCacheLine)
    __builtin_prefetch(reinterpret_cast<const char*>(instruction) + at, kToWrite);
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Tape::Tape(const KernelTable& kernels, Pool* pool, bool deterministic)
    : kernels_(kernels), pool_(pool), deterministic_(deterministic) {
  need_scratch(std::max(kernels.linear.scratch_bytes, kernels.attention.scratch_bytes));
}

Tape::~Tape() {
  try {
    finish();
  } catch (const std::runtime_error&) {  // of a process that was forked: nobody computes anything
  }
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
    if (i + kFetchedAhead < instructions_.size()) fetch<1>(instructions_[i + kFetchedAhead].get());
    instructions_[i]->prepare(kernels_, step, pool_->size());
  }
}

void Tape::run(const Step& step, int64_t begin, int64_t end, double* seconds) {
  finish();
  if (begin == 0) prepare(step);
  if (begin == end) return;
  step_ = &step;
  begin_ = begin;
  end_ = end;
  seconds_ = seconds;
  Team* const team = seconds || begin > 0 || end < size() ? nullptr : team_of(step);
  const double start = now_s(), held_up = pool_->held_up_s();
  run_body(team && team->alone());
  if (team) team->observe(now_s() - start, pool_->held_up_s() - held_up);
}

void Tape::run_body(bool alone) {
  const auto body = [](void* tape, int worker) { static_cast<Tape*>(tape)->work(worker); };
  num_workers_ = alone ? 1 : pool_->size();
  if (alone)
    pool_->run_alone(body, this);
  else if (late_)
    pool_->start(body, this);
  else
    pool_->run(body, this);
}

void Tape::start(const Step& step) {
  finish();
  prepare(step);
  step_ = &step;
  begin_ = 0;
  end_ = size();
  seconds_ = nullptr;
  team_ = team_of(step);
  start_s_ = now_s();
  held_up_s_ = pool_->held_up_s();
  late_ = pool_->size() > 1 && !(team_ && team_->alone());
  asks_.store(0);
  joins_at_.store(kNever);
  started_ = true;
  if (late_) run_body(false);
}

void Tape::finish() {
  if (!std::exchange(started_, false)) return;
  if (late_)
    pool_->finish();
  else
    run_body(team_ && team_->alone());
  late_ = false;
  if (team_) team_->observe(now_s() - start_s_, pool_->held_up_s() - held_up_s_);
}

Team* Tape::team_of(const Step& step) {
  const auto bits = (size_t)std::bit_width((uint64_t)step.num_tokens);
  return pool_->size() > 1 && bits < teams_.size() ? &teams_[bits] : nullptr;
}

// A worker's view; until `all` are there, worker 1 stands for worker 0, and counts for it at barriers.
Worker Tape::worker(int index, bool all) const {
  uint8_t* const scratch = scratch_.as<uint8_t>();
  const int first = all ? 0 : 1;
  return {kernels_, *pool_, *step_, index - first, num_workers_ - first, scratch + index * scratch_stride_,
          scratch + first * scratch_stride_, index == first ? 1 + first : 1};
}

// Returns the instruction before which worker 0 is let in, once the others are there.
int64_t Tape::join() {
  asks_.store(1);
  asks_.notify_all();
  const int64_t at = Pool::wait_while(joins_at_, kNever);
  if (at < end_) pool_->barrier();
  return at;
}

void Tape::work(int index) {
  bool all = !late_ || index == 0;
  const int64_t begin = late_ && index == 0 ? join() : begin_;
  double last = seconds_ ? now_s() : 0;
  for (int64_t i = begin; i < end_; i++) {
    Worker self = worker(index, all);
    instructions_[(size_t)i]->run(self);
    if (i + 1 < end_) fetch<0>(instructions_[(size_t)i + 1].get());
    if (i + 1 < end_ || seconds_) {
      if (!all && self.index == 0 && i + 2 == end_ && step_->has_masks) Pool::wait_while(asks_, 0);
      const bool lets_in = !all && self.index == 0 && i + 1 < end_ && asks_.load() != 0;
      if (lets_in) {
        joins_at_.store(i + 1);
        joins_at_.notify_all();
        self.arrivals = 1;
      }
      self.barrier();
      all = all || joins_at_.load() == i + 1;
    }
    if (seconds_ && self.index == 0) {
      const double now = now_s();
      seconds_[i] = now - last;
      last = now;
    }
  }
  if (!all && index == 1) {
    joins_at_.store(end_);
    joins_at_.notify_all();
  }
}

}  // namespace ridgeline
