// Which open items of a request the CPU takes, and what it tells the GPU of it (expert_service.h).
//
// One thread at a time asks (`take`); the leader begins and closes a request before others see it.
#pragma once
#include <atomic>
#include <cstdint>

#include "expert_compute.h"
#include "expert_service.h"
#include "round_log.h"

namespace headrace {

class OpenItems {
 public:
  explicit OpenItems(const ServiceBlock& block) : block_(block) {}

  void set_taking(Taking which) { taking_.store(which); }

  // A request with so many open items and fetches, whose gate and up rows begin at `gate_ns` unless `gate_begins` says
  // otherwise.
  void begin(int32_t seq, int64_t open, int64_t fetches, int64_t gate_ns) {
    seq_ = seq;
    open_ = open;
    fetches_ = fetches;
    gate_began_.store(gate_ns, std::memory_order_relaxed);
  }
  void gate_begins() { gate_began_.store(RoundLog::now(), std::memory_order_relaxed); }

  // Nothing will be taken.
  void close() const {
    if (open_ > 0) tell(0, true);
  }

  // See Taker.
  bool take(const TakeQuestion& q) {
    const Taking which = taking_.load(std::memory_order_relaxed);
    const bool yes = which == Taking::all || (which == Taking::by_pace && ends_first(q));
    tell(q.taken + (yes ? 1 : 0), !yes || q.taken + 1 == open_);
    return yes;
  }

 private:
  // From the last fetched byte to the sum of what the GPU computed of it, less the answer's way to the GPU (H200 machine).
  static constexpr double kFetchedNs = 11000.0;
  // `pace` is seq << 32 | what is left << 16 | a slice, in these nanoseconds.
  static constexpr double kLeftNs = 64.0, kSliceNs = 32.0;
  static constexpr uint32_t kClosed = 1u << 7;

  void tell(int64_t taken, bool closed) const {
    const uint32_t value = static_cast<uint32_t>(seq_) << 8 | (closed ? kClosed : 0u) | static_cast<uint32_t>(taken);
    at<int32_t>(block_.taken).store(static_cast<int32_t>(value), std::memory_order_release);
  }

  // Whether the CPU would be done with one more item before the GPU is with all that it has left.
  bool ends_first(const TakeQuestion& q) {
    const auto spent = static_cast<double>(RoundLog::now() - gate_began_.load(std::memory_order_relaxed));
    const double more = spent * q.more / q.done;
    const double cpu_ns = more + (spent + more) * q.down_share;
    const uint64_t pace = at<uint64_t>(block_.pace).load(std::memory_order_relaxed);
    double left_ns = static_cast<double>(fetches_) * slice_ns_;  // nothing has been fetched yet
    if (static_cast<uint32_t>(pace >> 32) == static_cast<uint32_t>(seq_)) {
      slice_ns_ = kSliceNs * static_cast<double>(pace & 0xffff);
      left_ns = kLeftNs * static_cast<double>((pace >> 16) & 0xffff);
    }
    // What was taken already is not left any more.
    left_ns -= static_cast<double>(q.taken) * slice_ns_;
    return left_ns > 0.0 && cpu_ns < left_ns + kFetchedNs;
  }

  template <class T> std::atomic_ref<T> at(int64_t offset) const {
    return std::atomic_ref<T>(*reinterpret_cast<T*>(block_.memory + offset));
  }

  const ServiceBlock block_;
  int32_t seq_ = 0;
  int64_t open_ = 0, fetches_ = 0;
  double slice_ns_ = 0.0;  // that the GPU last took to fetch one
  std::atomic<int64_t> gate_began_{0};
  std::atomic<Taking> taking_{Taking::by_pace};
};

}  // namespace headrace
