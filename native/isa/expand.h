// Thirty-two stored weights to float32, one specialisation per format: the only place that knows
// bit layouts (drawn in headrace/formats). Values equal the format's definition exactly: products
// and differences are rounded in the same places as there, never contracted.
//
// `Expand<F>::run(row, g, a, b)` gives weights 32 g to 32 g + 31 of a row, sixteen in each register.
#pragma once

namespace headrace::HEADRACE_NS {

template <Format F> struct Expand;

static inline uint32_t u16_at(const uint8_t* p) { uint16_t v; std::memcpy(&v, p, 2); return v; }

// scale * (code + offset) from the nibbles of sixteen bytes; `table` is float code values.
static inline void scaled_nibbles(B q, float scale, [[maybe_unused]] const float* values,
                                  [[maybe_unused]] const int8_t* codes, V& a, V& b) {
  if constexpr (kHasTable16) {
    const V t = mul(set1(scale), load(values));
    a = table_low(t, q);
    b = table_high(t, q);
  } else {
    const V s = set1(scale);
    a = mul(s, from_i8(lookup(codes, low4(q))));
    b = mul(s, from_i8(lookup(codes, high4(q))));
  }
}

// The same where byte i holds codes 2 i (low) and 2 i + 1 (high).
static inline void scaled_pairs(B q, V scale_a, V scale_b, V& a, V& b) {
  const B lo = low4(q), hi = high4(q), first = interleave_low(lo, hi), second = interleave_high(lo, hi);
  if constexpr (kHasTable16) {
    const V t = load(kE2M1DoubledF);
    a = mul(table_low(t, first), scale_a);
    b = mul(table_low(t, second), scale_b);
  } else {
    a = mul(from_i8(lookup(kE2M1Doubled, first)), scale_a);
    b = mul(from_i8(lookup(kE2M1Doubled, second)), scale_b);
  }
}

template <> struct Expand<Format::f32> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const float* p = reinterpret_cast<const float*>(r.data + 128 * g);
    a = load(p);
    b = load(p + 16);
  }
};

template <> struct Expand<Format::f16> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    a = from_f16(r.data + 64 * g);
    b = from_f16(r.data + 64 * g + 32);
  }
};

template <> struct Expand<Format::bf16> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    a = from_bf16(r.data + 64 * g);
    b = from_bf16(r.data + 64 * g + 32);
  }
};

template <> struct Expand<Format::fp8_e4m3> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const V s = set1(r.block_scale[(g / 4) * r.block_scale_step]);  // 128 weights share a scale
    a = mul(from_e4m3(load16(r.data + 32 * g)), s);
    b = mul(from_e4m3(load16(r.data + 32 * g + 16)), s);
  }
};

template <> struct Expand<Format::mxfp4> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const V s = set1(kHalfE8M0.value[r.scales[g]]);
    scaled_pairs(load16(r.data + 16 * g), s, s, a, b);
  }
};

template <> struct Expand<Format::mxfp4_gguf> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 17 * g;
    scaled_nibbles(load16(p + 1), kHalfE8M0.value[p[0]], kE2M1DoubledF, kE2M1Doubled, a, b);
  }
};

// (E2M1 * E4M3) is exact, so the one rounding is that of the product with the tensor's scale.
template <> struct Expand<Format::nvfp4> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* s = r.scales + 2 * g;
    scaled_pairs(load16(r.data + 16 * g), set1(0.5f * kE4M3.value[s[0]]), set1(0.5f * kE4M3.value[s[1]]), a, b);
    const V whole = set1(r.global_scale);
    a = mul(a, whole);
    b = mul(b, whole);
  }
};

template <> struct Expand<Format::q4_0> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 18 * g;
    const B q = load16(p + 2);
    if constexpr (kHasTable16) {
      scaled_nibbles(q, f16(p), kIotaMinus8, nullptr, a, b);
    } else {
      const V d = set1(f16(p));
      a = mul(d, from_i8(bsub(low4(q), 8)));
      b = mul(d, from_i8(bsub(high4(q), 8)));
    }
  }
};

template <> struct Expand<Format::q4_1> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 20 * g;
    const B q = load16(p + 4);
    const V d = set1(f16(p)), m = set1(f16(p + 2));
    if constexpr (kHasTable16) {
      const V t = add(mul(d, load(kIota)), m);
      a = table_low(t, q);
      b = table_high(t, q);
    } else {
      a = add(mul(d, from_u8(low4(q))), m);
      b = add(mul(d, from_u8(high4(q))), m);
    }
  }
};

template <> struct Expand<Format::q5_0> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 22 * g;
    const B q = load16(p + 6);
    const V d = set1(f16(p));
    a = mul(d, from_i8(bsub(bor(low4(q), spread_bits(u16_at(p + 2), 16)), 16)));
    b = mul(d, from_i8(bsub(bor(high4(q), spread_bits(u16_at(p + 4), 16)), 16)));
  }
};

template <> struct Expand<Format::q5_1> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 24 * g;
    const B q = load16(p + 8);
    const V d = set1(f16(p)), m = set1(f16(p + 2));
    a = add(mul(d, from_u8(bor(low4(q), spread_bits(u16_at(p + 4), 16)))), m);
    b = add(mul(d, from_u8(bor(high4(q), spread_bits(u16_at(p + 6), 16)))), m);
  }
};

template <> struct Expand<Format::q8_0> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 34 * g;
    const V d = set1(f16(p));
    a = mul(from_i8(load16(p + 2)), d);
    b = mul(from_i8(load16(p + 18)), d);
  }
};

template <> struct Expand<Format::iq4_nl> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 18 * g;
    scaled_nibbles(load16(p + 2), f16(p), kIq4ValuesF, kIq4Values, a, b);
  }
};

// --- superblocks of 256 weights: sub-block j holds weights 32 j to 32 j + 31

template <> struct Expand<Format::iq4_xs> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 136 * (g >> 3);
    const int j = static_cast<int>(g & 7);
    const int low = (p[4 + j / 2] >> (4 * (j & 1))) & 15, high = (u16_at(p + 2) >> (2 * j)) & 3;
    const float scale = f16(p) * static_cast<float>((low | high << 4) - 32);
    scaled_nibbles(load16(p + 8 + 16 * j), scale, kIq4ValuesF, kIq4Values, a, b);
  }
};

// Six-bit scale and minimum of sub-block j (Q4_K and Q5_K): 0-3 in bytes j and j + 4, 4-7 split.
static inline void scale_min(const uint8_t* s, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = s[j] & 63;
    minimum = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | ((s[j - 4] >> 2) & 48);
    minimum = (s[j + 4] >> 4) | ((s[j] >> 2) & 48);
  }
}

template <> struct Expand<Format::q4_k> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 144 * (g >> 3);
    const int j = static_cast<int>(g & 7);
    int scale, minimum;
    scale_min(p + 4, j, scale, minimum);
    const V d = set1(f16(p) * static_cast<float>(scale)), m = set1(f16(p + 2) * static_cast<float>(minimum));
    const uint8_t* codes = p + 16 + 32 * (j / 2);
    const B q0 = load16(codes), q1 = load16(codes + 16);
    if constexpr (kHasTable16) {
      const V t = sub(mul(d, load(kIota)), m);
      a = j & 1 ? table_high(t, q0) : table_low(t, q0);
      b = j & 1 ? table_high(t, q1) : table_low(t, q1);
    } else {
      a = sub(mul(d, from_u8(bits<15>(q0, 4 * (j & 1)))), m);
      b = sub(mul(d, from_u8(bits<15>(q1, 4 * (j & 1)))), m);
    }
  }
};

template <> struct Expand<Format::q5_k> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 176 * (g >> 3);
    const int j = static_cast<int>(g & 7);
    int scale, minimum;
    scale_min(p + 4, j, scale, minimum);
    const V d = set1(f16(p) * static_cast<float>(scale)), m = set1(f16(p + 2) * static_cast<float>(minimum));
    const uint8_t* codes = p + 48 + 32 * (j / 2);
    const B h0 = shl<4>(bits<1>(load16(p + 16), j)), h1 = shl<4>(bits<1>(load16(p + 32), j));
    a = sub(mul(d, from_u8(bor(bits<15>(load16(codes), 4 * (j & 1)), h0))), m);
    b = sub(mul(d, from_u8(bor(bits<15>(load16(codes + 16), 4 * (j & 1)), h1))), m);
  }
};

template <> struct Expand<Format::q6_k> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 210 * (g >> 3);
    const int half = static_cast<int>(g >> 2) & 1, j = static_cast<int>(g & 3);
    const uint8_t* low = p + 64 * half + 32 * (j & 1);
    const uint8_t* high = p + 128 + 32 * half;
    const float d = f16(p + 208);
    const int8_t* scale = reinterpret_cast<const int8_t*>(p + 192) + 8 * half + 2 * j;
    const B q0 = bor(bits<15>(load16(low), 4 * (j >> 1)), shl<4>(bits<3>(load16(high), 2 * j)));
    const B q1 = bor(bits<15>(load16(low + 16), 4 * (j >> 1)), shl<4>(bits<3>(load16(high + 16), 2 * j)));
    a = mul(set1(d * static_cast<float>(scale[0])), from_i8(bsub(q0, 32)));
    b = mul(set1(d * static_cast<float>(scale[1])), from_i8(bsub(q1, 32)));
  }
};

template <> struct Expand<Format::q2_k> {
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 84 * (g >> 3);
    const int j = static_cast<int>(g & 7);
    const float d = f16(p + 80), minimum = f16(p + 82);
    const uint8_t* codes = p + 16 + 32 * (j >> 2);
    const uint8_t s0 = p[2 * j], s1 = p[2 * j + 1];
    const V q0 = from_u8(bits<3>(load16(codes), 2 * (j & 3))), q1 = from_u8(bits<3>(load16(codes + 16), 2 * (j & 3)));
    a = sub(mul(set1(d * static_cast<float>(s0 & 15)), q0), set1(minimum * static_cast<float>(s0 >> 4)));
    b = sub(mul(set1(d * static_cast<float>(s1 & 15)), q1), set1(minimum * static_cast<float>(s1 >> 4)));
  }
};

template <> struct Expand<Format::q3_k> {
  static inline float scale(const uint8_t* s, int i) {
    const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4, high = (s[8 + (i & 3)] >> (2 * (i >> 2))) & 3;
    return static_cast<float>((low | high << 4) - 32);
  }
  static inline void run(const Row& r, int64_t g, V& a, V& b) {
    const uint8_t* p = r.data + 110 * (g >> 3);
    const int j = static_cast<int>(g & 7);
    const float d = f16(p + 108);
    const uint8_t* codes = p + 32 + 32 * (j >> 2);
    // A set mask bit adds 4, so code + 4 * bit - 4 is the signed value.
    const B q0 = bor(bits<3>(load16(codes), 2 * (j & 3)), shl<2>(bits<1>(load16(p), j)));
    const B q1 = bor(bits<3>(load16(codes + 16), 2 * (j & 3)), shl<2>(bits<1>(load16(p + 16), j)));
    a = mul(set1(d * scale(p + 96, 2 * j)), from_i8(bsub(q0, 4)));
    b = mul(set1(d * scale(p + 96, 2 * j + 1)), from_i8(bsub(q1, 4)));
  }
};

// The last `count` < 32 weights of a row whose length is no multiple of 32, zero-padded, without
// reading past them: the bytes are copied aside first.
template <Format F> static inline void expand_tail(const Row& r, int64_t g, int64_t count, V& a, V& b) {
  constexpr int bits_each = F == Format::f32 ? 32 : F == Format::f16 || F == Format::bf16 ? 16
                            : F == Format::fp8_e4m3 ? 8 : F == Format::nvfp4 ? 4 : 0;
  if constexpr (bits_each == 0) {
    a = b = zero();  // block formats have whole groups only; checked when the matrix is made
  } else {
    alignas(64) uint8_t bytes[kGroup * bits_each / 8] = {};
    std::memcpy(bytes, r.data + g * kGroup * bits_each / 8, static_cast<size_t>(count * bits_each / 8));
    uint8_t scales[2] = {0, 0};
    Row copy{bytes, scales, r.block_scale, 0, r.global_scale};
    float scale = 0.0f;
    if constexpr (F == Format::fp8_e4m3) {
      scale = r.block_scale[(g / 4) * r.block_scale_step];
      copy.block_scale = &scale;
    }
    if constexpr (F == Format::nvfp4) scales[0] = r.scales[2 * g];
    Expand<F>::run(copy, 0, a, b);
    alignas(64) float padded_values[kGroup];
    store(padded_values, a);
    store(padded_values + 16, b);
    for (int64_t i = count; i < kGroup; ++i) padded_values[i] = 0.0f;
    a = load(padded_values);
    b = load(padded_values + 16);
  }
}

}  // namespace headrace::HEADRACE_NS
