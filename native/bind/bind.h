#pragma once

#include <nanobind/nanobind.h>

namespace ridgeline {

void bind_gil(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_tuning(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_sample(nanobind::module_& module);
void bind_probe(nanobind::module_& module);
void bind_kv(nanobind::module_& module);
void bind_lookup(nanobind::module_& module);
void bind_parts(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);

}  // namespace ridgeline
