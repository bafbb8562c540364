// csrc/values.h: what goes into and comes out of the terms of a token, for any value type V (float, double, 16 lanes).
#pragma once
#include "decode.h"

namespace fusedpg::FUSEDPG_ISA {

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

/// log_ratio: of the token itself; log_ratio_level: of the spec's level; log_w: of the sequence's product.
template <class V>
struct TokenIn {
  V logp, adv, anchor, log_ratio, log_ratio_level, log_w, selected, kl_target, entropy, weight;
  MaskOf<V> missing;  // of the weight
};

template <class V>
struct TokenOut {
  V x, dr, dl, log_ratio, ratio, kl;
  MaskOf<V> dual_clipped, dropped;
};

template <class V>
FPG_FN MaskOf<V> nowhere() {
  return MaskOf<V>{};
}

template <class V>
FPG_FN MaskOf<V> is_nan(V x) {
  return negate(x == x);
}

template <class V>
FPG_FN V zero_unless(MaskOf<V> m, V x) {
  return select(m, x, V(0));
}

/// -1, 0 or 1; a NaN stays.
template <class V>
FPG_FN V sign(V x) {
  return select(x > V(0), V(1), select(x < V(0), V(-1), x));
}

}  // namespace fusedpg::FUSEDPG_ISA
