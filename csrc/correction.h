// csrc/masks.h: what takes tokens away or weighs them: clipped log ratios, keep masks, rollout correction. All are constants
// of the loss: none has a derivative. Names and order are those of reference_terms.py.
#pragma once
#include "values.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr double PROBABILITY_FLOOR = 1e-6;              // of a binary distribution, in the KL keep mask
constexpr double LOG_WEIGHT_MIN = -18.420680743952367;  // log 1e-8: a correction weight inside vespo's product
constexpr double LOG_WEIGHT_MAX = 20.0;

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
FPG_FN MaskOf<V> outside(V x, V lo, V hi) {
  return either(x<lo, x> hi);
}

/// A correction weight from its log: clipped to [is_low, is_high], or 0 outside; 1 without a correction.
template <class V, class F>
FPG_FN V bound_weight(const Spec<F>& spec, V log_rho) {
  if (spec.correction == Correction::none) return select(is_nan(log_rho), log_rho, V(1));
  const V rho = exp_any(log_rho), lo = V(spec.is_low), hi = V(spec.is_high);
  return spec.correction == Correction::truncate ? clamp(rho, lo, hi).value : select(outside(rho, lo, hi), V(0), rho);
}

template <class V, class F>
FPG_FN MaskOf<V> rejected(const Spec<F>& spec, V log_rho) {
  return outside(exp_any(log_rho), V(spec.reject_low), V(spec.reject_high));
}

/// The weight of a token from its own log ratio to the rollout, and those of its sequence that the spec asks for.
template <class V, class F>
FPG_FN V correction_weight(const Spec<F>& spec, V log_rho, MaskOf<V> missing, V log_rho_weight, V log_rho_reject) {
  const V own = select(missing, V(0), log_rho);
  const bool own_weight = spec.correction == Correction::none || spec.correction_level == CorrectionLevel::token;
  V weight = bound_weight(spec, own_weight ? own : log_rho_weight);
  if (own_weight) weight = select(missing, V(1), weight);
  if (spec.reject == Reject::none) return weight;
  if (spec.reject > Reject::token) return select(rejected(spec, log_rho_reject), V(0), weight);
  return select(both(rejected(spec, own), negate(missing)), V(0), weight);
}

}  // namespace fusedpg::FUSEDPG_ISA
