// csrc/cpu/logprob.h: stage A alone (log-probability, entropy, max, log-sum of each row) and stage C alone (their gradient).
#pragma once
#include "row_pass.h"

namespace fusedpg::FUSEDPG_ISA {

/// RowOut in the compute type.
template <class F>
struct RowArrays {
  F *logp, *entropy, *row_max, *log_sum;
  FPG_MEMBER explicit RowArrays(const RowOut& o)
      : logp(static_cast<F*>(o.logp)),
        entropy(static_cast<F*>(o.entropy)),
        row_max(static_cast<F*>(o.row_max)),
        log_sum(static_cast<F*>(o.log_sum)) {}

  FPG_MEMBER void put(int64_t row, const RowStats<F>& s) const {
    logp[row] = s.logp;
    row_max[row] = s.max;
    log_sum[row] = static_cast<F>(s.log_sum);
    if (entropy) entropy[row] = static_cast<F>(s.entropy);
  }
  FPG_MEMBER void put_zero(int64_t row) const {
    logp[row] = row_max[row] = log_sum[row] = F(0);
    if (entropy) entropy[row] = F(0);
  }
};

template <class F>
class ForwardHooks final : public RowHooks<F> {
 public:
  ForwardHooks(const RowArrays<F>& out, const uint8_t* active) : out_(out), active_(active) {}
  bool wanted(int64_t row) override {
    const bool on = !active_ || active_[row];
    if (!on) out_.put_zero(row);
    return on;
  }
  bool done(int64_t row, RowStats<F>& stats, RowCoefficients&) override {
    out_.put(row, stats);
    return false;
  }

 private:
  RowArrays<F> out_;
  const uint8_t* active_;
};

/// The row's own sum is recomputed while the row is hot and used when it rounds to the stored log_sum: a gradient from the
/// stored fp32 value alone would carry its rounding (5e-7 relative at log_sum 12). Otherwise (statistics of a vocabulary that
/// is split over processes) the stored values are the truth.
template <class F>
class BackwardHooks final : public RowHooks<F> {
 public:
  BackwardHooks(const RowArrays<F>& saved, const F* c, const F* e, double scale) : saved_(saved), c_(c), e_(e), scale_(scale) {}
  bool wanted(int64_t row) override { return !(c_[row] == F(0)) || (e_ && !(e_[row] == F(0))); }
  bool done(int64_t row, RowStats<F>& stats, RowCoefficients& q) override {
    if (!(stats.max == saved_.row_max[row] && static_cast<F>(stats.log_sum) == saved_.log_sum[row])) use_saved(row, stats);
    if (e_ && static_cast<F>(q.entropy) != saved_.entropy[row]) q.entropy = static_cast<double>(saved_.entropy[row]);
    q.c = static_cast<double>(c_[row]) * scale_;
    q.e = e_ ? static_cast<double>(e_[row]) * scale_ : 0.0;
    return true;
  }

 private:
  void use_saved(int64_t row, RowStats<F>& stats) const {
    stats.target_z = (static_cast<double>(stats.y_target) - static_cast<double>(saved_.row_max[row])) * stats.k;
    stats.target = ::exp(stats.target_z);
    stats.max = saved_.row_max[row];
    stats.log_sum = static_cast<double>(saved_.log_sum[row]);
    stats.sum = ::exp(stats.log_sum);
    stats.others = stats.sum - stats.target;
  }

  RowArrays<F> saved_;
  const F *c_, *e_;
  double scale_;
};

template <class S>
void logprob_forward(int threads, const Matrix& logits, const int64_t* targets, const uint8_t* active, const LogitMap& map,
                     const RowOut& out) {
  using F = typename Compute<S>::type;
  ForwardHooks<F> hooks(RowArrays<F>(out), active);
  run_rows<S>(threads, logits, targets, map, out.entropy != nullptr, Matrix{}, hooks);
}

template <class S>
void logprob_backward(int threads, const Matrix& logits, const int64_t* targets, const RowOut& saved, const void* c,
                      const void* e, double scale, const LogitMap& map, const Matrix& gradient) {
  using F = typename Compute<S>::type;
  BackwardHooks<F> hooks(RowArrays<F>(saved), static_cast<const F*>(c), static_cast<const F*>(e), scale);
  run_rows<S>(threads, logits, targets, map, e != nullptr, gradient, hooks);
}

}  // namespace fusedpg::FUSEDPG_ISA
