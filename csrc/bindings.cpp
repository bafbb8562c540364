// csrc/bindings.cpp: the Python module fusedpg._core. Tensors arrive as addresses and sizes that python/fusedpg/cpu.py took
// from checked tensors; nothing here knows torch. Every call releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

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
/// count, w, advantages, logp_old, logp_ref, logp_rollout, is_weights, cu, sequences
using TokenArgs = std::tuple<int64_t, Address, Address, Address, Address, Address, Address, Address, int64_t, Address>;
using TokenOutArgs = std::tuple<Address, Address, Address, Address, double>;  // per_token, c, e, sums, scale

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
  return {std::get<0>(a),           at<void>(std::get<1>(a)),   at<void>(std::get<2>(a)), at<void>(std::get<3>(a)),
          at<void>(std::get<4>(a)), at<void>(std::get<5>(a)),   at<void>(std::get<6>(a)), at<int64_t>(std::get<7>(a)),
          std::get<8>(a),           at<uint8_t>(std::get<9>(a))};
}

/// Refuses what the kernels would index out of range on, or read through a null pointer.
const double* checked(const std::vector<double>& spec, const Tokens& t) {
  if (spec.size() != NPARAMS)
    throw std::invalid_argument("spec: expected " + std::to_string(NPARAMS) + " numbers (LossSpec.encode()), got " +
                                std::to_string(spec.size()));
  const struct {
    Param param;
    double last;
    const char* name;
  } codes[] = {{P_SURROGATE, 3, "surrogate"}, {P_LEVEL, 2, "level"},      {P_ANCHOR, 2, "anchor"}, {P_KL, 4, "kl"},
               {P_KL_TARGET, 1, "kl_target"}, {P_KL_RATIO, 2, "kl_ratio"}};
  for (const auto& c : codes) {
    const double value = spec[c.param];
    if (!(value >= 0 && value <= c.last))
      throw std::invalid_argument(std::string("spec: ") + c.name + " code " + std::to_string(value) + " is not in 0.." +
                                  std::to_string(static_cast<int>(c.last)));
  }
  if (t.count == 0) return spec.data();  // empty tensors have no address
  if (!t.w && !(t.mask && spec[P_LEVEL] < 1)) throw std::invalid_argument("w: expected weights in the compute dtype, got None");
  const bool needs_ref = spec[P_KL] > 0 && spec[P_KL_TARGET] < 1, needs_rollout = spec[P_KL] > 0 && !needs_ref;
  if ((needs_ref && !t.logp_ref) || (needs_rollout && !t.logp_rollout))
    throw std::invalid_argument(std::string("spec: its KL term needs ") + (needs_ref ? "logp_ref" : "logp_rollout") +
                                ", got None");
  if (spec[P_LEVEL] > 0 && !t.cu) throw std::invalid_argument("cu: a sequence-level spec needs cumulative lengths, got None");
  return spec.data();
}

/// A big fresh output is mapped in huge pages: faulting it in 4 KB steps costs more than writing it.
void want_huge_pages(const void* data, int64_t values, DType dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(2) << 20, element = dtype == DType::f32 ? 4 : dtype == DType::f64 ? 8 : 2;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(values) * element;
  if (data && end >= first + page)
    (void)madvise(reinterpret_cast<void*>(first), (end - first) / page * page, MADV_HUGEPAGE);  // only a hint
#else
  (void)data, (void)values, (void)dtype;
#endif
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
}
