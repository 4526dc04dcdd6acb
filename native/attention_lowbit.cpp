// Caches whose pages are quantised when full: writing, sealing, and attention. ops/reference/sealing.py
// has the definition; everything here gives its codes, whatever the number of threads.
#include <cmath>
#include <cstring>

#include "attention_run.h"
#include "sealed.h"
#include "tables.h"

namespace headrace {
namespace {

constexpr float kE4M3Max = 448.0f, kE2M1Max = 6.0f;
constexpr int kExponentLimit = 100;
constexpr float kMiddles[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

uint16_t to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(u >> 16 | 0x40);  // quiet NaN
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);  // nearest, ties to even
}

// Nearest, ties to even, saturating.
uint8_t to_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const auto sign = static_cast<uint8_t>(u >> 24 & 0x80);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7f;
  float a;
  std::memcpy(&a, &u, 4);
  if (a >= kE4M3Max) return sign | 0x7e;
  if (a < 0.015625f) return sign | static_cast<uint8_t>(std::nearbyint(a * 512.0f));  // steps of 2^-9
  u += 0x7ffff + (u >> 20 & 1);
  return sign | static_cast<uint8_t>((u >> 20) - (120 << 3));
}

// The least power of two s with amax <= largest * s, 1 where amax is 0.
float power_of_two_scale(float amax, float largest) {
  if (!(amax > 0.0f)) return 1.0f;
  int exponent, shift;
  const float mantissa = std::frexp(amax, &exponent), top = std::frexp(largest, &shift);
  exponent += -shift + (mantissa > top ? 1 : 0);
  return std::ldexp(1.0f, std::min(std::max(exponent, -kExponentLimit), kExponentLimit));
}

uint8_t to_e2m1(float x, float step) {
  const float a = std::fabs(x);
  uint8_t code = 0;
  for (int i = 0; i < 7; ++i) {
    const float bound = kMiddles[i] * step;  // exact
    code += i % 2 == 0 ? a > bound : a >= bound;
  }
  if (!(step > 0.0f)) code = 0;
  return code != 0 && std::signbit(x) ? code | 8 : code;
}

struct PageRows {
  const uint16_t *keys, *values;  // bf16 [page, head]
};

void seal_values(const SealedCache& c, const PageRows& in, int64_t at) {
  float amax = 0.0f;
  for (int64_t i = 0; i < c.page * c.head; ++i) amax = std::max(amax, std::fabs(from_bf16(in.values[i])));
  const float scale = power_of_two_scale(amax, kE4M3Max);
  uint8_t* out = c.value_codes + at * c.head * c.page;
  for (int64_t t = 0; t < c.page; ++t)
    for (int64_t d = 0; d < c.head; ++d) out[d * c.page + t] = to_e4m3(from_bf16(in.values[t * c.head + d]) / scale);
  c.page_scales[2 * at + 1] = scale;
}

void seal_fp8_keys(const SealedCache& c, const PageRows& in, int64_t at) {
  float amax = 0.0f;
  for (int64_t i = 0; i < c.page * c.head; ++i) amax = std::max(amax, std::fabs(from_bf16(in.keys[i])));
  const float scale = power_of_two_scale(amax, kE4M3Max);
  for (int64_t i = 0; i < c.page * c.head; ++i)
    c.key_codes[at * c.page * c.head + i] = to_e4m3(from_bf16(in.keys[i]) / scale);
  c.page_scales[2 * at] = scale;
}

// `start`: rows before it are kept elsewhere and are stored as zeros.
void seal_nvfp4_keys(const SealedCache& c, const PageRows& in, int64_t at, int64_t kv_head, int64_t start) {
  const int64_t half = c.head / 2, groups = c.head / 16;
  std::vector<float> centred(static_cast<size_t>(c.page * c.head), 0.0f);
  std::vector<double> error(static_cast<size_t>(c.head));
  float amax = 0.0f;
  for (int64_t d = 0; d < c.head; ++d) {
    double sum = 0.0;
    for (int64_t t = start; t < c.page; ++t) sum += from_bf16(in.keys[t * c.head + d]);
    const auto ref = to_bf16(static_cast<float>(sum / static_cast<double>(std::max<int64_t>(1, c.page - start))));
    c.key_refs[at * c.head + d] = ref;
    for (int64_t t = start; t < c.page; ++t) {
      float& x = centred[static_cast<size_t>(t * c.head + d)];
      x = from_bf16(in.keys[t * c.head + d]) - from_bf16(ref);
      amax = std::max(amax, std::fabs(x));
    }
  }
  const float g = power_of_two_scale(amax, kE4M3Max * kE2M1Max);
  c.page_scales[2 * at] = g;
  for (int64_t t = 0; t < c.page; ++t) {
    uint8_t* codes = c.key_codes + (at * c.page + t) * half;
    uint8_t* scales = c.key_scales + (at * c.page + t) * groups;
    const float* x = &centred[static_cast<size_t>(t * c.head)];
    for (int64_t j = 0; j < groups; ++j) {
      float top = 0.0f;
      for (int64_t i = 8 * j; i < 8 * j + 8; ++i) top = std::max({top, std::fabs(x[i] / g), std::fabs(x[half + i] / g)});
      scales[j] = to_e4m3(top / kE2M1Max);
      const float step = kE4M3.value[scales[j]];
      for (int64_t i = 8 * j; i < 8 * j + 8; ++i) {
        const uint8_t low = to_e2m1(x[i] / g, step), high = to_e2m1(x[half + i] / g, step);
        codes[i] = static_cast<uint8_t>(low | high << 4);
        error[static_cast<size_t>(i)] = static_cast<double>(x[i]) - 0.5f * kE2M1DoubledF[low] * step * g;
        error[static_cast<size_t>(half + i)] = static_cast<double>(x[half + i]) - 0.5f * kE2M1DoubledF[high] * step * g;
      }
    }
    for (int64_t r = 0; r < c.rank; ++r) {
      const float* u = c.directions + (kv_head * c.rank + r) * c.head;
      double along = 0.0;
      for (int64_t d = 0; d < c.head; ++d) along += error[static_cast<size_t>(d)] * u[d];
      c.key_residuals[(at * c.page + t) * c.rank + r] = to_e4m3(static_cast<float>(along / (kResidualUnit * g)));
    }
  }
}

void seal(const SealedCache& c, int64_t block, int64_t slot, bool first, int64_t kv_head) {
  const int64_t at = block * c.heads + kv_head, page = (c.open_row(slot) * c.heads + kv_head) * c.page * c.head;
  const PageRows in{c.open_keys + page, c.open_values + page};
  seal_values(c, in, at);
  if (!c.nvfp4()) {
    seal_fp8_keys(c, in, at);
    return;
  }
  const bool kept = first && c.first_keys != nullptr;
  seal_nvfp4_keys(c, in, at, kv_head, kept ? kFirstTokens : 0);
  if (kept) std::memcpy(c.first_keys + at * kFirstTokens * c.head, in.keys, static_cast<size_t>(kFirstTokens * c.head) * 2);
}

class SealedSource {
 public:
  SealedSource(const SealedCache& c, const OpenPages& open) : heads(c.heads), head(c.head), c_(c), open_(open) {}

  // A task's rows see the same pages: it ends where a page does.
  int64_t rows_up_to(int64_t position) const { return position % c_.page + 1; }

  void gather(const Attention& a, const AttentionTask& t, int64_t key0, int64_t n, int64_t padded_head, AttentionWorkspace& w) const {
    const int64_t own = a.positions[t.first_row] / c_.page, wide = kKeyTile * padded_head;
    // A tile, and the reference vector of the page at hand behind its keys.
    w.keys.resize(static_cast<size_t>(wide + head));
    w.values.resize(static_cast<size_t>(wide));
    for (int64_t i = 0; i < n; ++i) {
      w.key_at[i] = w.keys.data() + i * head;
      w.value_at[i] = w.values.data() + i * head;
    }
    for (int64_t key = key0; key < key0 + n;) {
      const int64_t page = key / c_.page, row = key % c_.page, count = std::min(c_.page - row, key0 + n - key);
      float *keys = w.keys.data() + (key - key0) * head, *values = w.values.data() + (key - key0) * head;
      if (page == own) read_open(a, t, own, row, count, keys, values);
      else read_sealed(a, t, page, row, count, keys, values, w.keys.data() + wide);
      key += count;
    }
  }

  const int64_t heads, head;

 private:
  void read_open(const Attention& a, const AttentionTask& t, int64_t own, int64_t row, int64_t count, float* keys, float* values) const {
    const int64_t origin = a.positions[a.query_start[t.sequence]] / c_.page;
    const int64_t slot = c_.open_row(open_.pages[t.sequence * open_.width + own - origin]);
    const int64_t at = ((slot * heads + t.kv_head) * c_.page + row) * head;
    kernels().from_bf16(c_.open_keys + at, count * head, keys);
    kernels().from_bf16(c_.open_values + at, count * head, values);
  }

  // Rows [row, row + count) of a full page; both are multiples of sixteen.
  void read_sealed(const Attention& a, const AttentionTask& t, int64_t page, int64_t row, int64_t count, float* keys, float* values,
                   float* ref) const {
    const Kernels& k = kernels();
    const int64_t block = a.block_tables[t.sequence * a.table_width + page], at = block * heads + t.kv_head;
    k.expand_fp8_columns(c_.value_codes + at * head * c_.page + row, c_.page, count, head, c_.page_scales[2 * at + 1], values);
    const float scale = c_.page_scales[2 * at];
    if (!c_.nvfp4()) {
      k.expand_fp8_rows(c_.key_codes + (at * c_.page + row) * head, count * head, scale, keys);
      return;
    }
    k.from_bf16(c_.key_refs + at * head, head, ref);
    const SealedKeys in{c_.key_codes + (at * c_.page + row) * (head / 2), c_.key_scales + (at * c_.page + row) * (head / 16), ref, scale,
                        c_.key_residuals + (at * c_.page + row) * c_.rank, c_.directions + t.kv_head * c_.rank * head, c_.rank,
                        kResidualUnit * scale};
    k.expand_nvfp4_keys(in, count, head, keys);
    if (page == 0 && row == 0 && c_.first_keys != nullptr)
      k.from_bf16(c_.first_keys + at * kFirstTokens * head, kFirstTokens * head, keys);
  }

  const SealedCache& c_;
  const OpenPages& open_;
};

bool has_slot(const SealedCache& c, int64_t slot) { return slot >= 0 && c.open_row(slot) < c.open_rows; }

}  // namespace

int64_t sealed_append(const float* k, const float* v, int64_t tokens, const SealedCache& c, const OpenPages& open) {
  for (int64_t t = 0; t < tokens; ++t)
    if (open.rows[t] < 0 || !has_slot(c, open.rows[t] / c.page)) return t;
  for (int64_t i = 0; i < open.num_seals; ++i) {
    const int32_t *s = open.seals + 3 * i, limit = static_cast<int32_t>(s[2] == 1 && c.first_keys != nullptr ? c.num_first : c.blocks);
    if (s[0] >= limit || (s[0] >= 0 && !has_slot(c, s[1]))) return tokens + i;
  }
  Pool& pool = Pool::instance();
  pool.run(tokens, tokens * c.heads * c.head > kSerialWork, [&](int64_t t, int) {
    const int64_t slot = c.open_row(open.rows[t] / c.page), row = open.rows[t] % c.page;
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t to = ((slot * c.heads + h) * c.page + row) * c.head, from = (t * c.heads + h) * c.head;
      for (int64_t d = 0; d < c.head; ++d) {
        c.open_keys[to + d] = to_bf16(k[from + d]);
        c.open_values[to + d] = to_bf16(v[from + d]);
      }
    }
  });
  pool.run(open.num_seals * c.heads, open.num_seals * c.heads > 1, [&](int64_t i, int) {
    const int32_t* s = open.seals + 3 * (i / c.heads);
    if (s[0] >= 0) seal(c, s[0], s[1], s[2] == 1, i % c.heads);
  });
  return -1;
}

int64_t sealed_attention(const Attention& a, const SealedCache& c, const OpenPages& open) {
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t r0 = a.query_start[s], r1 = a.query_start[s + 1];
    for (int64_t r = r0; r < r1; ++r) {
      const int64_t p = a.positions[r], own = p / c.page - a.positions[r0] / c.page;
      if (p < 0 || p / c.page >= a.table_width || own < 0 || own >= open.width) return r;
      if (!has_slot(c, open.pages[s * open.width + own])) return r;
      // A tile of keys may begin before the first one that is seen.
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, p - a.window + 1) / kKeyTile * kKeyTile : 0;
      const int32_t* table = a.block_tables + s * a.table_width;
      if (r + 1 < r1 && a.window == 0) continue;
      for (int64_t b = first / c.page; b < p / c.page; ++b)
        if (table[b] < 0 || table[b] >= (b == 0 && c.first_keys != nullptr ? c.num_first : c.blocks)) return r;
    }
  }
  const SealedSource source(c, open);
  AttentionRunner(a, source).run();
  return -1;
}

}  // namespace headrace
