// Where the codes and the scales of a row's blocks lie: inside each block, as GGUF files have them, or in
// two arrays, as slabs of experts do where a block is not whole words of four bytes (experts/slab.py).
#pragma once
#include <cstdint>

#include "matrix.h"

namespace headrace {

template <int64_t kNbytes, int64_t kCodesAt, int64_t kScalesAt> struct Together {
  static constexpr int64_t kCodes = kNbytes, kScales = kNbytes;  // bytes from one block's to the next's
  static const uint8_t* codes(const Row& r, int64_t b) { return r.data + kNbytes * b + kCodesAt; }
  static const uint8_t* scales(const Row& r, int64_t b) { return r.data + kNbytes * b + kScalesAt; }
};

template <int64_t kCodesNbytes, int64_t kScalesNbytes> struct Apart {
  static constexpr int64_t kCodes = kCodesNbytes, kScales = kScalesNbytes;
  static const uint8_t* codes(const Row& r, int64_t b) { return r.data + kCodesNbytes * b; }
  static const uint8_t* scales(const Row& r, int64_t b) { return r.scales + kScalesNbytes * b; }
};

template <Format F> struct Blocks;
template <> struct Blocks<Format::q4_0> : Together<18, 2, 0> {};
template <> struct Blocks<Format::q4_0_apart> : Apart<16, 2> {};
template <> struct Blocks<Format::iq4_nl> : Together<18, 2, 0> {};
template <> struct Blocks<Format::iq4_nl_apart> : Apart<16, 2> {};
template <> struct Blocks<Format::q5_0> : Together<22, 2, 0> {};
template <> struct Blocks<Format::q5_0_apart> : Apart<20, 2> {};
template <> struct Blocks<Format::q8_0> : Together<34, 2, 0> {};
template <> struct Blocks<Format::q8_0_apart> : Apart<32, 2> {};
template <> struct Blocks<Format::q3_k> : Together<110, 0, 96> {};
template <> struct Blocks<Format::q3_k_apart> : Apart<96, 14> {};
template <> struct Blocks<Format::q6_k> : Together<210, 0, 192> {};
template <> struct Blocks<Format::q6_k_apart> : Apart<192, 18> {};

}  // namespace headrace
