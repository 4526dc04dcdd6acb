// The experts' products on AVX-512 VNNI: 128 codes in two registers, four vpdpbusd for their products with
// both terms.
#define HEADRACE_NS experts_vnni
#define HEADRACE_MANY_TOKENS 4
#define HEADRACE_PAIR_TOKENS 8
#include "vec_avx512.h"

#include "../expert_kernels.h"

namespace headrace::HEADRACE_NS {

struct Codes { __m512i low, high; };

static inline Codes codes_of(const uint8_t* p, int blocks) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m512i mask = _mm512_set1_epi8(15), 
                q = blocks == 4 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((1ull << 16 * blocks) - 1, p);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(q, mask)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(q, 4), mask))};
}

using Ints = __m512i;

static inline Ints exact(const Codes& c, const PairTerms& t) {
  const __m512i high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), c.low, _mm512_load_si512(t.high[0])),
                                           c.high, _mm512_load_si512(t.high[1]));
  return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_slli_epi32(high, 8), c.low, _mm512_load_si512(t.low[0])), c.high,
                             _mm512_load_si512(t.low[1]));
}

static inline V block_sums(Ints a, Ints b, Ints c, Ints d, const PairTerms& t) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  return _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_load_si512(t.offset)));
}

static inline V scales_of(const uint32_t* bytes) {
  // Byte k of word r into the lowest byte of lane 4 k + r.
  const __m512i pick = _mm512_or_si512(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), _mm512_set1_epi32(static_cast<int>(0x80808000)));
  const __m128i four = _mm_setr_epi32(static_cast<int>(bytes[0]), static_cast<int>(bytes[1]), static_cast<int>(bytes[2]), static_cast<int>(bytes[3]));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(four), pick), 23));
}

using Nibbles = __m512i;

static inline void nibbles_of(const uint8_t* p, Nibbles& low, Nibbles& high) {
  const __m512i mask = _mm512_set1_epi8(15), q = _mm512_loadu_si512(p);
  low = _mm512_and_si512(q, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
}

static inline V exact_nibbles(const Nibbles& c, const int8_t* high, const int8_t* low) {
  const __m512i none = _mm512_setzero_si512();
  const __m512i h = _mm512_dpbusd_epi32(none, c, _mm512_load_si512(high)), l = _mm512_dpbusd_epi32(none, c, _mm512_load_si512(low));
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 8), l));
}

static inline V two(float first, float second) {
  return _mm512_insertf32x8(_mm512_set1_ps(first), _mm256_set1_ps(second), 1);
}

}  // namespace headrace::HEADRACE_NS

#include "expert_dot.h"

namespace headrace {
const ExpertKernels& vnni_expert_kernels() {
  static constexpr ExpertKernels table{"avx512_vnni", experts_vnni::quantise, experts_vnni::expert_dot};
  return table;
}
}  // namespace headrace
