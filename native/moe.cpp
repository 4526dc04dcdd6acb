// The experts of one layer. Tokens of one expert are multiplied together, so each touched expert is
// read once; the k results of a token are added in the order of its slots.
#include <vector>

#include "linear.h"
#include "tiled.h"

namespace headrace {
namespace {

// (token, slot) pairs sorted by expert, tokens in order: pair p is slot p % k of token p / k.
struct Plan {
  std::vector<int64_t> pairs;
  std::vector<int64_t> experts;  // touched ones, ascending
  std::vector<int64_t> start;    // of each in `pairs`; one more at the end
};

Plan group(const int32_t* ids, int64_t pairs, int64_t experts) {
  std::vector<int64_t> count(static_cast<size_t>(experts), 0);
  for (int64_t p = 0; p < pairs; ++p) if (ids[p] >= 0) ++count[static_cast<size_t>(ids[p])];
  Plan plan;
  plan.start.push_back(0);
  std::vector<int64_t> place(static_cast<size_t>(experts), 0);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t n = count[static_cast<size_t>(e)];
    if (n == 0) continue;
    place[static_cast<size_t>(e)] = plan.start.back();
    plan.experts.push_back(e);
    plan.start.push_back(plan.start.back() + n);
  }
  plan.pairs.resize(static_cast<size_t>(plan.start.back()));
  for (int64_t p = 0; p < pairs; ++p)
    if (ids[p] >= 0) plan.pairs[static_cast<size_t>(place[static_cast<size_t>(ids[p])]++)] = p;
  return plan;
}

// Runs body(touched expert, row0, rows, worker) over row tiles of all touched experts, in one wake. `tile`: rows of
// one, or 0 where float32 copies of them are multiplied.
template <class F>
void over_experts(const Plan& plan, int64_t rows_each, int64_t cols, int64_t tile, const F& body) {
  Pool& pool = Pool::instance();
  const auto touched = static_cast<int64_t>(plan.experts.size());
  if (touched == 0) return;
  const int64_t most = plan.start.back();
  const int64_t rows = tile != 0 ? tile : tile_rows(rows_each * touched, cols, most > touched ? 2 : 1, pool.threads());
  const int64_t tiles = (rows_each + rows - 1) / rows;
  pool.run(touched * tiles, most * rows_each * cols > kSerialWork, [&](int64_t item, int worker) {
    const int64_t row0 = item % tiles * rows;
    body(item / tiles, row0, std::min(rows, rows_each - row0), worker);
  });
}

// The products of one half: pairs of activations, in the order of the plan.
struct Half {
  const Kernels& k;
  const TileKernels* tiles;
  const std::vector<const float*>& x;
  const Format format;  // of all its weights, or f32 where they have several
  std::unique_ptr<PackedRows> packed;

  Half(const Kernels& kernels, const TileKernels* t, const Plan& plan, const std::vector<const float*>& rows, int64_t cols,
       Format weights)
      : k(kernels), tiles(t), x(rows), format(weights) {
    if (t != nullptr)
      packed = std::make_unique<PackedRows>(*t, x.data(), plan.start.data(), static_cast<int64_t>(plan.experts.size()), cols, format);
  }

  int64_t scratch(const Matrix& m, int64_t rows) const {
    return std::max(tiles != nullptr ? tiled_floats(rows, m) : 0, tile_scratch(rows, m.cols));
  }

  bool narrow(const Matrix& m, int64_t tokens) const { return tiles != nullptr && takes_narrow(format, m.cols, tokens); }
  bool tiled(int64_t tokens) const { return tiles != nullptr && tokens >= kTiledPairs; }

  // What products with these rows read, once for all tokens of an expert.
  void expand(const Matrix& m, int64_t row0, int64_t rows, int64_t tokens, float* expanded) const {
    if (narrow(m, tokens)) return;
    if (tiled(tokens)) tiles->expand(m, row0, rows, reinterpret_cast<uint16_t*>(expanded));
    else if (shares_copy(k, m, tokens)) k.expand_rows(m, row0, rows, expanded, padded(m.cols));
  }

  // to[j] = rows of m times pair first + c + j, for the touched expert i whose pairs begin at `first`.
  void product(const Matrix& m, int64_t row0, int64_t rows, int64_t i, int64_t first, int64_t c, int64_t count,
               int64_t tokens, float* const* to, float* expanded) const {
    const float* const* from = &x[static_cast<size_t>(first + c)];
    if (narrow(m, tokens))
      tiles->multiply_narrow({&m, row0, rows, packed->blocks(i) + c / kTile, count, to,
                              row0 + rows < m.rows ? m.data + (row0 + rows) * m.row_nbytes : nullptr});
    else if (tiled(tokens))
      tiles->multiply({reinterpret_cast<const uint16_t*>(expanded), weight_terms(m.format), rows, tile_steps(m.cols),
                       packed->blocks(i) + c / kTile, count, to});
    else if (shares_copy(k, m, tokens)) k.gemm(expanded, padded(m.cols), rows, from, count, m.cols, to);
    else tile_product(k, m, row0, rows, from, count, to, expanded);
  }
};

void add_bias(float* out, const float* bias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += bias[i];
}

}  // namespace

int64_t moe(const Experts& experts, const float* x, const int32_t* ids, const float* weights,
            int64_t tokens, int64_t k, Gate act, float* out) {
  const int64_t pairs = tokens * k, count = static_cast<int64_t>(experts.gate.size());
  for (int64_t p = 0; p < pairs; ++p) if (ids[p] < -1 || ids[p] >= count) return p;
  if (count == 0) return -1;
  const Kernels& kern = kernels();
  const int64_t hidden = experts.down[0].rows, inner = experts.gate[0].rows;
  const Plan plan = group(ids, pairs, count);
  std::vector<float> between(static_cast<size_t>(pairs * inner)), results(static_cast<size_t>(pairs * hidden));
  std::vector<const float*> from(plan.pairs.size());
  std::vector<float*> to(plan.pairs.size());

  const TileKernels* tiles = tiles_for(tokens);
  const auto tile_of = [&](const Matrix& m) { return tiles == nullptr ? 0 : tiled_rows(m); };

  for (size_t j = 0; j < plan.pairs.size(); ++j) from[j] = x + plan.pairs[j] / k * hidden;
  const auto format_of = [](const std::vector<Matrix>& all) {
    const auto same = [&](const Matrix& m) { return m.format == all[0].format; };
    return std::all_of(all.begin(), all.end(), same) ? all[0].format : Format::f32;
  };
  const Format gate_format = format_of(experts.gate), first = gate_format == format_of(experts.up) ? gate_format : Format::f32;
  const Half in(kern, tiles, plan, from, hidden, first);
  const int64_t gate_tile = std::min(tile_of(experts.gate[0]), tile_of(experts.up[0]));
  over_experts(plan, inner, hidden, gate_tile, [&](int64_t i, int64_t row0, int64_t rows, int worker) {
    const auto e = static_cast<size_t>(plan.experts[static_cast<size_t>(i)]);
    const int64_t first = plan.start[static_cast<size_t>(i)], n = plan.start[static_cast<size_t>(i) + 1] - first;
    const Matrix &gate = experts.gate[e], &up = experts.up[e];
    const int64_t chunk = std::min(n, kTokenChunk), gate_floats = in.scratch(gate, rows), sums = (chunk * rows + 15) / 16 * 16;
    float* g = Pool::instance().scratch(worker, static_cast<size_t>(gate_floats + in.scratch(up, rows) + 2 * sums));
    float *u = g + sums, *gate_rows = u + sums, *up_rows = gate_rows + gate_floats;
    in.expand(gate, row0, rows, n, gate_rows);
    in.expand(up, row0, rows, n, up_rows);
    float *gate_to[kTokenChunk], *up_to[kTokenChunk];
    for (int64_t c = 0; c < n; c += kTokenChunk) {
      const int64_t m = std::min(kTokenChunk, n - c);
      for (int64_t j = 0; j < m; ++j) {
        gate_to[j] = g + j * rows;
        up_to[j] = u + j * rows;
      }
      in.product(gate, row0, rows, i, first, c, m, n, gate_to, gate_rows);
      in.product(up, row0, rows, i, first, c, m, n, up_to, up_rows);
      for (int64_t j = 0; j < m; ++j) {
        const auto bias_at = static_cast<int64_t>(e) * inner + row0;
        if (experts.gate_bias != nullptr) add_bias(gate_to[j], experts.gate_bias + bias_at, rows);
        if (experts.up_bias != nullptr) add_bias(up_to[j], experts.up_bias + bias_at, rows);
        const int64_t pair = plan.pairs[static_cast<size_t>(first + c + j)];
        kern.activate(gate_to[j], up_to[j], rows, act.kind, act.alpha, act.limit, &between[static_cast<size_t>(pair * inner + row0)]);
      }
    }
  });

  for (size_t j = 0; j < plan.pairs.size(); ++j) {
    from[j] = &between[static_cast<size_t>(plan.pairs[j] * inner)];
    to[j] = &results[static_cast<size_t>(plan.pairs[j] * hidden)];
  }
  const Half out_of(kern, tiles, plan, from, inner, format_of(experts.down));
  over_experts(plan, hidden, inner, tile_of(experts.down[0]), [&](int64_t i, int64_t row0, int64_t rows, int worker) {
    const auto e = static_cast<size_t>(plan.experts[static_cast<size_t>(i)]);
    const int64_t first = plan.start[static_cast<size_t>(i)], n = plan.start[static_cast<size_t>(i) + 1] - first;
    const Matrix& down = experts.down[e];
    float* expanded = Pool::instance().scratch(worker, static_cast<size_t>(out_of.scratch(down, rows)));
    out_of.expand(down, row0, rows, n, expanded);
    float* at[kTokenChunk];
    for (int64_t c = 0; c < n; c += kTokenChunk) {
      const int64_t m = std::min(kTokenChunk, n - c);
      for (int64_t j = 0; j < m; ++j) at[j] = to[static_cast<size_t>(first + c + j)] + row0;
      out_of.product(down, row0, rows, i, first, c, m, n, at, expanded);
      if (experts.down_bias == nullptr) continue;
      for (int64_t j = 0; j < m; ++j) add_bias(at[j], experts.down_bias + static_cast<int64_t>(e) * hidden + row0, rows);
    }
  });

  Pool::instance().run(tokens, pairs * hidden > kSerialWork, [&](int64_t t, int) {
    float* y = out + t * hidden;
    std::fill(y, y + hidden, 0.0f);
    for (int64_t s = 0; s < k; ++s)
      if (ids[t * k + s] >= 0) kern.axpy(weights[t * k + s], &results[static_cast<size_t>((t * k + s) * hidden)], hidden, y);
  });
  return -1;
}

}  // namespace headrace
