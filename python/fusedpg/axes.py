"""The axes of a `LossSpec`: enums with fixed integer codes, and the names of the reductions. Standard library only."""

from __future__ import annotations

from enum import IntEnum


class Surrogate(IntEnum):
    """The policy term of the loss; `fusedpg.reference` holds one function of the same name for each."""

    REINFORCE = 0
    IMPORTANCE_RATIO = 1
    CLIPPED_RATIO = 2
    CISPO = 3
    SAPO = 4
    TOPR = 5
    VESPO = 6


class Level(IntEnum):
    """Where the importance ratio lives: a token, a sequence, or a sequence's value with token gradients."""

    TOKEN = 0
    SEQUENCE = 1
    SEQUENCE_TOKEN = 2


class Anchor(IntEnum):
    """The denominator of the ratio: `logp_old`, the policy itself (ratio exactly 1), or `logp_rollout`."""

    OLD = 0
    SELF = 1
    ROLLOUT = 2


class Keep(IntEnum):
    """What a token's keep mask measures: nothing, its ratio, p - p', or the binary KL D(p'||p) signed by p - p'."""

    NONE = 0
    RATIO = 1
    TV = 2
    KL = 3


class Correction(IntEnum):
    """What becomes of a rollout correction weight outside [is_low, is_high]: clipped to it, or 0."""

    NONE = 0
    TRUNCATE = 1
    MASK = 2


class CorrectionLevel(IntEnum):
    """Whose rollout ratio it is: a token's, the product over a sequence, or its geometric mean."""

    TOKEN = 0
    SEQUENCE = 1
    GEOMETRIC = 2


class Reject(IntEnum):
    """The level of a rollout rejection mask, which multiplies the correction weight by 0 or 1."""

    NONE = 0
    TOKEN = 1
    SEQUENCE = 2
    GEOMETRIC = 3


class KL(IntEnum):
    """The per-token KL estimator of `logp - logp_ref` (Schulman, "Approximating KL Divergence", 2020)."""

    NONE = 0
    K1 = 1
    K2 = 2
    K3 = 3
    ABS = 4


class KLTarget(IntEnum):
    """Which policy the KL term compares with."""

    REF = 0
    ROLLOUT = 1


class KLRatio(IntEnum):
    """How the importance ratio multiplies the KL term."""

    NONE = 0
    DETACHED = 1
    LIVE = 2


class KLGradient(IntEnum):
    """The KL term's gradient: the estimator's own, that of k2 (`+`), or its own plus the score term value*dlogp."""

    OWN = 0
    STRAIGHT_THROUGH = 1
    SCORE = 2


class KLSampled(IntEnum):
    """Estimators of a KL term on samples of the other policy (the sampler): score function, or the k3 form."""

    NONE = 0
    SCORE = 1
    K3 = 2


class Selection(IntEnum):
    """Tokens picked by their covariance of logp and advantage over the batch: dropped, or penalised by |log-ratio|."""

    NONE = 0
    CLIP_COV = 1
    KL_COV = 2


class Divergence(IntEnum):
    """Of a student p from a teacher q: KL(p||q), KL(q||p), or both from a mixture; not an axis of a `LossSpec`."""

    REVERSE_KL = 0
    FORWARD_KL = 1
    JSD = 2


#: least probability of the bucket of tokens that a top-k teacher does not list: an fp32 sum near 1 knows no less
REMAINDER_FLOOR = 2.0**-24

#: reduction names, aliases resolved; `fusedpg.weights` holds the one definition of each
REDUCTIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
REDUCTION_ALIASES = {"seq-mean-token-sum-fixed": "seq-mean-token-sum-norm"}
