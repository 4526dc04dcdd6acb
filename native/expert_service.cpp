#include "expert_service.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "affinity.h"
#include "round_log.h"
#include "spin.h"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

// Turns of a spin between looks at the clock, and before the core is offered to others.
constexpr int kTurns = 256;
// A sleeping leader's poll: what the first request after a pause waits, against some 20,000 wake-ups a second.
constexpr std::chrono::microseconds kNap{50};

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

void pin(const std::vector<int>& cpus, int worker) {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);  // a nap of 50 us should not take 100
  prctl(PR_SET_NAME, ("experts-" + std::to_string(worker)).c_str(), 0ul, 0ul, 0ul);
#endif
  if (!cpus.empty()) stay_on(cpus[static_cast<size_t>(worker)]);
}

}  // namespace

struct ExpertService::State {
  State(std::vector<SlabLayout> layer_layouts, std::vector<const uint8_t*> layer_bases, int64_t num_experts, Gate act,
        const ServiceBlock& request_block, const ServiceOptions& service_options)
      : layouts(std::move(layer_layouts)), bases(std::move(layer_bases)), block(request_block), options(service_options),
        hidden(layouts.at(0).hidden), compute(layouts, num_experts, act, {block.max_tokens, block.max_items, block.max_pairs}, options.threads) {}

  std::atomic_ref<int32_t> word(int64_t offset) const {
    return std::atomic_ref<int32_t>(*reinterpret_cast<int32_t*>(block.memory + offset));
  }

  const std::vector<SlabLayout> layouts;
  const std::vector<const uint8_t*> bases;
  const ServiceBlock block;
  const ServiceOptions options;
  const int64_t hidden;
  ExpertCompute compute;
  int32_t seq = 0;  // of the round at work
  uint32_t prepared = 0;          // the number of the x that is quantised
  int32_t prepared_layer = -1;
  Clock::time_point started;

  alignas(64) std::atomic<uint32_t> round{0};  // followers wait for its next value
  alignas(64) std::atomic<uint64_t> arrived{0};  // threads at the end of a round, all rounds added up
  alignas(64) std::atomic<uint64_t> answered{0};
  alignas(64) std::atomic<uint64_t> beat{0};
  alignas(64) std::atomic<uint32_t> bell{0};  // what sleepers wait on
  std::atomic<int> sleepers{0};
  alignas(64) std::atomic<bool> stopping{false};
  std::atomic<bool> failed{false};
  std::atomic<bool> woken{false};
  std::atomic<bool> read_only{false};
  std::atomic<bool> yields{true};
  RoundLog log;
  std::atomic<int> placed{0}, exited{0};
  std::atomic<ServiceFault> fault{ServiceFault::none};
  std::atomic<int> fault_worker{-1};
  std::atomic<float> read_sink{0.0f};

  // Of the answered requests; written by whoever answers, one after the other.
  std::atomic<int64_t> requests{0}, refused{0}, nbytes{0}, busy_ns{0};
  std::atomic<double> square_nbytes{0.0}, nbytes_s{0.0};

  bool over() const { return stopping.load(std::memory_order_relaxed) || failed.load(std::memory_order_relaxed); }
  void ring() {
    bell.fetch_add(1);
    bell.notify_all();
  }
  void refuse(ExpertFault why) {
    int32_t none = 0;
    word(block.abort).compare_exchange_strong(none, static_cast<int32_t>(why));
  }
  void fail(ExpertFault why) {
    refuse(why);
    failed.store(true);
    ring();
  }

  // Waits for `there`; false if the service ends first. Only the leader looks at the clock, so that one thread decides.
  template <class There> bool await(const There& there, bool leader) {
    const auto start = Clock::now();
    for (int turn = 1; !there(); ++turn) {
      if (over()) return false;
      if (turn % kTurns == 0 && leader && seconds(Clock::now() - start) > options.stall_s) {
        fail(ExpertFault::stalled);
        return false;
      }
      if (yields.load(std::memory_order_relaxed)) pause_politely(turn, 4 * kTurns);
      else relax();
    }
    return true;
  }

  // What one thread does in round n; false if the thread must end.
  bool work(int worker, uint64_t n) {
    log.note(n, worker, 0);
    if (!survive(worker, n)) return false;
    const uint64_t all = n * static_cast<uint64_t>(options.threads);
    if (read_only.load(std::memory_order_relaxed)) {
      read_sink.store(compute.read(worker));
      if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == all) answer(n);
      return true;
    }
    for (int k = 0; k < ExpertCompute::kPhases; ++k) {
      const auto phase = static_cast<ExpertCompute::Phase>(k);
      const bool last = compute.run(phase, worker);
      log.note(n, worker, 2 * k + 1);
      if (phase == ExpertCompute::kDown) {
        if (last) answer(n);
      } else {
        if (!await([&] { return compute.complete(phase); }, worker == 0)) return false;
        log.note(n, worker, 2 * k + 2);
      }
    }
    arrived.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }

  // Whoever ends the last phase: counts the request, so that whoever sees the answer sees it counted.
  void answer(uint64_t n) {
    requests.fetch_add(1, std::memory_order_relaxed);
    const int64_t read = compute.nbytes(), took = std::chrono::nanoseconds(Clock::now() - started).count();
    nbytes.fetch_add(read, std::memory_order_relaxed);
    busy_ns.fetch_add(took, std::memory_order_relaxed);
    const auto size = static_cast<double>(read);
    square_nbytes.store(square_nbytes.load(std::memory_order_relaxed) + size * size, std::memory_order_relaxed);
    nbytes_s.store(nbytes_s.load(std::memory_order_relaxed) + size * static_cast<double>(took) * 1e-9, std::memory_order_relaxed);
    log.head(n, 2, RoundLog::now());
    word(block.ack).store(seq, std::memory_order_release);
    answered.store(n, std::memory_order_release);
  }

  // What a test injected into this thread; false if it must end.
  bool survive(int worker, uint64_t n) {
    if (fault_worker.load(std::memory_order_relaxed) != worker) return true;
    fault_worker.store(-1);
    switch (fault.exchange(ServiceFault::none)) {
      case ServiceFault::none: return true;
      case ServiceFault::die: return false;
      case ServiceFault::hang:
        while (!stopping.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return false;
      case ServiceFault::late:
        while (answered.load(std::memory_order_acquire) < n && !over()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return !over();
      case ServiceFault::fail: throw std::runtime_error("a fault that a test injected");
    }
    return true;
  }

  // The number that all parts of x have, or 0.
  uint32_t x_number() const {
    const int32_t first = word(block.ready).load(std::memory_order_acquire);
    for (int64_t i = 1; i < block.ready_parts; ++i)
      if (word(block.ready + 4 * i).load(std::memory_order_acquire) != first) return 0;
    return static_cast<uint32_t>(first);
  }

  // x comes before the router is asked: the leader quantises it meanwhile.
  void prepare_x() {
    if (block.ready_parts == 0 || static_cast<uint32_t>(word(block.ready).load(std::memory_order_relaxed)) == prepared) return;
    const uint32_t number = x_number();
    if (number == 0) return;
    const auto layer = static_cast<size_t>((number - 1) % bases.size());
    compute.quantise_ahead(layouts[layer], reinterpret_cast<const float*>(block.memory + block.x));
    prepared = number;
    prepared_layer = static_cast<int32_t>(layer);
  }

  // Reads the request behind `seq`; false if it was refused.
  bool accept() {
    const auto* header = reinterpret_cast<const int32_t*>(block.memory + block.header);
    ExpertFault fault = ExpertFault::layer;
    if (header[0] >= 0 && header[0] < static_cast<int64_t>(bases.size())) {
      ExpertRequest r{};
      r.layout = &layouts[static_cast<size_t>(header[0])];
      r.base = bases[static_cast<size_t>(header[0])];
      r.tokens = header[1];
      r.items = header[2];
      r.pairs = header[3];
      if (const auto number = static_cast<uint32_t>(header[4]); number != 0 && block.ready_parts != 0) {
        if (!await([&] { return x_number() == number; }, true)) return false;
        r.prepared = prepared == number && prepared_layer == header[0] && header[1] == 1;
      }
      r.item = reinterpret_cast<const int32_t*>(block.memory + block.items);
      r.pair_token = reinterpret_cast<const int32_t*>(block.memory + block.pair_token);
      r.pair_weight = reinterpret_cast<const float*>(block.memory + block.pair_weight);
      r.x = reinterpret_cast<const float*>(block.memory + block.x);
      r.out = reinterpret_cast<float*>(block.memory + block.out);
      fault = compute.plan(r);
    }
    if (fault == ExpertFault::none) return true;
    refused.fetch_add(1, std::memory_order_relaxed);
    refuse(fault);
    return false;
  }

  // Polls for a value of `seq` that is not `seen`; false if the service ends.
  bool next_request(int32_t& seen) {
    auto busy = Clock::now();
    bool napping = false;
    for (int turn = 1;; ++turn) {
      const int32_t now = word(block.seq).load(std::memory_order_acquire);
      if (now != seen) {
        seen = now;
        return true;
      }
      if (over()) return false;
      prepare_x();
      if (!napping && turn % kTurns != 0) {
        relax();
        continue;
      }
      beat.fetch_add(1, std::memory_order_relaxed);
      if (woken.exchange(false)) busy = Clock::now();
      napping = seconds(Clock::now() - busy) > options.idle_s;
      if (napping) std::this_thread::sleep_for(kNap);
      else if (yields.load(std::memory_order_relaxed)) std::this_thread::yield();
    }
  }

  void lead() {
    int32_t seen = word(block.ack).load();  // what came before the start is answered, too
    for (uint64_t n = 1; next_request(seen);) {
      started = Clock::now();
      if (word(block.abort).load() != 0 || !accept()) continue;
      // A leader that is lost takes the request with it; one that is late has told the others.
      if (fault.load(std::memory_order_relaxed) != ServiceFault::late && !survive(0, n)) return;
      seq = seen;
      log.head(n, 0, compute.nbytes());
      log.head(n, 1, std::chrono::nanoseconds(started.time_since_epoch()).count());
      round.fetch_add(1);
      if (sleepers.load() > 0) ring();
      if (!work(0, n)) return;
      // The answer is given when the work is done; the next request is planned when nobody can be at this one.
      const uint64_t all = n * static_cast<uint64_t>(options.threads);
      if (!await([&] { return arrived.load(std::memory_order_acquire) >= all; }, true)) return;
      ++n;
      beat.fetch_add(1, std::memory_order_relaxed);
    }
  }

  bool next_round(uint32_t seen) {
    auto busy = Clock::now();
    for (int turn = 1; round.load(std::memory_order_acquire) == seen; ++turn) {
      if (over()) return false;
      if (turn % kTurns != 0) {
        relax();
        continue;
      }
      if (seconds(Clock::now() - busy) <= options.idle_s) {
        if (yields.load(std::memory_order_relaxed)) std::this_thread::yield();
        continue;
      }
      // The leader rings if it sees a sleeper after it has published; so either it sees us, or we see the round.
      const uint32_t heard = bell.load();
      sleepers.fetch_add(1);
      if (round.load() == seen && !over()) bell.wait(heard);
      sleepers.fetch_sub(1);
      busy = Clock::now();
    }
    return true;
  }

  void follow(int worker) {
    uint32_t seen = 0;
    for (uint64_t n = 1; next_round(seen); ++n) {
      ++seen;  // the leader waits for all before it publishes another
      if (!work(worker, n)) return;
    }
  }

  static void run(const std::shared_ptr<State>& s, int worker) {
    pin(s->options.cpus, worker);
    s->placed.fetch_add(1);
    try {
      if (worker == 0) s->lead();
      else s->follow(worker);
    } catch (...) {
      s->fail(ExpertFault::worker);
    }
    s->exited.fetch_add(1);
  }
};

ExpertService::ExpertService(std::vector<SlabLayout> layouts, std::vector<const uint8_t*> bases, int64_t num_experts,
                             Gate act, const ServiceBlock& block, const ServiceOptions& options)
    : state_(std::make_shared<State>(std::move(layouts), std::move(bases), num_experts, act, block, options)) {
  if (state_->layouts.size() != state_->bases.size()) throw std::invalid_argument("expert service: a layout for each layer");
  if (options.threads < 1 || (!options.cpus.empty() && static_cast<int>(options.cpus.size()) != options.threads))
    throw std::invalid_argument("expert service: one CPU for each thread, at least one");
}

ExpertService::~ExpertService() { stop(1.0); }

void ExpertService::start() {
  if (!threads_.empty()) throw std::logic_error("expert service: started twice");
  if (state_->exited.load() != 0) throw std::logic_error("expert service: stopped services do not start again");
  for (int i = 0; i < state_->options.threads; ++i) threads_.emplace_back(State::run, state_, i);
  // So that whoever looks at the process's threads afterwards sees their names and CPUs.
  while (state_->placed.load() < state_->options.threads) std::this_thread::yield();
}

bool ExpertService::stop(double timeout_s) {
  if (threads_.empty()) return true;
  State& s = *state_;
  s.stopping.store(true);
  s.ring();
  const auto start = Clock::now();
  const int all = static_cast<int>(threads_.size());
  while (s.exited.load() < all && seconds(Clock::now() - start) < timeout_s)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  const bool ended = s.exited.load() == all;
  for (std::thread& t : threads_) {
    if (ended) t.join();
    else t.detach();  // it holds the state; the caller keeps the block and the experts
  }
  threads_.clear();
  // Whoever still waits for an answer must not wait for ever.
  if (s.word(s.block.seq).load() != s.word(s.block.ack).load()) s.refuse(ExpertFault::stopped);
  return ended;
}

bool ExpertService::running() const { return !threads_.empty() && !state_->over() && state_->exited.load() == 0; }

void ExpertService::wake() {
  state_->woken.store(true);
  if (state_->sleepers.load() > 0) state_->ring();
}

uint64_t ExpertService::heartbeat() const { return state_->beat.load(); }

int ExpertService::awake() const {
  return static_cast<int>(threads_.size()) - 1 - state_->sleepers.load();
}

ServiceStats ExpertService::stats() const {
  const State& s = *state_;
  return {s.requests.load(), s.refused.load(), s.nbytes.load(), static_cast<double>(s.busy_ns.load()) * 1e-9,
          s.square_nbytes.load(), s.nbytes_s.load()};
}

double ExpertService::request(double timeout_s) {
  const State& s = *state_;
  const auto start = Clock::now();
  const int32_t number = s.word(s.block.seq).load() + 1;
  s.word(s.block.seq).store(number, std::memory_order_release);
  for (int turn = 1; s.word(s.block.ack).load(std::memory_order_acquire) != number; ++turn) {
    if (turn % kTurns == 0 && seconds(Clock::now() - start) > timeout_s) return -1.0;
    if (s.word(s.block.abort).load(std::memory_order_relaxed) != 0) return -1.0;
    pause_politely(turn, 4 * kTurns);
  }
  return seconds(Clock::now() - start);
}

void ExpertService::set_reading(const Reading& reading) { state_->compute.set_reading(reading); }
void ExpertService::set_tile_use(const TileUse& use) { state_->compute.set_tile_use(use); }
void ExpertService::set_read_only(bool on) { state_->read_only.store(on); }
void ExpertService::set_helping(bool on) { state_->compute.set_helping(on); }
void ExpertService::set_yielding(bool on) { state_->yields.store(on); }
void ExpertService::start_log(int64_t* rows, int64_t rounds) { state_->log.start(rows, rounds, state_->options.threads); }
void ExpertService::stop_log() { state_->log.stop(); }

void ExpertService::inject(ServiceFault fault, int worker) {
  state_->fault.store(fault);
  state_->fault_worker.store(worker);
}

}  // namespace headrace
