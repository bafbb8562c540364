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

/// The rows of memory of an operand: lanes, or values of k where lanes follow each other.
template <class S>
struct OperandRows {
  const S* data;
  int64_t stride;
  const int64_t* order;
  explicit FPG_INLINE OperandRows(const Operand& o) : data(static_cast<const S*>(o.data)), stride(o.stride()), order(o.order) {}
  FPG_INLINE const S* operator[](int64_t i) const { return data + (order ? order[i] : i) * stride; }
};

/// Lanes whose values follow each other in k: squares of 16 lanes by 16 pairs, turned.
template <int64_t PANEL, class S>
static void pack_along(const Operand& o, uint32_t* out) {
  const OperandRows<S> rows(o);
  const S* lane[PANEL];
  const int64_t lanes = smaller(PANEL, o.lanes);
  for (int64_t i = 0; i < lanes; ++i) lane[i] = rows[i];
  for (int64_t k = 0; k < o.depth; k += 32)
    for (int64_t first = 0; first < PANEL; first += 16) {
      __m512i square[16];
      FPG_UNROLL for (int i = 0; i < 16; ++i) square[i] =
          first + i < lanes ? pairs_along(lane[first + i] + k, o.depth - k) : _mm512_setzero_si512();
      transpose(square);
      const __mmask16 inside = first_lanes(PANEL - first);
      FPG_UNROLL for (int i = 0; i < 16; ++i) if (k + 2 * i < o.depth)
          _mm512_mask_storeu_epi32(out + (k / 2 + i) * PANEL + first, inside, square[i]);
    }
}

/// Lanes that follow each other in memory: two rows of them make a row of pairs.
template <int64_t PANEL, class S>
static void pack_across(const Operand& o, uint32_t* out) {
  const OperandRows<S> rows(o);
  for (int64_t k = 0; k < o.depth; k += 2) {
    const S *even = rows[k], *odd = k + 1 < o.depth ? rows[k + 1] : nullptr;
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

/// Brings a line of memory into the second cache; the first one is full of packed operands.
FPG_FN void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class S>
FPG_FN void fetch_rows(const Operand& o, int64_t begin, int64_t end, int64_t count) {
  const OperandRows<S> rows(o);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t at = 0; at < count; at += 64 / static_cast<int64_t>(sizeof(S))) fetch(rows[row] + at);
}

/// Brings one of `shares` parts of the memory of `most` lanes nearer; a hint, which may name memory that is not there.
FPG_FN void fetch_share(const Operand& o, int64_t most, int64_t share, int64_t shares) {
  const int64_t lanes = smaller(most, o.lanes), rows = o.along() ? lanes : o.depth, count = o.along() ? o.depth : lanes;
  (o.dtype == DType::bf16 ? fetch_rows<uint16_t> : fetch_rows<float>)(o, rows * share / shares, rows * (share + 1) / shares,
                                                                      count);
}

#endif

}  // namespace fusedpg::FUSEDPG_ISA
