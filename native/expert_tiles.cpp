#include "expert_tiles.h"

namespace headrace {

ExpertTiles::ExpertTiles(int64_t hidden, int64_t width, int threads)
    : hidden_(hidden), width_(width),
      scratch_words_(kTiledRows * tile_steps(std::max(hidden, width)) * kStep * kTileTerms),
      scratch_(2 * threads * scratch_words_) {
  inputs_.words_each = token_block_words(narrow_steps(hidden) * kStep);
  between_.words_each = token_block_words(narrow_steps(width) * kStep);
}

void ExpertTiles::begin(const TileKernels& tiles, Format first, Format second) {
  tiles_ = &tiles;
  first_ = first;
  second_ = second;
  ranges_.clear();
  inputs_.count = between_.count = 0;
}

TiledItem ExpertTiles::add(int64_t first_pair, int64_t pairs) {
  if (ranges_.empty() || ranges_.back().first != first_pair || ranges_.back().pairs != pairs) {
    ranges_.push_back({first_pair, pairs, inputs_.count});
    inputs_.count += tiles_of(pairs);
  }
  const TiledItem item{true, ranges_.back().block, between_.count};
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

void ExpertTiles::pack_inputs(const float* x, const int32_t* pair_token, int64_t at, int64_t end) {
  const int64_t steps = tile_steps(hidden_);
  for (const Range& r : ranges_) {
    for (; at < end && at < (r.block + tiles_of(r.pairs)) * steps;) {
      const int64_t b = at / steps, step = at % steps, pair = (b - r.block) * kTile;
      const int64_t n = std::min(kTile, r.pairs - pair), run = std::min(steps - step, end - at);
      const float* rows[kTile];
      for (int64_t j = 0; j < n; ++j) rows[j] = x + pair_token[r.first + pair + j] * hidden_;
      if (!narrow(first_, r.pairs)) tiles_->pack(rows, n, hidden_, step, run, inputs_.block(b));
      else for (int64_t s = step; s < step + run; ++s) tiles_->pack_narrow(rows, n, hidden_, first_, s, inputs_.block(b));
      at += run;
    }
  }
}

void ExpertTiles::pack_between(const TiledItem& item, int64_t pairs, int64_t step, const float* rows) {
  for (int64_t j = 0; j < pairs; j += kTile) {
    const int64_t n = std::min(kTile, pairs - j);
    const float* from[kTile];
    for (int64_t i = 0; i < n; ++i) from[i] = rows + (j + i) * width_;
    uint16_t* to = between_.block(item.between + j / kTile);
    if (narrow(second_, pairs)) tiles_->pack_narrow(from, n, width_, second_, step, to);
    else tiles_->pack(from, n, width_, step, 1, to);
  }
}

void ExpertTiles::expand(const Matrix& m, int64_t row0, int64_t rows, int worker, int place) {
  tiles_->expand(m, row0, rows, scratch(worker, place));
}

void ExpertTiles::multiply_narrow(const Matrix& m, int64_t row0, int64_t rows, const TiledItem& item, bool gate_up,
                                  int64_t pairs, float* const* out, const uint8_t* next) const {
  tiles_->multiply_narrow({&m, row0, rows, blocks_of(item, gate_up, 0), pairs, out, next});
}

void ExpertTiles::multiply(const Matrix& m, int64_t rows, const TiledItem& item, bool gate_up, int64_t pair0, int64_t pairs,
                           float* const* out, int worker, int place) const {
  tiles_->multiply({scratch(worker, place), weight_terms(m.format), rows, tile_steps(m.cols), blocks_of(item, gate_up, pair0),
                    pairs, out});
}

}  // namespace headrace
