// csrc/terms.h: value and derivative of a loss per token, for any value type V (float, double, 16 lanes).
// No pointers, no branches on data: branches are on the spec only, data is selected. The names and their order are those of
// reference.py and kernels/terms.py. Formulas: the `LossSpec` chapter of docs; every function returns value and derivative
// together.
#pragma once
#include "cpu/exp.h"
#include "spec.h"

namespace fusedpg::FUSEDPG_ISA {

/// LossSpec.encode() in the compute type; bindings.cpp has checked the codes.
template <class F>
FPG_FN Spec<F> decode(const double* p) {
  Spec<F> s{};
  s.surrogate = static_cast<Surrogate>(static_cast<int>(p[P_SURROGATE]));
  s.level = static_cast<Level>(static_cast<int>(p[P_LEVEL]));
  s.anchor = static_cast<Anchor>(static_cast<int>(p[P_ANCHOR]));
  s.clip_low = static_cast<F>(p[P_CLIP_LOW]);
  s.clip_high = static_cast<F>(p[P_CLIP_HIGH]);
  s.dual_clip = static_cast<F>(p[P_DUAL_CLIP]);
  s.delta = static_cast<F>(p[P_DELTA]);
  s.log_ratio_lo = static_cast<F>(p[P_LOG_RATIO_LO]);
  s.log_ratio_hi = static_cast<F>(p[P_LOG_RATIO_HI]);
  s.kl = static_cast<Kl>(static_cast<int>(p[P_KL]));
  s.kl_coef = static_cast<F>(p[P_KL_COEF]);
  s.kl_target = static_cast<KlTarget>(static_cast<int>(p[P_KL_TARGET]));
  s.kl_ratio = static_cast<KlRatio>(static_cast<int>(p[P_KL_RATIO]));
  s.kl_straight_through = !(p[P_KL_STRAIGHT_THROUGH] == 0);
  s.kl_lo = static_cast<F>(p[P_KL_LO]);
  s.kl_hi = static_cast<F>(p[P_KL_HI]);
  s.kl_log_ratio_lo = static_cast<F>(p[P_KL_LOG_RATIO_LO]);
  s.kl_log_ratio_hi = static_cast<F>(p[P_KL_LOG_RATIO_HI]);
  s.entropy_coef = static_cast<F>(p[P_ENTROPY_COEF]);
  if (s.surrogate == Surrogate::reinforce || s.surrogate == Surrogate::ratio) {
    s.clip_low = -static_cast<F>(INFINITY);  // these have no band: the band metrics stay 0
    s.clip_high = static_cast<F>(INFINITY);
  }
  return s;
}

template <class V>
using MaskOf = decltype(V() < V());

template <class V>
struct Clamped {
  V value;
  MaskOf<V> inside;  // where the clamp does not bind: the derivative passes
};

/// x: the term; dr: its derivative through the log ratio; dl: its direct derivative to logp.
template <class V>
struct Surrogated {
  V x, dr, dl;
  MaskOf<V> dual_clipped;
};

/// A KL estimate and its derivative to logp.
template <class V>
struct KlValue {
  V value, slope;
};

template <class V>
struct TokenIn {
  V logp, adv, log_ratio_raw, kl_target, is_weight, entropy;
};

template <class V>
struct TokenOut {
  V x, dr, dl, log_ratio, ratio, kl;
  MaskOf<V> dual_clipped;
};

/// Comparisons, so that a NaN stays a NaN and counts as inside.
template <class V>
FPG_FN Clamped<V> clamp(V d, V lo, V hi) {
  const MaskOf<V> below = d<lo, above = d> hi;
  return {select(below, lo, select(above, hi, d)), negate(either(below, above))};
}

template <class V>
FPG_FN V zero_unless(MaskOf<V> m, V x) {
  return select(m, x, V(0));
}

template <class V, class F>
FPG_FN Clamped<V> clamp_log_ratio(const Spec<F>& spec, V log_ratio_raw) {
  return clamp(log_ratio_raw, V(spec.log_ratio_lo), V(spec.log_ratio_hi));
}

/// x = -A l
template <class V>
FPG_FN Surrogated<V> reinforce(V logp, V adv) {
  return {-adv * logp, V(0), -adv, V(0) < V(0)};
}

/// x = -A r, with r_slope = dr/d(log ratio): r, or 0 where the log ratio is clamped.
template <class V>
FPG_FN Surrogated<V> importance_ratio(V ratio, V ratio_slope, V adv) {
  return {-adv * ratio, -adv * ratio_slope, V(0), V(0) < V(0)};
}

/// x = max(-A min(r, delta), -A clamp(r)), at most -A dual_clip where A < 0. Ties keep the gradient.
template <class V, class F>
FPG_FN Surrogated<V> clipped_ratio(const Spec<F>& spec, V ratio, V ratio_slope, V adv) {
  const MaskOf<V> over = ratio > V(spec.delta);
  const V u = -adv * select(over, V(spec.delta), ratio);
  const V v = -adv * clamp(ratio, V(spec.clip_low), V(spec.clip_high)).value;
  const MaskOf<V> take_u = negate(u < v);
  const V x = select(take_u, u, v);
  const V dr = zero_unless(both(take_u, negate(over)), -adv * ratio_slope);
  const V cap = -adv * V(spec.dual_clip);
  const MaskOf<V> dual = both(adv<V(0), x> cap);
  return {select(dual, cap, x), zero_unless(negate(dual), dr), V(0), dual};
}

/// x = -clamp(r) A l with the clamped ratio detached.
template <class V, class F>
FPG_FN Surrogated<V> cispo(const Spec<F>& spec, V ratio, V logp, V adv) {
  const V q = clamp(ratio, V(spec.clip_low), V(spec.clip_high)).value;
  return {-q * adv * logp, V(0), -q * adv, V(0) < V(0)};
}

/// The surrogate of the spec; exactly 0 where A == 0, except that a NaN logp or log ratio stays visible.
template <class V, class F>
FPG_FN Surrogated<V> surrogate(const Spec<F>& spec, V logp, V adv, V log_ratio, V ratio, V ratio_slope) {
  Surrogated<V> s = spec.surrogate == Surrogate::reinforce ? reinforce(logp, adv)
                    : spec.surrogate == Surrogate::ratio   ? importance_ratio(ratio, ratio_slope, adv)
                    : spec.surrogate == Surrogate::clip    ? clipped_ratio(spec, ratio, ratio_slope, adv)
                                                           : cispo(spec, ratio, logp, adv);
  const MaskOf<V> some = negate(adv == V(0)), number = both(logp == logp, log_ratio == log_ratio);
  const V nothing = select(number, V(0), V(static_cast<F>(NAN)));
  s.x = select(some, s.x, nothing);
  s.dr = zero_unless(some, s.dr);
  s.dl = zero_unless(some, s.dl);
  return s;
}

template <class V>
FPG_FN KlValue<V> kl_k1(V t) {
  return {t, V(1)};
}

template <class V>
FPG_FN KlValue<V> kl_k2(V t) {
  return {t * t * V(0.5f), t};
}

template <class V>
FPG_FN KlValue<V> kl_k3(V t) {
  const V inverse = exp_any(-t);
  return {inverse + t - V(1), V(1) - inverse};
}

template <class V>
FPG_FN KlValue<V> kl_abs(V t) {
  return {absolute(t), select(t > V(0), V(1), select(t < V(0), V(-1), t))};
}

/// The KL estimate of the spec on the clamped log ratio, itself clamped; slope 0 where a clamp binds, t0 if straight-through.
template <class V, class F>
FPG_FN KlValue<V> kl_term(const Spec<F>& spec, V logp, V kl_target) {
  const V t0 = logp - kl_target;
  const Clamped<V> t = clamp(t0, V(spec.kl_log_ratio_lo), V(spec.kl_log_ratio_hi));
  const KlValue<V> k = spec.kl == Kl::k1   ? kl_k1(t.value)
                       : spec.kl == Kl::k2 ? kl_k2(t.value)
                       : spec.kl == Kl::k3 ? kl_k3(t.value)
                                           : kl_abs(t.value);
  const Clamped<V> value = clamp(k.value, V(spec.kl_lo), V(spec.kl_hi));
  const V slope = zero_unless(both(t.inside, value.inside), k.slope);
  return {value.value, spec.kl_straight_through ? t0 : slope};
}

/// Everything of one token. `has_is_weight` says whether in.is_weight is real.
template <class V, class F>
FPG_FN TokenOut<V> token_terms(const Spec<F>& spec, const TokenIn<V>& in, bool has_is_weight) {
  const Clamped<V> d = clamp_log_ratio(spec, in.log_ratio_raw);
  const V ratio = exp_any(d.value);
  const V ratio_slope = zero_unless(d.inside, ratio);
  const Surrogated<V> s = surrogate(spec, in.logp, in.adv, d.value, ratio, ratio_slope);
  TokenOut<V> out{s.x, s.dr, s.dl, d.value, ratio, V(0), s.dual_clipped};
  if (has_is_weight) {
    const MaskOf<V> some = negate(in.is_weight == V(0));
    out.x = zero_unless(some, s.x * in.is_weight);
    out.dr = zero_unless(some, s.dr * in.is_weight);
    out.dl = zero_unless(some, s.dl * in.is_weight);
  }
  if (spec.kl != Kl::none) {
    const KlValue<V> k = kl_term(spec, in.logp, in.kl_target);
    const V coef = V(spec.kl_coef), rho = spec.kl_ratio == KlRatio::none ? V(1) : ratio;
    out.kl = k.value;
    out.x = out.x + coef * rho * k.value;
    out.dl = out.dl + coef * rho * k.slope;
    if (spec.kl_ratio == KlRatio::live) out.dr = out.dr + coef * ratio_slope * k.value;
  }
  if (spec.entropy_coef != F(0)) out.x = out.x - V(spec.entropy_coef) * in.entropy;
  return out;
}

}  // namespace fusedpg::FUSEDPG_ISA
