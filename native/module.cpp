// Python bindings: addresses and sizes, checked by headrace.ops.cpu before they come here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>

#include "bandwidth.h"
#include "dispatch.h"
#include "expert_module.h"
#include "ops.h"
#include "pool.h"
#include "sealed_module.h"
#include "tiled.h"

namespace nb = nanobind;
using namespace headrace;
using Address = uintptr_t;

namespace {

template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

// Multiply-adds beyond which a call gives up the interpreter lock: about 100 us of work, which other
// Python threads should not wait for. Below it, taking the lock back could cost more than the call.
constexpr int64_t kLongCall = 4 * 1024 * 1024;

class ReleaseIf {
 public:
  explicit ReleaseIf(bool release) { if (release) inner_.emplace(); }
 private:
  std::optional<nb::gil_scoped_release> inner_;
};

Matrix make_matrix(int format, int64_t rows, int64_t cols, Address data, int64_t row_nbytes, Address scales,
                   int64_t scale_row_nbytes, float global_scale, Address block_scale, int64_t block_scale_row) {
  if (format < 0 || format >= static_cast<int>(Format::count)) throw std::invalid_argument("unknown format number");
  Matrix m;
  m.format = static_cast<Format>(format);
  m.rows = rows;
  m.cols = cols;
  m.data = at<const uint8_t>(data);
  m.row_nbytes = row_nbytes;
  m.scales = at<const uint8_t>(scales);
  m.scale_row_nbytes = scale_row_nbytes;
  m.global_scale = global_scale;
  m.block_scale = at<const float>(block_scale);
  m.block_scale_row = block_scale_row;
  return m;
}

Gate gate_of(int kind, float alpha, float limit) { return {static_cast<Activation>(kind), alpha, limit}; }

void py_linear(const Matrix& m, Address x, int64_t tokens, Address out, Address bias, Address residual) {
  const Product p{&m, at<const float>(bias), at<const float>(residual), at<float>(out)};
  const ReleaseIf lock(m.rows * m.cols * tokens > kLongCall);
  linear(&p, 1, at<const float>(x), tokens);
}

// Through tiles whatever the number of rows: false if there are none.
bool py_tiled_linear(const Matrix& m, Address x, int64_t tokens, Address out) {
  const TileKernels* tiles = kernels().tiles;
  if (tiles == nullptr) return false;
  const Product p{&m, nullptr, nullptr, at<float>(out)};
  const nb::gil_scoped_release lock;
  tiled_linear(*tiles, &p, 1, at<const float>(x), tokens);
  return true;
}

void py_linear_group(const std::vector<const Matrix*>& ms, Address x, int64_t tokens, const std::vector<Address>& outs,
                     const std::vector<Address>& biases) {
  if (ms.empty() || outs.size() != ms.size() || biases.size() != ms.size()) throw std::invalid_argument("lengths differ");
  std::vector<Product> products;
  int64_t work = 0;
  for (size_t i = 0; i < ms.size(); ++i) {
    products.push_back({ms[i], at<const float>(biases[i]), nullptr, at<float>(outs[i])});
    work += ms[i]->rows * ms[i]->cols * tokens;
  }
  const ReleaseIf lock(work > kLongCall);
  linear(products.data(), static_cast<int>(products.size()), at<const float>(x), tokens);
}

void py_gated_linear(const Matrix& gate, const Matrix& up, Address x, int64_t tokens, int kind, float alpha, float limit,
                     Address out) {
  const ReleaseIf lock(2 * gate.rows * gate.cols * tokens > kLongCall);
  gated_linear(gate, up, at<const float>(x), tokens, gate_of(kind, alpha, limit), at<float>(out));
}

Experts make_experts(const std::vector<const Matrix*>& gate, const std::vector<const Matrix*>& up,
                     const std::vector<const Matrix*>& down, Address gate_bias, Address up_bias, Address down_bias) {
  Experts e;
  for (const Matrix* m : gate) e.gate.push_back(*m);
  for (const Matrix* m : up) e.up.push_back(*m);
  for (const Matrix* m : down) e.down.push_back(*m);
  e.gate_bias = at<const float>(gate_bias);
  e.up_bias = at<const float>(up_bias);
  e.down_bias = at<const float>(down_bias);
  return e;
}

int64_t py_moe(const Experts& e, Address x, Address ids, Address weights, int64_t tokens, int64_t k, int kind, float alpha,
               float limit, Address out) {
  const nb::gil_scoped_release lock;
  return moe(e, at<const float>(x), at<const int32_t>(ids), at<const float>(weights), tokens, k,
             gate_of(kind, alpha, limit), at<float>(out));
}

Cache make_cache(Address keys, Address values, int64_t blocks, int64_t heads, int64_t block_tokens, int64_t head,
                 int64_t block_stride, int64_t head_stride, int64_t token_stride, bool bf16) {
  return {at<const uint8_t>(keys), at<const uint8_t>(values), blocks, heads, block_tokens, head,
          block_stride, head_stride, token_stride, bf16};
}

int64_t py_attention(const Cache& cache, Address q, Address out, int64_t heads, float scale, int64_t window,
                     Address sinks, Address query_start, Address block_tables, Address positions, int64_t sequences,
                     int64_t table_width, bool release) {
  const Attention a{at<const float>(q), at<float>(out), heads, scale, window, at<const float>(sinks),
                    at<const int32_t>(query_start), at<const int32_t>(block_tables), at<const int64_t>(positions),
                    sequences, table_width};
  const ReleaseIf lock(release);
  return attention(a, cache);
}

AttentionBlock make_attention_block(Address norm, float eps, const std::vector<const Matrix*>& qkvo,
                                    const std::vector<Address>& biases, const std::vector<Address>& norms,
                                    const std::vector<int64_t>& widths, Address cos, Address sin, int64_t positions,
                                    int64_t half, bool interleaved, const std::vector<int64_t>& heads, float scale,
                                    int64_t window, Address sinks) {
  if (qkvo.size() != 4 || biases.size() != 4 || norms.size() != 2 || widths.size() != 2 || heads.size() != 3)
    throw std::invalid_argument("attention block: lengths differ");
  return {at<const float>(norm), eps, *qkvo[0], *qkvo[1], *qkvo[2], *qkvo[3],
          at<const float>(biases[0]), at<const float>(biases[1]), at<const float>(biases[2]), at<const float>(biases[3]),
          at<const float>(norms[0]), at<const float>(norms[1]), widths[0], widths[1],
          {at<const float>(cos), at<const float>(sin), positions, half, interleaved},
          heads[0], heads[1], heads[2], scale, window, at<const float>(sinks)};
}

int py_attention_block(const AttentionBlock& b, const Cache& cache, Address x, Address out, int64_t tokens,
                       Address positions, Address slots, Address query_start, Address block_tables, int64_t sequences,
                       int64_t table_width, Address seconds) {
  const BlockBatch batch{tokens, at<const int64_t>(positions), at<const int64_t>(slots), at<const int32_t>(query_start),
                         at<const int32_t>(block_tables), sequences, table_width};
  const nb::gil_scoped_release lock;
  return static_cast<int>(attention_block(b, cache, batch, at<const float>(x), at<float>(out), at<double>(seconds)));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Headrace's CPU kernels. Use headrace.ops.cpu, which checks arguments.";
  nb::class_<Matrix>(m, "Matrix").def_ro("rows", &Matrix::rows).def_ro("cols", &Matrix::cols);
  nb::class_<Experts>(m, "Experts");
  nb::class_<Cache>(m, "Cache");
  nb::class_<AttentionBlock>(m, "AttentionBlock");
  nb::class_<DenseBlock>(m, "DenseBlock");
  bind_experts(m);
  m.def("make_attention_block", &make_attention_block);
  m.def("attention_block", &py_attention_block);
  m.def("make_dense_block", [](Address norm, float eps, const Matrix& gate, const Matrix& up, const Matrix& down, int kind,
                               float alpha, float limit) {
    return DenseBlock{at<const float>(norm), eps, gate, up, down, gate_of(kind, alpha, limit)};
  });
  m.def("dense_block", [](const DenseBlock& b, Address x, int64_t tokens, Address out, Address seconds) {
    const nb::gil_scoped_release lock;
    dense_block(b, at<const float>(x), tokens, at<float>(out), at<double>(seconds));
  });
  m.def("make_matrix", &make_matrix);
  m.def("make_experts", &make_experts);
  m.def("make_cache", &make_cache);
  m.def("linear", &py_linear);
  m.def("tiled_linear", &py_tiled_linear);
  m.def("linear_group", &py_linear_group);
  m.def("gated_linear", &py_gated_linear);
  m.def("moe", &py_moe);
  m.def("attention", &py_attention);
  m.def("dequantize", [](const Matrix& w, Address out) {
    const nb::gil_scoped_release lock;
    dequantize(w, at<float>(out));
  });
  m.def("embed", [](const Matrix& w, Address ids, int64_t tokens, Address out) {
    return embed(w, at<const int64_t>(ids), tokens, at<float>(out));
  });
  m.def("rmsnorm", [](Address x, Address weight, int64_t tokens, int64_t n, float eps, Address out) {
    rmsnorm(at<const float>(x), at<const float>(weight), tokens, n, eps, at<float>(out));
  });
  m.def("rope", [](Address x, int64_t row_stride, int64_t tokens, int64_t heads, int64_t head, Address cos, Address sin,
                   int64_t table_rows, int64_t half, bool interleaved, Address positions) {
    return rope(at<float>(x), row_stride, tokens, heads, head,
                {at<const float>(cos), at<const float>(sin), table_rows, half, interleaved}, at<const int64_t>(positions));
  });
  m.def("router_topk", [](Address logits, int64_t tokens, int64_t experts, int64_t k, bool softmax_first, bool normalize,
                          Address ids, Address weights) {
    router_topk(at<const float>(logits), tokens, experts, k, softmax_first, normalize, at<int32_t>(ids), at<float>(weights));
  });
  m.def("kv_append", [](const Cache& cache, Address k, Address v, int64_t tokens, Address slots) {
    return kv_append(at<const float>(k), at<const float>(v), tokens, cache, at<const int64_t>(slots));
  });
  m.def("read", [](Address data, int64_t nbytes) {
    constexpr int64_t kPiece = 64 * 1024;
    std::atomic<float> most{0.0f};
    Pool::instance().run((nbytes + kPiece - 1) / kPiece, true, [&](int64_t i, int) {
      most.store(kernels().read(at<const uint8_t>(data) + i * kPiece, std::min(kPiece, nbytes - i * kPiece)));
    });
    return most.load();
  });
  m.def("multiply_adds", [](int64_t steps) {
    Pool& pool = Pool::instance();
    std::atomic<int64_t> done{0};
    pool.run(pool.threads(), true, [&](int64_t, int worker) {
      done += kernels().multiply_adds(steps, pool.scratch(worker, 256));
    });
    return done.load();
  });
  m.def("exponential", [](Address x, int64_t n, Address out) { kernels().exponential(at<const float>(x), n, at<float>(out)); });
  m.def("set_num_threads", [](int n) { Pool::instance().set_threads(n); });
  m.def("num_threads", [] { return Pool::instance().threads(); });
  m.def("select_isa", &select_isa);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("supported_isas", &supported);
  m.def("why_no_tiles", &why_no_tiles);
  bind_bandwidth(m);
  bind_sealed(m);
}
