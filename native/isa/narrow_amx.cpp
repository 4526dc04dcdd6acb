// Products of few tokens on AMX-BF16.
#include "amx_state.h"

namespace headrace {
namespace {
using Tiles = TilesInUse;
}  // namespace
}  // namespace headrace

#define HEADRACE_ZERO(i) _tile_zero(i)
#define HEADRACE_LOAD(i, p) _tile_loadd(i, p, 64)
#define HEADRACE_STORE(i, p) _tile_stored(i, p, 64)
#define HEADRACE_DOT(sums, a, b) _tile_dpbf16ps(sums, a, b)
#include "tiles_narrow.h"

namespace headrace {
void multiply_narrow_amx(const NarrowProduct& p) { narrow(p); }
}  // namespace headrace
