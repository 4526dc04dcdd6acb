// The products of expert_kernels.h, once for all instruction sets. The file that includes this one has
// included its vec_*.h and defines HEADRACE_MANY_TOKENS, HEADRACE_PAIR_TOKENS and
//   struct Codes;                                  MXFP4 codes of four blocks: unsigned bytes of both nibbles
//   Codes codes_of(const uint8_t* p, int blocks)   blocks <= 4
//   struct Ints;                                   sixteen lanes of int32
//   Ints exact(const Codes&, const PairTerms&)     the sums of sixteen lanes, of which four are a block's
//   V block_sums(a, b, c, d, const PairTerms&)     lane 4k + r: the r-th's sum of block k and its offset, as float
//   V scales_of(const uint32_t* bytes)             lane 4k + r: 2^(byte k of bytes[r] - 127)
//   struct Nibbles;                                64 codes, unsigned bytes
//   void nibbles_of(const uint8_t* p, Nibbles& low, Nibbles& high)
//   V exact_nibbles(const Nibbles&, const int8_t* high, const int8_t* low)
//   V two(float first, float second)               eight lanes of each
#pragma once
#include <cstring>

#include "../expert_kernels.h"
#include "block_integers.h"

namespace headrace::HEADRACE_NS {

// Tokens and rows of Q4_K that share registers: sums, terms and codes of all of them should fit. Four rows of MXFP4 have
// one sum for each token.
constexpr int kManyTokens = HEADRACE_MANY_TOKENS, kManyRows = HEADRACE_MANY_TOKENS, kPairTokens = HEADRACE_PAIR_TOKENS;

static void quantise(const float* x, Format format, uint8_t* row, int64_t block) {
  int32_t v[32];
  const float scale = integers(x, v);
  const int64_t group = block / kTermBlocks;
  const int b = static_cast<int>(block % kTermBlocks);
  if (format == Format::mxfp4) {
    PairTerms& to = reinterpret_cast<PairTerms*>(row)[group];
    int32_t halves[2][16];
    for (int j = 0; j < 16; ++j) {
      halves[0][j] = v[2 * j];
      halves[1][j] = v[2 * j + 1];
    }
    for (int half = 0; half < 2; ++half) split(halves[half], 16, to.high[half] + 16 * b, to.low[half] + 16 * b);
    int32_t sum = 0;
    for (int j = 0; j < 32; ++j) sum += v[j];
    for (int q = 0; q < 4; ++q) {
      to.offset[4 * b + q] = -12 * sum;
      to.scale[4 * b + q] = 0.5f * scale;
    }
    return;
  }
  SplitTerms* terms = reinterpret_cast<SplitTerms*>(row);
  SplitTerms& to = terms[group];
  const int half = b & 1, place = b >> 1;
  split(v, 32, to.high[half] + 32 * place, to.low[half] + 32 * place);
  int32_t sum = 0;
  for (int j = 0; j < 32; ++j) sum += v[j];
  for (int j = 0; j < 8; ++j) to.scale[half][8 * place + j] = scale;
  terms[group & ~int64_t{1}].sum[block % 8] = scale * static_cast<float>(sum);
}

// Four rows from `row0` on, the last of them again where there are fewer.
struct Quad {
  const uint8_t *rows[4], *scales[4];
  Quad(const Matrix& m, int64_t row0, int64_t count) {
    for (int64_t r = 0; r < 4; ++r) {
      const int64_t row = row0 + (r < count ? r : count - 1);
      rows[r] = m.data + row * m.row_nbytes;
      scales[r] = m.scales + row * m.scale_row_nbytes;
    }
  }
};

// Group `g` of four blocks, or `rest` of them: each row's and token's sums of whole blocks, times both scales, added in
// the lanes of their blocks.
template <int T>
static inline void add_group(const Quad& q, int64_t g, int blocks, const PairTerms* const* x, V* acc) {
  Codes c[4];
  uint32_t bytes[4] = {};
  for (int r = 0; r < 4; ++r) {
    c[r] = codes_of(q.rows[r] + g * 64, blocks);
    if (blocks == kTermBlocks) std::memcpy(&bytes[r], q.scales[r] + 4 * g, 4);
    else for (int b = 0; b < blocks; ++b) bytes[r] |= static_cast<uint32_t>(q.scales[r][4 * g + b]) << (8 * b);
  }
  const V s = scales_of(bytes);
  for (int t = 0; t < T; ++t) {
    const PairTerms& terms = x[t][g];
    const V sums = block_sums(exact(c[0], terms), exact(c[1], terms), exact(c[2], terms), exact(c[3], terms), terms);
    acc[t] = fma(sums, mul(s, load(terms.scale)), acc[t]);
  }
}

// out[t][at + r] of 4 Q rows from `row0` on, of which `count` exist, and T tokens. `near` and `far` (or null) are where
// the bytes to ask for begin.
template <int Q, int T>
static inline void pair_block(const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* terms, float* const* out,
                              int64_t at, const uint8_t* near, const uint8_t* far) {
  const int64_t blocks = m.cols / kTermBlock, whole = blocks / kTermBlocks;
  const PairTerms* x[T];
  for (int t = 0; t < T; ++t) x[t] = reinterpret_cast<const PairTerms*>(terms[t]);
  V acc[Q][T];
  for (int i = 0; i < Q; ++i)
    for (int t = 0; t < T; ++t) acc[i][t] = zero();
  const Quad quads[2] = {Quad(m, row0, count), Quad(m, row0 + (Q > 1 ? 4 : 0), Q > 1 ? count - 4 : count)};
  const auto ask = [&](int64_t g) {
    for (int64_t r = 0; r < 4 * Q && r < count; ++r) {
      const int64_t ahead = r * m.row_nbytes + g * 64;
      prefetch(near + ahead);
      if (far != nullptr) prefetch_far(far + ahead);
    }
  };
  for (int64_t g = 0; g < whole; ++g) {
    ask(g);
    for (int i = 0; i < Q; ++i) add_group<T>(quads[i], g, kTermBlocks, x, acc[i]);
  }
  if (const int rest = static_cast<int>(blocks % kTermBlocks); rest != 0) {
    ask(whole);
    for (int i = 0; i < Q; ++i) add_group<T>(quads[i], whole, rest, x, acc[i]);
  }
  for (int i = 0; i < Q; ++i)
    for (int t = 0; t < T; ++t) {
      alignas(64) float lanes[16];
      store(lanes, acc[i][t]);
      for (int64_t r = 0; r < 4 && 4 * i + r < count; ++r)
        out[t][at + 4 * i + r] = (lanes[r] + lanes[8 + r]) + (lanes[4 + r] + lanes[12 + r]);
    }
}

// Eight 6-bit scales or minima of a superblock times `factor`, in the first eight lanes: see expand.h.
static inline void q4_k_scales(const uint8_t* block, V& scales, V& minima) {
  uint32_t u[3];
  std::memcpy(u, block + 4, 12);
  const uint64_t s = (u[0] & 0x3f3f3f3fu) | static_cast<uint64_t>((u[2] & 0x0f0f0f0fu) | (u[0] >> 2 & 0x30303030u)) << 32;
  const uint64_t m = (u[1] & 0x3f3f3f3fu) | static_cast<uint64_t>((u[2] >> 4 & 0x0f0f0f0fu) | (u[1] >> 2 & 0x30303030u)) << 32;
  scales = mul(from_u8(bytes_of(s)), set1(f16(block)));
  minima = mul(from_u8(bytes_of(m)), set1(-f16(block + 2)));
}

template <int R, int T>
static inline void split_sums(const Matrix& m, int64_t row0, const uint8_t* const* terms, const uint8_t* near,
                              const uint8_t* far, V (&acc)[R][T]) {
  constexpr int64_t kBlock = 144;  // bytes of 256 weights
  const uint8_t* rows = m.data + row0 * m.row_nbytes;
  const SplitTerms* x[T];
  for (int t = 0; t < T; ++t) x[t] = reinterpret_cast<const SplitTerms*>(terms[t]);
  for (int64_t b = 0; b < m.cols / 256; ++b) {
    for (int r = 0; r < R; ++r) {
      const int64_t at = r * m.row_nbytes + b * kBlock;
      for (int64_t line = 0; line < kBlock; line += 64) {
        prefetch(near + at + line);
        if (far != nullptr) prefetch_far(far + at + line);
      }
      alignas(64) float scale[16];
      V scales, minima;
      q4_k_scales(rows + at, scales, minima);
      store(scale, scales);
      for (int t = 0; t < T; ++t) acc[r][t] = fma(minima, load(x[t][2 * b].sum), acc[r][t]);
      for (int g = 0; g < 2; ++g) {
        Nibbles low, high;
        nibbles_of(rows + at + 16 + 64 * g, low, high);
        const V even = two(scale[4 * g], scale[4 * g + 2]), odd = two(scale[4 * g + 1], scale[4 * g + 3]);
        for (int t = 0; t < T; ++t) {
          const SplitTerms& s = x[t][2 * b + g];
          acc[r][t] = fma(exact_nibbles(low, s.high[0], s.low[0]), mul(even, load(s.scale[0])), acc[r][t]);
          acc[r][t] = fma(exact_nibbles(high, s.high[1], s.low[1]), mul(odd, load(s.scale[1])), acc[r][t]);
        }
      }
    }
  }
}

template <int R, int T>
static inline void split_block(const Matrix& m, int64_t row0, const uint8_t* const* x, float* const* out, int64_t at,
                               const uint8_t* near, const uint8_t* far) {
  constexpr int kSums = (R * T + 7) / 8 * 8;
  V acc[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  split_sums<R, T>(m, row0, x, near, far, acc);
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

// R rows from row0 + i on, of which `rows` exist.
template <Format F, int R, int T>
static inline void expert_rows(const Matrix& m, int64_t row0, int64_t i, int64_t rows, const uint8_t* const* x,
                               float* const* out, bool first, const Ahead& ahead, const Reading& reading) {
  const uint8_t *near = m.data + (row0 + i) * m.row_nbytes, *far = nullptr;
  if (first) {  // else asked for by the first tokens
    near = target(m, row0, i, ahead, reading.near_nbytes);
    if (reading.far_nbytes != 0) far = target(m, row0, i, ahead, reading.far_nbytes);
    if constexpr (F == Format::mxfp4) prefetch(m.scales + (row0 + i) * m.scale_row_nbytes + reading.near_nbytes / 16);
  }
  if constexpr (F == Format::mxfp4) pair_block<R / 4, T>(m, row0 + i, rows, x, out, i, near, far);
  else split_block<R, T>(m, row0 + i, x, out, i, near, far);
}

// T tokens by all rows: their terms stay in the L1 cache, and the rows in the L2 cache for the next tokens.
template <Format F, int T>
static void expert_tokens(const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* x, float* const* out,
                          bool first, const Ahead& ahead, const Reading& reading) {
  int64_t i = 0;
  if constexpr (T == 1)
    if (reading.rows >= 8)
      for (; i + 8 <= count; i += 8) expert_rows<F, 8, T>(m, row0, i, 8, x, out, first, ahead, reading);
  if constexpr (F == Format::mxfp4) {
    for (; i < count; i += 4) expert_rows<F, 4, T>(m, row0, i, count - i < 4 ? count - i : 4, x, out, first, ahead, reading);
  } else {
    if constexpr (T == 1 || kManyRows >= 4)
      if (T > 1 || reading.rows >= 4)
        for (; i + 4 <= count; i += 4) expert_rows<F, 4, T>(m, row0, i, 4, x, out, first, ahead, reading);
    for (; i + 2 <= count; i += 2) expert_rows<F, 2, T>(m, row0, i, 2, x, out, first, ahead, reading);
    for (; i < count; ++i) expert_rows<F, 1, T>(m, row0, i, 1, x, out, first, ahead, reading);
  }
}

// The same for n <= T tokens.
template <Format F, int T>
static void some_tokens(int64_t n, const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* x, float* const* out,
                        bool first, const Ahead& ahead, const Reading& reading) {
  if constexpr (T > 1)
    if (n < T) return some_tokens<F, T - 1>(n, m, row0, count, x, out, first, ahead, reading);
  expert_tokens<F, T>(m, row0, count, x, out, first, ahead, reading);
}

template <Format F, int Most>
static void expert_dot_of(const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* x, int64_t tokens,
                       float* const* out, const Ahead& ahead, const Reading& reading) {
  for (int64_t left = tokens; left > 0;) {
    // Groups of equal size: nine tokens are 5 + 4, not 8 + 1.
    const int64_t groups = (left + Most - 1) / Most, n = (left + groups - 1) / groups;
    some_tokens<F, Most>(n, m, row0, count, x, out, left == tokens, ahead, reading);
    x += n;
    out += n;
    left -= n;
  }
}

static void expert_dot(const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* x, int64_t tokens,
                       float* const* out, const Ahead& ahead, const Reading& reading) {
  if (m.format == Format::mxfp4) expert_dot_of<Format::mxfp4, kPairTokens>(m, row0, count, x, tokens, out, ahead, reading);
  else expert_dot_of<Format::q4_k, kManyTokens>(m, row0, count, x, tokens, out, ahead, reading);
}

}  // namespace headrace::HEADRACE_NS
