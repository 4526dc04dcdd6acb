// One tile of keys for a set of query rows: scores, online softmax, weighted sum of values.
//
// A row's arithmetic depends only on its own limits and on absolute key positions: tiles start at
// multiples of kKeyTile, masked keys of a tile are skipped (never multiplied by zero), and values are
// added in ascending order of keys. So neither chunking nor neighbours change a row.
#pragma once

namespace headrace::HEADRACE_NS {

static inline float dot_padded(const float* a, const float* b, int64_t n) {
  V acc = zero();
  for (int64_t d = 0; d < n; d += 16) acc = fma(load(a + d), load(b + d), acc);
  return hsum(acc);
}

static inline void score_keys(const float* q, const float* const* keys, int64_t from, int64_t to, int64_t n, float* out) {
  int64_t t = from;
  for (; t + 8 <= to; t += 8) {
    V acc[8];
    for (int j = 0; j < 8; ++j) acc[j] = zero();
    if constexpr (kHalves == 1) {
      for (int64_t d = 0; d < n; d += 16) {
        const V v = load(q + d);
        for (int j = 0; j < 8; ++j) acc[j] = fma(v, load(keys[t + j] + d), acc[j]);
      }
    } else {  // four keys at a time: eight accumulators fit the sixteen registers
      for (int h = 0; h < 8; h += 4)
        for (int64_t d = 0; d < n; d += 16) {
          const V v = load(q + d);
          for (int j = h; j < h + 4; ++j) acc[j] = fma(v, load(keys[t + j] + d), acc[j]);
        }
    }
    reduce8(acc, out + t);
  }
  for (; t < to; ++t) out[t] = dot_padded(q, keys[t], n);
}

// acc[0, 16 N) += sum of p[t] * values[t][0, 16 N) over [from, to)
template <int N>
static inline void add_values(const float* p, const float* const* values, int64_t d, int64_t from, int64_t to, float* acc) {
  V a[N];
  for (int j = 0; j < N; ++j) a[j] = load(acc + d + 16 * j);
  for (int64_t t = from; t < to; ++t) {
    const V w = set1(p[t]);
    for (int j = 0; j < N; ++j) a[j] = fma(w, load(values[t] + d + 16 * j), a[j]);
  }
  for (int j = 0; j < N; ++j) store(acc + d + 16 * j, a[j]);
}

static inline void scale_row(float factor, float* acc, int64_t n) {
  const V f = set1(factor);
  for (int64_t d = 0; d < n; d += 16) store(acc + d, mul(load(acc + d), f));
}

static void attend_tile(const AttendRows& rows, int64_t key0, int64_t count, const float* const* keys,
                        const float* const* values, int64_t head) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t from = rows.first[r] > key0 ? rows.first[r] - key0 : 0;
    const int64_t end = rows.last[r] + 1 - key0, to = end < count ? end : count;
    if (from >= to) continue;
    float* p = rows.scores + r * kKeyTile;
    for (int64_t t = 0; t < kKeyTile; ++t) p[t] = -__builtin_inff();
    score_keys(rows.q[r], keys, from, to, head, p);
    V top = load(p);
    for (int64_t t = 16; t < kKeyTile; t += 16) top = vmax(top, load(p + t));
    const float tile_peak = hmax(top), peak = rows.peak[r];
    const float next = tile_peak > peak ? tile_peak : peak;
    const V shift = set1(next);
    V sum = zero();
    for (int64_t t = 0; t < kKeyTile; t += 16) {
      const V e = vexp(sub(load(p + t), shift));
      store(p + t, e);
      sum = add(sum, e);
    }
    float* acc = rows.acc + r * head;
    if (next != peak) {
      const float factor = exp1(peak - next);
      scale_row(factor, acc, head);
      rows.total[r] *= factor;
    }
    rows.total[r] += hsum(sum);
    rows.peak[r] = next;
    int64_t d = 0;
    for (; d + 64 <= head; d += 64) add_values<4>(p, values, d, from, to, acc);
    for (; d < head; d += 16) add_values<1>(p, values, d, from, to, acc);
  }
}

static void merge(float* peak, float* total, float* acc, float peak2, float total2, const float* acc2, int64_t head) {
  if (total2 == 0.0f && peak2 == -__builtin_inff()) return;  // no key of this segment was visible
  const float next = peak2 > *peak ? peak2 : *peak;
  const float f = exp1(*peak - next), f2 = exp1(peak2 - next);
  const V v = set1(f), v2 = set1(f2);
  for (int64_t d = 0; d < head; d += 16)
    store(acc + d, fma(load(acc2 + d), v2, mul(load(acc + d), v)));
  *total = *total * f + total2 * f2;
  *peak = next;
}

}  // namespace headrace::HEADRACE_NS
