// csrc/cpu/product.h: C = A B or C += A B with 16-bit operands and sums in fp32, which torch has on GPUs only. In the build
// that multiplies pairs of bf16 (v4bf16); elsewhere `PRODUCT` is null.
//
// Both operands are packed into panels of lanes, [pairs of k][lane][2], which the inner kernel walks in order. What a value of
// C adds up, and in which order, depends on k alone: not on the other rows and columns, nor on the threads.
#pragma once
#include "pack.h"

namespace fusedpg::FUSEDPG_ISA {

#if defined(__AVX512BF16__)

/// Rows and columns of the inner kernel: 24 sums, two vectors of B and a broadcast pair of A fill the registers.
constexpr int64_t PRODUCT_ROWS = 12, PRODUCT_COLUMNS = 32;
/// What is packed at a time: less than half of a second cache of A, the first cache of B.
constexpr int64_t PRODUCT_K = 512, PRODUCT_M = 34 * PRODUCT_ROWS;
/// Columns whose sums stay in the last cache from one block of k to the next.
constexpr int64_t PRODUCT_N = 2048;

struct ProductTile {
  float* out;
  int64_t stride, rows, columns;
  bool add;
};

/// One tile over `pairs` of k: all PRODUCT_ROWS x PRODUCT_COLUMNS sums, of which those inside C are stored.
static void product_tile(int64_t pairs, const uint32_t* a, const uint32_t* b, const ProductTile& c) {
  __m512 sum[PRODUCT_ROWS][2];
  FPG_UNROLL for (int r = 0; r < PRODUCT_ROWS; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, a += PRODUCT_ROWS, b += PRODUCT_COLUMNS) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(b), right = (__m512bh)_mm512_loadu_si512(b + 16);
    FPG_UNROLL for (int r = 0; r < PRODUCT_ROWS; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[r]));
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], left, pair);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], right, pair);
    }
  }
  const __mmask16 mask[2] = {first_lanes(c.columns), first_lanes(c.columns - 16)};
  FPG_UNROLL for (int r = 0; r < PRODUCT_ROWS; ++r) {
    if (r >= c.rows) break;
    FPG_UNROLL for (int half = 0; half < 2; ++half) {
      float* out = c.out + r * c.stride + 16 * half;
      const __m512 before = c.add ? _mm512_maskz_loadu_ps(mask[half], out) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(out, mask[half], _mm512_add_ps(before, sum[r][half]));
    }
  }
}

/// The tiles of one panel of B and some panels of A; between them a share of what the next panel will be packed from is
/// fetched.
FPG_FN void product_panel(int64_t pairs, const uint32_t* a, int64_t rows, const uint32_t* b, const Operand& next,
                          ProductTile c) {
  const int64_t tiles = blocks_of(rows, PRODUCT_ROWS);
  for (int64_t i = 0; i < tiles; ++i, a += pairs * PRODUCT_ROWS) {
    fetch_share(next, PRODUCT_COLUMNS, i, tiles);
    c.rows = rows - i * PRODUCT_ROWS;
    product_tile(pairs, a, b, c);
    c.out += PRODUCT_ROWS * c.stride;
  }
}

/// At most PRODUCT_M rows by PRODUCT_K; every thread of a team calls it.
static void product_block(const Operand& a, const Operand& b, int64_t threads, uint32_t* packed, const ProductTile& c) {
  const int64_t pairs = blocks_of(a.depth, 2);
  const int64_t a_panels = blocks_of(a.lanes, PRODUCT_ROWS), b_panels = blocks_of(b.lanes, PRODUCT_COLUMNS);
  // where columns are few, several tasks share a panel of B, and each packs it for itself
  const int64_t groups = smaller(a_panels, blocks_of(4 * threads, b_panels));
#pragma omp for schedule(static)
  for (int64_t p = 0; p < a_panels; ++p) {
    const int64_t lane = p * PRODUCT_ROWS;
    pack<PRODUCT_ROWS>(a.part(lane, 0, a.lanes - lane, a.depth), packed + lane * pairs);
  }
  auto* own = static_cast<uint32_t*>(thread_scratch(Slot::block, PRODUCT_K / 2 * PRODUCT_COLUMNS * sizeof(uint32_t)));
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < b_panels * groups; ++task) {
    const int64_t lane = task / groups * PRODUCT_COLUMNS, group = task % groups;
    const int64_t first = a_panels * group / groups * PRODUCT_ROWS;
    const int64_t end = smaller(a.lanes, a_panels * (group + 1) / groups * PRODUCT_ROWS);
    pack<PRODUCT_COLUMNS>(b.part(lane, 0, b.lanes - lane, b.depth), own);
    if (a.depth_stride == 1) fetch_share(a.part(0, a.depth, a.lanes, a.depth), a.lanes, task, b_panels * groups);
    const int64_t next = smaller(lane + blocks_of(threads, groups) * PRODUCT_COLUMNS, b.lanes);  // of this thread, more or less
    product_panel(pairs, packed + first * pairs, end - first, own, b.part(next, 0, b.lanes - next, b.depth),
                  {c.out + first * c.stride + lane, c.stride, 0, b.lanes - lane, c.add});
  }
}

/// Blocks of columns, of rows and of k, each by the whole team.
static void multiply(int threads, const Operand& a, const Operand& b, float* out, int64_t stride, bool add) {
  const int64_t panels = blocks_of(a.lanes, PRODUCT_ROWS), blocks = larger(1, blocks_of(a.lanes, PRODUCT_M));
  const int64_t each = blocks_of(panels, blocks) * PRODUCT_ROWS, wide = a.depth > PRODUCT_K ? PRODUCT_N : larger(1, b.lanes);
  auto* packed = static_cast<uint32_t*>(thread_scratch(Slot::packed, PRODUCT_M * PRODUCT_K / 2 * sizeof(uint32_t)));
#pragma omp parallel num_threads(threads)
  for (int64_t left = 0; left < b.lanes; left += wide)
    for (int64_t top = 0; top < a.lanes; top += each)
      for (int64_t k = 0; k == 0 || k < a.depth; k += PRODUCT_K) {
        const int64_t rows = smaller(each, a.lanes - top), columns = smaller(wide, b.lanes - left);
        const int64_t depth = smaller(PRODUCT_K, a.depth - k);
        product_block(a.part(top, k, rows, depth), b.part(left, k, columns, depth), threads, packed,
                      {out + top * stride + left, stride, 0, 0, add || k > 0});
      }
}

constexpr Product* PRODUCT = multiply;

#else

constexpr Product* PRODUCT = nullptr;

#endif

}  // namespace fusedpg::FUSEDPG_ISA
