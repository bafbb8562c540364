// csrc/cpu/one_pass.h: stages A, B and C together. Token-local losses: each row's loss and gradient while the row is in L2,
// then stage B over all tokens for the per-token outputs and sums (O(tokens), the same functions, so the same c). Losses that
// sum over sequences: A, B, then C.
#pragma once
#include "logprob.h"
#include "token_loss.h"

namespace fusedpg::FUSEDPG_ISA {

/// Stage A for the rows that the loss reads.
template <class F>
class LossForwardHooks final : public RowHooks<F> {
 public:
  LossForwardHooks(const TokenView<F>& view, const RowArrays<F>& out) : view_(view), out_(out) {}
  bool wanted(int64_t row) override {
    const bool on = view_.reads(row);
    if (!on) out_.put_zero(row);
    return on;
  }
  bool done(int64_t row, RowStats<F>& stats, RowCoefficients&) override {
    out_.put(row, stats);
    return false;
  }

 private:
  const TokenView<F>& view_;
  RowArrays<F> out_;
};

template <class F>
class OnePassHooks final : public RowHooks<F> {
 public:
  OnePassHooks(const Spec<F>& spec, const TokenView<F>& view, const RowArrays<F>& out, double scale)
      : spec_(spec), view_(view), out_(out), scale_(scale) {}
  bool wanted(int64_t row) override {
    const bool on = view_.reads(row);
    if (!on) out_.put_zero(row);
    return on;
  }
  bool done(int64_t row, RowStats<F>& stats, RowCoefficients& q) override {
    out_.put(row, stats);  // the view reads logp from there
    TokenIn<F> in;
    read_token<true>(spec_, view_, ReadOne<F>{row}, in);
    const TokenOut<F> t = token_terms<true>(spec_, in, view_.has_weight());
    const F w = view_.w[row], e = -spec_.entropy_coef * w;
    F c = token_coefficient(w, t.dl, t.dr);
    if (view_.obs_w) c = c + observation_coefficient(spec_, view_.obs_w[row]);
    q.c = static_cast<double>(c) * scale_;
    q.e = static_cast<double>(e) * scale_;
    return !(c == F(0) && e == F(0));
  }

 private:
  const Spec<F>& spec_;
  const TokenView<F>& view_;
  RowArrays<F> out_;
  double scale_;
};

template <class S>
void loss_forward(int threads, const double* encoded, const Matrix& logits, const int64_t* targets, const void* scale_ptr,
                  const Tokens& tokens, const LogitMap& map, const RowOut& rows, const TokenOutputs& outputs,
                  const Matrix& gradient) {
  using F = typename Compute<S>::type;
  const Spec<F> spec = decode<F>(encoded);
  const RowArrays<F> arrays(rows);
  const double scale = static_cast<double>(*static_cast<const F*>(scale_ptr));
  const TokenView<F> view = TokenView<F>::make(spec, tokens, arrays.logp, arrays.entropy);
  const bool one_pass = gradient.data && !segments_needed(spec);
  if (one_pass) {
    OnePassHooks<F> hooks(spec, view, arrays, scale);
    run_rows<S>(threads, logits, targets, map, rows.entropy != nullptr, gradient, hooks);
  } else {
    LossForwardHooks<F> hooks(view, arrays);
    run_rows<S>(threads, logits, targets, map, rows.entropy != nullptr, Matrix{}, hooks);
  }
  token_loss<F>(threads, spec, arrays.logp, arrays.entropy, tokens, outputs);
  if (gradient.data && !one_pass)
    logprob_backward<S>(threads, logits, targets, rows, outputs.c, outputs.e, scale, map, gradient);
}

}  // namespace fusedpg::FUSEDPG_ISA
