"""Selectors, migration, and what preflight refuses, warns of and lets pass: the guide's rules as tables."""

import warnings
from types import SimpleNamespace

import pytest
from toy import CONTEXT

from fusedpg.builders import build_grpo_objective, build_opd_objective
from fusedpg.config import (
    DPOConfig,
    GRPOConfig,
    JobConfig,
    OPDConfig,
    RolloutConfig,
    RunConfig,
    positive_int,
    with_options,
)
from fusedpg.preflight import preflight
from fusedpg.recipes import RECIPES, build_gspo_config

SEQUENCE = {"importance_sampling_level": "sequence", "lower_bound_ratio": 0, "epsilon_low": 3e-4, "epsilon_high": 4e-4}


def config(kind, rl, rollout=None):
    return RunConfig(rl=kind(**rl), rollout=RolloutConfig(**(rollout or {})))


# ------------------------------------------------------------------ selectors and migration


def test_selectors_and_defaults():
    """`grpo_surrogate` is clipped | legacy_pg, default clipped; `distillation_mode` advantage | direct, default advantage."""
    assert GRPOConfig().grpo_surrogate == "clipped"
    assert OPDConfig().distillation_mode == "advantage"
    assert GRPOConfig().importance_sampling_level == "token"
    for value in ("clipped", "legacy_pg"):
        GRPOConfig(grpo_surrogate=value)
    for value in ("direct", "advantage"):
        OPDConfig(distillation_mode=value)
    with pytest.raises(ValueError, match=r"^rl.grpo_surrogate: expected one of clipped, legacy_pg; got 'gspo'"):
        GRPOConfig(grpo_surrogate="gspo")
    with pytest.raises(ValueError, match=r"^rl.distillation_mode: expected one of advantage, direct; got 'kl'"):
        OPDConfig(distillation_mode="kl")


@pytest.mark.parametrize(
    ("kind", "key", "value", "now"),
    [
        (GRPOConfig, "objective", "degenerate", "grpo_surrogate"),
        (GRPOConfig, "objective", "clipped", "grpo_surrogate"),
        (OPDConfig, "objective_mode", "direct", "distillation_mode"),
        (OPDConfig, "objective_mode", "advantage", "distillation_mode"),
    ],
)
def test_old_keys_are_unknown(kind, key, value, now):
    """rl.objective and rl.objective_mode are unknown keys: no alias, no precedence, a stale recipe fails."""
    message = rf"rl.{key}: unknown key of {kind.__name__}; expected one of .*; it is rl.{now}"
    with pytest.raises(ValueError, match=message):
        kind.from_mapping({key: value})
    with pytest.raises(AttributeError, match=message):
        setattr(kind(), key, value)
    with pytest.raises(ValueError, match=message):
        with_options(RunConfig(rl=kind()), [f"rl.{key}={value}"])
    with pytest.raises(TypeError, match=key):
        kind(**{key: value})


def test_degenerate_is_no_value_any_more():
    """degenerate -> legacy_pg: the old value is no alias either."""
    with pytest.raises(ValueError, match="grpo_surrogate: expected one of clipped, legacy_pg; got 'degenerate'"):
        GRPOConfig(grpo_surrogate="degenerate")


def test_options_override_in_order():
    """Invariants appended after user options win; values are typed and checked."""
    cfg = with_options(build_gspo_config(), ["rl.epsilon_low=0.1", "rollout.max_tokens=64", "rl.epsilon_low=3e-4"])
    assert cfg.rl.epsilon_low == 3e-4
    assert cfg.rollout.max_tokens == 64
    assert with_options(cfg, ["job.name=run", "rl.unbiased_advantage=True"]).rl.unbiased_advantage is True
    for option, message in [
        ("rl.epsilon_low", "options: expected section.key=value"),
        ("rl.nothing=1", "rl.nothing: unknown key of GRPOConfig"),
        ("nothing.x=1", "nothing: unknown key of RunConfig"),
        ("rl.epsilon_low.x=1", "rl.epsilon_low.x: unknown key"),
        ("rollout.max_tokens=1.5", "rollout.max_tokens: expected a positive int; got 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            with_options(build_gspo_config(), [option])


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize("value", [True, False, 1.5, 64.0, 0, -3, "64", None])
def test_response_bound_is_a_positive_int(value):
    """RolloutConfig and the driver preflight reject bool, fractional, zero and negative bounds; so does the builder."""
    with pytest.raises(ValueError, match=r"^rollout.max_tokens: expected a positive int; got"):
        RolloutConfig(max_tokens=value)
    rollout = RolloutConfig()
    with pytest.raises(ValueError, match=r"^rollout.max_tokens: expected a positive int"):
        rollout.max_tokens = value
    object.__setattr__(rollout, "max_tokens", value)  # a config that did not come through its own checks
    with pytest.raises(ValueError, match=r"^rollout.max_tokens: expected a positive int"):
        preflight(RunConfig(rollout=rollout))
    rl = GRPOConfig(loss_type="seq-mean-token-sum-fixed")
    with pytest.raises(ValueError, match=r"^max_response_length: expected a positive int; got"):
        build_grpo_objective(rl, SimpleNamespace(name_or_path="m", max_response_length=value))
    with pytest.raises(ValueError, match=r"^x: expected a positive int"):
        positive_int("x", value)


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        (GRPOConfig, "temperature", [0, -1.0, float("inf"), float("nan"), True, "1"]),
        (RolloutConfig, "temperature", [0, True, None]),
        (GRPOConfig, "epsilon_low", [-0.1, True, float("nan")]),
        (GRPOConfig, "epsilon_high", [-0.1, "0.2"]),
        (GRPOConfig, "lower_bound_ratio", [1.0, 0.5, -1, True]),
        (GRPOConfig, "kl_beta", [-1, True]),
        (GRPOConfig, "loss_type", ["token-sum", None]),
        (GRPOConfig, "importance_sampling_level", ["response"]),
        (GRPOConfig, "unbiased_advantage", [1, "True"]),
        (GRPOConfig, "mini_batch_per_replica", [0, True, 2.0]),
        (GRPOConfig, "epochs", [0, None]),
        (OPDConfig, "divergence", ["kl"]),
        (OPDConfig, "jsd_beta", [0, 1, True]),
        (DPOConfig, "loss", ["hinge"]),
        (DPOConfig, "beta", [0, -1]),
        (DPOConfig, "label_smoothing", [-0.1, 0.5]),
        (JobConfig, "name", ["", None]),
    ],
)
def test_a_value_is_checked_where_it_is_set(kind, key, values):
    """Config has one owner, one default and one validation for each user-visible value."""
    for value in values:
        with pytest.raises(ValueError, match=rf"\.?{key}: expected .*; got"):
            kind(**{key: value})


# ------------------------------------------------------------------ preflight

CLIPPED_ONLY = {
    "epsilon_low": 0.1,
    "epsilon_high": 0.3,
    "lower_bound_ratio": 0,
    "kl_beta": 0.1,
    "loss_type": "seq-mean-token-mean",
    "importance_sampling_level": "sequence",
    "certified_deterministic_forward": True,
    "temperature": 0.7,
}
REFUSED = [
    # the clipped on-policy surrogate: one temperature
    (
        GRPOConfig,
        {"temperature": 0.7},
        {"temperature": 1.0},
        r"^rollout.temperature: .*expected rl.temperature=0.7; got 1.0",
    ),
    (GRPOConfig, {}, {"temperature": 0.6}, r"^rollout.temperature: .*expected rl.temperature=1.0; got 0.6"),
    (OPDConfig, {}, {"temperature": 0.6}, r"^rollout.temperature: distillation_mode='advantage'"),
    # legacy_pg requires rollout.temperature = 1.0 ...
    (GRPOConfig, {"grpo_surrogate": "legacy_pg"}, {"temperature": 0.7}, r"^rollout.temperature: .*legacy_pg.*got 0.7"),
    # ... leaves rl.temperature at its default, and reads no clip, reduction, KL or level
    *(
        (GRPOConfig, {"grpo_surrogate": "legacy_pg", k: v}, {}, rf"^rl.{k}: grpo_surrogate='legacy_pg' never reads it")
        for k, v in CLIPPED_ONLY.items()
    ),
    # direct distillation reads neither clip nor advantage
    *(
        (OPDConfig, {"distillation_mode": "direct", k: v}, {}, rf"^rl.{k}: distillation_mode='direct' never reads it")
        for k, v in {**CLIPPED_ONLY, "unbiased_advantage": True}.items()
        if k not in ("temperature", "loss_type")
    ),
    (
        OPDConfig,
        {"distillation_mode": "direct", "jsd_beta": 0.2},
        {},
        r"^rl.jsd_beta: divergence='reverse_kl' never reads it",
    ),
    # advantage mode: the teacher's signal is the advantage, one a token
    (
        OPDConfig,
        {"unbiased_advantage": True},
        {},
        r"^rl.unbiased_advantage: distillation_mode='advantage' never reads it",
    ),
    (OPDConfig, {"divergence": "jsd"}, {}, r"^rl.divergence: distillation_mode='advantage' never reads it"),
    (OPDConfig, {"jsd_beta": 0.2}, {}, r"^rl.jsd_beta: distillation_mode='advantage' never reads it"),
    (OPDConfig, SEQUENCE, {}, r"^rl.importance_sampling_level: distillation_mode='advantage' never reads it"),
    # the sequence level refuses the dual clip, its default too
    (
        GRPOConfig,
        {**SEQUENCE, "lower_bound_ratio": 3.0},
        {},
        r"^rl.lower_bound_ratio: .*'sequence' never reads the dual clip",
    ),
    (GRPOConfig, {"importance_sampling_level": "sequence"}, {}, r"^rl.lower_bound_ratio: .*set it to 0"),
    (
        GRPOConfig,
        {"mini_batch_per_replica": 16, "batch_per_replica": 8},
        {},
        r"^rl.mini_batch_per_replica: expected at most batch_per_replica=8; got 16",
    ),
    (
        DPOConfig,
        {"loss": "ipo", "label_smoothing": 0.1},
        {},
        r"^rl.label_smoothing: loss='ipo' never reads it; got 0.1",
    ),
]


@pytest.mark.parametrize(("kind", "rl", "rollout", "message"), REFUSED)
def test_refused(kind, rl, rollout, message):
    """A non-default knob that the selected objective never reads is rejected, before placement or construction."""
    with pytest.raises(ValueError, match=message):
        preflight(config(kind, rl, rollout))


#: the builder does not know the rollout, and DPO has its own
WITHOUT_ROLLOUT = [
    (kind, rl, message) for kind, rl, rollout, message in REFUSED if not rollout and kind is not DPOConfig
]


@pytest.mark.parametrize(("kind", "rl", "message"), WITHOUT_ROLLOUT)
def test_the_builder_refuses_the_same_knobs(kind, rl, message):
    """The objective factory keeps the validation as a worker-side backstop."""
    build = build_grpo_objective if kind is GRPOConfig else build_opd_objective
    with pytest.raises(ValueError, match=message):
        build(kind(**rl), CONTEXT)


ACCEPTED = [
    (GRPOConfig, {}, {}),
    (GRPOConfig, {"temperature": 0.7}, {"temperature": 0.7}),
    (GRPOConfig, {"grpo_surrogate": "legacy_pg", "unbiased_advantage": True}, {}),
    (GRPOConfig, {**SEQUENCE, "mini_batch_per_replica": 4, "batch_per_replica": 8}, {}),
    (GRPOConfig, {**SEQUENCE, "mini_batch_per_replica": 4}, {}),
    (GRPOConfig, {"epsilon_high": 0.28, "epochs": 2}, {}),
    (OPDConfig, {"kl_beta": 0.1, "loss_type": "seq-mean-token-mean"}, {}),
    (DPOConfig, {"label_smoothing": 0.1}, {}),
]


@pytest.mark.parametrize(("kind", "rl", "rollout"), ACCEPTED)
def test_accepted_without_a_word(kind, rl, rollout):
    preflight(config(kind, rl, rollout))  # a warning would be an error here


WARNED = [
    # an on-policy ratio at n_mini == 1
    (
        {**SEQUENCE, "mini_batch_per_replica": 8, "batch_per_replica": 8},
        r"^rl.importance_sampling_level: .*n_mini == 1",
    ),
    ({**SEQUENCE}, r"^rl.importance_sampling_level: 'sequence' is inert .*n_mini == 1"),
    ({"epsilon_high": 0.28}, r"^rl.epsilon_high: 0.28 is inert because each collected batch serves one update"),
    # token-scale epsilons at the sequence level
    (
        {"importance_sampling_level": "sequence", "lower_bound_ratio": 0, "epochs": 2},
        r"^epsilon_low, epsilon_high: 0.2, 0.2 have a token's scale",
    ),
]


@pytest.mark.parametrize(("rl", "message"), WARNED)
def test_warned(rl, message):
    """A knob that is honoured but inert is warned of, not rejected."""
    with pytest.warns(UserWarning, match=message):
        preflight(config(GRPOConfig, rl))


def test_direct_distillation_says_what_it_does_not_read():
    """Direct OPD warns that task reward and group advantage are not training signals; rewards still serve elsewhere."""
    with pytest.warns(UserWarning, match="task reward and group advantage are not training signals") as caught:
        preflight(config(OPDConfig, {"distillation_mode": "direct", "temperature": 0.7}, {"temperature": 1.0}))
    text = str(caught[0].message)
    assert "reward-stage metrics, held-out evaluation and optional shared-prefix masking" in text


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_pass(name):
    """Recipes resolve, pass preflight silently, and differ in `algorithm` and `job.name` for provenance and resume."""
    cfg = RECIPES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preflight(cfg)
    assert cfg.algorithm == cfg.job.name == name
    assert RECIPES[name]() is not cfg
