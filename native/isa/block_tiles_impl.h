// block_tiles.h. The file that includes this one defines HEADRACE_NS and, outside of it,
//   HEADRACE_ZERO(i), HEADRACE_LOAD(i, p, stride), HEADRACE_STORE(i, p, stride), HEADRACE_DOT(sums, weights, activations)
//   Tiles  made with the bytes of a row of sums: registers 0 to 3 are 16 rows of sums, 4 and 5 weights of 16 rows x 32
//          bytes, 6 and 7 activations of 8 rows, as long as those of the sums
// where registers are literal numbers.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "../block_tiles.h"
#include "../tables.h"
#include "block_integers.h"

namespace headrace::HEADRACE_NS {
namespace {

#define HEADRACE_INLINE __attribute__((always_inline)) inline

constexpr int64_t kRows = 16;
constexpr int64_t kNearNbytes = 192;  // how far ahead of its use a row's line is asked for into the L1 cache

void pack(const float* const* x, int64_t tokens, int64_t block, uint8_t* to) {
  const int64_t width = block_width(tokens);
  to += block * block_nbytes(width);
  alignas(64) int32_t words[2][8][kBlockTokens] = {};
  alignas(64) float scales[kBlockTokens] = {};
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t v[32], apart[32];
    const float scale = 0.5f * integers(x[t] + 32 * block, v);
    for (int j = 0; j < 16; ++j) {
      apart[j] = v[2 * j];
      apart[16 + j] = v[2 * j + 1];
    }
    int8_t terms[2][32];
    split(apart, 32, terms[0], terms[1]);
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 8; ++k) std::memcpy(&words[i][k][t], terms[i] + 4 * k, 4);
    for (int64_t lane = t; lane < kBlockTokens; lane += width) scales[lane] = scale;
  }
  // Up to eight tokens: high and low terms side by side in one tile, else one tile after the other.
  const int64_t row = width < 16 ? 2 * width : width, apart = width < 16 ? width : 8 * width;
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 8; ++k) std::memcpy(to + 4 * (k * row + i * apart), words[i][k], static_cast<size_t>(4 * width));
  std::memcpy(to + 64 * width, scales, sizeof scales);
}

// Sixteen rows of a matrix as int8, group by group of four blocks. A group's memory is [2][16 rows][64]: two blocks each.
struct Band {
  const uint8_t *rows, *scales, *next;
  int64_t row_nbytes, scale_row_nbytes, count;

  // Rows [first, first + 4) of group g, of which `blocks` blocks exist.
  HEADRACE_INLINE void expand(int64_t g, int64_t blocks, int64_t first, uint8_t* to, uint32_t* scale_words) const {
    if (blocks == 4 && count == kRows) {
#pragma GCC unroll 4
      for (int64_t r = first; r < first + 4; ++r) {
        const uint8_t* q = ask(g, r);
        std::memcpy(&scale_words[r], scales + r * scale_row_nbytes + 4 * g, 4);
        store_row(_mm512_loadu_si512(q), to + 64 * r);
      }
      return;
    }
    for (int64_t r = first; r < std::min(first + 4, count); ++r) {
      const uint8_t* q = ask(g, r);
      std::memcpy(&scale_words[r], scales + r * scale_row_nbytes + 4 * g, static_cast<size_t>(blocks));
      store_row(_mm512_maskz_loadu_epi8(blocks == 4 ? ~0ull : (1ull << 16 * blocks) - 1, q), to + 64 * r);
    }
  }

 private:
  HEADRACE_INLINE const uint8_t* ask(int64_t g, int64_t r) const {
    const int64_t at = r * row_nbytes + 64 * g;
    _mm_prefetch(reinterpret_cast<const char*>(rows + at + kNearNbytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
    return rows + at;
  }

  static HEADRACE_INLINE void store_row(__m512i codes, uint8_t* to) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kE2M1Doubled)));
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
    const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
    _mm512_store_si512(to, _mm512_permutex2var_epi64(even, left, odd));
    _mm512_store_si512(to + 1024, _mm512_permutex2var_epi64(even, right, odd));
  }
};

// A block's sums: [16 rows][W high, W low] or, of sixteen tokens, all of the high ones before the low ones.
template <int W>
struct Sums {
  alignas(64) int32_t v[2 * kRows * W];
};

inline __m512i two_halves(const int32_t* a, const int32_t* b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(a))),
                            _mm256_load_si256(reinterpret_cast<const __m256i*>(b)), 1);
}

// 256 times the high sums plus the low ones of rows [16 / W i, 16 / W (i + 1)), W tokens each.
template <int W>
inline __m512i whole_sums(const Sums<W>& sums, int i) {
  __m512i high, low;
  if constexpr (W == 16) {
    high = _mm512_load_si512(sums.v + 16 * i);
    low = _mm512_load_si512(sums.v + 256 + 16 * i);
  } else {
    high = two_halves(sums.v + 32 * i, sums.v + 32 * i + 16);
    low = two_halves(sums.v + 32 * i + 8, sums.v + 32 * i + 24);
  }
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// Block k's sums, scaled, to `acc` of W registers.
template <int W, int K>
inline void add_block(const Sums<W>& sums, __m512i scale_words, const float* x_scales, const __m512i* rows, __m512* acc) {
  // Byte K of each row's word as an exponent.
  const __m512i exponents = _mm512_srli_epi32(_mm512_slli_epi32(scale_words, 24 - 8 * K), 1);
  const __m512 w = _mm512_castsi512_ps(_mm512_and_si512(exponents, _mm512_set1_epi32(0x7f800000)));
  const __m512 x = _mm512_load_ps(x_scales);
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    acc[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole_sums<W>(sums, i)), _mm512_mul_ps(_mm512_permutexvar_ps(rows[i], w), x), acc[i]);
}

#define HEADRACE_BLOCK(k, first, second, weights, words)                          \
  HEADRACE_ZERO(first);                                                    \
  HEADRACE_LOAD(weights, a + 1024 * ((k) / 2) + 32 * ((k) % 2), 64);       \
  HEADRACE_LOAD(words, x + (k) * kNbytes, kRowNbytes);                         \
  HEADRACE_DOT(first, weights, words);                                         \
  if constexpr (W == 16) {                                                 \
    HEADRACE_ZERO(second);                                                 \
    HEADRACE_LOAD(words, x + (k) * kNbytes + 32 * W, kRowNbytes);              \
    HEADRACE_DOT(second, weights, words);                                      \
  }                                                                        \
  HEADRACE_STORE(first, sums[k].v, kRowNbytes);                            \
  if constexpr (W == 16) { HEADRACE_STORE(second, sums[k].v + 256, kRowNbytes); }
#define HEADRACE_ADD(k) add_block<W, k>(sums[k], words, reinterpret_cast<const float*>(x + (k) * kNbytes + 64 * W), rows, acc[k]);

// Sums are scaled two blocks after they were stored, and weights expanded a group before they are read: loads right
// behind a store would wait for it.
template <int W>
void band_product([[maybe_unused]] Tiles& tiles, const BlockProduct& p, int64_t first) {
  constexpr int64_t kNbytes = block_nbytes(W), kRowNbytes = W < 16 ? 8 * W : 64;
  alignas(64) uint8_t ring[2][2 * 1024] = {};
  alignas(64) uint32_t scale_words[2][kRows] = {};
  Sums<W> sums[4];
  __m512 acc[4][W];
  __m512i rows[W];  // which row's scale each lane takes
  for (int i = 0; i < W; ++i) {
    alignas(64) int32_t lanes[16];
    for (int lane = 0; lane < 16; ++lane) lanes[lane] = i * (16 / W) + lane / W;
    rows[i] = _mm512_load_si512(lanes);
    for (auto& a : acc) a[i] = _mm512_setzero_ps();
  }
  const Matrix& m = *p.m;
  const int64_t blocks = m.cols / 32, whole = blocks / 4, after = first + kRows;
  const Band band{m.data + (p.row0 + first) * m.row_nbytes, m.scales + (p.row0 + first) * m.scale_row_nbytes,
                  after < p.rows ? m.data + (p.row0 + after) * m.row_nbytes : p.next != nullptr ? p.next : m.data,
                  m.row_nbytes, m.scale_row_nbytes, std::min(kRows, p.rows - first)};
  const auto expand = [&](int64_t g, int64_t row) {
    const int64_t n = std::min<int64_t>(4, blocks - 4 * g);
    if (n > 0) band.expand(g, n, row, ring[g % 2], scale_words[g % 2]);
  };
  const uint8_t* x = p.x;
  for (int64_t r = 0; r < kRows; r += 4) expand(0, r);
  for (int64_t g = 0; g < whole; ++g, x += 4 * kNbytes) {
    const uint8_t* a = ring[g % 2];
    const __m512i words = _mm512_load_si512(scale_words[g % 2]);
    HEADRACE_BLOCK(0, 0, 1, 4, 6)
    HEADRACE_BLOCK(1, 2, 3, 5, 7)
    expand(g + 1, 0);
    expand(g + 1, 4);
    HEADRACE_BLOCK(2, 0, 1, 4, 6)
    HEADRACE_ADD(0)
    HEADRACE_BLOCK(3, 2, 3, 5, 7)
    HEADRACE_ADD(1)
    expand(g + 1, 8);
    expand(g + 1, 12);
    HEADRACE_ADD(2)
    HEADRACE_ADD(3)
  }
  if (const int64_t rest = blocks % 4; rest != 0) {
    const uint8_t* a = ring[whole % 2];
    const __m512i words = _mm512_load_si512(scale_words[whole % 2]);
    HEADRACE_BLOCK(0, 0, 1, 4, 6)
    HEADRACE_ADD(0)
    if (rest > 1) {
      HEADRACE_BLOCK(1, 2, 3, 5, 7)
      HEADRACE_ADD(1)
    }
    if (rest > 2) {
      HEADRACE_BLOCK(2, 0, 1, 4, 6)
      HEADRACE_ADD(2)
    }
  }
  alignas(64) float result[kRows * W];
  for (int i = 0; i < W; ++i)
    _mm512_store_ps(result + 16 * i, _mm512_add_ps(_mm512_add_ps(acc[0][i], acc[2][i]), _mm512_add_ps(acc[1][i], acc[3][i])));
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t r = 0; r < band.count; ++r) p.out[t][first + r] = result[r * W + t];
}
#undef HEADRACE_BLOCK
#undef HEADRACE_ADD

template <int W>
void product(const BlockProduct& p) {
  Tiles tiles(W < 16 ? 8 * W : 64);
  for (int64_t r = 0; r < p.rows; r += kRows) band_product<W>(tiles, p, r);
}

void multiply(const BlockProduct& p) {
  if (block_width(p.tokens) == 8) product<8>(p);
  else product<16>(p);
}

}  // namespace
}  // namespace headrace::HEADRACE_NS
