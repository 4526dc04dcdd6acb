// A layer's cache whose pages are quantised when full; the layout is that of ops.records.SealedKV, whose
// arrays are contiguous. Null pointers where a format lacks a part.
#pragma once
#include <cstdint>

#include "ops.h"

namespace headrace {

constexpr int64_t kKeyScaleBytes = 8;    // bytes of key codes that share a scale: 16 channels
constexpr int64_t kFirstTokens = 16;     // rows of a first page whose keys stay in bf16
constexpr float kResidualUnit = 16.0f;   // residual codes are in units of 16 key scales

struct SealedCache {
  uint8_t *key_codes, *key_scales, *key_residuals;
  uint16_t* key_refs;  // bf16
  uint8_t* value_codes;
  float* page_scales;
  uint16_t* first_keys;
  const float* directions;
  uint16_t *open_keys, *open_values;
  int64_t blocks, heads, page, head, rank, num_first, open_rows, num_shared, open_offset;

  bool nvfp4() const { return key_scales != nullptr; }
  int64_t key_nbytes() const { return nvfp4() ? head / 2 : head; }
  int64_t open_row(int64_t slot) const { return slot < num_shared ? slot : slot + open_offset; }
};

// Where a step's rows lie while their pages fill (ops.records.OpenBatch).
struct OpenPages {
  const int64_t* rows;
  const int32_t *pages, *seals;
  int64_t width, num_seals;
};

// Both return -1, or the index of the first row (or, beyond `tokens`, of the first seal) that is out of range.
int64_t sealed_append(const float* k, const float* v, int64_t tokens, const SealedCache& cache, const OpenPages& open);
int64_t sealed_attention(const Attention& a, const SealedCache& cache, const OpenPages& open);

}  // namespace headrace
