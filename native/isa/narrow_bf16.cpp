// Products of few tokens with tile registers in memory and vdpbf16ps, for tests on CPUs without AMX.
#include <immintrin.h>

#include "../tiles.h"

namespace headrace {
namespace {

struct Tiles {
  alignas(64) float sums[4][kTile][kTile];
  alignas(64) uint16_t words[8][kTileWords];  // 4 to 7

  void zero(int i) { __builtin_memset(sums[i], 0, sizeof sums[i]); }
  void load(int i, const uint16_t* p) { __builtin_memcpy(words[i], p, sizeof words[i]); }
  void store(int i, float* to) const { __builtin_memcpy(to, sums[i], sizeof sums[i]); }
  void dot(int to, int a, int b) {
    for (int64_t row = 0; row < kTile; ++row) {
      __m512 acc = _mm512_load_ps(sums[to][row]);
      for (int64_t p = 0; p < kTile; ++p) {
        int32_t word;
        __builtin_memcpy(&word, words[a] + row * kStep + 2 * p, 4);
        acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(word), (__m512bh)_mm512_load_si512(words[b] + p * kStep));
      }
      _mm512_store_ps(sums[to][row], acc);
    }
  }
};

}  // namespace
}  // namespace headrace

#define HEADRACE_ZERO(i) tiles.zero(i)
#define HEADRACE_LOAD(i, p) tiles.load(i, p)
#define HEADRACE_STORE(i, p) tiles.store(i, p)
#define HEADRACE_DOT(sums, a, b) tiles.dot(sums, a, b)
#include "tiles_narrow.h"

namespace headrace {
void multiply_narrow_bf16(const NarrowProduct& p) { narrow(p); }
}  // namespace headrace
