// The row kernels alone, for tests: the backend calls them within a step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/matrix.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {
namespace {

using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using NewRow = nb::ndarray<nb::numpy, float, nb::ndim<1>, nb::c_contig>;
using NewHeads = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;

// A new array of the shape of `like`, with its contents.
template <class New, class Like>
New copy_of(const Like& like) {
  float* data = new float[like.size()];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  if (like.size() > 0) std::memcpy(data, like.data(), like.size() * sizeof(float));
  size_t shape[2] = {};
  for (size_t i = 0; i < like.ndim(); i++) shape[i] = (size_t)like.shape(i);
  return New(data, like.ndim(), shape, owner);
}

// One ISA level's functions of rows; every method returns a new row.
class Rows {
 public:
  explicit Rows(const std::string& level) : kernels_(kernels_of(level).rows) {}

  NewRow normalize(const std::string& kind, const Row& x, float eps, const Row& weight,
                   const std::optional<Row>& bias) const {
    const NormKind norm = norm_kind_of(kind);
    require(norm != NormKind::none && (!bias || norm == NormKind::layer), "a layer norm, and no other, has a bias");
    require(weight.size() == x.size() && (!bias || bias->size() == x.size()), "weight and bias are as wide as the row");
    NewRow out = copy_of<NewRow>(x);
    kernels_.normalize({norm, eps, weight.data(), bias ? bias->data() : nullptr}, x.data(), (int64_t)x.size(), out.data());
    return out;
  }

  NewHeads rotate(const Heads& heads, const Row& cos, const Row& sin, bool interleaved) const {
    require(cos.size() == sin.size() && 2 * cos.size() <= heads.shape(1), "a head has two entries for each angle");
    NewHeads out = copy_of<NewHeads>(heads);
    for (size_t head = 0; head < heads.shape(0); head++)
      kernels_.rotate(out.data() + head * heads.shape(1), cos.data(), sin.data(), (int64_t)cos.size(), interleaved);
    return out;
  }

  NewRow add(const Row& x, const Row& y) const {
    require(x.size() == y.size(), "both rows are as wide");
    NewRow out = copy_of<NewRow>(x);
    kernels_.add(x.data(), y.data(), (int64_t)x.size(), out.data());
    return out;
  }

  NewRow scale(const Row& x, float factor) const {
    NewRow out = copy_of<NewRow>(x);
    kernels_.scale(x.data(), factor, (int64_t)x.size(), out.data());
    return out;
  }

  NewRow activate(const std::string& function, const Row& x, const std::optional<Row>& gated) const {
    require(!gated || gated->size() == x.size(), "both rows are as wide");
    NewRow out = copy_of<NewRow>(x);
    kernels_.activate(activation_of(function), x.data(), gated ? gated->data() : nullptr, (int64_t)x.size(), out.data());
    return out;
  }

  NewRow softcap(const Row& x, float cap) const {
    NewRow out = copy_of<NewRow>(x);
    kernels_.softcap(cap, x.data(), (int64_t)x.size(), out.data());
    return out;
  }

 private:
  const RowKernels& kernels_;
};

}  // namespace

void bind_rows(nb::module_& module) {
  nb::class_<Rows>(module, "Rows", "One ISA level's functions of float32 rows, for tests. Each returns a new row.")
      .def(nb::init<const std::string&>(), "level"_a)
      .def("normalize", &Rows::normalize, "kind"_a, "x"_a.noconvert(), "eps"_a, "weight"_a.noconvert(),
           "bias"_a.noconvert().none() = nb::none())
      .def("rotate", &Rows::rotate, "heads"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(),
           "interleaved"_a = false,
           "Entry i of each head [H, D] against entry i + len(cos), or entry 2i against 2i + 1.")
      .def("add", &Rows::add, "x"_a.noconvert(), "y"_a.noconvert())
      .def("scale", &Rows::scale, "x"_a.noconvert(), "factor"_a)
      .def("activate", &Rows::activate, "function"_a, "x"_a.noconvert(), "gated"_a.noconvert().none() = nb::none())
      .def("softcap", &Rows::softcap, "x"_a.noconvert(), "cap"_a);
}

}  // namespace ridgeline
