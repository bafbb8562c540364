// csrc/cpu/row.h: one row of logits. Blocks of columns give (max, sum) partials and exponentials; partials give the row's
// statistics; exponentials times one factor a block give the gradient. The target column is a partial of its own, so that 1 -
// p_target is a sum of the other columns and keeps its accuracy when p_target is near 1.
#pragma once
#include "machine.h"
#include "storage.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr int64_t BLOCK = 4096;  // columns: 16 KB of fp32 logits and 16 KB of exponentials fit L1
constexpr int64_t GROUP = 64;    // columns that four accumulators take at a time
constexpr int ACCUMULATORS = 4;

/// Over a set of columns: y's maximum (or a reference near it), the sum of exp(z) with z = (y - max) * k, the sum of
/// exp(z) * z (0 when not wanted), and what a kept exponential is multiplied by to be exp(z).
template <class F>
struct Partial {
  F max;
  double sum, sum_z, per_exp;
};

/// Maximum of n values (a multiple of GROUP); NaN if any of them is.
template <class X, class F>
FPG_FN F block_max(const X* x, int64_t n) {
  using V = typename Vector<F>::type;
  constexpr int W = Vector<F>::width;
  V m[ACCUMULATORS], total[ACCUMULATORS];
  FPG_UNROLL for (int j = 0; j < ACCUMULATORS; ++j) {
    m[j] = V(-static_cast<F>(INFINITY));
    total[j] = V(0);
  }
  for (int64_t i = 0; i < n; i += ACCUMULATORS * W) {
    FPG_UNROLL for (int j = 0; j < ACCUMULATORS; ++j) {
      const V v = load(x + i + j * W);
      m[j] = max_or_second(v, m[j]);  // ignores a NaN, which the total keeps
      total[j] = total[j] + v;
    }
  }
  const double check = lane_sum((total[0] + total[1]) + (total[2] + total[3]));
  if (check != check) {  // a NaN, or infinities of both signs
    for (int64_t i = 0; i < n; ++i) {
      const F v = load_one(x + i);
      if (v != v) return v;
    }
  }
  return lane_max(max_or_second(max_or_second(m[0], m[1]), max_or_second(m[2], m[3])));
}

/// The same from the bits of bf16, twice as many lanes at a time: as integers, values that are not negative keep their order.
/// False, and no maximum, when every value is negative or one is NaN (above infinity once the sign is shifted out).
FPG_FN bool bits_max(const bf16* x, int64_t n, float* max) {
  typedef int16_t Signed __attribute__((vector_size(4 * NATIVE)));
  typedef uint16_t Unsigned __attribute__((vector_size(4 * NATIVE)));
  constexpr int W = 2 * NATIVE, COUNT = GROUP / W;
  Signed top[COUNT];
  Unsigned magnitude[COUNT];
  FPG_UNROLL for (int j = 0; j < COUNT; ++j) {
    top[j] = Signed{} - int16_t(32767);
    magnitude[j] = Unsigned{};
  }
  for (int64_t i = 0; i < n; i += GROUP) {
    FPG_UNROLL for (int j = 0; j < COUNT; ++j) {
      Unsigned v;
      __builtin_memcpy(&v, x + i + j * W, sizeof(v));
      const Unsigned twice = v + v;
      top[j] = (Signed)v > top[j] ? (Signed)v : top[j];
      magnitude[j] = twice > magnitude[j] ? twice : magnitude[j];
    }
  }
  int16_t best = -1;
  uint16_t largest = 0;
  for (int j = 0; j < COUNT; ++j) {
    for (int k = 0; k < W; ++k) {
      best = top[j][k] > best ? top[j][k] : best;
      largest = magnitude[j][k] > largest ? magnitude[j][k] : largest;
    }
  }
  *max = bit_cast<float>(static_cast<uint32_t>(static_cast<uint16_t>(best)) << 16);
  return best >= 0 && largest <= 0xff00;
}

template <class X, class F>
FPG_FN F fast_max(const X* x, int64_t n) {
  return block_max<X, F>(x, n);
}
template <>
inline float fast_max<bf16, float>(const bf16* x, int64_t n) {
  float max;
  return bits_max(x, n, &max) ? max : block_max<bf16, float>(x, n);
}

/// Sums over n values (a multiple of GROUP) of e = 2^t and of e * t, t = (x - origin) * k - exponent, k per EXPONENT_UNIT.
struct Sums {
  double e, e_t;
};

template <bool KEEP, bool ENTROPY, class X, class F>
FPG_FN Sums block_sums(const X* x, int64_t n, F origin, F k, F exponent, F* exps) {
  using V = typename Vector<F>::type;
  constexpr int W = Vector<F>::width;
  V sum[ACCUMULATORS], sum_t[ACCUMULATORS];
  FPG_UNROLL for (int j = 0; j < ACCUMULATORS; ++j) sum[j] = sum_t[j] = V(0);
  for (int64_t i = 0; i < n; i += ACCUMULATORS * W) {
    FPG_UNROLL for (int j = 0; j < ACCUMULATORS; ++j) {
      const X* at = x + i + j * W;
      if (sizeof(X) * W % 64 == 0 || j % 2 == 0) prefetch(at + BLOCK);
      const V t = fma(load(at) - V(origin), V(k), V(-exponent));
      const V e = exp_of_exponent(t);
      if (KEEP) store(exps + i + j * W, e);
      sum[j] = sum[j] + e;
      if (ENTROPY) sum_t[j] = fma(e, max_or_second(t, V(EXPONENT_FLOOR<F>)), sum_t[j]);
    }
  }
  return {lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3])), lane_sum((sum_t[0] + sum_t[1]) + (sum_t[2] + sum_t[3]))};
}

/// The partial of n values about their own maximum. With KEEP, their exponentials go to exps.
template <bool KEEP, bool ENTROPY, class X, class F>
FPG_FN Partial<F> block_partial(const X* x, int64_t n, F k, F* exps) {
  const F m = fast_max<X, F>(x, n);
  if (!(m < static_cast<F>(INFINITY))) return {m, NAN, NAN, 1};
  if (m == -static_cast<F>(INFINITY)) {
    if (KEEP) __builtin_memset(exps, 0, static_cast<size_t>(n) * sizeof(F));
    return {m, 0, 0, 1};
  }
  const Sums s = block_sums<KEEP, ENTROPY, X, F>(x, n, m, k, F(0), exps);
  return {m, s.e, s.e_t * UNIT_IN_DOUBLE<F>, 1};
}

/// What a row's later blocks are measured from, near the maximum of its first: it spares them the search for their own. A
/// column that is smaller by 126 powers of two adds nothing to the row; larger ones, whose exponents round more, send their
/// block back to its own maximum.
template <class F>
struct Reference {
  F max = 0, origin = 0, exponent = 0;
  double bias = 0, per_exp = 1;  // exponents are less than those from max by bias; 2^bias
  bool usable = false;

  FPG_MEMBER static Reference make(F max, F k) {
    Reference r;
    if (sizeof(F) != 4 || !(max * k > F(-65536) && max * k < F(65536))) return r;
    r.max = max;
    r.origin = HAS_FMA ? F(0) : max;  // x * k - exponent must round once
    r.exponent = (max - r.origin) * k + F(MARGIN);
    r.bias = static_cast<double>(r.exponent) - static_cast<double>(max - r.origin) * static_cast<double>(k);
    r.per_exp = ::exp2(r.bias);
    r.usable = true;
    return r;
  }
  static constexpr int MARGIN = 4;
  static constexpr double LIMIT = BLOCK >> (MARGIN - 1);  // of a block's sum: twice what equal columns give
};

/// The partial about the row's reference where that holds (a NaN or an infinity does not), else about the own maximum.
template <bool KEEP, bool ENTROPY, class X, class F>
FPG_FN Partial<F> block_about(const X* x, int64_t n, F k, const Reference<F>& r, F* exps) {
  if (r.usable) {
    const Sums s = block_sums<KEEP, ENTROPY, X, F>(x, n, HAS_FMA ? F(0) : r.origin, k, r.exponent, exps);
    if (s.e < Reference<F>::LIMIT)
      return {r.max, s.e * r.per_exp, (s.e_t + s.e * r.bias) * r.per_exp * UNIT_IN_DOUBLE<F>, r.per_exp};
  }
  return block_partial<KEEP, ENTROPY>(x, n, k, exps);
}

/// One value or vector through the soft cap.
template <bool CAP, class V, class F>
FPG_FN V capped(V x, F cap, F to_cap) {
  return CAP ? V(cap) * tanh_any(x * V(to_cap)) : x;
}

/// The row's map from logits to softmax arguments, and its target.
template <class S, bool CAP>
struct RowView {
  using F = typename Compute<S>::type;
  const S* x;
  int64_t vocab, target;  // target is -1 when it is not in [0, vocab)
  double k, slope;        // slope: dz/dx without the soft cap's own derivative
  F k_f;                  // k in the loops' unit of exponents
  F cap, to_cap;
  F x_target, y_target;    // -inf without a target; read before any in-place store
  Reference<F> reference;  // unusable in a row's first block

  FPG_MEMBER void refer_to(const Partial<F>& first) { reference = Reference<F>::make(first.max, k_f); }
  FPG_MEMBER int64_t block_begin(int64_t b) const { return b * BLOCK; }
  FPG_MEMBER int64_t block_size(int64_t b) const { return smaller(BLOCK, vocab - b * BLOCK); }

  /// `row_temperature` is NaN-free and positive, like every other argument here.
  FPG_MEMBER static RowView make(const S* x, int64_t vocab, int64_t target, const LogitMap& map, int64_t row) {
    const F* temperatures = static_cast<const F*>(map.row_temperature);
    const double temperature = temperatures ? static_cast<double>(temperatures[row]) : map.temperature;
    RowView v{};
    v.x = x;
    v.vocab = vocab;
    v.target = target >= 0 && target < vocab ? target : -1;
    v.slope = map.logit_scale / temperature;
    v.k = CAP ? 1.0 / temperature : v.slope;
    v.k_f = static_cast<F>(v.k / UNIT_IN_DOUBLE<F>);
    v.cap = static_cast<F>(map.softcap);
    v.to_cap = static_cast<F>(CAP ? map.logit_scale / map.softcap : 0.0);
    v.x_target = v.target >= 0 ? load_one(x + v.target) : -static_cast<F>(INFINITY);
    v.y_target = v.target >= 0 ? capped<CAP>(v.x_target, v.cap, v.to_cap) : -static_cast<F>(INFINITY);
    return v;
  }

  /// The block as compute values in `to`: soft-capped, without the target, padded with -inf to a multiple of GROUP.
  FPG_MEMBER int64_t gather(int64_t b, F* to) const {
    constexpr int W = Vector<F>::width;
    const int64_t begin = block_begin(b), n = block_size(b), padded = blocks_of(n, GROUP) * GROUP;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, capped<CAP>(load(x + begin + i), cap, to_cap));
    for (; i < n; ++i) to[i] = capped<CAP>(load_one(x + begin + i), cap, to_cap);
    for (; i < padded; ++i) to[i] = -static_cast<F>(INFINITY);
    if (target >= begin && target < begin + n) to[target - begin] = -static_cast<F>(INFINITY);
    return padded;
  }

  /// `exps` is the row's buffer (vocab rounded up to GROUP), `buffer` holds BLOCK values.
  template <bool KEEP, bool ENTROPY>
  FPG_MEMBER Partial<F> block(int64_t b, F* exps, F* buffer) const {
    const int64_t begin = block_begin(b), n = block_size(b);
    F* keep = KEEP ? exps + begin : exps;
    if (CAP || n % GROUP != 0 || (target >= begin && target < begin + n)) {
      const int64_t padded = gather(b, buffer);
      return block_about<KEEP, ENTROPY>(static_cast<const F*>(buffer), padded, k_f, reference, keep);
    }
    return block_about<KEEP, ENTROPY>(x + begin, n, k_f, reference, keep);
  }
};

/// A row's statistics in double: sums are relative to max.
template <class F>
struct RowStats {
  F max, logp, y_target;
  double target_z, target, others, sum, log_sum, entropy;  // target = exp(target_z); sum = others + target
  double k;
};

/// Joins the partials in column order, the target last: the same bits whoever computed them.
template <class F, bool ENTROPY>
FPG_FN RowStats<F> combine(const Partial<F>* partials, int64_t blocks, F y_target, bool has_target, double k) {
  const F none = -static_cast<F>(INFINITY);
  F m = y_target;
  bool nan = y_target != y_target;
  for (int64_t b = 0; b < blocks; ++b) {
    nan |= partials[b].max != partials[b].max;
    m = partials[b].max > m ? partials[b].max : m;
  }
  RowStats<F> s{};
  s.max = nan ? static_cast<F>(NAN) : m;
  s.y_target = y_target;
  s.k = k;
  const double top = static_cast<double>(s.max);
  double weighted_z = 0;
  s.others = m == none ? NAN : 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (partials[b].max == none) continue;
    const double dz = (static_cast<double>(partials[b].max) - top) * k, w = ::exp(dz);
    s.others += w * partials[b].sum;
    if (ENTROPY && !(w == 0)) weighted_z += w * (partials[b].sum_z + partials[b].sum * dz);
  }
  s.target_z = (static_cast<double>(y_target) - top) * k;
  s.target = ::exp(s.target_z);
  if (ENTROPY && !(s.target == 0)) weighted_z += s.target * s.target_z;
  s.sum = s.others + s.target;
  s.log_sum = ::log(s.sum);
  s.logp = has_target ? static_cast<F>(s.target_z - s.log_sum) : static_cast<F>(NAN);
  s.entropy = ENTROPY ? s.log_sum - weighted_z / s.sum : 0;
  return s;
}

}  // namespace fusedpg::FUSEDPG_ISA
