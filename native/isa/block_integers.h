// Activations as integers of two int8 terms (expert_kernels.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_NS {

// 32 activations as integers v with x = s v. Portable, so that every instruction set rounds in the same places;
// compilers vectorise the loops. NaN and infinity make s NaN, so that they reach the output.
static inline float integers(const float* x, int32_t* v) {
  uint32_t peak_bits = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t u;
    std::memcpy(&u, x + i, 4);
    u &= 0x7fffffff;
    peak_bits = u > peak_bits ? u : peak_bits;
  }
  float peak;
  std::memcpy(&peak, &peak_bits, 4);
  const bool finite = peak_bits < 0x7f800000, empty = !finite || peak < 0x1p-100f;
  const float scale = empty ? 1.0f : peak / 32512.0f;
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even
  for (int i = 0; i < 32; ++i) {
    const float shifted = (empty ? 0.0f : x[i]) / scale + kWhole;
    std::memcpy(&v[i], &shifted, 4);
    v[i] -= 0x4b400000;
  }
  return finite ? scale : std::nanf("");
}

static inline void split(const int32_t* v, int n, int8_t* high, int8_t* low) {
  for (int j = 0; j < n; ++j) {
    const int32_t h = (v[j] + 128) >> 8;
    high[j] = static_cast<int8_t>(h);
    low[j] = static_cast<int8_t>(v[j] - h * 256);
  }
}

}  // namespace headrace::HEADRACE_NS
