// The work of one request to the CPU's experts: slices of experts for the tokens that use them.
//
//   plan       checks the request and cuts the work, on one thread
//   quantise   activation rows into two int8 terms per block, once (MXFP4, Q4_K), or into tiles
//   gate_up    gate and up rows, activation; workers share the rows of all items
//   down       down rows, weighted and summed; workers share the hidden dimension
//
// Every worker calls the three phases in order; a phase begins when the one before is complete, which does not take
// every worker: those that are there do the work of those that are late (shared_work.h). Results depend neither
// on who computes what nor on the number of workers nor, in requests of up to 16 tokens, on other tokens and items: a row is one sum in fixed
// order, and a token's items are added in the order in which they stand (expert, slice). Several
// tokens of an item use tiles where the CPU has them: exact ones there (block_tiles.h), others in larger requests (tiles.h).
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "expert_kernels.h"
#include "expert_slab.h"
#include "expert_tiles.h"
#include "kernels.h"
#include "ops.h"
#include "shared_work.h"

namespace headrace {

// Why a request is refused; also what the service stores in `abort`. Numbered as
// headrace/ops/cpu/expert_service.py has it.
enum class ExpertFault : int32_t {
  none = 0, host = 1, layer = 2, tokens = 3, items = 4, pairs = 5, expert = 6, slice = 7, order = 8, range = 9,
  token = 10, too_many = 11, worker = 12, stalled = 13, stopped = 14
};

struct ExpertSizes {
  int64_t tokens, items, pairs;  // most of one request
};

struct ExpertRequest {
  const SlabLayout* layout;  // the layer's, one of those that the computer was made for
  const uint8_t* base;       // the layer's first slab
  int64_t tokens, items, pairs;
  const int32_t* item;  // [items, 4]: expert, slice, first pair, pairs; strictly ascending by (expert, slice)
  const int32_t* pair_token;
  const float* pair_weight;
  const float* x;  // [tokens, hidden]
  float* out;      // [tokens, hidden]
  bool prepared = false;  // quantise_ahead has been called with this layout and x
};

class ExpertCompute {
 public:
  // layouts: of every layer, at least one; they differ in formats, not in dimensions.
  ExpertCompute(const std::vector<SlabLayout>& layouts, int64_t num_experts, Gate act, const ExpertSizes& sizes,
                int threads);

  enum Phase : int { kQuantise = 0, kGateUp = 1, kDown = 2 };
  static constexpr int kPhases = 3;

  // No worker may be inside a phase or may still enter one of the request before.
  ExpertFault plan(const ExpertRequest& request);
  // What kQuantise does for a request of one token, before it is known; under the same condition as `plan`.
  void quantise_ahead(const SlabLayout& layout, const float* x);
  // Computes until nothing is left to be taken; others may still be at work then. True for the worker that
  // completed the phase.
  bool run(Phase phase, int worker);
  bool complete(Phase phase) const { return work_[phase].complete(); }
  // Instead of the phases: reads all bytes of the items, as a yardstick.
  float read(int worker);

  int threads() const { return threads_; }
  int64_t nbytes() const { return static_cast<int64_t>(items_.size()) * layout_.slice_nbytes; }
  void set_reading(const Reading& r) { reading_ = r; }
  void set_tile_use(const TileUse& u) { tile_use_ = u; }
  // Whether workers without work take that of others; between requests.
  void set_helping(bool on) {
    for (SharedWork& w : work_) w.set_helping(on);
  }

 private:
  struct Item {
    SliceView slice;
    const uint8_t* address;
    int64_t first, pairs;   // in pair_token and pair_weight
    int64_t row;            // first row of its activations
    int64_t cost;           // of one unit of its columns
    int64_t cost_before;    // of all items before it
    TiledItem tiled;
  };
  ExpertFault check(const ExpertRequest& r) const;
  void share();
  int64_t unit_cut(int worker) const;
  int64_t hidden_cut(int worker) const;
  void ask_first_rows(Phase phase, int worker, int64_t nbytes) const;
  int64_t quantise(int worker);
  void quantise_blocks(int64_t first, int64_t last);
  int64_t gate_up(int worker);
  int64_t down(int worker);
  void down_rows(int64_t h0, int64_t h1, int64_t end, int worker);
  void columns(const Item& item, int64_t c0, int64_t c1, int64_t last, const uint8_t* next, int worker);
  void finish(const Item& item, int64_t pair, int64_t c0, int64_t n, const float* rows, int worker);
  int64_t expanded_at() const;
  void completed(int64_t item, int64_t c0, int64_t c1);
  void product(const Matrix& m, int64_t row0, int64_t rows, const Item& item, int64_t pair0, int64_t pairs, bool gate_up,
               float* out, const Ahead& ahead, int worker, int place = 0);
  float* scratch(int worker) { return &scratch_[static_cast<size_t>(worker * scratch_each_)]; }
  uint8_t* x_terms(int64_t token) { return x_terms_ + token * x_nbytes_; }
  uint8_t* act_terms(int64_t row) { return act_terms_ + row * act_nbytes_; }
  void use(const SlabLayout& layout);

  SlabLayout layout_;  // of the request's layer
  const int64_t num_experts_;
  const Gate act_;
  const ExpertSizes sizes_;
  const int threads_;
  bool x_has_terms_ = false, act_has_terms_ = false, factors_ = false;
  int64_t x_nbytes_ = 0, act_nbytes_ = 0;  // bytes of a row of terms, or 0
  const int64_t units_, blocks_;
  Reading reading_;
  TileUse tile_use_;

  const Kernels* kernels_ = nullptr;
  const ExpertKernels* expert_kernels_ = nullptr;
  ExpertRequest request_{};
  std::vector<Item> items_;
  std::unique_ptr<ExpertTiles> tiles_;  // where there are any
  bool tiled_ = false;                  // some item of the request uses them
  bool all_tiled_ = false;
  int64_t total_cost_ = 0;
  SharedWork work_[kPhases];

  std::vector<float> between_;  // [rows, width]: activations of every (item, pair)
  std::unique_ptr<std::atomic<int32_t>[]> done_;  // [items, blocks]: columns of a block that are there
  // Rows of terms of x and of activations. Each format has its own: its padding is zero and stays so.
  struct Terms {
    uint8_t *pairs = nullptr, *split = nullptr;
  };
  std::vector<uint8_t> term_memory_;
  Terms x_rows_, act_rows_;
  uint8_t *x_terms_ = nullptr, *act_terms_ = nullptr;  // of the request's layer
  std::vector<float> scratch_;
  int64_t scratch_each_ = 0;
};

}  // namespace headrace
