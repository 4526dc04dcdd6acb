// Products of tiles on AVX-512 BF16. One vpdpbf16ps multiplies 32 pairs of bfloat16 where one vfmadd multiplies 16 of
// float32, at the same rate (3.67 G instructions a second each on one Zen 4 core, 2026-11), so two terms for each
// activation are no gain: chosen by name only ("avx512_bf16"), as a second implementation of the tiles.
#include "tile_parts.h"

namespace headrace {
namespace {

// Sixteen rows times sixteen tokens.
void block(const uint16_t* a, int64_t terms, const uint16_t* b, int64_t steps, float* sums) {
  __m512 acc[kTile];
  for (auto& v : acc) v = _mm512_setzero_ps();
  const auto add = [&](const uint16_t* w, const uint16_t* x) {
    for (int64_t p = 0; p < kTile; ++p) {
      const __m512bh pairs = (__m512bh)_mm512_load_si512(x + p * kStep);
      for (int64_t i = 0; i < kTile; ++i) {
        int32_t word;
        __builtin_memcpy(&word, w + i * kStep + 2 * p, 4);
        acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)_mm512_set1_epi32(word), pairs);
      }
    }
  };
  for (int64_t s = 0; s < steps; ++s, a += terms * kTileWords, b += kTileTerms * kTileWords) {
    add(a, b);
    if (terms == 2) add(a + kTileWords, b);
    add(a, b + kTileWords);
  }
  for (int64_t i = 0; i < kTile; ++i) _mm512_store_ps(sums + kTile * i, acc[i]);
}

void multiply(const TileProduct& p) {
  alignas(64) float sums[kTile * kTile];
  for (int64_t t = 0; t < p.tokens; t += kTile)
    for (int64_t r = 0; r < p.rows; r += kTile) {
      block(p.weights + r / kTile * p.steps * p.terms * kTileWords, p.terms, p.blocks[t / kTile], p.steps, sums);
      store_sums(sums, p.rows - r, p.tokens - t, p.out + t, r);
    }
}

}  // namespace

const BlockTileKernels& plain_block_tiles();

const TileKernels& bf16_tiles() {
  static const TileKernels kernels{"avx512_bf16", pack_tiles, expand_tiles, multiply, pack_narrow, multiply_narrow_bf16, plain_block_tiles()};
  return kernels;
}

}  // namespace headrace
