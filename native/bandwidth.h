// Yardsticks of the host: plain reads by threads of their own, and answers to a GPU's flag.
#pragma once
#include <nanobind/nanobind.h>

void bind_bandwidth(nanobind::module_& m);
