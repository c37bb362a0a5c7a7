#include "runtime/recurrent.h"

#include <cstring>

namespace ridgeline {
namespace {

constexpr int64_t kChannels = 32;  // a multiple of every level's vector and of a cache line

Columns columns(const Buffer* buffer) { return buffer ? Columns{buffer->row(0), buffer->stride} : Columns{}; }

}  // namespace

RecurrentSpan StatePart::span(const Step& step, int64_t index) const {
  const GroupInputs& inputs = step.groups[(size_t)group];
  const int64_t slot = inputs.tables[index * inputs.table_width], length = step.span_length[index];
  const int64_t first_row = step.span_start[index], start = step.kv_length[index] - length;
  RecurrentSpan span{first_row, length, start == 0, memory + slot * size};
  if (log) {
    span.log = {log + slot * log_rows * log_width, log_width, log_rows};
    span.start = start, span.pending = inputs.first_token[index], span.logs = inputs.write_slots[first_row] < 0;
  }
  return span;
}

void StatePart::write_log(const Worker& worker, std::initializer_list<const Buffer*> inputs) const {
  for (int64_t s = 0; log && s < worker.step.num_spans; s++) {
    const RecurrentSpan span = this->span(worker.step, s);
    if (!span.logs) continue;
    int64_t offset = 0;
    for (const Buffer* input : inputs) {
      if (!input) continue;
      const auto mine = worker.share(input->width, kChannels);
      for (int64_t t = 0; t < span.length; t++)
        std::memcpy(span.log.row(span.start + t) + offset + mine.begin, input->row(span.first_row + t) + mine.begin,
                    (size_t)(mine.end - mine.begin) * sizeof(float));
      offset += input->width;
    }
  }
}

void CausalConv::run(const Worker& worker) {
  const auto mine = worker.share(conv_.channels, kChannels);
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.convolve(conv_, state_.span(worker.step, s), columns(x_), columns(out_), mine.begin,
                                      mine.end);
  state_.write_log(worker, {x_});
}

void Scan::run(const Worker& worker) {
  const auto mine = worker.share(scan_.channels, kChannels);
  const Operands& o = operands_;
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.selective_scan(scan_, state_.span(worker.step, s), columns(o.x), columns(o.dt),
                                            columns(o.b), columns(o.c), columns(o.out), mine.begin, mine.end,
                                            worker.scratch);
  state_.write_log(worker, {o.x, o.dt, o.b});
}

void Recur::run(const Worker& worker) {
  const auto mine = worker.share(recurrence_.blocks());
  const Operands& o = operands_;
  const RecurrenceRows rows{columns(o.q),  columns(o.k),    columns(o.v),
                            columns(o.dt), columns(o.beta), columns(o.out)};
  for (int64_t s = 0; s < worker.step.num_spans; s++)
    worker.kernels.recurrent.recur(recurrence_, rows, state_.span(worker.step, s), mine.begin, mine.end, by_token_,
                                   worker.scratch);
  state_.write_log(worker, {o.k, o.v, o.dt, o.beta});
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
