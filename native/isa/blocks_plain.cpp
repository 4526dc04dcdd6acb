// Products of whole blocks with tile registers in memory, for tests on CPUs without AMX.
#define HEADRACE_NS blocks_plain
#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_NS {
namespace {

struct Tiles {
  explicit Tiles(int row_nbytes) : width(row_nbytes / 4) {}
  const int width;  // sums of a row
  int32_t sums[4][16][16];
  int8_t bytes[8][16][64];  // 4 to 7

  void zero(int i) { std::memset(sums[i], 0, sizeof sums[i]); }
  void load(int i, const void* p, int stride) {
    for (int r = 0; r < (i < 6 ? 16 : 8); ++r)
      std::memcpy(bytes[i][r], static_cast<const char*>(p) + r * stride, static_cast<size_t>(i < 6 ? 32 : 4 * width));
  }
  void store(int i, void* p, int stride) const {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(p) + r * stride, sums[i][r], static_cast<size_t>(4 * width));
  }
  void dot(int to, int a, int b) {
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 32; ++k)
        for (int t = 0; t < width; ++t) sums[to][r][t] += bytes[a][r][k] * bytes[b][k / 4][4 * t + k % 4];
  }
};

}  // namespace
}  // namespace headrace::HEADRACE_NS

#define HEADRACE_ZERO(i) tiles.zero(i)
#define HEADRACE_LOAD(i, p, stride) tiles.load(i, p, stride)
#define HEADRACE_STORE(i, p, stride) tiles.store(i, p, stride)
#define HEADRACE_DOT(sums, a, b) tiles.dot(sums, a, b)
#include "block_tiles_impl.h"

namespace headrace {
const BlockTileKernels& plain_block_tiles() {
  static constexpr BlockTileKernels kernels{blocks_plain::pack, blocks_plain::multiply};
  return kernels;
}
}  // namespace headrace
