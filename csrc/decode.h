// csrc/decode.h: LossSpec.encode() to the compute type, and what a spec asks of its caller.
#pragma once
#include "cpu/exp.h"
#include "spec.h"

namespace fusedpg::FUSEDPG_ISA {

/// Reads an encoded spec position by position; bindings.cpp has checked the codes.
template <class F>
class Decoder {
 public:
  explicit Decoder(const double* encoded) : encoded_(encoded) {}
  F number(Param i) const { return static_cast<F>(encoded_[i]); }
  bool flag(Param i) const { return !(encoded_[i] == 0); }
  template <class Code>
  Code code(Param i) const {
    return static_cast<Code>(static_cast<int>(encoded_[i]));
  }

 private:
  const double* encoded_;
};

template <class F>
FPG_FN void decode_policy(const Decoder<F>& in, Spec<F>& s) {
  s.surrogate = in.template code<Surrogate>(P_SURROGATE);
  s.level = in.template code<Level>(P_LEVEL);
  s.anchor = in.template code<Anchor>(P_ANCHOR);
  s.clip_low = in.number(P_CLIP_LOW);
  s.clip_high = in.number(P_CLIP_HIGH);
  s.dual_clip = in.number(P_DUAL_CLIP);
  s.delta = in.number(P_DELTA);
  s.log_ratio_lo = in.number(P_LOG_RATIO_LO);
  s.log_ratio_hi = in.number(P_LOG_RATIO_HI);
  s.token_clip_lo = in.number(P_TOKEN_CLIP_LO);
  s.token_clip_hi = in.number(P_TOKEN_CLIP_HI);
  s.shape_pos = in.number(P_SHAPE_POS);
  s.shape_neg = in.number(P_SHAPE_NEG);
  s.lambda_pos = in.number(P_LAMBDA_POS);
  s.lambda_neg = in.number(P_LAMBDA_NEG);
  s.log_w_lo = in.number(P_LOG_W_LO);
  s.log_w_hi = in.number(P_LOG_W_HI);
  if (s.surrogate == Surrogate::reinforce || s.surrogate == Surrogate::ratio) {
    s.clip_low = -static_cast<F>(INFINITY);  // these have no band: the band metrics stay 0
    s.clip_high = static_cast<F>(INFINITY);
  }
}

template <class F>
FPG_FN void decode_masks(const Decoder<F>& in, Spec<F>& s) {
  s.keep = in.template code<Keep>(P_KEEP);
  s.keep_directional = in.flag(P_KEEP_DIRECTIONAL);
  s.keep_low = in.number(P_KEEP_LOW);
  s.keep_high = in.number(P_KEEP_HIGH);
  s.correction = in.template code<Correction>(P_CORRECTION);
  s.correction_level = in.template code<CorrectionLevel>(P_CORRECTION_LEVEL);
  s.correction_low = in.number(P_CORRECTION_LOW);
  s.correction_high = in.number(P_CORRECTION_HIGH);
  s.reject = in.template code<Reject>(P_REJECT);
  s.reject_low = in.number(P_REJECT_LOW);
  s.reject_high = in.number(P_REJECT_HIGH);
  s.missing_one = in.flag(P_MISSING_ONE);
  s.selection = in.template code<Selection>(P_SELECTION);
  s.select_coef = in.number(P_SELECT_COEF);
}

template <class F>
FPG_FN void decode_terms(const Decoder<F>& in, Spec<F>& s) {
  s.kl = in.template code<Kl>(P_KL);
  s.kl_coef = in.number(P_KL_COEF);
  s.kl_target = in.template code<KlTarget>(P_KL_TARGET);
  s.kl_ratio = in.template code<KlRatio>(P_KL_RATIO);
  s.kl_gradient = in.template code<KlGradient>(P_KL_GRADIENT);
  s.kl_lo = in.number(P_KL_LO);
  s.kl_hi = in.number(P_KL_HI);
  s.kl_log_ratio_lo = in.number(P_KL_LOG_RATIO_LO);
  s.kl_log_ratio_hi = in.number(P_KL_LOG_RATIO_HI);
  s.kl_backward = in.template code<KlSampled>(P_KL_BACKWARD);
  s.kl_backward_coef = in.number(P_KL_BACKWARD_COEF);
  s.kl_forward = in.template code<KlSampled>(P_KL_FORWARD);
  s.kl_forward_coef = in.number(P_KL_FORWARD_COEF);
  s.penalty_coef = in.number(P_PENALTY_COEF);
  s.entropy_coef = in.number(P_ENTROPY_COEF);
  s.obs_coef = in.number(P_OBS_COEF);
}

template <class F>
FPG_FN Spec<F> decode(const double* encoded) {
  const Decoder<F> in(encoded);
  Spec<F> s{};
  decode_policy(in, s);
  decode_masks(in, s);
  decode_terms(in, s);
  return s;
}

template <class F>
FPG_FN bool has_correction(const Spec<F>& s) {
  return s.correction != Correction::none || s.reject != Reject::none;
}

template <class F>
FPG_FN bool has_kl_target(const Spec<F>& s) {
  return s.kl != Kl::none || s.kl_backward != KlSampled::none || s.kl_forward != KlSampled::none;
}

/// Whether the correction weight, or the rejection, is that of a whole sequence.
template <class F>
FPG_FN bool corrects_sequences(const Spec<F>& s) {
  return (s.correction != Correction::none && s.correction_level != CorrectionLevel::token) || s.reject > Reject::token;
}

/// Whether stage B forms sums over sequences: then it starts when every logp of a sequence is known.
template <class F>
FPG_FN bool segments_needed(const Spec<F>& s) {
  return s.level != Level::token || s.surrogate == Surrogate::vespo || corrects_sequences(s);
}

/// Whether the spec has more than the first four surrogates with a band, a KL term, an entropy bonus and given weights. The
/// loop over tokens is compiled without all of that as well: it then costs what its few terms cost.
template <class F>
FPG_FN bool has_extras(const Spec<F>& s) {
  const bool clips = s.token_clip_lo > -static_cast<F>(INFINITY) || s.token_clip_hi < static_cast<F>(INFINITY);
  const bool masks = s.keep != Keep::none || s.selection != Selection::none;
  return clips || masks || has_correction(s) || s.missing_one || s.penalty_coef != F(0) || s.kl_backward != KlSampled::none ||
         s.kl_forward != KlSampled::none || s.surrogate > Surrogate::cispo;
}

}  // namespace fusedpg::FUSEDPG_ISA
