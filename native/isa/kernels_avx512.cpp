// AVX-512 F, BW, VL and DQ (Skylake-X, Zen 4 and later).
#define HEADRACE_NS avx512
#define HEADRACE_ISA_NAME "avx512"
#define HEADRACE_UNROLL
#define HEADRACE_TILE_TOKENS 6
#include "vec_avx512.h"

#include "table.h"

namespace headrace {
const Kernels& avx512_kernels() { return avx512::kTable; }
}  // namespace headrace
