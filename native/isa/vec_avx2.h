// Sixteen lanes as two AVX2 registers.
#pragma once
#include "vec_x86.h"

namespace headrace::HEADRACE_NS {

constexpr bool kHasTable16 = false;
constexpr int kTileTokens = 3;  // 4 x 3 accumulators of one half, 3 activations, 1 weight
constexpr int kHalves = 2;
constexpr int kWidth = 8;

struct V { __m256 a, b; };
using H = __m256;

static inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
static inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V round_even(V x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 exp2i_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V exp2i(V n) { return {exp2i_half(n.a), exp2i_half(n.b)}; }
static inline V keep_nan(V v, V s) {
  return {_mm256_blendv_ps(v.a, s.a, _mm256_cmp_ps(s.a, s.a, _CMP_UNORD_Q)),
          _mm256_blendv_ps(v.b, s.b, _mm256_cmp_ps(s.b, s.b, _CMP_UNORD_Q))};
}

static inline H hzero() { return _mm256_setzero_ps(); }
static inline H hload(const float* p) { return _mm256_loadu_ps(p); }
static inline void hstore(float* p, H a) { _mm256_storeu_ps(p, a); }
static inline H hfma(H a, H b, H c) { return _mm256_fmadd_ps(a, b, c); }

static inline float hsum(V v) {
  const __m256 s = _mm256_add_ps(v.a, v.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float hmax(V v) {
  const __m256 s = _mm256_max_ps(v.a, v.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline void reduce8(const V* v, float* out) {
  __m256 h[8], p[4];
  for (int i = 0; i < 8; ++i) h[i] = _mm256_add_ps(v[i].a, v[i].b);
  for (int i = 0; i < 4; ++i)
    p[i] = _mm256_add_ps(_mm256_permute2f128_ps(h[2 * i], h[2 * i + 1], 0x20),
                         _mm256_permute2f128_ps(h[2 * i], h[2 * i + 1], 0x31));
  const __m256 q0 = _mm256_add_ps(_mm256_shuffle_ps(p[0], p[1], 0x44), _mm256_shuffle_ps(p[0], p[1], 0xee));
  const __m256 q1 = _mm256_add_ps(_mm256_shuffle_ps(p[2], p[3], 0x44), _mm256_shuffle_ps(p[2], p[3], 0xee));
  const __m256 r = _mm256_add_ps(_mm256_shuffle_ps(q0, q1, 0x88), _mm256_shuffle_ps(q0, q1, 0xdd));
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(r, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

static inline V from_u8(B a) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)))};
}
static inline V from_i8(B a) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)))};
}
static inline V from_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(load16(p)), _mm256_cvtph_ps(load16(p + 16))};
}
static inline V from_bf16(const uint8_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p + 16)), 16))};
}
// table[low nibble], table[high nibble]: not faster than arithmetic here, but the same interface.
static inline __m256 table_half(V t, __m256i i) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.a, i), _mm256_permutevar8x32_ps(t.b, i),
                          _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
static inline V table_low(V t, B a) {
  return {table_half(t, _mm256_cvtepu8_epi32(a)), table_half(t, _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)))};
}
static inline V table_high(V t, B a) { return table_low(t, high4(a)); }
static inline V from_e4m3(B a) {
  const __m256i h = e4m3_as_half(a);
  const V r{_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
  return mul(r, set1(256.0f));
}

}  // namespace headrace::HEADRACE_NS
