// csrc/terms.h: value and derivative of a loss per token, for any value type V (float, double, 16 lanes).
// No pointers, no branches on data: branches are on the spec only, data is selected. The names and their order are those of
// reference_terms.py and kernels/terms.py. Formulas: the `LossSpec` chapter of docs; every function returns value and
// derivative together.
#pragma once
#include "masks.h"

namespace fusedpg::FUSEDPG_ISA {

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
  return {-q * adv * logp, V(0), -q * adv, nowhere<V>()};
}

/// x = -A (4 / tau) s, s = sigmoid(tau (r - 1)), tau by the sign of A. Both from e = exp(-|tau (r - 1)|), which never
/// overflows; where r does, e is 0 and so is the derivative.
template <class V, class F>
FPG_FN Surrogated<V> sapo(const Spec<F>& spec, V ratio, V ratio_slope, V adv) {
  const V tau = select(adv > V(0), V(spec.k_pos), V(spec.k_neg));
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
  const V k = select(good, V(spec.k_pos), V(spec.k_neg)), lambda = select(good, V(spec.lambda_pos), V(spec.lambda_neg));
  const V phi = exp_any(lambda + k * log_w - lambda * exp_any(log_w));
  return {-phi * adv * logp, V(0), -phi * adv, nowhere<V>()};
}

template <class V, class F>
FPG_FN Surrogated<V> surrogate_of_spec(const Spec<F>& spec, const TokenIn<V>& in, V ratio, V ratio_slope) {
  switch (spec.surrogate) {
    case Surrogate::reinforce: return reinforce(in.logp, in.adv);
    case Surrogate::ratio: return importance_ratio(ratio, ratio_slope, in.adv);
    case Surrogate::clip: return clipped_ratio(spec, ratio, ratio_slope, in.adv);
    case Surrogate::cispo: return cispo(spec, ratio, in.logp, in.adv);
    case Surrogate::sapo: return sapo(spec, ratio, ratio_slope, in.adv);
    case Surrogate::topr: return topr(spec, ratio, in.logp, in.adv);
    case Surrogate::vespo: break;
  }
  return vespo(spec, in.log_w, in.logp, in.adv);
}

/// The surrogate of the spec; exactly 0 where A == 0, except that a NaN logp or log ratio stays visible.
template <class V, class F>
FPG_FN Surrogated<V> surrogate(const Spec<F>& spec, const TokenIn<V>& in, V log_ratio, V ratio, V ratio_slope) {
  Surrogated<V> s = surrogate_of_spec(spec, in, ratio, ratio_slope);
  const MaskOf<V> some = negate(in.adv == V(0)), number = both(in.logp == in.logp, log_ratio == log_ratio);
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
  const V slope = zero_unless(both(t.inside, value.inside), k.slope);
  if (spec.kl_gradient == KlGradient::straight_through) return {value.value, t0};
  return {value.value, spec.kl_gradient == KlGradient::score ? slope + value.value : slope};
}

/// -t exp(-t), with the score function's derivative: no clamp takes it away.
template <class V>
FPG_FN KlValue<V> kl_forward_score(V t) {
  const V inverse = exp_any(-t);
  return {-t * inverse, -inverse};
}

/// 1 - exp(-t) (1 + t)
template <class V>
FPG_FN KlValue<V> kl_forward_k3(const Clamped<V>& t) {
  const V inverse = exp_any(-t.value);
  return {V(1) - inverse * (V(1) + t.value), zero_unless(t.inside, t.value * inverse)};
}

/// The estimate of KL(target || policy) on the clamped log ratio.
template <class V, class F>
FPG_FN KlValue<V> kl_forward(const Spec<F>& spec, V logp, V kl_target) {
  const Clamped<V> t = clamp(logp - kl_target, V(spec.kl_log_ratio_lo), V(spec.kl_log_ratio_hi));
  return spec.kl_forward == KlForward::score ? kl_forward_score(t.value) : kl_forward_k3(t);
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

template <class V, class F>
FPG_FN void add_kl(const Spec<F>& spec, const TokenIn<V>& in, V ratio, V ratio_slope, TokenOut<V>& out) {
  if (spec.kl != Kl::none) {
    const KlValue<V> k = kl_term(spec, in.logp, in.kl_target);
    const V coef = V(spec.kl_coef), rho = spec.kl_ratio == KlRatio::none ? V(1) : ratio;
    out.kl = k.value;
    out.x = out.x + coef * rho * k.value;
    out.dl = out.dl + coef * rho * k.slope;
    if (spec.kl_ratio == KlRatio::live) out.dr = out.dr + coef * ratio_slope * k.value;
  }
  if (spec.kl_forward != KlForward::none) {
    const KlValue<V> k = kl_forward(spec, in.logp, in.kl_target);
    out.x = out.x + V(spec.kl_forward_coef) * k.value;
    out.dl = out.dl + V(spec.kl_forward_coef) * k.slope;
  }
}

template <class V>
FPG_FN void keep_where(MaskOf<V> kept, TokenOut<V>& out) {
  out.x = zero_unless(kept, out.x);
  out.dr = zero_unless(kept, out.dr);
  out.dl = zero_unless(kept, out.dl);
}

/// Everything of one policy token. `has_weight` says whether in.weight is real.
template <class V, class F>
FPG_FN TokenOut<V> token_terms(const Spec<F>& spec, const TokenIn<V>& in, bool has_weight) {
  const Clamped<V> d = clamp(in.log_ratio_level, V(spec.log_ratio_lo), V(spec.log_ratio_hi));
  const V ratio = exp_any(d.value);
  const V ratio_slope = zero_unless(d.inside, ratio);
  const Surrogated<V> s = surrogate(spec, in, d.value, ratio, ratio_slope);
  TokenOut<V> out{s.x, s.dr, s.dl, d.value, ratio, V(0), s.dual_clipped, nowhere<V>()};
  if (drops_tokens(spec)) {
    out.dropped = dropped(spec, in, ratio);
    keep_where(negate(out.dropped), out);
    out.dual_clipped = both(out.dual_clipped, negate(out.dropped));
  }
  add_penalties(spec, in, out);
  if (has_weight && spec.surrogate != Surrogate::vespo) {  // there it is part of log_w
    const V weight = in.weight.value;
    out.x = out.x * weight;
    out.dr = out.dr * weight;
    out.dl = out.dl * weight;
    keep_where(negate(weight == V(0)), out);
  }
  add_kl(spec, in, ratio, ratio_slope, out);
  if (spec.entropy_coef != F(0)) out.x = out.x - V(spec.entropy_coef) * in.entropy;
  return out;
}

}  // namespace fusedpg::FUSEDPG_ISA
