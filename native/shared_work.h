// The units of one phase, shared by threads: each has a range of its own, and helps the slowest when it is done.
//
// A range of its own keeps a thread reading memory in sequence. Helping is what makes a phase end for all at the
// same time: a thread may be late (its CPU served another one), or slow (two of them share a core). Who computes
// a unit does not change its bits.
//
// A slot holds the first and the end of what is left of a range, in one word. Threads take from its front and
// helpers from its back, both by compare-and-swap: a slot that still has the value that was read still has those
// units, so that no unit is given twice, whatever happened in between. What the units stand for is published by
// whoever called `plan`, and their results by `finish` and `complete`; the slots themselves need no order.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace headrace {

struct UnitRange {
  int64_t first, last;  // to do now
  int64_t end;          // of the range that they were taken from: what will probably follow
  int64_t size() const { return last - first; }
};

class SharedWork {
 public:
  explicit SharedWork(int threads) : threads_(threads), slots_(std::make_unique<Slot[]>(static_cast<size_t>(threads))) {}

  // All units are [0, total), total < 2^31; cut(w) is where thread w's begin, cut(threads) is total. Nobody may be at
  // work meanwhile.
  template <class Cut> void plan(int64_t total, const Cut& cut) {
    total_ = total;
    done_.store(0, std::memory_order_relaxed);
    int64_t first = 0;
    for (int w = 0; w < threads_; ++w) {
      const int64_t end = w + 1 == threads_ ? total : cut(w + 1);
      slots_[static_cast<size_t>(w)].left.store(packed(first, end), std::memory_order_relaxed);
      first = end;
    }
  }

  // The next units for a thread; false if nothing is left that nobody has taken. `most(first, left)` is how many of
  // `left` units from `first` on make a piece, at least one.
  template <class Most> bool take(int worker, const Most& most, UnitRange& taken) {
    std::atomic<uint64_t>& own = slots_[static_cast<size_t>(worker)].left;
    uint64_t seen = own.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t first = first_of(seen), end = end_of(seen);
      if (first >= end) {
        if (!helps_.load(std::memory_order_relaxed) || !help(worker)) return false;
        seen = own.load(std::memory_order_relaxed);
        continue;
      }
      const int64_t n = std::min(end - first, std::max<int64_t>(1, most(first, end - first)));
      if (!own.compare_exchange_weak(seen, packed(first + n, end), std::memory_order_relaxed)) continue;
      taken = {first, first + n, end};
      return true;
    }
  }

  // A thread that gets no more has done so many units; true for the one that thereby ends the phase.
  bool finish(int64_t units) {
    return units != 0 && done_.fetch_add(units, std::memory_order_acq_rel) + units == total_;
  }
  bool complete() const { return done_.load(std::memory_order_acquire) == total_; }
  int64_t begin_of(int worker) const { return first_of(slots_[static_cast<size_t>(worker)].left.load(std::memory_order_relaxed)); }
  void set_helping(bool on) { helps_.store(on, std::memory_order_relaxed); }

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> left{0};
  };
  static uint64_t packed(int64_t first, int64_t end) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end); }
  static int64_t first_of(uint64_t slot) { return static_cast<int64_t>(slot >> 32); }
  static int64_t end_of(uint64_t slot) { return static_cast<int64_t>(slot & 0xffffffffu); }

  // Moves half of the longest range into the thread's own slot, which is empty, so that nobody else writes it.
  bool help(int worker) {
    for (;;) {
      int slowest = -1;
      uint64_t most = 0;
      for (int w = 0; w < threads_; ++w) {
        const uint64_t left = slots_[static_cast<size_t>(w)].left.load(std::memory_order_relaxed);
        if (end_of(left) - first_of(left) > std::max<int64_t>(0, end_of(most) - first_of(most))) {
          slowest = w;
          most = left;
        }
      }
      if (slowest < 0) return false;
      const int64_t first = first_of(most), end = end_of(most), half = (end - first + 1) / 2;
      if (!slots_[static_cast<size_t>(slowest)].left.compare_exchange_strong(most, packed(first, end - half), std::memory_order_relaxed)) continue;
      slots_[static_cast<size_t>(worker)].left.store(packed(end - half, end), std::memory_order_relaxed);
      return true;
    }
  }

  const int threads_;
  std::unique_ptr<Slot[]> slots_;
  int64_t total_ = 0;
  std::atomic<bool> helps_{true};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace headrace
