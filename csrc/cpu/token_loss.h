// csrc/cpu/token_loss.h: stage B: loss, coefficients and metric sums of every token. Blocks of a fixed number of tokens run in
// parallel; their sums are joined in block order, so nothing depends on the thread count.
#pragma once
#include "../terms.h"
#include "segments.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int64_t TOKEN_BLOCK = 4096;
constexpr int FLUSH_EVERY = 8;  // vectors that are added in F before the sums go to double

/// Tokens in the compute type, with the pointers that the spec selects.
template <class F>
struct TokenView {
  const F *logp, *entropy, *w, *adv, *logp_old, *kl_target, *is_weight;
  const F* log_ratio_seq;  // per token, its sequence's mean log ratio; null at token level

  FPG_MEMBER static TokenView make(const Spec<F>& spec, const Tokens& t, const F* logp, const F* entropy) {
    const void* anchors[] = {t.logp_old, nullptr, t.logp_rollout};
    const void* kl_targets[] = {t.logp_ref, t.logp_rollout};
    TokenView v{};
    v.logp = logp;
    v.entropy = entropy;
    v.w = static_cast<const F*>(t.w);
    v.adv = static_cast<const F*>(t.advantages);
    v.logp_old = static_cast<const F*>(anchors[static_cast<int>(spec.anchor)]);
    v.kl_target = spec.kl == Kl::none ? nullptr : static_cast<const F*>(kl_targets[static_cast<int>(spec.kl_target)]);
    v.is_weight = static_cast<const F*>(t.is_weights);
    return v;
  }
};

/// l - o; 0 without an anchor, but a NaN logp stays visible.
template <class V>
FPG_FN V log_ratio_token(V logp, V logp_old, bool has_old) {
  return has_old ? logp - logp_old : select(logp == logp, V(0), logp);
}

/// c of a token: w times its whole derivative, 0 where w is 0.
template <class V>
FPG_FN V token_coefficient(V w, V dl, V dr) {
  return select(w == V(0), V(0), w * (dl + dr));
}

template <class F>
FPG_FN void clear_sums(double* sums) {
  for (int i = 0; i < NSUMS; ++i) sums[i] = 0;
  sums[S_RATIO_MIN] = INFINITY;
  sums[S_RATIO_MAX] = sums[S_IS_WEIGHT_MAX] = -INFINITY;
}

/// The metric sums of a block: vectors of F that are emptied into doubles, lane by lane.
template <class F>
struct SumLanes {
  using V = typename Vector<F>::type;
  static constexpr int W = Vector<F>::width;
  static constexpr int ADDED = S_RATIO_MIN;  // those before are added, those from here on are extrema
  V part[ADDED], ratio_min, ratio_max, is_max;
  double total[ADDED][W];

  FPG_MEMBER SumLanes() {
    for (int s = 0; s < ADDED; ++s) {
      part[s] = V(0);
      for (int i = 0; i < W; ++i) total[s][i] = 0;
    }
    ratio_min = V(static_cast<F>(INFINITY));
    ratio_max = is_max = -ratio_min;
  }
  FPG_MEMBER void add(Sum s, V x) { part[s] = part[s] + x; }
  FPG_MEMBER void count(Sum s, MaskOf<V> m) { part[s] = part[s] + select(m, V(1), V(0)); }
  /// A NaN wins and stays.
  FPG_MEMBER static V extremum(MaskOf<V> on, MaskOf<V> better, V x, V old) {
    return select(both(on, either(better, negate(x == x))), x, old);
  }
  FPG_MEMBER void flush() {
    for (int s = 0; s < ADDED; ++s) {
      F x[W];
      store(x, part[s]);
      for (int i = 0; i < W; ++i) total[s][i] += static_cast<double>(x[i]);
      part[s] = V(0);
    }
  }
  FPG_MEMBER void finish(double* sums) {
    flush();
    for (int s = 0; s < ADDED; ++s) {
      sums[s] = 0;
      for (int i = 0; i < W; ++i) sums[s] += total[s][i];
    }
    sums[S_RATIO_MIN] = INFINITY;
    sums[S_RATIO_MAX] = sums[S_IS_WEIGHT_MAX] = -INFINITY;
    F low[W], high[W], weight[W];
    store(low, ratio_min);
    store(high, ratio_max);
    store(weight, is_max);
    for (int i = 0; i < W; ++i) join_extrema(sums, low[i], high[i], weight[i]);
  }
  template <class D>
  FPG_MEMBER static void join_extrema(double* sums, D low, D high, D weight) {
    const double a = static_cast<double>(low), b = static_cast<double>(high), c = static_cast<double>(weight);
    if (a < sums[S_RATIO_MIN] || a != a) sums[S_RATIO_MIN] = a;
    if (b > sums[S_RATIO_MAX] || b != b) sums[S_RATIO_MAX] = b;
    if (c > sums[S_IS_WEIGHT_MAX] || c != c) sums[S_IS_WEIGHT_MAX] = c;
  }
  FPG_MEMBER static void join(double* all, const double* block) {
    for (int s = 0; s < ADDED; ++s) all[s] += block[s];
    join_extrema(all, block[S_RATIO_MIN], block[S_RATIO_MAX], block[S_IS_WEIGHT_MAX]);
  }
};

template <class F>
FPG_FN void add_metrics(const Spec<F>& spec, const TokenIn<typename Vector<F>::type>& in,
                        const TokenOut<typename Vector<F>::type>& t, typename Vector<F>::type w,
                        MaskOf<typename Vector<F>::type> on, bool has_is_weight, SumLanes<F>& sums) {
  using V = typename Vector<F>::type;
  const auto added = [&](V x) __attribute__((always_inline)) { return zero_unless(on, x); };
  sums.add(S_NUMERATOR, added(w * t.x));
  sums.count(S_TOKENS, on);
  sums.add(S_RATIO, added(t.ratio));
  const MaskOf<V> low = both(on, t.ratio < V(spec.clip_low)), high = both(on, t.ratio > V(spec.clip_high));
  sums.count(S_CLIP_LOW, both(low, in.adv < V(0)));
  sums.count(S_CLIP_HIGH, both(high, in.adv > V(0)));
  sums.count(S_DUAL_CLIPPED, both(on, t.dual_clipped));
  sums.count(S_OUT_OF_BAND, either(low, high));
  sums.add(S_KL_OLD_K1, added(-t.log_ratio));
  sums.add(S_KL_OLD_K3, added(t.ratio - V(1) - t.log_ratio));
  if (spec.kl != Kl::none) sums.add(S_KL, added(t.kl));
  sums.add(S_ENTROPY, added(in.entropy));
  if (has_is_weight) {
    sums.add(S_IS_WEIGHT, added(in.is_weight));
    sums.count(S_IS_ZERO, both(on, in.is_weight == V(0)));
    sums.is_max = sums.extremum(on, in.is_weight > sums.is_max, in.is_weight, sums.is_max);
  }
  sums.ratio_min = sums.extremum(on, t.ratio < sums.ratio_min, t.ratio, sums.ratio_min);
  sums.ratio_max = sums.extremum(on, t.ratio > sums.ratio_max, t.ratio, sums.ratio_max);
}

/// Where stage B writes. At SEQUENCE level `c` first receives dl, and `dr` the derivative that the sequence shares.
template <class F>
struct TokenArrays {
  F *per_token, *c, *e, *dr;
  F scale;
};

/// A vector of tokens from i on; n < width only at the end of a batch.
template <bool FULL, class F>
FPG_FN void token_vector(const Spec<F>& spec, const TokenView<F>& v, const TokenArrays<F>& out, int64_t i, int n,
                         SumLanes<F>& sums) {
  using V = typename Vector<F>::type;
  const auto get = [&](const F* p, F missing) __attribute__((always_inline)) {
    return !p ? V(missing) : FULL ? load(p + i) : load_first(p + i, n, F(0));
  };
  const auto put = [&](F* p, V x) __attribute__((always_inline)) { FULL ? store(p + i, x) : store_first(p + i, n, x); };
  const V w = get(v.w, F(1));
  const MaskOf<V> on = negate(w == V(0));
  TokenIn<V> in{get(v.logp, 0), get(v.adv, 0), V(0), get(v.kl_target, 0), get(v.is_weight, 1), get(v.entropy, 0)};
  in.log_ratio_raw =
      v.log_ratio_seq ? get(v.log_ratio_seq, 0) : log_ratio_token(in.logp, get(v.logp_old, 0), v.logp_old != nullptr);
  const TokenOut<V> t = token_terms(spec, in, v.is_weight != nullptr);
  put(out.per_token, zero_unless(on, t.x));
  if (out.dr) {
    put(out.c, zero_unless(on, t.dl));
    put(out.dr, zero_unless(on, t.dr));
  } else {
    const V c = token_coefficient(w, t.dl, t.dr);
    put(out.c, c * V(out.scale));
    sums.count(S_ACTIVE, negate(c == V(0)));
  }
  if (out.e) put(out.e, zero_unless(on, V(-spec.entropy_coef) * w * V(out.scale)));
  add_metrics(spec, in, t, w, on, v.is_weight != nullptr, sums);
}

template <class F>
void token_block(const Spec<F>& spec, const TokenView<F>& v, const TokenArrays<F>& out, int64_t begin, int64_t end,
                 double* block_sums) {
  constexpr int W = Vector<F>::width;
  SumLanes<F> sums;
  int64_t i = begin;
  for (int vectors = 0; i + W <= end; i += W) {
    token_vector<true>(spec, v, out, i, W, sums);
    if (++vectors % FLUSH_EVERY == 0) sums.flush();
  }
  if (i < end) token_vector<false>(spec, v, out, i, static_cast<int>(end - i), sums);
  sums.finish(block_sums);
}

/// c = w (dl + D), D the mean of dr over the sequence; counts the active tokens.
template <class F>
int64_t share_sequence_derivative(int threads, const F* w, const F* shared, int64_t n, F scale, F* c) {
  int64_t active = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : active)
  for (int64_t i = 0; i < n; ++i) {
    const F whole = token_coefficient(w[i], c[i], shared[i]);
    active += !(whole == F(0));
    c[i] = whole * scale;
  }
  return active;
}

template <class F>
void token_loss(int threads, const Spec<F>& spec, const F* logp, const F* entropy, const Tokens& tokens,
                const TokenOutputs& outputs) {
  const int64_t n = tokens.count, blocks = blocks_of(n, TOKEN_BLOCK);
  TokenView<F> view = TokenView<F>::make(spec, tokens, logp, entropy);
  const bool sequence_level = spec.level != Level::token, shared = spec.level == Level::sequence;
  const CallBuffer<F> seq_ratio(sequence_level ? n : 0, true), dr(shared ? n : 0), seq_dr(shared ? n : 0, true);
  const CallBuffer<double> block_sums(blocks * NSUMS);
  const Sequences sequences(tokens.cu, sequence_level ? tokens.sequences : 0, n);
  if (sequence_level) {
    const auto log_ratio = [&view](int64_t i) {
      return log_ratio_token(view.logp[i], view.logp_old ? view.logp_old[i] : F(0), view.logp_old != nullptr);
    };
    sequences.mean(threads, view.w, log_ratio, seq_ratio.get());
    view.log_ratio_seq = seq_ratio.get();
  }
  const TokenArrays<F> out{static_cast<F*>(outputs.per_token), static_cast<F*>(outputs.c), static_cast<F*>(outputs.e),
                           shared ? dr.get() : nullptr, static_cast<F>(outputs.scale)};
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flush;
    TokenView<F> mine = view;
    F* w = tokens.mask ? static_cast<F*>(thread_scratch(Slot::block, TOKEN_BLOCK * sizeof(F))) : nullptr;
#pragma omp for schedule(dynamic, 4)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * TOKEN_BLOCK, end = smaller(begin + TOKEN_BLOCK, n);
      if (tokens.mask) {  // a block's weights in L1, instead of all of them in memory
        for (int64_t i = begin; i < end; ++i) w[i - begin] = static_cast<F>(tokens.mask[i]);
        mine.w = w - begin;
      }
      token_block(spec, mine, out, begin, end, block_sums.get() + b * NSUMS);
    }
  }
  double all[NSUMS];
  clear_sums<F>(all);
  for (int64_t b = 0; b < blocks; ++b) SumLanes<F>::join(all, block_sums.get() + b * NSUMS);
  if (shared) {
    const F* per_row = dr.get();
    sequences.mean(threads, view.w, [per_row](int64_t i) { return per_row[i]; }, seq_dr.get());
    all[S_ACTIVE] = static_cast<double>(share_sequence_derivative(threads, view.w, seq_dr.get(), n, out.scale, out.c));
  }
  all[S_KEEP] = all[S_TOKENS];
  for (int s = 0; s < NSUMS; ++s) static_cast<F*>(outputs.sums)[s] = static_cast<F>(all[s]);
}

}  // namespace fusedpg::FUSEDPG_ISA
