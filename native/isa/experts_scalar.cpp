// The experts' product in portable C++.
#define HEADRACE_NS experts_scalar
#define HEADRACE_MANY_TOKENS 2
#define HEADRACE_PAIR_TOKENS 2
#include "vec_scalar.h"

#include "../expert_kernels.h"

namespace headrace::HEADRACE_NS {

struct Codes { uint8_t half[2][64]; };

static inline Codes codes_of(const uint8_t* p, int blocks) {
  Codes c;
  std::memset(&c, 12, sizeof c);  // code 0 and its offset
  for (int b = 0; b < blocks; ++b)
    for (int j = 0; j < 16; ++j) {
      c.half[0][16 * b + j] = static_cast<uint8_t>(kE2M1Doubled[p[16 * b + j] & 15] + 12);
      c.half[1][16 * b + j] = static_cast<uint8_t>(kE2M1Doubled[p[16 * b + j] >> 4] + 12);
    }
  return c;
}

struct Ints { int32_t v[16]; };

static inline Ints exact(const Codes& c, const PairTerms& t) {
  Ints sums;
  for (int lane = 0; lane < 16; ++lane) {
    int32_t high = 0, low = 0;
    for (int half = 0; half < 2; ++half)
      for (int j = 4 * lane; j < 4 * lane + 4; ++j) {
        high += c.half[half][j] * t.high[half][j];
        low += c.half[half][j] * t.low[half][j];
      }
    sums.v[lane] = high * 256 + low;
  }
  return sums;
}

static inline V block_sums(const Ints& a, const Ints& b, const Ints& c, const Ints& d, const PairTerms& t) {
  const Ints* rows[4] = {&a, &b, &c, &d};
  V sums;
  for (int k = 0; k < 4; ++k)
    for (int r = 0; r < 4; ++r) {
      const int32_t* v = rows[r]->v + 4 * k;
      sums.v[4 * k + r] = static_cast<float>(v[0] + v[1] + v[2] + v[3] + t.offset[4 * k + r]);
    }
  return sums;
}

static inline V scales_of(const uint32_t* bytes) {
  V s;
  for (int lane = 0; lane < 16; ++lane) {
    const uint32_t u = (bytes[lane % 4] >> 8 * (lane / 4) & 255) << 23;
    std::memcpy(&s.v[lane], &u, 4);
  }
  return s;
}

struct Nibbles { uint8_t code[64]; };

static inline void nibbles_of(const uint8_t* p, Nibbles& low, Nibbles& high) {
  for (int j = 0; j < 64; ++j) {
    low.code[j] = p[j] & 15;
    high.code[j] = p[j] >> 4;
  }
}

static inline V exact_nibbles(const Nibbles& c, const int8_t* high, const int8_t* low) {
  V sums;
  for (int lane = 0; lane < 16; ++lane) {
    int32_t h = 0, l = 0;
    for (int j = 4 * lane; j < 4 * lane + 4; ++j) {
      h += c.code[j] * high[j];
      l += c.code[j] * low[j];
    }
    sums.v[lane] = static_cast<float>(h * 256 + l);
  }
  return sums;
}

static inline V two(float first, float second) {
  V v;
  for (int lane = 0; lane < 16; ++lane) v.v[lane] = lane < 8 ? first : second;
  return v;
}

}  // namespace headrace::HEADRACE_NS

#include "expert_dot.h"

namespace headrace {
const ExpertKernels& scalar_expert_kernels() {
  static constexpr ExpertKernels table{"scalar", experts_scalar::quantise, experts_scalar::expert_dot};
  return table;
}
}  // namespace headrace
