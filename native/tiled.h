// Products of many tokens through tiles (tiles.h): how activations are packed and work is cut.
#pragma once
#include <algorithm>
#include <memory>

#include "dispatch.h"
#include "ops.h"
#include "pool.h"
#include "tiles.h"

namespace headrace {

// The tiles for a call of so many rows, or null: the kernels of kernels.h then.
inline const TileKernels* tiles_for(int64_t tokens) { return tokens > kTilesBeyond ? kernels().tiles : nullptr; }

// Words of uninitialised memory, aligned as tiles need it.
class TileMemory {
 public:
  explicit TileMemory(int64_t words) : size_(words), memory_(new uint16_t[static_cast<size_t>(words + kAlign)]) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    words_ = memory_.get() + ((address + 2 * kAlign - 1) / (2 * kAlign) * (2 * kAlign) - address) / 2;
  }
  uint16_t* words() const { return words_; }
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kAlign = 32;  // words of a cache line
  int64_t size_;
  std::unique_ptr<uint16_t[]> memory_;
  uint16_t* words_;
};

// Rows of activations, packed in blocks of sixteen. The memory is the calling thread's and is used again by its next
// call, since fresh pages cost as much as a product: one object at a time.
class PackedRows {
 public:
  // One block after the other, x[0] to x[tokens - 1].
  PackedRows(const TileKernels& t, const float* const* x, int64_t tokens, int64_t cols);
  // Groups [start[g], start[g + 1]) of x, each in blocks of its own; those that `narrow` says for weights of the format.
  PackedRows(const TileKernels& t, const float* const* x, const int64_t* start, int64_t groups, int64_t cols,
             Format weights = Format::f32);

  const uint16_t* const* blocks(int64_t group = 0) const { return &blocks_[static_cast<size_t>(first_block_[static_cast<size_t>(group)])]; }

 private:
  std::vector<const uint16_t*> blocks_;
  std::vector<int64_t> first_block_;
};

// Whether so many tokens are multiplied in narrow products where tiles are used at all.
inline bool takes_narrow(Format f, int64_t cols, int64_t tokens) {
  return has_narrow(f, cols) && tokens >= narrow_pairs(f) && tokens <= kNarrowTokens;
}

// Rows of a matrix that are expanded at once, at most, a multiple of kTile: their tiles stay in half of a 2 MiB L2
// cache.
int64_t tiled_rows(const Matrix& m, int64_t most = 64);

// Scratch floats of their tiles.
inline int64_t tiled_floats(int64_t rows, const Matrix& m) { return tiles_of(rows) * weight_tile_words(m) / 2; }

void tiled_linear(const TileKernels& t, const Product* products, int count, const float* x, int64_t tokens);
void tiled_gated(const TileKernels& t, const Matrix& gate, const Matrix& up, const float* x, int64_t tokens, Gate act,
                 float* out);

}  // namespace headrace
