// csrc/cpu/exp.h: exp and tanh for lanes and scalars; float and Lanes run the same operations, so they give the same bits.
#pragma once
#include "lanes.h"

namespace fusedpg::FUSEDPG_ISA {

constexpr float LOG2E = 1.44269504f;
constexpr float LN2_HI = 0.693145752f;    // 16 significant bits: n * LN2_HI is exact for |n| < 256
constexpr float LN2_LO = 1.42860677e-6f;  // ln 2 - LN2_HI

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

/// How the vocabulary loops measure exponents: in powers of two for float, of e for double (whose loops call libm).
/// exp(z) = exp_of_exponent(t) with t = z / EXPONENT_UNIT.
template <class F>
constexpr double UNIT_IN_DOUBLE = sizeof(F) == 4 ? 0.69314718055994530942 : 1.0;
template <class F>
constexpr F EXPONENT_UNIT = static_cast<F>(UNIT_IN_DOUBLE<F>);

/// Below this, t gives exactly 0; it also bounds t where 0 * t must not be 0 * -inf.
template <class F>
constexpr F EXPONENT_FLOOR = sizeof(F) == 4 ? F(-150) : F(-800);

/// 2^t (of a row's logits less a reference): 1 at 0, exactly 0 below -126 and at -inf, inf above 128, not finite at NaN.
/// Its argument's rounding is |t| / 2 steps of the result, which matters to nobody: the result is 2^t of the row's largest.
FPG_FN Lanes exp_of_exponent(Lanes t) {
  const Lanes f = fraction(t);
  Lanes q = fma(f, Lanes(0x1.417810p-13f), Lanes(0x1.5f0950p-10f));
  q = fma(q, f, Lanes(0x1.3b2dd4p-7f));
  q = fma(q, f, Lanes(0x1.c6af7ap-5f));
  q = fma(q, f, Lanes(0x1.ebfbdcp-3f));
  q = fma(q, f, Lanes(0x1.62e430p-1f));
  return scale_by_integer(fma(q, f, Lanes(1.0f)), t, f);
}
FPG_FN double exp_of_exponent(double t) { return ::exp(t); }

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
  const V inside = max_or_second(low, min_or_second(high, x));
  const ReducedExp<V> e = reduce_exp(inside);
  // A NaN's payload would make a garbage 2^n: use 2^0 and let poly, which is NaN, be the result.
  return times_pow2(e.poly, select(inside == inside, e.biased, V(ROUND_MAGIC)));
}
FPG_FN double exp_any(double x) { return ::exp(x); }

/// x = mantissa * 2^exponent for x > 0 (denormals too), the mantissa in [sqrt(1/2), sqrt(2)). Works on the bits: where
/// denormals are flushed, arithmetic would see 0.
template <class V>
struct Decomposed {
  V mantissa, exponent;
};
constexpr int32_t ROOT_HALF_BITS = 0x3f3504f3, SMALLEST_NORMAL_BITS = 0x00800000, INFINITY_BITS = 0x7f800000;
constexpr int32_t TWO_TO_23_BITS = 0x4b000000;

FPG_FN Decomposed<float> decompose(float x) {
  int32_t bits = bit_cast<int32_t>(x);
  const bool denormal = bits < SMALLEST_NORMAL_BITS;
  bits = denormal ? bit_cast<int32_t>(bit_cast<float>(bits | TWO_TO_23_BITS) - 8388608.0f) : bits;
  const int32_t above = bits - ROOT_HALF_BITS;
  return {bit_cast<float>((above & 0x007fffff) + ROOT_HALF_BITS), static_cast<float>((above >> 23) - (denormal ? 149 : 0))};
}
FPG_FN Decomposed<Lanes> decompose(Lanes x) {
  Decomposed<Lanes> r;
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) {
    NativeI bits = (NativeI)x.v[p];
    const NativeI denormal = bits < SMALLEST_NORMAL_BITS;
    bits = denormal ? (NativeI)((NativeF)(bits | TWO_TO_23_BITS) - 8388608.0f) : bits;
    const NativeI above = bits - ROOT_HALF_BITS;
    r.mantissa.v[p] = (NativeF)((above & 0x007fffff) + ROOT_HALF_BITS);
    r.exponent.v[p] = __builtin_convertvector((above >> 23) - (denormal & 149), NativeF);
  }
  return r;
}

/// `log` where x > 0 is finite; -inf at 0 of either sign, inf at inf, NaN below 0 and at NaN. On the bits, like `decompose`.
FPG_FN float finish_log(float x, float log) {
  const int32_t bits = bit_cast<int32_t>(x);
  const float special = (bits & 0x7fffffff) == 0 ? -INFINITY : bits < 0 ? static_cast<float>(NAN) : x;
  return bits > 0 && bits < INFINITY_BITS ? log : special;
}
FPG_FN Lanes finish_log(Lanes x, Lanes log) {
  Lanes r;
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) {
    const NativeI bits = (NativeI)x.v[p];
    const NativeF nan = NativeF{} + static_cast<float>(NAN), minus_inf = NativeF{} - INFINITY;
    const NativeF special = (bits & 0x7fffffff) == 0 ? minus_inf : bits < 0 ? nan : x.v[p];
    r.v[p] = ((bits > 0) & (bits < INFINITY_BITS)) ? log.v[p] : special;
  }
  return r;
}

/// log(x) for any x, to 1 ulp: log(1 + f) = 2 atanh(s) with s = f / (2 + f), as f - s (f - P(s^2)), so that f itself is exact.
template <class V>
FPG_FN V log_any(V x) {
  const Decomposed<V> d = decompose(x);
  const V f = d.mantissa - V(1.0f);
  const V s = f / (f + V(2.0f)), z = s * s;
  V q = fma(z, V(2.0f / 9), V(2.0f / 7));
  q = fma(q, z, V(2.0f / 5));
  q = fma(q, z, V(2.0f / 3));
  const V tail = fma(d.exponent, V(LN2_LO), -(s * (f - q * z)));
  return finish_log(x, d.exponent * V(LN2_HI) + (f + tail));
}
FPG_FN double log_any(double x) { return ::log(x); }

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
