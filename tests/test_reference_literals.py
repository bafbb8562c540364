"""The losses against numbers worked out by hand, on every backend; and proof that a broken term would be noticed.

`slope` is d numerator/d logp under `token-sum`, so it is the derivative of each token's own loss unless a comment says
otherwise. Ratios are chosen first: with logp_old = 0, logp = ln(r).
"""

import functools
import math
from dataclasses import dataclass, field

import pytest
import torch

import fusedpg
from fusedpg import reference, reference_terms
from fusedpg.spec import KL, Anchor, KLRatio, Level, Surrogate

LN2 = math.log(2.0)
E = math.exp


@dataclass(frozen=True)
class Literal:
    """One call of `policy_loss` with its per-token losses and slopes."""

    name: str
    spec: fusedpg.LossSpec
    logp: list
    x: list
    slope: list
    args: dict = field(default_factory=dict)
    #: where the mask alone does not weigh the losses
    numerator: float | None = None

    def __str__(self) -> str:
        return self.name


def ln(*ratios: float) -> list[float]:
    return [math.log(r) for r in ratios]


def spec(name: str, **knobs) -> fusedpg.LossSpec:
    return fusedpg.loss_spec(name, reduction="token-sum", **knobs)


def kl_spec(kl: str, **knobs) -> fusedpg.LossSpec:
    """The KL term alone, times 0.5: an advantage of 0 leaves nothing else."""
    return spec("ppo_clip", kl=kl, kl_coef=0.5, **knobs)


def level(name: str, where: Level) -> fusedpg.LossSpec:
    return spec(name).replace(level=where)


OLD0 = [0.0] * 3
KL_ARGS = {"advantages": 0.0, "logp_old": OLD0, "logp_ref": [0.0] * 3}
KL_LOGP = [LN2, -LN2, 0.0]  # the gap to the reference

LITERALS = [
    # x = -A*l: -2*(-1), 3*(-2); slope -A
    Literal("reinforce", spec("reinforce"), [-1.0, -2.0], [2.0, -6.0], [-2.0, 3.0], {"advantages": [2.0, -3.0]}),
    # x = -A*r with r = 2, 1/2; the slope of r to l is r
    Literal(
        "importance_ratio",
        spec("importance_sampling"),
        ln(2.0, 0.5),
        [-2.0, 1.0],
        [-2.0, 1.0],
        {"advantages": [1.0, -2.0], "logp_old": [0.0, 0.0]},
    ),
    # A = 1: max(-1.5, -1.2) = -1.2; max(-0.5, -0.8) = -0.5.   A = -1: max(1.5, 1.2) = 1.5; max(0.5, 0.8) = 0.8
    # A = 2, r = 1.1: inside the band, -2.2.   A = 0: 0
    Literal(
        "clipped_ratio",
        spec("ppo_clip"),
        ln(1.5, 0.5, 1.5, 0.5, 1.1, 1.5),
        [-1.2, -0.5, 1.5, 0.8, -2.2, 0.0],
        [0.0, -0.5, 1.5, 0.0, -2.2, 0.0],
        {"advantages": [1.0, 1.0, -1.0, -1.0, 2.0, 0.0], "logp_old": [0.0] * 6},
    ),
    # asymmetric band [0.9, 1.3]: A = 1, r = 1.25 stays; A = -1, r = 0.85 is clipped to 0.9
    Literal(
        "clipped_ratio-asymmetric",
        spec("ppo_clip", epsilon_low=0.1, epsilon_high=0.3),
        ln(1.25, 0.85),
        [-1.25, 0.9],
        [-1.25, 0.0],
        {"advantages": [1.0, -1.0], "logp_old": [0.0, 0.0]},
    ),
    # no band: -A*r everywhere
    Literal(
        "clipped_ratio-no-band",
        spec("ppo_clip", clip_low=None, clip_high=None),
        ln(9.0, 0.1),
        [-9.0, 0.1],
        [-9.0, 0.1],
        {"advantages": [1.0, -1.0], "logp_old": [0.0, 0.0]},
    ),
    # C = 3. A = -2, r = 5: max(10, 2.4) = 10 is capped at 6.   A = -2, r = 2: 4 is below 6.   A = 1: no cap, -1.2; -0.5
    Literal(
        "dual_clip",
        spec("ppo_dual_clip"),
        ln(5.0, 2.0, 5.0, 0.5),
        [6.0, 4.0, -1.2, -0.5],
        [0.0, 4.0, 0.0, -0.5],
        {"advantages": [-2.0, -2.0, 1.0, 1.0], "logp_old": [0.0] * 4},
    ),
    # delta = 1.5 caps r inside the max. A = -1, r = 2: max(1.5, 1.2) = 1.5, flat.   r = 1.4: 1.4.   A = 1, r = 2: -1.2
    Literal(
        "delta",
        spec("ppo_clip", delta=1.5),
        ln(2.0, 1.4, 2.0),
        [1.5, 1.4, -1.2],
        [0.0, 1.4, 0.0],
        {"advantages": [-1.0, -1.0, 1.0], "logp_old": OLD0},
    ),
    # x = -min(r, 1.2)*A*l with the weight constant. r = 2, l = -1, A = 2: 2.4, slope -2.4
    # r = 1/2, A = 2: weight 0.5: 1, slope -1.   r = 2, A = -1: -1.2, slope 1.2
    Literal(
        "cispo",
        spec("cispo"),
        [-1.0, -1.0, -1.0],
        [2.4, 1.0, -1.2],
        [-2.4, -1.0, 1.2],
        {"advantages": [2.0, 2.0, -1.0], "logp_old": [-1 - LN2, -1 + LN2, -1 - LN2]},
    ),
    # with a lower bound of 0.8: r = 1/2 weighs 0.8: 0.8*2*1, slope -1.6
    Literal(
        "cispo-low",
        spec("cispo", clip_low=0.8),
        [-1.0],
        [1.6],
        [-1.6],
        {"advantages": [2.0], "logp_old": [-1 + LN2]},
    ),
    # clamp at +-0.5: d = 1 -> 0.5 and d = -1 -> -0.5 with slope 0; 0.25 and the bound itself pass
    Literal(
        "log_ratio_clamp",
        spec("importance_sampling", log_ratio_clamp=0.5),
        [1.0, -1.0, 0.25, 0.5],
        [-E(0.5), -E(-0.5), -E(0.25), -E(0.5)],
        [0.0, 0.0, -E(0.25), -E(0.5)],
        {"advantages": 1.0, "logp_old": [0.0] * 4},
    ),
    # one-sided: only above
    Literal(
        "log_ratio_clamp-upper",
        spec("importance_sampling", log_ratio_clamp=(None, 0.5)),
        [1.0, -1.0],
        [-E(0.5), -E(-1.0)],
        [0.0, -E(-1.0)],
        {"advantages": 1.0, "logp_old": [0.0, 0.0]},
    ),
    # anchor self: r = 1 exactly, slope -A*r; logp_old is not read
    Literal(
        "anchor-self",
        spec("ppo_clip", anchor="self"),
        [-1.0, -3.0],
        [-2.0, 1.0],
        [-2.0, 1.0],
        {"advantages": [2.0, -1.0], "logp_old": [-9.0, -9.0]},
    ),
    # anchor rollout: r = exp(l - mu) = 2, 1/2; logp_old is not read
    Literal(
        "anchor-rollout",
        spec("importance_sampling", anchor="rollout"),
        [-1.0, -1.0],
        [-2.0, -0.5],
        [-2.0, -0.5],
        {"advantages": 1.0, "logp_rollout": [-1 - LN2, -1 + LN2], "logp_old": [5.0, 5.0]},
    ),
    # sequence level: z = (ln 2 + ln 4)/2 = 1.5 ln 2, s = 2^1.5; x = -A*s at both tokens.
    # numerator = -2*A*s, d/dl_i = -2*A*s*(1/2) = -A*s.   Second sequence, one token: s = 1/2, A = -2: x = 1, slope 1
    Literal(
        "level-sequence",
        level("importance_sampling", Level.SEQUENCE),
        [LN2, 2 * LN2, -LN2],
        [-(2**1.5), -(2**1.5), 1.0],
        [-(2**1.5), -(2**1.5), 1.0],
        {"sequence_advantages": [1.0, -2.0], "logp_old": OLD0, "cu_seqlens": [0, 2, 3]},
    ),
    # weighted mean: weights 1, 0.5 (a fractional mask), d = 0.3, 0: z = 0.3/1.5 = 0.2, s = e^0.2, A = -1: x = s.
    # numerator = 1.5*s, dz/dl_i = w_i/1.5: slopes s, 0.5*s
    Literal(
        "level-sequence-weighted",
        level("importance_sampling", Level.SEQUENCE),
        [0.3, 0.0],
        [E(0.2), E(0.2)],
        [E(0.2), 0.5 * E(0.2)],
        {"sequence_advantages": [-1.0], "logp_old": [0.0, 0.0], "cu_seqlens": [0, 2], "mask": [1.0, 0.5]},
    ),
    # gspo with band [0.8, 1.2]. z = 0.2: s = 1.2214 is clipped for A = 1: -1.2, flat.   z = 0, A = -2: x = 2, slope 2
    Literal(
        "gspo",
        spec("gspo", epsilon_low=0.2, epsilon_high=0.2),
        [0.3, 0.1, 0.1, -0.1],
        [-1.2, -1.2, 2.0, 2.0],
        [0.0, 0.0, 2.0, 2.0],
        {"sequence_advantages": [1.0, -2.0], "logp_old": [0.0] * 4, "cu_seqlens": [0, 2, 4]},
    ),
    # gspo's own clamp, log-ratio at most 10: z = 12, A = -1: x = e^10, flat
    Literal(
        "gspo-clamp",
        spec("gspo"),
        [12.0, 12.0],
        [E(10.0), E(10.0)],
        [0.0, 0.0],
        {"sequence_advantages": [-1.0], "logp_old": [0.0, 0.0], "cu_seqlens": [0, 2]},
    ),
    # sequence_token: value s = e^0 = 1 for both, each token's slope its own: -A*s
    Literal(
        "level-sequence_token",
        level("importance_sampling", Level.SEQUENCE_TOKEN),
        [0.1, -0.1],
        [-1.0, 2.0],
        [-1.0, 2.0],
        {"advantages": [1.0, -2.0], "logp_old": [0.0, 0.0], "cu_seqlens": [0, 2]},
    ),
    # where sequence would share the adjoint, (1*(-1) + 0.5*(2))/1.5 = 0, sequence_token keeps w_i*(-A_i*s); z = 0
    Literal(
        "level-sequence_token-weighted",
        level("importance_sampling", Level.SEQUENCE_TOKEN),
        [0.1, -0.2],
        [-1.0, 2.0],
        [-1.0, 0.5 * 2.0],
        {"advantages": [1.0, -2.0], "logp_old": [0.0, 0.0], "cu_seqlens": [0, 2], "mask": [1.0, 0.5]},
    ),
    # k1 = d, slope 1
    Literal("kl_k1", kl_spec("k1"), KL_LOGP, [0.5 * LN2, -0.5 * LN2, 0.0], [0.5] * 3, KL_ARGS),
    # k2 = d^2/2, slope d
    Literal(
        "kl_k2", kl_spec("k2"), KL_LOGP, [0.25 * LN2**2, 0.25 * LN2**2, 0.0], [0.5 * LN2, -0.5 * LN2, 0.0], KL_ARGS
    ),
    # k3 = e^-d + d - 1: 1/2 + ln 2 - 1, 2 - ln 2 - 1, 0; slope 1 - e^-d: 1/2, -1, 0
    Literal(
        "kl_k3",
        kl_spec("k3"),
        KL_LOGP,
        [0.5 * (LN2 - 0.5), 0.5 * (1 - LN2), 0.0],
        [0.25, -0.5, 0.0],
        KL_ARGS,
    ),
    # |d|, slope sign(d)
    Literal("kl_abs", kl_spec("abs"), KL_LOGP, [0.5 * LN2, 0.5 * LN2, 0.0], [0.5, -0.5, 0.0], KL_ARGS),
    # straight-through: the value of k3, the slope of k2
    Literal(
        "kl_k3+",
        kl_spec("k3+"),
        KL_LOGP,
        [0.5 * (LN2 - 0.5), 0.5 * (1 - LN2), 0.0],
        [0.5 * LN2, -0.5 * LN2, 0.0],
        KL_ARGS,
    ),
    Literal("kl_k1+", kl_spec("k1+"), KL_LOGP, [0.5 * LN2, -0.5 * LN2, 0.0], [0.5 * LN2, -0.5 * LN2, 0.0], KL_ARGS),
    # gap clamped at +-0.5 before k3: e^-0.5 + 0.5 - 1 and e^0.5 - 0.5 - 1, flat
    Literal(
        "kl_log_ratio_clamp",
        kl_spec("k3", kl_log_ratio_clamp=0.5),
        KL_LOGP,
        [0.5 * (E(-0.5) - 0.5), 0.5 * (E(0.5) - 1.5), 0.0],
        [0.0, 0.0, 0.0],
        KL_ARGS,
    ),
    # straight-through is not stopped by a clamp: the slope is the gap itself
    Literal(
        "kl_log_ratio_clamp+",
        kl_spec("k3+", kl_log_ratio_clamp=0.5),
        KL_LOGP,
        [0.5 * (E(-0.5) - 0.5), 0.5 * (E(0.5) - 1.5), 0.0],
        [0.5 * LN2, -0.5 * LN2, 0.0],
        KL_ARGS,
    ),
    # value clamped to [0, 0.2]: 0.193 passes, 0.307 becomes 0.2, flat
    Literal(
        "kl_clamp",
        kl_spec("k3", kl_clamp=(0.0, 0.2)),
        KL_LOGP,
        [0.5 * (LN2 - 0.5), 0.5 * 0.2, 0.0],
        [0.25, 0.0, 0.0],
        KL_ARGS,
    ),
    # r = l - o: 2, 1/2, 1 as a constant factor
    Literal(
        "kl_ratio-detached",
        kl_spec("k3", kl_ratio="detached"),
        KL_LOGP,
        [0.5 * 2 * (LN2 - 0.5), 0.5 * 0.5 * (1 - LN2), 0.0],
        [0.5 * 2 * 0.5, 0.5 * 0.5 * -1, 0.0],
        KL_ARGS,
    ),
    # live: slope r*(k3 + 1 - e^-d)
    Literal(
        "kl_ratio-live",
        kl_spec("k3", kl_ratio="live"),
        KL_LOGP,
        [0.5 * 2 * (LN2 - 0.5), 0.5 * 0.5 * (1 - LN2), 0.0],
        [0.5 * 2 * ((LN2 - 0.5) + 0.5), 0.5 * 0.5 * ((1 - LN2) - 1), 0.0],
        KL_ARGS,
    ),
    # live k1: slope r*(1 + d)
    Literal(
        "kl_ratio-live-k1",
        kl_spec("k1", kl_ratio="live"),
        KL_LOGP,
        [0.5 * 2 * LN2, 0.5 * 0.5 * -LN2, 0.0],
        [0.5 * 2 * (1 + LN2), 0.5 * 0.5 * (1 - LN2), 0.5],
        KL_ARGS,
    ),
    # live under a binding log-ratio clamp at 0.5: r = e^0.5 is constant there, slope r*(1 - e^-d)
    Literal(
        "kl_ratio-live-clamped",
        kl_spec("k3", kl_ratio="live", log_ratio_clamp=0.5),
        [LN2],
        [0.5 * E(0.5) * (LN2 - 0.5)],
        [0.5 * E(0.5) * 0.5],
        {"advantages": 0.0, "logp_old": [0.0], "logp_ref": [0.0]},
    ),
    # the rollout policy as target: d = l - mu = ln 2
    Literal(
        "kl_target-rollout",
        kl_spec("k2", kl_target="rollout"),
        [LN2],
        [0.25 * LN2**2],
        [0.5 * LN2],
        {"advantages": 0.0, "logp_old": [0.0], "logp_rollout": [0.0]},
    ),
    # policy and KL together: ppo -1.1 with slope -1.1; + 0.5*k2 of a gap of 0.2
    Literal(
        "ppo_clip-with-k2",
        kl_spec("k2"),
        ln(1.1),
        [-1.1 + 0.5 * 0.02],
        [-1.1 + 0.5 * 0.2],
        {"advantages": 1.0, "logp_old": [0.0], "logp_ref": [math.log(1.1) - 0.2]},
    ),
    # a weight multiplies the policy term only: 0.5*(-1.1) + KL 0.5*0.02; a weight of 0 leaves the KL
    Literal(
        "is_weights",
        kl_spec("k2"),
        ln(1.1, 1.1),
        [0.5 * -1.1 + 0.01, 0.01],
        [0.5 * -1.1 + 0.1, 0.1],
        {
            "advantages": 1.0,
            "logp_old": [0.0, 0.0],
            "logp_ref": [math.log(1.1) - 0.2] * 2,
            "is_weights": [0.5, 0.0],
        },
    ),
    # a fractional mask weighs: x itself carries no weight, the slope does; a masked token is 0
    Literal(
        "mask",
        spec("reinforce"),
        [-1.0, -2.0, -3.0],
        [2.0, 4.0, 0.0],
        [-2.0, -0.5, 0.0],
        {"advantages": 2.0, "mask": [1.0, 0.25, 0.0]},
    ),
]


def run(literal: Literal, backend: str) -> tuple[fusedpg.LossOutput, torch.Tensor]:
    dtype = torch.float32 if backend == "triton" else torch.float64
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    args = {
        key: torch.tensor(value, dtype=torch.int64 if key == "cu_seqlens" else dtype, device=device)
        if isinstance(value, list)
        else value
        for key, value in literal.args.items()
    }
    logp = torch.tensor(literal.logp, dtype=dtype, device=device, requires_grad=True)
    out = fusedpg.policy_loss(literal.spec, logp, backend=backend, **args)
    (grad,) = torch.autograd.grad(out.loss, logp)
    return out, grad


def check(literal: Literal, backend: str = "reference") -> None:
    out, grad = run(literal, backend)
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if backend == "triton" else {"rtol": 1e-12, "atol": 1e-12}
    compare = functools.partial(torch.testing.assert_close, **tolerance)
    compare(out.per_token.double().cpu(), torch.tensor(literal.x, dtype=torch.float64))
    compare(grad.double().cpu(), torch.tensor(literal.slope, dtype=torch.float64))
    mask = literal.args.get("mask", [1.0] * len(literal.x))
    numerator = literal.numerator
    if numerator is None:
        numerator = math.fsum(m * x for m, x in zip(mask, literal.x, strict=True))
    compare(out.loss.detach().double().cpu(), torch.tensor(numerator, dtype=torch.float64))
    compare(out.numerator.double().cpu(), torch.tensor(numerator, dtype=torch.float64))


@pytest.mark.parametrize("literal", LITERALS, ids=str)
def test_literal(literal, backend):
    check(literal, backend)


def test_every_axis_value_has_a_literal():
    specs = [literal.spec for literal in LITERALS]
    first = {Surrogate.REINFORCE, Surrogate.IMPORTANCE_RATIO, Surrogate.CLIPPED_RATIO, Surrogate.CISPO}
    assert {s.surrogate for s in specs} == first, "the others: test_literals_catalogue.py"
    assert {s.level for s in specs} == set(Level)
    assert {s.anchor for s in specs} == set(Anchor)
    assert {s.kl for s in specs} == set(KL)
    assert {s.kl_ratio for s in specs} == set(KLRatio)


# ------------------------------------------------------------------ entropy and reductions


def test_entropy_bonus(backend):
    """x = -A*l - 0.1*H: 2 - 0.07, 0 - 0.12; the slope to H is -0.1 times the weight 1, 0.5."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    logp = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    entropy = torch.tensor([0.7, 1.2], dtype=dtype, requires_grad=True)
    out = fusedpg.policy_loss(
        spec("reinforce", entropy_coef=0.1),
        logp,
        entropy=entropy,
        advantages=torch.tensor([2.0, 0.0], dtype=dtype),
        mask=torch.tensor([1.0, 0.5], dtype=dtype),
        backend=backend,
    )
    out.loss.backward()
    torch.testing.assert_close(
        out.per_token.double(), torch.tensor([1.93, -0.12], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert out.loss.item() == pytest.approx(1.93 - 0.06, rel=1e-6)
    assert logp.grad.tolist() == [-2.0, 0.0]
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.05], rel=1e-6)


# x = -logp; masked tokens are NaN so that a product would show
REDUCED_X = [[1.0, 2.0, math.nan], [4.0, math.nan, math.nan], [math.nan] * 3]
REDUCED_MASK = [[1.0, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0] * 3]


@pytest.mark.parametrize(
    ("reduction", "numerator", "weight", "slope"),
    [
        # 1 + 0.5*2 + 4 = 6; 1 + 0.5 + 1 = 2.5 selected weight
        ("token-mean", 6.0, 2.5, [[-1.0, -0.5, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3]),
        ("token-sum", 6.0, 1.0, [[-1.0, -0.5, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3]),
        # (1 + 1)/1.5 + 4/1 = 16/3 over 2 sequences with a selected token
        ("seq-mean-token-mean", 16 / 3, 2.0, [[-2 / 3, -1 / 3, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3]),
        ("seq-mean-token-sum", 6.0, 2.0, [[-1.0, -0.5, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3]),
        # 6/4 with max_tokens = 4
        ("seq-mean-token-sum-norm", 1.5, 2.0, [[-0.25, -0.125, 0.0], [-0.25, 0.0, 0.0], [0.0] * 3]),
    ],
)
def test_reductions(backend, reduction, numerator, weight, slope):
    """loss = numerator/weight, or numerator/normalizer."""
    knobs = {"max_tokens": 4} if reduction == "seq-mean-token-sum-norm" else {}
    loss_spec = fusedpg.loss_spec("reinforce", reduction=reduction, **knobs)
    dtype = torch.float32 if backend == "triton" else torch.float64
    logp = -torch.tensor(REDUCED_X, dtype=dtype)
    mask = torch.tensor(REDUCED_MASK, dtype=dtype)
    for normalizer, divisor in ((None, weight), (8.0, 8.0), (torch.tensor(8), 8.0)):
        leaf = logp.clone().requires_grad_()
        out = fusedpg.policy_loss(loss_spec, leaf, advantages=1.0, mask=mask, normalizer=normalizer, backend=backend)
        out.loss.backward()
        assert out.numerator.item() == pytest.approx(numerator, rel=1e-6)
        assert out.weight.item() == weight
        assert out.loss.item() == pytest.approx(numerator / divisor, rel=1e-6)
        wanted = torch.tensor(slope, dtype=torch.float64) / divisor
        torch.testing.assert_close(leaf.grad.double(), wanted, rtol=1e-6, atol=0)


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize(
    ("options", "p"),
    [
        ({}, 3 / 4),  # odds 3
        ({"temperature": 0.5}, 9 / 10),  # odds 3^2
        ({"logit_scale": 2.0}, 9 / 10),
        ({"logit_scale": 2.0, "temperature": 2.0}, 3 / 4),
        # cap c = ln 3: c*tanh(1) against c*tanh(0): odds 3^tanh(1)
        ({"softcap": math.log(3.0)}, 3 ** math.tanh(1) / (1 + 3 ** math.tanh(1))),
    ],
    ids=str,
)
def test_logprob(backend, options, p):
    """logits [0, ln 3]: log p, H = -p ln p - (1-p) ln(1-p), and d log p/dz times the slope of the logit map."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=dtype, requires_grad=True)
    out = fusedpg.token_logprobs(logits, torch.tensor([1]), return_entropy=True, backend=backend, **options)
    tolerance = 1e-6 if backend == "triton" else 1e-12
    assert out.logp.item() == pytest.approx(math.log(p), rel=tolerance)
    assert out.entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=tolerance)
    slope = options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
    steep = 1 - math.tanh(1) ** 2 if "softcap" in options else 1.0
    (g_logp,) = torch.autograd.grad(out.logp.sum(), logits, retain_graph=True)
    assert g_logp.tolist()[0] == pytest.approx([-(1 - p) * slope, (1 - p) * slope * steep], rel=tolerance)
    (g_entropy,) = torch.autograd.grad(out.entropy.sum(), logits)
    # dH/dz_1 = -p(1-p)*ln(p/(1-p)), dH/dz_0 = -dH/dz_1
    g = -p * (1 - p) * math.log(p / (1 - p)) * slope
    assert g_entropy.tolist()[0] == pytest.approx([-g, g * steep], rel=tolerance)


# ------------------------------------------------------------------ gradcheck, where nothing is a stop-gradient

SMOOTH = [
    spec("reinforce", entropy_coef=0.1),
    spec("importance_sampling", kl="k1", kl_coef=0.3),
    spec("ppo_clip", kl="k2", kl_coef=0.3, entropy_coef=-0.2),
    spec("ppo_dual_clip", kl="k3", kl_coef=0.3),
    spec("ppo_clip", delta=1.05, kl="abs", kl_coef=0.3),
    spec("ppo_clip", kl="k3", kl_coef=0.3, kl_ratio="live"),
    spec("ppo_clip", kl="k3", kl_coef=0.3, kl_clamp=(0.0, 0.05), kl_log_ratio_clamp=0.3),
    fusedpg.loss_spec("dapo"),
    fusedpg.loss_spec("grpo"),
    fusedpg.loss_spec("dr_grpo", log_ratio_clamp=0.15),
    fusedpg.loss_spec("gspo", epsilon_low=0.05, epsilon_high=0.05, kl="k1", kl_coef=0.3, kl_ratio="live"),
]


@pytest.mark.parametrize("loss_spec", SMOOTH, ids=lambda s: f"{s.name}-{s.kl.name.lower()}-{s.kl_ratio.name.lower()}")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradcheck(loss_spec, backend):
    """Analytic against numeric derivatives in fp64, from log-probabilities and from logits."""
    generator = torch.Generator().manual_seed(7)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logits, targets = random(2, 2, 3), torch.randint(3, (2, 2), generator=generator)
    logp = torch.log_softmax(logits / 0.8, -1).gather(-1, targets[..., None])[..., 0]
    mask = torch.tensor([[1.0, 0.5], [1.0, 0.0]], dtype=torch.float64)
    kwargs = {
        "logp_old": logp + random(2, 2) * 0.2,
        "logp_ref": logp + random(2, 2) * 0.4,
        "is_weights": random(2, 2).abs(),
        "mask": mask,
        "backend": backend,
        "sequence_advantages": torch.tensor([1.3, -0.8], dtype=torch.float64),
    }

    def from_logp(logp, entropy):
        return fusedpg.policy_loss(loss_spec, logp, entropy=entropy, **kwargs).loss

    def from_logits(logits):
        return fusedpg.policy_loss_from_logits(loss_spec, logits, targets, temperature=0.8, softcap=6.0, **kwargs).loss

    entropy = random(2, 2).abs().requires_grad_()
    assert torch.autograd.gradcheck(from_logp, (logp.clone().requires_grad_(), entropy))
    assert torch.autograd.gradcheck(from_logits, (logits.requires_grad_(),))


# ------------------------------------------------------------------ a broken term is noticed


def wrong_value(x):
    return x + 0.01


def wrong_slope(x):
    return x.detach() + 1.01 * (x - x.detach())


TERMS = ["reinforce", "importance_ratio", "clipped_ratio", "cispo", "kl_k1", "kl_k2", "kl_k3", "kl_abs"]


@pytest.mark.parametrize("damage", [wrong_value, wrong_slope])
@pytest.mark.parametrize("term", TERMS)
def test_mutants_are_caught(term, damage, monkeypatch):
    """A wrong value or a wrong derivative of any one term makes some literal fail."""
    whole = getattr(reference_terms, term)

    def broken(*args):
        result = whole(*args)
        return (damage(result[0]), *result[1:]) if isinstance(result, tuple) else damage(result)

    monkeypatch.setattr(reference_terms, term, broken)
    for code, estimator in list(reference_terms.ESTIMATORS.items()):
        if estimator is whole:
            monkeypatch.setitem(reference_terms.ESTIMATORS, code, broken)
    assert any(fails(literal) for literal in LITERALS)


@pytest.mark.parametrize("damage", [wrong_value, wrong_slope])
def test_mutant_means_are_caught(damage, monkeypatch):
    whole = reference.Tokens.sequence_mean
    monkeypatch.setattr(reference.Tokens, "sequence_mean", lambda *args: damage(whole(*args)))
    assert any(fails(literal) for literal in LITERALS)


@pytest.mark.parametrize(
    "broken",
    [
        lambda d, bounds: d.clamp(*bounds).detach(),  # no gradient anywhere
        lambda d, bounds: d + (d.clamp(*bounds) - d).detach(),  # the gradient passes where the clamp binds
        lambda d, bounds: d,
    ],
    ids=["detached", "straight_through", "absent"],
)
def test_mutant_clamps_are_caught(broken, monkeypatch):
    monkeypatch.setattr(reference_terms, "clamp", broken)
    assert any(fails(literal) for literal in LITERALS)


def fails(literal: Literal) -> bool:
    try:
        check(literal)
    except (AssertionError, RuntimeError):  # autograd refuses a loss without a graph
        return True
    return False
