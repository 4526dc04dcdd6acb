// Products of tiles on AVX-512 BF16. One vpdpbf16ps multiplies 32 pairs of bfloat16 where one vfmadd multiplies 16 of
// float32, at the same rate (3.67 G instructions a second each on one Zen 4 core, 2026-11), so two terms for each
// activation are no gain: chosen by name only ("avx512_bf16"), as a second implementation of the tiles.
#include <algorithm>

#include "tile_parts.h"

namespace headrace {
namespace {

// Sixteen rows times sixteen tokens, added to sums.
void block(const uint16_t* a, int64_t terms, const uint16_t* b, int64_t steps, float* sums) {
  __m512 acc[kTile];
  for (int64_t i = 0; i < kTile; ++i) acc[i] = _mm512_load_ps(sums + kTile * i);
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
      std::fill(sums, sums + kTile * kTile, 0.0f);
      block(p.weights + r / kTile * p.steps * p.terms * kTileWords, p.terms, p.blocks[t / kTile], p.steps, sums);
      store_sums(sums, p.rows - r, p.tokens - t, p.out + t, r);
    }
}

void strip(const TileStrip& s) {
  alignas(64) uint16_t words[kPartSteps * kTileTerms * kTileWords];
  alignas(64) float sums[2][kTile * kTile];
  const int64_t terms = weight_terms(s.m.format), steps = tile_steps(s.m.cols);
  for (int64_t r = 0; r < s.rows; r += kTile) {
    std::fill(sums[0], sums[2], 0.0f);
    for (int64_t k = 0; k < steps; k += kPartSteps) {
      expand_strip(s, s.row0 + r, std::min(kTile, s.rows - r), k, words);
      for (int64_t t = 0; t < s.tokens; t += kTile)
        block(words, terms, s.blocks[t / kTile] + k * kTileTerms * kTileWords, std::min(kPartSteps, steps - k), sums[t / kTile]);
    }
    for (int64_t t = 0; t < s.tokens; t += kTile) store_sums(sums[t / kTile], s.rows - r, s.tokens - t, s.out + t, r);
  }
}

}  // namespace

const TileKernels& bf16_tiles() {
  static constexpr TileKernels kernels{"avx512_bf16", pack_tiles, expand_tiles, multiply, strip};
  return kernels;
}

}  // namespace headrace
