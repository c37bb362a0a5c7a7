// The linear kernels of one ISA level: float and integer weights have kernels of their own, chosen by the matrix's kind.
#include "kernels/level.h"
#include "kernels/linear/float_multiply.h"
#include "kernels/linear/int_multiply.h"

namespace ridgeline::RIDGELINE_LEVEL {
namespace {

int64_t panel_bytes(WeightKind kind, int64_t inputs, int32_t group, bool has_zero_points) {
  return (is_float(kind) ? linear_float::panel_bytes : linear_int::panel_bytes)(kind, inputs, group, has_zero_points);
}

void pack(const Matrix& matrix, const void* rows, const float* scales, const uint8_t* zero_points,
          const int64_t* order, int64_t begin, int64_t end) {
  const auto kernel = is_float(matrix.kind) ? linear_float::pack : linear_int::pack;
  kernel(matrix, rows, scales, zero_points, order, begin, end);
}

void unpack_output(const Matrix& matrix, int64_t output, float* to) {
  (is_float(matrix.kind) ? linear_float::unpack_output : linear_int::unpack_output)(matrix, output, to);
}

int64_t input_bytes(const Matrix& matrix, int64_t rows) {
  return (is_float(matrix.kind) ? linear_float::input_bytes : linear_int::input_bytes)(matrix, rows);
}

void prepare_input(const Matrix& matrix, const Norm& norm, const float* x, int64_t stride, const int64_t* index,
                   int64_t begin, int64_t end, int64_t num_rows, void* input) {
  const auto kernel = is_float(matrix.kind) ? linear_float::prepare_input : linear_int::prepare_input;
  kernel(matrix, norm, x, stride, index, begin, end, num_rows, input);
}

void multiply(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end, bool exact_batch,
              const Epilogue& epilogue, void* scratch) {
  const auto kernel = is_float(matrix.kind) ? linear_float::multiply : linear_int::multiply;
  kernel(matrix, input, num_rows, begin, end, exact_batch, epilogue, scratch);
}

constexpr int64_t kScratchBytes = linear_float::kScratchBytes > linear_int::kScratchBytes
                                      ? linear_float::kScratchBytes
                                      : linear_int::kScratchBytes;

}  // namespace

void fill_linear(LinearKernels& kernels) {
  kernels = {panel_bytes, pack, linear_int::pack_words, unpack_output, input_bytes, prepare_input, multiply,
             kScratchBytes, kPanel == 2 * kLanes, linear_float::kPairs, linear_int::kMaxBlockRows};
}

}  // namespace ridgeline::RIDGELINE_LEVEL
