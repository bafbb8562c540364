// csrc/cpu/machine.h: what the loops ask of the machine besides arithmetic: floating-point mode, prefetch, store fence, huge
// pages.
#pragma once
#include "api.h"
#include "lanes.h"

namespace fusedpg::FUSEDPG_ISA {

/// Flushes denormals in this thread while it lives: a peaked row has thousands of them, at a hundred cycles each.
/// They are below 1.2e-38, where every result here is 0 to any tolerance.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
};

FPG_FN void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

/// Makes streamed stores visible before another thread is told that they are done.
FPG_FN void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// A call-long buffer of T.
template <class T>
class CallBuffer {
 public:
  explicit CallBuffer(int64_t n, bool zeroed = false)
      : data_(static_cast<T*>(call_scratch_new(static_cast<size_t>(n) * sizeof(T), zeroed))) {}
  ~CallBuffer() { call_scratch_free(data_); }
  CallBuffer(const CallBuffer&) = delete;
  CallBuffer& operator=(const CallBuffer&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

FPG_FN int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FPG_FN int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
FPG_FN int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

}  // namespace fusedpg::FUSEDPG_ISA
