// Products of rows of integer codes with activations of two int8 terms: the numerics of the CPU's experts in
// MXFP4 and Q4_K.
//
// An activation row is cut into blocks of 32; each block becomes x = s (256 h + l) with s = max|x| / 32512,
// so 15 bits and a sign, finer than bfloat16. The integer products with unsigned codes are exact (for MXFP4
// twice E2M1 plus an offset of 12, as vpdpbusd wants it). MXFP4: a block's whole sum, below 2^24, is scaled and added
// by one fused multiply-add to chain b mod 4, blocks in ascending order, and a row is (0 + 2) + (1 + 3). Q4_K: each of
// sixteen lanes sums four weights of one block; blocks are added in ascending order by one fused multiply-add per
// lane, and lanes in the tree of kernels.h. So every instruction set, number of rows and number of tokens gives the
// same bits, and so does a matrix unit for MXFP4 (block_tiles.h). MXFP4's scale byte 0 counts as zero (it is 2^-127),
// 255 (NaN) as infinity.
#pragma once
#include <cstdint>

#include "matrix.h"

namespace headrace {

// 128 activations for MXFP4: byte 16 b + j of half 0 is activation 2j of block b and goes with the low nibble
// of byte j of its codes, of half 1 activation 2j + 1 and the high one. Blocks past the row's end are zero.
struct alignas(64) PairTerms {
  int8_t high[2][64];
  int8_t low[2][64];
  int32_t offset[16];  // -12 * (256 h + l), summed over the lane's block
  float scale[16];     // s / 2 of the lane's block
};

// 128 activations for Q4_K, whose 64 bytes of codes hold blocks 0 and 2 in low nibbles, 1 and 3 in high ones.
struct alignas(64) SplitTerms {
  int8_t high[2][64];
  int8_t low[2][64];
  float scale[2][16];  // s of the lane's block
  float sum[16];       // in every second group: the sums of the superblock's eight blocks, then zeros
};

constexpr int64_t kTermBlock = 32;
constexpr int64_t kTermBlocks = 4;  // of a group

inline bool has_terms(Format f) { return f == Format::mxfp4 || f == Format::q4_k; }

// Bytes of the terms of one row of activations, a multiple of 64.
inline int64_t term_nbytes(Format f, int64_t cols) {
  const int64_t groups = (cols + kTermBlock * kTermBlocks - 1) / (kTermBlock * kTermBlocks);
  return groups * static_cast<int64_t>(f == Format::mxfp4 ? sizeof(PairTerms) : sizeof(SplitTerms));
}

// What a thread reads after the rows at hand, so that its first bytes travel in time.
struct Ahead {
  int64_t rows;         // rows from row0 on that will be read in sequence
  const uint8_t* next;  // what follows them, or null
};

// How the product reads memory. On 15 threads of a Sapphire Rapids (2026-11, GB/s of a plain read's 86 to 94):
// 90 so, 74 without the second prefetch, 86 with 2 rows, 77 with 8; the distances matter little (85 to 91).
struct Reading {
  int rows = 4;                // taken together where there is one token: 2 (Q4_K), 4 or 8
  int64_t near_nbytes = 1024;  // how far ahead of its use a line is asked for into the L1 cache
  int64_t far_nbytes = 8192;   // the same into the L2 cache, which can wait for more lines at once; 0: not
};

struct ExpertKernels {
  const char* name;
  // Block `block` of a row of terms from its 32 activations.
  void (*quantise)(const float* x, Format format, uint8_t* row, int64_t block);
  // out[t][i] = row (row0 + i) . x[t] for i < count; x: rows of terms of the matrix's format
  void (*dot)(const Matrix& m, int64_t row0, int64_t count, const uint8_t* const* x, int64_t tokens,
              float* const* out, const Ahead& ahead, const Reading& reading);
};

const ExpertKernels& scalar_expert_kernels();
#if defined(HEADRACE_X86)
const ExpertKernels& avx2_expert_kernels();
const ExpertKernels& vnni_expert_kernels();
#endif

}  // namespace headrace
