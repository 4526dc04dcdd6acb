// Sealed pages as float32 rows: what attend_tile reads. All products are by powers of two or by scales of
// few bits, so every instruction set gives the same numbers.
#pragma once

namespace headrace::HEADRACE_NS {

// NVFP4: byte i holds channels i (low) and i + head / 2 (high); scale j belongs to bytes 8 j ... 8 j + 7.
// out[t] = ref + g * s * E2M1[code] + sum over r of (16 g e[t][r]) * directions[r]
static void expand_nvfp4_keys(const SealedKeys& p, int64_t count, int64_t head, float* out) {
  const V table = load(kE2M1DoubledF);
  const int64_t half = head / 2;
  // Up to 256 channels: 128 bytes, and one store of sixteen beyond the last eight.
  alignas(64) float scales[128 + 16];
  for (int64_t t = 0; t < count; ++t) {
    const uint8_t* codes = p.codes + t * half;
    const uint8_t* s = p.scales + t * (head / 16);
    for (int64_t j = 0; j < head / 16; ++j) store(scales + 8 * j, set1(kHalfE4M3.value[s[j]] * p.scale));
    float* row = out + t * head;
    V along[kMaxRank];
    for (int64_t r = 0; r < p.rank; ++r) along[r] = set1(kE4M3.value[p.residuals[t * p.rank + r]] * p.residual_unit);
    const auto corrected = [&](V v, int64_t c) {
      for (int64_t r = 0; r < p.rank; ++r) v = fma(along[r], load(p.directions + r * head + c), v);
      return v;
    };
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
      const B b = load16(codes + i);
      const V step = load(scales + i);
      store(row + i, corrected(fma(table_low(table, b), step, load(p.ref + i)), i));
      store(row + half + i, corrected(fma(table_high(table, b), step, load(p.ref + half + i)), half + i));
    }
    for (int64_t c = i; c < half; ++c) {  // eight bytes are left where the head is an odd number of groups
      for (int high = 0; high < 2; ++high) {
        const int64_t at = c + high * half;
        float v = std::fma(kE2M1DoubledF[high ? codes[c] >> 4 : codes[c] & 15], scales[c], p.ref[at]);
        for (int64_t r = 0; r < p.rank; ++r)
          v = std::fma(kE4M3.value[p.residuals[t * p.rank + r]] * p.residual_unit, p.directions[r * head + at], v);
        row[at] = v;
      }
    }
  }
}

static void expand_fp8_rows(const uint8_t* codes, int64_t n, float scale, float* out) {
  const V factor = set1(scale);
  for (int64_t i = 0; i < n; i += 16) store(out + i, mul(from_e4m3(load16(codes + i)), factor));
}

// Values lie transposed, [head, page]: sixteen channels of sixteen tokens are turned as bytes. Writing row
// i and row i + 8 alternately, byte by byte, four times over, is the transposition.
static void expand_fp8_columns(const uint8_t* codes, int64_t page, int64_t count, int64_t head, float scale, float* out) {
  const V factor = set1(scale);
  for (int64_t t = 0; t < count; t += 16)
    for (int64_t d = 0; d < head; d += 16) {
      B a[16], b[16];
      for (int i = 0; i < 16; ++i) a[i] = load16(codes + (d + i) * page + t);
      for (int round = 0; round < 2; ++round) {
        for (int i = 0; i < 8; ++i) { b[2 * i] = interleave_low(a[i], a[i + 8]); b[2 * i + 1] = interleave_high(a[i], a[i + 8]); }
        for (int i = 0; i < 8; ++i) { a[2 * i] = interleave_low(b[i], b[i + 8]); a[2 * i + 1] = interleave_high(b[i], b[i + 8]); }
      }
      for (int i = 0; i < 16; ++i) store(out + (t + i) * head + d, mul(from_e4m3(a[i]), factor));
    }
}

}  // namespace headrace::HEADRACE_NS
