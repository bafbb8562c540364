// csrc/cpu/storage.h: storage dtypes (fp32, bf16, fp16, fp64) to and from the compute type, and non-temporal stores.
#pragma once
#include "exp.h"

namespace fusedpg::FUSEDPG_ISA {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class S>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};

typedef uint16_t Native16 __attribute__((vector_size(2 * NATIVE)));

FPG_FN NativeU widen(Native16 x) {
#if defined(__AVX512F__)
  return (NativeU)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (NativeU)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, NativeU);
#endif
}
/// The low 16 bits of each lane; the high ones are 0.
FPG_FN Native16 narrow(NativeU x) {
#if defined(__AVX512F__)
  return (Native16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);
  return (Native16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(x, Native16);
#endif
}

FPG_FN NativeF to_float(Native16 x, bf16) { return (NativeF)(widen(x) << 16); }

/// Round to nearest even, for values that are not NaN.
FPG_FN Native16 from_finite(NativeF x, bf16) {
#if defined(__AVX512BF16__)
  return (Native16)_mm512_cvtneps_pbh(x);
#else
  const NativeU bits = (NativeU)x;
  return narrow((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

/// Round to nearest even; a NaN stays a NaN (its quiet bit set, its sign kept).
FPG_FN Native16 from_float(NativeF x, bf16) {
  const NativeU bits = (NativeU)x;
  const NativeU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const NativeU quiet = (bits >> 16) | 0x40u;
  return narrow((NativeU)(x == x ? (NativeI)rounded : (NativeI)quiet));
}

FPG_FN NativeF to_float(Native16 x, fp16) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return _mm256_cvtph_ps((__m128i)x);
#else
  const NativeU h = widen(x);
  const NativeU magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
  // Rebias the exponent; inf and NaN get the largest exponent, denormals are renormalised by a subtraction.
  const NativeU normal = magnitude + (112u << 23);
  const NativeU special = magnitude | (255u << 23);
  const NativeF denormal = (NativeF)(magnitude + (113u << 23)) - bit_cast<float>(113u << 23);
  NativeU out = (NativeU)((NativeI)magnitude >= (NativeI)((NativeU){} + (31u << 23)) ? (NativeI)special : (NativeI)normal);
  out = (NativeU)((NativeI)magnitude < (NativeI)((NativeU){} + (1u << 23)) ? (NativeI)denormal : (NativeI)out);
  return (NativeF)(out | sign);
#endif
}

FPG_FN Native16 from_float(NativeF x, fp16) {
#if defined(__AVX512F__)
  return (Native16)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (Native16)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const NativeU all = (NativeU)x, sign = all & 0x80000000u, a = all ^ sign;
  // Normal halves: rebias, then round to nearest even; this carries into inf by itself above 65504.
  const NativeU normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  // Denormal halves: adding 0.5 aligns the bits, and the addition itself rounds to nearest even.
  const NativeU denormal = (NativeU)((NativeF)a + 0.5f) - 0x3f000000u;
  const NativeU special = (NativeU)((NativeI)a > (NativeI)((NativeU){} + 0x7f800000u) ? (NativeI)((NativeU){} + 0x7e00u)
                                                                                      : (NativeI)((NativeU){} + 0x7c00u));
  NativeI out = (NativeI)a < (NativeI)((NativeU){} + 0x38800000u) ? (NativeI)denormal : (NativeI)normal;
  out = (NativeI)a >= (NativeI)((NativeU){} + 0x47800000u) ? (NativeI)special : out;
  return narrow((NativeU)out | (sign >> 16));
#endif
}

FPG_FN Native16 from_finite(NativeF x, fp16 s) { return from_float(x, s); }

FPG_FN Lanes load(const float* p) {
  Lanes r;
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) __builtin_memcpy(&r.v[i], p + i * NATIVE, sizeof(NativeF));
  return r;
}
FPG_FN double load(const double* p) { return *p; }
template <class S>
FPG_FN Lanes load(const S* p) {
  Lanes r;
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) {
    Native16 x;
    __builtin_memcpy(&x, p + i * NATIVE, sizeof(x));
    r.v[i] = to_float(x, S{});
  }
  return r;
}

FPG_FN void store(float* p, Lanes x) {
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) __builtin_memcpy(p + i * NATIVE, &x.v[i], sizeof(NativeF));
}
FPG_FN void store(double* p, double x) { *p = x; }
template <class S>
FPG_FN void store(S* p, Lanes x) {
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) {
    const Native16 y = from_float(x.v[i], S{});
    __builtin_memcpy(p + i * NATIVE, &y, sizeof(y));
  }
}

/// The same for values that are not NaN, which spares bf16 a test.
FPG_FN void store_finite(float* p, Lanes x) { store(p, x); }
FPG_FN void store_finite(double* p, double x) { *p = x; }
template <class S>
FPG_FN void store_finite(S* p, Lanes x) {
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) {
    const Native16 y = from_finite(x.v[i], S{});
    __builtin_memcpy(p + i * NATIVE, &y, sizeof(y));
  }
}

/// Stores past the cache, of values that are not NaN; p is 64-byte aligned for float and at least 32-byte aligned for 16-bit
/// storage.
template <class S, class V>
FPG_FN void stream(S* p, V x) {
  store_finite(p, x);
}
#if defined(__AVX512F__)
FPG_FN void stream(float* p, Lanes x) { _mm512_stream_ps(p, x.v[0]); }
template <class S>
FPG_FN void stream(S* p, Lanes x) {
  _mm256_stream_si256((__m256i*)p, (__m256i)from_finite(x.v[0], S{}));
}
#elif defined(__AVX2__)
FPG_FN void stream(float* p, Lanes x) { FPG_UNROLL for (int i = 0; i < PARTS; ++i) _mm256_stream_ps(p + i * NATIVE, x.v[i]); }
template <class S>
FPG_FN void stream(S* p, Lanes x) {
  FPG_UNROLL for (int i = 0; i < PARTS; ++i) _mm_stream_si128((__m128i*)(p + i * NATIVE), (__m128i)from_finite(x.v[i], S{}));
}
#endif

/// One value, through the vector code so that a value converts the same way wherever it stands.
template <class S>
FPG_FN float load_one(const S* p) {
  S x[LANES] = {};
  x[0] = *p;
  float y[LANES];
  lane_values(load(x), y);
  return y[0];
}
FPG_FN float load_one(const float* p) { return *p; }
FPG_FN double load_one(const double* p) { return *p; }
template <class S>
FPG_FN void store_one(S* p, float value) {
  S x[LANES];
  store(x, Lanes(value));
  *p = x[0];
}
FPG_FN void store_one(float* p, float value) { *p = value; }
FPG_FN void store_one(double* p, double value) { *p = value; }

/// The first n (less than a vector) values, the rest `fill`.
template <class F>
FPG_FN typename Vector<F>::type load_first(const F* p, int n, F fill) {
  F x[Vector<F>::width];
  for (int i = 0; i < Vector<F>::width; ++i) x[i] = i < n ? p[i] : fill;
  return load(x);
}
template <class F>
FPG_FN void store_first(F* p, int n, typename Vector<F>::type value) {
  F x[Vector<F>::width];
  store(x, value);
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

}  // namespace fusedpg::FUSEDPG_ISA
