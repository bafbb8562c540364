"""The TRL preset: metric names, options and defaults, refusals, denominators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl==1.16.0 (the `dev` extra)")

import fusedpg
from fusedpg import presets
from fusedpg.certify import against_trl
from fusedpg.certify.cases import make_policy_batch
from fusedpg.certify.trl_cases import CORRECTIONS, KLS, LOSSES, Case, quadratic_entropy
from fusedpg.certify.trl_oracle import load
from fusedpg.presets import _trl
from fusedpg.spec import Anchor, Level

SEQUENCE = {"importance_sampling_level": "sequence"}
DETACHED, LIVE = KLS[1:]
TOKEN_CLIP, TOKEN_MASK = CORRECTIONS[1:3]


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------ metrics

CLIP_NAMES = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
METRICS: list[tuple[str, dict[str, Any], set[str]]] = [
    *((loss, {"epsilon": 0.15, "delta": 1.3}, CLIP_NAMES) for loss in LOSSES[:5]),
    ("dapo", {"delta": 1.1}, {"clip_ratio/low_mean"}),
    ("dapo", {**SEQUENCE, **DETACHED}, {"kl"}),
    ("grpo", DETACHED, {"kl", *CLIP_NAMES}),
    ("grpo", LIVE, CLIP_NAMES),
    ("dapo", {**TOKEN_MASK, **DETACHED}, {"kl", *CLIP_NAMES}),
    ("cispo", {"epsilon_high": 1.1}, {"cispo_clip_ratio"}),
    ("cispo", {**SEQUENCE, "epsilon_high": 1.05}, set()),
    ("sapo", DETACHED, {"kl"}),
    ("vespo", DETACHED, {"kl"}),
]


@pytest.mark.parametrize(("loss", "options", "names"), METRICS)
def test_named_metrics_are_trl_numbers(loss: str, options: dict[str, Any], names: set[str], backend: str) -> None:
    for kind in ("ragged", "holes", "masked-row", "inf-masked"):
        batch = against_trl.batch_for(kind, options)
        case = Case(loss, options, batch, entropy_of=quadratic_entropy)
        spec = case.spec
        out = case.ours(spec, batch.logp, case.normalizer(spec), backend)
        ours = {name: value.item() for name, value in spec.named_metrics(out.metrics).items()}
        _, theirs = case.theirs(batch.cleaned().logp.double())
        assert set(ours) == {"entropy", *names}
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=2e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "theirs", "ours"),
    [
        ({**LIVE, "epsilon": 0.1}, "kl", "kl"),
        ({"epsilon": 0.05, "delta": 1.03}, "clip_ratio/high_mean", "clip_frac_high"),
        ({**SEQUENCE, "epsilon": 0.02}, "clip_ratio/region_mean", "clip_frac"),
    ],
)
def test_metrics_without_a_name_are_other_numbers(options: dict[str, Any], theirs: str, ours: str) -> None:
    batch = replace(make_policy_batch("masked-row"), advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]))
    case = Case("dapo", options, batch)
    out = case.ours(case.spec, batch.logp, 1.0, "reference")
    assert theirs not in dict(case.spec.metric_names)
    assert case.theirs(batch.cleaned().logp.double())[1][theirs] != pytest.approx(out.metrics[ours].item(), rel=1e-3)


# ------------------------------------------------------------------ options


def test_defaults_are_those_of_grpo_config() -> None:
    _, defaults = load()
    assert presets.trl() == presets.trl(defaults["loss_type"])
    for loss in LOSSES:
        options = _trl.options_of(loss)
        assert {key: defaults[key] for key in options} == options
    off = {key: value for key, (value, _) in _trl.REFUSED.items()}
    assert {key: defaults[key] for key in off} == off


def test_entries_are_in_the_catalogue() -> None:
    assert set(_trl.ENTRY_OF) == set(LOSSES)
    assert set(_trl.ENTRY_OF.values()) <= set(fusedpg.CATALOGUE)
    for loss in LOSSES:
        spec = presets.trl(loss)
        assert (spec.trainer, spec.version, spec.trainer_loss, spec.anchor) == ("trl", "1.16.0", loss, Anchor.OLD)


REFUSALS = [
    ("ppo", {}, "loss: presets.trl knows dapo, grpo, bnpo, dr_grpo, luspo, cispo, sapo, vespo; got 'ppo'"),
    ("dapo", {"entropy_coef": 0.1}, "entropy_coef: .*with_entropy"),
    ("dapo", {"use_adaptive_entropy": True}, "use_adaptive_entropy: .*the coefficient changes every step"),
    ("bnpo", {"use_adaptive_entropy": True}, "use_adaptive_entropy: "),
    ("grpo", {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold: .*advantages of 0"),
    ("grpo", {"top_entropy_quantile": 0.2}, "top_entropy_quantile: .*is_weights of 0"),
    ("dapo", {"mask_truncated_completions": True}, "mask_truncated_completions: .*mask="),
    ("dapo", {"temperature": 0.7}, "temperature: .*temperature= to the op"),
    ("dapo", {"use_liger_kernel": True}, "use_liger_kernel: "),
    ("dapo", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: "),
    ("dapo", {"vllm_importance_sampling_cap": 2.0}, "vllm_importance_sampling_cap: .*clip_max"),
    ("dapo", {"steps_per_generation": 2}, "steps_per_generation: .*normalizer"),
    ("dapo", {"sapo_temperature_pos": 1.0}, "sapo_temperature_pos: .*never reads it"),
    ("sapo", {"epsilon": 0.2}, "epsilon: .*never reads it"),
    ("dapo", {"importance_sampling_level": "batch"}, "importance_sampling_level: .*'token', 'sequence'"),
    ("vespo", {**SEQUENCE, "beta": 0.1}, "importance_sampling_level: 'vespo'"),
    ("vespo", {"use_vllm": True}, "vllm_importance_sampling_mode: 'vespo'.*token_mask"),
    (
        "dapo",
        {"use_vllm": True, "vllm_importance_sampling_mode": "token"},
        "vllm_importance_sampling_mode: .*sequence_mask",
    ),
    (
        "dapo",
        {**TOKEN_CLIP, "vllm_importance_sampling_clip_min": 1.35},
        "vllm_importance_sampling_clip_min: .*less than",
    ),
    (
        "dapo",
        {
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": None,
        },
        "vllm_importance_sampling_clip_max: .*expects a bound",
    ),
    ("dr_grpo", {"max_completion_length": None}, "max_tokens: "),
    ("dapo", {"delta": 0.9}, "delta: expected a number > 1"),
    ("dapo", {"beta": -0.1}, "kl_coef: "),
]


@pytest.mark.parametrize(("loss", "options", "message"), REFUSALS)
def test_refusals_name_the_option(loss: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        presets.trl(loss, **options)


def test_options_that_switch_something_off_are_taken() -> None:
    off = {key: value for key, (value, _) in _trl.REFUSED.items()}
    assert presets.trl("dapo", **off) == presets.trl("dapo")
    assert presets.trl("vespo", **SEQUENCE, beta=0.1, use_bias_correction_kl=False).level == Level.TOKEN
    assert not presets.trl("dapo", use_vllm=True, vllm_importance_sampling_correction=False).has_correction


# ------------------------------------------------------------------ denominators


def test_normalizer_by_hand() -> None:
    run = {"num_processes": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    counts = {**run, "rows": 6, "tokens": 35, "num_items_in_batch": 1000}
    by = {loss: presets.trl(loss).normalizer(**counts) for loss in LOSSES}
    assert by["grpo"] == by["sapo"] == by["dr_grpo"] == by["luspo"] == 6 * 4
    assert by["bnpo"] == 35 * 4
    assert by["dapo"] == by["cispo"] == by["vespo"] == 1000 / 2 * 4 / 8
    assert presets.trl("dapo").normalizer(**counts, train=False) == 1000 / 2
    assert presets.trl("bnpo").normalizer(**counts, train=False) == 35
    assert presets.trl("dapo").normalizer(num_items_in_batch=torch.tensor(0)) == 1
    assert presets.trl("bnpo").normalizer(tokens=0, gradient_accumulation_steps=2) == 2
    assert presets.trl("dapo").normalizer(num_items_in_batch=90, gradient_accumulation_steps=3) == 90


@pytest.mark.parametrize(("loss", "count"), [("dapo", "num_items_in_batch"), ("grpo", "rows"), ("bnpo", "tokens")])
def test_normalizer_names_the_missing_count(loss: str, count: str) -> None:
    with pytest.raises(ValueError, match=f"^{count}: .*pass {count}="):
        presets.trl(loss).normalizer()


def test_entropy_bonus_coefficient_by_hand() -> None:
    """luspo: 6 rows over 24 tokens, 0.1*6/24; dr_grpo: the same times its 512 tokens; bnpo: as given."""
    counts = {"rows": 6, "tokens": 24, "gradient_accumulation_steps": 4}
    coef = lambda loss: _trl.with_entropy(presets.trl(loss), 0.1, **counts).entropy_coef  # noqa: E731
    assert math.isclose(coef("luspo"), 0.025)
    assert math.isclose(coef("dr_grpo"), 12.8)
    assert math.isclose(coef("bnpo"), presets.trl("bnpo", entropy_coef=0.1).entropy_coef)
    for loss in ("grpo", "sapo"):
        with pytest.raises(ValueError, match=r"^entropy_coef: .*weighs a token by its sequence's length"):
            coef(loss)
