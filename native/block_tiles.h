// Products of MXFP4 with several tokens on a matrix unit for bytes: the integer sums of expert_kernels.h, of whole blocks
// and so exact in any order, scaled and added in the same order. A token has the same bits as alone and as without the
// unit.
//
//   weights      twice E2M1 as int8 of sixteen rows, a block's 32 columns even ones first, made in the L1 cache
//   activations  [block of 16 tokens][block of 32 columns]: terms [8][W high, W low][4] (of sixteen tokens
//                all of the high ones first), scales [16]
//
// W is 8 or 16, as tokens fit. Lane i of the scales, and of a register with the sums of 16 / W rows, is token i % W.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace headrace {

constexpr int64_t kBlockTokens = 16;

// Tokens of an item from which on it uses them: with fewer, vector instructions are as fast. GB/s of MXFP4 at 4, 6, 8,
// 12 and 16 tokens without and with them: 70, 55, 44, 30, 24 and 64, 61, 58, 40, 36 (15 threads of a Sapphire Rapids,
// 2026-11).
constexpr int64_t kBlockPairs = 6;

constexpr int64_t block_width(int64_t tokens) { return tokens <= 8 ? 8 : 16; }
constexpr int64_t block_nbytes(int64_t width) { return 2 * 32 * width + 64; }  // of 32 columns

inline bool has_block_tiles(Format f, int64_t cols) { return f == Format::mxfp4 && cols % 32 == 0; }

struct BlockProduct {
  const Matrix* m;
  int64_t row0, rows;
  const uint8_t* x;   // a block of tokens
  int64_t tokens;     // of it
  float* const* out;  // out[token][row]
  const uint8_t* next;  // what will be read after these rows, as many bytes; or null
};

struct BlockTileKernels {
  // Columns [32 block, 32 block + 32) of up to sixteen rows of activations; `to` is the start of the token block.
  void (*pack)(const float* const* x, int64_t tokens, int64_t block, uint8_t* to);
  void (*multiply)(const BlockProduct& p);
};

}  // namespace headrace
