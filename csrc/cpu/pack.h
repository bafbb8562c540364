// csrc/cpu/pack.h: operands of a product as bf16 pairs: [pair of k][lane], a pair being two values that follow each other in k.
#pragma once
#include "machine.h"
#include "storage.h"

namespace fusedpg::FUSEDPG_ISA {

#if defined(__AVX512BF16__)

/// A mask of the first n lanes of 16.
FPG_FN __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }

/// Up to 16 pairs from 2n values that follow each other in memory; zeros behind them.
FPG_FN __m512i pairs_along(const uint16_t* p, int64_t n) {
  const __mmask32 mask = n >= 32 ? ~__mmask32{} : (__mmask32{1} << n) - 1;
  return _mm512_maskz_loadu_epi16(mask, p);
}
FPG_FN __m512i pairs_along(const float* p, int64_t n) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(n), p);
  const __m512 high = _mm512_maskz_loadu_ps(first_lanes(n - 16), p + 16);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/// n values that follow each other in memory as the low halves of 16 lanes.
FPG_FN __m512i low_halves(const uint16_t* p, int64_t n) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
FPG_FN __m512i low_halves(const float* p, int64_t n) {
  return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(n), p)));
}

/// Rows become columns: a 16 x 16 square of 32-bit values.
FPG_FN void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  FPG_UNROLL for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  FPG_UNROLL for (int i = 0; i < 4; ++i) FPG_UNROLL for (int j = 0; j < 2; ++j) {
    r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + j + 2]);
    r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + j + 2]);
  }
  FPG_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  FPG_UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

/// Lanes whose values follow each other in k: squares of 16 lanes by 16 pairs, turned.
template <int64_t PANEL, class S>
static void pack_along(const Operand& o, uint32_t* out) {
  const S* lane[PANEL];
  for (int64_t i = 0; i < smaller(PANEL, o.lanes); ++i) lane[i] = reinterpret_cast<const S*>(o.row(i));
  for (int64_t k = 0; k < o.depth; k += 32)
    for (int64_t first = 0; first < PANEL; first += 16) {
      __m512i square[16];
      FPG_UNROLL for (int i = 0; i < 16; ++i) square[i] =
          first + i < smaller(PANEL, o.lanes) ? pairs_along(lane[first + i] + k, o.depth - k) : _mm512_setzero_si512();
      transpose(square);
      const __mmask16 inside = first_lanes(PANEL - first);
      FPG_UNROLL for (int i = 0; i < 16; ++i) if (k + 2 * i < o.depth)
          _mm512_mask_storeu_epi32(out + (k / 2 + i) * PANEL + first, inside, square[i]);
    }
}

/// Lanes that follow each other in memory: two rows of them make a row of pairs.
template <int64_t PANEL, class S>
static void pack_across(const Operand& o, uint32_t* out) {
  for (int64_t k = 0; k < o.depth; k += 2) {
    const S* even = reinterpret_cast<const S*>(o.row(k));
    const S* odd = k + 1 < o.depth ? reinterpret_cast<const S*>(o.row(k + 1)) : nullptr;
    for (int64_t first = 0; first < PANEL; first += 16) {
      const __m512i low = low_halves(even + first, o.lanes - first);
      const __m512i high = odd ? low_halves(odd + first, o.lanes - first) : _mm512_setzero_si512();
      const __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      _mm512_mask_storeu_epi32(out + k / 2 * PANEL + first, first_lanes(PANEL - first), pairs);
    }
  }
}

template <int64_t PANEL, class S>
static void pack_as(const Operand& o, uint32_t* out) {
  o.along() ? pack_along<PANEL, S>(o, out) : pack_across<PANEL, S>(o, out);
}

/// PANEL lanes of an operand; zeros where it has fewer.
template <int64_t PANEL>
static void pack(const Operand& o, uint32_t* out) {
  (o.dtype == DType::bf16 ? pack_as<PANEL, uint16_t> : pack_as<PANEL, float>)(o, out);
}

/// Brings one of `shares` parts of the memory of `most` lanes nearer; a hint, which may name memory that is not there.
FPG_FN void fetch_share(const Operand& o, int64_t most, int64_t share, int64_t shares) {
  const int64_t lanes = smaller(most, o.lanes);
  const int64_t rows = o.along() ? lanes : o.depth, bytes = (o.along() ? o.depth : lanes) * size_of(o.dtype);
  for (int64_t row = rows * share / shares; row < rows * (share + 1) / shares; ++row)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(o.row(row) + at, 0, 2);
}

#endif

}  // namespace fusedpg::FUSEDPG_ISA
