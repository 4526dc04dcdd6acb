// Sixteen lanes in plain C++: any CPU. The compiler vectorises the loops with what it has.
#pragma once
#include <cmath>
#include <cstring>

#include "../tables.h"

namespace headrace::HEADRACE_NS {

constexpr bool kHasTable16 = false;  // a 16-entry float table lookup in one instruction
constexpr int kTileTokens = 2;       // tokens of the GEMM micro-kernel
constexpr int kHalves = 1;           // registers that make sixteen lanes
constexpr int kWidth = 16;

struct V { float v[16]; };
struct B { uint8_t b[16]; };
using H = V;

#define HEADRACE_EACH for (int i = 0; i < 16; ++i)
static inline V zero() { V r; HEADRACE_EACH r.v[i] = 0.0f; return r; }
static inline V set1(float x) { V r; HEADRACE_EACH r.v[i] = x; return r; }
static inline V load(const float* p) { V r; std::memcpy(r.v, p, 64); return r; }
static inline void store(float* p, V a) { std::memcpy(p, a.v, 64); }
static inline V add(V a, V b) { HEADRACE_EACH a.v[i] += b.v[i]; return a; }
static inline V sub(V a, V b) { HEADRACE_EACH a.v[i] -= b.v[i]; return a; }
static inline V mul(V a, V b) { HEADRACE_EACH a.v[i] *= b.v[i]; return a; }
static inline V div(V a, V b) { HEADRACE_EACH a.v[i] /= b.v[i]; return a; }
static inline V fma(V a, V b, V c) { HEADRACE_EACH c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return c; }
// As x86's instructions: the second operand where either is NaN.
static inline V vmin(V a, V b) { HEADRACE_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V vmax(V a, V b) { HEADRACE_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V round_even(V a) { HEADRACE_EACH a.v[i] = std::nearbyint(a.v[i]); return a; }
// 2^n for whole n in [-126, 127]
static inline V exp2i(V n) {
  HEADRACE_EACH { const uint32_t u = static_cast<uint32_t>(static_cast<int>(n.v[i]) + 127) << 23; std::memcpy(&n.v[i], &u, 4); }
  return n;
}
static inline V keep_nan(V value, V source) { HEADRACE_EACH if (source.v[i] != source.v[i]) value.v[i] = source.v[i]; return value; }

static inline H hzero() { return zero(); }
static inline H hload(const float* p) { return load(p); }
static inline void hstore(float* p, H a) { store(p, a); }
static inline H hfma(H a, H b, H c) { return fma(a, b, c); }

static inline float hsum(V a) {
  for (int w = 8; w > 0; w /= 2) for (int i = 0; i < w; ++i) a.v[i] += a.v[i + w];
  return a.v[0];
}
static inline float hmax(V a) {
  for (int w = 8; w > 0; w /= 2) for (int i = 0; i < w; ++i) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}
static inline void reduce8(const V* a, float* out) { for (int i = 0; i < 8; ++i) out[i] = hsum(a[i]); }

static inline B load16(const uint8_t* p) { B r; std::memcpy(r.b, p, 16); return r; }
static inline B low4(B a) { HEADRACE_EACH a.b[i] &= 15; return a; }
static inline B high4(B a) { HEADRACE_EACH a.b[i] >>= 4; return a; }
template <int N> static inline B bits(B a, int shift) { HEADRACE_EACH a.b[i] = (a.b[i] >> shift) & N; return a; }
template <int N> static inline B shl(B a) { HEADRACE_EACH a.b[i] = static_cast<uint8_t>(a.b[i] << N); return a; }
static inline B bor(B a, B b) { HEADRACE_EACH a.b[i] |= b.b[i]; return a; }
static inline B bsub(B a, int n) { HEADRACE_EACH a.b[i] = static_cast<uint8_t>(a.b[i] - n); return a; }
static inline B interleave_low(B a, B b) { B r; for (int i = 0; i < 8; ++i) { r.b[2 * i] = a.b[i]; r.b[2 * i + 1] = b.b[i]; } return r; }
static inline B interleave_high(B a, B b) { B r; for (int i = 0; i < 8; ++i) { r.b[2 * i] = a.b[8 + i]; r.b[2 * i + 1] = b.b[8 + i]; } return r; }
static inline B lookup(const int8_t* table, B a) { HEADRACE_EACH a.b[i] = static_cast<uint8_t>(table[a.b[i]]); return a; }
// byte i is `value` where bit i is set
static inline B spread_bits(uint32_t mask, int value) { B r; HEADRACE_EACH r.b[i] = (mask >> i) & 1 ? static_cast<uint8_t>(value) : 0; return r; }
static inline V from_u8(B a) { V r; HEADRACE_EACH r.v[i] = a.b[i]; return r; }
static inline V from_i8(B a) { V r; HEADRACE_EACH r.v[i] = static_cast<int8_t>(a.b[i]); return r; }
static inline V from_e4m3(B a) { V r; HEADRACE_EACH r.v[i] = kE4M3.value[a.b[i]]; return r; }

static inline V table_low(V table, B a) { V r; HEADRACE_EACH r.v[i] = table.v[a.b[i] & 15]; return r; }
static inline V table_high(V table, B a) { V r; HEADRACE_EACH r.v[i] = table.v[a.b[i] >> 4]; return r; }

static inline float f16(const uint8_t* p) {
  uint16_t h; std::memcpy(&h, p, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  float r;
  if (rest >= 0x7c00) { const uint32_t u = sign | 0x7f800000 | (rest & 0x3ff) << 13; std::memcpy(&r, &u, 4); return r; }
  if (rest < 0x400) { r = static_cast<float>(rest) * 5.9604644775390625e-8f; return sign ? -r : r; }  // 2^-24
  const uint32_t u = sign | ((rest << 13) + 0x38000000);
  std::memcpy(&r, &u, 4);
  return r;
}
// `n` half-precision numbers, or pairs of them, `stride` bytes apart, as floats side by side.
static inline void halves(const uint8_t* p, int64_t stride, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = f16(p + j * stride);
}
static inline void half_pairs(const uint8_t* p, int64_t stride, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) {
    out[2 * j] = f16(p + j * stride);
    out[2 * j + 1] = f16(p + j * stride + 2);
  }
}
static inline B bytes_of(uint64_t a) { B r{}; for (int i = 0; i < 8; ++i) r.b[i] = static_cast<uint8_t>(a >> (8 * i)); return r; }
static inline V from_f16(const uint8_t* p) { V r; HEADRACE_EACH r.v[i] = f16(p + 2 * i); return r; }
static inline V from_bf16(const uint8_t* p) {
  V r; HEADRACE_EACH { uint16_t h; std::memcpy(&h, p + 2 * i, 2); const uint32_t u = static_cast<uint32_t>(h) << 16; std::memcpy(&r.v[i], &u, 4); }
  return r;
}
static inline void prefetch(const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p);
#else
  (void)p;
#endif
}
static inline void prefetch_far(const void* p) { prefetch(p); }
#undef HEADRACE_EACH

}  // namespace headrace::HEADRACE_NS
