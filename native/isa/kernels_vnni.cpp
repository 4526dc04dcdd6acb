// Matrix times vector on AVX-512 VNNI and BF16: a second numerics mode, chosen by name only
// (HEADRACE_ISA=avx512_vnni), since its tokens are those of 15-bit activations and not of float32.
//
// Block formats: activations become two int8 terms per block of 32, x = s (256 h + l) with
// s = max|x| / 32512, so 15 bits and a sign, finer than bfloat16. Weights become unsigned bytes (code +
// offset) for vpdpbusd; the integer sums of a block are exact, and blocks are added in ascending order by
// one fused multiply-add per lane. bf16: activations become two bfloat16 terms, x = hi + lo, for
// vdpbf16ps. A row's sum never depends on other rows or tokens: `rowwise` keeps the batch in this order.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "../blocks.h"
#include "../kernels.h"
#include "../tables.h"

namespace headrace {
namespace vnni {
namespace {

constexpr int64_t kPair = 64;          // weights per register: two blocks of 32
constexpr int64_t kAheadNbytes = 4096;  // prefetch distance, as in dot.h

// One row of activations in the order in which a format's codes lie in a register.
struct Terms {
  std::vector<int8_t> high, low;  // [pairs, 64]
  std::vector<int32_t> sums;      // [pairs, 16]: sum of the four integers of each lane
  std::vector<float> scales;      // [pairs, 16]: s of the lane's block
};

// `paired`: codes 2i and 2i + 1 share a byte (mxfp4 as Hugging Face stores it), so that even elements
// come before odd ones; else element j and j + 16 do, and elements are in order.
void quantise(const float* x, int64_t cols, bool paired, Terms& t) {
  const int64_t pairs = (cols + kPair - 1) / kPair;
  t.high.assign(static_cast<size_t>(pairs * 64), 0);
  t.low.assign(static_cast<size_t>(pairs * 64), 0);
  t.sums.assign(static_cast<size_t>(pairs * 16), 0);
  t.scales.assign(static_cast<size_t>(pairs * 16), 0.0f);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int64_t b = 0; b < cols / 32; ++b) {
    const __m512 x0 = _mm512_loadu_ps(x + 32 * b), x1 = _mm512_loadu_ps(x + 32 * b + 16);
    const __m512 zero = _mm512_setzero_ps();
    // 0 * x is 0 only if x is finite; an infinite or NaN activation must reach the output.
    const __m512 none = _mm512_fmadd_ps(x0, zero, _mm512_mul_ps(x1, zero));
    const bool finite = _mm512_cmp_ps_mask(none, zero, _CMP_EQ_OQ) == 0xffff;
    const float peak = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
    const float scale = peak > 0.0f ? peak / 32512.0f : 1.0f;
    __m512i v0 = _mm512_cvtps_epi32(_mm512_div_ps(x0, _mm512_set1_ps(scale)));
    __m512i v1 = _mm512_cvtps_epi32(_mm512_div_ps(x1, _mm512_set1_ps(scale)));
    if (!finite) v0 = v1 = _mm512_setzero_si512();
    if (paired) {
      const __m512i first = _mm512_permutex2var_epi32(v0, even, v1);
      v1 = _mm512_permutex2var_epi32(v0, odd, v1);
      v0 = first;
    }
    const int64_t at = b / 2 * 64 + b % 2 * 32, lane = b / 2 * 16 + b % 2 * 8;
    for (int half = 0; half < 2; ++half) {
      const __m512i v = half == 0 ? v0 : v1;
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(high, 8));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&t.high[static_cast<size_t>(at + 16 * half)]), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&t.low[static_cast<size_t>(at + 16 * half)]), _mm512_cvtepi32_epi8(low));
      // sums of four neighbours: lanes 0, 4, 8 and 12 after two pairwise additions
      const __m512i two = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
      const __m512i four = _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_BADC));
      const __m512i packed = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), four);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&t.sums[static_cast<size_t>(lane + 4 * half)]), _mm512_castsi512_si128(packed));
    }
    const float s = finite ? scale : std::nanf("");
    _mm256_storeu_ps(&t.scales[static_cast<size_t>(lane)], _mm256_set1_ps(s));
  }
}

inline float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}

inline __m512i nibbles(const uint8_t* first, const uint8_t* second) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i b = second == nullptr ? _mm_setzero_si128() : _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
  const __m512i both = _mm512_castsi256_si512(_mm256_set_m128i(b, a));
  const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), both);
  const __m512i down = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
  return _mm512_and_si512(down, _mm512_set1_epi8(15));
}

// codes(row, g, second): the unsigned codes of blocks g and, if `second`, g + 1; scale(row, g).
template <Format F> struct Code;

template <> struct Code<Format::mxfp4> {
  static constexpr int kOffset = 12, kNbytes = 16;
  static constexpr bool kPaired = true, kMin = false;
  static __m512i table() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  }
  static __m512i codes(const Row& r, int64_t g, bool second) {
    const uint8_t* p = r.data + 16 * g;
    return _mm512_shuffle_epi8(table(), nibbles(p, second ? p + 16 : nullptr));
  }
  static float scale(const Row& r, int64_t g) { return kHalfE8M0.value[r.scales[g]]; }
};

template <> struct Code<Format::mxfp4_gguf> : Code<Format::mxfp4> {
  static constexpr int kNbytes = 17;
  static constexpr bool kPaired = false;
  static __m512i codes(const Row& r, int64_t g, bool second) {
    const uint8_t* p = r.data + 17 * g + 1;
    return _mm512_shuffle_epi8(table(), nibbles(p, second ? p + 17 : nullptr));
  }
  static float scale(const Row& r, int64_t g) { return kHalfE8M0.value[r.data[17 * g]]; }
};

template <class At> struct CodeQ4_0 {
  static constexpr int kOffset = 8, kNbytes = At::kCodes;
  static constexpr bool kPaired = false, kMin = false;
  static __m512i codes(const Row& r, int64_t g, bool second) {
    const uint8_t* p = At::codes(r, g);
    return nibbles(p, second ? p + At::kCodes : nullptr);
  }
  static float scale(const Row& r, int64_t g) { return half_at(At::scales(r, g)); }
};
template <> struct Code<Format::q4_0> : CodeQ4_0<Blocks<Format::q4_0>> {};
template <> struct Code<Format::q4_0_apart> : CodeQ4_0<Blocks<Format::q4_0_apart>> {};

template <> struct Code<Format::q4_1> {
  static constexpr int kOffset = 0, kNbytes = 20;
  static constexpr bool kPaired = false, kMin = true;
  static __m512i codes(const Row& r, int64_t g, bool second) {
    const uint8_t* p = r.data + 20 * g + 4;
    return nibbles(p, second ? p + 20 : nullptr);
  }
  static float scale(const Row& r, int64_t g) { return half_at(r.data + 20 * g); }
  static float minimum(const Row& r, int64_t g) { return half_at(r.data + 20 * g + 2); }
};

template <class At> struct CodeQ8_0 {
  static constexpr int kOffset = 128, kNbytes = At::kCodes;
  static constexpr bool kPaired = false, kMin = false;
  static __m512i codes(const Row& r, int64_t g, bool second) {
    const uint8_t* p = At::codes(r, g);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i b = second ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + At::kCodes)) : _mm256_setzero_si256();
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), _mm512_set1_epi8(-128));
  }
  static float scale(const Row& r, int64_t g) { return half_at(At::scales(r, g)); }
};
template <> struct Code<Format::q8_0> : CodeQ8_0<Blocks<Format::q8_0>> {};
template <> struct Code<Format::q8_0_apart> : CodeQ8_0<Blocks<Format::q8_0_apart>> {};

inline __m512 two(float first, float second) {
  return _mm512_insertf32x8(_mm512_set1_ps(first), _mm256_set1_ps(second), 1);
}

template <Format F>
void dot(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
  using C = Code<F>;
  thread_local Terms t;
  quantise(x, m.cols, C::kPaired, t);
  const int64_t groups = m.cols / 32;
  for (int64_t i = 0; i < count; ++i) {
    const Row r = row_of(m, row0 + i);
    __m512 acc = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g += 2) {
      const bool second = g + 1 < groups;
      const size_t p = static_cast<size_t>(g / 2);
      _mm_prefetch(reinterpret_cast<const char*>(r.data + C::kNbytes * g + kAheadNbytes), _MM_HINT_T0);
      const __m512i w = C::codes(r, g, second);
      const __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(&t.high[64 * p]));
      const __m512i low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, _mm512_loadu_si512(&t.low[64 * p]));
      const __m512i sums = _mm512_loadu_si512(&t.sums[16 * p]);
      __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
      if constexpr (C::kOffset != 0)
        whole = _mm512_sub_epi32(whole, _mm512_mullo_epi32(sums, _mm512_set1_epi32(C::kOffset)));
      const __m512 sx = _mm512_loadu_ps(&t.scales[16 * p]);
      const __m512 scale = two(C::scale(r, g), second ? C::scale(r, g + 1) : 0.0f);
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale, sx), acc);
      if constexpr (C::kMin) {
        const __m512 least = two(C::minimum(r, g), second ? C::minimum(r, g + 1) : 0.0f);
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(least, sx), acc);
      }
    }
    out[i] = _mm512_reduce_add_ps(acc);
  }
}

void dot_bf16(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
  thread_local std::vector<uint16_t> terms;  // [groups, 2, 32]: hi, lo
  const int64_t groups = (m.cols + 31) / 32, rest = m.cols % 32;
  terms.assign(static_cast<size_t>(groups * 64), 0);
  for (int64_t k = 0; k < m.cols; k += 16) {
    const __mmask16 mask = m.cols - k < 16 ? static_cast<__mmask16>((1u << (m.cols - k)) - 1) : 0xffff;
    const __m512 v = _mm512_maskz_loadu_ps(mask, x + k);
    const __m256i high = (__m256i)_mm512_cvtneps_pbh(v);
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
    const __m512 left = _mm512_sub_ps(v, back);
    // Of an infinite activation nothing is left over: inf - inf would be NaN.
    const __mmask16 whole = _mm512_cmp_ps_mask(_mm512_abs_ps(back), _mm512_set1_ps(3.4e38f), _CMP_LE_OQ);
    const __m256i low = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(whole, left));
    uint16_t* to = &terms[static_cast<size_t>(k / 32 * 64 + k % 32)];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), low);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Row r = row_of(m, row0 + i);
    __m512 high = _mm512_setzero_ps(), low = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g) {
      _mm_prefetch(reinterpret_cast<const char*>(r.data + 64 * g + kAheadNbytes), _MM_HINT_T0);
      const __mmask32 mask = g + 1 == groups && rest != 0 ? (1u << rest) - 1 : ~0u;
      const __m512bh w = (__m512bh)_mm512_maskz_loadu_epi16(mask, r.data + 64 * g);
      const uint16_t* t = &terms[static_cast<size_t>(g * 64)];
      high = _mm512_dpbf16_ps(high, w, (__m512bh)_mm512_loadu_si512(t));
      low = _mm512_dpbf16_ps(low, w, (__m512bh)_mm512_loadu_si512(t + 32));
    }
    out[i] = _mm512_reduce_add_ps(_mm512_add_ps(high, low));
  }
}

bool rowwise(Format f) {
  switch (f) {
    case Format::mxfp4: case Format::mxfp4_gguf: case Format::q4_0: case Format::q4_1: case Format::q8_0:
    case Format::q4_0_apart: case Format::q8_0_apart:
    case Format::bf16: return true;
    default: return false;
  }
}

void dot_rows(const Matrix& m, int64_t row0, int64_t count, const float* x, float* out) {
  switch (m.format) {
    case Format::mxfp4: dot<Format::mxfp4>(m, row0, count, x, out); break;
    case Format::mxfp4_gguf: dot<Format::mxfp4_gguf>(m, row0, count, x, out); break;
    case Format::q4_0: dot<Format::q4_0>(m, row0, count, x, out); break;
    case Format::q4_1: dot<Format::q4_1>(m, row0, count, x, out); break;
    case Format::q8_0: dot<Format::q8_0>(m, row0, count, x, out); break;
    case Format::q4_0_apart: dot<Format::q4_0_apart>(m, row0, count, x, out); break;
    case Format::q8_0_apart: dot<Format::q8_0_apart>(m, row0, count, x, out); break;
    case Format::bf16: dot_bf16(m, row0, count, x, out); break;
    default: avx512_kernels().dot_rows(m, row0, count, x, out);
  }
}

}  // namespace
}  // namespace vnni

const Kernels& vnni_kernels() {
  static const Kernels table = [] {
    Kernels k = avx512_kernels();
    k.name = "avx512_vnni";
    k.dot_rows = vnni::dot_rows;
    k.rowwise = vnni::rowwise;
    return k;
  }();
  return table;
}

}  // namespace headrace
