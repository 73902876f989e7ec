// Each family of kernels binds itself.
#pragma once

#include <nanobind/nanobind.h>

namespace bellmax {

void bind_steps(nanobind::module_& m);
void bind_engines(nanobind::module_& m);
void bind_lattice(nanobind::module_& m);
void bind_hyper(nanobind::module_& m);

}  // namespace bellmax
