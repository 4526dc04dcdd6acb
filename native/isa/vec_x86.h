// Byte operations that AVX2 and AVX-512 share: sixteen codes in one 128-bit register.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "../tables.h"

namespace headrace::HEADRACE_NS {

using B = __m128i;

static inline B load16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline B low4(B a) { return _mm_and_si128(a, _mm_set1_epi8(15)); }
static inline B high4(B a) { return _mm_and_si128(_mm_srli_epi16(a, 4), _mm_set1_epi8(15)); }
template <int N> static inline B bits(B a, int shift) {
  return _mm_and_si128(_mm_srli_epi16(a, shift), _mm_set1_epi8(N));
}
// Only for codes small enough that no bit crosses into the next byte.
template <int N> static inline B shl(B a) { return _mm_slli_epi16(a, N); }
static inline B bor(B a, B b) { return _mm_or_si128(a, b); }
static inline B bsub(B a, int n) { return _mm_sub_epi8(a, _mm_set1_epi8(static_cast<char>(n))); }
static inline B interleave_low(B a, B b) { return _mm_unpacklo_epi8(a, b); }
static inline B interleave_high(B a, B b) { return _mm_unpackhi_epi8(a, b); }
static inline B lookup(const int8_t* table, B a) {
  return _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table)), a);
}
// byte i is `value` where bit i is set
static inline B spread_bits(uint32_t mask, int value) {
  const B pick = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const B bit = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const B spread = _mm_and_si128(_mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(mask)), pick), bit);
  return _mm_and_si128(_mm_cmpeq_epi8(spread, bit), _mm_set1_epi8(static_cast<char>(value)));
}
static inline float f16(const uint8_t* p) {
  uint16_t h; std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}
// `n` <= 8 half-precision numbers, or pairs of them, `stride` bytes apart, as floats side by side.
static inline void halves(const uint8_t* p, int64_t stride, int64_t n, float* out) {
  if (n == 8) {
    uint16_t h[8];
    for (int j = 0; j < 8; ++j) std::memcpy(&h[j], p + j * stride, 2);
    const B v = _mm_setr_epi16(static_cast<short>(h[0]), static_cast<short>(h[1]), static_cast<short>(h[2]), static_cast<short>(h[3]),
                               static_cast<short>(h[4]), static_cast<short>(h[5]), static_cast<short>(h[6]), static_cast<short>(h[7]));
    _mm256_storeu_ps(out, _mm256_cvtph_ps(v));
    return;
  }
  for (int64_t j = 0; j < n; ++j) out[j] = f16(p + j * stride);
}
static inline void half_pairs(const uint8_t* p, int64_t stride, int64_t n, float* out) {
  if (n == 8) {
    int d[8];
    for (int j = 0; j < 8; ++j) std::memcpy(&d[j], p + j * stride, 4);
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_setr_epi32(d[0], d[1], d[2], d[3])));
    _mm256_storeu_ps(out + 8, _mm256_cvtph_ps(_mm_setr_epi32(d[4], d[5], d[6], d[7])));
    return;
  }
  for (int64_t j = 0; j < n; ++j) {
    out[2 * j] = f16(p + j * stride);
    out[2 * j + 1] = f16(p + j * stride + 2);
  }
}
static inline B bytes_of(uint64_t a) { return _mm_cvtsi64_si128(static_cast<long long>(a)); }
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
static inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// E4M3 bits moved into half precision: the value times 2^-8, exact, subnormals without a slow path.
// Codes 0x7f and 0xff become half-precision NaN.
static inline __m256i e4m3_as_half(B a) {
  const __m256i w = _mm256_cvtepu8_epi16(a), mag = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_cmpeq_epi16(mag, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
  return _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(mag, 7)), nan);
}

}  // namespace headrace::HEADRACE_NS
