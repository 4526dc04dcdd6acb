#include "expert_compute.h"

#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "linear.h"

namespace headrace {
namespace {

constexpr int64_t kUnitColumns = 4;  // columns of the intermediate dimension that stay together
constexpr int64_t kHiddenUnit = 4;   // rows of down that stay together, as the products take them
constexpr int64_t kStripRows = 64;    // rows computed before their results are used: one block of columns
constexpr int64_t kStripTokens = 32;
// What a unit costs with n tokens, so that workers are given equal shares: max(kReadCost, n * kTokenCost) or, with tiles,
// kTiledCost + n. Two tokens take 1.1 times as long as one, whose rows have to be read; 4, 8 and 16 take 1.6, 2.5 and
// 4.7 times as long, with tiles 8 and 16 take 1.9 and 3 times (MXFP4, 15 threads of a Sapphire Rapids, 2026-11).
constexpr int64_t kReadCost = 10, kTokenCost = 3, kTiledCost = 14;
constexpr int64_t kTermAlignment = 64;
// The smallest pieces of work: 5 us of a thread's reading, 24 KB of MXFP4 in gate and up and, with some ten items, about as
// many in down. Smaller ones end closer together but read worse.
constexpr int64_t kLeastUnits = 2, kLeastHiddenUnits = 2;
constexpr int64_t kQuantisePiece = 3;  // blocks

int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

ExpertCompute::ExpertCompute(const std::vector<SlabLayout>& layouts, int64_t num_experts, Gate act,
                             const ExpertSizes& sizes, int threads)
    : layout_(layouts.at(0)), num_experts_(num_experts), act_(act), sizes_(sizes), threads_(threads),
      units_((layout_.width + kUnitColumns - 1) / kUnitColumns), blocks_((layout_.width + kTermBlock - 1) / kTermBlock),
      work_{SharedWork(threads), SharedWork(threads), SharedWork(threads)} {
  const int64_t rows = sizes.pairs * layout_.num_slices;
  items_.reserve(static_cast<size_t>(sizes.items));
  between_.resize(static_cast<size_t>(rows * layout_.width));
  const auto any = [&](Format f, bool down) {
    return std::any_of(layouts.begin(), layouts.end(), [&](const SlabLayout& l) { return (down ? l.down_format : l.format) == f; });
  };
  int64_t nbytes = 0;
  const auto region = [&](Format f, bool down) {
    const int64_t at = nbytes;
    if (!any(f, down)) return int64_t{-1};
    nbytes += down ? rows * term_nbytes(f, layout_.width) : sizes.tokens * term_nbytes(f, layout_.hidden);
    return at;
  };
  const int64_t at[4] = {region(Format::mxfp4, false), region(Format::q4_k, false), region(Format::mxfp4, true),
                         region(Format::q4_k, true)};
  if (nbytes != 0) {
    term_memory_.resize(static_cast<size_t>(nbytes + kTermAlignment));  // zero, and padding stays so
    const auto address = reinterpret_cast<uintptr_t>(term_memory_.data());
    uint8_t* start = term_memory_.data() + (up(static_cast<int64_t>(address), kTermAlignment) - static_cast<int64_t>(address));
    uint8_t** to[4] = {&x_rows_.pairs, &x_rows_.split, &act_rows_.pairs, &act_rows_.split};
    for (int i = 0; i < 4; ++i)
      if (at[i] >= 0) *to[i] = start + at[i];
  }
  if (kernels().tiles != nullptr)
    tiles_ = std::make_unique<ExpertTiles>(layout_.hidden, layout_.width, threads);
  if (nbytes != 0 || tiles_ != nullptr)
    done_ = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(sizes.items * blocks_));
  // results of a tile, gate and up of 32 columns, four expanded rows
  scratch_each_ = up(expanded_at() + 4 * padded(std::max(layout_.hidden, layout_.width)), 16);
  scratch_.resize(static_cast<size_t>(threads * scratch_each_));
}

void ExpertCompute::use(const SlabLayout& layout) {
  layout_ = layout;
  x_has_terms_ = has_terms(layout.format);
  act_has_terms_ = has_terms(layout.down_format);
  factors_ = layout.gate_up_factors.offset >= 0;
  x_nbytes_ = x_has_terms_ ? term_nbytes(layout.format, layout.hidden) : 0;
  act_nbytes_ = act_has_terms_ ? term_nbytes(layout.down_format, layout.width) : 0;
  x_terms_ = layout.format == Format::mxfp4 ? x_rows_.pairs : x_rows_.split;
  act_terms_ = layout.down_format == Format::mxfp4 ? act_rows_.pairs : act_rows_.split;
}

int64_t ExpertCompute::expanded_at() const { return kStripTokens * kStripRows + 2 * kTermBlock; }

ExpertFault ExpertCompute::check(const ExpertRequest& r) const {
  if (r.tokens < 1 || r.tokens > sizes_.tokens) return ExpertFault::tokens;
  if (r.items < 0 || r.items > sizes_.items) return ExpertFault::items;
  if (r.pairs < 0 || r.pairs > sizes_.pairs) return ExpertFault::pairs;
  for (int64_t p = 0; p < r.pairs; ++p)
    if (r.pair_token[p] < 0 || r.pair_token[p] >= r.tokens) return ExpertFault::token;
  int64_t before = -1, rows = 0;
  for (int64_t i = 0; i < r.items; ++i) {
    const int32_t* item = r.item + 4 * i;
    if (item[0] < 0 || item[0] >= num_experts_) return ExpertFault::expert;
    if (item[1] < 0 || item[1] >= layout_.num_slices) return ExpertFault::slice;
    const int64_t key = item[0] * layout_.num_slices + item[1];
    if (key <= before) return ExpertFault::order;
    before = key;
    if (item[2] < 0 || item[3] < 0 || static_cast<int64_t>(item[2]) + item[3] > r.pairs) return ExpertFault::range;
    for (int32_t p = item[2] + 1; p < item[2] + item[3]; ++p)
      if (r.pair_token[p] <= r.pair_token[p - 1]) return ExpertFault::order;
    rows += item[3];
  }
  return rows > sizes_.pairs * layout_.num_slices ? ExpertFault::too_many : ExpertFault::none;
}

ExpertFault ExpertCompute::plan(const ExpertRequest& r) {
  use(*r.layout);
  if (const ExpertFault fault = check(r); fault != ExpertFault::none) return fault;
  request_ = r;
  kernels_ = &kernels();
  expert_kernels_ = &expert_kernels();
  items_.clear();
  total_cost_ = 0;
  const TileKernels* tiles = tiles_ != nullptr ? kernels_->tiles : nullptr;
  if (tiles != nullptr) tiles_->begin(*tiles, layout_.format, layout_.down_format, tile_use_);
  tiled_ = false;
  all_tiled_ = true;
  int64_t row = 0;
  for (int64_t i = 0; i < r.items; ++i) {
    const int32_t* item = r.item + 4 * i;
    if (item[3] == 0) continue;  // nobody's: it adds nothing
    const uint8_t* at = r.base + (item[0] * layout_.num_slices + item[1]) * layout_.slice_nbytes;
    TiledItem tiled;
    if (const TileWay way = tiles != nullptr ? tiles_->way(r.tokens, item[3]) : TileWay::none; way != TileWay::none)
      tiled = tiles_->add(way, item[2], item[3]);
    tiled_ |= tiled.used();
    all_tiled_ &= tiled.used();
    const int64_t cost = tiled.used() ? kTiledCost + item[3] : std::max<int64_t>(kReadCost, kTokenCost * item[3]);
    items_.push_back({slice_view(layout_, at), at, item[2], item[3], row, cost, total_cost_, tiled});
    row += item[3];
    total_cost_ += cost * units_;
  }
  if (tiled_) tiles_->reserve();
  share();
  if (act_has_terms_ || tiled_)
    for (int64_t i = 0; i < static_cast<int64_t>(items_.size()) * blocks_; ++i)
      done_[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
  return ExpertFault::none;
}

// Who begins with what. Tiles first in the first phase, then blocks of terms.
void ExpertCompute::share() {
  const int64_t terms = x_has_terms_ && !all_tiled_ && !request_.prepared ? request_.tokens * (layout_.hidden / kTermBlock) : 0;
  const int64_t inputs = terms + (tiled_ ? tiles_->input_units() : 0);
  work_[kQuantise].plan(inputs, [&](int worker) { return inputs * worker / threads_; });
  work_[kGateUp].plan(static_cast<int64_t>(items_.size()) * units_, [&](int worker) { return unit_cut(worker); });
  const int64_t units = (layout_.hidden + kHiddenUnit - 1) / kHiddenUnit;
  work_[kDown].plan(units, [&](int worker) { return units * worker / threads_; });
}

// The first unit of columns that is not of the workers before `worker`: equal costs for all.
int64_t ExpertCompute::unit_cut(int worker) const {
  const auto count = static_cast<int64_t>(items_.size());
  if (count == 0) return 0;
  const int64_t target = total_cost_ * worker / threads_;
  int64_t i = count - 1;
  while (i > 0 && items_[static_cast<size_t>(i)].cost_before > target) --i;
  const Item& item = items_[static_cast<size_t>(i)];
  return i * units_ + std::min(units_, (target - item.cost_before) / item.cost);
}

// Row of down where a worker begins, unless others have helped it by then.
int64_t ExpertCompute::hidden_cut(int worker) const {
  return std::min(layout_.hidden - 1, work_[kDown].begin_of(worker) * kHiddenUnit);
}

bool ExpertCompute::run(Phase phase, int worker) {
  const int64_t done = phase == kQuantise ? quantise(worker) : phase == kGateUp ? gate_up(worker) : down(worker);
  const bool last = work_[phase].finish(done);
  if (phase != kDown) ask_first_rows(static_cast<Phase>(phase + 1), worker, reading_.far_nbytes);
  return last;
}

// What a worker will read first in a phase: it travels while the one before is completed by all.
void ExpertCompute::ask_first_rows(Phase phase, int worker, int64_t nbytes) const {
  const int64_t unit = work_[phase].begin_of(worker), i = phase == kGateUp ? unit / units_ : 0;
  if (i >= static_cast<int64_t>(items_.size())) return;
  const SliceView& slice = items_[static_cast<size_t>(i)].slice;
  const uint8_t* p = phase == kGateUp ? slice.gate_up.data + 2 * (unit % units_) * kUnitColumns * slice.gate_up.row_nbytes
                                      : slice.down.data + hidden_cut(worker) * slice.down.row_nbytes;
  for (int64_t at = 0; at < nbytes; at += 64) __builtin_prefetch(p + at, 0, 2);  // into the L2 cache
}

int64_t ExpertCompute::quantise(int worker) {
  ask_first_rows(kGateUp, worker, reading_.near_nbytes);
  const int64_t tiles = tiled_ ? tiles_->input_units() : 0;
  int64_t done = 0;
  const auto piece = [](int64_t, int64_t left) { return std::min(kQuantisePiece, left); };
  for (UnitRange r{}; work_[kQuantise].take(worker, piece, r); done += r.size()) {
    if (r.first < tiles) tiles_->pack_inputs(request_.x, request_.pair_token, r.first, std::min(r.last, tiles));
    if (r.last > tiles) quantise_blocks(std::max(r.first, tiles) - tiles, r.last - tiles);
  }
  return done;
}

void ExpertCompute::quantise_ahead(const SlabLayout& layout, const float* x) {
  use(layout);
  if (!x_has_terms_) return;
  const ExpertKernels& k = expert_kernels();
  for (int64_t b = 0; b < layout.hidden / kTermBlock; ++b) k.quantise(x + b * kTermBlock, layout.format, x_terms(0), b);
}

void ExpertCompute::quantise_blocks(int64_t first, int64_t last) {
  const int64_t blocks = layout_.hidden / kTermBlock;
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = i / blocks, b = i % blocks;
    expert_kernels_->quantise(request_.x + token * layout_.hidden + b * kTermBlock, layout_.format, x_terms(token), b);
  }
}

// Rows [row0, row0 + rows) of `m` times pairs [pair0, pair0 + pairs) of the item: out[j * kStripRows + row]. Tiles are
// expanded for the first pairs and stay at their `place` for the others.
void ExpertCompute::product(const Matrix& m, int64_t row0, int64_t rows, const Item& item, int64_t pair0, int64_t pairs,
                            bool gate_up, float* out, const Ahead& ahead, int worker, int place) {
  float* to[kStripTokens];
  for (int64_t j = 0; j < pairs; ++j) to[j] = out + j * kStripRows;
  if (item.tiled.used()) {
    if (item.tiled.way != TileWay::whole) {
      const uint8_t* next = pair0 != 0 ? nullptr : ahead.rows > rows ? m.data + (row0 + rows) * m.row_nbytes : ahead.next;
      tiles_->multiply_at_once(m, row0, rows, item.tiled, gate_up, pair0, pairs, to, next);
      return;
    }
    if (pair0 == 0) tiles_->expand(m, row0, rows, worker, place);
    tiles_->multiply(m, rows, item.tiled, gate_up, pair0, pairs, to, worker, place);
    return;
  }
  const int32_t* token = request_.pair_token + item.first + pair0;
  if (gate_up ? x_has_terms_ : act_has_terms_) {
    const uint8_t* x[kStripTokens];
    for (int64_t j = 0; j < pairs; ++j) x[j] = gate_up ? x_terms(token[j]) : act_terms(item.row + pair0 + j);
    expert_kernels_->dot(m, row0, rows, x, pairs, to, ahead, reading_);
    return;
  }
  const float* x[kStripTokens];
  for (int64_t j = 0; j < pairs; ++j)
    x[j] = gate_up ? request_.x + token[j] * layout_.hidden : &between_[static_cast<size_t>((item.row + pair0 + j) * layout_.width)];
  float* expanded = scratch(worker) + expanded_at();
  tile_product(*kernels_, m, row0, rows, x, pairs, to, expanded);
}

// Bias, activation: `rows` holds gate and up of n columns from c0 on, in turn or, with factors, apart.
void ExpertCompute::finish(const Item& item, int64_t pair, int64_t c0, int64_t n, const float* rows, int worker) {
  float *gate = scratch(worker) + kStripTokens * kStripRows, *up = gate + kTermBlock;
  const float* bias = item.slice.gate_up_bias == nullptr ? nullptr : item.slice.gate_up_bias + 2 * c0;
  const int64_t step = factors_ ? 1 : 2, apart = factors_ ? kTermBlock : 1;
  for (int64_t i = 0; i < n; ++i) {
    gate[i] = rows[step * i] + (bias == nullptr ? 0.0f : bias[2 * i]);
    up[i] = rows[step * i + apart] + (bias == nullptr ? 0.0f : bias[2 * i + 1]);
  }
  float* to = &between_[static_cast<size_t>((item.row + pair) * layout_.width + c0)];
  kernels_->activate(gate, up, n, act_.kind, act_.alpha, act_.limit, to);
}

// Whoever completes a block of columns quantises or packs it for all of the item's tokens.
void ExpertCompute::completed(int64_t index, int64_t c0, int64_t c1) {
  const Item& item = items_[static_cast<size_t>(index)];
  const int64_t b = c0 / kTermBlock;
  const auto n = static_cast<int32_t>(c1 - c0);
  if (done_[static_cast<size_t>(index * blocks_ + b)].fetch_add(n, std::memory_order_acq_rel) + n !=
      std::min(kTermBlock, layout_.width - b * kTermBlock)) return;
  if (item.tiled.used()) {
    tiles_->pack_between(item.tiled, item.pairs, b, &between_[static_cast<size_t>(item.row * layout_.width)]);
    return;
  }
  for (int64_t j = 0; j < item.pairs; ++j)
    expert_kernels_->quantise(&between_[static_cast<size_t>((item.row + j) * layout_.width + b * kTermBlock)],
                              layout_.down_format, act_terms(item.row + j), b);
}

// Columns [c0, c1) of one block, of a stretch that this worker computes up to `last`.
void ExpertCompute::columns(const Item& item, int64_t c0, int64_t c1, int64_t last, const uint8_t* next, int worker) {
  for (int64_t j = 0; j < item.pairs; j += kStripTokens) {
    const int64_t n = std::min(kStripTokens, item.pairs - j);
    float* rows = scratch(worker);
    if (factors_) {  // gate and up have their own
      product(item.slice.gate, c0, c1 - c0, item, j, n, true, rows, {last - c0, nullptr}, worker);
      product(item.slice.up, c0, c1 - c0, item, j, n, true, rows + kTermBlock, {last - c0, nullptr}, worker, 1);
    } else {
      product(item.slice.gate_up, 2 * c0, 2 * (c1 - c0), item, j, n, true, rows, {2 * (last - c0), next}, worker);
    }
    for (int64_t t = 0; t < n; ++t) finish(item, j + t, c0, c1 - c0, rows + t * kStripRows, worker);
  }
}

int64_t ExpertCompute::gate_up(int worker) {
  constexpr int64_t kBlockUnits = kTermBlock / kUnitColumns;
  const auto count = static_cast<int64_t>(items_.size());
  int64_t done = 0;
  // Pieces end with a block of columns; the last ones of a range are smaller, so that all end together. Several
  // tokens take whole blocks: what is expanded for the first serves the others.
  const auto piece = [&](int64_t first, int64_t left) {
    const int64_t u = first % units_, whole = std::min(units_ - u, kBlockUnits - u % kBlockUnits);
    const bool many = items_[static_cast<size_t>(first / units_)].pairs > 1;
    return many ? whole : std::min(whole, std::max(kLeastUnits, left / 2));
  };
  for (UnitRange r{}; work_[kGateUp].take(worker, piece, r); done += r.size()) {
    const int64_t i = r.first / units_, before = i * units_;
    const Item& item = items_[static_cast<size_t>(i)];
    const int64_t c0 = (r.first - before) * kUnitColumns, c1 = std::min(layout_.width, (r.last - before) * kUnitColumns);
    const int64_t last = std::min(layout_.width, (r.end - before) * kUnitColumns);
    const Matrix& down = items_[0].slice.down;
    const uint8_t* next = r.end > before + units_ && i + 1 < count ? items_[static_cast<size_t>(i + 1)].slice.gate_up.data
                                                                   : down.data + hidden_cut(worker) * down.row_nbytes;
    columns(item, c0, c1, last, next, worker);
    if (act_has_terms_ || item.tiled.used()) completed(i, c0, c1);
  }
  return done;
}

int64_t ExpertCompute::down(int worker) {
  int64_t done = 0;
  const auto piece = [](int64_t, int64_t left) { return std::min(kStripRows / kHiddenUnit, std::max(kLeastHiddenUnits, left / 2)); };
  for (UnitRange r{}; work_[kDown].take(worker, piece, r); done += r.size())
    down_rows(r.first * kHiddenUnit, std::min(layout_.hidden, r.last * kHiddenUnit), std::min(layout_.hidden, r.end * kHiddenUnit), worker);
  return done;
}

// Rows [h0, h1), at most kStripRows, of all items; rows up to `end` will follow.
void ExpertCompute::down_rows(int64_t h0, int64_t h1, int64_t end, int worker) {
  const int64_t hidden = layout_.hidden, n = h1 - h0;
  for (int64_t t = 0; t < request_.tokens; ++t) std::fill(request_.out + t * hidden + h0, request_.out + t * hidden + h1, 0.0f);
  float* rows = scratch(worker);
  const size_t count = items_.size();
  for (size_t i = 0; i < count; ++i) {
    const Item& item = items_[i];
    const Matrix& m = item.slice.down;
    const uint8_t* next = i + 1 < count ? items_[i + 1].slice.down.data + h0 * m.row_nbytes
                          : h1 < end    ? items_[0].slice.down.data + h1 * m.row_nbytes
                                        : nullptr;
    for (int64_t j = 0; j < item.pairs; j += kStripTokens) {
      const int64_t pairs = std::min(kStripTokens, item.pairs - j);
      product(m, h0, n, item, j, pairs, false, rows, {n, next}, worker);
      for (int64_t t = 0; t < pairs; ++t) {
        float* y = rows + t * kStripRows;
        if (item.slice.down_bias != nullptr)
          for (int64_t r = 0; r < n; ++r) y[r] += item.slice.down_bias[h0 + r];
        const int64_t p = item.first + j + t;
        kernels_->axpy(request_.pair_weight[p], y, n, request_.out + request_.pair_token[p] * hidden + h0);
      }
    }
  }
}

float ExpertCompute::read(int worker) {
  const int64_t lines = layout_.slice_nbytes / 64, all = lines * static_cast<int64_t>(items_.size());
  int64_t at = all * worker / threads_;
  const int64_t end = all * (worker + 1) / threads_;
  float most = 0.0f;
  while (at < end) {
    const int64_t line = at % lines, n = std::min(lines - line, end - at);
    most = std::max(most, kernels_->read(items_[static_cast<size_t>(at / lines)].address + 64 * line, 64 * n));
    at += n;
  }
  return most;
}

}  // namespace headrace
