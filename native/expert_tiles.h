// The tiles of one request to the CPU's experts: activations in blocks of sixteen pairs, and scratch for weights.
#pragma once
#include <memory>
#include <vector>

#include "tiled.h"

namespace headrace {

// How the products of an item's halves are computed: as whole rows of tiles (tiles.h), narrow ones, or exact blocks
// (block_tiles.h).
enum class TileWay { none, whole, narrow, blocks };

// Where the activations of an item lie: blocks of its inputs and of what lies between its two halves.
struct TiledItem {
  TileWay way = TileWay::none;
  int64_t input = 0, between = 0;
  bool used() const { return way != TileWay::none; }
};

// Which items use tiles. Requests of fewer tokens are decoding steps, whose bits do not depend on the batch: items of so
// many pairs use exact blocks there. In larger ones narrow products or whole tiles.
struct TileUse {
  int64_t tokens = 17;
  int64_t pairs = kTiledPairs;
  int64_t narrow_pairs = 0;  // 0: as many as the formats need
  int64_t block_pairs = kBlockPairs;
};

constexpr int64_t kTiledRows = 64;  // rows of a product, at most

class ExpertTiles {
 public:
  ExpertTiles(int64_t hidden, int64_t width, int threads);

  // The request's formats of gate and up, and of down.
  void begin(const TileKernels& tiles, Format first, Format second, const TileUse& use);
  // Items in order; those with the same pairs share their inputs.
  TiledItem add(TileWay way, int64_t first_pair, int64_t pairs);
  void reserve();  // after the last item

  // Units [at, end) of the inputs of all items, of which there are `input_units`.
  void pack_inputs(const float* x, const int32_t* pair_token, int64_t at, int64_t end);
  int64_t input_units() const { return inputs_.count * tile_steps(hidden_); }
  // Columns [32 step, 32 step + 32) of an item's rows, `width` floats apart.
  void pack_between(const TiledItem& item, int64_t pairs, int64_t step, const float* rows);

  // How products of so many pairs of a request of so many tokens are computed, where tiles serve both halves.
  TileWay way(int64_t tokens, int64_t pairs) const;
  // out[j][row] of pairs [pair0, pair0 + pairs) of an item in narrow products or blocks; `next` as in NarrowProduct.
  void multiply_at_once(const Matrix& m, int64_t row0, int64_t rows, const TiledItem& item, bool gate_up, int64_t pair0,
                        int64_t pairs, float* const* out, const uint8_t* next) const;

  // What products with rows [row0, row0 + rows) read, in the worker's scratch memory; `place` 0 or 1.
  void expand(const Matrix& m, int64_t row0, int64_t rows, int worker, int place = 0);
  // out[j][row] for pairs [pair0, pair0 + pairs), pair0 a multiple of sixteen.
  void multiply(const Matrix& m, int64_t rows, const TiledItem& item, bool gate_up, int64_t pair0, int64_t pairs,
                float* const* out, int worker, int place = 0) const;

 private:
  struct Range {
    TileWay way;
    int64_t first, pairs, block;
  };
  struct Blocks {
    std::unique_ptr<TileMemory> memory;
    std::vector<const uint16_t*> at;
    int64_t count = 0, words_each = 0;
    uint16_t* block(int64_t i) const { return memory->words() + i * words_each; }
    void reserve();
  };
  void pack(TileWay way, Format f, const float* const* x, int64_t tokens, int64_t cols, int64_t step, int64_t steps, uint16_t* to) const;
  const uint16_t* const* blocks_of(const TiledItem& item, bool gate_up, int64_t pair0) const {
    return &(gate_up ? inputs_ : between_).at[static_cast<size_t>((gate_up ? item.input : item.between) + pair0 / kTile)];
  }
  uint16_t* scratch(int worker, int place) const { return scratch_.words() + (2 * worker + place) * scratch_words_; }

  const int64_t hidden_, width_;
  const int64_t scratch_words_;
  const TileMemory scratch_;
  const TileKernels* tiles_ = nullptr;
  Format first_ = Format::f32, second_ = Format::f32;
  TileUse use_;
  std::vector<Range> ranges_;
  Blocks inputs_, between_;
};

}  // namespace headrace
