// Which CPU a thread runs on.
#pragma once
#include <cstddef>

#if defined(__linux__)
#include <sched.h>
#endif

namespace headrace {

// Keeps the calling thread on a CPU. If the system refuses, its scheduler places the thread.
inline void stay_on(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  sched_setaffinity(0, sizeof set, &set);
#else
  (void)cpu;
#endif
}

}  // namespace headrace
