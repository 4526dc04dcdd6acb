#include "bandwidth.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "affinity.h"
#include "dispatch.h"
#include "kernels.h"
#include "spin.h"

namespace nb = nanobind;
using namespace headrace;
using Clock = std::chrono::steady_clock;

namespace {

// Read between two looks at the clock: some tens of microseconds.
constexpr int64_t kPiece = 256 * 1024;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Each of `threads` threads reads its own part of the range again and again for `seconds`; bytes a
// second over all. They start together, and bytes count up to the moment when the time is over.
double read_bandwidth(const uint8_t* data, int64_t nbytes, int threads, const std::vector<int>& cpus, double seconds) {
  if (threads < 1 || nbytes < threads * kPiece) throw std::invalid_argument("read_bandwidth: too little to read");
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::atomic<int64_t> total{0};
  std::atomic<float> most{0.0f};  // uses what was read
  Clock::time_point start;
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      if (!cpus.empty()) stay_on(cpus[static_cast<size_t>(t) % cpus.size()]);
      const int64_t first = nbytes / threads * t / 64 * 64, last = nbytes / threads * (t + 1) / 64 * 64;
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) relax();
      int64_t done = 0;
      float seen = 0.0f;
      for (int64_t at = first; seconds_since(start) < seconds; at += kPiece) {
        if (at + kPiece > last) at = first;
        seen = std::max(seen, kernels().read(data + at, kPiece));
        done += kPiece;
      }
      total.fetch_add(done);
      most.store(seen, std::memory_order_relaxed);
    });
  while (ready.load() != threads) std::this_thread::yield();
  start = Clock::now();
  go.store(true, std::memory_order_release);
  for (std::thread& w : workers) w.join();
  return static_cast<double>(total.load()) / seconds_since(start);
}

// Stores each new value of *seq to *ack, `count` times or until nothing comes for `timeout` seconds;
// the number of answers given.
int64_t answer_flags(const int32_t* seq, int32_t* ack, int64_t count, double timeout) {
  int32_t seen = __atomic_load_n(ack, __ATOMIC_RELAXED);
  Clock::time_point last = Clock::now();
  for (int64_t done = 0; done < count; ++done) {
    int32_t now;
    for (int turn = 0; (now = __atomic_load_n(seq, __ATOMIC_ACQUIRE)) == seen; ++turn) {
      relax();
      if (turn % 1024 == 1023 && seconds_since(last) > timeout) return done;
    }
    seen = now;
    __atomic_store_n(ack, now, __ATOMIC_RELEASE);
    if (done % 64 == 0) last = Clock::now();
  }
  return count;
}

}  // namespace

void bind_bandwidth(nb::module_& m) {
  m.def("read_bandwidth", [](uintptr_t data, int64_t nbytes, int threads, const std::vector<int>& cpus, double seconds) {
    const nb::gil_scoped_release lock;
    return read_bandwidth(reinterpret_cast<const uint8_t*>(data), nbytes, threads, cpus, seconds);
  });
  m.def("answer_flags", [](uintptr_t seq, uintptr_t ack, int64_t count, double timeout) {
    const nb::gil_scoped_release lock;
    return answer_flags(reinterpret_cast<const int32_t*>(seq), reinterpret_cast<int32_t*>(ack), count, timeout);
  });
}
