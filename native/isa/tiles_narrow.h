// Products of few tokens on tiles (tiles.h). The file that includes this one defines
//   Tiles                       an object of which holds the tile registers
//   HEADRACE_ZERO(i), HEADRACE_LOAD(i, p), HEADRACE_STORE(i, p), HEADRACE_DOT(sums, weights, activations)
// where registers are literal numbers and rows 64 bytes apart. Sums are in registers 0 to 3, weights in 4 and 5,
// activations in 6 and 7.
#pragma once
#include <algorithm>
#include <cstring>

#include "../tables.h"
#include "tile_parts.h"

namespace headrace {
namespace {

constexpr int64_t kFourWords = kNarrowSteps * kTileWords;  // four steps of sixteen rows
constexpr int64_t kNearNbytes = 192;                       // how far ahead of its use a row's line is asked for into the L1 cache

// Four steps of a row into their tiles, which begin at `to`; `blocks` of them exist, the others are zero.
template <Format F> class Expanding;

template <> class Expanding<Format::bf16> {
 public:
  static constexpr int64_t kNbytes = 256;
  Expanding(const Matrix& m, int64_t row0, int64_t) : rows_(m.data + row0 * m.row_nbytes), row_nbytes_(m.row_nbytes) {}

  void operator()(int64_t row, int64_t group, int64_t blocks, uint16_t* to) const {
    const uint8_t* from = rows_ + row * row_nbytes_ + kNbytes * group;
    for (int64_t u = 0; u < kNarrowSteps; ++u)
      _mm512_store_si512(to + u * kTileWords, u < blocks ? _mm512_loadu_si512(from + 64 * u) : _mm512_setzero_si512());
  }

 private:
  const uint8_t* rows_;
  int64_t row_nbytes_;
};

// Four blocks' nibbles are looked up in the two bytes of their bfloat16 words, scale included, and the bytes joined
// within each block: so step u of a group holds, of block b in words 8 b to 8 b + 7, the low (u < 2) or high nibbles
// of its first (u even) or last eight bytes. Nine shuffles of 64 bytes for 128 weights, where a look-up of words takes
// sixteen.
template <> class Expanding<Format::mxfp4> {
 public:
  static constexpr int64_t kNbytes = 64;

  Expanding(const Matrix& m, int64_t row0, int64_t count)
      : rows_(m.data + row0 * m.row_nbytes), scales_(m.scales + row0 * m.scale_row_nbytes), row_nbytes_(m.row_nbytes),
        scale_row_nbytes_(m.scale_row_nbytes), plain_(all_plain(scales_, m, count)) {
    // The exponent field of E2M1 0.5, 1, 2, 4 times 2^(e - 127) is e - 1, e, e + 1, e + 2; its upper seven bits are
    // (e + add + 1) / 2 - 1 with add 0, 1, 2, 3, as vpavgb computes it, and its last is e's or the other one.
    constexpr uint8_t kAdd[8] = {0, 0, 1, 1, 2, 2, 3, 3}, kLow[8] = {0, 0x80, 0, 0x40, 0x80, 0xc0, 0, 0x40};
    alignas(64) uint8_t add[64], sign[64], low[64], last[64], block[64];
    for (int i = 0; i < 64; ++i) {
      add[i] = kAdd[i % 8];
      sign[i] = static_cast<uint8_t>((i & 8 ? 0x80 : 0) - 1);
      low[i] = kLow[i % 8];
      last[i] = i % 8 == 0 ? 0 : 0x80;
      block[i] = static_cast<uint8_t>(i / 16);
    }
    add_ = _mm512_load_si512(add);
    sign_ = _mm512_load_si512(sign);
    low_ = _mm512_load_si512(low);
    last_ = _mm512_load_si512(last);
    block_ = _mm512_load_si512(block);
  }

  void operator()(int64_t row, int64_t group, int64_t blocks, uint16_t* to) const {
    const uint8_t *codes = rows_ + row * row_nbytes_ + kNbytes * group, *s = scales_ + row * scale_row_nbytes_ + kNarrowSteps * group;
    if (!plain_) return slow(codes, s, blocks, to);
    uint32_t scales = 0x7f7f7f7f;
    __m512i q;
    if (blocks == kNarrowSteps) {
      std::memcpy(&scales, s, 4);
      q = _mm512_loadu_si512(codes);
    } else {
      std::memcpy(&scales, s, static_cast<size_t>(blocks));
      q = _mm512_maskz_loadu_epi8((1ull << 16 * blocks) - 1, codes);
    }
    constexpr __mmask64 kNotZero = 0xfefefefefefefefe;
    const __m512i e = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(scales)), block_);
    const __m512i high = _mm512_maskz_add_epi8(kNotZero, _mm512_avg_epu8(e, add_), sign_);
    const __m512i low = _mm512_ternarylogic_epi64(low_, _mm512_slli_epi16(e, 7), last_, 0x78);  // low ^ (shifted & last)
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i a = _mm512_and_si512(q, mask), b = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
    const __m512i a_low = _mm512_shuffle_epi8(low, a), a_high = _mm512_shuffle_epi8(high, a);
    const __m512i b_low = _mm512_shuffle_epi8(low, b), b_high = _mm512_shuffle_epi8(high, b);
    _mm512_store_si512(to, _mm512_unpacklo_epi8(a_low, a_high));
    _mm512_store_si512(to + kTileWords, _mm512_unpackhi_epi8(a_low, a_high));
    _mm512_store_si512(to + 2 * kTileWords, _mm512_unpacklo_epi8(b_low, b_high));
    _mm512_store_si512(to + 3 * kTileWords, _mm512_unpackhi_epi8(b_low, b_high));
  }

 private:
  // Scales that leave all exponents in range: 1 to 252.
  static bool all_plain(const uint8_t* scales, const Matrix& m, int64_t count) {
    const __m512i one = _mm512_set1_epi8(1);
    __m512i most = _mm512_setzero_si512();
    const int64_t n = m.cols / kStep;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < n; j += 64) {
        const __mmask64 some = n - j >= 64 ? ~0ull : (1ull << (n - j)) - 1;
        most = _mm512_max_epu8(most, _mm512_maskz_sub_epi8(some, _mm512_maskz_loadu_epi8(some, scales + i * m.scale_row_nbytes + j), one));
      }
    return _mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8(static_cast<char>(251))) == 0;
  }

  // Any scales: NaN, infinity; the tile unit itself counts subnormal words as zero.
  static void slow(const uint8_t* codes, const uint8_t* scales, int64_t blocks, uint16_t* to) {
    for (int64_t u = 0; u < kNarrowSteps; ++u)
      for (int64_t w = 0; w < kStep; ++w) {
        const int64_t b = w / 8, byte = 16 * b + w % 8 + 8 * (u % 2);
        float v = 0.0f;
        if (b < blocks) v = static_cast<float>(kE2M1Doubled[u < 2 ? codes[byte] & 15 : codes[byte] >> 4]) * kHalfE8M0.value[scales[b]];
        uint32_t bits;
        std::memcpy(&bits, &v, 4);
        to[u * kTileWords + w] = static_cast<uint16_t>(bits >> 16);
      }
  }

  const uint8_t *rows_, *scales_;
  int64_t row_nbytes_, scale_row_nbytes_;
  bool plain_;
  __m512i add_, sign_, low_, last_, block_;
};

// Sixteen rows of a product.
struct Band {
  const uint8_t *rows, *next;  // their bytes, and those of the next rows, or null
  int64_t row_nbytes, count;
};

// Rows [first, first + 4) of a band, group `group` of their columns, of which `blocks` of 32 exist.
template <Format F>
inline void expand_rows(const Expanding<F>& expanding, const Band& band, int64_t group, int64_t blocks, int64_t first, uint16_t* to) {
  for (int64_t row = first; row < std::min(first + 4, band.count); ++row) {
    for (int64_t line = 0; line < Expanding<F>::kNbytes; line += 64) {
      const int64_t at = row * band.row_nbytes + Expanding<F>::kNbytes * group + line;
      _mm_prefetch(reinterpret_cast<const char*>(band.rows + at + kNearNbytes), _MM_HINT_T0);
      if (band.next != nullptr) _mm_prefetch(reinterpret_cast<const char*>(band.next + at), _MM_HINT_T1);
    }
    expanding(row, group, blocks, to + kStep * row);
  }
}

// A step: a tile of weights by the B tiles of a step's activations, of which those of the second block are at b1.
template <int B>
inline void multiply_step([[maybe_unused]] Tiles& tiles, const uint16_t* a, const uint16_t* b0, [[maybe_unused]] const uint16_t* b1) {
  HEADRACE_LOAD(4, a);
  HEADRACE_LOAD(6, b0);
  HEADRACE_DOT(0, 4, 6);
  if constexpr (B >= 2) {
    HEADRACE_LOAD(7, b0 + kTileWords);
    HEADRACE_DOT(1, 4, 7);
  }
  if constexpr (B >= 3) {
    HEADRACE_LOAD(6, b1);
    HEADRACE_DOT(2, 4, 6);
  }
  if constexpr (B >= 4) {
    HEADRACE_LOAD(7, b1 + kTileWords);
    HEADRACE_DOT(3, 4, 7);
  }
}

// Sums [16 rows][16] of h and l in one tile or in two, to out[token][row].
inline void store_narrow(const float* sums, bool two, int64_t rows, int64_t tokens, float* const* out, int64_t row) {
  __m512i v[16];
  for (int i = 0; i < 16; ++i) {
    const __m512 s = _mm512_load_ps(sums + 16 * i);
    v[i] = _mm512_castps_si512(two ? _mm512_add_ps(s, _mm512_load_ps(sums + 256 + 16 * i)) : s);
  }
  transpose16(v);
  if (!two)
    for (int i = 0; i < 8; ++i) v[i] = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(v[i]), _mm512_castsi512_ps(v[8 + i])));
  const __mmask16 mask = rows >= 16 ? 0xffff : static_cast<__mmask16>((1u << rows) - 1);
  for (int64_t t = 0; t < tokens && t < 16; ++t) _mm512_mask_storeu_epi32(out[t] + row, mask, v[t]);
}

// How many groups of columns are expanded ahead of their products: stores of the last one need not have reached the
// cache when its tiles are read, which waits for them.
constexpr int64_t kGroupsAhead = 2;

// Sixteen rows from `first` on. B: tiles of activations of all blocks.
template <Format F, int B>
void narrow_band(Tiles& tiles, const NarrowProduct& p, int64_t first) {
  alignas(64) uint16_t ring[kGroupsAhead + 1][kFourWords];
  alignas(64) float sums[4 * kTile * kTile];
  const Matrix& m = *p.m;
  const int64_t steps = m.cols / kStep, groups = narrow_steps(m.cols) / kNarrowSteps, left = p.rows - first, after = first + kTile;
  const Band band{m.data + (p.row0 + first) * m.row_nbytes, after < p.rows ? m.data + (p.row0 + after) * m.row_nbytes : p.next,
                  m.row_nbytes, std::min(left, kTile)};
  const Expanding<F> expanding(m, p.row0 + first, band.count);
  if (band.count < kTile) std::memset(ring, 0, sizeof ring);  // rows that are not there
  constexpr int64_t kTilesOfFirst = B < 2 ? 1 : 2, kTilesOfSecond = B < 4 ? 1 : 2;
  const uint16_t *b0 = p.blocks[0], *b1 = B > 2 ? p.blocks[1] : nullptr;
  HEADRACE_ZERO(0);
  HEADRACE_ZERO(1);
  HEADRACE_ZERO(2);
  HEADRACE_ZERO(3);
  const auto expand = [&](int64_t g, int64_t row) {
    const int64_t blocks = std::min(kNarrowSteps, steps - kNarrowSteps * g);
    if (blocks > 0) expand_rows<F>(expanding, band, g, blocks, row, ring[g % (kGroupsAhead + 1)]);
  };
  for (int64_t g = 0; g < kGroupsAhead; ++g)
    for (int64_t row = 0; row < kTile; row += 4) expand(g, row);
  for (int64_t g = 0; g < groups; ++g) {
    const uint16_t* a = ring[g % (kGroupsAhead + 1)];
    for (int64_t u = 0; u < kNarrowSteps; ++u) {
      multiply_step<B>(tiles, a + u * kTileWords, b0, b1);
      b0 += kTilesOfFirst * kTileWords;
      if constexpr (B > 2) b1 += kTilesOfSecond * kTileWords;
      expand(g + kGroupsAhead, 4 * u);
    }
  }
  HEADRACE_STORE(0, sums);
  HEADRACE_STORE(1, sums + 256);
  HEADRACE_STORE(2, sums + 512);
  HEADRACE_STORE(3, sums + 768);
  store_narrow(sums, B > 1, left, p.tokens, p.out, first);
  if constexpr (B > 2) store_narrow(sums + 512, B > 3, left, p.tokens - kTile, p.out + kTile, first);
}

template <Format F, int B>
void narrow_bands(const NarrowProduct& p) {
  Tiles tiles;
  for (int64_t r = 0; r < p.rows; r += kTile) narrow_band<F, B>(tiles, p, r);
}

template <Format F>
void narrow_product(const NarrowProduct& p) {
  const int64_t tiles = p.tokens <= kTile ? narrow_tiles(p.tokens) : 2 + narrow_tiles(p.tokens - kTile);
  switch (tiles) {
    case 1: narrow_bands<F, 1>(p); break;
    case 2: narrow_bands<F, 2>(p); break;
    case 3: narrow_bands<F, 3>(p); break;
    default: narrow_bands<F, 4>(p); break;
  }
}

inline void narrow(const NarrowProduct& p) {
  if (p.m->format == Format::mxfp4) narrow_product<Format::mxfp4>(p);
  else narrow_product<Format::bf16>(p);
}

}  // namespace
}  // namespace headrace
