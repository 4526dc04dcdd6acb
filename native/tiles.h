// Products of many tokens on matrix units: weights and activations as terms of bfloat16, sums in float32.
//
// Both sides are cut into tiles of 16 rows x 32 columns, 1 KiB each, zero past the last column:
//
//   weights      [row tile][step][term][16 rows][32]           term 0 alone where bfloat16 holds the format exactly
//   activations  [block of 16 tokens][step][term][16 pairs][16 tokens][2]
//
// A value is x = h + l, h the nearest bfloat16 and l the nearest one of what is left: 16 bits. The products h h,
// l h (weight l, activation h) and h l are added in this order, step by step, in one float32 sum; l l, below 2^-16
// of the product, is left out. So a token's bits depend neither on the other tokens nor on the rows that share its
// tiles, but they are not those of kernels.h: see docs/adr/0008-matrix-tiles.md.
#pragma once
#include <cstdint>
#include <string>

#include "block_tiles.h"
#include "matrix.h"

namespace headrace {

constexpr int64_t kTile = 16;                 // rows or tokens of a tile
constexpr int64_t kStep = 32;                 // its columns
constexpr int64_t kTileWords = kTile * kStep;  // bfloat16 words of a tile
constexpr int64_t kTileTerms = 2;             // of an activation

// Calls of more rows than this use tiles where there are some. A row's bits are the same in all smaller calls, and
// the same in all larger ones.
constexpr int64_t kTilesBeyond = 64;

// Tokens of an expert from which on it uses them, in such calls. With fewer the weights come from memory faster than
// they are expanded: at 8 tokens 23 GB/s of MXFP4 without tiles and 19 with them, at 16 12 and 20, at 32 6 and 15 (15
// threads of a Sapphire Rapids, 2026-11; Q8_0 meets at 14).
constexpr int64_t kTiledPairs = 12;

inline int64_t tile_steps(int64_t cols) { return (cols + kStep - 1) / kStep; }
inline int64_t tiles_of(int64_t rows) { return (rows + kTile - 1) / kTile; }

// Terms of a weight: MXFP4 and bfloat16 are exact in one.
constexpr int64_t weight_terms(Format f) {
  return f == Format::bf16 || f == Format::mxfp4 || f == Format::mxfp4_gguf ? 1 : 2;
}

// Words of a tile row of weights, and of a block of activations.
inline int64_t weight_tile_words(const Matrix& m) { return tile_steps(m.cols) * weight_terms(m.format) * kTileWords; }
inline int64_t token_block_words(int64_t cols) { return tile_steps(cols) * kTileTerms * kTileWords; }

struct TileProduct {
  const uint16_t* weights;        // as expand writes them
  int64_t terms, rows, steps;
  const uint16_t* const* blocks;  // one for sixteen tokens
  int64_t tokens;
  float* const* out;              // out[token][row]
};

// Products of few tokens, whose weights would take longer to go through the L2 cache as tiles than from memory as
// they are: four tiles of a row tile are expanded in the L1 cache while the four before are multiplied. For formats
// that are exact in one term, and columns in multiples of 32.
//
//   activations  [block of 16 tokens][step][tile][16 pairs][16][2]: h and l of nine and more tokens have a tile each; of
//                up to eight both are in one, h in columns 0 to 7 and l in 8 to 15. Steps are whole fours.
//   MXFP4        columns within 128 stand as shuffles of nibbles leave them (isa/tiles_narrow.h)
//
// A product is h's sum plus l's, each in one float32 sum step by step: a token's bits depend neither on the number of
// tokens nor on the others.
constexpr int64_t kNarrowTokens = 32;
constexpr int64_t kNarrowSteps = 4;

inline bool has_narrow(Format f, int64_t cols) { return (f == Format::mxfp4 || f == Format::bf16) && cols % kStep == 0; }
// Tokens from which on they are used: with fewer, registers are as fast. GB/s of MXFP4 with 4, 6, 8, 12 and 16 tokens of
// an expert without and with them: 70, 55, 44, 30, 24 and 50, 52, 52, 40, 38; of bfloat16 with 2 and 8: 87, 78 and 131, 123
// (15 threads of a Sapphire Rapids, 2026-11; less work for each weight since).
constexpr int64_t narrow_pairs(Format f) { return f == Format::bf16 ? 2 : 6; }
inline int64_t narrow_steps(int64_t cols) { return (tile_steps(cols) + kNarrowSteps - 1) / kNarrowSteps * kNarrowSteps; }
constexpr int64_t narrow_tiles(int64_t tokens) { return tokens <= kTile / 2 ? 1 : 2; }  // of a step, one block

struct NarrowProduct {
  const Matrix* m;
  int64_t row0, rows;
  const uint16_t* const* blocks;  // one for sixteen tokens
  int64_t tokens;                 // up to kNarrowTokens
  float* const* out;              // out[token][row]
  const uint8_t* next;            // what will be read after these rows, as many bytes; or null
};

struct TileKernels {
  const char* name;
  // Columns [32 step0, 32 (step0 + steps)) of up to sixteen rows of activations; `to` is their block's start.
  void (*pack)(const float* const* x, int64_t tokens, int64_t cols, int64_t step0, int64_t steps, uint16_t* to);
  // Rows [row0, row0 + count) of the matrix.
  void (*expand)(const Matrix& m, int64_t row0, int64_t count, uint16_t* to);
  void (*multiply)(const TileProduct& p);
  // Columns [32 block, 32 block + 32) of up to sixteen rows of activations for weights of the format; `to` is the
  // start of their memory, which holds the whole steps.
  void (*pack_narrow)(const float* const* x, int64_t tokens, int64_t cols, Format weights, int64_t block, uint16_t* to);
  void (*multiply_narrow)(const NarrowProduct& p);
  BlockTileKernels blocks;
};

// AMX, or null and why not. The same tiles on vdpbf16ps, for tests: no faster than float32.
const TileKernels* amx_tiles(std::string& why_not);
const TileKernels& bf16_tiles();

}  // namespace headrace
