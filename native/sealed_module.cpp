// Python bindings of caches with sealed pages.
#include "sealed_module.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <vector>

#include "pool.h"
#include "sealed.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Address = uintptr_t;
template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

SealedCache make_sealed_cache(const std::vector<Address>& p, const std::vector<int64_t>& n) {
  if (p.size() != 10 || n.size() != 9) throw std::invalid_argument("sealed cache: lengths differ");
  if (n[4] > kMaxRank || n[3] > 256 || n[3] % 16 != 0 || n[2] % 16 != 0) throw std::invalid_argument("sealed cache: sizes");
  return {at<uint8_t>(p[0]), at<uint8_t>(p[1]), at<uint8_t>(p[2]), at<uint16_t>(p[3]), at<uint8_t>(p[4]),
          at<float>(p[5]), at<uint16_t>(p[6]), at<const float>(p[7]), at<uint16_t>(p[8]), at<uint16_t>(p[9]),
          n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]};
}

OpenPages make_open(const std::vector<Address>& p, int64_t width, int64_t num_seals) {
  if (p.size() != 3) throw std::invalid_argument("open pages: lengths differ");
  return {at<const int64_t>(p[0]), at<const int32_t>(p[1]), at<const int32_t>(p[2]), width, num_seals};
}

}  // namespace

void bind_sealed(nb::module_& m) {
  nb::class_<SealedCache>(m, "SealedCache");
  nb::class_<OpenPages>(m, "OpenPages");
  m.def("make_sealed_cache", &make_sealed_cache);
  m.def("make_open_pages", &make_open);
  m.def("sealed_append", [](const SealedCache& c, const OpenPages& open, Address k, Address v, int64_t tokens) {
    const nb::gil_scoped_release lock;
    return sealed_append(at<const float>(k), at<const float>(v), tokens, c, open);
  });
  m.def("sealed_attention", [](const SealedCache& c, const OpenPages& open, const std::vector<Address>& p, int64_t heads,
                               float scale, int64_t window, int64_t sequences, int64_t table_width) {
    if (p.size() != 6) throw std::invalid_argument("sealed attention: lengths differ");
    const Attention a{at<const float>(p[0]), at<float>(p[1]), heads, scale, window, at<const float>(p[2]),
                      at<const int32_t>(p[3]), at<const int32_t>(p[4]), at<const int64_t>(p[5]), sequences, table_width};
    const nb::gil_scoped_release lock;
    return sealed_attention(a, c, open);
  });
}

}  // namespace headrace
