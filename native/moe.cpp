// The experts of one layer. Tokens of one expert are multiplied together, so each touched expert is
// read once; the k results of a token are added in the order of its slots.
#include <vector>

#include "linear.h"

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

// Runs body(touched expert, row0, rows, worker) over row tiles of all touched experts, in one wake.
template <class F>
void over_experts(const Plan& plan, int64_t rows_each, int64_t cols, const F& body) {
  Pool& pool = Pool::instance();
  const auto touched = static_cast<int64_t>(plan.experts.size());
  if (touched == 0) return;
  const int64_t most = plan.start.back();
  const int64_t rows = tile_rows(rows_each * touched, cols, most > touched ? 2 : 1, pool.threads());
  const int64_t tiles = (rows_each + rows - 1) / rows;
  pool.run(touched * tiles, most * rows_each * cols > kSerialWork, [&](int64_t item, int worker) {
    const int64_t row0 = item % tiles * rows;
    body(item / tiles, row0, std::min(rows, rows_each - row0), worker);
  });
}

// to[j] = rows of m times x[j] for all tokens of an expert, in chunks.
void product(const Kernels& k, const Matrix& m, int64_t row0, int64_t rows, const float* const* x, int64_t tokens,
             float* const* to, float* expanded) {
  if (!shares_copy(k, m, tokens)) {
    tile_product(k, m, row0, rows, x, tokens, to, expanded);
    return;
  }
  k.expand_rows(m, row0, rows, expanded, padded(m.cols));
  k.gemm(expanded, padded(m.cols), rows, x, tokens, m.cols, to);
}

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

  for (size_t j = 0; j < plan.pairs.size(); ++j) from[j] = x + plan.pairs[j] / k * hidden;
  over_experts(plan, inner, hidden, [&](int64_t i, int64_t row0, int64_t rows, int worker) {
    const auto e = static_cast<size_t>(plan.experts[static_cast<size_t>(i)]);
    const int64_t first = plan.start[static_cast<size_t>(i)], n = plan.start[static_cast<size_t>(i) + 1] - first;
    const int64_t chunk = std::min(n, kTokenChunk);
    float* g = Pool::instance().scratch(worker, static_cast<size_t>(2 * tile_scratch(rows, hidden) + 2 * chunk * rows));
    float *u = g + chunk * rows, *expanded = u + chunk * rows;
    float *gate_to[kTokenChunk], *up_to[kTokenChunk];
    for (int64_t c = 0; c < n; c += kTokenChunk) {
      const int64_t m = std::min(kTokenChunk, n - c);
      for (int64_t j = 0; j < m; ++j) {
        gate_to[j] = g + j * rows;
        up_to[j] = u + j * rows;
      }
      product(kern, experts.gate[e], row0, rows, &from[static_cast<size_t>(first + c)], m, gate_to, expanded);
      product(kern, experts.up[e], row0, rows, &from[static_cast<size_t>(first + c)], m, up_to, expanded);
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
  over_experts(plan, hidden, inner, [&](int64_t i, int64_t row0, int64_t rows, int worker) {
    const auto e = static_cast<size_t>(plan.experts[static_cast<size_t>(i)]);
    const int64_t first = plan.start[static_cast<size_t>(i)], n = plan.start[static_cast<size_t>(i) + 1] - first;
    float* expanded = Pool::instance().scratch(worker, static_cast<size_t>(tile_scratch(rows, inner)));
    float* at[kTokenChunk];
    for (int64_t c = 0; c < n; c += kTokenChunk) {
      const int64_t m = std::min(kTokenChunk, n - c);
      for (int64_t j = 0; j < m; ++j) at[j] = to[static_cast<size_t>(first + c + j)] + row0;
      product(kern, experts.down[e], row0, rows, &from[static_cast<size_t>(first + c)], m, at, expanded);
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
