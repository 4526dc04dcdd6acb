// The experts' product on AVX2: vpmaddubsw of unsigned codes and signed terms. Two products are at most
// 2 * 24 * 128 and four 12,288, so sixteen bits never saturate and the sums are exact.
#define HEADRACE_NS experts_avx2
#define HEADRACE_MANY_TOKENS 2
#define HEADRACE_PAIR_TOKENS 4
#include "vec_avx2.h"

#include "../expert_kernels.h"

namespace headrace::HEADRACE_NS {

struct Codes { __m256i half[2][2]; };  // [nibble][first or second two blocks]

static inline __m256i two_blocks(const uint8_t* p, int blocks) {
  if (blocks >= 2) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return blocks == 1 ? _mm256_zextsi128_si256(load16(p)) : _mm256_setzero_si256();
}

static inline Codes codes_of(const uint8_t* p, int blocks) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i mask = _mm256_set1_epi8(15);
  Codes c;
  for (int i = 0; i < 2; ++i) {
    const __m256i q = two_blocks(p + 32 * i, blocks - 2 * i);
    c.half[0][i] = _mm256_shuffle_epi8(table, _mm256_and_si256(q, mask));
    c.half[1][i] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(q, 4), mask));
  }
  return c;
}

static inline __m256i eight_products(const Codes& c, const int8_t (*terms)[64], int i) {
  const auto at = [&](int half) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(terms[half] + 32 * i)); };
  const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(c.half[0][i], at(0)), _mm256_maddubs_epi16(c.half[1][i], at(1)));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

struct Ints { __m256i half[2]; };

static inline __m256i exact_half(const Codes& c, const PairTerms& t, int i) {
  const __m256i high = _mm256_slli_epi32(eight_products(c, t.high, i), 8), low = eight_products(c, t.low, i);
  return _mm256_add_epi32(high, low);
}

static inline Ints exact(const Codes& c, const PairTerms& t) { return {{exact_half(c, t, 0), exact_half(c, t, 1)}}; }

static inline V block_sums(const Ints& a, const Ints& b, const Ints& c, const Ints& d, const PairTerms& t) {
  const auto half = [&](int i) {
    const __m256i ab = _mm256_hadd_epi32(a.half[i], b.half[i]), cd = _mm256_hadd_epi32(c.half[i], d.half[i]);
    const __m256i offset = _mm256_load_si256(reinterpret_cast<const __m256i*>(t.offset + 8 * i));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_hadd_epi32(ab, cd), offset));
  };
  return {half(0), half(1)};
}

static inline V scales_of(const uint32_t* bytes) {
  const __m128i four = _mm_setr_epi32(static_cast<int>(bytes[0]), static_cast<int>(bytes[1]), static_cast<int>(bytes[2]), static_cast<int>(bytes[3]));
  const __m256i all = _mm256_broadcastsi128_si256(four);
  const auto pick = [&](char k) {  // byte k of each word, then byte k + 1
    const __m256i shuffle = _mm256_or_si256(
        _mm256_setr_epi32(k, k + 4, k + 8, k + 12, k + 1, k + 5, k + 9, k + 13), _mm256_set1_epi32(static_cast<int>(0x80808000)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_shuffle_epi8(all, shuffle), 23));
  };
  return {pick(0), pick(2)};
}

struct Nibbles { __m256i a, b; };

static inline void nibbles_of(const uint8_t* p, Nibbles& low, Nibbles& high) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}

static inline __m256 exact_nibbles_half(__m256i codes, const int8_t* high, const int8_t* low) {
  const __m256i one = _mm256_set1_epi16(1);
  const auto sums = [&](const int8_t* terms) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, _mm256_load_si256(reinterpret_cast<const __m256i*>(terms))), one);
  };
  return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(sums(high), 8), sums(low)));
}

static inline V exact_nibbles(const Nibbles& c, const int8_t* high, const int8_t* low) {
  return {exact_nibbles_half(c.a, high, low), exact_nibbles_half(c.b, high + 32, low + 32)};
}

static inline V two(float first, float second) { return {_mm256_set1_ps(first), _mm256_set1_ps(second)}; }

}  // namespace headrace::HEADRACE_NS

#include "expert_dot.h"

namespace headrace {
const ExpertKernels& avx2_expert_kernels() {
  static constexpr ExpertKernels table{"avx2", experts_avx2::quantise, experts_avx2::expert_dot};
  return table;
}
}  // namespace headrace
