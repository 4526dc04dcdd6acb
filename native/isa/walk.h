// How kernels walk along stored rows: what to ask memory for ahead, and which code a format needs.
#pragma once

// With the sub-block known at compile time, shifts are immediates. The portable kernels gain nothing
// from it and would take minutes to compile.
#if defined(HEADRACE_UNROLL) && defined(__GNUC__)
#define HEADRACE_UNROLL_8 _Pragma("GCC unroll 8")
#else
#define HEADRACE_UNROLL_8
#endif

namespace headrace::HEADRACE_NS {

// Bytes of 32 weights in the main array, for prefetching.
template <Format F> constexpr int64_t group_nbytes() {
  switch (F) {
    case Format::f32: return 128;
    case Format::f16: case Format::bf16: return 64;
    case Format::fp8_e4m3: return 32;
    case Format::q8_0: return 34;
    case Format::q8_0_apart: return 32;
    case Format::q6_k: return 26;
    case Format::q6_k_apart: return 24;
    case Format::q5_0_apart: return 20;
    case Format::q4_0_apart: case Format::iq4_nl_apart: return 16;
    case Format::q3_k_apart: return 12;
    case Format::q5_k: case Format::q5_0: case Format::q5_1: return 24;
    case Format::q4_1: return 20;
    case Format::q2_k: return 10;
    case Format::q3_k: return 14;
    default: return 18;
  }
}

// How far ahead of the current row to prefetch: one page, which the hardware does not cross. A decode
// step of SmolLM2 took 8.1 to 8.3 ms with 2 to 8 KiB and 9.4 ms without (2 Zen 4 cores, 2026-11; the
// machine was not idle, and smaller differences were noise).
constexpr int64_t kPrefetchNbytes = 4096;

template <Format F> static inline void prefetch_chunk(const Row& r, int64_t g) {
  for (int64_t at = 0; at < kChunk * group_nbytes<F>(); at += 64)
    prefetch(r.data + g * group_nbytes<F>() + kPrefetchNbytes + at);
}

template <Format F> static inline void prefetch_far_chunk(const uint8_t* p, int64_t g) {
  for (int64_t at = 0; at < kChunk * group_nbytes<F>(); at += 64) prefetch_far(p + g * group_nbytes<F>() + at);
}

// Scales are read back as broadcasts from memory, which cost no shuffle; compilers would rather keep
// them in a register and shuffle each out (a third more instructions with GCC 12).
static inline void in_memory(const float (*scales)[kScaleFloats]) {
#if defined(__GNUC__)
  asm volatile("" : : "r"(scales) : "memory");
#else
  (void)scales;
#endif
}

template <template <Format> class Call, class... A>
static inline void by_format(Format f, A&&... args) {
  switch (f) {
#define HEADRACE_CASE(name) case Format::name: Call<Format::name>::call(args...); return;
    HEADRACE_CASE(f32) HEADRACE_CASE(f16) HEADRACE_CASE(bf16) HEADRACE_CASE(fp8_e4m3)
    HEADRACE_CASE(mxfp4) HEADRACE_CASE(mxfp4_gguf) HEADRACE_CASE(nvfp4) HEADRACE_CASE(q4_0)
    HEADRACE_CASE(q4_1) HEADRACE_CASE(q5_0) HEADRACE_CASE(q5_1) HEADRACE_CASE(q8_0)
    HEADRACE_CASE(q2_k) HEADRACE_CASE(q3_k) HEADRACE_CASE(q4_k) HEADRACE_CASE(q5_k)
    HEADRACE_CASE(q6_k) HEADRACE_CASE(iq4_nl) HEADRACE_CASE(iq4_xs)
    HEADRACE_CASE(q4_0_apart) HEADRACE_CASE(q5_0_apart) HEADRACE_CASE(q8_0_apart)
    HEADRACE_CASE(q3_k_apart) HEADRACE_CASE(q6_k_apart) HEADRACE_CASE(iq4_nl_apart)
#undef HEADRACE_CASE
    case Format::count: return;
  }
}

}  // namespace headrace::HEADRACE_NS
