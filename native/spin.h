// Waiting without sleeping.
#pragma once
#include <thread>

namespace headrace {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One turn of a spin: a few pauses for what is about to happen, then offers of the core to whoever
// needs it. On a free core an offer returns at once; on a shared one it may be the awaited thread.
inline void pause_politely(int turn, int patience = 128) {
  if (turn < patience) relax();
  else std::this_thread::yield();
}

}  // namespace headrace
