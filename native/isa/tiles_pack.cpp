// Tiles of weights and activations (tiles.h), on AVX-512 BF16: every CPU with AMX has it.
#define HEADRACE_NS tiles_pack
#define HEADRACE_UNROLL
#include "vec_avx512.h"

#include <cmath>
#include <cstring>

#include "../kernels.h"
#include "tile_parts.h"

#include "expand.h"
#include "walk.h"

namespace headrace::HEADRACE_NS {
namespace {

inline __m512i nearest(V first, V second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// What the nearest bfloat16 leaves of a value. Of an infinite activation nothing is left: inf - inf would be NaN.
// Weights are finite, or their row is NaN.
template <bool Finite> inline V left_of(V x, __m256i nearest_words) {
  const V back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(nearest_words), 16));
  if constexpr (Finite) return sub(x, back);
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(back), _mm512_set1_ps(INFINITY), _CMP_NEQ_UQ);
  return _mm512_maskz_sub_ps(finite, x, back);
}

template <bool Finite> inline __m512i left_of(V first, V second, __m512i words) {
  return nearest(left_of<Finite>(first, _mm512_castsi512_si256(words)),
                 left_of<Finite>(second, _mm512_extracti64x4_epi64(words, 1)));
}

// 32 weights of MXFP4 straight to bfloat16, half the instructions of the way over float32: each nibble in a word of
// its own, and one look-up in E2M1's words with the scale added to their exponents. The look-up takes five bits, so
// the table stands there twice.
template <Format F> struct Nibbles {
  static constexpr bool kPaired = F == Format::mxfp4;  // else weights 16 to 31 are the high nibbles
  __m512i spread, shift, table;

  Nibbles() {
    alignas(64) uint8_t bytes[64];
    alignas(64) uint16_t down[32], words[32];
    constexpr uint16_t kWords[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int i = 0; i < 32; ++i) {
      bytes[2 * i] = bytes[2 * i + 1] = static_cast<uint8_t>(kPaired ? i / 2 : i % 16);
      down[i] = static_cast<uint16_t>(4 * (kPaired ? i % 2 : i / 16));
      words[i] = static_cast<uint16_t>(kWords[i % 8] | (i & 8) << 12);
    }
    spread = _mm512_load_si512(bytes);
    shift = _mm512_load_si512(down);
    table = _mm512_load_si512(words);
  }

  // Scales that leave all exponents normal.
  static bool plain(uint8_t scale) { return scale >= 2 && scale <= 252; }

  __m512i operator()(const uint8_t* codes, uint8_t scale) const {
    constexpr __mmask32 kNotZero = 0xfefefefe;
    const __m512i more = _mm512_set1_epi16(static_cast<int16_t>((scale - 127) * 128));
    const __m512i scaled = _mm512_mask_add_epi16(table, kNotZero, table, more);
    const __m512i both = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load16(codes)), spread);
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(both, shift), scaled);
  }
};

template <Format F> struct Write {
  static constexpr bool kExact = weight_terms(F) == 1;
  static constexpr int64_t kTerms = weight_terms(F);

  static inline void step(V a, V b, uint16_t* to) {
    const __m512i words = nearest(a, b);
    _mm512_store_si512(to, words);
    if constexpr (!kExact) _mm512_store_si512(to + kTileWords, left_of<true>(a, b, words));
  }

  static inline void group(const Row& r, int64_t g, int j, const float* scales, uint16_t* to) {
    to += (g + j) * kTerms * kTileWords;
    if constexpr (F == Format::bf16) {
      _mm512_store_si512(to, _mm512_loadu_si512(r.data + 64 * (g + j)));
    } else {
      V a, b;
      Expand<F>::run(r, g + j, scales, j, a, b);
      step(a, b, to);
    }
  }

  // Eight groups.
  static inline void chunk(const Row& r, int64_t g, const float* scales, uint16_t* to) {
    if constexpr (F == Format::mxfp4 || F == Format::mxfp4_gguf) {
      constexpr bool kInline = F == Format::mxfp4_gguf;  // a block is its scale and its codes
      const uint8_t *codes = kInline ? r.data + 17 * g + 1 : r.data + 16 * g, *s = kInline ? r.data + 17 * g : r.scales + g;
      constexpr int kApart = kInline ? 17 : 1, kCodes = kInline ? 17 : 16;
      bool plain = true;
      for (int j = 0; j < kChunk; ++j) plain &= Nibbles<F>::plain(s[kApart * j]);
      if (plain) {
        static const Nibbles<F> nibbles;
        const Nibbles<F> n = nibbles;
        for (int j = 0; j < kChunk; ++j) _mm512_store_si512(to + (g + j) * kTileWords, n(codes + kCodes * j, s[kApart * j]));
        return;
      }
    }
    HEADRACE_UNROLL_8
    for (int j = 0; j < kChunk; ++j) group(r, g, j, scales, to);
  }

  // One row into its tiles, which begin at `to`.
  static void row(const Row& r, int64_t cols, int64_t far_nbytes, uint16_t* to) {
    const int64_t groups = cols / kGroup, rest = cols % kGroup;
    alignas(64) float scales[kScaleFloats];
    int64_t g = 0;
    for (; g + kChunk <= groups; g += kChunk) {
      prefetch_chunk<F>(r, g);
      if (far_nbytes != 0) prefetch_far_chunk<F>(r.data + far_nbytes, g);
      Expand<F>::prepare(r, g, kChunk, scales);
      in_memory(&scales);
      chunk(r, g, scales, to);
    }
    if (g < groups) {
      Expand<F>::prepare(r, g, groups - g, scales);
      for (int j = 0; j < groups - g; ++j) group(r, g, j, scales, to);
    }
    if (rest != 0) {
      V a, b;
      expand_tail<F>(r, groups, rest, a, b);
      step(a, b, to + groups * kTerms * kTileWords);
    }
  }

  static void call(const Matrix& m, int64_t row0, int64_t count, uint16_t* to) {
    const int64_t tile = tile_steps(m.cols) * kTerms * kTileWords;
    for (int64_t i = 0; i < count; ++i)
      row(row_of(m, row0 + i), m.cols, m.far_nbytes, to + i / kTile * tile + i % kTile * kStep);
  }
};

void expand(const Matrix& m, int64_t row0, int64_t count, uint16_t* to) { by_format<Write>(m.format, m, row0, count, to); }

// Sixteen activations from k on, zeros past the row's end.
inline V some(const float* x, int64_t k, int64_t cols) {
  if (k + 16 <= cols) return _mm512_loadu_ps(x + k);
  return k >= cols ? zero() : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << (cols - k)) - 1), x + k);
}

void pack(const float* const* x, int64_t tokens, int64_t cols, int64_t step0, int64_t steps, uint16_t* to) {
  for (int64_t s = step0; s < step0 + steps; ++s) {
    __m512i high[kTile], low[kTile];
    for (int64_t t = 0; t < kTile; ++t) {
      if (t >= tokens) {
        high[t] = low[t] = _mm512_setzero_si512();
        continue;
      }
      const V a = some(x[t], s * kStep, cols), b = some(x[t], s * kStep + 16, cols);
      high[t] = nearest(a, b);
      low[t] = left_of<false>(a, b, high[t]);
    }
    uint16_t* block = to + s * kTileTerms * kTileWords;
    transpose16(high);
    transpose16(low);
    for (int64_t p = 0; p < kTile; ++p) {
      _mm512_store_si512(block + p * kStep, high[p]);
      _mm512_store_si512(block + kTileWords + p * kStep, low[p]);
    }
  }
}

// Where pair `pair` of a block of 32 columns goes: its step and its place there.
struct Place {
  int64_t step, pair;
};

inline Place narrow_place(Format weights, int64_t block, int64_t pair) {
  if (weights != Format::mxfp4) return {block, pair};
  return {block / kNarrowSteps * kNarrowSteps + pair / 4, block % kNarrowSteps * 4 + pair % 4};
}

// The columns of a block as pairs: neighbours or, for MXFP4, as tiles_narrow.h expands them.
inline __m512i pair_order(Format weights) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) {
    const int u = i / 8;
    order[i] = static_cast<uint16_t>(weights != Format::mxfp4 ? i : 2 * (i % 8) + 16 * (u % 2) + u / 2);
  }
  return _mm512_load_si512(order);
}

void narrow(const float* const* x, int64_t tokens, int64_t cols, Format weights, int64_t block, uint16_t* to) {
  const int64_t tiles = narrow_tiles(tokens), each = tiles * kTileWords;
  const __m512i order = pair_order(weights);
  __m512i terms[2][kTile];
  for (auto& tile : terms)
    for (__m512i& v : tile) v = _mm512_setzero_si512();
  for (int64_t t = 0; t < tokens; ++t) {
    const V a = load(x[t] + block * kStep), b = load(x[t] + block * kStep + 16);
    const __m512i words = nearest(a, b), left = left_of<false>(a, b, words);
    terms[0][t] = _mm512_permutexvar_epi16(order, words);
    terms[tiles - 1][tiles == 1 ? t + kTile / 2 : t] = _mm512_permutexvar_epi16(order, left);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    transpose16(terms[tile]);
    for (int64_t p = 0; p < kTile; ++p) {
      const Place at = narrow_place(weights, block, p);
      _mm512_store_si512(to + at.step * each + tile * kTileWords + at.pair * kStep, terms[tile][p]);
    }
    if (block + 1 != cols / kStep) continue;
    for (int64_t none = block + 1; none < narrow_steps(cols); ++none)
      for (int64_t p = 0; p < kTile; ++p) {
        const Place at = narrow_place(weights, none, p);
        _mm512_store_si512(to + at.step * each + tile * kTileWords + at.pair * kStep, _mm512_setzero_si512());
      }
  }
}

}  // namespace
}  // namespace headrace::HEADRACE_NS

namespace headrace {
void pack_tiles(const float* const* x, int64_t tokens, int64_t cols, int64_t step0, int64_t steps, uint16_t* to) {
  tiles_pack::pack(x, tokens, cols, step0, steps, to);
}
void expand_tiles(const Matrix& m, int64_t row0, int64_t count, uint16_t* to) { tiles_pack::expand(m, row0, count, to); }
void pack_narrow(const float* const* x, int64_t tokens, int64_t cols, Format weights, int64_t block, uint16_t* to) {
  tiles_pack::narrow(x, tokens, cols, weights, block, to);
}
}  // namespace headrace
