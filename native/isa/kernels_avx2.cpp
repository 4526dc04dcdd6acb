// AVX2, FMA and F16C (Haswell, Zen and later). Compiled with those flags, called only where they are.
#define HEADRACE_NS avx2
#define HEADRACE_ISA_NAME "avx2"
#define HEADRACE_UNROLL
#define HEADRACE_TILE_TOKENS 3
#include "vec_avx2.h"

#include "table.h"

namespace headrace {
const Kernels& avx2_kernels() { return avx2::kTable; }
}  // namespace headrace
