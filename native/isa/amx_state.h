// The tile registers of a thread: eight tiles of 16 rows x 64 bytes.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace headrace {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_nbytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (int i = 0; i < 8; ++i) {
      row_nbytes[i] = 64;
      rows[i] = 16;
    }
  }
};

// While they are in use; empty ones cost nothing at a switch of threads.
class TilesInUse {
 public:
  explicit TilesInUse(const TileConfig& config = TileConfig()) {
    asm volatile("" : : "r"(&config) : "memory");  // the intrinsic names only its first bytes as read
    _tile_loadconfig(&config);
  }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

}  // namespace
}  // namespace headrace
