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
  Format format = Format::f32;
  int64_t hidden = 0, width = 0, num_slices = 0, slice_nbytes = 0;
  SlabPart gate_up, gate_up_scales, down, down_scales, gate_up_bias, down_bias;
};

struct SliceView {
  Matrix gate_up;             // [2 * width, hidden]
  Matrix down;                // [hidden, width]
  const float* gate_up_bias;  // [2 * width] in the order of the rows, or null
  const float* down_bias;     // [hidden], or null
};

inline Matrix slab_matrix(const SlabLayout& l, const uint8_t* slice, int64_t rows, int64_t cols, const SlabPart& data,
                          const SlabPart& scales) {
  Matrix m;
  m.format = l.format;
  m.rows = rows;
  m.cols = cols;
  m.data = slice + data.offset;
  m.row_nbytes = data.row_nbytes;
  if (scales.offset >= 0) {
    m.scales = slice + scales.offset;
    m.scale_row_nbytes = scales.row_nbytes;
  }
  return m;
}

inline SliceView slice_view(const SlabLayout& l, const uint8_t* slice) {
  const auto floats = [&](const SlabPart& p) {
    return p.offset < 0 ? nullptr : reinterpret_cast<const float*>(slice + p.offset);
  };
  return {slab_matrix(l, slice, 2 * l.width, l.hidden, l.gate_up, l.gate_up_scales),
          slab_matrix(l, slice, l.hidden, l.width, l.down, l.down_scales), floats(l.gate_up_bias), floats(l.down_bias)};
}

}  // namespace headrace
