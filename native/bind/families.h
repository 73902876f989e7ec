// Each family of kernels binds itself.
#pragma once

#include <nanobind/nanobind.h>

namespace bellmax {

void bind_lattice(nanobind::module_& m);

}  // namespace bellmax
