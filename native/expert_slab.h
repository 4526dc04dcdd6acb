// A slice of an expert where it lies in memory: the C++ side of headrace/experts/slab.py, which
// describes the layout. Row 2i of `gate_up` is gate i, row 2i + 1 up i.
#pragma once
#include "matrix.h"

namespace headrace {

// One part of a slice: bytes from its start, and between two of its rows. Absent: offset -1.
struct SlabPart {
  int64_t offset = -1;
  int64_t row_nbytes = 0;
};

struct SlabLayout {
  Format format = Format::f32;       // of gate and up
  Format down_format = Format::f32;
  int64_t hidden = 0, width = 0, num_slices = 0, slice_nbytes = 0;
  bool block_factors = false;        // fp8: one factor for each 128 x 128
  SlabPart gate_up, gate_up_scales, gate_up_factors, down, down_scales, down_factors, gate_up_bias, down_bias;
};

struct SliceView {
  Matrix gate_up;             // [2 * width, hidden]; without factors
  Matrix gate, up;            // every second row of it, with their factors
  Matrix down;                // [hidden, width]
  const float* gate_up_bias;  // [2 * width] in the order of the rows, or null
  const float* down_bias;     // [hidden], or null
};

inline const float* slab_floats(const uint8_t* slice, const SlabPart& p) {
  return p.offset < 0 ? nullptr : reinterpret_cast<const float*>(slice + p.offset);
}

// How far ahead, at least, the float kernels ask for rows in memory (Reading.far_nbytes has the measurement).
constexpr int64_t kFarNbytes = 8192;

// Rows place, place + step, ... of a part.
inline Matrix slab_matrix(Format format, const uint8_t* slice, int64_t rows, int64_t cols, const SlabPart& data,
                          const SlabPart& scales, int place, int step) {
  Matrix m;
  m.format = format;
  m.rows = rows;
  m.cols = cols;
  m.data = slice + data.offset + place * data.row_nbytes;
  m.row_nbytes = step * data.row_nbytes;
  if (scales.offset >= 0) {
    m.scales = slice + scales.offset + place * scales.row_nbytes;
    m.scale_row_nbytes = step * scales.row_nbytes;
  }
  // The kernels take four rows together, so whole fours of rows ahead.
  m.far_nbytes = (kFarNbytes + 4 * m.row_nbytes - 1) / (4 * m.row_nbytes) * (4 * m.row_nbytes);
  return m;
}

inline void add_factors(Matrix& m, const SlabLayout& l, const uint8_t* slice, const SlabPart& factors, int place, int step) {
  if (factors.offset < 0) return;
  const float* f = slab_floats(slice, factors);
  if (l.block_factors && m.format == Format::fp8_e4m3) {
    const int64_t row = factors.row_nbytes / 4;
    m.block_scale = f + place * row;
    m.block_scale_row = step * row;
  } else {
    m.global_scale = f[place];
  }
}

inline SliceView slice_view(const SlabLayout& l, const uint8_t* slice) {
  SliceView v;
  v.gate_up = slab_matrix(l.format, slice, 2 * l.width, l.hidden, l.gate_up, l.gate_up_scales, 0, 1);
  v.gate = slab_matrix(l.format, slice, l.width, l.hidden, l.gate_up, l.gate_up_scales, 0, 2);
  v.up = slab_matrix(l.format, slice, l.width, l.hidden, l.gate_up, l.gate_up_scales, 1, 2);
  v.down = slab_matrix(l.down_format, slice, l.hidden, l.width, l.down, l.down_scales, 0, 1);
  add_factors(v.gate, l, slice, l.gate_up_factors, 0, 2);
  add_factors(v.up, l, slice, l.gate_up_factors, 1, 2);
  add_factors(v.down, l, slice, l.down_factors, 0, 1);
  v.gate_up_bias = slab_floats(slice, l.gate_up_bias);
  v.down_bias = slab_floats(slice, l.down_bias);
  return v;
}

}  // namespace headrace
