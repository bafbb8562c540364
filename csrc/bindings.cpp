// csrc/bindings.cpp: the Python module fusedpg._core. Tensors arrive as addresses and sizes that python/fusedpg/cpu.py took
// from checked tensors; nothing here knows torch. Every call releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <tuple>

#include "cpu/dispatch.h"
#include "spec.h"

namespace py = pybind11;

namespace fusedpg {
namespace {

using Address = uintptr_t;
using MatrixArgs = std::tuple<Address, int64_t, int64_t, int64_t, int64_t, int64_t>;  // data, B, T, V, sb, st
using MapArgs = std::tuple<Address, double, double, double>;     // row_temperature, temperature, softcap, logit_scale
using RowArgs = std::tuple<Address, Address, Address, Address>;  // logp, entropy, row_max, log_sum
using StreamArgs = std::array<Address, 7>;                       // in the order of fusedpg.spec.STREAMS
using TokenArgs =
    std::tuple<int64_t, Address, StreamArgs, Address, int64_t, Address>;      // count, w, streams, cu, sequences, mask
using TokenOutArgs = std::tuple<Address, Address, Address, Address, double>;  // per_token, c, e, sums, scale

using DivergenceArgs = std::tuple<int, double, double, double, double>;  // kind, beta, temperature, teacher's, scale

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);  // NOLINT: the address came from tensor.data_ptr()
}

Matrix matrix(const MatrixArgs& a) {
  return {at<void>(std::get<0>(a)), std::get<1>(a), std::get<2>(a), std::get<3>(a), std::get<4>(a), std::get<5>(a)};
}
LogitMap logit_map(const MapArgs& a) { return {at<void>(std::get<0>(a)), std::get<1>(a), std::get<2>(a), std::get<3>(a)}; }
RowOut row_out(const RowArgs& a) {
  return {at<void>(std::get<0>(a)), at<void>(std::get<1>(a)), at<void>(std::get<2>(a)), at<void>(std::get<3>(a))};
}
TokenOutputs token_out(const TokenOutArgs& a) {
  return {at<void>(std::get<0>(a)), at<void>(std::get<1>(a)), at<void>(std::get<2>(a)), at<void>(std::get<3>(a)),
          std::get<4>(a)};
}
Tokens tokens(const TokenArgs& a) {
  const auto& [count, w, streams, cu, sequences, mask] = a;
  const auto stream = [&streams](size_t i) { return at<void>(streams[i]); };
  return {count,     at<void>(w), stream(0), stream(1),       stream(2), stream(3),
          stream(4), stream(5),   stream(6), at<int64_t>(cu), sequences, at<uint8_t>(mask)};
}

/// Refuses a code that the kernels would index out of range on.
void check_codes(const std::vector<double>& spec) {
  if (spec.size() != NPARAMS)
    throw std::invalid_argument("spec: expected " + std::to_string(NPARAMS) + " numbers (LossSpec.encode()), got " +
                                std::to_string(spec.size()));
  const struct {
    Param param;
    double last;
    const char* name;
  } codes[] = {{P_SURROGATE, 6, "surrogate"},
               {P_LEVEL, 2, "level"},
               {P_ANCHOR, 2, "anchor"},
               {P_KEEP, 3, "keep"},
               {P_CORRECTION, 2, "is_correction"},
               {P_CORRECTION_LEVEL, 2, "is_level"},
               {P_REJECT, 3, "is_reject"},
               {P_KL, 4, "kl"},
               {P_KL_TARGET, 1, "kl_target"},
               {P_KL_RATIO, 2, "kl_ratio"},
               {P_KL_GRADIENT, 2, "kl_gradient"},
               {P_KL_BACKWARD, 2, "kl_backward"},
               {P_KL_FORWARD, 2, "kl_forward"},
               {P_SELECTION, 2, "selection"}};
  for (const auto& c : codes) {
    const double value = spec[c.param];
    if (!(value >= 0 && value <= c.last))
      throw std::invalid_argument(std::string("spec: ") + c.name + " code " + std::to_string(value) + " is not in 0.." +
                                  std::to_string(static_cast<int>(c.last)));
  }
}

/// `fusedpg.spec.segments_needed`.
bool sums_over_sequences(const std::vector<double>& spec) {
  const bool corrects = spec[P_CORRECTION] > 0 && spec[P_CORRECTION_LEVEL] > 0;
  const bool vespo = static_cast<Surrogate>(static_cast<int>(spec[P_SURROGATE])) == Surrogate::vespo;
  return spec[P_LEVEL] > 0 || vespo || corrects || spec[P_REJECT] > 1;
}

/// Refuses a missing stream that the kernels would read through a null pointer, or without which the loss would be another one.
void check_streams(const std::vector<double>& spec, const Tokens& t) {
  const bool in_sequences = sums_over_sequences(spec),
             has_kl = spec[P_KL] > 0 || spec[P_KL_BACKWARD] > 0 || spec[P_KL_FORWARD] > 0;
  const bool to_ref = spec[P_KL_TARGET] < 1, corrects = spec[P_CORRECTION] > 0 || spec[P_REJECT] > 0;
  const bool on_rollout = static_cast<Anchor>(static_cast<int>(spec[P_ANCHOR])) == Anchor::rollout;
  const struct {
    bool missing;
    const char* text;
  } checks[] = {
      {!t.w && !(t.mask && !in_sequences), "w: expected weights in the compute dtype, got None"},
      {!t.advantages, "advantages: expected a tensor, got None"},
      {has_kl && to_ref && !t.logp_ref, "logp_ref: the spec's KL term needs logp_ref, got None"},
      {has_kl && !to_ref && !t.logp_rollout, "logp_rollout: the spec's KL term needs logp_rollout, got None"},
      {on_rollout && !t.logp_rollout, "logp_rollout: the spec's anchor needs logp_rollout, got None"},
      {corrects && !t.is_weights && !t.logp_rollout,
       "logp_rollout: the spec's correction weight or rejection needs logp_rollout, got None"},
      {spec[P_SELECTION] > 0 && !t.selected, "selected: the spec's selection needs the tokens that it picked, got None"},
      {in_sequences && !t.cu, "cu: a spec that sums over sequences needs cumulative lengths, got None"},
  };
  for (const auto& c : checks)
    if (c.missing) throw std::invalid_argument(c.text);
}

const double* checked(const std::vector<double>& spec, const Tokens& t) {
  check_codes(spec);
  if (t.count != 0) check_streams(spec, t);  // empty tensors have no address
  return spec.data();
}

/// Big fresh memory is mapped in huge pages: faulting it in 4 KB steps costs more than writing it.
void want_huge_pages(Address data, uintptr_t bytes) { huge_pages(data, data + bytes); }
void want_huge_pages(const void* data, int64_t values, DType dtype) {
  want_huge_pages(reinterpret_cast<Address>(data), static_cast<uintptr_t>(values * size_of(dtype)));
}
void want_huge_pages(const Matrix& out, const Matrix& logits, DType dtype) {
  if (out.data != logits.data) want_huge_pages(out.data, out.rows() * out.vocab, dtype);
}

void logprob_forward(int dtype, int threads, const MatrixArgs& logits, Address targets, Address active, const MapArgs& map,
                     const RowArgs& out) {
  const Kernels& k = chosen_kernels();
  const py::gil_scoped_release release;
  k.logprob_forward(static_cast<DType>(dtype), threads, matrix(logits), at<int64_t>(targets), at<uint8_t>(active),
                    logit_map(map), row_out(out));
}

void logprob_backward(int dtype, int threads, const MatrixArgs& logits, Address targets, const RowArgs& saved, Address c,
                      Address e, const MapArgs& map, const MatrixArgs& gradient) {
  const Kernels& k = chosen_kernels();
  const py::gil_scoped_release release;
  want_huge_pages(matrix(gradient), matrix(logits), static_cast<DType>(dtype));
  k.logprob_backward(static_cast<DType>(dtype), threads, matrix(logits), at<int64_t>(targets), row_out(saved), at<void>(c),
                     at<void>(e), logit_map(map), matrix(gradient));
}

void token_loss(int dtype, int threads, const std::vector<double>& spec, Address logp, Address entropy,
                const TokenArgs& token_args, const TokenOutArgs& out) {
  const Kernels& k = chosen_kernels();
  const Tokens t = tokens(token_args);
  const double* encoded = checked(spec, t);
  const TokenOutputs outputs = token_out(out);
  const py::gil_scoped_release release;
  for (const void* p : {outputs.per_token, outputs.c, outputs.e}) want_huge_pages(p, t.count, static_cast<DType>(dtype));
  k.token_loss(static_cast<DType>(dtype), threads, encoded, at<void>(logp), at<void>(entropy), t, outputs);
}

void loss_forward(int dtype, int threads, const std::vector<double>& spec, const MatrixArgs& logits, Address targets,
                  Address scale, const TokenArgs& token_args, const MapArgs& map, const RowArgs& rows, const TokenOutArgs& out,
                  const MatrixArgs& gradient) {
  const Kernels& k = chosen_kernels();
  const Tokens t = tokens(token_args);
  const double* encoded = checked(spec, t);
  const py::gil_scoped_release release;
  want_huge_pages(matrix(gradient), matrix(logits), static_cast<DType>(dtype));
  k.loss_forward(static_cast<DType>(dtype), threads, encoded, matrix(logits), at<int64_t>(targets), at<void>(scale), t,
                 logit_map(map), row_out(rows), token_out(out), matrix(gradient));
}

void distill(const std::pair<int, int>& dtypes, int threads, const MatrixArgs& student, const MatrixArgs& teacher,
             const DivergenceArgs& divergence, Address w, const std::array<Address, 3>& out, const MatrixArgs& gradient) {
  const Kernels& k = chosen_kernels();
  const auto& [kind, beta, temperature, teacher_temperature, scale] = divergence;
  if (kind < 0 || kind > 2) throw std::invalid_argument("divergence: expected a code in 0..2, got " + std::to_string(kind));
  const Divergence d{kind, beta, temperature, teacher_temperature, scale, at<void>(w)};
  const DivergenceOut outputs{at<void>(out[0]), at<void>(out[1]), at<void>(out[2])};
  const auto student_dtype = static_cast<DType>(dtypes.first), teacher_dtype = static_cast<DType>(dtypes.second);
  const py::gil_scoped_release release;
  want_huge_pages(matrix(gradient), matrix(student), student_dtype);
  k.distill(student_dtype, teacher_dtype, threads, matrix(student), matrix(teacher), d, outputs, matrix(gradient));
}

using OperandArgs = std::tuple<int, Address, int64_t, int64_t, int64_t, int64_t>;  // dtype, data, lanes, depth, their strides
using ProductOutArgs = std::tuple<int, Address, int64_t, bool>;                    // dtype, data, stride of the rows, add

Operand operand(const OperandArgs& a, Address order) {
  const auto& [dtype, data, lanes, depth, lane_stride, depth_stride] = a;
  return {static_cast<DType>(dtype), at<void>(data), lanes, depth, lane_stride, depth_stride, at<int64_t>(order)};
}

bool has_product() { return chosen_kernels().product != nullptr; }

void product(int threads, const OperandArgs& a, Address order, const OperandArgs& b, const ProductOutArgs& out) {
  const Kernels& k = chosen_kernels();
  if (!k.product) throw std::invalid_argument("product: the build '" + chosen_isa() + "' has no products of bf16");
  const Operand left = operand(a, order), right = operand(b, 0);
  if (left.depth != right.depth)
    throw std::invalid_argument("product: expected operands of one depth, got " + std::to_string(left.depth) + " and " +
                                std::to_string(right.depth));
  const auto& [dtype, data, stride, add] = out;
  const py::gil_scoped_release release;
  k.product(threads, left, right, {static_cast<DType>(dtype), at<void>(data), stride, add});
}

}  // namespace
}  // namespace fusedpg

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ kernels of fusedpg; call them through fusedpg.cpu.";
  m.attr("NPARAMS") = static_cast<int>(fusedpg::NPARAMS);
  m.attr("NSUMS") = static_cast<int>(fusedpg::NSUMS);
  m.def("isa", &fusedpg::chosen_isa, "The build in use; FUSEDPG_CPU_ISA is read at every call.");
  m.def("available_isas", &fusedpg::available_isas, "The builds this machine can run, best first.");
  m.def("logprob_forward", &fusedpg::logprob_forward);
  m.def("logprob_backward", &fusedpg::logprob_backward);
  m.def("token_loss", &fusedpg::token_loss);
  m.def("loss_forward", &fusedpg::loss_forward);
  m.def("distill", &fusedpg::distill);
  m.def("want_huge_pages", py::overload_cast<fusedpg::Address, uintptr_t>(&fusedpg::want_huge_pages));
  m.def("has_product", &fusedpg::has_product, "Whether the build in use multiplies bf16 operands.");
  m.def("product", &fusedpg::product);
}
