// Constant tables of the small float formats, computed at compile time from their definitions.
#pragma once
#include <cstdint>

namespace headrace {

struct FloatTable {
  float value[256];
};

constexpr float power_of_two(int exponent) {
  float v = 1.0f;
  for (int i = 0; i < exponent; ++i) v *= 2.0f;
  for (int i = 0; i > exponent; --i) v *= 0.5f;
  return v;
}

// OCP MX E8M0: 2^(byte - 127), 255 is NaN. Byte 0 is the subnormal float32 2^-127.
constexpr FloatTable make_e8m0(int bias) {
  FloatTable t{};
  for (int i = 0; i < 255; ++i) t.value[i] = power_of_two(i - bias);
  t.value[255] = __builtin_nanf("");
  return t;
}

// OCP FP8 E4M3 (finite): bias 7, subnormals, no infinity, 0x7f and 0xff are NaN.
constexpr FloatTable make_e4m3(float factor) {
  FloatTable t{};
  for (int i = 0; i < 256; ++i) {
    const int e = (i >> 3) & 15, m = i & 7;
    float v = e == 0 ? m * power_of_two(-9) : (8 + m) * power_of_two(e - 10);
    if ((i & 127) == 127) v = __builtin_nanf("");
    t.value[i] = factor * (i & 128 ? -v : v);
  }
  return t;
}

// Half of the scale, for codes that hold twice the E2M1 value (0 1 2 3 4 6 8 12).
inline constexpr FloatTable kHalfE8M0 = make_e8m0(128);
inline constexpr FloatTable kHalfE4M3 = make_e4m3(0.5f);
inline constexpr FloatTable kE4M3 = make_e4m3(1.0f);

// Twice the E2M1 values, and the non-linear 4-bit values of IQ4_NL (GGUF).
alignas(16) inline constexpr int8_t kE2M1Doubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                        0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};
alignas(64) inline constexpr float kE2M1DoubledF[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                        0, -1, -2, -3, -4, -6, -8, -12};
alignas(64) inline constexpr float kIq4ValuesF[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};
alignas(64) inline constexpr float kIota[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) inline constexpr float kIotaMinus8[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                      0,  1,  2,  3,  4,  5,  6,  7};

}  // namespace headrace
