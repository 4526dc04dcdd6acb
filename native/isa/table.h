// Builds this instruction set's function table from the headers above it.
#pragma once
#include <cmath>
#include <cstring>

#include "../kernels.h"

#include "expand.h"
#include "dot.h"
#include "elementwise.h"
#include "attend.h"
#include "sealed.h"

namespace headrace::HEADRACE_NS {
static const Kernels kTable{HEADRACE_ISA_NAME, dot_rows, expand_rows, gemm, rmsnorm, activate,
                            axpy, attend_tile, merge, read_bytes, multiply_adds, exponential, from_bf16_n,
                            expand_nvfp4_keys, expand_fp8_rows, expand_fp8_columns};
}
