// What the kernels on tiles share: a transposition, and where sums go.
#pragma once
#include <immintrin.h>

#include "../tiles.h"

namespace headrace {

void pack_tiles(const float* const* x, int64_t tokens, int64_t cols, int64_t step0, int64_t steps, uint16_t* to);
void expand_tiles(const Matrix& m, int64_t row0, int64_t count, uint16_t* to);
void pack_narrow(const float* const* x, int64_t tokens, int64_t cols, Format weights, int64_t block, uint16_t* to);
void multiply_narrow_amx(const NarrowProduct& p);
void multiply_narrow_bf16(const NarrowProduct& p);

namespace {

// Sixteen rows of sixteen 32-bit words.
inline void transpose16(__m512i* v) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // column 4 q + j of rows i to i + 3, in lane q
    v[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88), high = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88), high2 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
    a[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    a[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    a[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    a[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = a[i];
}

// Sums [16 rows][16 tokens] to out[token][row], as many as there are.
inline void store_sums(const float* sums, int64_t rows, int64_t tokens, float* const* out, int64_t row) {
  __m512i v[16];
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(sums + 16 * i);
  transpose16(v);
  const __mmask16 mask = rows >= 16 ? 0xffff : static_cast<__mmask16>((1u << rows) - 1);
  for (int64_t t = 0; t < tokens && t < 16; ++t) _mm512_mask_storeu_epi32(out[t] + row, mask, v[t]);
}

}  // namespace
}  // namespace headrace
