#include "tiled.h"

#include "linear.h"

namespace headrace {
namespace {

constexpr int64_t kTileNbytes = 1 << 20;
// Steps of a block that one item packs.
constexpr int64_t kPackSteps = 16;
// Expanding a weight takes as long as its products with so many tokens (45 to 75 G weights a second against 190 to 285
// G products, 15 threads of a Sapphire Rapids, 2026-11).
constexpr int64_t kExpandTokens = 40;
// Activations that do not stay in the L2 cache are read again for every tile of rows: 64 rows halve the rate, 128 not.
constexpr int64_t kResidentNbytes = 1 << 20;
constexpr int64_t kMostRows = 128;
// Packed activations of a pass over all rows.
constexpr int64_t kPassNbytes = 16 << 20;
// Tokens whose gate and up stay in scratch memory; blocks of 32.
constexpr int64_t kGatedTokens = 96;

std::vector<const float*> row_pointers(const float* x, int64_t tokens, int64_t cols) {
  std::vector<const float*> rows(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) rows[static_cast<size_t>(t)] = x + t * cols;
  return rows;
}

// How a product is cut: tiles of rows, and parts of the tokens.
struct Cut {
  int64_t rows, tokens;
};

// What takes least: the threads' rounds times the cost of an item. `tiles_with(rows)`: how many tiles there are.
template <class F> Cut best_cut(int64_t most_rows, int64_t tokens, int64_t cols, int threads, const F& tiles_with) {
  Cut best{kTile, tokens};
  int64_t least = INT64_MAX;
  for (int64_t rows = most_rows; rows >= std::min<int64_t>(32, most_rows); rows /= 2) {
    for (int64_t parts = 1; parts <= 16; ++parts) {
      const int64_t each = (tokens / parts + 2 * kTile - 1) / (2 * kTile) * (2 * kTile);
      if (each == 0) break;
      const int64_t items = tiles_with(rows) * ((tokens + each - 1) / each), rounds = (items + threads - 1) / threads;
      const bool streams = each * cols * 4 > kResidentNbytes && rows < kMostRows;
      const int64_t cost = rounds * rows * (kExpandTokens + (streams ? 2 : 1) * std::min(each, tokens));
      if (cost >= least) continue;
      least = cost;
      best = {rows, each};
    }
  }
  return best;
}

int64_t pass_tokens(int64_t cols) {
  return std::max<int64_t>(1, kPassNbytes / (2 * token_block_words(cols)) / 2) * 2 * kTile;
}

void add_rows(float* out, const float* more, int64_t n) {
  if (more != nullptr) for (int64_t i = 0; i < n; ++i) out[i] += more[i];
}

// Tokens [t0, t1) of a pass that begins at `first`.
void linear_item(const TileKernels& t, const Product& p, const PackedRows& packed, int64_t row0, int64_t rows,
                 int64_t first, int64_t t0, int64_t t1, int worker) {
  const Matrix& m = *p.weight;
  float* scratch = Pool::instance().scratch(worker, static_cast<size_t>(tiled_floats(rows, m)));
  uint16_t* tiles = reinterpret_cast<uint16_t*>(scratch);
  t.expand(m, row0, rows, tiles);
  float* out[kGatedTokens];
  for (int64_t at = t0; at < t1; at += kGatedTokens) {
    const int64_t n = std::min(kGatedTokens, t1 - at);
    for (int64_t i = 0; i < n; ++i) out[i] = p.out + (first + at + i) * m.rows + row0;
    t.multiply({tiles, weight_terms(m.format), rows, tile_steps(m.cols), packed.blocks() + at / kTile, n, out});
    for (int64_t i = 0; i < n; ++i) {
      add_rows(out[i], p.bias == nullptr ? nullptr : p.bias + row0, rows);
      add_rows(out[i], p.residual == nullptr ? nullptr : p.residual + (first + at + i) * m.rows + row0, rows);
    }
  }
}

}  // namespace

PackedRows::PackedRows(const TileKernels& t, const float* const* x, int64_t tokens, int64_t cols) {
  const int64_t start[2] = {0, tokens};
  *this = PackedRows(t, x, start, 1, cols);
}

PackedRows::PackedRows(const TileKernels& t, const float* const* x, const int64_t* start, int64_t groups, int64_t cols,
                       Format weights) {
  thread_local std::unique_ptr<TileMemory> memory;
  struct Rows {
    int64_t first, count;
    bool narrow;
  };
  std::vector<Rows> rows;  // of each block
  for (int64_t g = 0; g < groups; ++g) {
    first_block_.push_back(static_cast<int64_t>(rows.size()));
    const bool narrow = takes_narrow(weights, cols, start[g + 1] - start[g]);
    for (int64_t at = start[g]; at < start[g + 1]; at += kTile) rows.push_back({at, std::min(kTile, start[g + 1] - at), narrow});
  }
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t words = token_block_words(narrow_steps(cols) * kStep), steps = tile_steps(cols), parts = (steps + kPackSteps - 1) / kPackSteps;
  if (memory == nullptr || memory->size() < count * words) {
    memory.reset();
    memory = std::make_unique<TileMemory>(count * words);
  }
  uint16_t* to = memory->words();
  for (int64_t b = 0; b < count; ++b) blocks_.push_back(to + b * words);
  Pool::instance().run(count * parts, count * steps * kTileWords > kSerialWork, [&](int64_t item, int) {
    const int64_t b = item / parts, step = item % parts * kPackSteps, n = std::min(kPackSteps, steps - step);
    const Rows& r = rows[static_cast<size_t>(b)];
    if (!r.narrow) return t.pack(x + r.first, r.count, cols, step, n, to + b * words);
    for (int64_t s = step; s < step + n; ++s) t.pack_narrow(x + r.first, r.count, cols, weights, s, to + b * words);
  });
}

int64_t tiled_rows(const Matrix& m, int64_t most) {
  const int64_t fit = kTileNbytes / (2 * weight_tile_words(m)), tiles = std::max<int64_t>(1, std::min(fit, most / kTile));
  return (tiles < 4 ? tiles : tiles / 4 * 4) * kTile;  // whole products of tiles_amx.cpp
}

void tiled_linear(const TileKernels& t, const Product* products, int count, const float* x, int64_t tokens) {
  const int64_t cols = products[0].weight->cols, pass = pass_tokens(cols);
  const std::vector<const float*> rows_of_x = row_pointers(x, tokens, cols);
  int64_t most = kMostRows;
  for (int i = 0; i < count; ++i) most = std::min(most, tiled_rows(*products[i].weight, kMostRows));
  const auto tiles_in = [&](const Product& p, int64_t rows) { return (p.weight->rows + rows - 1) / rows; };
  const auto tiles_with = [&](int64_t rows) {
    int64_t tiles = 0;
    for (int i = 0; i < count; ++i) tiles += tiles_in(products[i], rows);
    return tiles;
  };
  Pool& pool = Pool::instance();
  for (int64_t first = 0; first < tokens; first += pass) {
    const int64_t end = std::min(tokens, first + pass);
    const PackedRows packed(t, &rows_of_x[static_cast<size_t>(first)], end - first, cols);
    const Cut cut = best_cut(most, end - first, cols, pool.threads(), tiles_with);
    const int64_t row_tiles = tiles_with(cut.rows), parts = (end - first + cut.tokens - 1) / cut.tokens;
    pool.run(row_tiles * parts, true, [&](int64_t item, int worker) {
      const int64_t t0 = item / row_tiles * cut.tokens, t1 = std::min(end - first, t0 + cut.tokens);
      int64_t tile = item % row_tiles;
      for (int i = 0; i < count; tile -= tiles_in(products[i], cut.rows), ++i) {
        const Product& p = products[i];
        if (tile >= tiles_in(p, cut.rows)) continue;
        const int64_t row0 = tile * cut.rows;
        linear_item(t, p, packed, row0, std::min(cut.rows, p.weight->rows - row0), first, t0, t1, worker);
        return;
      }
    });
  }
}

void tiled_gated(const TileKernels& t, const Matrix& gate, const Matrix& up, const float* x, int64_t tokens, Gate act,
                 float* out) {
  const Kernels& k = kernels();
  const int64_t cols = gate.cols, pass = pass_tokens(cols), steps = tile_steps(cols);
  const std::vector<const float*> rows_of_x = row_pointers(x, tokens, cols);
  // Gate and up side by side take the place of twice as many rows.
  const int64_t most = std::min(tiled_rows(gate, kMostRows), tiled_rows(up, kMostRows)) / 2;
  Pool& pool = Pool::instance();
  for (int64_t first = 0; first < tokens; first += pass) {
    const int64_t end = std::min(tokens, first + pass);
    const PackedRows packed(t, &rows_of_x[static_cast<size_t>(first)], end - first, cols);
    const auto tiles_with = [&](int64_t rows) { return (gate.rows + rows - 1) / rows; };
    const Cut cut = best_cut(std::max(kTile, most), end - first, cols, pool.threads(), tiles_with);
    const int64_t row_tiles = tiles_with(cut.rows), parts = (end - first + cut.tokens - 1) / cut.tokens;
    pool.run(row_tiles * parts, true, [&](int64_t item, int worker) {
      const int64_t row0 = item % row_tiles * cut.rows, rows = std::min(cut.rows, gate.rows - row0);
      const int64_t t0 = item / row_tiles * cut.tokens, t1 = std::min(end - first, t0 + cut.tokens);
      const int64_t gate_floats = tiled_floats(rows, gate), sums = kGatedTokens * cut.rows;
      float* g = pool.scratch(worker, static_cast<size_t>(2 * sums + gate_floats + tiled_floats(rows, up)));
      float* u = g + sums;
      uint16_t *gate_tiles = reinterpret_cast<uint16_t*>(u + sums), *up_tiles = gate_tiles + 2 * gate_floats;
      t.expand(gate, row0, rows, gate_tiles);
      t.expand(up, row0, rows, up_tiles);
      float *gate_out[kGatedTokens], *up_out[kGatedTokens];
      for (int64_t i = 0; i < kGatedTokens; ++i) {
        gate_out[i] = g + i * cut.rows;
        up_out[i] = u + i * cut.rows;
      }
      for (int64_t at = t0; at < t1; at += kGatedTokens) {
        const int64_t n = std::min(kGatedTokens, t1 - at);
        const uint16_t* const* blocks = packed.blocks() + at / kTile;
        t.multiply({gate_tiles, weight_terms(gate.format), rows, steps, blocks, n, gate_out});
        t.multiply({up_tiles, weight_terms(up.format), rows, steps, blocks, n, up_out});
        for (int64_t i = 0; i < n; ++i)
          k.activate(gate_out[i], up_out[i], rows, act.kind, act.alpha, act.limit, out + (first + at + i) * gate.rows + row0);
      }
    });
  }
}

}  // namespace headrace
