// Paged attention over any cache. A key head's query heads go together, so that its keys and values are
// read once.
//
// Keys are taken in segments of kSegment at absolute positions, in ascending order; each segment is an
// online softmax of its own and the segments are merged in order. Whether one thread does them in turn
// or several side by side, a row's arithmetic is the same: it depends on its position alone.
#pragma once
#include <cmath>
#include <vector>

#include "linear.h"

namespace headrace {

inline constexpr int64_t kSegment = 4 * kKeyTile;
// Query rows (tokens x heads of a group) that share a pass over keys: about 64 KiB of state at 128
// dimensions, which leaves L2 to the keys.
inline constexpr int64_t kRowTile = 48;

struct AttentionTask {
  int64_t sequence, kv_head, first_row, rows;
};

struct AttentionState {
  std::vector<float> peak, total, acc;
  void reset(int64_t rows, int64_t head) {
    peak.assign(static_cast<size_t>(rows), -INFINITY);
    total.assign(static_cast<size_t>(rows), 0.0f);
    acc.assign(static_cast<size_t>(rows * head), 0.0f);
  }
};

// Everything one worker needs for one tile of rows; reused from task to task.
struct AttentionWorkspace {
  std::vector<float> q, scores, keys, values;
  std::vector<const float*> rows;
  std::vector<int64_t> first, last;
  AttentionState segment, total;
  const float* key_at[kKeyTile];
  const float* value_at[kKeyTile];
};

// Source says where keys lie: `heads`, `head`, rows_up_to(position): how many rows that end there may share a task, and
// gather(attention, task, key0, count, padded head, workspace).
template <class Source> class AttentionRunner {
 public:
  AttentionRunner(const Attention& a, const Source& c)
      : a_(a), c_(c), k_(kernels()), group_(a.heads / c.heads), head_((c.head + 15) / 16 * 16),
        workspaces_(static_cast<size_t>(Pool::instance().threads())) {}

  void run() {
    std::vector<AttentionTask> tasks;
    int64_t work = 0, longest = 0;
    const int64_t tokens = std::max<int64_t>(1, kRowTile / group_);
    for (int64_t s = 0; s < a_.sequences; ++s) {
      const int64_t r0 = a_.query_start[s], r1 = a_.query_start[s + 1];
      // Late rows see the most keys: give them out first, so that no thread ends with a long one.
      for (int64_t r = r1; r > r0;) {
        const int64_t n = std::min({tokens, r - r0, c_.rows_up_to(a_.positions[r - 1])});
        r -= n;
        for (int64_t h = 0; h < c_.heads; ++h) tasks.push_back({s, h, r, n});
        longest = std::max(longest, a_.positions[r + n - 1] / kSegment - first_key(r) / kSegment + 1);
        work += n * a_.heads * (a_.positions[r + n - 1] - first_key(r) + 1) * c_.head;
      }
    }
    const bool parallel = work > kSerialWork;
    Pool& pool = Pool::instance();
    const bool one_row_each = a_.query_start[a_.sequences] == a_.sequences;
    if (one_row_each && longest > 1 && static_cast<int64_t>(tasks.size()) < 4 * pool.threads()) {
      split_keys(tasks, longest, parallel);
      return;
    }
    pool.run(static_cast<int64_t>(tasks.size()), parallel, [&](int64_t i, int worker) {
      const AttentionTask& t = tasks[static_cast<size_t>(i)];
      AttentionWorkspace& w = workspaces_[static_cast<size_t>(worker)];
      load_rows(t, w);
      begin(t, w.total);
      for (int64_t s = first_key(t.first_row) / kSegment; s <= a_.positions[t.first_row + t.rows - 1] / kSegment; ++s) {
        w.segment.reset(t.rows * group_, head_);
        attend_segment(t, s, w, w.segment);
        merge(t, w.segment, w.total);
      }
      finish(t, w.total);
    });
  }

 private:
  int64_t first_key(int64_t row) const {
    return a_.window > 0 ? std::max<int64_t>(0, a_.positions[row] - a_.window + 1) : 0;
  }

  // Few long sequences of one row: segments go to different threads, and the caller merges them.
  void split_keys(const std::vector<AttentionTask>& tasks, int64_t segments, bool parallel) {
    std::vector<AttentionState> states(tasks.size() * static_cast<size_t>(segments));
    Pool::instance().run(static_cast<int64_t>(states.size()), parallel, [&](int64_t i, int worker) {
      const AttentionTask& t = tasks[static_cast<size_t>(i / segments)];
      const int64_t s = first_key(t.first_row) / kSegment + i % segments;
      AttentionState& state = states[static_cast<size_t>(i)];
      state.reset(t.rows * group_, head_);
      if (s > a_.positions[t.first_row] / kSegment) return;
      AttentionWorkspace& w = workspaces_[static_cast<size_t>(worker)];
      load_rows(t, w);
      attend_segment(t, s, w, state);
    });
    for (size_t i = 0; i < tasks.size(); ++i) {
      AttentionState& total = workspaces_[0].total;
      begin(tasks[i], total);
      for (int64_t s = 0; s < segments; ++s) merge(tasks[i], states[i * static_cast<size_t>(segments) + static_cast<size_t>(s)], total);
      finish(tasks[i], total);
    }
  }

  // A sink is a logit of the denominator only: the softmax starts from it.
  void begin(const AttentionTask& t, AttentionState& total) const {
    total.reset(t.rows * group_, head_);
    if (a_.sinks == nullptr) return;
    for (int64_t i = 0; i < t.rows * group_; ++i) {
      total.peak[static_cast<size_t>(i)] = a_.sinks[t.kv_head * group_ + i % group_];
      total.total[static_cast<size_t>(i)] = 1.0f;
    }
  }

  void load_rows(const AttentionTask& t, AttentionWorkspace& w) const {
    const int64_t n = t.rows * group_;
    w.q.assign(static_cast<size_t>(n * head_), 0.0f);
    w.rows.resize(static_cast<size_t>(n));
    w.first.resize(static_cast<size_t>(n));
    w.last.resize(static_cast<size_t>(n));
    w.scores.resize(static_cast<size_t>(n * kKeyTile));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = t.first_row + i / group_, h = t.kv_head * group_ + i % group_;
      const float* from = a_.q + (row * a_.heads + h) * c_.head;
      float* to = &w.q[static_cast<size_t>(i * head_)];
      for (int64_t d = 0; d < c_.head; ++d) to[d] = from[d] * a_.scale;
      w.rows[static_cast<size_t>(i)] = to;
      w.first[static_cast<size_t>(i)] = first_key(row);
      w.last[static_cast<size_t>(i)] = a_.positions[row];
    }
  }

  void attend_segment(const AttentionTask& t, int64_t segment, AttentionWorkspace& w, AttentionState& state) const {
    const int64_t first = first_key(t.first_row), last = a_.positions[t.first_row + t.rows - 1];
    const int64_t end = std::min((segment + 1) * kSegment, last + 1);
    const AttendRows rows{t.rows * group_, w.rows.data(), w.first.data(), w.last.data(), state.peak.data(),
                          state.total.data(), state.acc.data(), w.scores.data()};
    for (int64_t key = segment * kSegment; key < end; key += kKeyTile) {
      if (key + kKeyTile <= first) continue;
      const int64_t n = std::min(kKeyTile, end - key);
      c_.gather(a_, t, key, n, head_, w);
      k_.attend_tile(rows, key, n, w.key_at, w.value_at, head_);
    }
  }

  void merge(const AttentionTask& t, const AttentionState& from, AttentionState& to) const {
    for (int64_t i = 0; i < t.rows * group_; ++i) {
      const auto j = static_cast<size_t>(i), at = static_cast<size_t>(i * head_);
      k_.merge(&to.peak[j], &to.total[j], &to.acc[at], from.peak[j], from.total[j], &from.acc[at], head_);
    }
  }

  void finish(const AttentionTask& t, const AttentionState& total) const {
    for (int64_t i = 0; i < t.rows * group_; ++i) {
      const int64_t row = t.first_row + i / group_, h = t.kv_head * group_ + i % group_;
      float* out = a_.out + (row * a_.heads + h) * c_.head;
      const float* acc = &total.acc[static_cast<size_t>(i * head_)];
      const float scale = 1.0f / total.total[static_cast<size_t>(i)];
      for (int64_t d = 0; d < c_.head; ++d) out[d] = acc[d] * scale;
    }
  }

  const Attention& a_;
  const Source& c_;
  const Kernels& k_;
  int64_t group_, head_;
  std::vector<AttentionWorkspace> workspaces_;
};

}  // namespace headrace
