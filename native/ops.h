// The operations: how work is cut and handed to the pool. Pointers are float32 unless they say so.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace headrace {

struct Gate {
  Activation kind;
  float alpha, limit;
};

// One product of a group: out[t, :] = x[t, :] weight^T (+ bias) (+ residual[t, :])
struct Product {
  const Matrix* weight;
  const float* bias;
  const float* residual;
  float* out;
};

void linear(const Product* products, int count, const float* x, int64_t tokens);
void gated_linear(const Matrix& gate, const Matrix& up, const float* x, int64_t tokens, Gate act, float* out);
void dequantize(const Matrix& m, float* out);

struct Experts {
  std::vector<Matrix> gate, up, down;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
};
// Returns -1, or the flat index of the first id that is neither -1 nor an expert.
int64_t moe(const Experts& experts, const float* x, const int32_t* ids, const float* weights,
            int64_t tokens, int64_t k, Gate act, float* out);

// These return -1, or the index of the first id, position or slot that is out of range.
int64_t embed(const Matrix& m, const int64_t* ids, int64_t tokens, float* out);
void rmsnorm(const float* x, const float* weight, int64_t tokens, int64_t n, float eps, float* out);
struct Rope {
  const float *cos, *sin;
  int64_t positions, half;  // rows and columns of the tables
  bool interleaved;
};
int64_t rope(float* x, int64_t row_stride, int64_t tokens, int64_t heads, int64_t head, const Rope& table,
             const int64_t* positions);
void router_topk(const float* logits, int64_t tokens, int64_t experts, int64_t k, bool softmax_first,
                 bool normalize, int32_t* ids, float* weights);

// A layer's paged keys or values; strides in elements.
struct Cache {
  const uint8_t *keys, *values;
  int64_t blocks, heads, block_tokens, head;
  int64_t block_stride, head_stride, token_stride;
  bool bf16;
};
int64_t kv_append(const float* k, const float* v, int64_t tokens, const Cache& cache, const int64_t* slots);

struct Attention {
  const float* q;
  float* out;
  int64_t heads;
  float scale;
  int64_t window;      // 0: none
  const float* sinks;  // per head, or null
  const int32_t* query_start;
  const int32_t* block_tables;
  const int64_t* positions;
  int64_t sequences, table_width;
};
// Returns -1, or the index of the first row whose position needs a block that the table lacks.
int64_t attention(const Attention& a, const Cache& cache);

// A whole half of a decoder layer in one call, so that decoding leaves the interpreter alone: each
// residual stream row passes norm, products, attention or gate, and comes back with the sum.
struct AttentionBlock {
  const float* norm;
  float eps;
  Matrix q, k, v, o;
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  const float *q_norm, *k_norm;     // null where there is none
  int64_t q_norm_width, k_norm_width;
  Rope rope;
  int64_t heads, kv_heads, head;
  float scale;
  int64_t window;
  const float* sinks;
};
struct BlockBatch {
  int64_t tokens;
  const int64_t *positions, *slots;
  const int32_t *query_start, *block_tables;
  int64_t sequences, table_width;
};
enum class BlockFault : int { none, position, slot, block };
// seconds: null, or six sums that grow by what norms, q/k/v, rotation, appending, attention and the output took.
BlockFault attention_block(const AttentionBlock& b, const Cache& cache, const BlockBatch& batch, const float* x, float* out,
                           double* seconds);

struct DenseBlock {
  const float* norm;
  float eps;
  Matrix gate, up, down;
  Gate act;
};
// seconds: null, or three sums: norm, gate and up, down.
void dense_block(const DenseBlock& b, const float* x, int64_t tokens, float* out, double* seconds);

}  // namespace headrace
