"""`LossSpec.encode` as the kernels read it: the positions of its entries and the codes of its enums.

The counterpart of `csrc/spec.h`; a test compares the three.
"""

import triton.language as tl

from fusedpg import spec as _spec

# positions in LossSpec.encode()
SURROGATE = tl.constexpr(0)
LEVEL = tl.constexpr(1)
ANCHOR = tl.constexpr(2)
CLIP_LOW = tl.constexpr(3)
CLIP_HIGH = tl.constexpr(4)
DUAL_CLIP = tl.constexpr(5)
DELTA = tl.constexpr(6)
LOG_RATIO_LO = tl.constexpr(7)
LOG_RATIO_HI = tl.constexpr(8)
KL = tl.constexpr(9)
KL_COEF = tl.constexpr(10)
KL_TARGET = tl.constexpr(11)
KL_RATIO = tl.constexpr(12)
KL_GRADIENT = tl.constexpr(13)
KL_LO = tl.constexpr(14)
KL_HI = tl.constexpr(15)
KL_LOG_RATIO_LO = tl.constexpr(16)
KL_LOG_RATIO_HI = tl.constexpr(17)
ENTROPY_COEF = tl.constexpr(18)
KEEP = tl.constexpr(19)
KEEP_DIRECTIONAL = tl.constexpr(20)
KEEP_LOW = tl.constexpr(21)
KEEP_HIGH = tl.constexpr(22)
CORRECTION = tl.constexpr(23)
CORRECTION_LEVEL = tl.constexpr(24)
CORRECTION_LOW = tl.constexpr(25)
CORRECTION_HIGH = tl.constexpr(26)
REJECT = tl.constexpr(27)
REJECT_LOW = tl.constexpr(28)
REJECT_HIGH = tl.constexpr(29)
MISSING_ONE = tl.constexpr(30)
TOKEN_CLIP_LO = tl.constexpr(31)
TOKEN_CLIP_HI = tl.constexpr(32)
PENALTY_COEF = tl.constexpr(33)
SELECTION = tl.constexpr(34)
SELECT_COEF = tl.constexpr(35)
OBS_COEF = tl.constexpr(36)
KL_FORWARD = tl.constexpr(37)
KL_FORWARD_COEF = tl.constexpr(38)
SHAPE_POS = tl.constexpr(39)
SHAPE_NEG = tl.constexpr(40)
LAMBDA_POS = tl.constexpr(41)
LAMBDA_NEG = tl.constexpr(42)
LOG_W_LO = tl.constexpr(43)
LOG_W_HI = tl.constexpr(44)
KL_BACKWARD = tl.constexpr(45)
KL_BACKWARD_COEF = tl.constexpr(46)

#: positions in the tuple of pointers to `fusedpg.spec.STREAMS`
ADVANTAGES, LOGP_OLD, LOGP_REF, LOGP_ROLLOUT, IS_WEIGHTS, OBS_WEIGHTS, SELECTED = (
    tl.constexpr(i) for i in range(len(_spec.STREAMS))
)

REINFORCE = tl.constexpr(int(_spec.Surrogate.REINFORCE))
IMPORTANCE_RATIO = tl.constexpr(int(_spec.Surrogate.IMPORTANCE_RATIO))
CLIPPED_RATIO = tl.constexpr(int(_spec.Surrogate.CLIPPED_RATIO))
SAPO = tl.constexpr(int(_spec.Surrogate.SAPO))
TOPR = tl.constexpr(int(_spec.Surrogate.TOPR))
VESPO = tl.constexpr(int(_spec.Surrogate.VESPO))

LEVEL_TOKEN = tl.constexpr(int(_spec.Level.TOKEN))
LEVEL_SEQUENCE = tl.constexpr(int(_spec.Level.SEQUENCE))

ANCHOR_SELF = tl.constexpr(int(_spec.Anchor.SELF))
ANCHOR_ROLLOUT = tl.constexpr(int(_spec.Anchor.ROLLOUT))

KEEP_NONE = tl.constexpr(int(_spec.Keep.NONE))
KEEP_RATIO = tl.constexpr(int(_spec.Keep.RATIO))
KEEP_KL = tl.constexpr(int(_spec.Keep.KL))

CORRECTION_NONE = tl.constexpr(int(_spec.Correction.NONE))
CORRECTION_TRUNCATE = tl.constexpr(int(_spec.Correction.TRUNCATE))
CORRECTION_MASK = tl.constexpr(int(_spec.Correction.MASK))
CORRECTION_TOKEN = tl.constexpr(int(_spec.CorrectionLevel.TOKEN))
CORRECTION_SEQUENCE = tl.constexpr(int(_spec.CorrectionLevel.SEQUENCE))

REJECT_NONE = tl.constexpr(int(_spec.Reject.NONE))
REJECT_TOKEN = tl.constexpr(int(_spec.Reject.TOKEN))
REJECT_SEQUENCE = tl.constexpr(int(_spec.Reject.SEQUENCE))

KL_NONE = tl.constexpr(int(_spec.KL.NONE))
KL_K1 = tl.constexpr(int(_spec.KL.K1))
KL_K2 = tl.constexpr(int(_spec.KL.K2))
KL_K3 = tl.constexpr(int(_spec.KL.K3))
TARGET_ROLLOUT = tl.constexpr(int(_spec.KLTarget.ROLLOUT))
RATIO_NONE = tl.constexpr(int(_spec.KLRatio.NONE))
RATIO_LIVE = tl.constexpr(int(_spec.KLRatio.LIVE))
GRADIENT_STRAIGHT_THROUGH = tl.constexpr(int(_spec.KLGradient.STRAIGHT_THROUGH))
GRADIENT_SCORE = tl.constexpr(int(_spec.KLGradient.SCORE))
SAMPLED_NONE = tl.constexpr(int(_spec.KLSampled.NONE))
SAMPLED_SCORE = tl.constexpr(int(_spec.KLSampled.SCORE))

SELECTION_CLIP_COV = tl.constexpr(int(_spec.Selection.CLIP_COV))
SELECTION_KL_COV = tl.constexpr(int(_spec.Selection.KL_COV))
