// csrc/cpu/sequence_terms.h: what stage B takes from a token's whole sequence, spread to its tokens: the mean log ratio, the
// rollout ratio of a correction weight or rejection, and the log of vespo's product.
#pragma once
#include "segments.h"
#include "token_view.h"

namespace fusedpg::FUSEDPG_ISA {

/// The spread arrays of a call; those that the spec does not need are empty.
template <class F>
class SequenceTerms {
 public:
  SequenceTerms(const Spec<F>& spec, int64_t tokens)
      : spec_(spec),
        log_ratio_(spec.level != Level::token ? tokens : 0, true),
        product_(wants_product(spec) ? tokens : 0, true),
        geometric_(wants_geometric(spec) ? tokens : 0, true),
        log_w_(spec.surrogate == Surrogate::vespo ? tokens : 0, true) {}

  /// Fills the arrays from `view` and points it at them.
  void fill(int threads, const Sequences& sequences, TokenView<F>& view) const {
    if (spec_.level != Level::token) fill_log_ratio(threads, sequences, view);
    if (view.rollout && corrects_sequences(spec_)) fill_rollout(threads, sequences, view);
    if (spec_.surrogate == Surrogate::vespo) fill_product(threads, sequences, view);
  }

 private:
  static bool wants(const Spec<F>& s, CorrectionLevel level, Reject reject) {
    return (s.correction != Correction::none && s.correction_level == level) || s.reject == reject;
  }
  static bool wants_product(const Spec<F>& s) { return wants(s, CorrectionLevel::sequence, Reject::sequence); }
  static bool wants_geometric(const Spec<F>& s) { return wants(s, CorrectionLevel::geometric, Reject::geometric); }

  void fill_log_ratio(int threads, const Sequences& sequences, TokenView<F>& view) const {
    const bool clips = clips_tokens(spec_);
    const auto log_ratio = [&](int64_t i) __attribute__((always_inline)) {
      const F t = read_log_ratio(view, ReadOne<F>{i});
      return clips ? clip_tokens(spec_, t, view.adv[i]).value : t;
    };
    sequences.mean(threads, view.w, log_ratio, log_ratio_.get());
    view.log_ratio_seq = log_ratio_.get();
  }

  /// Tokens without a known rollout take no part; the product is of ratios as they are, the geometric mean weighs them by w.
  void fill_rollout(int threads, const Sequences& sequences, TokenView<F>& view) const {
    const F *top = view.rho_top ? view.rho_top : view.logp, *rollout = view.rollout, *w = view.w;
    const bool skip_nan = spec_.missing_one;
    const auto add_weighted = [=](int64_t i, double weight, WeightedSum& s) __attribute__((always_inline)) {
      if (w[i] == F(0) || (skip_nan && is_nan(rollout[i]))) return;
      s.value += weight * static_cast<double>(top[i] - rollout[i]);
      s.weight += weight;
    };
    const auto add = [&](int64_t i, WeightedSum& s) { add_weighted(i, 1.0, s); };
    const auto add_w = [&](int64_t i, WeightedSum& s) { add_weighted(i, static_cast<double>(w[i]), s); };
    if (wants_product(spec_)) sequences.reduce(threads, Join::sum, add, product_.get());
    if (wants_geometric(spec_)) sequences.reduce(threads, Join::mean, add_w, geometric_.get());
    view.rho_weight_seq = spec_.correction_level == CorrectionLevel::sequence ? product_.get() : geometric_.get();
    view.rho_reject_seq = spec_.reject == Reject::sequence ? product_.get() : geometric_.get();
  }

  void fill_product(int threads, const Sequences& sequences, TokenView<F>& view) const {
    const auto add = [&](int64_t i, WeightedSum& s) __attribute__((always_inline)) {
      if (view.w[i] == F(0)) return;
      const ReadOne<F> read{i};
      s.value += static_cast<double>(clamp(read_log_ratio(view, read), spec_.token_clip_lo, spec_.token_clip_hi).value);
      if (!view.has_weight()) return;
      const F log_weight = log_any(read_weight(spec_, view, read_missing(spec_, view, read), read));
      s.value += static_cast<double>(clamp(log_weight, static_cast<F>(LOG_WEIGHT_MIN), static_cast<F>(LOG_WEIGHT_MAX)).value);
    };
    sequences.reduce(threads, Join::sum, add, log_w_.get());
    view.log_w_seq = log_w_.get();
  }

  const Spec<F>& spec_;
  CallBuffer<F> log_ratio_, product_, geometric_, log_w_;
};

}  // namespace fusedpg::FUSEDPG_ISA
