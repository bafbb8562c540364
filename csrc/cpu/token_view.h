// csrc/cpu/token_view.h: the tokens of a call as stage B reads them: pointers that the spec selects, and the one place that
// turns a token, or a vector of them, into the input of its terms.
#pragma once
#include "../correction.h"
#include "api.h"

namespace fusedpg::FUSEDPG_ISA {

/// Tokens in the compute type. Null: absent, or not read by the spec.
template <class F>
struct TokenView {
  const F *logp, *entropy, *w, *adv, *anchor, *kl_target, *is_weight, *obs_w, *selected;
  const F *rollout, *rho_top;  // of a correction weight: exp(rho_top - rollout); rho_top null: logp itself
  /// Per token, from its sequence: see SequenceTerms.
  const F *log_ratio_seq, *rho_weight_seq, *rho_reject_seq, *log_w_seq;

  FPG_MEMBER static TokenView make(const Spec<F>& spec, const Tokens& t, const F* logp, const F* entropy) {
    const void* anchors[] = {t.logp_old, nullptr, t.logp_rollout};
    const void* kl_targets[] = {t.logp_ref, t.logp_rollout};
    const auto stream = [](const void* p, bool wanted) { return wanted ? static_cast<const F*>(p) : nullptr; };
    TokenView v{};
    v.logp = logp;
    v.entropy = entropy;
    v.w = static_cast<const F*>(t.w);
    v.adv = static_cast<const F*>(t.advantages);
    v.anchor = static_cast<const F*>(anchors[static_cast<int>(spec.anchor)]);
    v.kl_target = stream(kl_targets[static_cast<int>(spec.kl_target)], has_kl_target(spec));
    v.is_weight = static_cast<const F*>(t.is_weights);
    v.rollout = stream(t.logp_rollout, has_correction(spec) && !v.is_weight);
    v.rho_top = stream(t.logp_old, spec.anchor == Anchor::old);
    v.obs_w = static_cast<const F*>(t.obs_weights);
    v.selected = stream(t.selected, spec.selection != Selection::none);
    return v;
  }
  FPG_MEMBER bool has_weight() const { return is_weight || rollout; }
  /// Whether a row's log-probability is needed.
  FPG_MEMBER bool reads(int64_t row) const { return !(w[row] == F(0)) || (obs_w && !(obs_w[row] == F(0))); }
};

/// Reads one token; `missing` stands for an absent stream.
template <class F>
struct ReadOne {
  using V = F;
  int64_t i;
  FPG_MEMBER F operator()(const F* p, F missing) const { return p ? p[i] : missing; }
};

/// l - o; 0 without an anchor, but a NaN logp stays visible.
template <class V>
FPG_FN V log_ratio_token(V logp, V anchor, bool has_anchor) {
  return has_anchor ? logp - anchor : select(logp == logp, V(0), logp);
}

template <class F, class Read>
FPG_FN typename Read::V read_log_ratio(const TokenView<F>& v, const Read& read) {
  return log_ratio_token(read(v.logp, 0), read(v.anchor, 0), v.anchor != nullptr);
}

/// Where the weight's source is missing by the spec.
template <class F, class Read>
FPG_FN MaskOf<typename Read::V> read_missing(const Spec<F>& spec, const TokenView<F>& v, const Read& read) {
  using V = typename Read::V;
  return spec.missing_one ? is_nan(read(v.is_weight ? v.is_weight : v.rollout, 0)) : nowhere<V>();
}

/// The token's weight: the one given, or the one formed from its rollout and its sequence's.
template <class F, class Read>
FPG_FN typename Read::V read_weight(const Spec<F>& spec, const TokenView<F>& v, MaskOf<typename Read::V> missing,
                                    const Read& read) {
  using V = typename Read::V;
  if (v.is_weight) return select(missing, V(1), read(v.is_weight, 1));
  const V log_rho = read(v.rho_top ? v.rho_top : v.logp, 0) - read(v.rollout, 0);
  return correction_weight(spec, log_rho, missing, read(v.rho_weight_seq, 0), read(v.rho_reject_seq, 0));
}

/// A token's term inputs; without EXTRAS (see has_extras) those of the first losses. Written member by member: GCC keeps a
/// returned struct of lanes in memory.
template <bool EXTRAS, class F, class V, class Read>
FPG_FN void read_token(const Spec<F>& spec, const TokenView<F>& v, const Read& read, TokenIn<V>& in) {
  in.logp = read(v.logp, 0);
  in.adv = read(v.adv, 0);
  in.kl_target = read(v.kl_target, 0);
  in.entropy = read(v.entropy, 0);
  if (EXTRAS) {
    in.anchor = read(v.anchor ? v.anchor : v.logp, 0);
    in.log_ratio = log_ratio_token(in.logp, in.anchor, v.anchor != nullptr);
    in.log_ratio_level = v.log_ratio_seq ? read(v.log_ratio_seq, 0) : in.log_ratio;
    in.log_w = clamp(read(v.log_w_seq, 0), V(spec.log_w_lo), V(spec.log_w_hi)).value;
    in.selected = read(v.selected, 0);
    in.missing = read_missing(spec, v, read);
    in.weight = v.has_weight() ? read_weight(spec, v, in.missing, read) : V(1);
  } else {
    in.log_ratio_level =
        v.log_ratio_seq ? read(v.log_ratio_seq, 0) : log_ratio_token(in.logp, read(v.anchor, 0), v.anchor != nullptr);
    in.weight = read(v.is_weight, 1);
    in.missing = nowhere<V>();
  }
}

}  // namespace fusedpg::FUSEDPG_ISA
