// csrc/terms.h: value and derivative of a loss per token, for any value type V (float, double, 16 lanes).
// No pointers, no branches on data: branches are on the spec only, data is selected. The names and their order are those of
// reference_terms.py and kernels/terms.py. Formulas: the `LossSpec` chapter of docs; every function returns value and
// derivative together.
#pragma once
#include "values.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr double PROBABILITY_FLOOR = 1e-6;              // of a binary distribution, in the KL keep mask
constexpr double LOG_WEIGHT_MIN = -18.420680743952367;  // log 1e-8: a correction weight inside vespo's product
constexpr double LOG_WEIGHT_MAX = 20.0;

/// A NaN stays a NaN and counts as inside. lo <= hi.
template <class V>
FPG_FN Clamped<V> clamp(V d, V lo, V hi) {
  const MaskOf<V> below = d<lo, above = d> hi;
  return {max_or_second(lo, min_or_second(hi, d)), negate(either(below, above))};
}

/// x = -A l
template <class V>
FPG_FN Surrogated<V> reinforce(V logp, V adv) {
  return {-adv * logp, V(0), -adv, nowhere<V>()};
}

/// x = -A r, with r_slope = dr/d(log ratio): r, or 0 where the log ratio is clamped.
template <class V>
FPG_FN Surrogated<V> importance_ratio(V ratio, V ratio_slope, V adv) {
  return {-adv * ratio, -adv * ratio_slope, V(0), nowhere<V>()};
}

/// x = max(-A min(r, delta), -A clamp(r)), at most -A dual_clip where A < 0. Ties keep the gradient.
template <class V, class F>
FPG_FN Surrogated<V> clipped_ratio(const Spec<F>& spec, V ratio, V ratio_slope, V adv) {
  const F infinity = static_cast<F>(INFINITY);
  const bool bounded = spec.delta < infinity, dual_clips = spec.dual_clip < infinity;
  const MaskOf<V> over = bounded ? ratio > V(spec.delta) : nowhere<V>();
  const V u = -adv * (bounded ? min_or_second(V(spec.delta), ratio) : ratio);
  const Clamped<V> band = clamp(ratio, V(spec.clip_low), V(spec.clip_high));
  const V v = -adv * band.value;
  const MaskOf<V> take_u = negate(u < v);
  const V x = select(take_u, u, v);
  // the clipped branch has a gradient inside its band, which it reaches where delta binds first
  const V du = -adv * ratio_slope, dr = select(take_u, zero_unless(negate(over), du), zero_unless(band.inside, du));
  if (!dual_clips) return {x, dr, V(0), nowhere<V>()};
  const V cap = -adv * V(spec.dual_clip);
  const MaskOf<V> dual = both(adv<V(0), x> cap);
  return {select(dual, cap, x), zero_unless(negate(dual), dr), V(0), dual};
}

/// x = -clamp(r) A l with the clamped ratio detached.
template <class V, class F>
FPG_FN Surrogated<V> cispo(const Spec<F>& spec, V ratio, V logp, V adv) {
  const V q = clamp(ratio, V(spec.clip_low), V(spec.clip_high)).value;
  return {-q * adv * logp, V(0), -q * adv, nowhere<V>()};
}

/// x = -A (4 / tau) s, s = sigmoid(tau (r - 1)), tau by the sign of A. Both from e = exp(-|tau (r - 1)|), which never
/// overflows; where r does, e is 0 and so is the derivative.
template <class V, class F>
FPG_FN Surrogated<V> sapo(const Spec<F>& spec, V ratio, V ratio_slope, V adv) {
  const V tau = select(adv > V(0), V(spec.shape_pos), V(spec.shape_neg));
  const V u = tau * (ratio - V(1));
  const V e = exp_any(-absolute(u)), whole = V(1) + e;
  const V gate = select(u < V(0), e, V(1)) / whole;
  const V slope = zero_unless(negate(e == V(0)), e / (whole * whole) * ratio_slope);
  return {-adv * (V(4) / tau) * gate, -adv * V(4) * slope, V(0), nowhere<V>()};
}

/// x = -A l where A > 0, -clamp(r) A l elsewhere, with the clamped ratio detached.
template <class V, class F>
FPG_FN Surrogated<V> topr(const Spec<F>& spec, V ratio, V logp, V adv) {
  const V taper = clamp(ratio, V(spec.clip_low), V(spec.clip_high)).value;
  const V q = select(adv > V(0), V(1), taper);
  return {-q * adv * logp, V(0), -q * adv, nowhere<V>()};
}

/// x = -phi A l, log phi = lambda + k log W - lambda W, detached; (k, lambda) by the sign of A.
template <class V, class F>
FPG_FN Surrogated<V> vespo(const Spec<F>& spec, V log_w, V logp, V adv) {
  const MaskOf<V> good = negate(adv < V(0));
  const V k = select(good, V(spec.shape_pos), V(spec.shape_neg)), lambda = select(good, V(spec.lambda_pos), V(spec.lambda_neg));
  const V phi = exp_any(fma(lambda, V(1) - exp_any(log_w), k * log_w));  // lambda (1 - W): no large numbers cancel
  return {-phi * adv * logp, V(0), -phi * adv, nowhere<V>()};
}

template <bool EXTRAS, class V, class F>
FPG_FN Surrogated<V> surrogate_of_spec(const Spec<F>& spec, const TokenIn<V>& in, V ratio, V ratio_slope) {
  if (EXTRAS && spec.surrogate == Surrogate::sapo) return sapo(spec, ratio, ratio_slope, in.adv);
  if (EXTRAS && spec.surrogate == Surrogate::topr) return topr(spec, ratio, in.logp, in.adv);
  if (EXTRAS && spec.surrogate == Surrogate::vespo) return vespo(spec, in.log_w, in.logp, in.adv);
  return spec.surrogate == Surrogate::reinforce ? reinforce(in.logp, in.adv)
         : spec.surrogate == Surrogate::ratio   ? importance_ratio(ratio, ratio_slope, in.adv)
         : spec.surrogate == Surrogate::clip    ? clipped_ratio(spec, ratio, ratio_slope, in.adv)
                                                : cispo(spec, ratio, in.logp, in.adv);
}

/// The surrogate of the spec; exactly 0 where A == 0, except that a NaN logp or log ratio stays visible.
template <bool EXTRAS, class V, class F>
FPG_FN Surrogated<V> surrogate(const Spec<F>& spec, const TokenIn<V>& in, V log_ratio, V ratio, V ratio_slope) {
  Surrogated<V> s = surrogate_of_spec<EXTRAS>(spec, in, ratio, ratio_slope);
  const MaskOf<V> some = negate(in.adv == V(0)), number = both(in.logp == in.logp, log_ratio == log_ratio);
  const V nothing = select(number, V(0), V(static_cast<F>(NAN)));
  s.x = select(some, s.x, nothing);
  s.dr = zero_unless(some, s.dr);
  s.dl = zero_unless(some, s.dl);
  return s;
}

/// A token's log ratio before its sequence's mean: clipped above where A > 0, below where A < 0.
template <class V, class F>
FPG_FN Clamped<V> clip_tokens(const Spec<F>& spec, V log_ratio, V adv) {
  const V lo = V(spec.token_clip_lo), hi = V(spec.token_clip_hi);
  const MaskOf<V> above = both(adv > V(0), log_ratio > hi), below = both(adv < V(0), log_ratio < lo);
  return {select(above, hi, select(below, lo, log_ratio)), negate(either(above, below))};
}

/// Whether clip_tokens does anything.
template <class F>
FPG_FN bool clips_tokens(const Spec<F>& spec) {
  const F infinity = static_cast<F>(INFINITY);
  return spec.level == Level::sequence && (spec.token_clip_lo > -infinity || spec.token_clip_hi < infinity);
}

/// D(p'||p) of the two outcomes (this token, any other). The second outcome is clamped by itself: 1 - 1e-6 has no room in fp32.
template <class F, class V>
FPG_FN V binary_kl(V p, V p_anchor) {
  const V lo = V(static_cast<F>(PROBABILITY_FLOOR)), hi = V(static_cast<F>(1 - PROBABILITY_FLOOR));
  const V a = clamp(p_anchor, lo, hi).value, b = clamp(p, lo, hi).value;
  const V not_a = clamp(V(1) - p_anchor, lo, hi).value, not_b = clamp(V(1) - p, lo, hi).value;
  return a * log_any(a / b) + not_a * log_any(not_a / not_b);
}

/// What the keep mask compares with its bounds.
template <class V, class F>
FPG_FN V keep_value(const Spec<F>& spec, V logp, V anchor, V ratio) {
  if (spec.keep == Keep::ratio) return ratio;
  const V p = exp_any(logp), p_anchor = exp_any(anchor), moved = p - p_anchor;
  return spec.keep == Keep::tv ? moved : binary_kl<F>(p, p_anchor) * sign(moved);
}

/// Whether any token can be dropped.
template <class F>
FPG_FN bool drops_tokens(const Spec<F>& spec) {
  return spec.keep != Keep::none || spec.selection == Selection::clip_cov;
}

/// Where the keep mask, or the batch's selection, takes the policy term away. A NaN is kept.
template <class V, class F>
FPG_FN MaskOf<V> dropped(const Spec<F>& spec, const TokenIn<V>& in, V ratio) {
  MaskOf<V> drop = nowhere<V>();
  if (spec.keep != Keep::none) {
    const V v = keep_value(spec, in.logp, in.anchor, ratio);
    const MaskOf<V> below = v<V(spec.keep_low), above = v> V(spec.keep_high), up = in.adv > V(0);
    drop = spec.keep_directional ? either(both(up, above), both(negate(up), below)) : either(below, above);
  }
  if (spec.selection == Selection::clip_cov) drop = either(drop, negate(in.selected == V(0)));
  return drop;
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
  return {absolute(t), sign(t)};
}

/// The KL estimate of the spec on the clamped log ratio, itself clamped. Its slope: 0 where a clamp binds; t0 if
/// straight-through; plus the value with the score term.
template <class V, class F>
FPG_FN KlValue<V> kl_term(const Spec<F>& spec, V logp, V kl_target) {
  const V t0 = logp - kl_target;
  const Clamped<V> t = clamp(t0, V(spec.kl_log_ratio_lo), V(spec.kl_log_ratio_hi));
  const KlValue<V> k = spec.kl == Kl::k1   ? kl_k1(t.value)
                       : spec.kl == Kl::k2 ? kl_k2(t.value)
                       : spec.kl == Kl::k3 ? kl_k3(t.value)
                                           : kl_abs(t.value);
  const Clamped<V> value = clamp(k.value, V(spec.kl_lo), V(spec.kl_hi));
  if (spec.kl_gradient == KlGradient::straight_through) return {value.value, t0};
  const V slope = spec.kl_gradient == KlGradient::score ? k.slope + value.value : k.slope;
  return {value.value, zero_unless(both(t.inside, value.inside), slope)};
}

/// -l
template <class V>
FPG_FN KlValue<V> kl_backward_score(V logp) {
  return {-logp, V(-1)};
}

/// exp(t) - 1 - t
template <class V>
FPG_FN KlValue<V> kl_backward_k3(const Clamped<V>& t) {
  const V ratio = exp_any(t.value);
  return {ratio - V(1) - t.value, zero_unless(t.inside, ratio - V(1))};
}

/// exp(t) t l with its factor detached
template <class V>
FPG_FN KlValue<V> kl_forward_score(V logp, V t) {
  const V factor = exp_any(t) * t;
  return {factor * logp, factor};
}

/// exp(t) t - exp(t) + 1
template <class V>
FPG_FN KlValue<V> kl_forward_k3(const Clamped<V>& t) {
  const V ratio = exp_any(t.value);
  return {ratio * t.value - ratio + V(1), zero_unless(t.inside, ratio * t.value)};
}

/// KL(target || policy) on a sample of the target, of the clamped log ratio.
template <class V, class F>
FPG_FN KlValue<V> kl_backward(const Spec<F>& spec, V logp, V kl_target) {
  if (spec.kl_backward == KlSampled::score) return kl_backward_score(logp);
  return kl_backward_k3(clamp(logp - kl_target, V(spec.kl_log_ratio_lo), V(spec.kl_log_ratio_hi)));
}

/// KL(policy || target) on a sample of the target, of the clamped log ratio.
template <class V, class F>
FPG_FN KlValue<V> kl_forward(const Spec<F>& spec, V logp, V kl_target) {
  const Clamped<V> t = clamp(logp - kl_target, V(spec.kl_log_ratio_lo), V(spec.kl_log_ratio_hi));
  return spec.kl_forward == KlSampled::score ? kl_forward_score(logp, t.value) : kl_forward_k3(t);
}

/// What the keep mask does not take away: the squared log ratio, and |log ratio| on the tokens selected by kl_cov.
template <class V, class F>
FPG_FN void add_penalties(const Spec<F>& spec, const TokenIn<V>& in, TokenOut<V>& out) {
  if (spec.penalty_coef != F(0)) {
    const V coef = V(spec.penalty_coef), t = in.log_ratio;
    out.x = out.x + coef * V(0.5f) * t * t;
    out.dl = out.dl + coef * t;
  }
  if (spec.selection == Selection::kl_cov) {
    const MaskOf<V> selected = negate(in.selected == V(0));
    out.x = out.x + zero_unless(selected, V(spec.select_coef) * absolute(in.log_ratio));
    out.dl = out.dl + zero_unless(selected, V(spec.select_coef) * sign(in.log_ratio));
  }
}

template <class V>
FPG_FN void keep_where(MaskOf<V> kept, TokenOut<V>& out) {
  out.x = zero_unless(kept, out.x);
  out.dr = zero_unless(kept, out.dr);
  out.dl = zero_unless(kept, out.dl);
}

/// The keep mask, and what it does not take away.
template <class V, class F>
FPG_FN void mask_and_penalise(const Spec<F>& spec, const TokenIn<V>& in, TokenOut<V>& out) {
  if (drops_tokens(spec)) {
    out.dropped = dropped(spec, in, out.ratio);
    keep_where(negate(out.dropped), out);
    out.dual_clipped = both(out.dual_clipped, negate(out.dropped));
  }
  add_penalties(spec, in, out);
}

/// Everything of one policy token. `has_weight` says whether in.weight is real; without EXTRAS the spec has none (has_extras).
template <bool EXTRAS, class V, class F>
FPG_FN TokenOut<V> token_terms(const Spec<F>& spec, const TokenIn<V>& in, bool has_weight) {
  const Clamped<V> d = clamp(in.log_ratio_level, V(spec.log_ratio_lo), V(spec.log_ratio_hi));
  const V ratio = exp_any(d.value);
  const V ratio_slope = zero_unless(d.inside, ratio);
  const Surrogated<V> s = surrogate<EXTRAS>(spec, in, d.value, ratio, ratio_slope);
  TokenOut<V> out{s.x, s.dr, s.dl, d.value, ratio, V(0), s.dual_clipped, nowhere<V>()};
  if (EXTRAS) mask_and_penalise(spec, in, out);
  if (has_weight && !(EXTRAS && spec.surrogate == Surrogate::vespo)) {  // there it is part of log_w
    const MaskOf<V> some = negate(in.weight == V(0));
    out.x = zero_unless(some, out.x * in.weight);
    out.dr = zero_unless(some, out.dr * in.weight);
    out.dl = zero_unless(some, out.dl * in.weight);
  }
  if (spec.kl != Kl::none) {
    const KlValue<V> k = kl_term(spec, in.logp, in.kl_target);
    const V coef = V(spec.kl_coef), rho = spec.kl_ratio == KlRatio::none ? V(1) : ratio;
    out.kl = k.value;
    out.x = out.x + coef * rho * k.value;
    out.dl = out.dl + coef * rho * k.slope;
    if (spec.kl_ratio == KlRatio::live) out.dr = out.dr + coef * ratio_slope * k.value;
  }
  if (EXTRAS && spec.kl_backward != KlSampled::none) {
    const KlValue<V> k = kl_backward(spec, in.logp, in.kl_target);
    out.x = out.x + V(spec.kl_backward_coef) * k.value;
    out.dl = out.dl + V(spec.kl_backward_coef) * k.slope;
  }
  if (EXTRAS && spec.kl_forward != KlSampled::none) {
    const KlValue<V> k = kl_forward(spec, in.logp, in.kl_target);
    out.x = out.x + V(spec.kl_forward_coef) * k.value;
    out.dl = out.dl + V(spec.kl_forward_coef) * k.slope;
  }
  if (spec.entropy_coef != F(0)) out.x = out.x - V(spec.entropy_coef) * in.entropy;
  return out;
}

}  // namespace fusedpg::FUSEDPG_ISA
