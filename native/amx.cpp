// Whether this process may use AMX: CPU, system and kernel each have a say.
#include "tiles.h"

#if defined(HEADRACE_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace headrace {

#if defined(HEADRACE_AMX) && defined(__linux__)

const TileKernels& amx_tile_kernels();

namespace {

// Linux 5.16 and later hand out the 8 KiB of tile registers on request, for the process and its later threads
// (Documentation/arch/x86/xstate.rst); before any use, or it ends in SIGILL.
constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // its number in XCR0

std::string refusal() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0 || (d & kBf16) == 0 || (d & kInt8) == 0) return "this CPU has no AMX for bfloat16 and int8";
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return "the system does not save extended registers";
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return "the system does not save AMX tile registers (XCR0 lacks bits 17 and 18)";
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return std::string("the kernel refused the tile registers (arch_prctl: ") + std::strerror(errno) + ")";
  return "";
}

}  // namespace

const TileKernels* amx_tiles(std::string& why_not) {
  static const std::string reason = refusal();  // asked once: it does not change
  why_not = reason;
  return reason.empty() ? &amx_tile_kernels() : nullptr;
}

#else

const TileKernels* amx_tiles(std::string& why_not) {
#if defined(HEADRACE_X86) && !defined(__linux__)
  why_not = "AMX is used on Linux only";
#elif defined(HEADRACE_X86)
  why_not = "the compiler of this build has no AMX";
#else
  why_not = "this is no x86 CPU";
#endif
  return nullptr;
}

#endif

}  // namespace headrace
