// The product of expert_kernels.h, once for all instruction sets. The file that includes this one has
// included its vec_*.h and defines
//   struct Codes;                                  codes of four blocks: unsigned bytes of both nibbles
//   Codes codes_of(const uint8_t* p, int blocks)   blocks <= 4
//   V exact(const Codes&, const TermGroup&)        the integer sums of sixteen lanes, as float
//   V scales_of(uint32_t bytes)                    2^(byte k - 127) in lanes 4k to 4k + 3
#pragma once
#include <cmath>
#include <cstring>

#include "../expert_kernels.h"

namespace headrace::HEADRACE_NS {

// Tokens and rows that share registers: sums, terms and codes of all of them should fit.
constexpr int kManyTokens = HEADRACE_MANY_TOKENS, kManyRows = HEADRACE_MANY_TOKENS;

// Portable, so that every instruction set rounds in the same places; compilers vectorise the loops.
static void quantise_block(const float* x, TermGroup& to, int block) {
  uint32_t peak_bits = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t u;
    std::memcpy(&u, x + i, 4);
    u &= 0x7fffffff;
    peak_bits = u > peak_bits ? u : peak_bits;
  }
  float peak;
  std::memcpy(&peak, &peak_bits, 4);
  const bool finite = peak_bits < 0x7f800000;  // NaN and infinity must reach the output
  const bool empty = !finite || peak < 0x1p-100f;
  const float scale = empty ? 1.0f : peak / 32512.0f;
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even
  int32_t v[32];
  for (int i = 0; i < 32; ++i) {
    const float shifted = (empty ? 0.0f : x[i]) / scale + kWhole;
    std::memcpy(&v[i], &shifted, 4);
    v[i] -= 0x4b400000;
  }
  int32_t halves[2][16];
  for (int j = 0; j < 16; ++j) {
    halves[0][j] = v[2 * j];
    halves[1][j] = v[2 * j + 1];
  }
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 16; ++j) {
      const int32_t high = (halves[half][j] + 128) >> 8;
      to.high[half][16 * block + j] = static_cast<int8_t>(high);
      to.low[half][16 * block + j] = static_cast<int8_t>(halves[half][j] - high * 256);
    }
  for (int q = 0; q < 4; ++q) {
    int32_t sum = 0;
    for (int j = 4 * q; j < 4 * q + 4; ++j) sum += halves[0][j] + halves[1][j];
    to.offset[4 * block + q] = -12 * sum;
    to.scale[4 * block + q] = finite ? 0.5f * scale : std::nanf("");
  }
}

// R rows times T tokens. `near` and `far` (or null) are where the bytes to ask for begin.
template <int R, int T>
static inline void expert_block(const Matrix& m, int64_t row0, const TermGroup* const* x, float* const* out, int64_t at,
                                const uint8_t* near, const uint8_t* far) {
  constexpr int64_t kStep = 64;  // bytes of four blocks
  constexpr int kSums = (R * T + 7) / 8 * 8;
  const int64_t blocks = m.cols / kTermBlock, whole = blocks / kTermBlocks;
  const uint8_t* rows = m.data + row0 * m.row_nbytes;
  const uint8_t* scales = m.scales + row0 * m.scale_row_nbytes;
  V acc[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  for (int64_t g = 0; g < whole; ++g) {
    for (int r = 0; r < R; ++r) {
      const int64_t ahead = r * m.row_nbytes + g * kStep;
      prefetch(near + ahead);
      if (far != nullptr) prefetch_far(far + ahead);
      const uint8_t* row = rows + r * m.row_nbytes;
      const Codes c = codes_of(row + g * kStep, 4);
      uint32_t bytes;
      std::memcpy(&bytes, scales + r * m.scale_row_nbytes + 4 * g, 4);
      const V s = scales_of(bytes);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(exact(c, x[t][g]), mul(s, load(x[t][g].scale)), acc[r][t]);
    }
  }
  if (const int rest = static_cast<int>(blocks % kTermBlocks); rest != 0) {
    for (int r = 0; r < R; ++r) {
      const uint8_t* row = rows + r * m.row_nbytes;
      prefetch(near + r * m.row_nbytes + whole * kStep);
      if (far != nullptr) prefetch_far(far + r * m.row_nbytes + whole * kStep);
      const Codes c = codes_of(row + whole * kStep, rest);
      uint32_t bytes = 0;
      for (int b = 0; b < rest; ++b)
        bytes |= static_cast<uint32_t>(scales[r * m.scale_row_nbytes + whole * kTermBlocks + b]) << (8 * b);
      const V s = scales_of(bytes);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(exact(c, x[t][whole]), mul(s, load(x[t][whole].scale)), acc[r][t]);
    }
  }
  if constexpr (R * T < 4) {
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) out[t][at + r] = hsum(acc[r][t]);
  } else {
    alignas(64) V sums[kSums];
    alignas(64) float result[kSums];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) sums[t * R + r] = acc[r][t];
    for (int j = R * T; j < kSums; ++j) sums[j] = zero();
    for (int j = 0; j < kSums; j += 8) reduce8(sums + j, result + j);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) out[t][at + r] = result[t * R + r];
  }
}

// Where to prefetch from while R rows from `row` on are at work.
static inline const uint8_t* target(const Matrix& m, int64_t row0, int64_t i, const Ahead& ahead, int64_t nbytes) {
  const uint8_t* here = m.data + (row0 + i) * m.row_nbytes;
  const int64_t beyond = i * m.row_nbytes + nbytes - ahead.rows * m.row_nbytes;
  if (beyond < 0) return here + nbytes;
  return ahead.next == nullptr ? here : ahead.next + beyond;
}

template <int R, int T>
static inline void expert_rows(const Matrix& m, int64_t row0, int64_t i, const TermGroup* const* x, float* const* out,
                               bool first, const Ahead& ahead, const Reading& reading) {
  if (!first) {  // asked for by the first tokens
    expert_block<R, T>(m, row0 + i, x, out, i, m.data + (row0 + i) * m.row_nbytes, nullptr);
    return;
  }
  prefetch(m.scales + (row0 + i) * m.scale_row_nbytes + reading.near_nbytes / 16);
  const uint8_t* far = reading.far_nbytes == 0 ? nullptr : target(m, row0, i, ahead, reading.far_nbytes);
  expert_block<R, T>(m, row0 + i, x, out, i, target(m, row0, i, ahead, reading.near_nbytes), far);
}

// T tokens by all rows: their terms stay in the L1 cache, and the rows in the L2 cache for the next tokens.
template <int T>
static void expert_tokens(const Matrix& m, int64_t row0, int64_t count, const TermGroup* const* x, float* const* out,
                          bool first, const Ahead& ahead, const Reading& reading) {
  int64_t i = 0;
  if constexpr (T == 1)
    if (reading.rows >= 8)
      for (; i + 8 <= count; i += 8) expert_rows<8, T>(m, row0, i, x, out, first, ahead, reading);
  if constexpr (T == 1 || kManyRows >= 4)
    if (T > 1 || reading.rows >= 4)
      for (; i + 4 <= count; i += 4) expert_rows<4, T>(m, row0, i, x, out, first, ahead, reading);
  for (; i + 2 <= count; i += 2) expert_rows<2, T>(m, row0, i, x, out, first, ahead, reading);
  for (; i < count; ++i) expert_rows<1, T>(m, row0, i, x, out, first, ahead, reading);
}

static void expert_dot(const Matrix& m, int64_t row0, int64_t count, const TermGroup* const* x, int64_t tokens,
                       float* const* out, const Ahead& ahead, const Reading& reading) {
  for (int64_t left = tokens; left > 0;) {
    // Groups of equal size: five tokens are 3 + 2, not 4 + 1.
    const int64_t groups = (left + kManyTokens - 1) / kManyTokens, n = (left + groups - 1) / groups;
    const bool first = left == tokens;
    switch (n) {
      case 1: expert_tokens<1>(m, row0, count, x, out, first, ahead, reading); break;
      case 2: expert_tokens<2>(m, row0, count, x, out, first, ahead, reading); break;
#if HEADRACE_MANY_TOKENS >= 4
      case 3: expert_tokens<3>(m, row0, count, x, out, first, ahead, reading); break;
      default: expert_tokens<4>(m, row0, count, x, out, first, ahead, reading); break;
#else
      default: break;
#endif
    }
    x += n;
    out += n;
    left -= n;
  }
}

}  // namespace headrace::HEADRACE_NS
