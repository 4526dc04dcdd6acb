// Shared by the dense and the expert products: one tile of weight rows times any number of tokens.
#pragma once
#include <algorithm>

#include "dispatch.h"
#include "ops.h"
#include "pool.h"

namespace headrace {

// Tokens whose row pointers are built at once.
constexpr int64_t kTokenChunk = 96;
// Up to this many tokens, four rows at a time are expanded into the L1 cache; beyond it a whole tile
// into L2, so that the activations are read once per tile and not once per four rows.
constexpr int64_t kFewTokens = 12;
// Rows of a tile with many tokens; its float32 copy (kTileFloats) must stay in a 1 MiB L2 cache.
constexpr int64_t kTileRows = 32;
constexpr int64_t kTileFloats = 96 * 1024;
// Below this many multiply-adds a call is cheaper on one thread than a wake (about 2 us, Zen 4).
constexpr int64_t kSerialWork = 32 * 1024;

// Rows of one work item. Enough items that a late or slow worker costs little, and not so many that
// claiming them shows; multiples of four rows, which the kernels take together.
inline int64_t tile_rows(int64_t total_rows, int64_t cols, int64_t tokens, int threads) {
  int64_t rows = (total_rows / (threads * 6) + 3) / 4 * 4;
  if (tokens > 1) rows = std::min(rows, std::min(kTileRows, kTileFloats / padded(cols) / 4 * 4));
  else rows = std::min<int64_t>(rows, 512);
  return std::max<int64_t>(rows, 4);
}

inline int64_t tile_scratch(int64_t rows, int64_t cols) { return rows * padded(cols); }

inline bool is_rowwise(const Kernels& k, const Matrix& m) { return k.rowwise != nullptr && k.rowwise(m.format); }

// Whether so many tokens share one float32 copy of a tile of `m`.
inline bool shares_copy(const Kernels& k, const Matrix& m, int64_t tokens) {
  return tokens > kFewTokens && !is_rowwise(k, m);
}

// Writes sums for rows [row0, row0 + count) of `m`: to[t][i] = row (row0 + i) . x[t].
// `expanded` holds the rows as float32 if tokens > kFewTokens (see expand_tile).
inline void tile_product(const Kernels& k, const Matrix& m, int64_t row0, int64_t count, const float* const* x,
                         int64_t tokens, float* const* to, float* expanded) {
  if (tokens == 1 || is_rowwise(k, m)) {
    for (int64_t t = 0; t < tokens; ++t) k.dot_rows(m, row0, count, x[t], to[t]);
    return;
  }
  const int64_t stride = padded(m.cols);
  float* shifted[kTokenChunk];
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t n = std::min<int64_t>(4, count - i);
    k.expand_rows(m, row0 + i, n, expanded, stride);
    for (int64_t t = 0; t < tokens; ++t) shifted[t] = to[t] + i;
    k.gemm(expanded, stride, n, x, tokens, m.cols, shifted);
  }
}

}  // namespace headrace
