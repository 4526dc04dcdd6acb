// The process's worker threads. One wake per call; the calling thread is a worker.
//
// There is one pool per process, as there is one heap: operations are plain functions, and two pools
// would fight for the same cores. Calls from several threads take turns. Workers spin for a short
// while after a job, so that the next layer finds them awake, and then sleep in the kernel.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  static Pool& instance();

  // Threads that work on a call, the caller included.
  int threads() const { return threads_; }
  void set_threads(int n);

  // Calls body(item, worker) for item 0 to items - 1, in any order, from up to threads() workers.
  // `parallel` false: all on the calling thread, for work smaller than a wake.
  template <class F> void run(int64_t items, bool parallel, const F& body) {
    run_erased(items, parallel, [](const void* f, int64_t i, int w) { (*static_cast<const F*>(f))(i, w); }, &body);
  }

  // At least `count` floats, 64-byte aligned, owned by a worker; contents are lost by the next call.
  float* scratch(int worker, size_t count);

 private:
  using Body = void (*)(const void*, int64_t, int);
  struct Buffer {
    std::unique_ptr<float[]> memory;
    size_t count = 0;
  };

  Pool();
  void run_erased(int64_t items, bool parallel, Body body, const void* context);
  void start();
  void stop();
  void abandon();
  void work(int worker, uint32_t seen, const std::atomic<bool>* stopping);
  void drain(int worker);

  std::mutex turn_;  // one job at a time
  int threads_ = 1;
  int fork_epoch_ = 0;
  std::vector<std::thread> workers_;
  std::vector<Buffer> buffers_;
  std::unique_ptr<std::atomic<bool>> stopping_;

  // Odd while a job is open. A worker that has joined (active_) and still sees the same odd number
  // may touch the job; the caller closes the number and waits until nobody is inside.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> active_{0};
  std::atomic<int> caller_cpu_{-1};
  int64_t items_ = 0;
  Body body_ = nullptr;
  const void* context_ = nullptr;
};

}  // namespace headrace
