#include "runtime/lora.h"

#include <cstring>

namespace ridgeline {

void Lora::run(const Worker& worker) {
  const RowKernels& kernels = worker.kernels.rows;
  const int64_t inputs = options_.x->width, outputs = options_.out->width;
  const auto share = worker.share(worker.step.num_tokens);
  for (int64_t t = share.begin; t < share.end; t++) {
    float* out = options_.out->row(t);
    const float* x = options_.x->row(t);
    if (options_.out != options_.y) std::memcpy(out, options_.y->row(t), (size_t)outputs * sizeof(float));
    const int64_t adapter = worker.step.adapters ? worker.step.adapters[t] : 0;
    if (adapter < 1 || adapter > options_.count) continue;
    const int64_t first = (adapter - 1) * options_.rank;
    for (int64_t r = first; r < first + options_.rank; r++)
      kernels.add_scaled(options_.b + r * outputs, kernels.dot(x, options_.a + r * inputs, inputs), outputs, out);
  }
}

}  // namespace ridgeline
