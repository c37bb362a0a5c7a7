// What Python hands over: its arrays, its names for kinds, and the refusal of what does not fit.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/types.h"

namespace ridgeline {

template <class T, size_t Dims>
using Array = nanobind::ndarray<T, nanobind::ndim<Dims>, nanobind::c_contig, nanobind::device::cpu>;

// Each of these throws std::invalid_argument.
inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

inline void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

template <class Enum, size_t N>
Enum by_name(const char* what, const std::pair<const char*, Enum> (&names)[N], const std::string& name) {
  std::string known;
  for (const auto& [each, value] : names) {
    if (name == each) return value;
    known += known.empty() ? each : std::string(", ") + each;
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is none of: " + known);
}

inline KvKind kv_kind_of(const std::string& name) {
  return by_name<KvKind>("kind of keys and values",
                         {{"f32", KvKind::f32}, {"bf16", KvKind::bf16}, {"int8", KvKind::int8}, {"fp8", KvKind::fp8},
                          {"int4", KvKind::int4}}, name);
}

}  // namespace ridgeline
