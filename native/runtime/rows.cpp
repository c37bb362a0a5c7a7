#include "runtime/rows.h"

#include <cmath>
#include <cstring>

namespace ridgeline {
namespace {

constexpr int64_t kTokensPerWorker = 16;
constexpr int64_t kMinSharedVocab = 4096;  // tokens that take longer to weigh than workers to meet

void copy_row(const Table& table, const KernelTable& kernels, int64_t id, int64_t width, float* out) {
  if (table.packed) {
    kernels.linear.unpack_output(*table.packed, id, out);
  } else if (table.kind == WeightKind::f32) {
    std::memcpy(out, table.rows + id * width * 4, (size_t)width * 4);
  } else {
    const uint8_t* row = table.rows + id * width * 2;
    for (int64_t i = 0; i < width; i++) {
      uint16_t half;
      std::memcpy(&half, row + 2 * i, 2);
      const uint32_t bits = (uint32_t)half << 16;
      std::memcpy(out + i, &bits, 4);
    }
  }
}

}  // namespace

void Embed::run(const Worker& worker) {
  const int64_t* ids = ids_ == Ids::positions ? worker.step.positions : worker.step.token_ids;
  const auto share = worker.share(worker.step.num_tokens);
  for (int64_t t = share.begin; t < share.end; t++) {
    float* out = out_->row(t);
    const int64_t row = !vocab_ ? ids[t] : ids_ == Ids::types ? ids[t] / vocab_ : ids[t] % vocab_;
    copy_row(table_, worker.kernels, row, out_->width, out);
    if (scale_ != 1.0f) worker.kernels.rows.scale(out, scale_, out_->width, out);
  }
}

void RopeAngles::run(const Worker& worker) {
  const auto share = worker.share(worker.step.num_tokens);
  for (int64_t t = share.begin; t < share.end; t++) {
    const float position = (float)worker.step.positions[t];
    float *cos = cos_->row(t), *sin = sin_->row(t);
    for (size_t i = 0; i < frequencies_.size(); i++) {
      const float angle = position * frequencies_[i];
      cos[i] = std::cos(angle) * scale_;
      sin[i] = std::sin(angle) * scale_;
    }
  }
}

void RowWise::run(const Worker& worker) {
  const RowKernels& kernels = worker.kernels.rows;
  const int64_t total = operands_.out->rows == Rows::logits ? worker.step.num_rows : worker.step.num_tokens;
  const int64_t width = operands_.out->width;
  const auto share = worker.share(total);
  for (int64_t r = share.begin; r < share.end; r++) {
    float* out = operands_.out->row(r);
    const float* x = operands_.x->row(function_ == Function::select ? worker.step.logit_rows[r] : r);
    switch (function_) {
      case Function::normalize: {
        const int64_t part = options_.head_dim ? options_.head_dim : width;
        for (int64_t i = 0; i < width; i += part)
          kernels.normalize(options_.norm.of_head(i / part, part), x + i, part, out + i);
        break;
      }
      case Function::add:
        kernels.add(x, operands_.y->row(r), width, out);
        break;
      case Function::add_row:
        kernels.add(x, options_.row, width, out);
        break;
      case Function::scale:
        kernels.scale(x, options_.factor, width, out);
        break;
      case Function::activate:
        kernels.activate(options_.activation, x, nullptr, width, out);
        break;
      case Function::gate:
        kernels.activate(options_.activation, x, operands_.y->row(r), width, out);
        break;
      case Function::gate_rows:
        kernels.scale(x, 1.0f / (1.0f + std::exp(-operands_.y->row(r)[0])), width, out);
        break;
      case Function::softcap:
        kernels.softcap(options_.factor, x, width, out);
        break;
      case Function::select:
        std::memcpy(out, x, (size_t)width * sizeof(float));
        break;
    }
  }
}

void Rotate::run(const Worker& worker) {
  const auto share = worker.share(worker.step.num_tokens);
  for (int64_t t = share.begin; t < share.end; t++) {
    float* out = out_->row(t);
    if (out_ != x_) std::memcpy(out, x_->row(t), (size_t)out_->width * sizeof(float));
    for (int64_t i = 0; i < out_->width; i += head_dim_) rotation_.turn(worker, t, out + i);
  }
}

int64_t block_start(const Step& step, int32_t group, int64_t block_size, int64_t token) {
  const int64_t* slots = step.groups[(size_t)group].write_slots;
  while (token > 0 && token < step.num_tokens && slots[token] / block_size == slots[token - 1] / block_size) token++;
  return token;
}

// Many tokens are shared out by whole blocks, few by heads: those of queries and, dearer, those of keys and values, whose
// memory is fetched meanwhile.
void Heads::run(const Worker& worker) {
  const int32_t heads = num_queries_ + options_.memory.layout.num_heads;
  const int64_t tokens = worker.step.num_tokens;
  // Blocks that get echoes are written in the order of the tokens too.
  if (tokens < kTokensPerWorker * worker.count || worker.step.num_echoes) {
    Echoes echoes = worker.step.echoes(options_.group);
    const auto queries = worker.share(num_queries_), keys = worker.share(options_.memory.layout.num_heads);
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t slot = worker.step.groups[(size_t)options_.group].write_slots[t];
      for (int64_t h = queries.begin, kv = keys.begin; h < queries.end; h++, kv++) {
        if (kv < keys.end) worker.kernels.attention.kv_fetch(options_.memory, slot, (int32_t)kv);
        head(worker, t, (int32_t)h);
      }
      for (int64_t h = keys.begin; h < keys.end; h++) head(worker, t, num_queries_ + (int32_t)h);
      echoes.of(t, [&](int64_t slot) {
        for (int64_t h = keys.begin; h < keys.end; h++) write(worker, t, slot, (int32_t)h);
      });
    }
    return;
  }
  const auto share = worker.share(tokens);
  const int64_t size = options_.memory.layout.block_size, end = block_start(worker.step, options_.group, size, share.end);
  for (int64_t t = block_start(worker.step, options_.group, size, share.begin); t < end; t++)
    for (int32_t h = 0; h < heads; h++) head(worker, t, h);
}

// Head numbers run over queries, then KV heads: a key and its value are written together.
void Heads::head(const Worker& worker, int64_t token, int32_t index) const {
  const Options& o = options_;
  const int64_t dim = o.memory.layout.head_dim;
  const bool query = index < num_queries_;
  const int32_t kv_head = index - num_queries_;
  float* x = query ? o.q->row(token) + index * dim : o.k->row(token) + kv_head * dim;
  const Norm norm = query ? o.q_norm.of_head(index, dim) : o.k_norm.of_head(kv_head, dim);
  if (norm.kind != NormKind::none) worker.kernels.rows.normalize(norm, x, dim, x);
  if (o.rotation.cos) o.rotation.turn(worker, token, x);
  if (query) return;
  write(worker, token, worker.step.groups[(size_t)o.group].write_slots[token], kv_head);
}

void Heads::write(const Worker& worker, int64_t token, int64_t slot, int32_t kv_head) const {
  const int64_t at = kv_head * options_.memory.layout.head_dim;
  worker.kernels.attention.kv_write(options_.memory, slot, kv_head, options_.k->row(token) + at,
                                    options_.v->row(token) + at);
}

void Sample::prepare(const KernelTable&, const Step& step, int workers) {
  rows_.reset(step.num_sample_rows, 1, workers);
}

void Sample::run(const Worker& worker) {
  if (worker.step.num_sample_rows < worker.count && vocab_size_ >= kMinSharedVocab) {
    run_shared(worker);
    return;
  }
  int64_t index, end;
  while (rows_.next(worker.index, index, end)) decide(worker, worker.step.sample_rows + index);
}

void Sample::decide(const Worker& worker, SampleRow* row) const {
  float* logits = worker.step.logits;
  const int64_t stride = worker.step.logits_stride;
  const bool first = row == worker.step.sample_rows || row[-1].logit_row != row->logit_row;  // or several write them
  if (first && row->mask && !(row->temperature > 0))
    row->maxima = room_for_maxima(logits + row->logit_row * stride, vocab_size_, stride);
  if (row->maxima) row->maxima[vocab_size_ / 16] = 0;
  if (!row->trial)
    worker.kernels.sample.sample(*row, logits + row->logit_row * stride, vocab_size_, worker.scratch);
  else if (row->trial->block >= 0)
    worker.kernels.sample.verify(row, logits, stride, vocab_size_, worker.scratch);
}

void Sample::run_shared(const Worker& worker) {
  const auto barrier = [](const void* worker) { static_cast<const Worker*>(worker)->barrier(); };
  const SampleTeam team{worker.index, worker.count, barrier, &worker};
  for (int64_t index = 0; index < worker.step.num_sample_rows; index++) {
    SampleRow& row = worker.step.sample_rows[index];
    const float* logits = worker.step.logits + row.logit_row * worker.step.logits_stride;
    const bool is_wide = row.temperature > 0 && (row.top_k <= 0 || row.top_k >= vocab_size_);
    if (is_wide && !row.trial && !row.told) {
      if (index > 0) worker.barrier();  // worker 0 has used its scratch for the row before
      worker.kernels.sample.sample_share(row, logits, vocab_size_, worker.scratch, worker.first_scratch, team);
    } else if (index % worker.count == worker.index) {
      decide(worker, &row);
    }
  }
}

}  // namespace ridgeline
