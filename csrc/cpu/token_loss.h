// csrc/cpu/token_loss.h: stage B: loss, coefficients and metric sums of every token. Blocks of a fixed number of tokens run in
// parallel; their sums are joined in block order, so nothing depends on the thread count.
#pragma once
#include "sequence_terms.h"
#include "sums.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int64_t TOKEN_BLOCK = 4096;

/// Reads a vector of tokens from i on; n < width only at the end of a batch.
template <class F, bool FULL>
struct ReadVector {
  using V = typename Vector<F>::type;
  int64_t i;
  int n;
  FPG_MEMBER V operator()(const F* p, F missing) const {
    return !p ? V(missing) : FULL ? load(p + i) : load_first(p + i, n, F(0));
  }
};

/// c of a token: w times its whole derivative, 0 where w is 0.
template <class V>
FPG_FN V token_coefficient(V w, V dl, V dr) {
  return select(w == V(0), V(0), w * (dl + dr));
}

/// What an observation token adds to c: its term is -obs_coef l, weighed by obs_w.
template <class V, class F>
FPG_FN V observation_coefficient(const Spec<F>& spec, V obs_w) {
  return select(obs_w == V(0), V(0), V(-spec.obs_coef) * obs_w);
}

/// Where stage B writes. At SEQUENCE level `c` first receives dl, and `dr` the derivative that the sequence shares.
template <class F>
struct TokenArrays {
  F *per_token, *c, *e, *dr;
  F scale;
};

template <bool EXTRAS, bool FULL, class F>
FPG_FN void token_vector(const Spec<F>& spec, const TokenView<F>& v, const TokenArrays<F>& out, int64_t i, int n,
                         SumLanes<F>& sums) {
  using V = typename Vector<F>::type;
  const ReadVector<F, FULL> read{i, n};
  const auto put = [&](F* p, V x) __attribute__((always_inline)) { FULL ? store(p + i, x) : store_first(p + i, n, x); };
  const V w = read(v.w, F(1));
  const MaskOf<V> on = negate(w == V(0));
  if (!any(on) && !(EXTRAS && v.obs_w)) {  // padding is a tail of the row: most of it stops here
    F* const outputs[] = {out.per_token, out.c, out.e, out.dr};
    FPG_UNROLL for (F* p : outputs) if (p) put(p, V(0));
    return;
  }
  TokenIn<V> in;
  read_token<EXTRAS>(spec, v, read, in);
  const TokenOut<V> t = token_terms<EXTRAS>(spec, in, v.has_weight());
  V x = zero_unless(on, t.x), numerator = zero_unless(on, w * t.x), c = token_coefficient(w, t.dl, t.dr);
  if (EXTRAS && v.obs_w) {
    const V obs_w = read(v.obs_w, 0), observed = zero_unless(negate(obs_w == V(0)), V(-spec.obs_coef) * in.logp);
    x = x + observed;
    numerator = numerator + zero_unless(negate(obs_w == V(0)), obs_w * observed);
    c = c + observation_coefficient(spec, obs_w);
  }
  put(out.per_token, x);
  if (out.dr) {
    put(out.c, zero_unless(on, t.dl));
    put(out.dr, zero_unless(on, t.dr));
  } else {
    put(out.c, c * V(out.scale));
    sums.count(S_ACTIVE, negate(c == V(0)));
  }
  if (out.e) put(out.e, zero_unless(on, V(-spec.entropy_coef) * w * V(out.scale)));
  add_metrics<EXTRAS>(spec, in, t, numerator, on, v.has_weight(), sums);
}

/// The loops over tokens that are compiled: for any spec, for one without extras (see has_extras), and for the clipped ratio
/// with nothing besides.
enum class Loop { any, plain, clip };

/// What a loop leaves out, as constants that the compiler folds.
template <Loop LOOP, class F>
FPG_FN void leave_out(Spec<F>& spec, TokenView<F>& v, TokenArrays<F>& out) {
  if (LOOP != Loop::clip) return;
  spec.surrogate = Surrogate::clip;
  spec.delta = spec.dual_clip = static_cast<F>(INFINITY);
  spec.kl = Kl::none;
  spec.entropy_coef = F(0);
  v.entropy = v.kl_target = v.is_weight = v.rollout = v.log_ratio_seq = nullptr;
  out.e = out.dr = nullptr;
}

/// Whether `leave_out` changes nothing for Loop::clip.
template <class F>
bool only_clips(const Spec<F>& spec, const TokenView<F>& v) {
  const F infinity = static_cast<F>(INFINITY);
  const bool band_only = spec.surrogate == Surrogate::clip && spec.delta == infinity && spec.dual_clip == infinity;
  return band_only && spec.level == Level::token && spec.kl == Kl::none && spec.entropy_coef == F(0) && !v.entropy &&
         !v.has_weight();
}

/// Works on copies of the spec and the pointers: no store to an output can change those.
template <Loop LOOP, class F>
void token_block(Spec<F> spec, TokenView<F> v, TokenArrays<F> out, int64_t begin, int64_t end, double* block_sums) {
  constexpr int W = Vector<F>::width;
  constexpr bool EXTRAS = LOOP == Loop::any;
  leave_out<LOOP>(spec, v, out);
  SumLanes<F> sums;
  int64_t i = begin;
  while (i + W <= end) {
    for (const int64_t stop = smaller(i + FLUSH_EVERY * W, end - W + 1); i < stop; i += W)
      token_vector<EXTRAS, true>(spec, v, out, i, W, sums);
    sums.flush();
  }
  if (i < end) token_vector<EXTRAS, false>(spec, v, out, i, static_cast<int>(end - i), sums);
  sums.finish(block_sums);
}

/// c = w (dl + D), D the mean of dr over the sequence, which passes no token that its mean clips; counts the active tokens.
template <bool EXTRAS, class F>
int64_t share_sequence_derivative(int threads, const Spec<F>& spec, const TokenView<F>& v, const F* shared, int64_t n, F scale,
                                  F* c) {
  const bool clips = EXTRAS && clips_tokens(spec), observes = EXTRAS && v.obs_w;
  const F* w = v.w;
  int64_t active = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : active)
  for (int64_t i = 0; i < n; ++i) {
    const bool passes = !clips || clip_tokens(spec, read_log_ratio(v, ReadOne<F>{i}), v.adv[i]).inside;
    F whole = token_coefficient(w[i], c[i], passes ? shared[i] : F(0));
    if (observes) whole = whole + observation_coefficient(spec, v.obs_w[i]);
    active += !(whole == F(0));
    c[i] = whole * scale;
  }
  return active;
}

/// Runs the blocks over the threads.
template <class F>
void token_blocks(int threads, const Spec<F>& spec, const TokenView<F>& view, const Tokens& tokens, const TokenArrays<F>& out,
                  double* block_sums) {
  const int64_t n = tokens.count, blocks = blocks_of(n, TOKEN_BLOCK);
  const auto block = has_extras(spec) || view.obs_w ? token_block<Loop::any, F>
                     : only_clips(spec, view)       ? token_block<Loop::clip, F>
                                                    : token_block<Loop::plain, F>;
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
      block(spec, mine, out, begin, end, block_sums + b * NSUMS);
    }
  }
}

template <class F>
void token_loss(int threads, const Spec<F>& spec, const F* logp, const F* entropy, const Tokens& tokens,
                const TokenOutputs& outputs) {
  const int64_t n = tokens.count, blocks = blocks_of(n, TOKEN_BLOCK);
  const bool in_sequences = segments_needed(spec), shared = spec.level == Level::sequence;
  TokenView<F> view = TokenView<F>::make(spec, tokens, logp, entropy);
  const Sequences sequences(tokens.cu, in_sequences ? tokens.sequences : 0, n);
  const SequenceTerms<F> of_sequences(spec, n);
  of_sequences.fill(threads, sequences, view);
  const CallBuffer<F> dr(shared ? n : 0), seq_dr(shared ? n : 0, true);
  const CallBuffer<double> block_sums(blocks * NSUMS);
  const TokenArrays<F> out{static_cast<F*>(outputs.per_token), static_cast<F*>(outputs.c), static_cast<F*>(outputs.e),
                           shared ? dr.get() : nullptr, static_cast<F>(outputs.scale)};
  token_blocks(threads, spec, view, tokens, out, block_sums.get());
  double all[NSUMS];
  clear_sums(all);
  for (int64_t b = 0; b < blocks; ++b) join_sums(all, block_sums.get() + b * NSUMS);
  if (shared) {
    const F* per_row = dr.get();
    sequences.mean(threads, view.w, [per_row](int64_t i) { return per_row[i]; }, seq_dr.get());
    const auto share =
        clips_tokens(spec) || view.obs_w ? share_sequence_derivative<true, F> : share_sequence_derivative<false, F>;
    all[S_ACTIVE] = static_cast<double>(share(threads, spec, view, seq_dr.get(), n, out.scale, out.c));
  }
  if (!drops_tokens(spec)) all[S_KEEP] = all[S_TOKENS];
  if (view.is_weight && !spec.missing_one) all[S_IS_TOKENS] = all[S_TOKENS];
  for (int s = 0; s < NSUMS; ++s) static_cast<F*>(outputs.sums)[s] = static_cast<F>(all[s]);
}

}  // namespace fusedpg::FUSEDPG_ISA
