// csrc/correction.h: the rollout correction weight of a token: a constant of the loss, without a derivative.
#pragma once
#include "terms.h"

namespace fusedpg::FUSEDPG_ISA {

template <class V>
FPG_FN MaskOf<V> outside(V x, V lo, V hi) {
  return either(x < lo, hi < x);
}

/// A correction weight from its log: clipped to [correction_low, correction_high], or 0 outside; 1 without a correction.
template <class V, class F>
FPG_FN V bound_weight(const Spec<F>& spec, V log_rho) {
  if (spec.correction == Correction::none) return select(is_nan(log_rho), log_rho, V(1));
  const V rho = exp_any(log_rho), lo = V(spec.correction_low), hi = V(spec.correction_high);
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
