#include "dispatch.h"

#include <atomic>
#include <vector>

namespace headrace {
namespace {

#if defined(HEADRACE_X86)
bool has_avx2() {
  __builtin_cpu_init();  // these checks include the system's support (XGETBV)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_vnni() {
  static const bool found = has_bf16() && __builtin_cpu_supports("avx512vnni");
  return found;
}

Kernels with_tiles(const TileKernels& tiles) {
  Kernels table = avx512_kernels();
  table.name = tiles.name;
  table.tiles = &tiles;
  return table;
}

// Null where there is no AMX.
const Kernels* amx_kernels() {
  std::string why_not;
  static const TileKernels* tiles = has_bf16() ? amx_tiles(why_not) : nullptr;
  if (tiles == nullptr) return nullptr;
  static const Kernels table = with_tiles(*tiles);
  return &table;
}

// Numerics of their own also with few rows, or no use but in tests: never a default and not among `supported`.
const Kernels* by_name_only(const std::string& name) {
  if (name == "avx512_vnni" && has_vnni()) return &vnni_kernels();
  if (name != "avx512_bf16" || !has_bf16()) return nullptr;
  static const Kernels table = with_tiles(bf16_tiles());
  return &table;
}
#endif

const std::vector<const Kernels*>& usable() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> kernels;
#if defined(HEADRACE_X86)
    if (const Kernels* amx = amx_kernels()) kernels.push_back(amx);
    if (has_avx512()) kernels.push_back(&avx512_kernels());
    if (has_avx2()) kernels.push_back(&avx2_kernels());
#endif
    kernels.push_back(&scalar_kernels());
    return kernels;
  }();
  return found;
}

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

std::string why_no_tiles() {
  if (kernels().tiles != nullptr) return "";
  std::string why_not;
  return amx_tiles(why_not) == nullptr ? why_not : "kernels without them were asked for by name";
}

std::string select_isa(const std::string& name) {
#if defined(HEADRACE_X86)
  if (const Kernels* k = by_name_only(name)) {
    chosen().store(k);
    return "";
  }
#endif
  for (const Kernels* k : usable())
    if (name.empty() || name == k->name) {
      chosen().store(k);
      return "";
    }
  std::string reason;
  if (name == "avx512_amx" && amx_tiles(reason) == nullptr) reason = " (" + reason + ")";
  else reason.clear();
  return "this CPU or build has no \"" + name + "\" kernels" + reason + "; it has: " + supported();
}

}  // namespace headrace
