// When the threads of the expert service passed the points of their rounds: a diagnostic, off unless asked for.
//
// Rows of int64 in the caller's memory, one a round, the newest over the oldest: bytes asked for, when the leader saw
// the request, when it was answered, then kRoundPoints times for each thread; nanoseconds of the steady clock.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace headrace {

// Points of a thread: sees the round; then for each phase: has nothing left to take, sees all of it complete. Nobody
// waits for the last phase.
constexpr int kRoundPoints = 6;
constexpr int kRoundHead = 3;

class RoundLog {
 public:
  // rows: int64 [rounds, kRoundHead + kRoundPoints * threads], kept by the caller until `stop` and a round more.
  void start(int64_t* rows, int64_t rounds, int threads) {
    rounds_ = rounds;
    width_ = kRoundHead + kRoundPoints * threads;
    rows_.store(rows, std::memory_order_release);
  }
  void stop() { rows_.store(nullptr, std::memory_order_release); }

  void head(uint64_t round, int at, int64_t value) {
    if (int64_t* rows = rows_.load(std::memory_order_relaxed)) row(rows, round)[at] = value;
  }
  void note(uint64_t round, int worker, int point) {
    if (int64_t* rows = rows_.load(std::memory_order_relaxed)) row(rows, round)[kRoundHead + kRoundPoints * worker + point] = now();
  }
  static int64_t now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  int64_t* row(int64_t* rows, uint64_t round) const { return rows + static_cast<int64_t>(round) % rounds_ * width_; }

  std::atomic<int64_t*> rows_{nullptr};
  int64_t rounds_ = 1, width_ = 0;
};

}  // namespace headrace
