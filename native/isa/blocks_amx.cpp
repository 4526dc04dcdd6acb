// Products of whole blocks on AMX-INT8.
#define HEADRACE_NS blocks_amx
#include "amx_state.h"

namespace headrace::HEADRACE_NS {
namespace {

class Tiles : public TilesInUse {
 public:
  explicit Tiles(int row_nbytes) : TilesInUse(config(row_nbytes)) {}

 private:
  static TileConfig config(int row_nbytes) {
    TileConfig c;
    for (int i = 0; i < 8; ++i) c.row_nbytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 32 : row_nbytes);
    c.rows[6] = c.rows[7] = 8;
    return c;
  }
};

}  // namespace
}  // namespace headrace::HEADRACE_NS

#define HEADRACE_ZERO(i) _tile_zero(i)
#define HEADRACE_LOAD(i, p, stride) _tile_loadd(i, p, stride)
#define HEADRACE_STORE(i, p, stride) _tile_stored(i, p, stride)
#define HEADRACE_DOT(sums, a, b) _tile_dpbssd(sums, a, b)
#include "block_tiles_impl.h"

namespace headrace {
const BlockTileKernels& amx_block_tiles() {
  static constexpr BlockTileKernels kernels{blocks_amx::pack, blocks_amx::multiply};
  return kernels;
}
}  // namespace headrace
