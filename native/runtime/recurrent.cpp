#include "runtime/recurrent.h"

namespace ridgeline {
namespace {

constexpr int64_t kChannels = 32;  // a multiple of every level's vector and of a cache line

Columns columns(const Buffer* buffer) { return buffer ? Columns{buffer->row(0), buffer->stride} : Columns{}; }

}  // namespace

RecurrentSpan StatePart::span(const Step& step, int64_t index) const {
  const GroupInputs& inputs = step.groups[(size_t)group];
  const int64_t slot = inputs.tables[index * inputs.table_width], length = step.span_length[index];
  return {step.span_start[index], length, length == step.kv_length[index], memory + slot * size};
}

void CausalConv::run(const Worker& worker) {
  const auto mine = worker.share(conv_.channels, kChannels);
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.convolve(conv_, state_.span(worker.step, s), columns(x_), columns(out_), mine.begin,
                                      mine.end);
}

void Scan::run(const Worker& worker) {
  const auto mine = worker.share(scan_.channels, kChannels);
  const Operands& o = operands_;
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.selective_scan(scan_, state_.span(worker.step, s), columns(o.x), columns(o.dt),
                                            columns(o.b), columns(o.c), columns(o.out), mine.begin, mine.end);
}

void Recur::run(const Worker& worker) {
  const auto mine = worker.share(recurrence_.blocks());
  const Operands& o = operands_;
  const RecurrenceRows rows{columns(o.q),  columns(o.k),    columns(o.v),
                            columns(o.dt), columns(o.beta), columns(o.out)};
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.recur(recurrence_, rows, state_.span(worker.step, s), mine.begin, mine.end, by_token_,
                                   worker.scratch);
}

void NormGate::run(const Worker& worker) {
  const int64_t groups = out_->width / norm_.width;
  const auto share = worker.share(worker.step.num_tokens * groups);
  for (int64_t i = share.begin; i < share.end; i++) {
    const int64_t t = i / groups, at = i % groups * norm_.width;
    worker.kernels.recurrent.gated_norm(norm_, x_->row(t) + at, z_->row(t) + at, weight_ + (shared_weight_ ? 0 : at),
                                        out_->row(t) + at);
  }
}

}  // namespace ridgeline
