// csrc/spec.h: axis codes and parameter indices of an encoded LossSpec.
// python/fusedpg/spec.py is the definition; this file mirrors its numbers. Plain C++, independent of the instruction set.
#pragma once

namespace fusedpg {

enum class Surrogate { reinforce = 0, ratio = 1, clip = 2, cispo = 3 };
enum class Level { token = 0, sequence = 1, sequence_token = 2 };
enum class Anchor { old = 0, self = 1, rollout = 2 };
enum class Kl { none = 0, k1 = 1, k2 = 2, k3 = 3, abs = 4 };
enum class KlTarget { ref = 0, rollout = 1 };
enum class KlRatio { none = 0, detached = 1, live = 2 };

/// Positions in LossSpec.encode(); 19..23 are reserved.
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
  P_KL_STRAIGHT_THROUGH = 13,
  P_KL_LO = 14,
  P_KL_HI = 15,
  P_KL_LOG_RATIO_LO = 16,
  P_KL_LOG_RATIO_HI = 17,
  P_ENTROPY_COEF = 18,
  NPARAMS = 24
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
  S_RATIO_MIN = 15,
  S_RATIO_MAX = 16,
  S_IS_WEIGHT_MAX = 17,
  NSUMS = 18
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
  bool kl_straight_through;
  F kl_lo, kl_hi, kl_log_ratio_lo, kl_log_ratio_hi, entropy_coef;
};

}  // namespace fusedpg
