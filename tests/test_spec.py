"""LossSpec, loss_spec and the catalogue: defaults, refusals, encoding, and the mirrors in C++ and Triton."""

import dataclasses
import inspect
import math
import pickle
import re
from pathlib import Path

import pytest

import fusedpg
from fusedpg import losses, reference_terms
from fusedpg import spec as spec_module
from fusedpg.metrics import NSUMS, SUM_NAMES
from fusedpg.spec import (
    KL,
    NPARAMS,
    REDUCTIONS,
    Anchor,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    Level,
    LossSpec,
    Reject,
    Selection,
    Surrogate,
)
from support import REQUIRED

ROOT = Path(__file__).parents[1]
INF, NAN = math.inf, math.nan


# ------------------------------------------------------------------ the catalogue

#: the order of the documentation
ORDER = [
    "reinforce",
    "importance_sampling",
    "ppo_clip",
    "ppo_dual_clip",
    "grpo",
    "dapo",
    "dr_grpo",
    "bnpo",
    "gspo",
    "gspo_token",
    "gmpo",
    "luspo",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "icepop",
    "sapo",
    "vespo",
    "topr",
    "dro",
    "ipo",
    "echo",
    "reinforce_kl",
    "clip_cov",
    "kl_cov",
]


def test_catalogue_order():
    assert list(fusedpg.CATALOGUE) == ORDER
    assert list(losses.ENTRIES) == ORDER


@pytest.mark.parametrize("name", ORDER)
def test_catalogue_entry(name):
    entry = losses.ENTRIES[name]
    assert fusedpg.loss_spec(name, **REQUIRED.get(name, {})) == fusedpg.CATALOGUE[name] == entry.spec
    assert entry.spec.name == name
    assert entry.formula
    assert entry.gradient
    assert re.search(r"arXiv:\d{4}\.\d{5}|\(\d{4}\)", entry.source), "a source with a year or an arXiv number"


def test_catalogue_is_read_only():
    with pytest.raises(TypeError):
        fusedpg.CATALOGUE["mine"] = fusedpg.CATALOGUE["grpo"]


def test_catalogue_defaults():
    """The table of losses, entry by entry; every bound is absolute."""
    c = fusedpg.CATALOGUE
    assert c["reinforce"].surrogate == Surrogate.REINFORCE
    assert c["importance_sampling"].surrogate == Surrogate.IMPORTANCE_RATIO
    for name in ("ppo_clip", "ppo_dual_clip", "grpo", "dr_grpo", "bnpo"):
        assert (c[name].surrogate, c[name].clip_low, c[name].clip_high) == (Surrogate.CLIPPED_RATIO, 0.8, 1.2)
    assert [name for name in ORDER if c[name].dual_clip != INF] == ["ppo_dual_clip"]
    assert c["ppo_dual_clip"].dual_clip == 3.0
    assert (c["dapo"].clip_low, c["dapo"].clip_high, c["dapo"].reduction) == (0.8, 1.28, "token-mean")
    assert (c["grpo"].kl, c["grpo"].kl_coef, c["grpo"].reduction) == (KL.K3, 0.04, "seq-mean-token-mean")
    assert (c["dr_grpo"].reduction, c["dr_grpo"].max_tokens) == ("seq-mean-token-sum-norm", 1024)
    for name, level in (("gspo", Level.SEQUENCE), ("gspo_token", Level.SEQUENCE_TOKEN), ("luspo", Level.SEQUENCE)):
        assert c[name].level == level
        assert (c[name].clip_low, c[name].clip_high) == pytest.approx((1 - 3e-4, 1 + 4e-4))
        assert c[name].log_ratio_clamp == (-INF, 10.0)
    assert c["gspo"].reduction == c["gspo_token"].reduction == "seq-mean-token-mean"
    assert c["luspo"].reduction == "seq-mean-token-sum", "L times the sequence's loss is the sum over its L tokens"
    assert (c["cispo"].clip_low, c["cispo"].clip_high) == (-INF, 1.2)
    assert [name for name in ORDER if c[name].has_kl] == ["grpo"]


def test_catalogue_defaults_of_masks_and_products():
    """The rest of the table: keep masks, thresholds, temperatures, anchors."""
    c = fusedpg.CATALOGUE
    assert (c["gmpo"].level, c["gmpo"].token_clip) == (Level.SEQUENCE, (-0.4, 0.4))
    for name, keep in (("dppo_tv", Keep.TV), ("dppo_kl", Keep.KL), ("ipo", Keep.TV)):
        assert (c[name].keep, c[name].keep_directional, c[name].keep_low, c[name].keep_high) == (keep, True, -0.2, 0.2)
    assert c["dppo_tv"].clip_high == INF, "the ratio of DPPO is not truncated"
    assert (c["icepop"].keep, c["icepop"].keep_low, c["icepop"].keep_high) == (Keep.RATIO, 0.5, 5.0)
    assert not c["icepop"].keep_directional
    assert [name for name in ORDER if c[name].anchor == Anchor.ROLLOUT] == ["icepop", "topr", "ipo", "reinforce_kl"]
    assert (c["sapo"].tau_pos, c["sapo"].tau_neg, c["sapo"].reduction) == (1.0, 1.05, "seq-mean-token-mean")
    assert (c["vespo"].k_pos, c["vespo"].lambda_pos, c["vespo"].k_neg, c["vespo"].lambda_neg) == (2.0, 3.0, 3.0, 2.0)
    assert (c["topr"].clip_low, c["topr"].clip_high) == (0.0, 1.0)
    assert c["ipo"].penalty_coef == 2e-3
    assert c["echo"].obs_coef == 0.05
    assert [name for name in ORDER if c[name].batch_global] == ["clip_cov", "kl_cov"]
    assert (c["clip_cov"].select_ratio, c["clip_cov"].select_low, c["clip_cov"].select_high) == (2e-4, 1.0, 5.0)
    assert (c["kl_cov"].select_ratio, c["kl_cov"].select_coef) == (2e-4, 1.0)


def test_alias():
    assert fusedpg.loss_spec("dppo_kimi") == fusedpg.CATALOGUE["ipo"]


# ------------------------------------------------------------------ LossSpec


def test_frozen_hashed_compared_pickled():
    spec = fusedpg.loss_spec("ppo_clip", epsilon_high=0.3, kl="k3+", kl_coef=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.clip_low = 0.5
    same = fusedpg.loss_spec("ppo_clip", epsilon_high=0.3, kl="k3+", kl_coef=0.1)
    assert spec == same
    assert hash(spec) == hash(same)
    assert len({spec, same, fusedpg.loss_spec("ppo_clip")}) == 2
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(spec, protocol)) == spec


def test_replace_checks():
    with pytest.raises(ValueError, match="clip_low: expected clip_low <= clip_high"):
        fusedpg.CATALOGUE["ppo_clip"].replace(clip_low=2.0)


def test_spec_needs_only_the_standard_library():
    assert "torch" not in inspect.getsource(spec_module).replace("torch.compile", "")


@pytest.mark.parametrize(
    ("name", "knobs", "properties"),
    [
        ("ppo_clip", {}, set()),
        ("ppo_clip", {"kl": "k1", "kl_coef": 0.1}, {"has_kl", "needs_logp_ref"}),
        ("ppo_clip", {"kl": "k1", "kl_coef": 0.0}, set()),
        ("ppo_clip", {"kl": "k1", "kl_coef": 0.1, "kl_target": "rollout"}, {"has_kl", "needs_logp_rollout"}),
        ("ppo_clip", {"anchor": "rollout"}, {"needs_logp_rollout"}),
        ("ppo_clip", {"reduction": "seq-mean-token-sum"}, {"needs_sequences"}),
        ("gspo", {"reduction": "token-mean"}, {"needs_sequences"}),
        ("grpo", {"kl": None}, {"needs_sequences"}),
    ],
)
def test_properties(name, knobs, properties):
    spec = fusedpg.loss_spec(name, **knobs)
    every = {"has_kl", "needs_logp_ref", "needs_logp_rollout", "needs_sequences"}
    assert {p for p in every if getattr(spec, p)} == properties


# ------------------------------------------------------------------ knobs


@pytest.mark.parametrize(
    ("name", "knobs", "expected"),
    [
        ("ppo_clip", {"epsilon_low": 0.1, "epsilon_high": 0.3}, {"clip_low": 0.9, "clip_high": 1.3}),
        ("ppo_clip", {"clip_low": 0.5, "clip_high": 4}, {"clip_low": 0.5, "clip_high": 4.0}),
        ("ppo_clip", {"clip_low": None, "clip_high": None}, {"clip_low": -INF, "clip_high": INF}),
        ("ppo_clip", {"epsilon_low": 0.1}, {"clip_low": 0.9, "clip_high": 1.2}),
        ("ppo_clip", {"epsilon_low": 0.1, "epsilon_high": None}, {"clip_low": 0.9, "clip_high": 1.1}),
        ("ppo_clip", {"epsilon_low": None, "epsilon_high": 0.1}, {"clip_low": -INF, "clip_high": 1.1}),
        ("ppo_clip", {"epsilon_low": None, "epsilon_high": None}, {"clip_low": -INF, "clip_high": INF}),
        ("ppo_dual_clip", {"dual_clip": None}, {"dual_clip": INF}),
        ("ppo_clip", {"dual_clip": 2, "delta": 1.5}, {"dual_clip": 2.0, "delta": 1.5}),
        ("ppo_clip", {"log_ratio_clamp": 5}, {"log_ratio_clamp": (-5.0, 5.0)}),
        ("ppo_clip", {"log_ratio_clamp": (None, 5)}, {"log_ratio_clamp": (-INF, 5.0)}),
        ("ppo_clip", {"log_ratio_clamp": [-1, 2]}, {"log_ratio_clamp": (-1.0, 2.0)}),
        ("ppo_clip", {"log_ratio_clamp": None}, {"log_ratio_clamp": (-INF, INF)}),
        ("ppo_clip", {"anchor": "self"}, {"anchor": Anchor.SELF}),
        ("ppo_clip", {"anchor": Anchor.ROLLOUT}, {"anchor": Anchor.ROLLOUT}),
        ("ppo_clip", {"kl": "k3", "kl_coef": 1}, {"kl": KL.K3, "kl_coef": 1.0, "kl_gradient": KLGradient.OWN}),
        ("ppo_clip", {"kl": "abs+", "kl_coef": 1}, {"kl": KL.ABS, "kl_gradient": KLGradient.STRAIGHT_THROUGH}),
        ("ppo_clip", {"kl": "k3", "kl_coef": 1}, {"kl_log_ratio_clamp": (-20.0, 20.0)}),
        ("grpo", {"kl_clamp": (-10, 10)}, {"kl_clamp": (-10.0, 10.0)}),
        ("grpo", {"kl_log_ratio_clamp": None}, {"kl_log_ratio_clamp": (-INF, INF)}),
        (
            "grpo",
            {"kl_ratio": "live", "kl_target": "rollout"},
            {"kl_ratio": KLRatio.LIVE, "kl_target": KLTarget.ROLLOUT},
        ),
        ("grpo", {"kl": None}, {"kl": KL.NONE, "kl_coef": 0.0}),
        ("reinforce", {"entropy_coef": -0.01}, {"entropy_coef": -0.01}),
        (
            "grpo",
            {"reduction": "seq-mean-token-sum-fixed", "max_tokens": 7},
            {"reduction": "seq-mean-token-sum-norm", "max_tokens": 7},
        ),
        ("dr_grpo", {"reduction": "token-mean"}, {"reduction": "token-mean", "max_tokens": None}),
        ("dr_grpo", {"max_tokens": 9}, {"max_tokens": 9}),
        ("gmpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, {"token_clip": (-0.1, 0.3)}),
        ("gmpo", {"epsilon_low": 0.1, "epsilon_high": None}, {"token_clip": (-0.1, 0.1)}),
        ("dppo_tv", {"delta": 0.1}, {"keep_low": -0.1, "keep_high": 0.1}),
        ("dppo_kl", {"keep_low": -0.1}, {"keep_low": -0.1, "keep_high": 0.2}),
        ("icepop", {"alpha": 0.4, "beta": 2}, {"keep_low": 0.4, "keep_high": 2.0}),
        ("icepop", {"beta": None}, {"keep_high": INF}),
        ("sapo", {"tau_pos": 2, "tau_neg": 3.5}, {"tau_pos": 2.0, "tau_neg": 3.5}),
        ("vespo", {"k_pos": 1, "lambda_neg": 0.5}, {"k_pos": 1.0, "lambda_neg": 0.5}),
        ("dro", {"beta": 0.3}, {"penalty_coef": 0.3}),
        ("ipo", {"kl_tau": 0.25, "delta": 0.3}, {"penalty_coef": 0.5, "keep_high": 0.3}),
        ("clip_cov", {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.5, "clip_cov_ub": 9}, {"select_ratio": 0.1}),
        ("clip_cov", {"clip_cov_lb": 0.5, "clip_cov_ub": 9}, {"select_low": 0.5, "select_high": 9.0}),
        ("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 2}, {"select_ratio": 0.1, "select_coef": 2.0}),
        (
            "ppo_clip",
            {"keep": "ratio", "keep_low": 0.5, "keep_high": None, "keep_directional": True},
            {"keep": Keep.RATIO, "keep_low": 0.5, "keep_high": INF, "keep_directional": True},
        ),
        ("icepop", {"keep": None}, {"keep": Keep.NONE, "keep_low": -INF, "keep_high": INF}),
        (
            "grpo",
            {"is_correction": "truncate", "is_level": "geometric", "is_high": 2, "is_low": None},
            {"is_correction": Correction.TRUNCATE, "is_level": CorrectionLevel.GEOMETRIC, "is_high": 2.0},
        ),
        (
            "grpo",
            {"is_reject": "sequence", "is_reject_high": 2, "is_missing": "one"},
            {"is_reject": Reject.SEQUENCE, "is_reject_high": 2.0, "is_missing_one": True},
        ),
        ("grpo", {"kl_gradient": "score"}, {"kl_gradient": KLGradient.SCORE}),
        (
            "grpo",
            {"kl_forward": "k3", "kl_forward_coef": 0.5, "kl_backward": "score", "kl_backward_coef": 0.25},
            {"kl_forward": KLSampled.K3, "kl_backward": KLSampled.SCORE, "kl_backward_coef": 0.25},
        ),
        (
            "reinforce_kl",
            {"bwd_kl_coef": 0.5, "kl_approx": True},
            {"kl_backward": KLSampled.K3, "kl_backward_coef": 0.5},
        ),
        ("ppo_clip", {"obs_coef": 0.5}, {"obs_coef": 0.5}),
    ],
    ids=str,
)
def test_knobs(name, knobs, expected):
    spec = fusedpg.loss_spec(name, **knobs)
    for key, value in expected.items():
        got = getattr(spec, key)
        assert type(got) is type(value)
        assert got == (pytest.approx(value) if isinstance(value, float) else value)


NORM = {"reduction": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("pppo", {}, f"name: expected one of {', '.join(ORDER)}, dppo_kimi; got 'pppo'"),
        (
            "reinforce",
            {"clip_low": 0.1},
            "clip_low: the loss 'reinforce' never reads it; it reads anchor, entropy_coef, is_correction, ",
        ),
        ("cispo", {"dual_clip": 2.0}, "dual_clip: the loss 'cispo' never reads it"),
        ("gspo", {"delta": 2.0}, "delta: the loss 'gspo' never reads it"),
        ("ppo_clip", {"epsilon": 0.2}, "epsilon: the loss 'ppo_clip' never reads it; it reads anchor, "),
        ("ppo_clip", {"epsilon": 0.2}, "remove the knob"),
        (
            "ppo_clip",
            {"epsilon_low": 0.2, "clip_high": 1.2},
            "epsilon_low: expected either epsilon_low/epsilon_high or clip_low/clip_high; got both; remove one pair",
        ),
        ("ppo_clip", {"epsilon_low": -0.1}, "epsilon_low: expected a distance >= 0 from ratio 1; got -0.1"),
        ("ppo_clip", {"epsilon_high": NAN}, "epsilon_high: expected a number; got nan"),
        ("ppo_clip", {"epsilon_high": "0.2"}, "epsilon_high: expected a number; got '0.2'"),
        ("ppo_clip", {"epsilon_high": True}, "epsilon_high: expected a number; got True"),
        ("ppo_clip", {"clip_low": 2.0}, "clip_low: expected clip_low <= clip_high; got clip_low=2.0, clip_high=1.2"),
        (
            "ppo_clip",
            {"dual_clip": 1.0},
            "dual_clip: expected a number > 1 (it caps the loss of negative advantages at",
        ),
        ("ppo_clip", {"dual_clip": 1.0}, "got 1.0; use None to switch it off"),
        ("ppo_clip", {"delta": 0.5}, "delta: expected a number > 1 (an upper clamp of the ratio); got 0.5; use None"),
        (
            "ppo_clip",
            {"log_ratio_clamp": (1, 2, 3)},
            "log_ratio_clamp: expected a number or (low, high); got (1, 2, 3)",
        ),
        (
            "ppo_clip",
            {"log_ratio_clamp": -1},
            "log_ratio_clamp: a single number is a symmetric bound and must be >= 0; got -1",
        ),
        (
            "ppo_clip",
            {"log_ratio_clamp": (2, 1)},
            "log_ratio_clamp: expected (low, high) with low <= high; got (2.0, 1.0)",
        ),
        ("ppo_clip", {"log_ratio_clamp": "20"}, "log_ratio_clamp: expected a number; got '20'"),
        ("ppo_clip", {"anchor": "new"}, "anchor: expected one of old, self, rollout; got 'new'"),
        ("grpo", {"kl": "k4"}, "kl: expected None, k1, k2, k3 or abs, with an optional trailing '+'; got 'k4'"),
        ("grpo", {"kl": "none"}, "kl: expected None, k1, k2, k3 or abs"),
        ("grpo", {"kl": "NONE"}, "kl: expected None, k1, k2, k3 or abs"),
        ("grpo", {"kl": "+"}, "kl: expected None, k1, k2, k3 or abs"),
        ("grpo", {"kl_coef": -0.1}, "kl_coef: expected a finite number >= 0; got -0.1"),
        ("grpo", {"kl_coef": INF}, "kl_coef: expected a finite number; got inf"),
        ("ppo_clip", {"kl_coef": 0.1}, "kl_coef: 0.1 needs an estimator; pass kl='k3' (or k1, k2, abs) as well"),
        ("grpo", {"kl_target": "old"}, "kl_target: expected one of ref, rollout; got 'old'"),
        ("grpo", {"kl_ratio": "yes"}, "kl_ratio: expected one of none, detached, live; got 'yes'"),
        ("grpo", {"entropy_coef": INF}, "entropy_coef: expected a finite number; got inf"),
        (
            "grpo",
            {"reduction": "mean"},
            f"reduction: expected one of {', '.join(REDUCTIONS)}, seq-mean-token-sum-fixed; got 'mean'",
        ),
        (
            "grpo",
            NORM,
            "max_tokens: reduction 'seq-mean-token-sum-norm' divides by it and expects a positive int; got None; pass",
        ),
        *(
            (
                "grpo",
                {**NORM, "max_tokens": value},
                f"expects a positive int; got {value!r}; pass the fixed response budget",
            )
            for value in (0, -1, 1.5, True, "8")
        ),
        (
            "grpo",
            {"max_tokens": 8},
            "max_tokens: reduction 'seq-mean-token-mean' never reads it; got 8; remove it or use",
        ),
        ("dro", {}, "beta: the loss 'dro' has no default for it; got none; pass beta=..."),
        ("dro", {"beta": 0}, "beta: expected a number > 0; got 0; without a penalty use 'reinforce'"),
        ("dppo_tv", {"delta": -0.1}, "delta: expected a divergence >= 0; got -0.1"),
        ("ppo_clip", {"tau_pos": 1.0}, "tau_pos: the loss 'ppo_clip' never reads it"),
        ("sapo", {"tau_pos": 0}, "tau_pos, tau_neg: expected numbers > 0; got 0.0, 1.05"),
        ("sapo", {"epsilon_low": 0.1}, "epsilon_low: the loss 'sapo' never reads it"),
        ("gmpo", {"clip_high": 2.0}, "clip_high: this loss clips the log-ratio, not the ratio; got 2.0; pass epsilon"),
        ("gmpo", {"epsilon_high": 0.1}, "epsilon_high: expected epsilon_low and epsilon_high together; got one"),
        ("gmpo", {"keep": "ratio"}, "keep: the loss 'gmpo' never reads it"),
        ("icepop", {"keep_low": 6}, "keep_low: expected keep_low <= keep_high; got keep_low=6.0, keep_high=5.0"),
        ("ppo_clip", {"keep_low": 0.5}, "keep_low, keep_high: got (0.5, inf) without a mask; pass keep='ratio'"),
        ("ppo_clip", {"keep": "tv"}, "keep: 'tv' expects keep_low or keep_high; got neither"),
        ("ppo_clip", {"keep": "kll"}, "keep: expected one of none, ratio, tv, kl; got 'kll'"),
        ("gspo_token", {"keep": "tv", "keep_high": 0.1}, "keep: 'tv' compares a token's probabilities; got level"),
        ("ppo_clip", {"keep_directional": 1}, "keep_directional: expected True or False; got 1"),
        ("ppo_clip", {"is_high": 2.0}, "is_low, is_high: got (-inf, 2.0), which nothing reads; pass is_correction"),
        ("ppo_clip", {"is_correction": "clip"}, "is_correction: expected one of none, truncate, mask; got 'clip'"),
        (
            "ppo_clip",
            {"is_correction": "mask", "is_low": 3, "is_high": 2},
            "is_low: expected is_low <= is_high; got is_low=3.0, is_high=2.0",
        ),
        ("ppo_clip", {"is_correction": "mask", "is_high": 0}, "is_high: expected a bound > 0 of a weight; got 0.0"),
        ("ppo_clip", {"is_reject": "token"}, "is_reject: expects is_reject_low or is_reject_high; got neither"),
        ("ppo_clip", {"is_reject_high": 2}, "is_reject_low, is_reject_high: got (-inf, 2.0), which nothing reads"),
        ("ppo_clip", {"is_missing": "zero"}, "is_missing: expected 'nan' (it stays visible) or 'one' (weight 1)"),
        (
            "vespo",
            {"is_correction": "mask", "is_high": 2, "is_level": "sequence"},
            "is_level: the loss multiplies the weights of a sequence's tokens into its own product",
        ),
        ("grpo", {"kl_gradient": "own+"}, "kl_gradient: expected one of own, straight_through, score; got 'own+'"),
        ("ppo_clip", {"kl_forward_coef": 0.1}, "kl_forward_coef: 0.1 needs an estimator; pass kl_forward='score'"),
        ("ppo_clip", {"kl_forward": "k3", "kl_forward_coef": -1}, "kl_forward_coef: expected a number >= 0; got -1.0"),
        ("ppo_clip", {"obs_coef": INF}, "obs_coef: expected a finite number; got inf"),
        ("clip_cov", {"clip_cov_ratio": 0}, "select_ratio: expected a share of the tokens in (0, 1]; got 0.0"),
        ("kl_cov", {"kl_cov_ratio": 1.5}, "select_ratio: expected a share of the tokens in (0, 1]; got 1.5"),
    ],
    ids=str,
)
def test_refused_knobs(name, knobs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fusedpg.loss_spec(name, **knobs)


def test_refused_level():
    with pytest.raises(
        ValueError,
        match=re.escape("level: surrogate 'reinforce' has no ratio of its own, so it has no sequence level; use"),
    ):
        fusedpg.CATALOGUE["reinforce"].replace(level=Level.SEQUENCE)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("vespo", {"level": Level.SEQUENCE}, "level: surrogate 'vespo' has no ratio of its own"),
        ("ppo_clip", {"token_clip": (-1.0, 1.0)}, "token_clip: it bounds a token's log-ratio before its sequence's"),
        ("gspo", {"penalty_coef": 0.1}, "penalty_coef: the squared log-ratio is a token's; got level 'sequence'"),
        ("dro", {"penalty_coef": -0.1}, "penalty_coef: expected a number >= 0; got -0.1"),
        ("gspo_token", {"selection": Selection.KL_COV, "select_ratio": 0.1}, "selection: it picks tokens by their own"),
    ],
)
def test_refused_fields(name, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fusedpg.CATALOGUE[name].replace(**fields)


@pytest.mark.parametrize("field", ["clip_low", "clip_high", "dual_clip", "delta", "kl_coef", "entropy_coef"])
def test_nan_fields_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}: expected a"):
        fusedpg.CATALOGUE["ppo_clip"].replace(**{field: NAN})


def test_inert_kl_warns():
    with pytest.warns(UserWarning, match="kl: 'k3' is inert because kl_coef is 0; pass kl_coef"):
        fusedpg.loss_spec("ppo_clip", kl="k3")


@pytest.mark.parametrize(
    "knob", [{"kl_clamp": 10}, {"kl_ratio": "live"}, {"kl_target": "rollout"}, {"kl_log_ratio_clamp": 5}], ids=str
)
def test_inert_kl_options_warn(knob):
    """A knob that is honoured but has no effect says so."""
    with pytest.warns(UserWarning, match=f"{next(iter(knob))}: .*inert"):
        fusedpg.loss_spec("ppo_clip", **knob)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("ppo_clip", {"kl_forward": "k3"}, "kl_forward: 'k3' is inert because kl_forward_coef is 0"),
        ("ppo_clip", {"is_level": "sequence"}, "is_level: 'sequence' is inert because the loss forms no correction"),
        ("ppo_clip", {"keep_directional": True}, "keep_directional: True is inert because the loss has no keep mask"),
        ("reinforce", {"anchor": "rollout"}, "anchor: 'rollout' is inert because the loss 'reinforce' forms no ratio"),
    ],
    ids=str,
)
def test_inert_knobs_warn(name, knobs, message):
    with pytest.warns(UserWarning, match=re.escape(message)):
        fusedpg.loss_spec(name, **knobs)


# ------------------------------------------------------------------ encoding


def test_encode_layout():
    """Position by position, as the kernels read it."""
    spec = LossSpec(
        "x",
        Surrogate.CLIPPED_RATIO,
        Level.SEQUENCE_TOKEN,
        Anchor.ROLLOUT,
        clip_low=0.7,
        clip_high=1.4,
        dual_clip=3.5,
        delta=2.5,
        log_ratio_clamp=(-8.0, 9.0),
        kl=KL.ABS,
        kl_gradient=KLGradient.SCORE,
        kl_coef=0.25,
        kl_target=KLTarget.ROLLOUT,
        kl_ratio=KLRatio.LIVE,
        kl_clamp=(-1.0, 2.0),
        kl_log_ratio_clamp=(-3.0, 4.0),
        entropy_coef=0.125,
        keep=Keep.RATIO,
        keep_low=0.1,
        keep_high=6.0,
        keep_directional=True,
        is_correction=Correction.MASK,
        is_level=CorrectionLevel.GEOMETRIC,
        is_low=0.3,
        is_high=1.7,
        is_reject=Reject.SEQUENCE,
        is_reject_low=0.2,
        is_reject_high=7.0,
        is_missing_one=True,
        obs_coef=0.75,
        kl_forward=KLSampled.K3,
        kl_forward_coef=0.0625,
        kl_backward=KLSampled.SCORE,
        kl_backward_coef=0.03125,
        k_pos=1.5,
        k_neg=2.25,
        lambda_pos=3.25,
        lambda_neg=4.25,
        log_w_clamp=(-5.0, 6.0),
        select_coef=0.375,
    )
    expected = [2, 2, 2, 0.7, 1.4, 3.5, 2.5, -8, 9, 4, 0.25, 1, 2, 2, -1, 2, -3, 4, 0.125]
    expected += [1, 1, 0.1, 6, 2, 2, 0.3, 1.7, 2, 0.2, 7, 1, -INF, INF, 0, 0, 0.375, 0.75, 2, 0.0625]
    expected += [1.5, 2.25, 3.25, 4.25, -5, 6, 1, 0.03125, 0]
    assert spec.encode() == expected
    assert len(spec.encode()) == NPARAMS == 48
    sapo = fusedpg.loss_spec("sapo", tau_pos=2.0, tau_neg=3.0).encode()
    assert sapo[39:41] == [2, 3], "the shape parameters of sapo and vespo share their places"
    assert all(type(number) is float for number in spec.encode())


def test_encode_defaults():
    bare = LossSpec("x", Surrogate.REINFORCE).encode()
    none = (-INF, INF)
    expected = [0, 0, 0, *none, INF, INF, *none, 0, 0, 0, 0, 0, *none, *none, 0]
    expected += [0, 0, *none, 0, 0, *none, 0, *none, 0, *none, *[0] * 10, *none, 0, 0, 0]
    assert bare == expected


def test_encode_switches_an_inert_kl_off():
    spec = fusedpg.loss_spec("grpo", kl_coef=0.0)
    assert spec.encode()[9] == 0


def test_codes_are_fixed():
    names = ["REINFORCE", "IMPORTANCE_RATIO", "CLIPPED_RATIO", "CISPO", "SAPO", "TOPR", "VESPO"]
    assert {s.name: s.value for s in Surrogate} == {name: i for i, name in enumerate(names)}
    assert {s.name: s.value for s in Level} == {"TOKEN": 0, "SEQUENCE": 1, "SEQUENCE_TOKEN": 2}
    assert {s.name: s.value for s in Anchor} == {"OLD": 0, "SELF": 1, "ROLLOUT": 2}
    assert {s.name: s.value for s in KL} == {"NONE": 0, "K1": 1, "K2": 2, "K3": 3, "ABS": 4}
    assert {s.name: s.value for s in KLTarget} == {"REF": 0, "ROLLOUT": 1}
    assert {s.name: s.value for s in KLRatio} == {"NONE": 0, "DETACHED": 1, "LIVE": 2}
    assert {s.name: s.value for s in KLGradient} == {"OWN": 0, "STRAIGHT_THROUGH": 1, "SCORE": 2}
    assert {s.name: s.value for s in KLSampled} == {"NONE": 0, "SCORE": 1, "K3": 2}
    assert {s.name: s.value for s in Keep} == {"NONE": 0, "RATIO": 1, "TV": 2, "KL": 3}
    assert {s.name: s.value for s in Correction} == {"NONE": 0, "TRUNCATE": 1, "MASK": 2}
    assert {s.name: s.value for s in CorrectionLevel} == {"TOKEN": 0, "SEQUENCE": 1, "GEOMETRIC": 2}
    assert {s.name: s.value for s in Reject} == {"NONE": 0, "TOKEN": 1, "SEQUENCE": 2, "GEOMETRIC": 3}
    assert {s.name: s.value for s in Selection} == {"NONE": 0, "CLIP_COV": 1, "KL_COV": 2}


# ------------------------------------------------------------------ one function for every member, in three languages

#: terms that all three write, in the order of the files
TERMS = [
    *(member.name.lower() for member in Surrogate),
    "surrogate",
    "clip_tokens",
    "binary_kl",
    "dropped",
    *(f"kl_{member.name.lower()}" for member in KL if member),
    "kl_term",
    *(f"{term}_{member.name.lower()}" for term in ("kl_backward", "kl_forward") for member in KLSampled if member),
    "kl_backward",
    "kl_forward",
]
WEIGHTS = ["bound_weight", "rejected", "correction_weight"]
PATTERNS = {"csrc": (r"^FPG_FN .*?(\w+)\(", "*.h"), "kernels": (r"^def (\w+)\(", "*.py")}


def source(path: str) -> str:
    return (ROOT / path).read_text()


def functions(folder: str) -> list[str]:
    """Every function of a backend, file by file."""
    pattern, files = PATTERNS[folder]
    texts = [path.read_text() for path in sorted((ROOT / folder).glob(files))]
    return [name for text in texts for name in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize("name", [*TERMS, *WEIGHTS])
def test_reference_has_the_function(name):
    assert callable(getattr(reference_terms, name, None)), f"write reference_terms.{name}"


@pytest.mark.parametrize("folder", ["csrc", "kernels"])
@pytest.mark.parametrize("name", [*TERMS, *WEIGHTS, "token_terms"])
def test_backends_have_the_function(name, folder):
    assert name in functions(folder), f"write {name} in {folder}"


def test_functions_come_in_the_same_order():
    def ordered(path, pattern):
        return [name for name in re.findall(pattern, source(path), re.MULTILINE) if name in TERMS]

    assert ordered("csrc/terms.h", PATTERNS["csrc"][0]) == TERMS
    assert ordered("kernels/terms.py", PATTERNS["kernels"][0]) == TERMS
    assert ordered("python/fusedpg/reference_terms.py", r"^def (\w+)\(") == TERMS


def cpp_enum(name: str) -> dict[str, int]:
    """Enumerators of csrc/spec.h."""
    body = re.search(rf"enum (?:class )?{name}\b[^{{]*{{([^}}]*)}}", source("csrc/spec.h")).group(1)
    return {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}


@pytest.mark.parametrize(
    ("enum", "name"),
    [
        (Surrogate, "Surrogate"),
        (Level, "Level"),
        (Anchor, "Anchor"),
        (KL, "Kl"),
        (KLTarget, "KlTarget"),
        (KLRatio, "KlRatio"),
        (KLGradient, "KlGradient"),
        (KLSampled, "KlSampled"),
        (Keep, "Keep"),
        (Correction, "Correction"),
        (CorrectionLevel, "CorrectionLevel"),
        (Reject, "Reject"),
        (Selection, "Selection"),
    ],
)
def test_cpp_codes(enum, name):
    assert list(cpp_enum(name).values()) == [member.value for member in enum]
    if name != "Surrogate":  # the surrogates have short names there
        assert list(cpp_enum(name)) == [member.name.lower() for member in enum]


#: parameter names in the order of LossSpec.encode()
PARAMETERS = [
    "SURROGATE",
    "LEVEL",
    "ANCHOR",
    "CLIP_LOW",
    "CLIP_HIGH",
    "DUAL_CLIP",
    "DELTA",
    "LOG_RATIO_LO",
    "LOG_RATIO_HI",
    "KL",
    "KL_COEF",
    "KL_TARGET",
    "KL_RATIO",
    "KL_GRADIENT",
    "KL_LO",
    "KL_HI",
    "KL_LOG_RATIO_LO",
    "KL_LOG_RATIO_HI",
    "ENTROPY_COEF",
    "KEEP",
    "KEEP_DIRECTIONAL",
    "KEEP_LOW",
    "KEEP_HIGH",
    "CORRECTION",
    "CORRECTION_LEVEL",
    "CORRECTION_LOW",
    "CORRECTION_HIGH",
    "REJECT",
    "REJECT_LOW",
    "REJECT_HIGH",
    "MISSING_ONE",
    "TOKEN_CLIP_LO",
    "TOKEN_CLIP_HI",
    "PENALTY_COEF",
    "SELECTION",
    "SELECT_COEF",
    "OBS_COEF",
    "KL_FORWARD",
    "KL_FORWARD_COEF",
    "SHAPE_POS",
    "SHAPE_NEG",
    "LAMBDA_POS",
    "LAMBDA_NEG",
    "LOG_W_LO",
    "LOG_W_HI",
    "KL_BACKWARD",
    "KL_BACKWARD_COEF",
]


def test_cpp_parameter_indices():
    got = cpp_enum("Param")
    assert got.pop("NPARAMS") == NPARAMS
    assert got == {f"P_{name}": i for i, name in enumerate(PARAMETERS)}


def test_triton_parameter_indices():
    got = {
        n: int(i)
        for n, i in re.findall(r"^([A-Z_]+) = tl\.constexpr\((\d+)\)$", source("kernels/codes.py"), re.MULTILINE)
    }
    assert {name: got.get(name) for name in PARAMETERS} == {name: i for i, name in enumerate(PARAMETERS)}


def test_cpp_metric_positions():
    got = cpp_enum("Sum")
    assert got.pop("NSUMS") == NSUMS == len(SUM_NAMES)
    assert list(got.values()) == list(range(NSUMS))
    assert [name for name in SUM_NAMES if f"S_{name.upper()}" in got][:2] == ["numerator", "tokens"]


#: read by fusedpg.weights and fusedpg.selection, not by the kernels
PYTHON_ONLY = ("name", "reduction", "max_tokens", "select_ratio", "select_low", "select_high")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LossSpec) if f.name not in PYTHON_ONLY])
def test_every_field_reaches_the_kernels(name):
    """Changing any field that the kernels read changes the encoding."""
    base = LossSpec(
        "x",
        Surrogate.CLIPPED_RATIO,
        kl=KL.K1,
        kl_coef=0.5,
        kl_forward=KLSampled.K3,
        kl_forward_coef=0.5,
        kl_backward=KLSampled.K3,
        kl_backward_coef=0.5,
        keep=Keep.RATIO,
        keep_low=0.5,
        keep_high=1.5,
        is_correction=Correction.TRUNCATE,
        is_low=0.5,
        is_high=1.5,
        is_reject=Reject.TOKEN,
        is_reject_low=0.5,
        is_reject_high=1.5,
    )
    if name.startswith("tau_"):
        base = base.replace(surrogate=Surrogate.SAPO)
    elif name == "token_clip":
        base = base.replace(level=Level.SEQUENCE)
    elif name == "selection":
        base = base.replace(select_ratio=0.1)
    value = getattr(base, name)
    if isinstance(value, tuple):
        other = (-1.0, 1.0)
    elif isinstance(value, bool):
        other = not value
    elif name.endswith("_low"):
        other = 0.75
    elif isinstance(value, float):
        other = 2.0
    else:
        other = list(type(value))[1 if value != list(type(value))[1] else 2]
    changed = [
        i for i, (a, b) in enumerate(zip(base.encode(), base.replace(**{name: other}).encode(), strict=True)) if a != b
    ]
    assert len(changed) == (2 if isinstance(other, tuple) else 1)
