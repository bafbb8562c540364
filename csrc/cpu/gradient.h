// csrc/cpu/gradient.h: the gradient of one row from its exponentials: g = [c (1[v==t] - p) - e p (log p + H)] dz/dx.
#pragma once
#include "row.h"

namespace fusedpg::FUSEDPG_ISA {

/// What a row's gradient needs besides its exponentials; c and e are dL/dlogp and dL/dH, times the loss scale.
struct RowCoefficients {
  double c, e, entropy;
};

/// Columns to peel until `p` is 64-byte aligned (all of them when an element never gets there).
template <class S>
FPG_FN int64_t columns_to_alignment(const S* p, int64_t n) {
  const int64_t bytes = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) & 63);
  return bytes % static_cast<int64_t>(sizeof(S)) == 0 ? smaller(n, bytes / static_cast<int64_t>(sizeof(S))) : n;
}

/// out[i] = exps[i] * factor, factor finite.
template <bool STREAM, class S, class F>
FPG_FN void scale_block(const F* exps, F factor, S* out, int64_t n) {
  using V = typename Vector<F>::type;
  constexpr int W = Vector<F>::width;
  int64_t i = 0;
  if (STREAM) {
    const int64_t head = columns_to_alignment(out, n);
    for (; i < head; ++i) store_one(out + i, exps[i] * factor);
    for (; i + W <= n; i += W) stream(out + i, load(exps + i) * V(factor));
  }
  for (; i + 2 * W <= n; i += 2 * W) {
    store_finite(out + i, load(exps + i) * V(factor));
    store_finite(out + i + W, load(exps + i + W) * V(factor));
  }
  for (; i < n; ++i) store_one(out + i, exps[i] * factor);
}

/// The block's numbers for the general form: g = exp * (p_coef + e_coef * (z + shift)), shift in two parts for accuracy.
template <class F>
struct GeneralBlock {
  F max, p_coef, e_coef, shift_hi, shift_lo;
};

template <bool CAP, class V, class S>
FPG_FN V general_value(const RowView<S, CAP>& row, const GeneralBlock<typename Compute<S>::type>& g, V exps, V x) {
  using F = typename Compute<S>::type;
  const V y = capped<CAP>(x, row.cap, row.to_cap);
  const V t = max_or_second((y - V(g.max)) * V(row.k_f), V(EXPONENT_FLOOR<F>));
  const V log_p_plus_h = fma(t, V(EXPONENT_UNIT<F>), V(g.shift_hi)) + V(g.shift_lo);
  const V value = exps * fma(V(g.e_coef), log_p_plus_h, V(g.p_coef));
  return CAP ? value * tanh_slope(x * V(row.to_cap)) : value;
}

/// Soft cap or entropy: the logits are read again, each before its own place is written. Never streamed: x may be out.
template <bool CAP, class S>
FPG_FN void general_block(const RowView<S, CAP>& row, const GeneralBlock<typename Compute<S>::type>& g, int64_t b,
                          const typename Compute<S>::type* exps, S* out) {
  using F = typename Compute<S>::type;
  using V = typename Vector<F>::type;
  constexpr int W = Vector<F>::width;
  const int64_t n = row.block_size(b);
  const S* x = row.x + row.block_begin(b);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, general_value<CAP, V>(row, g, load(exps + i), load(x + i)));
  for (; i < n; ++i) {
    F one[W];
    store(one, general_value<CAP, V>(row, g, V(exps[i]), V(load_one(x + i))));
    store_one(out + i, one[0]);
  }
}

/// The gradient of block b, without the target's own term.
template <bool CAP, bool STREAM, class S>
FPG_FN void gradient_block(const RowView<S, CAP>& row, const RowStats<typename Compute<S>::type>& stats,
                           const Partial<typename Compute<S>::type>& partial, const RowCoefficients& q, int64_t b,
                           const typename Compute<S>::type* exps, S* out) {
  using F = typename Compute<S>::type;
  const double dz = (static_cast<double>(partial.max) - static_cast<double>(stats.max)) * row.k;
  const double p_per_exp = ::exp(dz) * partial.per_exp / stats.sum * row.slope;
  const int64_t begin = row.block_begin(b);
  if (!CAP && q.e == 0) {
    const F factor = static_cast<F>(-q.c * p_per_exp);
    if (factor - factor == F(0)) return scale_block<STREAM>(exps + begin, factor, out + begin, row.block_size(b));
  }
  const bool empty = partial.max == -static_cast<F>(INFINITY);  // its exponentials are 0: keep the other factor finite
  const double shift = empty ? 0.0 : dz - stats.log_sum + q.entropy;
  GeneralBlock<F> g{};
  g.max = empty ? F(0) : partial.max;
  g.p_coef = static_cast<F>(-q.c * p_per_exp);
  g.e_coef = static_cast<F>(-q.e * p_per_exp);
  g.shift_hi = static_cast<F>(shift);
  g.shift_lo = static_cast<F>(shift - static_cast<double>(g.shift_hi));
  general_block<CAP>(row, g, b, exps + begin, out + begin);
}

/// The target's gradient, over what gradient_block left in its place.
template <bool CAP, class S>
FPG_FN void gradient_target(const RowView<S, CAP>& row, const RowStats<typename Compute<S>::type>& stats,
                            const RowCoefficients& q, S* out) {
  using F = typename Compute<S>::type;
  if (row.target < 0) return;
  double g = q.c * (stats.others / stats.sum);
  const double p = stats.target / stats.sum;
  if (!(q.e == 0) && !(p == 0)) g -= q.e * p * (stats.target_z - stats.log_sum + q.entropy);
  g *= row.slope;
  if (CAP) g *= static_cast<double>(tanh_slope(row.x_target * row.to_cap));
  store_one(out + row.target, static_cast<F>(g));
}

}  // namespace fusedpg::FUSEDPG_ISA
