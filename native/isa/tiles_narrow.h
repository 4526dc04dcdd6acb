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

#define HEADRACE_INLINE __attribute__((always_inline)) inline

// Four steps of a row into their tiles, which begin at `to`; `blocks` of them exist, the others are zero.
template <Format F> struct Expand;

template <> struct Expand<Format::bf16> {
  static constexpr int64_t kNbytes = 256;
  static bool plain(const Matrix&, int64_t, int64_t) { return true; }

  HEADRACE_INLINE void fast(const uint8_t* from, const uint8_t*, uint16_t* to) const {
    for (int64_t u = 0; u < kNarrowSteps; ++u) _mm512_store_si512(to + u * kTileWords, _mm512_loadu_si512(from + 64 * u));
  }
  void any(const uint8_t* from, const uint8_t*, int64_t blocks, bool, uint16_t* to) const {
    for (int64_t u = 0; u < kNarrowSteps; ++u)
      _mm512_store_si512(to + u * kTileWords, u < blocks ? _mm512_loadu_si512(from + 64 * u) : _mm512_setzero_si512());
  }
};

// Four blocks' nibbles are looked up in the two bytes of their bfloat16 words, scale included, and the bytes joined
// within each block: so step u of a group holds, of block b in words 8 b to 8 b + 7, the low (u < 2) or high nibbles
// of its first (u even) or last eight bytes. Nine shuffles of 64 bytes for 128 weights, where a look-up of words takes
// sixteen.
template <> struct Expand<Format::mxfp4> {
  static constexpr int64_t kNbytes = 64;
  __m512i add, sign, low, last, block;

  Expand() {
    // The exponent field of E2M1 0.5, 1, 2, 4 times 2^(e - 127) is e - 1, e, e + 1, e + 2; its upper seven bits are
    // (e + add + 1) / 2 - 1 with add 0, 1, 2, 3, as vpavgb computes it, and its last is e's or the other one.
    constexpr uint8_t kAdd[8] = {0, 0, 1, 1, 2, 2, 3, 3}, kLow[8] = {0, 0x80, 0, 0x40, 0x80, 0xc0, 0, 0x40};
    alignas(64) uint8_t bytes[5][64];
    for (int i = 0; i < 64; ++i) {
      bytes[0][i] = kAdd[i % 8];
      bytes[1][i] = static_cast<uint8_t>((i & 8 ? 0x80 : 0) - 1);
      bytes[2][i] = kLow[i % 8];
      bytes[3][i] = i % 8 == 0 ? 0 : 0x80;
      bytes[4][i] = static_cast<uint8_t>(i / 16);
    }
    add = _mm512_load_si512(bytes[0]);
    sign = _mm512_load_si512(bytes[1]);
    low = _mm512_load_si512(bytes[2]);
    last = _mm512_load_si512(bytes[3]);
    block = _mm512_load_si512(bytes[4]);
  }

  // Scales that leave all exponents in range: 1 to 252.
  static bool plain(const Matrix& m, int64_t row0, int64_t count) {
    const __m512i one = _mm512_set1_epi8(1);
    __m512i most = _mm512_setzero_si512();
    const int64_t n = m.cols / kStep;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < n; j += 64) {
        const __mmask64 some = n - j >= 64 ? ~0ull : (1ull << (n - j)) - 1;
        const __m512i scales = _mm512_maskz_loadu_epi8(some, m.scales + (row0 + i) * m.scale_row_nbytes + j);
        most = _mm512_max_epu8(most, _mm512_maskz_sub_epi8(some, scales, one));
      }
    return _mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8(static_cast<char>(251))) == 0;
  }

  HEADRACE_INLINE void fast(const uint8_t* codes, const uint8_t* scales, uint16_t* to) const {
    uint32_t four;
    std::memcpy(&four, scales, 4);
    expand(_mm512_loadu_si512(codes), four, to);
  }

  // Fewer blocks, or any scales, NaN among them; the tile unit itself counts subnormal words as zero.
  void any(const uint8_t* codes, const uint8_t* scales, int64_t blocks, bool plain, uint16_t* to) const {
    if (!plain) return slow(codes, scales, blocks, to);
    uint32_t four = 0x7f7f7f7f;
    std::memcpy(&four, scales, static_cast<size_t>(blocks));
    expand(_mm512_maskz_loadu_epi8(blocks == 4 ? ~0ull : (1ull << 16 * blocks) - 1, codes), four, to);
  }

 private:
  HEADRACE_INLINE void expand(__m512i q, uint32_t four, uint16_t* to) const {
    constexpr __mmask64 kNotZero = 0xfefefefefefefefe;
    const __m512i e = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(four)), block);
    const __m512i high = _mm512_maskz_add_epi8(kNotZero, _mm512_avg_epu8(e, add), sign);
    const __m512i lows = _mm512_ternarylogic_epi64(low, _mm512_slli_epi16(e, 7), last, 0x78);  // low ^ (shifted & last)
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i a = _mm512_and_si512(q, mask), b = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
    const __m512i a_low = _mm512_shuffle_epi8(lows, a), a_high = _mm512_shuffle_epi8(high, a);
    const __m512i b_low = _mm512_shuffle_epi8(lows, b), b_high = _mm512_shuffle_epi8(high, b);
    _mm512_store_si512(to, _mm512_unpacklo_epi8(a_low, a_high));
    _mm512_store_si512(to + kTileWords, _mm512_unpackhi_epi8(a_low, a_high));
    _mm512_store_si512(to + 2 * kTileWords, _mm512_unpacklo_epi8(b_low, b_high));
    _mm512_store_si512(to + 3 * kTileWords, _mm512_unpackhi_epi8(b_low, b_high));
  }

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
};

// What is expanded next: a group of columns of sixteen rows, of which `count` exist.
struct Cursor {
  const uint8_t *rows, *next, *scales;  // of the rows, and what will be read after them
  int64_t count, group, first;
  bool plain;
};

template <Format F>
void begin_rows(const NarrowProduct& p, int64_t first, Cursor& c) {
  const Matrix& m = *p.m;
  const int64_t row = p.row0 + first, after = first + kTile;
  c.rows = m.data + row * m.row_nbytes;
  c.scales = m.scales + row * m.scale_row_nbytes;
  c.next = after < p.rows ? c.rows + kTile * m.row_nbytes : p.next != nullptr ? p.next : c.rows;
  c.count = std::min(kTile, p.rows - first);
  c.group = 0;
  c.first = first;
  c.plain = Expand<F>::plain(m, row, c.count);
}

// The bytes of a cursor's group, in its first row.
struct Group {
  const uint8_t *codes, *scales, *next;
  int64_t blocks;  // of 32 columns
};

template <Format F>
inline Group group_of(const Matrix& m, const Cursor& c) {
  const int64_t at = Expand<F>::kNbytes * c.group, left = m.cols / kStep - kNarrowSteps * c.group;
  return {c.rows + at, c.scales + kNarrowSteps * c.group, c.next + at, std::min(kNarrowSteps, left)};
}

template <Format F>
HEADRACE_INLINE void ask(const Group& g, int64_t at) {
  for (int64_t line = at; line < at + Expand<F>::kNbytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(g.codes + line + kNearNbytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(g.next + line), _MM_HINT_T1);
  }
}

// Rows [row, row + 4), all there, of four blocks with plain scales.
template <Format F>
HEADRACE_INLINE void expand_four(const Expand<F>& expand, const Matrix& m, const Group& g, int64_t row, uint16_t* to) {
#pragma GCC unroll 4
  for (int64_t r = row; r < row + 4; ++r) {
    ask<F>(g, r * m.row_nbytes);
    expand.fast(g.codes + r * m.row_nbytes, g.scales + r * m.scale_row_nbytes, to + kStep * r);
  }
}

template <Format F>
void expand_any(const Expand<F>& expand, const Matrix& m, const Cursor& c, uint16_t* to) {
  const Group g = group_of<F>(m, c);
  for (int64_t r = 0; r < c.count; ++r) {
    ask<F>(g, r * m.row_nbytes);
    expand.any(g.codes + r * m.row_nbytes, g.scales + r * m.scale_row_nbytes, g.blocks, c.plain, to + kStep * r);
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

// How many groups of columns are expanded ahead of their products, also of the next rows: stores of the last one need
// not have reached the cache when its tiles are read, which waits for them.
constexpr int64_t kGroupsAhead = 2;

template <int B>
void store_band([[maybe_unused]] Tiles& tiles, const NarrowProduct& p, int64_t first) {
  alignas(64) float sums[4 * kTile * kTile];
  HEADRACE_STORE(0, sums);
  if constexpr (B > 1) HEADRACE_STORE(1, sums + 256);
  store_narrow(sums, B > 1, p.rows - first, p.tokens, p.out, first);
  if constexpr (B > 2) {
    HEADRACE_STORE(2, sums + 512);
    if constexpr (B > 3) HEADRACE_STORE(3, sums + 768);
    store_narrow(sums + 512, B > 3, p.rows - first, p.tokens - kTile, p.out + kTile, first);
  }
}

// B: tiles of activations of all blocks.
template <Format F, int B>
void narrow_rows(const NarrowProduct& p) {
  Tiles tiles;
  alignas(64) uint16_t ring[kGroupsAhead + 1][kFourWords] = {};  // rows that are not there stay zero, or finite
  constexpr int64_t kTilesOfFirst = B < 2 ? 1 : 2, kTilesOfSecond = B < 4 ? 1 : 2;
  const Matrix& m = *p.m;
  const Expand<F> expand;
  const int64_t groups = narrow_steps(m.cols) / kNarrowSteps, bands = tiles_of(p.rows), all = groups * bands;
  Cursor c;
  begin_rows<F>(p, 0, c);
  const auto advance = [&] {
    if (++c.group == groups && c.first + kTile < p.rows) begin_rows<F>(p, c.first + kTile, c);
  };
  for (int64_t i = 0; i < std::min(kGroupsAhead, all); ++i, advance()) expand_any<F>(expand, m, c, ring[i]);
  int64_t g = 0, first = 0, at = 0, to = kGroupsAhead;
  const uint16_t *b0 = nullptr, *b1 = nullptr;
  for (int64_t i = 0; i < all; ++i) {
    if (g == 0) {
      b0 = p.blocks[0];
      if constexpr (B > 2) b1 = p.blocks[1];
      HEADRACE_ZERO(0);
      if constexpr (B > 1) HEADRACE_ZERO(1);
      if constexpr (B > 2) HEADRACE_ZERO(2);
      if constexpr (B > 3) HEADRACE_ZERO(3);
    }
    const uint16_t* a = ring[at];
    const auto multiply = [&](int64_t u) {
      multiply_step<B>(tiles, a + u * kTileWords, b0, b1);
      b0 += kTilesOfFirst * kTileWords;
      if constexpr (B > 2) b1 += kTilesOfSecond * kTileWords;
    };
    const bool more = i + kGroupsAhead < all;
    const Group group = group_of<F>(m, c);
    if (more && c.plain && c.count == kTile && group.blocks == kNarrowSteps) {
      for (int64_t u = 0; u < kNarrowSteps; ++u) {
        multiply(u);
        expand_four<F>(expand, m, group, 4 * u, ring[to]);
      }
    } else {
      for (int64_t u = 0; u < kNarrowSteps; ++u) multiply(u);
      if (more) expand_any<F>(expand, m, c, ring[to]);
    }
    if (more) advance();
    at = at == kGroupsAhead ? 0 : at + 1;
    to = to == kGroupsAhead ? 0 : to + 1;
    if (++g == groups) {
      store_band<B>(tiles, p, first);
      first += kTile;
      g = 0;
    }
  }
}

template <Format F>
void narrow_product(const NarrowProduct& p) {
  const int64_t tiles = p.tokens <= kTile ? narrow_tiles(p.tokens) : 2 + narrow_tiles(p.tokens - kTile);
  switch (tiles) {
    case 1: narrow_rows<F, 1>(p); break;
    case 2: narrow_rows<F, 2>(p); break;
    case 3: narrow_rows<F, 3>(p); break;
    default: narrow_rows<F, 4>(p); break;
  }
}

inline void narrow(const NarrowProduct& p) {
  if (p.m->format == Format::mxfp4) narrow_product<Format::mxfp4>(p);
  else narrow_product<Format::bf16>(p);
}

}  // namespace
}  // namespace headrace
