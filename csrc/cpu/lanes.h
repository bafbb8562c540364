// csrc/cpu/lanes.h: 16 float lanes on every instruction set, so that every build adds the same numbers in the same order.
// A `Lanes` is 1, 2 or 4 native vectors. Intrinsics appear here, in storage.h and in machine.h only, each behind an #if.
// `float` and `double` have the same functions (select, fma, lane_sum, ...), so kernels are templates on the value type.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define FPG_INLINE __attribute__((always_inline))
#define FPG_FN static inline FPG_INLINE
// Arrays of vectors stay in registers only when the loops over them are gone early.
#if defined(__clang__)
#define FPG_UNROLL _Pragma("unroll")
#else
#define FPG_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fusedpg::FUSEDPG_ISA {

#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int LANES = 16;
constexpr int PARTS = LANES / NATIVE;

constexpr float ROUND_MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that the low bits then hold

typedef float NativeF __attribute__((vector_size(4 * NATIVE)));
typedef int32_t NativeI __attribute__((vector_size(4 * NATIVE)));
typedef uint32_t NativeU __attribute__((vector_size(4 * NATIVE)));

FPG_FN NativeF native_fma(NativeF a, NativeF b, NativeF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// a > b ? a : b, so a NaN on either side gives b.
FPG_FN NativeF native_max(NativeF a, NativeF b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

/// a < b ? a : b, so a NaN on either side gives b.
FPG_FN NativeF native_min(NativeF a, NativeF b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

/// t less the nearest integer, exact; 0 or NaN for an infinite t.
FPG_FN NativeF native_fraction(NativeF t) {
#if defined(__AVX512DQ__)
  return _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return t - ((t + ROUND_MAGIC) - ROUND_MAGIC);
#endif
}

/// x * 2^(t - fraction), x = 2^fraction; 0 where that would be denormal (flushed on AVX-512, selected elsewhere), inf where it
/// overflows (from 2^127 where selected), not finite where t is NaN.
FPG_FN NativeF native_scale(NativeF x, NativeF t, NativeF fraction) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(x, t - fraction);
#else
  (void)fraction;
  const NativeF scaled = (NativeF)((NativeU)x + ((NativeU)(t + ROUND_MAGIC) << 23));
  return t < -126.0f ? NativeF{} : t < 127.0f ? scaled : NativeF{} + INFINITY;
#endif
}

/// Where a condition holds: a mask register on AVX-512, lanes of -1 and 0 elsewhere.
#if defined(__AVX512F__)
typedef __mmask16 NativeMask;
FPG_FN NativeMask native_less(NativeF a, NativeF b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
FPG_FN NativeMask native_equal(NativeF a, NativeF b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
FPG_FN NativeF native_select(NativeMask m, NativeF a, NativeF b) { return _mm512_mask_mov_ps(b, m, a); }
#else
typedef NativeI NativeMask;
FPG_FN NativeMask native_less(NativeF a, NativeF b) { return a < b; }
FPG_FN NativeMask native_equal(NativeF a, NativeF b) { return a == b; }
FPG_FN NativeF native_select(NativeMask m, NativeF a, NativeF b) { return m ? a : b; }
#endif

// Masks and lanes are copied part by part: GCC stores a copy of the whole to memory.
struct Mask {
  NativeMask v[PARTS];
  Mask() = default;
  FPG_INLINE Mask(const Mask& m) { FPG_UNROLL for (int p = 0; p < PARTS; ++p) v[p] = m.v[p]; }
  FPG_INLINE Mask& operator=(const Mask& m) {
    FPG_UNROLL for (int p = 0; p < PARTS; ++p) v[p] = m.v[p];
    return *this;
  }
};

struct Lanes {
  NativeF v[PARTS];
  Lanes() = default;
  FPG_INLINE Lanes(const Lanes& a) { FPG_UNROLL for (int p = 0; p < PARTS; ++p) v[p] = a.v[p]; }
  FPG_INLINE Lanes& operator=(const Lanes& a) {
    FPG_UNROLL for (int p = 0; p < PARTS; ++p) v[p] = a.v[p];
    return *this;
  }
  FPG_INLINE Lanes(float s) { FPG_UNROLL for (int p = 0; p < PARTS; ++p) v[p] = s - NativeF{}; }  // s itself, -0 too
};

#define FPG_EACH(R, expression)                                     \
  R r;                                                              \
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) r.v[p] = (expression); \
  return r

FPG_FN Lanes operator+(Lanes a, Lanes b) { FPG_EACH(Lanes, a.v[p] + b.v[p]); }
FPG_FN Lanes operator-(Lanes a, Lanes b) { FPG_EACH(Lanes, a.v[p] - b.v[p]); }
FPG_FN Lanes operator*(Lanes a, Lanes b) { FPG_EACH(Lanes, a.v[p] * b.v[p]); }
FPG_FN Lanes operator/(Lanes a, Lanes b) { FPG_EACH(Lanes, a.v[p] / b.v[p]); }
FPG_FN Lanes operator-(Lanes a) { FPG_EACH(Lanes, -a.v[p]); }
FPG_FN Mask operator<(Lanes a, Lanes b) { FPG_EACH(Mask, native_less(a.v[p], b.v[p])); }
FPG_FN Mask operator>(Lanes a, Lanes b) { FPG_EACH(Mask, native_less(b.v[p], a.v[p])); }
FPG_FN Mask operator==(Lanes a, Lanes b) { FPG_EACH(Mask, native_equal(a.v[p], b.v[p])); }
FPG_FN Mask both(Mask a, Mask b) { FPG_EACH(Mask, static_cast<NativeMask>(a.v[p] & b.v[p])); }
FPG_FN Mask either(Mask a, Mask b) { FPG_EACH(Mask, static_cast<NativeMask>(a.v[p] | b.v[p])); }
FPG_FN Mask negate(Mask a) { FPG_EACH(Mask, static_cast<NativeMask>(~a.v[p])); }
FPG_FN Mask operator!=(Lanes a, Lanes b) { return negate(a == b); }
FPG_FN Lanes select(Mask m, Lanes a, Lanes b) { FPG_EACH(Lanes, native_select(m.v[p], a.v[p], b.v[p])); }
FPG_FN Lanes fma(Lanes a, Lanes b, Lanes c) { FPG_EACH(Lanes, native_fma(a.v[p], b.v[p], c.v[p])); }
FPG_FN Lanes max_or_second(Lanes a, Lanes b) { FPG_EACH(Lanes, native_max(a.v[p], b.v[p])); }
FPG_FN Lanes min_or_second(Lanes a, Lanes b) { FPG_EACH(Lanes, native_min(a.v[p], b.v[p])); }
FPG_FN Lanes fraction(Lanes t) { FPG_EACH(Lanes, native_fraction(t.v[p])); }
FPG_FN Lanes scale_by_integer(Lanes x, Lanes t, Lanes f) { FPG_EACH(Lanes, native_scale(x.v[p], t.v[p], f.v[p])); }
#undef FPG_EACH

template <class To, class From>
FPG_FN To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between types of one size");
  To out;
  __builtin_memcpy(&out, &value, sizeof(To));
  return out;
}

/// How often a condition has held, fewer than 2^31 times a lane.
#if defined(__AVX512F__)
struct Count {
  int64_t many = 0;
  FPG_INLINE void add(Mask m) { many += __builtin_popcount(m.v[0]); }
  FPG_INLINE int64_t total() const { return many; }
};
FPG_FN bool any(Mask m) { return m.v[0] != 0; }
#else
struct Count {
  NativeI many[PARTS] = {};
  FPG_INLINE void add(Mask m) { FPG_UNROLL for (int p = 0; p < PARTS; ++p) many[p] -= m.v[p]; }
  FPG_INLINE int64_t total() const {
    int64_t n = 0;
    for (int i = 0; i < LANES; ++i) n += many[i / NATIVE][i % NATIVE];
    return n;
  }
};
FPG_FN bool any(Mask m) {
  NativeI held{};
  FPG_UNROLL for (int p = 0; p < PARTS; ++p) held |= m.v[p];
  int64_t halves[NATIVE / 2], all = 0;
  __builtin_memcpy(halves, &held, sizeof(held));
  for (int i = 0; i < NATIVE / 2; ++i) all |= halves[i];
  return all != 0;
}
#endif
struct CountOne {
  int64_t many = 0;
  FPG_INLINE void add(bool m) { many += m; }
  FPG_INLINE int64_t total() const { return many; }
};
FPG_FN bool any(bool m) { return m; }

/// Lane values in order, for the scalar code that ends a reduction.
FPG_FN void lane_values(Lanes a, float* out) { __builtin_memcpy(out, &a, sizeof(a)); }

/// Sum of the lanes in double, as a tree whose shape is fixed.
FPG_FN double lane_sum(Lanes a) {
  float x[LANES];
  lane_values(a, x);
  double d[LANES];
  for (int i = 0; i < LANES; ++i) d[i] = static_cast<double>(x[i]);
  for (int i = 0; i < 8; ++i) d[i] += d[i + 8];
  for (int i = 0; i < 4; ++i) d[i] += d[i + 4];
  return (d[0] + d[2]) + (d[1] + d[3]);
}

FPG_FN float lane_max(Lanes a) {
  float x[LANES], m = -INFINITY;
  lane_values(a, x);
  for (int i = 0; i < LANES; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

/// Whether fma rounds once.
#if defined(__FMA__)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

// The same vocabulary for one value.
template <class F>
FPG_FN F select(bool m, F a, F b) {
  return m ? a : b;
}
FPG_FN bool both(bool a, bool b) { return a && b; }
FPG_FN bool either(bool a, bool b) { return a || b; }
FPG_FN bool negate(bool a) { return !a; }
template <class F>
FPG_FN F max_or_second(F a, F b) {
  return a > b ? a : b;
}
template <class F>
FPG_FN F min_or_second(F a, F b) {
  return a < b ? a : b;
}
FPG_FN double lane_sum(double a) { return a; }
FPG_FN double lane_max(double a) { return a; }
FPG_FN double fma(double a, double b, double c) { return a * b + c; }
FPG_FN float fma(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/// The vector of compute type F, and how many values it holds.
template <class F>
struct Vector;
template <>
struct Vector<float> {
  using type = Lanes;
  using count = Count;
  static constexpr int width = LANES;
};
template <>
struct Vector<double> {
  using type = double;
  using count = CountOne;
  static constexpr int width = 1;
};

}  // namespace fusedpg::FUSEDPG_ISA
