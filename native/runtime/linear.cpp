#include "runtime/linear.h"

#include <algorithm>

namespace ridgeline {
namespace {

// Up to this many rows every worker prepares all inputs for itself: cheaper than meeting at a barrier.
constexpr int64_t kRowsPreparedByEach = 4;
constexpr int64_t kPreparedTogether = 16;  // rows of one tile, which one worker must lay out whole; vectors need none
constexpr int64_t kChunkBytes = 256 * 1024;  // a new stretch of memory costs about as much as reading 25 KB
constexpr int64_t kRowsAtMemorysPace = 4;    // more take longer over a chunk, and the last ones leave others idle longer
constexpr int64_t kFirstBytes = 4096;        // of the weights, on their way while a worker prepares inputs

}  // namespace

void Linear::measure(const KernelTable& kernels, const StepLimits& limits, int workers, Workspace& workspace) const {
  const int64_t rows = per_logit_row() ? limits.num_rows : limits.num_tokens;
  workspace.need(*input_, most_input_bytes(kernels, matrix_, std::min(rows, kRowsPreparedByEach)) * workers);
  workspace.need(*input_, most_input_bytes(kernels, matrix_, rows));
}

void Linear::prepare(const KernelTable& kernels, const Step& step, int workers) {
  rows_ = per_logit_row() ? step.num_rows : step.num_tokens;
  if (operands_.logits) {
    epilogue_.out = step.logits;
    epilogue_.stride = step.logits_stride;
  } else {
    epilogue_.out = operands_.out->data();
    epilogue_.stride = operands_.out->stride;
  }
  each_prepares_ = rows_ <= kRowsPreparedByEach;
  const int64_t bytes = (kernels.linear.input_bytes(matrix_, rows_) + kCacheLine - 1) / kCacheLine * kCacheLine;
  input_stride_ = each_prepares_ ? bytes : 0;
  input_->reserve(each_prepares_ ? bytes * workers : bytes);
  const int64_t share = matrix_.num_panels / (4 * workers);
  const int64_t chunk_bytes = kChunkBytes / std::max<int64_t>(1, rows_ / kRowsAtMemorysPace);
  const int64_t chunk = std::clamp<int64_t>(chunk_bytes / matrix_.panel_bytes, 1, std::max<int64_t>(1, share));
  panels_.reset(matrix_.num_panels, chunk, workers);
}

void Linear::run(const Worker& worker) {
  if (rows_ == 0) return;
  const LinearKernels& kernels = worker.kernels.linear;
  void* input = input_->as<uint8_t>() + worker.index * input_stride_;
  const int64_t unit = worker.kernels.probe.tiles ? kPreparedTogether : 1;
  const auto rows = each_prepares_ ? Worker::Share{0, rows_} : worker.share(rows_, unit);
  if (const int64_t panel = panels_.peek(worker.index); panel >= 0)
    for (int64_t at = 0; at < std::min(kFirstBytes, matrix_.panel_bytes); at += kCacheLine)
      __builtin_prefetch(matrix_.data + panel * matrix_.panel_bytes + at);
  kernels.prepare_input(matrix_, norm_, operands_.in->data(), operands_.in->stride,
                        operands_.select ? worker.step.logit_rows : nullptr, rows.begin, rows.end, rows_, input);
  if (!each_prepares_) worker.barrier();
  int64_t begin, end;
  while (panels_.next(worker.index, begin, end))
    kernels.multiply(matrix_, input, rows_, begin, end, exact_batch_, epilogue_, worker.scratch);
}

}  // namespace ridgeline
