// Packed matrices for Python: describe one, pack it, read an output back, and one product alone for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/matrix.h"
#include "runtime/isa.h"
#include "runtime/tuning.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T, size_t Dims>
using Maybe = std::optional<Array<T, Dims>>;

int64_t padded_outputs(const Matrix& matrix) { return matrix.num_panels * kPanel; }

void check_shape(const std::string& what, int64_t rows, int64_t width, int64_t want_rows, int64_t want_width) {
  const auto shape = [](int64_t a, int64_t b) { return "[" + std::to_string(a) + ", " + std::to_string(b) + "]"; };
  require(rows == want_rows && width == want_width,
          what + " has shape " + shape(rows, width) + ", expected " + shape(want_rows, want_width));
}

void check_range(const Matrix& matrix, int64_t begin, int64_t end) {
  require(0 <= begin && begin <= end && end <= matrix.num_panels,
          "panels [" + std::to_string(begin) + ", " + std::to_string(end) + ") are not within the matrix's " +
              std::to_string(matrix.num_panels));
}

// The layout of packed panels is the same at every level, so any level's table may say how large one is.
NativeMatrix describe(const std::string& kind, const std::string& input, int64_t outputs, int64_t inputs, int32_t group,
                      bool has_zero_points, uintptr_t address, uintptr_t order) {
  Matrix matrix{weight_kind_of(kind), input_kind_of(input), has_zero_points, group, outputs, inputs, 0, 0, nullptr, {},
                reinterpret_cast<const int32_t*>(order)};
  require(outputs > 0 && inputs > 0, "a matrix needs outputs and inputs, got " + std::to_string(outputs) + " and " +
                                         std::to_string(inputs));
  if (is_float(matrix.kind)) {
    const bool bytes = matrix.kind == WeightKind::e4m3, floats = input == "f32" || input == "bf16";
    require(bytes ? floats : kind == input, "a matrix of " + kind + " takes inputs of " +
                                                (bytes ? std::string("f32 or bf16") : kind) + ", not " + input);
    require(!bytes || (group >= 0 && group % 32 == 0), "a group is a multiple of 32 inputs, or 0 for all, got " +
                                                           std::to_string(group));
    require(!has_zero_points && order == 0, "zero points, and an order of inputs, belong to integer weights");
  } else {
    require(matrix.input == InputKind::int16 || matrix.input == InputKind::int8,
            "a matrix of " + kind + " takes inputs of int16 or int8, not " + input);
    require(!has_zero_points || matrix.kind == WeightKind::int4, "zero points belong to int4 weights");
    const bool small = matrix.kind == WeightKind::int8_super || matrix.kind == WeightKind::int8_super_minima ||
                       matrix.kind == WeightKind::nvfp4;
    require(group > 0 && group % (small ? 16 : 32) == 0 && group <= kMaxInputGroup,
            "a group is a multiple of 32 inputs up to 256, or of 16 in int8_super and nvfp4, got " + std::to_string(group));
    require(!is_table(matrix.kind) || group <= kMaxTableGroup, "a group of nf4 and fp4 is of 32 or 64 inputs");
    require(!is_super(matrix.kind) || kSuperInputs % group == 0, "groups of " + std::to_string(group) + " do not divide 256");
  }
  require(address % 64 == 0, "packed weights start at a multiple of 64 bytes");
  matrix.num_panels = (outputs + kPanel - 1) / kPanel;
  matrix.panel_bytes = kernels_of("portable").linear.panel_bytes(matrix.kind, inputs, group, has_zero_points);
  matrix.data = reinterpret_cast<const uint8_t*>(address);
  matrix.tuning = tuning_of(kernels_of("portable"), matrix, {});
  return {matrix};
}

NativeMatrix at(const NativeMatrix& self, uintptr_t address) {
  require(address % 64 == 0, "packed weights start at a multiple of 64 bytes");
  NativeMatrix moved = self;
  moved.matrix.data = reinterpret_cast<const uint8_t*>(address);
  return moved;
}

void check_packed(const Matrix& matrix) {
  require(matrix.data != nullptr, "the matrix has no memory yet: give it an address with at()");
}

void check_beside(const Matrix& matrix, int64_t num_rows, const Maybe<const float, 2>& scales,
                  const Maybe<const uint8_t, 2>& zero_points) {
  const bool plain = matrix.kind == WeightKind::f32 || matrix.kind == WeightKind::bf16;
  require(scales.has_value() == !plain, "scales belong to integers and 8-bit floats, and these need them");
  require(zero_points.has_value() == matrix.has_zero_points, "zero_points do not match has_zero_points");
  const bool one_scale = plain || matrix.kind == WeightKind::int8 || matrix.group == 0;
  const int64_t groups = one_scale ? 1 : (matrix.inputs + matrix.group - 1) / matrix.group;
  const int64_t supers = is_super(matrix.kind) ? (groups * matrix.group + kSuperInputs - 1) / kSuperInputs : 0;
  const int64_t num_scales =
      (groups + supers) * (has_minima(matrix.kind) ? 2 : 1) + (matrix.kind == WeightKind::nvfp4 ? 1 : 0);
  if (scales) check_shape("scales", (int64_t)scales->shape(0), (int64_t)scales->shape(1), num_rows, num_scales);
  if (zero_points)
    check_shape("zero_points", (int64_t)zero_points->shape(0), (int64_t)zero_points->shape(1), num_rows, groups);
}

void check_order(const Matrix& matrix, const Array<const int64_t, 1>& order, int64_t num_rows, int64_t begin,
                 int64_t end) {
  check_range(matrix, begin, end);
  require((int64_t)order.size() == padded_outputs(matrix), "order needs an entry for each of the " +
                                                               std::to_string(padded_outputs(matrix)) +
                                                               " packed outputs, got " + std::to_string(order.size()));
  for (int64_t n = begin * kPanel; n < end * kPanel; n++)
    require(order.data()[n] < num_rows,
            "order names row " + std::to_string(order.data()[n]) + " of " + std::to_string(num_rows));
}

void check_rows(const Matrix& matrix, const AnyRows& rows) {
  const nb::dlpack::dtype want = matrix.kind == WeightKind::f32    ? nb::dtype<float>()
                                 : matrix.kind == WeightKind::bf16 ? nb::dtype<uint16_t>()
                                                                   : nb::dtype<uint8_t>();
  require(rows.dtype() == want, "rows have the wrong dtype: float32 for f32, uint16 for bf16, uint8 for integers");
  const int64_t num_rows = (int64_t)rows.shape(0);
  check_shape("rows", num_rows, (int64_t)rows.shape(1), num_rows, matrix.inputs);
}

void pack(const std::string& level, const NativeMatrix& self, const AnyRows& rows, const Maybe<const float, 2>& scales,
          const Maybe<const uint8_t, 2>& zero_points, const Array<const int64_t, 1>& order, int64_t begin,
          int64_t end) {
  const Matrix& matrix = self.matrix;
  const LinearKernels& kernels = kernels_of(level).linear;
  check_packed(matrix);
  check_rows(matrix, rows);
  check_beside(matrix, (int64_t)rows.shape(0), scales, zero_points);
  check_order(matrix, order, (int64_t)rows.shape(0), begin, end);
  const nb::gil_scoped_release unlocked;
  kernels.pack(matrix, rows.data(), scales ? scales->data() : nullptr, zero_points ? zero_points->data() : nullptr,
               order.data(), begin, end);
}

using Words = nb::ndarray<const uint32_t, nb::ndim<2>, nb::device::cpu>;

void pack_words(const std::string& level, const NativeMatrix& self, const Words& words,
                const Maybe<const float, 2>& scales, const Maybe<const uint8_t, 2>& zero_points,
                const Array<const int64_t, 1>& order, int64_t begin, int64_t end) {
  const Matrix& matrix = self.matrix;
  const int64_t num_rows = (int64_t)words.shape(1);
  check_packed(matrix);
  require(matrix.kind == WeightKind::int4 && matrix.inputs % 8 == 0, "words are of int4, of a multiple of 8 inputs");
  check_shape("words", (int64_t)words.shape(0), num_rows, matrix.inputs / 8, num_rows);
  require(words.stride(1) == 1, "words of a row follow one another");
  check_beside(matrix, num_rows, scales, zero_points);
  check_order(matrix, order, num_rows, begin, end);
  const nb::gil_scoped_release unlocked;
  const Int4Words from{reinterpret_cast<const uint8_t*>(words.data()), words.stride(0) * (int64_t)sizeof(uint32_t)};
  kernels_of(level).linear.pack_words(matrix, from, scales->data(), zero_points ? zero_points->data() : nullptr,
                                      order.data(), begin, end);
}

template <class... Shape>
auto new_floats(Shape... shape) {
  const size_t count = (static_cast<size_t>(shape) * ...);
  float* data = new float[count]();
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::ndarray<nb::numpy, float, nb::ndim<sizeof...(Shape)>, nb::c_contig>(data, {static_cast<size_t>(shape)...},
                                                                                 owner);
}

auto unpack_output(const std::string& level, const NativeMatrix& self, int64_t output) {
  const LinearKernels& kernels = kernels_of(level).linear;
  check_packed(self.matrix);
  require(0 <= output && output < padded_outputs(self.matrix),
          "output " + std::to_string(output) + " is not one of " + std::to_string(padded_outputs(self.matrix)));
  for (int64_t k = 0; self.matrix.order && k < self.matrix.inputs; k++)
    require(self.matrix.order[k] < self.matrix.inputs, "the matrix has some inputs of several, so no whole output");
  auto row = new_floats(self.matrix.inputs);
  kernels.unpack_output(self.matrix, output, row.data());
  return row;
}

struct FreeAligned {
  void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<uint8_t, FreeAligned>;

// Filled with NaN, so that a kernel that reads what it did not write shows.
Buffer new_buffer(int64_t bytes) {
  Buffer buffer(static_cast<uint8_t*>(::operator new((size_t)bytes + 64, std::align_val_t(64))));
  std::memset(buffer.get(), 0xff, (size_t)bytes + 64);
  return buffer;
}

struct Product {
  std::string level;
  NativeMatrix self;
  Norm norm;
  Epilogue epilogue;
  bool exact_batch;
};

void run(const Product& product, const float* x, const int64_t* index, int64_t rows, int64_t begin, int64_t end) {
  const Matrix& matrix = product.self.matrix;
  const LinearKernels& kernels = kernels_of(product.level).linear;
  const nb::gil_scoped_release unlocked;
  const Buffer input = new_buffer(kernels.input_bytes(matrix, rows)), scratch = new_buffer(kernels.scratch_bytes);
  kernels.prepare_input(matrix, product.norm, x, matrix.inputs, index, 0, rows, rows, input.get());
  kernels.multiply(matrix, input.get(), rows, begin, end, product.exact_batch, product.epilogue, scratch.get());
}

Norm norm_of(const Matrix& matrix, const std::string& name, float eps, const Maybe<const float, 1>& weight,
             const Maybe<const float, 1>& bias) {
  const NormKind kind = norm_kind_of(name);
  require(weight.has_value() == (kind != NormKind::none), "norm_weight comes with a norm, and a norm with it");
  require(!bias || kind == NormKind::layer, "norm_bias comes with a layer norm");
  for (const auto* each : {&weight, &bias})
    require(!*each || (int64_t)(*each)->size() == matrix.inputs, "norm weight and bias have one entry per input");
  return {kind, eps, weight ? weight->data() : nullptr, bias ? bias->data() : nullptr};
}

void multiply(const std::string& level, const NativeMatrix& self, const Array<const float, 2>& x,
              const Array<float, 2>& out, const std::string& norm, float eps, const Maybe<const float, 1>& norm_weight,
              const Maybe<const float, 1>& norm_bias, const std::string& epilogue, const std::string& activation,
              float softcap, const Maybe<const float, 1>& bias, const Maybe<const int64_t, 1>& index, int64_t begin,
              std::optional<int64_t> end, bool exact_batch) {
  const Matrix& matrix = self.matrix;
  check_packed(matrix);
  check_range(matrix, begin, end.value_or(matrix.num_panels));
  check_shape("x", (int64_t)x.shape(0), (int64_t)x.shape(1), (int64_t)x.shape(0), matrix.inputs);
  const int64_t rows = (int64_t)(index ? index->size() : x.shape(0));
  for (int64_t i = 0; index && i < rows; i++)
    require(0 <= index->data()[i] && index->data()[i] < (int64_t)x.shape(0),
            "index names row " + std::to_string(index->data()[i]) + " of " + std::to_string(x.shape(0)));
  const EpilogueKind kind = epilogue_kind_of(epilogue);
  const int64_t width = padded_outputs(matrix) / (kind == EpilogueKind::gate ? 2 : 1);
  check_shape("out", (int64_t)out.shape(0), (int64_t)out.shape(1), rows, width);
  require(!bias || (int64_t)bias->size() == padded_outputs(matrix), "bias has one entry per packed output");
  require(softcap == 0.0f || kind == EpilogueKind::store, "softcap goes with the store epilogue only");
  const Product product{level, self, norm_of(matrix, norm, eps, norm_weight, norm_bias),
                        {kind, activation_of(activation), softcap, bias ? bias->data() : nullptr, out.data(), width},
                        exact_batch};
  run(product, x.data(), index ? index->data() : nullptr, rows, begin, end.value_or(matrix.num_panels));
}

}  // namespace

WeightKind weight_kind_of(const std::string& name) {
  return by_name<WeightKind>("weights of", {{"f32", WeightKind::f32}, {"bf16", WeightKind::bf16},
                                            {"int8", WeightKind::int8}, {"int8_groups", WeightKind::int8_groups},
                                            {"int8_minima", WeightKind::int8_minima},
                                            {"int4", WeightKind::int4}, {"int4_minima", WeightKind::int4_minima},
                                            {"int8_super", WeightKind::int8_super},
                                            {"int8_super_minima", WeightKind::int8_super_minima},
                                            {"int4_super_minima", WeightKind::int4_super_minima},
                                            {"mxfp4", WeightKind::mxfp4}, {"nvfp4", WeightKind::nvfp4},
                                            {"nf4", WeightKind::nf4}, {"fp4", WeightKind::fp4}, {"e4m3", WeightKind::e4m3}},
                             name);
}

InputKind input_kind_of(const std::string& name) {
  return by_name<InputKind>("inputs of", {{"f32", InputKind::f32}, {"bf16", InputKind::bf16},
                                          {"int16", InputKind::int16}, {"int8", InputKind::int8}}, name);
}

NormKind norm_kind_of(const std::string& name) {
  return by_name<NormKind>("norm", {{"none", NormKind::none}, {"rms", NormKind::rms}, {"layer", NormKind::layer}}, name);
}

Activation activation_of(const std::string& name) {
  return by_name<Activation>("activation", {{"silu", Activation::silu}, {"gelu", Activation::gelu},
                                            {"gelu_tanh", Activation::gelu_tanh},
                                            {"quick_gelu", Activation::quick_gelu}, {"relu", Activation::relu},
                                            {"relu2", Activation::relu2}, {"sigmoid", Activation::sigmoid}}, name);
}

EpilogueKind epilogue_kind_of(const std::string& name) {
  return by_name<EpilogueKind>("epilogue", {{"store", EpilogueKind::store}, {"add", EpilogueKind::add},
                                            {"activate", EpilogueKind::activate}, {"gate", EpilogueKind::gate}}, name);
}

void bind_linear(nb::module_& module) {
  nb::class_<NativeMatrix>(module, "Matrix", "A linear layer's packed weights, at an address that the caller keeps alive, as that of `order`: with it, int32 "
                              "[K], weight k multiplies input order[k].")
      .def("__init__",
           [](NativeMatrix* self, const std::string& kind, const std::string& input, int64_t outputs, int64_t inputs,
              int32_t group, bool has_zero_points, uintptr_t address, uintptr_t order) {
             new (self) NativeMatrix(describe(kind, input, outputs, inputs, group, has_zero_points, address, order));
           },
           "kind"_a, "input"_a, "outputs"_a, "inputs"_a, "group"_a = 0, "has_zero_points"_a = false, "address"_a = 0,
           "order"_a = 0)
      .def("at", at, "address"_a, "The same matrix, packed at another 64-byte aligned address.")
      .def_prop_ro("outputs", [](const NativeMatrix& self) { return self.matrix.outputs; })
      .def_prop_ro("inputs", [](const NativeMatrix& self) { return self.matrix.inputs; })
      .def_prop_ro("num_panels", [](const NativeMatrix& self) { return self.matrix.num_panels; })
      .def_prop_ro("panel_bytes", [](const NativeMatrix& self) { return self.matrix.panel_bytes; })
      .def_prop_ro("num_bytes",
                   [](const NativeMatrix& self) { return self.matrix.num_panels * self.matrix.panel_bytes; })
      .def_prop_ro("address", [](const NativeMatrix& self) { return reinterpret_cast<uintptr_t>(self.matrix.data); });
  module.def("pack", pack, "level"_a, "matrix"_a, "rows"_a.noconvert(), "scales"_a.noconvert().none(),
             "zero_points"_a.noconvert().none(), "order"_a.noconvert(), "begin"_a, "end"_a,
             "Packs panels [begin, end): packed output n is rows[order[n]], or zeros where order[n] < 0. The scales of "
             "int4_minima are followed by the minima; those of the super kinds are bytes, and behind them are the "
             "float16 numbers that they multiply. Releases the GIL.");
  module.def("pack_words", pack_words, "level"_a, "matrix"_a, "words"_a.noconvert(), "scales"_a.noconvert(),
             "zero_points"_a.noconvert().none(), "order"_a.noconvert(), "begin"_a, "end"_a,
             "As `pack`, of int4 by words uint32 [K / 8, N] of eight inputs each, the first in the low bits; the rows may lie "
             "apart. Releases the GIL.");
  module.def("unpack_output", unpack_output, "level"_a, "matrix"_a, "output"_a,
             "Packed output `output` as float32 [K].");
  module.def("multiply", multiply, "level"_a, "matrix"_a, "x"_a.noconvert(), "out"_a.noconvert(), nb::kw_only(),
             "norm"_a = "none", "eps"_a = 1e-6f, "norm_weight"_a.noconvert().none() = nb::none(),
             "norm_bias"_a.noconvert().none() = nb::none(), "epilogue"_a = "store", "activation"_a = "silu",
             "softcap"_a = 0.0f, "bias"_a.noconvert().none() = nb::none(), "index"_a.noconvert().none() = nb::none(),
             "begin"_a = 0, "end"_a = nb::none(),
             "exact_batch"_a = false,
             "out = epilogue(norm(x) W^T) for x float32 [M, K], or its rows `index`; out is float32 [M, 32 * num_panels], "
             "or [M, 16 * num_panels] for the gate epilogue. Panels [begin, end) only. Releases the GIL.");
}

}  // namespace ridgeline
