// Matrix times vector straight from the stored format, expansion of rows, and the GEMM micro-kernel.
// All three keep the order of kernels.h.
#pragma once
#include "walk.h"

namespace headrace::HEADRACE_NS {

// Group g + j of R rows times its activations, added to R accumulators.
template <Format F, int R>
static inline void dot_group(const Row* rows, int64_t g, int j, const float (*scales)[kScaleFloats], const float* x, V* acc) {
  const V x0 = load(x + (g + j) * kGroup), x1 = load(x + (g + j) * kGroup + 16);
  for (int i = 0; i < R; ++i) {
    V a, b;
    Expand<F>::run(rows[i], g + j, scales[i], j, a, b);
    acc[i] = fma(a, x0, acc[i]);
    acc[i] = fma(b, x1, acc[i]);
  }
}

template <Format F, int R>
static inline void dot_block(const Matrix& m, int64_t row0, const float* x, float* out) {
  Row rows[R];
  V acc[R];
  alignas(64) float scales[R][kScaleFloats];
  for (int i = 0; i < R; ++i) {
    rows[i] = row_of(m, row0 + i);
    acc[i] = zero();
  }
  const int64_t groups = m.cols / kGroup, rest = m.cols % kGroup;
  int64_t g = 0;
  for (; g + kChunk <= groups; g += kChunk) {
    for (int i = 0; i < R; ++i) {
      prefetch_chunk<F>(rows[i], g);
      if (m.far_nbytes != 0) prefetch_far_chunk<F>(rows[i].data + m.far_nbytes, g);
      Expand<F>::prepare(rows[i], g, kChunk, scales[i]);
    }
    in_memory(scales);
    HEADRACE_UNROLL_8
    for (int j = 0; j < kChunk; ++j) dot_group<F, R>(rows, g, j, scales, x, acc);
  }
  if (g < groups) {
    for (int i = 0; i < R; ++i) Expand<F>::prepare(rows[i], g, groups - g, scales[i]);
    for (int j = 0; j < groups - g; ++j) dot_group<F, R>(rows, g, j, scales, x, acc);
  }
  if (rest != 0) {
    alignas(64) float tail[kGroup] = {};
    for (int64_t i = 0; i < rest; ++i) tail[i] = x[groups * kGroup + i];
    const V x0 = load(tail), x1 = load(tail + 16);
    for (int i = 0; i < R; ++i) {
      V a, b;
      expand_tail<F>(rows[i], groups, rest, a, b);
      acc[i] = fma(a, x0, acc[i]);
      acc[i] = fma(b, x1, acc[i]);
    }
  }
  for (int i = 0; i < R; ++i) out[i] = hsum(acc[i]);
}

template <Format F>
static void dot_rows_of(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) dot_block<F, 4>(m, row0 + i, x, out + i);
  for (; i < count; ++i) dot_block<F, 1>(m, row0 + i, x, out + i);
}

template <Format F>
static inline void expand_group(const Row& r, int64_t g, int j, const float* scales, float* to) {
  V a, b;
  Expand<F>::run(r, g + j, scales, j, a, b);
  store(to + (g + j) * kGroup, a);
  store(to + (g + j) * kGroup + 16, b);
}

template <Format F>
static void expand_rows_of(const Matrix& m, int64_t row0, int64_t count, float* out, int64_t stride) {
  const int64_t groups = m.cols / kGroup, rest = m.cols % kGroup;
  alignas(64) float scales[kScaleFloats];
  for (int64_t i = 0; i < count; ++i) {
    const Row r = row_of(m, row0 + i);
    float* to = out + i * stride;
    int64_t g = 0;
    for (; g + kChunk <= groups; g += kChunk) {
      prefetch_chunk<F>(r, g);
      if (m.far_nbytes != 0) prefetch_far_chunk<F>(r.data + m.far_nbytes, g);
      Expand<F>::prepare(r, g, kChunk, scales);
      in_memory(&scales);
      HEADRACE_UNROLL_8
      for (int j = 0; j < kChunk; ++j) expand_group<F>(r, g, j, scales, to);
    }
    if (g < groups) {
      Expand<F>::prepare(r, g, groups - g, scales);
      for (int j = 0; j < groups - g; ++j) expand_group<F>(r, g, j, scales, to);
    }
    if (rest != 0) {
      V a, b;
      expand_tail<F>(r, groups, rest, a, b);
      store(to + groups * kGroup, a);
      store(to + groups * kGroup + 16, b);
    }
  }
}

// Columns that a micro-kernel takes at once where sixteen lanes are two registers: it passes over the
// rows twice, once for each half of the lanes, and the second pass should find them in the L1 cache
// (7 rows x 2 KiB; 80 -> 115 GFLOP/s at 2,048 columns, AVX2 on 2 Zen 4 cores). Sums go on where they
// stopped, so the order stays the same.
constexpr int64_t kBlockCols = 512;

// acc[t][i] += weights row i times token t over columns [from, to), one half of the lanes.
template <int R, int T>
static inline void micro_half(const float* w, int64_t stride, const float* const* x, int64_t from, int64_t to, H (*acc)[R]) {
  for (int64_t k = from; k < to; k += kLanes) {
    H v[T];  // T values, one weight and R x T sums are at most 16 registers (32 with AVX-512)
    for (int t = 0; t < T; ++t) v[t] = hload(x[t] + k);
    for (int i = 0; i < R; ++i) {
      const H weight = hload(w + i * stride + k);
      for (int t = 0; t < T; ++t) acc[t][i] = hfma(weight, v[t], acc[t][i]);
    }
  }
}

// R weight rows x T tokens. `tail` holds the last padded group of each token where cols needs it.
template <int R, int T>
static inline void micro(const float* w, int64_t stride, const float* const* x, int64_t cols,
                         const float* const* tail, float* const* out, int64_t column) {
  constexpr int kSums = (T * R + 7) / 8 * 8;  // as reduce8 takes them
  alignas(64) V sums[kSums];
  const int64_t whole = cols / kGroup * kGroup, block = kHalves == 1 ? whole : kBlockCols;
  float* lanes = reinterpret_cast<float*>(sums);
  int64_t k = 0;
  do {
    const int64_t end = k + block < whole ? k + block : whole;
    for (int half = 0; half < kHalves; ++half) {
      const int64_t at = half * kWidth;
      H acc[T][R];
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < R; ++i) acc[t][i] = k == 0 ? hzero() : hload(lanes + (t * R + i) * kLanes + at);
      micro_half<R, T>(w, stride, x, k + at, end, acc);
      if (end == whole && whole != cols) micro_half<R, T>(w + whole, stride, tail, at, kGroup, acc);
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < R; ++i) hstore(lanes + (t * R + i) * kLanes + at, acc[t][i]);
    }
    k = end;
  } while (k < whole);
  for (int j = T * R; j < kSums; ++j) sums[j] = zero();
  alignas(64) float result[kSums];
  for (int j = 0; j < T * R; j += 8) reduce8(sums + j, result + j);
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < R; ++i) out[t][column + i] = result[t * R + i];
}

template <int T>
static void micro_columns(const float* w, int64_t stride, int64_t rows, const float* const* x,
                          int64_t cols, float* const* out) {
  alignas(64) float padded_tail[T][kGroup];
  const float* tail[T];
  for (int t = 0; t < T; ++t) tail[t] = padded_tail[t];
  const int64_t whole = cols / kGroup * kGroup;
  if (whole != cols)
    for (int t = 0; t < T; ++t)
      for (int64_t i = 0; i < kGroup; ++i) padded_tail[t][i] = whole + i < cols ? x[t][whole + i] : 0.0f;
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) micro<4, T>(w + i * stride, stride, x, cols, tail, out, i);
  for (; i < rows; ++i) micro<1, T>(w + i * stride, stride, x, cols, tail, out, i);
}

static void gemm(const float* w, int64_t stride, int64_t rows, const float* const* x,
                 int64_t tokens, int64_t cols, float* const* out) {
  int64_t left = tokens;
  while (left > 0) {
    // Groups of equal size: eight tokens are 4 + 4, not 6 + 2.
    const int64_t groups = (left + kTileTokens - 1) / kTileTokens, n = (left + groups - 1) / groups;
    switch (n) {
      case 1: micro_columns<1>(w, stride, rows, x, cols, out); break;
      case 2: micro_columns<2>(w, stride, rows, x, cols, out); break;
#if HEADRACE_TILE_TOKENS >= 3
      case 3: micro_columns<3>(w, stride, rows, x, cols, out); break;
#endif
#if HEADRACE_TILE_TOKENS >= 6
      case 4: micro_columns<4>(w, stride, rows, x, cols, out); break;
      case 5: micro_columns<5>(w, stride, rows, x, cols, out); break;
      case 6: micro_columns<6>(w, stride, rows, x, cols, out); break;
#endif
      default: break;
    }
    x += n;
    out += n;
    left -= n;
  }
}

template <Format F> struct DotCall {
  static void call(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
    dot_rows_of<F>(m, row0, count, x, out);
  }
};
template <Format F> struct ExpandCall {
  static void call(const Matrix& m, int64_t row0, int64_t count, float* out, int64_t stride) {
    expand_rows_of<F>(m, row0, count, out, stride);
  }
};

static void dot_rows(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
  by_format<DotCall>(m.format, m, row0, count, x, out);
}
static void expand_rows(const Matrix& m, int64_t row0, int64_t count, float* out, int64_t stride) {
  by_format<ExpandCall>(m.format, m, row0, count, out, stride);
}

}  // namespace headrace::HEADRACE_NS
