#include "linear.h"

#include "tiled.h"

namespace headrace {
namespace {

void finish(float* out, int64_t n, const float* bias, const float* residual) {
  if (bias != nullptr) for (int64_t i = 0; i < n; ++i) out[i] += bias[i];
  if (residual != nullptr) for (int64_t i = 0; i < n; ++i) out[i] += residual[i];
}

// Runs body(product, row0, rows, worker) over the row tiles of a group of matrices, in one wake.
template <class F>
void over_tiles(const Product* products, int count, int64_t tokens, const F& body) {
  Pool& pool = Pool::instance();
  int64_t total_rows = 0, work = 0;
  for (int i = 0; i < count; ++i) {
    total_rows += products[i].weight->rows;
    work += products[i].weight->rows * products[i].weight->cols * tokens;
  }
  const int64_t rows = tile_rows(total_rows, products[0].weight->cols, tokens, pool.threads());
  int64_t items = 0;
  for (int i = 0; i < count; ++i) items += (products[i].weight->rows + rows - 1) / rows;
  pool.run(items, work > kSerialWork, [&](int64_t item, int worker) {
    for (int i = 0; i < count; ++i) {
      const int64_t n = products[i].weight->rows, tiles = (n + rows - 1) / rows;
      if (item < tiles) {
        body(products[i], item * rows, std::min(rows, n - item * rows), worker);
        return;
      }
      item -= tiles;
    }
  });
}

struct Pointers {
  const float* x[kTokenChunk];
  float* out[kTokenChunk];
};

void linear_tile(const Kernels& k, const Product& p, const float* x, int64_t tokens, int64_t row0, int64_t rows, int worker) {
  const Matrix& m = *p.weight;
  float* expanded = tokens == 1 ? nullptr : Pool::instance().scratch(worker, static_cast<size_t>(tile_scratch(rows, m.cols)));
  const bool many = shares_copy(k, m, tokens);
  if (many) k.expand_rows(m, row0, rows, expanded, padded(m.cols));
  Pointers at;
  for (int64_t t0 = 0; t0 < tokens; t0 += kTokenChunk) {
    const int64_t n = std::min(kTokenChunk, tokens - t0);
    for (int64_t t = 0; t < n; ++t) {
      at.x[t] = x + (t0 + t) * m.cols;
      at.out[t] = p.out + (t0 + t) * m.rows + row0;
    }
    if (many) k.gemm(expanded, padded(m.cols), rows, at.x, n, m.cols, at.out);
    else tile_product(k, m, row0, rows, at.x, n, at.out, expanded);
    if (p.bias == nullptr && p.residual == nullptr) continue;
    for (int64_t t = 0; t < n; ++t)
      finish(at.out[t], rows, p.bias == nullptr ? nullptr : p.bias + row0,
             p.residual == nullptr ? nullptr : p.residual + (t0 + t) * m.rows + row0);
  }
}

}  // namespace

void linear(const Product* products, int count, const float* x, int64_t tokens) {
  if (const TileKernels* tiles = tiles_for(tokens)) {
    tiled_linear(*tiles, products, count, x, tokens);
    return;
  }
  const Kernels& k = kernels();
  over_tiles(products, count, tokens, [&](const Product& p, int64_t row0, int64_t rows, int worker) {
    linear_tile(k, p, x, tokens, row0, rows, worker);
  });
}

void gated_linear(const Matrix& gate, const Matrix& up, const float* x, int64_t tokens, Gate act, float* out) {
  if (const TileKernels* tiles = tiles_for(tokens)) {
    tiled_gated(*tiles, gate, up, x, tokens, act, out);
    return;
  }
  const Kernels& k = kernels();
  const Product whole{&gate, nullptr, nullptr, out};
  over_tiles(&whole, 1, 2 * tokens, [&](const Product&, int64_t row0, int64_t rows, int worker) {
    const int64_t chunk = std::min(tokens, kTokenChunk), tile = tile_scratch(rows, gate.cols);
    float* g = Pool::instance().scratch(worker, static_cast<size_t>(2 * tile + 2 * chunk * rows));
    float *u = g + chunk * rows, *expanded = g + 2 * chunk * rows;
    const bool many = shares_copy(k, gate, tokens) && shares_copy(k, up, tokens);
    if (many) {
      k.expand_rows(gate, row0, rows, expanded, padded(gate.cols));
      k.expand_rows(up, row0, rows, expanded + tile, padded(gate.cols));
    }
    Pointers at;
    float* up_out[kTokenChunk];
    for (int64_t t0 = 0; t0 < tokens; t0 += kTokenChunk) {
      const int64_t n = std::min(kTokenChunk, tokens - t0);
      for (int64_t t = 0; t < n; ++t) {
        at.x[t] = x + (t0 + t) * gate.cols;
        at.out[t] = g + t * rows;
        up_out[t] = u + t * rows;
      }
      if (many) {
        k.gemm(expanded, padded(gate.cols), rows, at.x, n, gate.cols, at.out);
        k.gemm(expanded + tile, padded(gate.cols), rows, at.x, n, gate.cols, up_out);
      } else {
        tile_product(k, gate, row0, rows, at.x, n, at.out, expanded);
        tile_product(k, up, row0, rows, at.x, n, up_out, expanded);
      }
      for (int64_t t = 0; t < n; ++t)
        k.activate(at.out[t], up_out[t], rows, act.kind, act.alpha, act.limit, out + (t0 + t) * gate.rows + row0);
    }
  });
}

void dequantize(const Matrix& m, float* out) {
  const Kernels& k = kernels();
  const int64_t stride = padded(m.cols);
  Pool& pool = Pool::instance();
  pool.run(m.rows, m.rows * m.cols > kSerialWork, [&](int64_t r, int worker) {
    if (stride == m.cols) {
      k.expand_rows(m, r, 1, out + r * m.cols, stride);
      return;
    }
    float* row = pool.scratch(worker, static_cast<size_t>(stride));
    k.expand_rows(m, r, 1, row, stride);
    std::copy(row, row + m.cols, out + r * m.cols);
  });
}

int64_t embed(const Matrix& m, const int64_t* ids, int64_t tokens, float* out) {
  for (int64_t t = 0; t < tokens; ++t) if (ids[t] < 0 || ids[t] >= m.rows) return t;
  const Kernels& k = kernels();
  const int64_t stride = padded(m.cols);
  Pool& pool = Pool::instance();
  pool.run(tokens, tokens * m.cols > kSerialWork, [&](int64_t t, int worker) {
    float* row = stride == m.cols ? out + t * m.cols : pool.scratch(worker, static_cast<size_t>(stride));
    k.expand_rows(m, ids[t], 1, row, stride);
    if (stride != m.cols) std::copy(row, row + m.cols, out + t * m.cols);
  });
  return -1;
}

}  // namespace headrace
