#include "tiled.h"

#include "linear.h"

namespace headrace {
namespace {

constexpr int64_t kMostRows = 64;  // four tiles: what the smaller product of tiles_amx.cpp takes at once
constexpr int64_t kTileNbytes = 1 << 20;
// Steps of a block that one item packs.
constexpr int64_t kPackSteps = 16;
// Tokens of a work item, at least: expanding a weight costs about as much as multiplying it with twenty.
constexpr int64_t kLeastTokens = 128;
// Tokens whose gate and up stay in scratch memory; blocks of 32.
constexpr int64_t kGatedTokens = 96;

std::vector<const float*> row_pointers(const float* x, int64_t tokens, int64_t cols) {
  std::vector<const float*> rows(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) rows[static_cast<size_t>(t)] = x + t * cols;
  return rows;
}

// Tokens of one item: all, unless there are too few tiles of rows for the threads.
int64_t tokens_each(int64_t row_tiles, int64_t tokens, int threads) {
  int64_t parts = (3 * threads + row_tiles - 1) / row_tiles;
  parts = std::max<int64_t>(1, std::min(parts, tokens / kLeastTokens));
  const int64_t each = (tokens + parts - 1) / parts;
  return (each + 2 * kTile - 1) / (2 * kTile) * (2 * kTile);
}

void add_rows(float* out, const float* more, int64_t n) {
  if (more != nullptr) for (int64_t i = 0; i < n; ++i) out[i] += more[i];
}

void linear_item(const TileKernels& t, const Product& p, const PackedRows& packed, int64_t row0, int64_t rows, int64_t t0,
                 int64_t t1, int worker) {
  const Matrix& m = *p.weight;
  float* scratch = Pool::instance().scratch(worker, static_cast<size_t>(tiled_floats(rows, m)));
  uint16_t* tiles = reinterpret_cast<uint16_t*>(scratch);
  t.expand(m, row0, rows, tiles);
  float* out[kGatedTokens];
  for (int64_t at = t0; at < t1; at += kGatedTokens) {
    const int64_t n = std::min(kGatedTokens, t1 - at);
    for (int64_t i = 0; i < n; ++i) out[i] = p.out + (at + i) * m.rows + row0;
    t.multiply({tiles, weight_terms(m.format), rows, tile_steps(m.cols), packed.blocks() + at / kTile, n, out});
    for (int64_t i = 0; i < n; ++i) {
      add_rows(out[i], p.bias == nullptr ? nullptr : p.bias + row0, rows);
      add_rows(out[i], p.residual == nullptr ? nullptr : p.residual + (at + i) * m.rows + row0, rows);
    }
  }
}

}  // namespace

PackedRows::PackedRows(const TileKernels& t, const float* const* x, int64_t tokens, int64_t cols) {
  const int64_t start[2] = {0, tokens};
  *this = PackedRows(t, x, start, 1, cols);
}

PackedRows::PackedRows(const TileKernels& t, const float* const* x, const int64_t* start, int64_t groups, int64_t cols) {
  std::vector<std::pair<int64_t, int64_t>> rows;  // of each block: first and count
  for (int64_t g = 0; g < groups; ++g) {
    first_block_.push_back(static_cast<int64_t>(rows.size()));
    for (int64_t at = start[g]; at < start[g + 1]; at += kTile) rows.emplace_back(at, std::min(kTile, start[g + 1] - at));
  }
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t words = token_block_words(cols), steps = tile_steps(cols), parts = (steps + kPackSteps - 1) / kPackSteps;
  memory_ = std::make_unique<TileMemory>(count * words);
  for (int64_t b = 0; b < count; ++b) blocks_.push_back(memory_->words() + b * words);
  Pool::instance().run(count * parts, count * steps * kTileWords > kSerialWork, [&](int64_t item, int) {
    const int64_t b = item / parts, step = item % parts * kPackSteps;
    const auto [first, n] = rows[static_cast<size_t>(b)];
    t.pack(x + first, n, cols, step, std::min(kPackSteps, steps - step), memory_->words() + b * words);
  });
}

int64_t tiled_rows(const Matrix& m) {
  const int64_t fit = kTileNbytes / (2 * weight_tile_words(m));
  return std::max<int64_t>(1, std::min(fit, kMostRows / kTile)) * kTile;
}

void tiled_linear(const TileKernels& t, const Product* products, int count, const float* x, int64_t tokens) {
  const int64_t cols = products[0].weight->cols;
  const PackedRows packed(t, row_pointers(x, tokens, cols).data(), tokens, cols);
  int64_t row_tiles = 0;
  const auto tiles_in = [&](const Product& p) { return (p.weight->rows + tiled_rows(*p.weight) - 1) / tiled_rows(*p.weight); };
  for (int i = 0; i < count; ++i) row_tiles += tiles_in(products[i]);
  Pool& pool = Pool::instance();
  const int64_t each = tokens_each(row_tiles, tokens, pool.threads()), parts = (tokens + each - 1) / each;
  pool.run(row_tiles * parts, true, [&](int64_t item, int worker) {
    const int64_t t0 = item / row_tiles * each;
    int64_t tile = item % row_tiles;
    for (int i = 0; i < count; tile -= tiles_in(products[i]), ++i) {
      const Product& p = products[i];
      if (tile >= tiles_in(p)) continue;
      const int64_t rows = tiled_rows(*p.weight), row0 = tile * rows;
      linear_item(t, p, packed, row0, std::min(rows, p.weight->rows - row0), t0, std::min(tokens, t0 + each), worker);
      return;
    }
  });
}

void tiled_gated(const TileKernels& t, const Matrix& gate, const Matrix& up, const float* x, int64_t tokens, Gate act,
                 float* out) {
  const Kernels& k = kernels();
  const PackedRows packed(t, row_pointers(x, tokens, gate.cols).data(), tokens, gate.cols);
  const int64_t rows_each = std::min(tiled_rows(gate), tiled_rows(up)), row_tiles = (gate.rows + rows_each - 1) / rows_each;
  Pool& pool = Pool::instance();
  const int64_t each = tokens_each(row_tiles, tokens, pool.threads()), parts = (tokens + each - 1) / each;
  pool.run(row_tiles * parts, true, [&](int64_t item, int worker) {
    const int64_t row0 = item % row_tiles * rows_each, rows = std::min(rows_each, gate.rows - row0);
    const int64_t t0 = item / row_tiles * each, t1 = std::min(tokens, t0 + each), sums = kGatedTokens * rows_each;
    const int64_t gate_floats = tiled_floats(rows, gate);
    float* g = pool.scratch(worker, static_cast<size_t>(2 * sums + gate_floats + tiled_floats(rows, up)));
    float* u = g + sums;
    uint16_t *gate_tiles = reinterpret_cast<uint16_t*>(u + sums), *up_tiles = gate_tiles + 2 * gate_floats;
    t.expand(gate, row0, rows, gate_tiles);
    t.expand(up, row0, rows, up_tiles);
    float *gate_out[kGatedTokens], *up_out[kGatedTokens];
    for (int64_t i = 0; i < kGatedTokens; ++i) {
      gate_out[i] = g + i * rows_each;
      up_out[i] = u + i * rows_each;
    }
    for (int64_t at = t0; at < t1; at += kGatedTokens) {
      const int64_t n = std::min(kGatedTokens, t1 - at), steps = tile_steps(gate.cols);
      const uint16_t* const* blocks = packed.blocks() + at / kTile;
      t.multiply({gate_tiles, weight_terms(gate.format), rows, steps, blocks, n, gate_out});
      t.multiply({up_tiles, weight_terms(up.format), rows, steps, blocks, n, up_out});
      for (int64_t i = 0; i < n; ++i)
        k.activate(gate_out[i], up_out[i], rows, act.kind, act.alpha, act.limit, out + (at + i) * gate.rows + row0);
    }
  });
}

}  // namespace headrace
