// csrc/cpu/exp.h: exp and tanh for lanes and scalars; float and Lanes run the same operations, so they give the same bits.
#pragma once
#include "lanes.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr float LOG2E = 1.44269504f;
constexpr float LN2_HI = 0.693145752f;      // 16 significant bits: n * LN2_HI is exact for |n| < 256
constexpr float LN2_LO = 1.42860677e-6f;    // ln 2 - LN2_HI
constexpr float ROUND_MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that the low bits then hold
constexpr float EXP_MIN = -87.3365f;        // log of the smallest normal float; below it the result is 0

/// exp(z) = poly * 2^n, with n in the low bits of `biased`. Relative error of poly: 4e-9 plus roundings.
template <class V>
struct ReducedExp {
  V poly, biased;
};

template <class V>
FPG_FN ReducedExp<V> reduce_exp(V z) {
  const V biased = fma(z, V(LOG2E), V(ROUND_MAGIC));
  const V n = biased - V(ROUND_MAGIC);
  V r = fma(n, V(-LN2_HI), z);
  r = fma(n, V(-LN2_LO), r);
  V q = fma(r, V(0x1.6a23cep-10f), V(0x1.123a2p-7f));
  q = fma(q, r, V(0x1.5558f2p-5f));
  q = fma(q, r, V(0x1.555492p-3f));
  q = fma(q, r, V(0x1.fffffcp-2f));
  q = fma(q, r, V(1.0f));
  return {fma(q, r, V(1.0f)), biased};
}

FPG_FN Lanes add_exponent(Lanes x, Lanes biased) {
  Lanes r;
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) r.v[p] = (NativeF)((NativeU)x.v[p] + ((NativeU)biased.v[p] << 23));
  return r;
}

/// exp(z) for z <= 0 (a row's logits less their maximum). Exactly 0 below EXP_MIN and for -inf; z is never NaN here.
FPG_FN Lanes exp_nonpositive(Lanes z) {
  const ReducedExp<Lanes> e = reduce_exp(z);
  return select(z < Lanes(EXP_MIN), Lanes(0.0f), add_exponent(e.poly, e.biased));
}
FPG_FN double exp_nonpositive(double z) { return ::exp(z); }

/// 2^n in two factors, so that n from -150 to 128 neither wraps nor overflows early.
FPG_FN float times_pow2(float x, float biased) {
  const int32_t n = bit_cast<int32_t>(biased) - bit_cast<int32_t>(ROUND_MAGIC);
  const int32_t half = n >> 1;
  return x * bit_cast<float>((half + 127) << 23) * bit_cast<float>((n - half + 127) << 23);
}
FPG_FN Lanes times_pow2(Lanes x, Lanes biased) {
  Lanes r;
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) {
    const NativeI n = (NativeI)biased.v[p] - bit_cast<int32_t>(ROUND_MAGIC);
    const NativeI half = n >> 1;
    r.v[p] = x.v[p] * (NativeF)((half + 127) << 23) * (NativeF)((n - half + 127) << 23);
  }
  return r;
}

/// exp(x) for any x: overflows to inf, underflows to 0, keeps NaN.
template <class V>
FPG_FN V exp_any(V x) {
  const V low = V(-104.0f), high = V(89.0f);
  const V inside = select(x < low, low, select(x > high, high, x));
  const ReducedExp<V> e = reduce_exp(inside);
  // A NaN's payload would make a garbage 2^n: use 2^0 and let poly, which is NaN, be the result.
  return times_pow2(e.poly, select(inside == inside, e.biased, V(ROUND_MAGIC)));
}
FPG_FN double exp_any(double x) { return ::exp(x); }

template <class V>
FPG_FN V absolute(V x) {
  return select(x < V(0.0f), -x, x);
}

/// tanh(u) (Cephes tanhf: odd polynomial near 0, 1 - 2 / (exp(2|u|) + 1) elsewhere).
template <class V>
FPG_FN V tanh_any(V u) {
  const V a = absolute(u), s = u * u;
  V q = fma(s, V(-5.70498872745e-3f), V(2.06390887954e-2f));
  q = fma(q, s, V(-5.37397155531e-2f));
  q = fma(q, s, V(1.33314422036e-1f));
  q = fma(q, s, V(-3.33332819422e-1f));
  const V small = fma(q * s, u, u);
  const V large = V(1.0f) - V(2.0f) / (exp_any(a + a) + V(1.0f));
  return select(a < V(0.625f), small, select(u < V(0.0f), -large, large));
}
FPG_FN double tanh_any(double u) { return ::tanh(u); }

/// 1 - tanh(u)^2 = 4q / (1 + q)^2 with q = exp(-2|u|): no cancellation where tanh saturates.
template <class V>
FPG_FN V tanh_slope(V u) {
  const V a = absolute(u);
  const V q = exp_any(-(a + a));
  const V d = q + V(1.0f);
  return V(4.0f) * q / (d * d);
}

}  // namespace fusedpg::FUSEDPG_ISA
