// csrc/spec.h: axis codes and parameter indices of an encoded LossSpec.
// python/fusedpg/spec.py is the definition; this file mirrors its numbers. Plain C++, independent of the instruction set.
#pragma once

namespace fusedpg {

enum class Surrogate { reinforce = 0, ratio = 1, clip = 2, cispo = 3, sapo = 4, topr = 5, vespo = 6 };
enum class Level { token = 0, sequence = 1, sequence_token = 2 };
enum class Anchor { old = 0, self = 1, rollout = 2 };
enum class Keep { none = 0, ratio = 1, tv = 2, kl = 3 };
enum class Correction { none = 0, truncate = 1, mask = 2 };
enum class CorrectionLevel { token = 0, sequence = 1, geometric = 2 };
enum class Reject { none = 0, token = 1, sequence = 2, geometric = 3 };
enum class Kl { none = 0, k1 = 1, k2 = 2, k3 = 3, abs = 4 };
enum class KlTarget { ref = 0, rollout = 1 };
enum class KlRatio { none = 0, detached = 1, live = 2 };
enum class KlGradient { own = 0, straight_through = 1, score = 2 };
enum class KlSampled { none = 0, score = 1, k3 = 2 };
enum class Selection { none = 0, clip_cov = 1, kl_cov = 2 };

/// Positions in LossSpec.encode(); 47 is reserved. SHAPE is tau for sapo, k for vespo.
enum Param : int {
  P_SURROGATE = 0,
  P_LEVEL = 1,
  P_ANCHOR = 2,
  P_CLIP_LOW = 3,
  P_CLIP_HIGH = 4,
  P_DUAL_CLIP = 5,
  P_DELTA = 6,
  P_LOG_RATIO_LO = 7,
  P_LOG_RATIO_HI = 8,
  P_KL = 9,
  P_KL_COEF = 10,
  P_KL_TARGET = 11,
  P_KL_RATIO = 12,
  P_KL_GRADIENT = 13,
  P_KL_LO = 14,
  P_KL_HI = 15,
  P_KL_LOG_RATIO_LO = 16,
  P_KL_LOG_RATIO_HI = 17,
  P_ENTROPY_COEF = 18,
  P_KEEP = 19,
  P_KEEP_DIRECTIONAL = 20,
  P_KEEP_LOW = 21,
  P_KEEP_HIGH = 22,
  P_CORRECTION = 23,
  P_CORRECTION_LEVEL = 24,
  P_CORRECTION_LOW = 25,
  P_CORRECTION_HIGH = 26,
  P_REJECT = 27,
  P_REJECT_LOW = 28,
  P_REJECT_HIGH = 29,
  P_MISSING_ONE = 30,
  P_TOKEN_CLIP_LO = 31,
  P_TOKEN_CLIP_HI = 32,
  P_PENALTY_COEF = 33,
  P_SELECTION = 34,
  P_SELECT_COEF = 35,
  P_OBS_COEF = 36,
  P_KL_FORWARD = 37,
  P_KL_FORWARD_COEF = 38,
  P_SHAPE_POS = 39,
  P_SHAPE_NEG = 40,
  P_LAMBDA_POS = 41,
  P_LAMBDA_NEG = 42,
  P_LOG_W_LO = 43,
  P_LOG_W_HI = 44,
  P_KL_BACKWARD = 45,
  P_KL_BACKWARD_COEF = 46,
  NPARAMS = 48
};

/// Positions in the metric vector that token_loss returns.
enum Sum : int {
  S_NUMERATOR = 0,
  S_TOKENS = 1,
  S_RATIO = 2,
  S_CLIP_LOW = 3,
  S_CLIP_HIGH = 4,
  S_DUAL_CLIPPED = 5,
  S_OUT_OF_BAND = 6,
  S_KL_OLD_K1 = 7,
  S_KL_OLD_K3 = 8,
  S_KL = 9,
  S_ENTROPY = 10,
  S_IS_WEIGHT = 11,
  S_IS_ZERO = 12,
  S_KEEP = 13,
  S_ACTIVE = 14,
  S_IS_TOKENS = 15,
  S_RATIO_MIN = 16,
  S_RATIO_MAX = 17,
  S_IS_WEIGHT_MAX = 18,
  NSUMS = 19
};

/// A LossSpec decoded to the compute type F.
template <class F>
struct Spec {
  Surrogate surrogate;
  Level level;
  Anchor anchor;
  F clip_low, clip_high, dual_clip, delta, log_ratio_lo, log_ratio_hi;
  Kl kl;
  F kl_coef;
  KlTarget kl_target;
  KlRatio kl_ratio;
  KlGradient kl_gradient;
  F kl_lo, kl_hi, kl_log_ratio_lo, kl_log_ratio_hi, entropy_coef;
  Keep keep;
  bool keep_directional;
  F keep_low, keep_high;
  Correction correction;
  CorrectionLevel correction_level;
  F correction_low, correction_high;
  Reject reject;
  F reject_low, reject_high;
  bool missing_one;
  F token_clip_lo, token_clip_hi, penalty_coef;
  Selection selection;
  F select_coef, obs_coef;
  KlSampled kl_forward, kl_backward;
  F kl_forward_coef, kl_backward_coef;
  F shape_pos, shape_neg, lambda_pos, lambda_neg, log_w_lo, log_w_hi;
};

}  // namespace fusedpg
