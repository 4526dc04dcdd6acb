// Threads that answer requests for experts in a block of memory that a GPU writes and reads.
//
// The fields of the block are laid out by headrace/experts/request_block.py. One thread, the leader, polls
// `seq`; a new value is a request. It checks the request, publishes a round to the followers, works with
// them, and the last to finish stores the number in `ack`. A request that cannot be answered, a thread that
// throws and a round that takes longer than `stall_s` end in a non-zero `abort` (ExpertFault) instead of an
// `ack`; while `abort` is set, requests are passed over. Idle followers spin for `idle_s`, then sleep in the
// kernel; the leader then polls every 50 microseconds, until a request or `wake`.
#pragma once
#include <memory>
#include <thread>
#include <vector>

#include "expert_compute.h"

namespace headrace {

struct ServiceBlock {
  uint8_t* memory;
  int64_t max_tokens, max_items, max_pairs;
  int64_t seq, ack, abort, ready, ready_parts, header, items, pair_token, pair_weight, x, out;  // bytes from the start
};

struct ServiceOptions {
  int threads = 1;            // the leader included
  std::vector<int> cpus;      // one for each thread, or none: where the system puts them
  double idle_s = 0.05;
  double stall_s = 10.0;
};

struct ServiceStats {
  int64_t requests, refused, nbytes;
  double busy_s;  // from seeing a request to its last row
  double square_nbytes, nbytes_s;  // sums over requests: bytes squared, bytes times busy seconds
};

// What a test makes one thread do when the next request comes.
enum class ServiceFault : int { none = 0, die = 1, hang = 2, fail = 3, late = 4 };

class ExpertService {
 public:
  // layouts, bases: of every layer.
  ExpertService(std::vector<SlabLayout> layouts, std::vector<const uint8_t*> bases, int64_t num_experts, Gate act,
                const ServiceBlock& block, const ServiceOptions& options);
  ExpertService(const ExpertService&) = delete;
  ExpertService& operator=(const ExpertService&) = delete;
  ~ExpertService();

  void start();
  // Joins the threads; false if one did not end in time, which then keeps its memory for ever.
  bool stop(double timeout_s);
  bool running() const;
  // Someone will ask soon: sleepers get up and spin.
  void wake();
  // Counted up by the leader while it polls and after every request: it stands still if a thread is lost.
  uint64_t heartbeat() const;
  int awake() const;  // followers that spin or work
  ServiceStats stats() const;
  // Publishes the block as it is and waits for the answer: seconds, or -1 after `timeout_s` or an abort.
  double request(double timeout_s);

  void set_reading(const Reading& reading);
  void set_tile_use(const TileUse& use);
  void set_read_only(bool on);  // read the items' bytes instead of computing: the yardstick
  void set_helping(bool on);   // whether threads take over others' work
  void set_yielding(bool on);  // whether waiting threads offer their CPU
  // See round_log.h.
  void start_log(int64_t* rows, int64_t rounds);
  void stop_log();
  void inject(ServiceFault fault, int worker);

  struct State;

 private:
  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace headrace
