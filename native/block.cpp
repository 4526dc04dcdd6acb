// Halves of a decoder layer, made of the other operations: the same calls in the same order, hence the
// same bits as operation by operation.
#include <chrono>
#include <cstddef>
#include <vector>

#include "ops.h"

namespace headrace {
namespace {

// Grows and is kept: a decoding thread calls with the same sizes thousands of times a second.
float* scratch(int slot, int64_t count) {
  thread_local std::vector<float> buffers[5];
  std::vector<float>& b = buffers[slot];
  if (static_cast<int64_t>(b.size()) < count) b.resize(static_cast<std::size_t>(count));
  return b.data();
}

// Adds up the seconds between its calls, part by part; does nothing where nobody asks (null).
class Laps {
 public:
  explicit Laps(double* seconds) : seconds_(seconds) {
    if (seconds_ != nullptr) last_ = Clock::now();
  }
  void end(int part) {
    if (seconds_ == nullptr) return;
    const Clock::time_point now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point last_;
};

}  // namespace

BlockFault attention_block(const AttentionBlock& b, const Cache& cache, const BlockBatch& batch, const float* x,
                           float* out, double* seconds) {
  enum { norm, products, turn, append, attend, output };
  Laps laps(seconds);
  const int64_t tokens = batch.tokens, wide = b.heads * b.head, narrow = b.kv_heads * b.head;
  float* h = scratch(0, tokens * b.q.cols);
  float *q = scratch(1, tokens * wide), *k = scratch(2, tokens * narrow), *v = scratch(3, tokens * narrow);
  float* mixed = scratch(4, tokens * wide);
  rmsnorm(x, b.norm, tokens, b.q.cols, b.eps, h);
  laps.end(norm);
  const Product qkv[3] = {{&b.q, b.q_bias, nullptr, q}, {&b.k, b.k_bias, nullptr, k}, {&b.v, b.v_bias, nullptr, v}};
  linear(qkv, 3, h, tokens);
  laps.end(products);
  if (b.q_norm != nullptr) rmsnorm(q, b.q_norm, tokens * wide / b.q_norm_width, b.q_norm_width, b.eps, q);
  if (b.k_norm != nullptr) rmsnorm(k, b.k_norm, tokens * narrow / b.k_norm_width, b.k_norm_width, b.eps, k);
  laps.end(norm);
  if (rope(q, wide, tokens, b.heads, b.head, b.rope, batch.positions) >= 0) return BlockFault::position;
  if (rope(k, narrow, tokens, b.kv_heads, b.head, b.rope, batch.positions) >= 0) return BlockFault::position;
  laps.end(turn);
  if (kv_append(k, v, tokens, cache, batch.slots) >= 0) return BlockFault::slot;
  laps.end(append);
  const Attention a{q, mixed, b.heads, b.scale, b.window, b.sinks, batch.query_start, batch.block_tables,
                    batch.positions, batch.sequences, batch.table_width};
  if (attention(a, cache) >= 0) return BlockFault::block;
  laps.end(attend);
  const Product whole{&b.o, b.o_bias, x, out};
  linear(&whole, 1, mixed, tokens);
  laps.end(output);
  return BlockFault::none;
}

void dense_block(const DenseBlock& b, const float* x, int64_t tokens, float* out, double* seconds) {
  enum { norm, gated, down };
  Laps laps(seconds);
  float *h = scratch(0, tokens * b.gate.cols), *inner = scratch(1, tokens * b.gate.rows);
  rmsnorm(x, b.norm, tokens, b.gate.cols, b.eps, h);
  laps.end(norm);
  gated_linear(b.gate, b.up, h, tokens, b.act, inner);
  laps.end(gated);
  const Product whole{&b.down, nullptr, x, out};
  linear(&whole, 1, inner, tokens);
  laps.end(down);
}

}  // namespace headrace
