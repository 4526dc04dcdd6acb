#include "expert_tiles.h"

namespace headrace {

ExpertTiles::ExpertTiles(int64_t hidden, int64_t width, int threads)
    : hidden_(hidden), width_(width),
      scratch_words_(kTiledRows * tile_steps(std::max(hidden, width)) * kStep * kTileTerms),
      scratch_(2 * threads * scratch_words_) {
  static_assert(block_nbytes(kBlockTokens) <= 2 * kTileTerms * kTileWords);
  inputs_.words_each = token_block_words(narrow_steps(hidden) * kStep);
  between_.words_each = token_block_words(narrow_steps(width) * kStep);
}

void ExpertTiles::begin(const TileKernels& tiles, Format first, Format second, const TileUse& use) {
  tiles_ = &tiles;
  first_ = first;
  second_ = second;
  use_ = use;
  ranges_.clear();
  inputs_.count = between_.count = 0;
}

TileWay ExpertTiles::way(int64_t tokens, int64_t pairs) const {
  const auto both = [&](bool (*has)(Format, int64_t)) { return has(first_, hidden_) && has(second_, width_); };
  if (tokens < use_.tokens) return pairs >= use_.block_pairs && both(has_block_tiles) ? TileWay::blocks : TileWay::none;
  const int64_t least = use_.narrow_pairs != 0 ? use_.narrow_pairs : std::max(narrow_pairs(first_), narrow_pairs(second_));
  if (pairs >= least && pairs <= kNarrowTokens && both(has_narrow)) return TileWay::narrow;
  return pairs >= use_.pairs ? TileWay::whole : TileWay::none;
}

TiledItem ExpertTiles::add(TileWay way, int64_t first_pair, int64_t pairs) {
  if (ranges_.empty() || ranges_.back().first != first_pair || ranges_.back().pairs != pairs) {
    ranges_.push_back({way, first_pair, pairs, inputs_.count});
    inputs_.count += tiles_of(pairs);
  }
  const TiledItem item{way, ranges_.back().block, between_.count};
  between_.count += tiles_of(pairs);
  return item;
}

// Grows only: the next request is about as large.
void ExpertTiles::Blocks::reserve() {
  if (count <= static_cast<int64_t>(at.size())) return;
  memory = std::make_unique<TileMemory>(count * words_each);
  at.clear();
  for (int64_t i = 0; i < count; ++i) at.push_back(block(i));
}

void ExpertTiles::reserve() {
  inputs_.reserve();
  between_.reserve();
}

// Steps [step, step + steps) of up to sixteen rows into their block.
void ExpertTiles::pack(TileWay way, Format f, const float* const* x, int64_t tokens, int64_t cols, int64_t step, int64_t steps,
                       uint16_t* to) const {
  if (way == TileWay::whole) return tiles_->pack(x, tokens, cols, step, steps, to);
  for (int64_t s = step; s < step + steps; ++s) {
    if (way == TileWay::narrow) tiles_->pack_narrow(x, tokens, cols, f, s, to);
    else tiles_->blocks.pack(x, tokens, s, reinterpret_cast<uint8_t*>(to));
  }
}

void ExpertTiles::pack_inputs(const float* x, const int32_t* pair_token, int64_t at, int64_t end) {
  const int64_t steps = tile_steps(hidden_);
  for (const Range& r : ranges_) {
    for (; at < end && at < (r.block + tiles_of(r.pairs)) * steps;) {
      const int64_t b = at / steps, step = at % steps, pair = (b - r.block) * kTile;
      const int64_t n = std::min(kTile, r.pairs - pair), run = std::min(steps - step, end - at);
      const float* rows[kTile];
      for (int64_t j = 0; j < n; ++j) rows[j] = x + pair_token[r.first + pair + j] * hidden_;
      pack(r.way, first_, rows, n, hidden_, step, run, inputs_.block(b));
      at += run;
    }
  }
}

void ExpertTiles::pack_between(const TiledItem& item, int64_t pairs, int64_t step, const float* rows) {
  for (int64_t j = 0; j < pairs; j += kTile) {
    const int64_t n = std::min(kTile, pairs - j);
    const float* from[kTile];
    for (int64_t i = 0; i < n; ++i) from[i] = rows + (j + i) * width_;
    pack(item.way, second_, from, n, width_, step, 1, between_.block(item.between + j / kTile));
  }
}

void ExpertTiles::multiply_at_once(const Matrix& m, int64_t row0, int64_t rows, const TiledItem& item, bool gate_up,
                                   int64_t pair0, int64_t pairs, float* const* out, const uint8_t* next) const {
  const uint16_t* const* blocks = blocks_of(item, gate_up, pair0);
  if (item.way == TileWay::narrow) return tiles_->multiply_narrow({&m, row0, rows, blocks, pairs, out, next});
  for (int64_t j = 0; j < pairs; j += kTile)  // after the first tokens the rows lie in the L2 cache
    tiles_->blocks.multiply({&m, row0, rows, reinterpret_cast<const uint8_t*>(blocks[j / kTile]), std::min(kTile, pairs - j), out + j,
                             j == 0 ? next : nullptr});
}

void ExpertTiles::expand(const Matrix& m, int64_t row0, int64_t rows, int worker, int place) {
  tiles_->expand(m, row0, rows, scratch(worker, place));
}

void ExpertTiles::multiply(const Matrix& m, int64_t rows, const TiledItem& item, bool gate_up, int64_t pair0, int64_t pairs,
                           float* const* out, int worker, int place) const {
  tiles_->multiply({scratch(worker, place), weight_terms(m.format), rows, tile_steps(m.cols), blocks_of(item, gate_up, pair0),
                    pairs, out});
}

}  // namespace headrace
