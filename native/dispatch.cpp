#include "dispatch.h"

#include <atomic>
#include <vector>

namespace headrace {
namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(HEADRACE_X86)
  __builtin_cpu_init();  // these checks include the system's support (XGETBV)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    found.push_back(&avx512_kernels());
  if (avx2) found.push_back(&avx2_kernels());
#endif
  found.push_back(&scalar_kernels());
  return found;
}

#if defined(HEADRACE_X86)
bool has_vnni() {
  return usable().front() == &avx512_kernels() && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}
#endif

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> k{usable().front()};
  return k;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

const ExpertKernels& expert_kernels() {
#if defined(HEADRACE_X86)
  const std::string name = kernels().name;
  if (name.rfind("avx512", 0) == 0) return has_vnni() ? vnni_expert_kernels() : avx2_expert_kernels();
  if (name == "avx2") return avx2_expert_kernels();
#endif
  return scalar_expert_kernels();
}

std::string supported() {
  std::string names;
  for (const Kernels* k : usable()) {
    if (!names.empty()) names += " ";
    names += k->name;
  }
  return names;
}

std::string select_isa(const std::string& name) {
#if defined(HEADRACE_X86)
  // Other numerics, so never a default and not among `supported`: only by name.
  if (name == "avx512_vnni" && has_vnni()) {
    chosen().store(&vnni_kernels());
    return "";
  }
#endif
  for (const Kernels* k : usable())
    if (name.empty() || name == k->name) {
      chosen().store(k);
      return "";
    }
  return "this CPU or build has no \"" + name + "\" kernels; it has: " + supported();
}

}  // namespace headrace
