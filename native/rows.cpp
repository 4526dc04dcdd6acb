// Operations on rows of activations: RMSNorm, RoPE, top-k routing, appending to the KV cache.
#include <cmath>
#include <cstring>

#include "linear.h"

namespace headrace {

void rmsnorm(const float* x, const float* weight, int64_t tokens, int64_t n, float eps, float* out) {
  const Kernels& k = kernels();
  Pool::instance().run(tokens, tokens * n > kSerialWork, [&](int64_t t, int) {
    k.rmsnorm(x + t * n, weight, n, eps, out + t * n);
  });
}

int64_t rope(float* x, int64_t row_stride, int64_t tokens, int64_t heads, int64_t head, const Rope& table,
             const int64_t* positions) {
  for (int64_t t = 0; t < tokens; ++t) if (positions[t] < 0 || positions[t] >= table.positions) return t;
  const int64_t half = table.half, step = table.interleaved ? 2 : 1, apart = table.interleaved ? 1 : half;
  Pool::instance().run(tokens, tokens * heads * head > kSerialWork, [&](int64_t t, int) {
    const float *c = table.cos + positions[t] * half, *s = table.sin + positions[t] * half;
    for (int64_t h = 0; h < heads; ++h) {
      float* a = x + t * row_stride + h * head;
      float* b = a + apart;
      for (int64_t i = 0; i < half; ++i) {
        const float u = a[i * step], v = b[i * step];
        a[i * step] = u * c[i] - v * s[i];
        b[i * step] = v * c[i] + u * s[i];
      }
    }
  });
  return -1;
}

namespace {

// One row: the k largest logits, ties by smaller id, and their weights. A row with NaN is masked.
void route(const Kernels& kern, const float* logits, int64_t experts, int64_t k, bool softmax_first, bool normalize,
           float* work, int32_t* ids, float* weights) {
  bool nan = false;
  for (int64_t e = 0; e < experts; ++e) nan |= logits[e] != logits[e];
  if (!nan) {
    std::memcpy(work, logits, static_cast<size_t>(experts) * sizeof(float));
    for (int64_t s = 0; s < k; ++s) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        bool taken = false;
        if (work[e] == -INFINITY) for (int64_t j = 0; j < s && !taken; ++j) taken = ids[j] == e;
        if (!taken && (best < 0 || work[e] > work[best])) best = e;
      }
      ids[s] = static_cast<int32_t>(best);
      work[best] = -INFINITY;
    }
    const int64_t n = softmax_first ? experts : k;
    for (int64_t e = 0; e < n; ++e) work[e] = (softmax_first ? logits[e] : logits[ids[e]]) - logits[ids[0]];
    kern.exponential(work, n, work);
    double total = 0.0, kept = 0.0;
    for (int64_t e = 0; e < n; ++e) total += work[e];
    for (int64_t s = 0; s < k; ++s) {
      weights[s] = static_cast<float>(work[softmax_first ? ids[s] : s] / total);
      kept += weights[s];
    }
    if (normalize) for (int64_t s = 0; s < k; ++s) weights[s] = static_cast<float>(weights[s] / kept);
    for (int64_t s = 0; s < k; ++s) nan |= weights[s] != weights[s];  // +inf logits
  }
  if (nan) for (int64_t s = 0; s < k; ++s) {
    ids[s] = static_cast<int32_t>(s);
    weights[s] = 0.0f;
  }
}

uint16_t to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(u >> 16 | 0x40);  // quiet NaN
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);  // nearest, ties to even
}

}  // namespace

void router_topk(const float* logits, int64_t tokens, int64_t experts, int64_t k, bool softmax_first,
                 bool normalize, int32_t* ids, float* weights) {
  const Kernels& kern = kernels();
  Pool& pool = Pool::instance();
  pool.run(tokens, tokens * experts * k > kSerialWork, [&](int64_t t, int worker) {
    route(kern, logits + t * experts, experts, k, softmax_first, normalize,
          pool.scratch(worker, static_cast<size_t>(experts)), ids + t * k, weights + t * k);
  });
}

int64_t kv_append(const float* k, const float* v, int64_t tokens, const Cache& c, const int64_t* slots) {
  const int64_t limit = c.blocks * c.block_tokens;
  for (int64_t t = 0; t < tokens; ++t) if (slots[t] < 0 || slots[t] >= limit) return t;
  Pool::instance().run(tokens, tokens * c.heads * c.head > kSerialWork, [&](int64_t t, int) {
    const int64_t block = slots[t] / c.block_tokens, row = slots[t] % c.block_tokens;
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t at = block * c.block_stride + h * c.head_stride + row * c.token_stride;
      const float *from_k = k + (t * c.heads + h) * c.head, *from_v = v + (t * c.heads + h) * c.head;
      if (!c.bf16) {
        const auto n = static_cast<size_t>(c.head) * sizeof(float);
        std::memcpy(const_cast<uint8_t*>(c.keys) + at * 4, from_k, n);
        std::memcpy(const_cast<uint8_t*>(c.values) + at * 4, from_v, n);
        continue;
      }
      auto* to_k = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(c.keys)) + at;
      auto* to_v = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(c.values)) + at;
      for (int64_t d = 0; d < c.head; ++d) {
        to_k[d] = to_bf16(from_k[d]);
        to_v[d] = to_bf16(from_v[d]);
      }
    }
  });
  return -1;
}

}  // namespace headrace
