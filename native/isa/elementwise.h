// RMSNorm, gated activations and the exponential, sixteen elements at a time. Elementwise results do
// not depend on an element's place, because tails run through the same vector code, padded.
#pragma once

namespace headrace::HEADRACE_NS {

// exp(x) to 2 ulp: n = round(x / ln 2), a degree-6 Taylor-like polynomial on |r| <= ln 2 / 2 (Cephes
// expf's coefficients), and 2^n in two factors so that subnormal results round once.
static inline V vexp(V x) {
  const V clipped = vmax(vmin(x, set1(89.0f)), set1(-105.0f));  // beyond: infinity and zero
  const V n = round_even(mul(clipped, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), clipped);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const V half = round_even(mul(n, set1(0.5f)));
  return keep_nan(mul(mul(p, exp2i(half)), exp2i(sub(n, half))), x);
}

static inline float exp1(float x) {
  alignas(64) float t[16];
  store(t, vexp(set1(x)));
  return t[0];
}

// Calls body(offset, vectors in, ...) over whole registers and once over a padded tail.
template <class F> static inline void map2(const float* a, const float* b, int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, f(load(a + i), load(b + i)));
  if (i < n) {
    alignas(64) float ta[16] = {}, tb[16] = {}, to[16];
    for (int64_t j = i; j < n; ++j) { ta[j - i] = a[j]; tb[j - i] = b[j]; }
    store(to, f(load(ta), load(tb)));
    for (int64_t j = i; j < n; ++j) out[j] = to[j - i];
  }
}

static void exponential(const float* x, int64_t n, float* out) {
  map2(x, x, n, out, [](V a, V) { return vexp(a); });
}

static void axpy(float a, const float* x, int64_t n, float* y) {
  const V s = set1(a);
  map2(x, y, n, y, [s](V u, V v) { return fma(s, u, v); });
}

static void rmsnorm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  V acc = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) { const V v = load(x + i); acc = fma(v, v, acc); }
  if (i < n) {
    alignas(64) float t[16] = {};
    for (int64_t j = i; j < n; ++j) t[j - i] = x[j];
    const V v = load(t);
    acc = fma(v, v, acc);
  }
  const V scale = set1(1.0f / std::sqrt(hsum(acc) / static_cast<float>(n) + eps));
  map2(x, weight, n, out, [scale](V v, V w) { return mul(mul(v, scale), w); });
}

static void activate(const float* gate, const float* up, int64_t n, Activation kind, float alpha,
                     float limit, float* out) {
  const V one = set1(1.0f);
  if (kind == Activation::silu) {
    map2(gate, up, n, out, [one](V g, V u) {
      return mul(div(g, add(one, vexp(sub(zero(), g)))), u);
    });
    return;
  }
  if (kind == Activation::gelu_tanh) {
    // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), y = sqrt(2 / pi) (g + 0.044715 g^3)
    const V cubic = set1(0.044715f), minus = set1(-1.5957691216057308f);
    map2(gate, up, n, out, [=](V g, V u) {
      const V y = mul(g, fma(mul(cubic, g), g, one));
      return mul(div(g, add(one, vexp(mul(minus, y)))), u);
    });
    return;
  }
  const V a = set1(-alpha), top = set1(limit), bottom = set1(-limit);
  map2(gate, up, n, out, [=](V g, V u) {
    const V gc = keep_nan(vmin(g, top), g), uc = keep_nan(vmax(vmin(u, top), bottom), u);
    return mul(div(gc, add(one, vexp(mul(a, gc)))), add(uc, one));
  });
}

static float read_bytes(const uint8_t* data, int64_t nbytes) {
  V a = zero(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 256 <= nbytes; i += 256) {
    const float* p = reinterpret_cast<const float*>(data + i);
    a = vmax(a, load(p));
    b = vmax(b, load(p + 16));
    c = vmax(c, load(p + 32));
    d = vmax(d, load(p + 48));
    prefetch(data + i + 4096);
    prefetch(data + i + 4160);
    prefetch(data + i + 4224);
    prefetch(data + i + 4288);
  }
  return hmax(vmax(vmax(a, b), vmax(c, d)));
}

static int64_t multiply_adds(int64_t steps, float* sink) {
  constexpr int kChains = 10;  // latency 4 x 2 a cycle = 8 chains; more would spill where there are 16
  H acc[kChains];
  alignas(64) float start[16];
  // Different starts: chains that were equal would be computed once.
  for (int i = 0; i < kChains; ++i) {
    for (float& f : start) f = static_cast<float>(i);
    acc[i] = hload(start);
  }
  for (float& f : start) f = 0.5f;
  const H x = hload(start);
  for (int64_t s = 0; s < steps; ++s) for (int i = 0; i < kChains; ++i) acc[i] = hfma(acc[i], x, x);
  for (int i = 0; i < kChains; ++i) hstore(sink + i * kWidth, acc[i]);
  return steps * kChains * kWidth;
}

static void from_bf16_n(const uint16_t* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, from_bf16(reinterpret_cast<const uint8_t*>(x + i)));
  for (; i < n; ++i) {
    const uint32_t u = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(out + i, &u, 4);
  }
}

}  // namespace headrace::HEADRACE_NS
