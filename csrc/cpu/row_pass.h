// csrc/cpu/row_pass.h: runs the rows of a logits matrix over the threads: statistics, a hook that may answer with coefficients,
// and the gradient while the row is still in L2. Knows no loss. Whole rows are dealt out dynamically; when rows are fewer than
// threads, the blocks of each row are. Either way a row's bits are the same, because partials are per block and joined in
// order.
#pragma once
#include <omp.h>

#include "gradient.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int64_t STREAM_BYTES = int64_t(16) << 20;  // gradients at least this big bypass the cache

/// What a caller does with a row. Called once a row, from the thread that has it.
template <class F>
class RowHooks {
 public:
  /// Whether the row is read at all; when not, its gradient is zero and nothing else is called.
  virtual bool wanted(int64_t row) = 0;
  /// Takes the statistics and may refine them; true when the row's gradient is wanted, with its coefficients in `q`.
  virtual bool done(int64_t row, RowStats<F>& stats, RowCoefficients& q) = 0;

 protected:
  ~RowHooks() = default;
};

template <class S, bool CAP, bool ENTROPY>
class RowPass {
  using F = typename Compute<S>::type;

 public:
  RowPass(const Matrix& logits, const int64_t* targets, const LogitMap& map, const Matrix& gradient, RowHooks<F>& hooks)
      : logits_(logits), targets_(targets), map_(map), gradient_(gradient), hooks_(hooks) {
    blocks_ = blocks_of(logits.vocab, BLOCK);
    keep_ = gradient.data != nullptr;
    const int64_t bytes = logits.rows() * logits.vocab * static_cast<int64_t>(sizeof(S));
    stream_ = keep_ && gradient.data != logits.data && bytes >= STREAM_BYTES;
  }

  void run(int threads) {
    if (logits_.rows() < threads && blocks_ > 1)
      split_rows(threads);
    else
      whole_rows(threads);
  }

 private:
  using View = RowView<S, CAP>;

  /// Buffers of one row: `exps` and `partials` belong to the row, `buffer` to the thread.
  struct Workspace {
    F* exps;
    Partial<F>* partials;
  };

  Workspace workspace() const {
    const int64_t columns = keep_ ? blocks_of(logits_.vocab, GROUP) * GROUP : GROUP;
    return {
        static_cast<F*>(thread_scratch(Slot::exponentials, static_cast<size_t>(columns) * sizeof(F))),
        static_cast<Partial<F>*>(thread_scratch(Slot::partials, static_cast<size_t>(larger(blocks_, 1)) * sizeof(Partial<F>)))};
  }
  static F* block_buffer() { return static_cast<F*>(thread_scratch(Slot::block, BLOCK * sizeof(F))); }

  __attribute__((noinline)) View view(int64_t row) const {
    const S* x = static_cast<const S*>(logits_.data) + logits_.offset(row);
    return View::make(x, logits_.vocab, targets_[row], map_, row);
  }
  S* out(int64_t row) const { return static_cast<S*>(gradient_.data) + gradient_.offset(row); }
  void zero(int64_t row) const {
    if (keep_) __builtin_memset(out(row), 0, static_cast<size_t>(logits_.vocab) * sizeof(S));
  }

  __attribute__((noinline)) void forward(const View& v, int64_t b, const Workspace& w, F* buffer) const {
    w.partials[b] =
        keep_ ? v.template block<true, ENTROPY>(b, w.exps, buffer) : v.template block<false, ENTROPY>(b, w.exps, buffer);
  }
  /// The first block gives the reference of the others.
  void begin(View& v, const Workspace& w, F* buffer) const {
    forward(v, 0, w, buffer);
    v.refer_to(w.partials[0]);
  }
  __attribute__((noinline)) bool finish(const View& v, int64_t row, const Workspace& w, RowStats<F>& stats,
                                        RowCoefficients& q) {
    stats = combine<F, ENTROPY>(w.partials, blocks_, v.y_target, v.target >= 0, v.k);
    q = {0, 0, stats.entropy};
    return hooks_.done(row, stats, q) && keep_;
  }
  __attribute__((noinline)) void backward(const View& v, int64_t row, int64_t b, const Workspace& w, const RowStats<F>& stats,
                                          const RowCoefficients& q) const {
    if (stream_)
      gradient_block<CAP, true>(v, stats, w.partials[b], q, b, w.exps, out(row));
    else
      gradient_block<CAP, false>(v, stats, w.partials[b], q, b, w.exps, out(row));
  }

  void one_row(int64_t row, const Workspace& w, F* buffer) {
    if (!hooks_.wanted(row)) return zero(row);
    View v = view(row);
    begin(v, w, buffer);
    for (int64_t b = 1; b < blocks_; ++b) forward(v, b, w, buffer);
    RowStats<F> stats;
    RowCoefficients q;
    if (!finish(v, row, w, stats, q)) return zero(row);
    for (int64_t b = blocks_ - 1; b >= 0; --b) backward(v, row, b, w, stats, q);
    gradient_target(v, stats, q, out(row));
  }

  void whole_rows(int threads) {
    const int64_t rows = logits_.rows(), chunk = larger(1, 65536 / larger(1, logits_.vocab));
#pragma omp parallel num_threads(threads)
    {
      const FlushDenormals flush;
      const Workspace w = workspace();
      F* buffer = block_buffer();
#pragma omp for schedule(dynamic, chunk)
      for (int64_t row = 0; row < rows; ++row) one_row(row, w, buffer);
      store_fence();
    }
  }

  void split_rows(int threads) {
    const Workspace w = workspace();
    const int64_t rows = logits_.rows();
    for (int64_t row = 0; row < rows; ++row) {
      if (!hooks_.wanted(row)) {
        zero(row);
        continue;
      }
      View v = view(row);
      RowStats<F> stats;
      RowCoefficients q;
      bool gradient = false;
#pragma omp parallel num_threads(threads)
      {
        const FlushDenormals flush;
        F* buffer = block_buffer();
#pragma omp single
        begin(v, w, buffer);
#pragma omp for schedule(static)
        for (int64_t b = 1; b < blocks_; ++b) forward(v, b, w, buffer);
#pragma omp single
        gradient = finish(v, row, w, stats, q);
        if (gradient) {
#pragma omp for schedule(static)
          for (int64_t b = 0; b < blocks_; ++b) backward(v, row, b, w, stats, q);
        }
        store_fence();
      }
      if (gradient)
        gradient_target(v, stats, q, out(row));
      else
        zero(row);
    }
  }

  const Matrix& logits_;
  const int64_t* targets_;
  const LogitMap& map_;
  const Matrix& gradient_;
  RowHooks<F>& hooks_;
  int64_t blocks_;
  bool keep_, stream_;
};

template <class S>
void run_rows(int threads, const Matrix& logits, const int64_t* targets, const LogitMap& map, bool entropy,
              const Matrix& gradient, RowHooks<typename Compute<S>::type>& hooks) {
  const bool cap = map.softcap > 0;
  if (cap && entropy) RowPass<S, true, true>(logits, targets, map, gradient, hooks).run(threads);
  if (cap && !entropy) RowPass<S, true, false>(logits, targets, map, gradient, hooks).run(threads);
  if (!cap && entropy) RowPass<S, false, true>(logits, targets, map, gradient, hooks).run(threads);
  if (!cap && !entropy) RowPass<S, false, false>(logits, targets, map, gradient, hooks).run(threads);
}

}  // namespace fusedpg::FUSEDPG_ISA
