// A weight matrix as it is stored: pointers into the checkpoint's bytes, never a copy.
#pragma once
#include <cstdint>

namespace headrace {

enum class Format : int {
  f32, f16, bf16, fp8_e4m3, mxfp4, mxfp4_gguf, nvfp4,
  q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs,
  // as slabs of experts hold them: the scales of a row apart from its codes
  q4_0_apart, q5_0_apart, q8_0_apart, q3_k_apart, q6_k_apart, iq4_nl_apart,
  count
};

// Rows are `row_nbytes` apart (views of every second row are matrices too); the bytes of one row
// are contiguous. fp8_e4m3: one scale (`block_scale_cols` 0) or one per 128 x 128 block.
struct Matrix {
  Format format = Format::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* data = nullptr;
  int64_t row_nbytes = 0;
  const uint8_t* scales = nullptr;  // mxfp4: E8M0 per 32; nvfp4: E4M3 per 16; *_apart: blocks.h
  int64_t scale_row_nbytes = 0;
  float global_scale = 1.0f;            // nvfp4, and fp8 with one scale
  const float* block_scale = nullptr;   // fp8: [ceil(rows/128), ceil(cols/128)]
  int64_t block_scale_row = 0;          // floats between two of its rows
  int64_t far_nbytes = 0;               // also prefetch so far ahead, into the L2 cache; 0: not
};

// What the expansion of one row needs. `block_scale_step` is 0 where one scale serves the row.
struct Row {
  const uint8_t* data;
  const uint8_t* scales;
  const float* block_scale;
  int64_t block_scale_step;
  float global_scale;
};

inline Row row_of(const Matrix& m, int64_t r) {
  Row row{m.data + r * m.row_nbytes, m.scales + r * m.scale_row_nbytes, &m.global_scale, 0,
          m.global_scale};
  if (m.block_scale != nullptr) {
    row.block_scale = m.block_scale + (r / 128) * m.block_scale_row;
    row.block_scale_step = 1;
  }
  return row;
}

}  // namespace headrace
