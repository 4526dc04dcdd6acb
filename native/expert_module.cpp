// Python bindings of the experts: addresses and sizes, checked by headrace.ops.cpu.expert_service.
#include "expert_module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "dispatch.h"
#include "expert_service.h"
#include "pool.h"

namespace nb = nanobind;
using namespace headrace;
using Address = uintptr_t;

namespace {

using Part = std::pair<int64_t, int64_t>;  // offset, bytes of a row

template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

Format format_of(int number) {
  if (number < 0 || number >= static_cast<int>(Format::count)) throw std::invalid_argument("unknown format number");
  return static_cast<Format>(number);
}

SlabLayout make_slab_layout(int format, int down_format, const std::vector<int64_t>& sizes, bool block_factors,
                            const std::vector<Part>& parts) {
  if (sizes.size() != 4 || parts.size() != 8) throw std::invalid_argument("slab layout: four sizes, eight parts");
  const auto part = [&](size_t i) { return SlabPart{parts[i].first, parts[i].second}; };
  return {format_of(format), format_of(down_format), sizes[0], sizes[1], sizes[2], sizes[3], block_factors,
          part(0), part(1), part(2), part(3), part(4), part(5), part(6), part(7)};
}

Gate gate_of(int kind, float alpha, float limit) { return {static_cast<Activation>(kind), alpha, limit}; }

int run_experts(const SlabLayout& layout, Address base, int64_t num_experts, int kind, float alpha, float limit,
                const std::vector<int64_t>& sizes, const std::vector<Address>& fields, int threads) {
  if (sizes.size() != 3 || fields.size() != 5 || threads < 1) throw std::invalid_argument("run_experts: lengths differ");
  const nb::gil_scoped_release lock;
  ExpertCompute compute({layout}, num_experts, gate_of(kind, alpha, limit), {sizes[0], sizes[1], sizes[2]}, threads);
  ExpertRequest r{};
  r.layout = &layout;
  r.base = at<const uint8_t>(base);
  r.tokens = sizes[0];
  r.items = sizes[1];
  r.pairs = sizes[2];
  r.item = at<const int32_t>(fields[0]);
  r.pair_token = at<const int32_t>(fields[1]);
  r.pair_weight = at<const float>(fields[2]);
  r.x = at<const float>(fields[3]);
  r.out = at<float>(fields[4]);
  if (const ExpertFault fault = compute.plan(r); fault != ExpertFault::none) return static_cast<int>(fault);
  Pool& pool = Pool::instance();
  for (const auto phase : {ExpertCompute::kQuantise, ExpertCompute::kGateUp, ExpertCompute::kDown})
    pool.run(threads, true, [&](int64_t i, int) { compute.run(phase, static_cast<int>(i)); });
  return 0;
}

void make_service(ExpertService* self, const std::vector<SlabLayout>& layouts, const std::vector<Address>& bases, int64_t num_experts,
                  int kind, float alpha, float limit, Address block, const std::vector<int64_t>& b, int threads,
                  const std::vector<int>& cpus, double idle_s, double stall_s) {
  if (b.size() != 14) throw std::invalid_argument("expert service: fourteen sizes and offsets of the block");
  std::vector<const uint8_t*> layers;
  for (const Address a : bases) layers.push_back(at<const uint8_t>(a));
  const ServiceBlock fields{at<uint8_t>(block), b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13]};
  new (self) ExpertService(layouts, layers, num_experts, gate_of(kind, alpha, limit), fields, {threads, cpus, idle_s, stall_s});
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<SlabLayout>(m, "SlabLayout");
  m.def("make_slab_layout", &make_slab_layout);
  m.def("run_experts", &run_experts);
  m.def("expert_isa", [] { return std::string(expert_kernels().name); });
  // A thread that did not end may still read this object's memory.
  m.def("keep_forever", [](nb::object o) { o.release(); });
  nb::class_<ExpertService>(m, "ExpertService")
      .def("__init__", &make_service)
      .def("start", &ExpertService::start)
      .def("stop", &ExpertService::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("running", &ExpertService::running)
      .def("wake", &ExpertService::wake)
      .def("heartbeat", &ExpertService::heartbeat)
      .def("awake", &ExpertService::awake)
      .def("stats", [](const ExpertService& s) {
        const ServiceStats t = s.stats();
        return std::make_tuple(t.requests, t.refused, t.nbytes, t.busy_s, t.square_nbytes, t.nbytes_s);
      })
      .def("request", &ExpertService::request, nb::call_guard<nb::gil_scoped_release>())
      .def("set_reading", [](ExpertService& s, int rows, int64_t near_nbytes, int64_t far_nbytes) {
        s.set_reading({rows, near_nbytes, far_nbytes});
      })
      .def("set_tile_use", [](ExpertService& s, int64_t tokens, int64_t pairs, int64_t narrow_pairs, int64_t block_pairs) {
             s.set_tile_use({tokens, pairs, narrow_pairs, block_pairs});
           })
      .def("set_read_only", &ExpertService::set_read_only)
      .def("set_helping", &ExpertService::set_helping)
      .def("set_yielding", &ExpertService::set_yielding)
      .def("start_log", [](ExpertService& s, Address rows, int64_t rounds) { s.start_log(at<int64_t>(rows), rounds); })
      .def("stop_log", &ExpertService::stop_log)
      .def("inject", [](ExpertService& s, int fault, int worker) { s.inject(static_cast<ServiceFault>(fault), worker); });
}
