// Any CPU.
#define HEADRACE_NS scalar
#define HEADRACE_ISA_NAME "scalar"
#define HEADRACE_TILE_TOKENS 2
#include "vec_scalar.h"

#include "table.h"

namespace headrace {
const Kernels& scalar_kernels() { return scalar::kTable; }
}  // namespace headrace
