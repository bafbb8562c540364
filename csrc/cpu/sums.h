// csrc/cpu/sums.h: the metric sums of stage B: vectors and counts within a block, doubles across blocks.
#pragma once
#include "../terms.h"
#include "storage.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int FLUSH_EVERY = 8;  // vectors that are added in F before the sums go to double

FPG_FN void clear_sums(double* sums) {
  for (int i = 0; i < NSUMS; ++i) sums[i] = 0;
  sums[S_RATIO_MIN] = INFINITY;
  sums[S_RATIO_MAX] = sums[S_IS_WEIGHT_MAX] = -INFINITY;
}

template <class D>
FPG_FN void join_extrema(double* sums, D low, D high, D weight) {
  const double a = static_cast<double>(low), b = static_cast<double>(high), c = static_cast<double>(weight);
  if (a < sums[S_RATIO_MIN] || a != a) sums[S_RATIO_MIN] = a;
  if (b > sums[S_RATIO_MAX] || b != b) sums[S_RATIO_MAX] = b;
  if (c > sums[S_IS_WEIGHT_MAX] || c != c) sums[S_IS_WEIGHT_MAX] = c;
}

FPG_FN void join_sums(double* all, const double* block) {
  for (int s = 0; s < S_RATIO_MIN; ++s) all[s] += block[s];
  join_extrema(all, block[S_RATIO_MIN], block[S_RATIO_MAX], block[S_IS_WEIGHT_MAX]);
}

/// The sums that count tokens; the others before S_RATIO_MIN add values.
constexpr bool is_count(int s) {
  return s == S_TOKENS || (s >= S_CLIP_LOW && s <= S_OUT_OF_BAND) || (s >= S_IS_ZERO && s <= S_IS_TOKENS);
}

/// The metric sums of a block. Values are added in vectors of F, which `flush` empties into doubles, lane by lane; a loop
/// between two flushes keeps them in registers.
template <class F>
struct SumLanes {
  using V = typename Vector<F>::type;
  static constexpr int W = Vector<F>::width, ADDED = S_RATIO_MIN;  // the rest are extrema
  V part[ADDED], ratio_min, ratio_max, is_max;
  typename Vector<F>::count counts[ADDED];
  double total[ADDED][W];

  FPG_MEMBER SumLanes() {
    FPG_UNROLL for (int s = 0; s < ADDED; ++s) part[s] = V(0);
    for (int s = 0; s < ADDED; ++s)
      for (int i = 0; i < W; ++i) total[s][i] = 0;
    ratio_min = V(static_cast<F>(INFINITY));
    ratio_max = is_max = -ratio_min;
  }
  FPG_MEMBER void add(Sum s, V x) { part[s] = part[s] + x; }
  FPG_MEMBER void count(Sum s, MaskOf<V> m) { counts[s].add(m); }
  FPG_MEMBER void flush() {
    FPG_UNROLL for (int s = 0; s < ADDED; ++s) {
      if (is_count(s)) continue;
      F x[W];
      store(x, part[s]);
      for (int i = 0; i < W; ++i) total[s][i] += static_cast<double>(x[i]);
      part[s] = V(0);
    }
  }
  FPG_MEMBER void finish(double* sums) {
    flush();
    clear_sums(sums);
    FPG_UNROLL for (int s = 0; s < ADDED; ++s) {
      if (is_count(s)) sums[s] = static_cast<double>(counts[s].total());
      for (int i = 0; i < W; ++i) sums[s] += total[s][i];
    }
    F low[W], high[W], weight[W];
    store(low, ratio_min);
    store(high, ratio_max);
    store(weight, is_max);
    for (int i = 0; i < W; ++i) join_extrema(sums, low[i], high[i], weight[i]);
    // ratios are not negative, so their sum is NaN where one of them is
    if (is_nan(sums[S_RATIO])) sums[S_RATIO_MIN] = sums[S_RATIO_MAX] = sums[S_RATIO];
  }
};

/// Where the ratio lies outside the clip band, among the tokens that are kept; at SEQUENCE level also where a token's own log
/// ratio is outside of what its mean takes.
template <class V>
struct Band {
  MaskOf<V> low, high;
};

template <bool EXTRAS, class V, class F>
FPG_FN Band<V> outside_band(const Spec<F>& spec, const TokenIn<V>& in, const TokenOut<V>& t, MaskOf<V> on) {
  MaskOf<V> low = t.ratio<V(spec.clip_low), high = t.ratio> V(spec.clip_high), counted = on;
  if (EXTRAS && spec.surrogate == Surrogate::topr) {
    low = both(low, negate(in.adv > V(0)));
    high = both(high, negate(in.adv > V(0)));
  }
  if (EXTRAS && clips_tokens(spec)) {
    low = either(low, in.log_ratio < V(spec.token_clip_lo));
    high = either(high, in.log_ratio > V(spec.token_clip_hi));
  }
  if (EXTRAS && drops_tokens(spec)) counted = both(counted, negate(t.dropped));
  return {both(counted, low), both(counted, high)};
}

/// Missing weights stay out of the correction's metrics.
template <bool EXTRAS, class F>
FPG_FN void add_weight_metrics(const TokenIn<typename Vector<F>::type>& in, MaskOf<typename Vector<F>::type> on,
                               SumLanes<F>& sums) {
  using V = typename Vector<F>::type;
  const MaskOf<V> known = EXTRAS ? both(on, negate(in.missing)) : on;
  if (EXTRAS) sums.count(S_IS_TOKENS, known);
  sums.add(S_IS_WEIGHT, zero_unless(known, in.weight));
  sums.count(S_IS_ZERO, both(known, in.weight == V(0)));
  const MaskOf<V> larger = either(in.weight > sums.is_max, is_nan(in.weight));  // a NaN wins and stays
  sums.is_max = select(both(known, larger), in.weight, sums.is_max);
}

/// `numerator`: what the tokens add to it, with their weights.
template <bool EXTRAS, class F>
FPG_FN void add_metrics(const Spec<F>& spec, const TokenIn<typename Vector<F>::type>& in,
                        const TokenOut<typename Vector<F>::type>& t, typename Vector<F>::type numerator,
                        MaskOf<typename Vector<F>::type> on, bool has_weight, SumLanes<F>& sums) {
  using V = typename Vector<F>::type;
  const auto added = [&](V x) __attribute__((always_inline)) { return zero_unless(on, x); };
  sums.add(S_NUMERATOR, numerator);
  sums.count(S_TOKENS, on);
  sums.add(S_RATIO, added(t.ratio));
  const Band<V> band = outside_band<EXTRAS>(spec, in, t, on);
  sums.count(S_CLIP_LOW, both(band.low, in.adv < V(0)));
  sums.count(S_CLIP_HIGH, both(band.high, in.adv > V(0)));
  sums.count(S_DUAL_CLIPPED, both(on, t.dual_clipped));
  sums.count(S_OUT_OF_BAND, either(band.low, band.high));
  sums.add(S_KL_OLD_K1, added(-t.log_ratio));
  sums.add(S_KL_OLD_K3, added(t.ratio - V(1) - t.log_ratio));
  if (spec.kl != Kl::none) sums.add(S_KL, added(t.kl));
  sums.add(S_ENTROPY, added(in.entropy));
  if (EXTRAS && drops_tokens(spec)) sums.count(S_KEEP, both(on, negate(t.dropped)));
  if (has_weight) add_weight_metrics<EXTRAS>(in, on, sums);
  sums.ratio_min = select(both(on, t.ratio < sums.ratio_min), t.ratio, sums.ratio_min);
  sums.ratio_max = select(both(on, t.ratio > sums.ratio_max), t.ratio, sums.ratio_max);
}

}  // namespace fusedpg::FUSEDPG_ISA
