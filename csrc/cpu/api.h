// csrc/cpu/api.h: what the bindings hand to a build of the kernels: plain structs of raw pointers, and the table of entry
// points. Compiled into every build, so its functions are always inlined: the linker must never keep the copy of the wrong
// build.
#pragma once
#include <cstddef>
#include <cstdint>

#define FPG_MEMBER __attribute__((always_inline)) inline

namespace fusedpg {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3 };

/// Bytes of a value.
FPG_MEMBER int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2; }

/// A (B, T, V) tensor with strides (sb, st, 1), in elements. Row i is (i / T, i % T).
struct Matrix {
  void* data;
  int64_t batch, tokens, vocab, stride_batch, stride_token;
  FPG_MEMBER int64_t rows() const { return batch * tokens; }
  FPG_MEMBER int64_t offset(int64_t row) const { return row / tokens * stride_batch + row % tokens * stride_token; }
};

/// The map from a logit to the argument of the softmax. `row_temperature` (compute type) replaces `temperature`; softcap 0 is
/// off.
struct LogitMap {
  const void* row_temperature;
  double temperature, softcap, logit_scale;
};

/// Per-row results of the vocabulary pass, in the compute type; `entropy` null when not wanted.
struct RowOut {
  void *logp, *entropy, *row_max, *log_sum;
};

/// Per-token inputs of stage B, in the compute type; null where absent. `cu` has sequences + 1 entries. `mask`, of 0 and 1,
/// stands in for `w` where stage B runs alone and sums over no sequences.
struct Tokens {
  int64_t count;
  const void *w, *advantages, *logp_old, *logp_ref, *logp_rollout, *is_weights, *obs_weights, *selected;
  const int64_t* cu;
  int64_t sequences;
  const uint8_t* mask;
};

/// Per-token results of stage B. `e` null when the spec has no entropy term; `sums` has NSUMS entries. `scale` multiplies c and
/// e.
struct TokenOutputs {
  void *per_token, *c, *e, *sums;
  double scale;
};

/// What is measured between p = softmax(student / temperature) and q = softmax(teacher / teacher_temperature). `kind` is a code
/// of fusedpg.axes.Divergence; `w` (compute type): rows with weight 0 are not read; the gradient's rows are w * scale.
struct Divergence {
  int kind;
  double beta, temperature, teacher_temperature, scale;
  const void* w;
};

/// Per-row results in the compute type, which is that of the student.
struct DivergenceOut {
  void *per_token, *student_entropy, *teacher_entropy;
};

/// One side of a matrix product, fp32 or bf16: rows of A or columns of B as `lanes`, `depth` values of k in each. One of the
/// strides (in elements) is 1; along the other one `order`, where it is not null, says which rows of memory are meant.
struct Operand {
  DType dtype;
  const void* data;
  int64_t lanes, depth, lane_stride, depth_stride;
  const int64_t* order;
  FPG_MEMBER bool along() const { return depth_stride == 1; }
  FPG_MEMBER int64_t stride() const { return along() ? lane_stride : depth_stride; }
  FPG_MEMBER Operand part(int64_t lane, int64_t k, int64_t some_lanes, int64_t some_depth) const {
    const int64_t rows = along() ? lane : k, values = along() ? k : lane;
    const int64_t skipped = (values + (order ? 0 : rows * stride())) * size_of(dtype);
    return {dtype,
            static_cast<const char*>(data) + skipped,
            some_lanes,
            some_depth,
            lane_stride,
            depth_stride,
            order ? order + rows : nullptr};
  }
};

/// Where a matrix product goes: fp32, or bf16 to write and not to add to; its rows are `stride` apart.
struct ProductOut {
  DType dtype;
  void* data;
  int64_t stride;
  bool add;
};

/// out (a.lanes, b.lanes) = or += the sum over k of a and b, both rounded to bf16.
using Product = void(int threads, const Operand& a, const Operand& b, const ProductOut& out);

/// One build of the kernels. `gradient.data` null: none; equal to logits.data: in place.
struct Kernels {
  void (*logprob_forward)(DType, int threads, const Matrix& logits, const int64_t* targets, const uint8_t* active,
                          const LogitMap&, const RowOut&);
  void (*logprob_backward)(DType, int threads, const Matrix& logits, const int64_t* targets, const RowOut& saved, const void* c,
                           const void* e, const LogitMap&, const Matrix& gradient);
  void (*token_loss)(DType, int threads, const double* spec, const void* logp, const void* entropy, const Tokens&,
                     const TokenOutputs&);
  void (*loss_forward)(DType, int threads, const double* spec, const Matrix& logits, const int64_t* targets, const void* scale,
                       const Tokens&, const LogitMap&, const RowOut&, const TokenOutputs&, const Matrix& gradient);
  void (*distill)(DType student_dtype, DType teacher_dtype, int threads, const Matrix& student, const Matrix& teacher,
                  const Divergence&, const DivergenceOut&, const Matrix& gradient);
  Product* product;  // null in a build without bf16 products
};

// Memory of the calling thread, 64-byte aligned, kept from call to call; grows to the largest request. One use at a time per
// slot.
enum class Slot : int { exponentials = 0, block = 1, partials = 2, packed = 3, sums = 4, count = 5 };
void* thread_scratch(Slot slot, size_t bytes);

/// Maps the pages between two addresses before they are touched, for two thirds of what it costs one by one; a hint.
void map_pages(void* begin, void* end);

/// Memory for the duration of a call. `zeroed` fills it with zero bytes.
void* call_scratch_new(size_t bytes, bool zeroed);
void call_scratch_free(void* p);

}  // namespace fusedpg
