// Products of tiles on AMX-BF16 (Sapphire Rapids and later).
//
// One tdpbf16ps multiplies a tile of weights by a tile of activations in 16 cycles and answers after 52, so four
// sums are at work in turn: 32 rows x 32 tokens, or up to 64 rows x 16 tokens where few are left.
#include "amx_state.h"
#include "tile_parts.h"

namespace headrace {
namespace {

constexpr int64_t kRowNbytes = 64;
constexpr int64_t kBlockWords = kTileTerms * kTileWords;  // a step of activations

// Tiles are named by constants: sums in 0 to 3, weights in 4 and 5, activations in 6 and 7.
#define HEADRACE_FOUR(first, second, left, right) \
  _tile_dpbf16ps(0, first, left);                 \
  _tile_dpbf16ps(1, second, left);                \
  _tile_dpbf16ps(2, first, right);                \
  _tile_dpbf16ps(3, second, right);

// 32 rows x 32 tokens: sums of (rows 0, tokens 0), (1, 0), (0, 1), (1, 1).
template <int Terms>
void square(const uint16_t* a0, const uint16_t* a1, const uint16_t* b0, const uint16_t* b1, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, a0, kRowNbytes);
    _tile_loadd(6, b0, kRowNbytes);
    _tile_loadd(5, a1, kRowNbytes);
    _tile_loadd(7, b1, kRowNbytes);
    HEADRACE_FOUR(4, 5, 6, 7)
    if constexpr (Terms == 2) {
      _tile_loadd(4, a0 + kTileWords, kRowNbytes);
      _tile_loadd(5, a1 + kTileWords, kRowNbytes);
      HEADRACE_FOUR(4, 5, 6, 7)
      _tile_loadd(4, a0, kRowNbytes);
      _tile_loadd(5, a1, kRowNbytes);
    }
    _tile_loadd(6, b0 + kTileWords, kRowNbytes);
    _tile_loadd(7, b1 + kTileWords, kRowNbytes);
    HEADRACE_FOUR(4, 5, 6, 7)
    a0 += Terms * kTileWords;
    a1 += Terms * kTileWords;
    b0 += kBlockWords;
    b1 += kBlockWords;
  }
  _tile_stored(0, sums, kRowNbytes);
  _tile_stored(1, sums + 256, kRowNbytes);
  _tile_stored(2, sums + 512, kRowNbytes);
  _tile_stored(3, sums + 768, kRowNbytes);
}
#undef HEADRACE_FOUR

// Tiles 4 and 5 take turns, so that a product need not wait for the next rows.
#define HEADRACE_ROW(i, tile, term, x)                                      \
  if constexpr (N > i) {                                                    \
    _tile_loadd(tile, a + i * apart + (term) * kTileWords, kRowNbytes);     \
    _tile_dpbf16ps(i, tile, x);                                             \
  }
#define HEADRACE_ROWS(term, x) \
  HEADRACE_ROW(0, 4, term, x) HEADRACE_ROW(1, 5, term, x) HEADRACE_ROW(2, 4, term, x) HEADRACE_ROW(3, 5, term, x)

// 16 N rows x 16 tokens.
template <int Terms, int N>
void column(const uint16_t* a, int64_t apart, const uint16_t* b, int64_t steps, float* sums) {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, a += Terms * kTileWords, b += kBlockWords) {
    _tile_loadd(6, b, kRowNbytes);
    _tile_loadd(7, b + kTileWords, kRowNbytes);
    HEADRACE_ROWS(0, 6)
    if constexpr (Terms == 2) { HEADRACE_ROWS(1, 6) }
    HEADRACE_ROWS(0, 7)
  }
  _tile_stored(0, sums, kRowNbytes);
  if constexpr (N > 1) _tile_stored(1, sums + 256, kRowNbytes);
  if constexpr (N > 2) _tile_stored(2, sums + 512, kRowNbytes);
  if constexpr (N > 3) _tile_stored(3, sums + 768, kRowNbytes);
}
#undef HEADRACE_ROWS
#undef HEADRACE_ROW

template <int Terms>
void columns(const TileProduct& p, int64_t t, int64_t apart) {
  alignas(64) float sums[4 * kTile * kTile];
  for (int64_t r = 0; r < p.rows; r += 4 * kTile) {
    const uint16_t* a = p.weights + r / kTile * apart;
    const int64_t n = tiles_of(p.rows - r);
    switch (n) {
      case 1: column<Terms, 1>(a, apart, p.blocks[t / kTile], p.steps, sums); break;
      case 2: column<Terms, 2>(a, apart, p.blocks[t / kTile], p.steps, sums); break;
      case 3: column<Terms, 3>(a, apart, p.blocks[t / kTile], p.steps, sums); break;
      default: column<Terms, 4>(a, apart, p.blocks[t / kTile], p.steps, sums);
    }
    for (int64_t i = 0; i < 4 && i < n; ++i)
      store_sums(sums + 256 * i, p.rows - r - kTile * i, p.tokens - t, p.out + t, r + kTile * i);
  }
}

template <int Terms>
void multiply_terms(const TileProduct& p) {
  alignas(64) float sums[4 * kTile * kTile];
  const int64_t apart = p.steps * Terms * kTileWords;
  for (int64_t t = 0; t < p.tokens; t += 2 * kTile) {
    if (p.tokens - t <= kTile) {
      columns<Terms>(p, t, apart);
      continue;
    }
    const uint16_t *b0 = p.blocks[t / kTile], *b1 = p.blocks[t / kTile + 1];
    for (int64_t r = 0; r < p.rows; r += 2 * kTile) {
      const uint16_t* a = p.weights + r / kTile * apart;
      const bool both = p.rows - r > kTile;
      square<Terms>(a, both ? a + apart : a, b0, b1, p.steps, sums);
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t row = r + i % 2 * kTile, token = t + i / 2 * kTile;
        if (row < p.rows) store_sums(sums + 256 * i, p.rows - row, p.tokens - token, p.out + token, row);
      }
    }
  }
}

void multiply(const TileProduct& p) {
  const TilesInUse tiles;
  if (p.terms == 1) multiply_terms<1>(p);
  else multiply_terms<2>(p);
}

}  // namespace

const BlockTileKernels& amx_block_tiles();

const TileKernels& amx_tile_kernels() {
  static const TileKernels kernels{"avx512_amx", pack_tiles, expand_tiles, multiply, pack_narrow, multiply_narrow_amx, amx_block_tiles()};
  return kernels;
}

}  // namespace headrace
