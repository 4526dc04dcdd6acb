// Thirty-two stored weights to float32, one specialisation per format: the only place that knows
// bit layouts (drawn in headrace/formats). Values equal the format's definition exactly: products
// and differences are rounded in the same places as there, never contracted.
//
// `prepare(row, g, n, s)` decodes the scales of the n <= 8 groups from g on (g a multiple of 8) into
// at most kScaleFloats floats; `run(row, g, s, j, a, b)` gives the 32 weights of group g, the j-th of
// them, sixteen in each register. Scales apart, because decoding them one by one costs as much as the
// weights themselves.
#pragma once
#include "../blocks.h"

namespace headrace::HEADRACE_NS {

constexpr int64_t kChunk = 8;         // groups whose scales are decoded together: one superblock
constexpr int64_t kScaleFloats = 32;

template <Format F> struct Expand;

struct NoScales {
  static inline void prepare(const Row&, int64_t, int64_t, float*) {}
};

static inline uint32_t u16_at(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }
static inline uint32_t u32_at(const uint8_t* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }

// scale * value[code] for the codes of two registers of bytes; the table's upper bits are ignored only
// where kHasTable16, so callers mask.
static inline void scaled_codes(B first, B second, float scale, [[maybe_unused]] const float* values,
                                [[maybe_unused]] const int8_t* codes, V& a, V& b) {
  if constexpr (kHasTable16) {
    const V t = mul(load(values), set1(scale));
    a = table_low(t, first);
    b = table_low(t, second);
  } else {
    const V s = set1(scale);
    a = mul(s, from_i8(lookup(codes, first)));
    b = mul(s, from_i8(lookup(codes, second)));
  }
}

// The same with the first codes in the low nibbles of sixteen bytes and the second in the high ones.
static inline void scaled_nibbles(B q, float scale, const float* values, const int8_t* codes, V& a, V& b) {
  if constexpr (kHasTable16) {
    const V t = mul(load(values), set1(scale));
    a = table_low(t, q);
    b = table_high(t, q);
  } else {
    scaled_codes(low4(q), high4(q), scale, values, codes, a, b);
  }
}

template <> struct Expand<Format::f32> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    const float* p = reinterpret_cast<const float*>(r.data + 128 * g);
    a = load(p);
    b = load(p + 16);
  }
};

template <> struct Expand<Format::f16> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    a = from_f16(r.data + 64 * g);
    b = from_f16(r.data + 64 * g + 32);
  }
};

template <> struct Expand<Format::bf16> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    a = from_bf16(r.data + 64 * g);
    b = from_bf16(r.data + 64 * g + 32);
  }
};

template <> struct Expand<Format::fp8_e4m3> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    const V s = set1(r.block_scale[(g / 4) * r.block_scale_step]);  // 128 weights share a scale
    a = mul(from_e4m3(load16(r.data + 32 * g)), s);
    b = mul(from_e4m3(load16(r.data + 32 * g + 16)), s);
  }
};

template <> struct Expand<Format::mxfp4> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    const B q = load16(r.data + 16 * g), lo = low4(q), hi = high4(q);
    scaled_codes(interleave_low(lo, hi), interleave_high(lo, hi), kHalfE8M0.value[r.scales[g]], kE2M1DoubledF,
                 kE2M1Doubled, a, b);
  }
};

template <> struct Expand<Format::mxfp4_gguf> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    const uint8_t* p = r.data + 17 * g;
    scaled_nibbles(load16(p + 1), kHalfE8M0.value[p[0]], kE2M1DoubledF, kE2M1Doubled, a, b);
  }
};

// (E2M1 * E4M3) is exact, so the one rounding is that of the product with the tensor's scale.
template <> struct Expand<Format::nvfp4> : NoScales {
  static inline void run(const Row& r, int64_t g, const float*, int, V& a, V& b) {
    const uint8_t* s = r.scales + 2 * g;
    const B q = load16(r.data + 16 * g), lo = low4(q), hi = high4(q);
    const B first = interleave_low(lo, hi), second = interleave_high(lo, hi);
    const V whole = set1(r.global_scale);
    if constexpr (kHasTable16) {
      const V t = load(kE2M1DoubledF);
      a = table_low(mul(mul(t, set1(kHalfE4M3.value[s[0]])), whole), first);
      b = table_low(mul(mul(t, set1(kHalfE4M3.value[s[1]])), whole), second);
    } else {
      a = mul(mul(from_i8(lookup(kE2M1Doubled, first)), set1(kHalfE4M3.value[s[0]])), whole);
      b = mul(mul(from_i8(lookup(kE2M1Doubled, second)), set1(kHalfE4M3.value[s[1]])), whole);
    }
  }
};

// --- blocks of 32 with half-precision scales

template <class At> static inline void block_halves(const Row& r, int64_t g, int64_t n, float* s) {
  halves(At::scales(r, g), At::kScales, n, s);
}

template <class At> struct ExpandQ4_0 {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { block_halves<At>(r, g, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const B q = load16(At::codes(r, g));
    if constexpr (kHasTable16) {
      scaled_nibbles(q, s[j], kIotaMinus8, nullptr, a, b);
    } else {
      const V d = set1(s[j]);
      a = mul(d, from_i8(bsub(low4(q), 8)));
      b = mul(d, from_i8(bsub(high4(q), 8)));
    }
  }
};

template <> struct Expand<Format::q4_1> {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { half_pairs(r.data + 20 * g, 20, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const B q = load16(r.data + 20 * g + 4);
    const V d = set1(s[2 * j]), m = set1(s[2 * j + 1]);
    if constexpr (kHasTable16) {
      const V t = add(mul(load(kIota), d), m);
      a = table_low(t, q);
      b = table_high(t, q);
    } else {
      a = add(mul(d, from_u8(low4(q))), m);
      b = add(mul(d, from_u8(high4(q))), m);
    }
  }
};

template <class At> struct ExpandQ5_0 {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { block_halves<At>(r, g, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = At::codes(r, g);
    const B q = load16(p + 4);
    const V d = set1(s[j]);
    a = mul(d, from_i8(bsub(bor(low4(q), spread_bits(u16_at(p), 16)), 16)));
    b = mul(d, from_i8(bsub(bor(high4(q), spread_bits(u16_at(p + 2), 16)), 16)));
  }
};

template <> struct Expand<Format::q5_1> {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { half_pairs(r.data + 24 * g, 24, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = r.data + 24 * g;
    const B q = load16(p + 8);
    const V d = set1(s[2 * j]), m = set1(s[2 * j + 1]);
    a = add(mul(d, from_u8(bor(low4(q), spread_bits(u16_at(p + 4), 16)))), m);
    b = add(mul(d, from_u8(bor(high4(q), spread_bits(u16_at(p + 6), 16)))), m);
  }
};

template <class At> struct ExpandQ8_0 {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { block_halves<At>(r, g, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = At::codes(r, g);
    const V d = set1(s[j]);
    a = mul(from_i8(load16(p)), d);
    b = mul(from_i8(load16(p + 16)), d);
  }
};

template <class At> struct ExpandIq4Nl {
  static inline void prepare(const Row& r, int64_t g, int64_t n, float* s) { block_halves<At>(r, g, n, s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    scaled_nibbles(load16(At::codes(r, g)), s[j], kIq4ValuesF, kIq4Values, a, b);
  }
};

// --- superblocks of 256 weights: sub-block j holds weights 32 j to 32 j + 31

template <> struct Expand<Format::iq4_xs> {
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) {
    const uint8_t* p = r.data + 136 * (g / kChunk);
    const float d = f16(p);
    const uint32_t high = u16_at(p + 2), low = u32_at(p + 4);
    for (int j = 0; j < 8; ++j)
      s[j] = d * static_cast<float>(static_cast<int>((low >> 4 * j & 15) | (high >> 2 * j & 3) << 4) - 32);
  }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = r.data + 136 * (g / kChunk);
    scaled_nibbles(load16(p + 8 + 16 * j), s[j], kIq4ValuesF, kIq4Values, a, b);
  }
};

// Six-bit scales and minima of Q4_K and Q5_K, twelve bytes: those of sub-blocks 0 to 3 in the low six
// bits of bytes j and j + 4; 4 to 7 with low nibbles in bytes j + 4 and the rest in the others' top bits.
// s[2 j] = d * scale, s[2 j + 1] = dmin * minimum.
static inline void scale_min(const uint8_t* block, float* s) {
  const uint32_t u0 = u32_at(block + 4), u1 = u32_at(block + 8), u2 = u32_at(block + 12);
  const uint64_t scales = (u0 & 0x3f3f3f3fu) | static_cast<uint64_t>((u2 & 0x0f0f0f0fu) | (u0 >> 2 & 0x30303030u)) << 32;
  const uint64_t minima = (u1 & 0x3f3f3f3fu) | static_cast<uint64_t>((u2 >> 4 & 0x0f0f0f0fu) | (u1 >> 2 & 0x30303030u)) << 32;
  const float d = f16(block), m = f16(block + 2);
  alignas(64) const float pair[16] = {d, m, d, m, d, m, d, m, d, m, d, m, d, m, d, m};
  store(s, mul(from_u8(interleave_low(bytes_of(scales), bytes_of(minima))), load(pair)));
}

template <> struct Expand<Format::q4_k> {
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) { scale_min(r.data + 144 * (g / kChunk), s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* codes = r.data + 144 * (g / kChunk) + 16 + 32 * (j / 2);
    const V d = set1(s[2 * j]), m = set1(s[2 * j + 1]);
    const B q0 = load16(codes), q1 = load16(codes + 16);
    if constexpr (kHasTable16) {
      const V t = sub(mul(load(kIota), d), m);
      a = j & 1 ? table_high(t, q0) : table_low(t, q0);
      b = j & 1 ? table_high(t, q1) : table_low(t, q1);
    } else {
      a = sub(mul(d, from_u8(bits<15>(q0, 4 * (j & 1)))), m);
      b = sub(mul(d, from_u8(bits<15>(q1, 4 * (j & 1)))), m);
    }
  }
};

template <> struct Expand<Format::q5_k> {
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) { scale_min(r.data + 176 * (g / kChunk), s); }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = r.data + 176 * (g / kChunk);
    const uint8_t* codes = p + 48 + 32 * (j / 2);
    const V d = set1(s[2 * j]), m = set1(s[2 * j + 1]);
    const B h0 = shl<4>(bits<1>(load16(p + 16), j)), h1 = shl<4>(bits<1>(load16(p + 32), j));
    a = sub(mul(d, from_u8(bor(bits<15>(load16(codes), 4 * (j & 1)), h0))), m);
    b = sub(mul(d, from_u8(bor(bits<15>(load16(codes + 16), 4 * (j & 1)), h1))), m);
  }
};

template <class At> struct ExpandQ6K {
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) {
    const uint8_t* p = At::scales(r, g / kChunk);
    store(s, mul(from_i8(load16(p)), set1(f16(p + 16))));
  }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* p = At::codes(r, g / kChunk);
    const int quarter = j & 3;
    const uint8_t *low = p + 64 * (j >> 2) + 32 * (j & 1), *high = p + 128 + 32 * (j >> 2);
    const B q0 = bor(bits<15>(load16(low), 4 * (quarter >> 1)), shl<4>(bits<3>(load16(high), 2 * quarter)));
    const B q1 = bor(bits<15>(load16(low + 16), 4 * (quarter >> 1)), shl<4>(bits<3>(load16(high + 16), 2 * quarter)));
    a = mul(set1(s[2 * j]), from_i8(bsub(q0, 32)));
    b = mul(set1(s[2 * j + 1]), from_i8(bsub(q1, 32)));
  }
};

template <> struct Expand<Format::q2_k> {
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) {
    const uint8_t* p = r.data + 84 * (g / kChunk);
    const B q = load16(p);
    store(s, mul(set1(f16(p + 80)), from_u8(low4(q))));
    store(s + 16, mul(set1(f16(p + 82)), from_u8(high4(q))));
  }
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t* codes = r.data + 84 * (g / kChunk) + 16 + 32 * (j >> 2);
    a = sub(mul(set1(s[2 * j]), from_u8(bits<3>(load16(codes), 2 * (j & 3)))), set1(s[16 + 2 * j]));
    b = sub(mul(set1(s[2 * j + 1]), from_u8(bits<3>(load16(codes + 16), 2 * (j & 3)))), set1(s[17 + 2 * j]));
  }
};

template <class At> struct ExpandQ3K {
  // Scale i: low nibbles in bytes 0 to 7 (i < 8 low, else high), two more bits in bytes 8 to 11.
  static inline void prepare(const Row& r, int64_t g, int64_t, float* s) {
    const uint8_t* p = At::scales(r, g / kChunk);
    const float d = f16(p + 12);
    for (int i = 0; i < 16; ++i) {
      const int low = i < 8 ? p[i] & 15 : p[i - 8] >> 4, high = p[8 + (i & 3)] >> 2 * (i >> 2) & 3;
      s[i] = d * static_cast<float>((low | high << 4) - 32);
    }
  }
  // A set mask bit adds 4, so code + 4 * bit - 4 is the signed value.
  static inline void run(const Row& r, int64_t g, const float* s, int j, V& a, V& b) {
    const uint8_t *p = At::codes(r, g / kChunk), *codes = p + 32 + 32 * (j >> 2);
    const B q0 = bor(bits<3>(load16(codes), 2 * (j & 3)), shl<2>(bits<1>(load16(p), j)));
    const B q1 = bor(bits<3>(load16(codes + 16), 2 * (j & 3)), shl<2>(bits<1>(load16(p + 16), j)));
    a = mul(set1(s[2 * j]), from_i8(bsub(q0, 4)));
    b = mul(set1(s[2 * j + 1]), from_i8(bsub(q1, 4)));
  }
};

template <> struct Expand<Format::q4_0> : ExpandQ4_0<Blocks<Format::q4_0>> {};
template <> struct Expand<Format::q4_0_apart> : ExpandQ4_0<Blocks<Format::q4_0_apart>> {};
template <> struct Expand<Format::q5_0> : ExpandQ5_0<Blocks<Format::q5_0>> {};
template <> struct Expand<Format::q5_0_apart> : ExpandQ5_0<Blocks<Format::q5_0_apart>> {};
template <> struct Expand<Format::q8_0> : ExpandQ8_0<Blocks<Format::q8_0>> {};
template <> struct Expand<Format::q8_0_apart> : ExpandQ8_0<Blocks<Format::q8_0_apart>> {};
template <> struct Expand<Format::iq4_nl> : ExpandIq4Nl<Blocks<Format::iq4_nl>> {};
template <> struct Expand<Format::iq4_nl_apart> : ExpandIq4Nl<Blocks<Format::iq4_nl_apart>> {};
template <> struct Expand<Format::q3_k> : ExpandQ3K<Blocks<Format::q3_k>> {};
template <> struct Expand<Format::q3_k_apart> : ExpandQ3K<Blocks<Format::q3_k_apart>> {};
template <> struct Expand<Format::q6_k> : ExpandQ6K<Blocks<Format::q6_k>> {};
template <> struct Expand<Format::q6_k_apart> : ExpandQ6K<Blocks<Format::q6_k_apart>> {};

// The last `count` < 32 weights of a row whose length is no multiple of 32, zero-padded, without
// reading past them: the bytes are copied aside first. Block formats have whole groups only.
template <Format F> static inline void expand_tail(const Row& r, int64_t g, int64_t count, V& a, V& b) {
  constexpr int bits_each = F == Format::f32 ? 32 : F == Format::f16 || F == Format::bf16 ? 16
                            : F == Format::fp8_e4m3 ? 8 : F == Format::nvfp4 ? 4 : 0;
  a = b = zero();
  if constexpr (bits_each != 0) {
    alignas(64) uint8_t bytes[kGroup * bits_each / 8] = {};
    std::memcpy(bytes, r.data + g * kGroup * bits_each / 8, static_cast<size_t>(count * bits_each / 8));
    uint8_t scales[2] = {0, 0};
    Row copy{bytes, scales, r.block_scale, 0, r.global_scale};
    if constexpr (F == Format::fp8_e4m3) copy.block_scale = r.block_scale + (g / 4) * r.block_scale_step;
    if constexpr (F == Format::nvfp4) scales[0] = r.scales[2 * g];
    Expand<F>::run(copy, 0, nullptr, 0, a, b);
    alignas(64) float values[kGroup];
    store(values, a);
    store(values + 16, b);
    for (int64_t i = count; i < kGroup; ++i) values[i] = 0.0f;
    a = load(values);
    b = load(values + 16);
  }
}

}  // namespace headrace::HEADRACE_NS
