// Sixteen lanes as one AVX-512 register.
#pragma once
#include "vec_x86.h"

namespace headrace::HEADRACE_NS {

constexpr bool kHasTable16 = true;
constexpr int kTileTokens = 6;  // 4 x 6 accumulators, 6 activations, 1 weight of 32 registers
constexpr int kHalves = 1;
constexpr int kWidth = 16;

using V = __m512;
using H = __m512;

static inline V zero() { return _mm512_setzero_ps(); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
static inline V add(V x, V y) { return _mm512_add_ps(x, y); }
static inline V sub(V x, V y) { return _mm512_sub_ps(x, y); }
static inline V mul(V x, V y) { return _mm512_mul_ps(x, y); }
static inline V div(V x, V y) { return _mm512_div_ps(x, y); }
static inline V fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
static inline V vmin(V x, V y) { return _mm512_min_ps(x, y); }
static inline V vmax(V x, V y) { return _mm512_max_ps(x, y); }
static inline V round_even(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V exp2i(V n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline V keep_nan(V v, V s) { return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q), s); }

static inline H hzero() { return zero(); }
static inline H hload(const float* p) { return load(p); }
static inline void hstore(float* p, H a) { store(p, a); }
static inline H hfma(H a, H b, H c) { return fma(a, b, c); }

static inline float hsum(V v) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float hmax(V v) {
  const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline void reduce8(const V* v, float* out) {
  __m512 p[4];
  for (int i = 0; i < 4; ++i)
    p[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
  const __m512 q0 = _mm512_add_ps(_mm512_shuffle_f32x4(p[0], p[1], 0x88), _mm512_shuffle_f32x4(p[0], p[1], 0xdd));
  const __m512 q1 = _mm512_add_ps(_mm512_shuffle_f32x4(p[2], p[3], 0x88), _mm512_shuffle_f32x4(p[2], p[3], 0xdd));
  const __m512 r = _mm512_add_ps(_mm512_shuffle_ps(q0, q1, 0x44), _mm512_shuffle_ps(q0, q1, 0xee));
  const __m512 s = _mm512_add_ps(r, _mm512_permute_ps(r, 0xb1));
  const __m512i pick = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(pick, s)));
}

static inline V from_u8(B a) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a)); }
static inline V from_i8(B a) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a)); }
static inline V from_f16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline V from_bf16(const uint8_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline V from_e4m3(B a) { return mul(_mm512_cvtph_ps(e4m3_as_half(a)), set1(256.0f)); }

// table[low nibble] and table[high nibble] of sixteen bytes; the instruction ignores higher bits.
static inline V table_low(V table, B a) { return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(a), table); }
static inline V table_high(V table, B a) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(a), 4), table);
}

}  // namespace headrace::HEADRACE_NS
