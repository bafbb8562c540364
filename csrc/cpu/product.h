// csrc/cpu/product.h: C = A B or C += A B with 16-bit operands and sums in fp32, which torch has on GPUs only. In the build
// that multiplies pairs of bf16 (v4bf16); elsewhere `PRODUCT` is null.
//
// Each thread has a part of C and packs what it reads for itself into panels of lanes, [pairs of k][lane][2], which the inner
// kernel walks in order: cores that hand each other packed panels lose a quarter of their time where they share no cache.
// What a value of C adds up, and in which order, depends on k alone: not on the other rows and columns, nor on the threads.
#pragma once
#include "pack.h"

namespace fusedpg::FUSEDPG_ISA {

#if defined(__AVX512BF16__)

/// Rows and columns of the inner kernel: 24 sums, two vectors of B and a broadcast pair of A fill the registers.
constexpr int64_t PRODUCT_ROWS = 12, PRODUCT_COLUMNS = 32;
/// What is packed at a time: less than half of a second cache of A, the first cache of B.
constexpr int64_t PRODUCT_K = 512, PRODUCT_M = 34 * PRODUCT_ROWS;
/// Columns whose sums stay near from one block of k to the next.
constexpr int64_t PRODUCT_N = 512;

/// `sums` are added to where `add`; the result goes there, or to `rounded` where that is not null.
struct ProductTile {
  float* sums;
  int64_t stride;
  uint16_t* rounded;
  int64_t rounded_stride, rows, columns;
  bool add;
  FPG_INLINE ProductTile at(int64_t row, int64_t column) const {
    return {sums + row * stride + column,
            stride,
            rounded ? rounded + row * rounded_stride + column : nullptr,
            rounded_stride,
            rows - row,
            columns - column,
            add};
  }
};

/// The memory that a tile's result goes to comes nearer while it is computed.
FPG_FN void fetch_tile(const ProductTile& c) {
  FPG_UNROLL for (int r = 0; r < PRODUCT_ROWS; ++r) {
    if (r >= c.rows) break;
    if (c.rounded) fetch(c.rounded + r * c.rounded_stride);
    if (c.rounded && !c.add) continue;
    fetch(c.sums + r * c.stride);
    fetch(c.sums + r * c.stride + 16);
  }
}

/// One tile over `pairs` of k: all PRODUCT_ROWS x PRODUCT_COLUMNS sums, of which those inside C are stored.
static void product_tile(int64_t pairs, const uint32_t* a, const uint32_t* b, const ProductTile& c) {
  __m512 sum[PRODUCT_ROWS][2];
  FPG_UNROLL for (int r = 0; r < PRODUCT_ROWS; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  fetch_tile(c);
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
      float* out = c.sums + r * c.stride + 16 * half;
      if (c.add) sum[r][half] = _mm512_add_ps(_mm512_maskz_loadu_ps(mask[half], out), sum[r][half]);
      if (!c.rounded) _mm512_mask_storeu_ps(out, mask[half], sum[r][half]);
    }
    if (c.rounded)
      _mm512_mask_storeu_epi16(c.rounded + r * c.rounded_stride, _mm512_kunpackw(mask[1], mask[0]),
                               (__m512i)_mm512_cvtne2ps_pbh(sum[r][1], sum[r][0]));
  }
}

/// What will be packed next, and how far the tiles until then have come: of each a share is fetched between two tiles.
struct ProductNext {
  const Operand &a, &b;
  int64_t panel, panels;
  FPG_INLINE void fetch(int64_t tile, int64_t tiles) const {
    fetch_share(b, PRODUCT_COLUMNS, tile, tiles);
    if (!a.along())
      fetch_share(a, a.lanes, panel * tiles + tile, panels * tiles);  // the processor itself looks ahead along a row
  }
};

/// The tiles of one panel of B.
FPG_FN void product_panel(int64_t pairs, const uint32_t* a, const uint32_t* b, const ProductNext& next, const ProductTile& c) {
  const int64_t tiles = blocks_of(c.rows, PRODUCT_ROWS);
  for (int64_t i = 0; i < tiles; ++i) {
    next.fetch(i, tiles);
    product_tile(pairs, a + i * pairs * PRODUCT_ROWS, b, c.at(i * PRODUCT_ROWS, 0));
  }
}

/// At most PRODUCT_M rows over all of k; `after` is the A of the block that follows.
static void product_block(const Operand& a, const Operand& after, const Operand& b, uint32_t* a_packed, uint32_t* b_packed,
                          const ProductTile& c) {
  for (int64_t k = 0; k == 0 || k < a.depth; k += PRODUCT_K) {
    const int64_t depth = smaller(PRODUCT_K, a.depth - k), pairs = blocks_of(depth, 2);
    for (int64_t lane = 0; lane < a.lanes; lane += PRODUCT_ROWS)
      pack<PRODUCT_ROWS>(a.part(lane, k, a.lanes - lane, depth), a_packed + lane * pairs);
    ProductTile tile = c;
    tile.add = c.add || k > 0;
    if (k + PRODUCT_K < a.depth) tile.rounded = nullptr;
    const int64_t behind = smaller(a.depth, k + PRODUCT_K);
    const Operand next_a = behind < a.depth ? a.part(0, behind, a.lanes, smaller(PRODUCT_K, a.depth - behind)) : after;
    for (int64_t lane = 0; lane < b.lanes; lane += PRODUCT_COLUMNS) {
      const int64_t next = smaller(lane + PRODUCT_COLUMNS, b.lanes);
      pack<PRODUCT_COLUMNS>(b.part(lane, k, b.lanes - lane, depth), b_packed);
      const Operand next_b = b.part(next, k, b.lanes - next, depth);
      product_panel(pairs, a_packed, b_packed, {next_a, next_b, lane / PRODUCT_COLUMNS, blocks_of(b.lanes, PRODUCT_COLUMNS)},
                    tile.at(0, lane));
    }
  }
}

/// A T for each of `count`, in memory of the thread.
template <class T>
static T* product_scratch(Slot slot, int64_t count) {
  return static_cast<T*>(thread_scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}

/// The size of the largest of some equal parts of n, in whole units.
FPG_FN int64_t part_of(int64_t n, int64_t parts, int64_t unit) {
  return blocks_of(larger(1, blocks_of(n, unit)), parts) * unit;
}

/// The tile of C that begins at a row and a column. Sums that are rounded stay with the thread until they are complete.
static ProductTile product_begin(const ProductOut& out, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const int64_t at = row * out.stride + column;
  if (out.dtype == DType::f32) return {static_cast<float*>(out.data) + at, out.stride, nullptr, 0, rows, columns, out.add};
  auto* rounded = static_cast<uint16_t*>(out.data) + at;
  // what is rounded goes to memory that is new in each call
  if (column == 0) map_pages(rounded, rounded + (rows - 1) * out.stride + columns);
  return {product_scratch<float>(Slot::sums, PRODUCT_M * PRODUCT_N), PRODUCT_N, rounded, out.stride, rows, columns, false};
}

/// A part of C, by one thread.
static void product_part(const Operand& a, const Operand& b, const ProductOut& out, int64_t top, int64_t left) {
  auto* a_packed = product_scratch<uint32_t>(Slot::packed, PRODUCT_M * PRODUCT_K / 2);
  auto* b_packed = product_scratch<uint32_t>(Slot::block, PRODUCT_K / 2 * PRODUCT_COLUMNS);
  const int64_t rows = part_of(a.lanes, larger(1, blocks_of(a.lanes, PRODUCT_M)), PRODUCT_ROWS);
  const int64_t columns = a.depth > PRODUCT_K ? PRODUCT_N : larger(1, b.lanes);
  for (int64_t i = 0; i < a.lanes; i += rows)
    for (int64_t j = 0; j < b.lanes; j += columns) {
      const int64_t height = smaller(rows, a.lanes - i), width = smaller(columns, b.lanes - j);
      const int64_t below = j + width < b.lanes ? a.lanes : i + height;
      const Operand after = a.part(below, 0, smaller(rows, a.lanes - below), smaller(PRODUCT_K, a.depth));
      product_block(a.part(i, 0, height, a.depth), after, b.part(j, 0, width, b.depth), a_packed, b_packed,
                    product_begin(out, top + i, left + j, height, width));
    }
}

/// Into how many parts the rows are cut, that each of the threads has the shortest sides: what it packs.
static int64_t parts_of_rows(int64_t m, int64_t n, int64_t threads) {
  int64_t best = 1;
  for (int64_t r = 2; r <= threads; ++r)
    if (threads % r == 0 && 2 * m / r + n * r / threads < 2 * m / best + n * best / threads) best = r;
  return best;
}

static void multiply(int threads, const Operand& a, const Operand& b, const ProductOut& out) {
  const int64_t down = parts_of_rows(a.lanes, b.lanes, threads), across = threads / down;
  const int64_t rows = part_of(a.lanes, down, PRODUCT_ROWS), columns = part_of(b.lanes, across, PRODUCT_COLUMNS);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t top = smaller(a.lanes, part / across * rows), left = smaller(b.lanes, part % across * columns);
    product_part(a.part(top, 0, smaller(rows, a.lanes - top), a.depth),
                 b.part(left, 0, smaller(columns, b.lanes - left), b.depth), out, top, left);
  }
}

constexpr Product* PRODUCT = multiply;

#else

constexpr Product* PRODUCT = nullptr;

#endif

}  // namespace fusedpg::FUSEDPG_ISA
