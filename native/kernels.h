// The functions that exist once per instruction set; everything else calls through this table.
//
// All sums over K run in sixteen lanes (lane l takes k = l, l + 16, ...), each lane one chain of
// fused multiply-adds in ascending k, and end in one fixed tree (l + 8, l + 4, l + 2, l + 1). Every
// instruction set and every number of rows uses exactly this order, so results are equal bit for bit.
#pragma once
#include <cstdint>

#include "matrix.h"
#include "tiles.h"

namespace headrace {

constexpr int64_t kLanes = 16;
constexpr int64_t kGroup = 32;     // weights expanded at once; padding unit of K
constexpr int64_t kKeyTile = 64;   // keys of one online-softmax step, at absolute positions

inline int64_t padded(int64_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

enum class Activation : int { silu, swiglu_clamped, gelu_tanh };

// Rows of queries that attend to the same keys: `count` rows, each with its own limits.
struct AttendRows {
  int64_t count;
  const float* const* q;  // padded to a multiple of kLanes, already multiplied by the scale
  const int64_t* first;   // first visible key
  const int64_t* last;    // last visible key
  float* peak;            // running maximum, one per row
  float* total;           // running denominator
  float* acc;             // [count, padded head]
  float* scores;          // [count, kKeyTile]
};

constexpr int64_t kMaxRank = 16;  // residual scalars of a key

// Rows of a full page's keys in NVFP4 (ops.records.SealedKV), of one head.
struct SealedKeys {
  const uint8_t *codes, *scales;
  const float* ref;         // the page's reference vector
  float scale;              // g
  const uint8_t* residuals;
  const float* directions;  // [rank, head]
  int64_t rank;
  float residual_unit;      // 16 g
};

struct Kernels {
  const char* name;
  // out[i] = row (row0 + i) . x
  void (*dot_rows)(const Matrix&, int64_t row0, int64_t count, const float* x, float* out);
  // Rows as float32, `stride` floats apart, zero from cols to padded(cols).
  void (*expand_rows)(const Matrix&, int64_t row0, int64_t count, float* out, int64_t stride);
  // out[t][i] = weights row i . x[t], weights as expand_rows writes them
  void (*gemm)(const float* weights, int64_t stride, int64_t rows, const float* const* x,
               int64_t tokens, int64_t cols, float* const* out);
  void (*rmsnorm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // gate and up may alias out
  void (*activate)(const float* gate, const float* up, int64_t n, Activation kind, float alpha,
                   float limit, float* out);
  // y += a * x
  void (*axpy)(float a, const float* x, int64_t n, float* y);
  // One tile of keys [key0, key0 + count), key0 a multiple of kKeyTile.
  void (*attend_tile)(const AttendRows&, int64_t key0, int64_t count, const float* const* keys,
                      const float* const* values, int64_t head);
  // total state (peak, total, acc) takes in a later segment's state
  void (*merge)(float* peak, float* total, float* acc, float peak2, float total2,
                const float* acc2, int64_t head);
  // Yardsticks for benchmarks: a plain read, and `steps` multiply-adds of each of many registers, which
  // are stored to `sink` (256 floats); the number of scalar multiply-adds done is returned.
  float (*read)(const uint8_t* data, int64_t nbytes);
  int64_t (*multiply_adds)(int64_t steps, float* sink);
  void (*exponential)(const float* x, int64_t n, float* out);
  void (*from_bf16)(const uint16_t* x, int64_t n, float* out);
  // Full pages as float32 rows [count, head]; counts and heads are multiples of sixteen.
  void (*expand_nvfp4_keys)(const SealedKeys&, int64_t count, int64_t head, float* out);
  void (*expand_fp8_rows)(const uint8_t* codes, int64_t n, float scale, float* out);
  void (*expand_fp8_columns)(const uint8_t* codes, int64_t page, int64_t count, int64_t head, float scale, float* out);
  // Formats whose sums only dot_rows computes (integer numerics): batches go token by token. May be null.
  bool (*rowwise)(Format) = nullptr;
  // Products of calls with many rows (tiles.h), or null.
  const TileKernels* tiles = nullptr;
};

const Kernels& scalar_kernels();
#if defined(HEADRACE_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& vnni_kernels();
#endif

}  // namespace headrace
