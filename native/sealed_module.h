#pragma once
#include <nanobind/nanobind.h>

namespace headrace {
void bind_sealed(nanobind::module_& m);
}
