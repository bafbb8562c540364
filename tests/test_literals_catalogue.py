"""Hand-worked numbers of the losses with masks, products, corrections, penalties and selections, on every backend."""

import math

import pytest

import fusedpg
from fusedpg import reference, reference_terms
from fusedpg.spec import Correction, CorrectionLevel, Keep, KLGradient, KLSampled, Reject, Selection
from test_reference_literals import LITERALS as FIRST
from test_reference_literals import Literal, check, ln, spec, wrong_slope, wrong_value

E = math.exp
LN2 = math.log(2.0)
SIX = {"logp_old": [0.0] * 6}


def sigmoid(x: float) -> float:
    return 1 / (1 + E(-x))


def tis(**knobs) -> fusedpg.LossSpec:
    return spec("reinforce", is_correction="truncate", **knobs)


def two_sequences(logp_old: list, logp_rollout: list, **args) -> dict:
    """Tokens 0-1 and 2-3 are two packed sequences."""
    return {"logp_old": logp_old, "logp_rollout": logp_rollout, "cu_seqlens": [0, 2, 4], **args}


#: p = 3/4 and p' = 1/2 move up by 1/4; p = 1/4 and p' = 1/2 move down by 1/4
UP, DOWN = math.log(0.75), math.log(0.25)
HALF = [math.log(0.5)] * 4
#: D(1/2 || 3/4) = D(1/2 || 1/4) = 1/2*ln(4/3)
MOVE_KL = 0.5 * math.log(4 / 3)
S_POS, S_NEG = sigmoid(1.0), sigmoid(1.05 * -0.5)
PHI_2 = E(3 + 2 * LN2 - 3 * 2)  # k = 2, lambda = 3, W = 2
PHI_HALF = E(2 - 3 * LN2 - 2 * 0.5)  # k = 3, lambda = 2, W = 1/2
GEO = E((0.15 - 0.1) / 2)  # the geometric mean of e^0.15 (clipped from e^0.3) and e^-0.1

LITERALS = [
    # tau 1: r = 2 -> 4*s(1); tau 1.05: r = 1/2 -> (4/1.05)*s(-0.525); slope -A*4*s*(1-s)*r
    Literal(
        "sapo",
        spec("sapo"),
        ln(2.0, 0.5, 2.0),
        [-4 * S_POS, 2 * (4 / 1.05) * S_NEG, 0.0],
        [-4 * S_POS * (1 - S_POS) * 2, 2 * 4 * S_NEG * (1 - S_NEG) * 0.5, 0.0],
        {"advantages": [1.0, -2.0, 0.0], "logp_old": [0.0] * 3},
    ),
    # A = 1: -l.   A = -2, rho = 2: capped at 1, 2*l; rho = 1/2: l
    Literal(
        "topr",
        spec("topr"),
        [-1.0, -1.0, -2.0],
        [1.0, -2.0, -2.0],
        [-1.0, 2.0, 1.0],
        {"advantages": [1.0, -2.0, -2.0], "logp_rollout": [-9.0, -1.0 - LN2, -2.0 + LN2]},
    ),
    # sequence 0: W = 4*(1/2) = 2, A = 1; sequence 1: W = 1/2, A = -2; x = -phi*A*l
    Literal(
        "vespo",
        spec("vespo"),
        [-1.0, -2.0, -3.0],
        [PHI_2, 2 * PHI_2, -6 * PHI_HALF],
        [-PHI_2, -PHI_2, 2 * PHI_HALF],
        {"advantages": [1.0, 1.0, -2.0], "logp_old": [-1 - 2 * LN2, -2 + LN2, -3 + LN2], "cu_seqlens": [0, 2, 3]},
    ),
    # a weight of 1/2 on the first token of W = 4*1: W = 2; the weight is in the product and multiplies nothing
    Literal(
        "vespo-is_weights",
        spec("vespo"),
        [-1.0, -2.0],
        [PHI_2, 2 * PHI_2],
        [-PHI_2, -PHI_2],
        {"advantages": 1.0, "logp_old": [-1 - 2 * LN2, -2.0], "is_weights": [0.5, 1.0], "cu_seqlens": [0, 2]},
    ),
    # A = 1, d = 0.3 is clipped to 0.15 and has no gradient, d = -0.1 is not; numerator -2*s, each free token's slope is
    # that whole sum times 1/2
    Literal(
        "gmpo",
        spec("gmpo", epsilon_low=0.2, epsilon_high=0.15),
        [-1.0, -2.0],
        [-GEO, -GEO],
        [0.0, -GEO],
        {"sequence_advantages": [1.0], "logp_old": [-1.3, -1.9], "cu_seqlens": [0, 2]},
    ),
    # A < 0 clips below only: d = 0.3 stays, d = -0.4 becomes -0.2; s = e^0.05
    Literal(
        "gmpo-negative",
        spec("gmpo", epsilon_low=0.2, epsilon_high=0.15),
        [-1.0, -2.0],
        [2 * E(0.05), 2 * E(0.05)],
        [2 * E(0.05), 0.0],
        {"sequence_advantages": [-2.0], "logp_old": [-1.3, -1.6], "cu_seqlens": [0, 2]},
    ),
    # luspo: the sequence's -A*s counted once a token; each token's slope is the sum over both times 1/2
    Literal(
        "luspo",
        spec("luspo", clip_low=None, clip_high=None),
        ln(2.0, 0.5),
        [-3.0, -3.0],
        [-3.0, -3.0],
        {"sequence_advantages": [3.0], "logp_old": [0.0, 0.0], "cu_seqlens": [0, 2]},
    ),
    # TV moves: up 1/4 with A = 1 is beyond 0.2, down is not; with A = -1 the other way round. r = 3/2, 1/2; x = -A*r*l
    Literal(
        "keep-tv",
        spec("dppo_tv"),
        [UP, DOWN, UP, DOWN],
        [0.0, -0.5 * DOWN, 1.5 * UP, 0.0],
        [0.0, -0.5, 1.5, 0.0],
        {"advantages": [1.0, 1.0, -1.0, -1.0], "logp_old": HALF},
    ),
    # exactly at the threshold stays
    Literal(
        "keep-tv-tie",
        spec("dppo_tv", delta=0.25),
        [UP, DOWN],
        [-1.5 * UP, 0.5 * DOWN],
        [-1.5, 0.5],
        {"advantages": [1.0, -1.0], "logp_old": HALF[:2]},
    ),
    # D = 0.1438 both ways: above 0.14 the move is dropped where the advantage pushes it, kept where it pulls it back
    Literal(
        "keep-kl",
        spec("dppo_kl", delta=0.14),
        [UP, DOWN, UP, DOWN],
        [0.0, -0.5 * DOWN, 1.5 * UP, 0.0],
        [0.0, -0.5, 1.5, 0.0],
        {"advantages": [1.0, 1.0, -1.0, -1.0], "logp_old": HALF},
    ),
    Literal(
        "keep-kl-inside",
        spec("dppo_kl", delta=MOVE_KL + 1e-5),
        [UP, DOWN],
        [-1.5 * UP, 0.5 * DOWN],
        [-1.5, 0.5],
        {"advantages": [1.0, -1.0], "logp_old": HALF[:2]},
    ),
    # icepop: rho = 4, 6, 1/4, 1/2 against [0.5, 5], whatever the sign of A; at the bound it stays
    Literal(
        "keep-ratio",
        spec("icepop"),
        [-1.0] * 4,
        [4.0, 0.0, 0.0, -0.5],
        [-4.0, 0.0, 0.0, 0.5],
        {
            "advantages": [1.0, 1.0, -1.0, -1.0],
            "logp_rollout": [-1 - r for r in (2 * LN2, math.log(6), -2 * LN2, -LN2)],
        },
    ),
    # directional: A = 1 is dropped above 1.5 only, A = -1 below 0.5 only
    Literal(
        "keep-directional",
        spec("importance_sampling", keep="ratio", keep_low=0.5, keep_high=1.5, keep_directional=True),
        ln(2.0, 0.25, 2.0, 0.25),
        [0.0, -0.25, 2.0, 0.0],
        [0.0, -0.25, 2.0, 0.0],
        {"advantages": [1.0, 1.0, -1.0, -1.0], "logp_old": [0.0] * 4},
    ),
    # dro: -A*l + beta/2*d^2 with beta = 0.5, d = 2, -1; the penalty stays where A = 0
    Literal(
        "penalty",
        spec("dro", beta=0.5),
        [-1.0, -3.0],
        [2.0 + 1.0, 0.25],
        [-2.0 + 1.0, -0.5],
        {"advantages": [2.0, 0.0], "logp_old": [-3.0, -2.0]},
    ),
    # ipo: the mask drops -A*r, not the penalty: 0.1*d^2 with d = ln(3/2); slope 0.2*d
    Literal(
        "penalty-outside-the-mask",
        spec("ipo", kl_tau=0.1),
        [UP, UP],
        [0.1 * math.log(1.5) ** 2, 1.5 + 0.1 * math.log(1.5) ** 2],
        [0.2 * math.log(1.5), 1.5 + 0.2 * math.log(1.5)],
        {"advantages": [1.0, -1.0], "logp_rollout": HALF[:2]},
    ),
    # weights e^(o - mu) = 2, 1/2, capped at 1.5; x = -A*l*weight
    Literal(
        "is-truncate",
        tis(is_high=1.5),
        [-1.0, -2.0],
        [1.5, 1.0],
        [-1.5, -0.5],
        {"advantages": 1.0, "logp_old": [-1.0, -1.0], "logp_rollout": [-1 - LN2, -1 + LN2]},
    ),
    # without logp_old the weight is e^(l - mu), a constant
    Literal(
        "is-truncate-self",
        tis(is_high=9.0, anchor="self"),
        [-1.0, -2.0],
        [2.0, 1.0],
        [-2.0, -0.5],
        {"advantages": 1.0, "logp_rollout": [-1 - LN2, -2 + LN2]},
    ),
    # mask: 2 is outside [0.4, 1.5], 1/2 inside
    Literal(
        "is-mask",
        spec("reinforce", is_correction="mask", is_low=0.4, is_high=1.5),
        [-1.0, -2.0],
        [0.0, 1.0],
        [0.0, -0.5],
        {"advantages": 1.0, "logp_old": [-1.0, -1.0], "logp_rollout": [-1 - LN2, -1 + LN2]},
    ),
    # products 2*2 = 4 -> capped at 3, and 2*(1/2) = 1
    Literal(
        "is-sequence",
        tis(is_high=3.0, is_level="sequence"),
        [-1.0] * 4,
        [3.0, 3.0, 1.0, 1.0],
        [-3.0, -3.0, -1.0, -1.0],
        two_sequences([0.0] * 4, [-LN2, -LN2, -LN2, LN2], advantages=1.0),
    ),
    # geometric means 2 and 1; mask at 1.5 drops the first sequence
    Literal(
        "is-geometric",
        spec("reinforce", is_correction="mask", is_high=1.5, is_level="geometric"),
        [-1.0] * 4,
        [0.0, 0.0, 1.0, 1.0],
        [0.0, 0.0, -1.0, -1.0],
        two_sequences([0.0] * 4, [-LN2, -LN2, -LN2, LN2], advantages=1.0),
    ),
    # the geometric mean of 2, 1/2 is 1: kept, with each token's own weight; the other sequence is rejected
    Literal(
        "is-reject",
        tis(is_high=9.0, is_reject="geometric", is_reject_high=1.5),
        [-1.0] * 4,
        [0.0, 0.0, 2.0, 0.5],
        [0.0, 0.0, -2.0, -0.5],
        two_sequences([0.0] * 4, [-LN2, -LN2, -LN2, LN2], advantages=1.0),
    ),
    Literal(
        "is-reject-sequence",
        spec("reinforce", is_reject="sequence", is_reject_low=0.9, is_reject_high=1.5),
        [-1.0] * 4,
        [0.0, 0.0, 1.0, 1.0],
        [0.0, 0.0, -1.0, -1.0],
        two_sequences([0.0] * 4, [-LN2, -LN2, -LN2, LN2], advantages=1.0),
    ),
    Literal(
        "is-reject-token",
        spec("reinforce", is_reject="token", is_reject_low=0.6, is_reject_high=3.0),
        [-1.0] * 2,
        [1.0, 0.0],
        [-1.0, 0.0],
        {"advantages": 1.0, "logp_old": [0.0, 0.0], "logp_rollout": [-LN2, LN2]},
    ),
    # k3 at d = ln 2: value ln2 - 1/2, own slope 1/2; with the score term the slope is d. k1: 1 + d. k2: d + d^2/2
    *(
        Literal(
            f"kl-score-{kl}",
            spec("ppo_clip", kl=kl, kl_coef=0.5, kl_gradient="score"),
            [LN2],
            [0.5 * value],
            [0.5 * slope],
            {"advantages": 0.0, "logp_old": [0.0], "logp_ref": [0.0]},
        )
        for kl, value, slope in (
            ("k1", LN2, 1 + LN2),
            ("k2", LN2**2 / 2, LN2 + LN2**2 / 2),
            ("k3", LN2 - 0.5, LN2),
            ("abs", LN2, 1 + LN2),
        )
    ),
    # on the target's samples, t = ln 2. backward: -l; e^t - 1 - t. forward: sg(e^t*t)*l; e^t*t - e^t + 1. Slopes -1, 1, t*2
    *(
        Literal(
            f"{term}-{form}",
            spec("ppo_clip", **{term: form, f"{term}_coef": 2.0}),
            [LN2],
            [2 * value],
            [2 * slope],
            {"advantages": 0.0, "logp_old": [0.0], "logp_ref": [0.0]},
        )
        for term, form, value, slope in (
            ("kl_backward", "score", -LN2, -1.0),
            ("kl_backward", "k3", 1 - LN2, 1.0),
            ("kl_forward", "score", 2 * LN2 * LN2, 2 * LN2),
            ("kl_forward", "k3", 2 * LN2 - 1, 2 * LN2),
        )
    ),
    # -rho*A*l with rho = 2, 0.5*(-l), 0.25*sg(2*ln 2)*l
    Literal(
        "reinforce_kl",
        spec("reinforce_kl", bwd_kl_coef=0.5, fwd_kl_coef=0.25),
        [-1.0],
        [2.0 + 0.5 - 0.5 * LN2],
        [-2.0 - 0.5 + 0.5 * LN2],
        {"advantages": [1.0], "logp_rollout": [-1 - LN2]},
    ),
    # delta below the band's end: A = -1, r = 1.4 of [0.8, 1.5]: max(1.1, 1.4) keeps the clipped branch's own gradient
    Literal(
        "delta-inside-the-band",
        spec("ppo_clip", delta=1.1, epsilon_high=0.5),
        ln(1.4, 1.6),
        [1.4, 1.5],
        [1.4, 0.0],
        {"advantages": [-1.0, -1.0], "logp_old": [0.0, 0.0]},
    ),
    # a cap of 1 binds on k3(ln 8) = ln 8 - 7/8: no gradient, with the score term or without; also where e^-d overflows
    *(
        Literal(
            f"kl-cap-{gradient}",
            spec("ppo_clip", kl="k3", kl_coef=1.0, kl_clamp=1.0, kl_gradient=gradient, kl_log_ratio_clamp=None),
            [3 * LN2, -800.0],
            [1.0, 1.0],
            [0.0, 0.0],
            {"advantages": 0.0, "logp_old": [0.0, 0.0], "logp_ref": [0.0, 0.0]},
        )
        for gradient in ("own", "score")
    ),
    # the second token is an observation, the third both, the fourth neither
    Literal(
        "observation",
        spec("reinforce", obs_coef=0.5),
        [-1.0, -2.0, -3.0, -4.0],
        [2.0, 1.0, 6.0 + 1.5, 0.0],
        [-2.0, -0.5, -2.5, 0.0],
        {"advantages": 2.0, "mask": [1.0, 0.0, 1.0, 0.0], "obs_mask": [0.0, 1.0, 1.0, 0.0]},
        numerator=10.5,
    ),
    # A - mean A = -1, 0, 1; l - mean l = -1, 0, 1: covariances 1, 0, 1 outside (0.5, 0.9) and inside (-1, 0.9)
    Literal(
        "clip_cov",
        spec("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=-1, clip_cov_ub=0.9),
        [-3.0, -2.0, -1.0],
        [-1.0, 0.0, -3.0],
        [-1.0, 0.0, -3.0],
        {"advantages": [1.0, 2.0, 3.0], "logp_old": [-3.0, -2.0, -1.0]},
    ),
    # the same covariances with the largest at the last token: it pays 0.5*|d|, d = ln 2
    Literal(
        "kl_cov",
        spec("kl_cov", kl_cov_ratio=0.34, ppo_kl_coef=0.5),
        [-3.0, -2.0, -0.5],
        [-1.0, -2.0, -8.0 + 0.5 * LN2],
        [-1.0, -2.0, -8.0 + 0.5],
        {"advantages": [1.0, 2.0, 4.0], "logp_old": [-3.0, -2.0, -0.5 - LN2]},
    ),
]


@pytest.mark.parametrize("literal", LITERALS, ids=str)
def test_literal(literal, backend):
    check(literal, backend)


def test_every_axis_value_has_a_literal():
    specs = [literal.spec for literal in (*FIRST, *LITERALS)]
    assert {s.keep for s in specs} == set(Keep)
    assert {s.is_correction for s in specs} == set(Correction)
    assert {s.is_level for s in specs} == set(CorrectionLevel)
    assert {s.is_reject for s in specs} == set(Reject)
    assert {s.kl_gradient for s in specs} == set(KLGradient)
    assert {s.kl_forward for s in specs} == {s.kl_backward for s in specs} == set(KLSampled)
    assert {s.selection for s in specs} == set(Selection)


def some_fail() -> bool:
    for literal in (*LITERALS, *FIRST):
        try:
            check(literal)
        except (AssertionError, RuntimeError):
            return True
    return False


SMOOTH = ["sapo", "topr", "vespo", "clip_tokens"]
SMOOTH += ["kl_backward_score", "kl_backward_k3", "kl_forward_score", "kl_forward_k3"]


@pytest.mark.parametrize("damage", [wrong_value, wrong_slope])
@pytest.mark.parametrize("term", SMOOTH)
def test_mutants_are_caught(term, damage, monkeypatch):
    """A wrong value or a wrong derivative of any one term makes some literal fail."""
    whole = getattr(reference_terms, term)
    monkeypatch.setattr(reference_terms, term, lambda *args: damage(whole(*args)))
    assert some_fail()


@pytest.mark.parametrize("term", ["bound_weight", "binary_kl"])
def test_mutants_of_constants_are_caught(term, monkeypatch):
    whole = getattr(reference_terms, term)
    monkeypatch.setattr(reference_terms, term, lambda *args: whole(*args) + 0.01)
    assert some_fail()


@pytest.mark.parametrize("term", ["rejected", "dropped"])
def test_mutants_of_masks_are_caught(term, monkeypatch):
    whole = getattr(reference_terms, term)
    monkeypatch.setattr(reference_terms, term, lambda *args: ~whole(*args))
    assert some_fail()


@pytest.mark.parametrize("field", ["obs_coef", "penalty_coef", "select_coef"])
def test_mutants_of_coefficients_are_caught(field, monkeypatch):
    """The reference reads every coefficient."""
    whole = reference.token_loss

    def broken(spec, *args):
        value = getattr(spec, field)
        return whole(spec.replace(**{field: 1.01 * value}) if value else spec, *args)

    monkeypatch.setattr(reference, "token_loss", broken)
    assert some_fail()
