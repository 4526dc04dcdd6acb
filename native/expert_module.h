// Bindings of the experts' computation and service.
#pragma once
#include <nanobind/nanobind.h>

void bind_experts(nanobind::module_& m);
