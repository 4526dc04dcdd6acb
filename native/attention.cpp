// Attention over float32 and bf16 caches, whose tokens are stored one by one.
#include "attention_run.h"

namespace headrace {
namespace {

class PlainSource {
 public:
  explicit PlainSource(const Cache& c) : heads(c.heads), head(c.head), c_(c) {}
  int64_t rows_up_to(int64_t) const { return kRowTile; }

  // Pointers to float32 keys and values: into the cache, or into an expanded, padded copy.
  void gather(const Attention& a, const AttentionTask& t, int64_t key0, int64_t n, int64_t padded_head, AttentionWorkspace& w) const {
    const Kernels& kernel = kernels();
    const bool copy = c_.bf16 || padded_head != c_.head;
    if (copy) {
      w.keys.assign(static_cast<size_t>(kKeyTile * padded_head), 0.0f);
      w.values.assign(static_cast<size_t>(kKeyTile * padded_head), 0.0f);
    }
    const int32_t* table = a.block_tables + t.sequence * a.table_width;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = key0 + i;
      const int64_t at = table[key / c_.block_tokens] * c_.block_stride + t.kv_head * c_.head_stride +
                         key % c_.block_tokens * c_.token_stride;
      if (!copy) {
        w.key_at[i] = reinterpret_cast<const float*>(c_.keys) + at;
        w.value_at[i] = reinterpret_cast<const float*>(c_.values) + at;
        continue;
      }
      float *to_k = &w.keys[static_cast<size_t>(i * padded_head)], *to_v = &w.values[static_cast<size_t>(i * padded_head)];
      if (c_.bf16) {
        kernel.from_bf16(reinterpret_cast<const uint16_t*>(c_.keys) + at, c_.head, to_k);
        kernel.from_bf16(reinterpret_cast<const uint16_t*>(c_.values) + at, c_.head, to_v);
      } else {
        std::copy_n(reinterpret_cast<const float*>(c_.keys) + at, c_.head, to_k);
        std::copy_n(reinterpret_cast<const float*>(c_.values) + at, c_.head, to_v);
      }
      w.key_at[i] = to_k;
      w.value_at[i] = to_v;
    }
  }


  const int64_t heads, head;

 private:
  const Cache& c_;
};

}  // namespace

int64_t attention(const Attention& a, const Cache& cache) {
  for (int64_t s = 0; s < a.sequences; ++s)
    for (int64_t r = a.query_start[s]; r < a.query_start[s + 1]; ++r) {
      const int64_t p = a.positions[r];
      if (p < 0 || p / cache.block_tokens >= a.table_width) return r;
      const int64_t first = a.window > 0 ? std::max<int64_t>(0, p - a.window + 1) : 0;
      const int32_t* table = a.block_tables + s * a.table_width;
      const bool last_row = r + 1 == a.query_start[s + 1];
      for (int64_t b = first / cache.block_tokens; last_row && b <= p / cache.block_tokens; ++b)
        if (table[b] < 0 || table[b] >= cache.blocks) return r;
    }
  const PlainSource source(cache);
  AttentionRunner(a, source).run();
  return -1;
}

}  // namespace headrace
