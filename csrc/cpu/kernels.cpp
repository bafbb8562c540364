// csrc/cpu/kernels.cpp: the one source of the CPU kernels. CMake compiles it once per instruction set, each time with
// FUSEDPG_ISA naming the namespace that everything here lives in; dispatch.cpp picks a table at run time.
#include "distill.h"
#include "one_pass.h"
#include "product.h"

namespace fusedpg::FUSEDPG_ISA {
namespace {

/// Calls f with a value of the storage type.
template <class Function>
FPG_FN void with_storage(DType dtype, const Function& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(fp16{});
    case DType::f64: return f(double{});
  }
}

void forward(DType dtype, int threads, const Matrix& logits, const int64_t* targets, const uint8_t* active, const LogitMap& map,
             const RowOut& out) {
  with_storage(dtype, [&](auto s) { logprob_forward<decltype(s)>(threads, logits, targets, active, map, out); });
}

void backward(DType dtype, int threads, const Matrix& logits, const int64_t* targets, const RowOut& saved, const void* c,
              const void* e, const LogitMap& map, const Matrix& gradient) {
  with_storage(dtype,
               [&](auto s) { logprob_backward<decltype(s)>(threads, logits, targets, saved, c, e, 1.0, map, gradient); });
}

template <class F>
void tokens_as(int threads, const double* spec, const void* logp, const void* entropy, const Tokens& tokens,
               const TokenOutputs& out) {
  token_loss<F>(threads, decode<F>(spec), static_cast<const F*>(logp), static_cast<const F*>(entropy), tokens, out);
}

/// `dtype` is that of logp: fp64, or fp32 for everything else.
void tokens_only(DType dtype, int threads, const double* spec, const void* logp, const void* entropy, const Tokens& tokens,
                 const TokenOutputs& out) {
  (dtype == DType::f64 ? tokens_as<double> : tokens_as<float>)(threads, spec, logp, entropy, tokens, out);
}

void one_pass(DType dtype, int threads, const double* spec, const Matrix& logits, const int64_t* targets, const void* scale,
              const Tokens& tokens, const LogitMap& map, const RowOut& rows, const TokenOutputs& out, const Matrix& gradient) {
  with_storage(dtype, [&](auto s) {
    loss_forward<decltype(s)>(threads, spec, logits, targets, scale, tokens, map, rows, out, gradient);
  });
}

void distillation(DType student_dtype, DType teacher_dtype, int threads, const Matrix& student, const Matrix& teacher,
                  const Divergence& d, const DivergenceOut& out, const Matrix& gradient) {
  with_storage(student_dtype, [&](auto s) {
    using S = decltype(s);
    using F = typename Compute<S>::type;
    Storage<F> storage{load_block<S, F>, nullptr, store_block<S, F>, sizeof(S), 0};
    with_storage(teacher_dtype, [&](auto t) {
      storage.load_teacher = load_block<decltype(t), F>;
      storage.teacher_bytes = sizeof(t);
    });
    distill_as<F>(threads, storage, student, teacher, d, out, gradient);
  });
}

}  // namespace

const Kernels& kernels() {
  static constexpr Kernels table{forward, backward, tokens_only, one_pass, distillation, PRODUCT};
  return table;
}

}  // namespace fusedpg::FUSEDPG_ISA
