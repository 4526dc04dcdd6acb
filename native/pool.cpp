#include "pool.h"

#include <chrono>

#include "spin.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace headrace {
namespace {

// Longer than the gap that Python leaves between two operations of a layer (10 to 30 microseconds,
// measured 2026-11 on Zen 4), shorter than anything a neighbour process would notice.
constexpr std::chrono::microseconds kSpin{100};

std::atomic<int> g_fork_epoch{0};  // incremented in every child: threads do not survive a fork

// Keeps a worker off the caller's core. Left to itself the scheduler wakes both on one core, where they
// alternate by yielding, and finds that good enough for seconds: a layer of SmolLM2 then took 264 us on
// two threads, as long as on one (2026-11, Zen 4, two idle cores).
class Elsewhere {
 public:
#if defined(__linux__)
  explicit Elsewhere(int threads) {
    usable_ = sched_getaffinity(0, sizeof allowed_, &allowed_) == 0 && CPU_COUNT(&allowed_) >= threads;
  }
  void avoid(int cpu) {
    if (!usable_ || cpu == avoided_ || cpu < 0 || !CPU_ISSET(static_cast<size_t>(cpu), &allowed_)) return;
    cpu_set_t rest = allowed_;
    CPU_CLR(static_cast<size_t>(cpu), &rest);
    sched_setaffinity(0, sizeof rest, &rest);
    avoided_ = cpu;
  }
  static int here() { return sched_getcpu(); }

 private:
  cpu_set_t allowed_{};
  bool usable_ = false;
  int avoided_ = -1;
#else
  explicit Elsewhere(int) {}
  void avoid(int) {}
  static int here() { return -1; }
#endif
};

int allowed_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n == 0 ? 1 : static_cast<int>(n);
}

}  // namespace

Pool& Pool::instance() {
  // Never destroyed: a worker may be asleep in it while the process exits.
  static Pool* pool = new Pool;
  return *pool;
}

Pool::Pool() : threads_(allowed_cpus()), buffers_(static_cast<size_t>(threads_)) {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { g_fork_epoch.fetch_add(1); });
#endif
}

void Pool::set_threads(int n) {
  const std::lock_guard<std::mutex> lock(turn_);
  stop();
  threads_ = n < 1 ? 1 : n;
  buffers_.resize(static_cast<size_t>(threads_));
}

float* Pool::scratch(int worker, size_t count) {
  Buffer& b = buffers_[static_cast<size_t>(worker)];
  if (b.count < count) {
    b.memory.reset(new float[count + 16]);
    b.count = count;
  }
  const auto address = reinterpret_cast<uintptr_t>(b.memory.get());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

void Pool::start() {
  const int epoch = g_fork_epoch.load();
  if (fork_epoch_ != epoch) {  // we are a child: the threads exist only in the parent
    abandon();
    fork_epoch_ = epoch;
  }
  if (static_cast<int>(workers_.size()) == threads_ - 1) return;
  stopping_ = std::make_unique<std::atomic<bool>>(false);
  for (int i = 1; i < threads_; ++i)
    workers_.emplace_back(&Pool::work, this, i, epoch_.load(), stopping_.get());
}

void Pool::stop() {
  if (workers_.empty()) return;
  if (fork_epoch_ == g_fork_epoch.load()) {
    stopping_->store(true);
    epoch_.fetch_add(2);
    epoch_.notify_all();
    for (std::thread& t : workers_) t.join();
    stopping_.reset();
  } else {
    abandon();
    fork_epoch_ = g_fork_epoch.load();
  }
  workers_.clear();
}

// Forgets thread objects whose threads exist only in the parent: neither join nor detach may touch
// them, so they are leaked.
void Pool::abandon() {
  new std::vector<std::thread>(std::move(workers_));
  workers_.clear();
  (void)stopping_.release();
  active_.store(0);
}

void Pool::drain(int worker) {
  for (;;) {
    const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= items_) return;
    body_(context_, item, worker);
  }
}

void Pool::work(int worker, uint32_t seen, const std::atomic<bool>* stopping) {
  Elsewhere place(threads_);
  for (;;) {
    place.avoid(caller_cpu_.load(std::memory_order_relaxed));
    auto start = std::chrono::steady_clock::now();
    uint32_t now;
    for (int i = 0; (now = epoch_.load(std::memory_order_acquire)) == seen || (now & 1) == 0; ++i) {
      if (stopping->load(std::memory_order_relaxed)) return;
      pause_politely(i);
      if (i % 32 == 31 && (now & 1) == 0 && std::chrono::steady_clock::now() - start > kSpin) {
        epoch_.wait(now);
        // Awake, perhaps too late for that job: the next one is near, so spin again.
        start = std::chrono::steady_clock::now();
        i = 0;
      }
    }
    if (stopping->load()) return;
    seen = now;
    active_.fetch_add(1);
    if (epoch_.load() == seen) drain(worker);
    active_.fetch_sub(1);
  }
}

void Pool::run_erased(int64_t items, bool parallel, Body body, const void* context) {
  const std::lock_guard<std::mutex> lock(turn_);
  if (!parallel || items <= 1 || threads_ == 1) {
    for (int64_t i = 0; i < items; ++i) body(context, i, 0);
    return;
  }
  start();
  items_ = items;
  body_ = body;
  context_ = context;
  next_.store(0, std::memory_order_relaxed);
  caller_cpu_.store(Elsewhere::here(), std::memory_order_relaxed);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  drain(0);
  epoch_.fetch_add(1);
  for (int i = 0; active_.load() != 0; ++i) pause_politely(i);
}

}  // namespace headrace
