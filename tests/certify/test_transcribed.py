"""Trainers without an importable loss: every preset equals the formula written down for it, and mutants do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from fusedpg import policy_loss, presets
from fusedpg.certify import against_transcribed
from fusedpg.certify.cases import make_policy_batch
from fusedpg.certify.transcription import Case, difference
from fusedpg.presets.base import TrainerSpec
from fusedpg.spec import (
    KL,
    Anchor,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    Level,
    Reject,
)

BACKENDS = ("reference", "cpu")
TRAINERS = against_transcribed.TRAINERS
#: the trainers whose refusals, rules and mutants are below
HERE = ("rllm", "cosmos", "cosmos_rl", "nemo_rl", "tinker")
INF = float("inf")
NONE = (-INF, INF)


def module_of(trainer: str) -> Any:
    return import_module(f"fusedpg.certify.transcribed_{trainer}")


def preset_of(trainer: str) -> Callable[..., TrainerSpec]:
    return getattr(presets, trainer)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_row_is_equal(trainer: str, backend: str) -> None:
    rows = list(module_of(trainer).rows(backend))
    assert [row for row in rows if row.verdict != "equal"] == []
    assert {row.trainer for row in rows} == {trainer}
    assert {row.loss for row in rows} == set(presets.losses_of(trainer))
    assert min(row.cases for row in rows) >= 5


@pytest.mark.parametrize("trainer", HERE)
def test_no_two_rows_say_the_same(trainer: str) -> None:
    said = [(c.loss, preset_of(trainer)(c.loss, **c.options).reduction, c.option) for c in cases_of(trainer)]
    # Tinker's rows come with the sampler as the old policy, and apart from it
    assert trainer == "tinker" or len(set(said)) == len(said)


def test_the_oracle_yields_all_trainers() -> None:
    first = next(iter(against_transcribed.rows("cpu")))
    assert first.trainer == TRAINERS[0] == "rllm"
    assert set(HERE) <= set(TRAINERS)
    assert {*TRAINERS, "verl", "trl"} == set(presets.TRAINERS)


# ---------------------------------------------------------------- mutants


def cases_of(trainer: str) -> list[Case]:
    return list(module_of(trainer).cases())


def case_of(trainer: str, loss: str, option: str) -> Case:
    """The first case of a loss whose options are said like this."""
    return next(c for c in cases_of(trainer) if c.loss == loss and c.option.startswith(option))


def differs(case: Case, spec: TrainerSpec) -> bool:
    """Whether some batch tells the spec from the case's formula; the rest is not run."""
    one_by_one = (replace(case, kinds=(kind,), kinds_fp64=()) for kind in case.kinds)
    return any(not difference(one, spec, "reference").within for one in one_by_one)


def rule_of_tokens(spec: TrainerSpec, **counts: float) -> float:
    return 1.0 + sum(counts.values())


MUTANTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("rllm", "ppo_clip", "", {"clip_high": 1.21}),
    ("rllm", "ppo_clip", "", {"clip_low": 0.79}),
    ("rllm", "ppo_clip", "", {"dual_clip": 3.0}),
    ("rllm", "ppo_clip", "", {"anchor": Anchor.SELF}),
    ("rllm", "ppo_clip", "", {"anchor": Anchor.ROLLOUT}),
    ("rllm", "ppo_clip", "", {"reduction": "seq-mean-token-sum"}),
    ("rllm", "ppo_clip", "counts of the step", {"rule": None}),
    ("rllm", "ppo_clip", "counts of the step", {"rule": rule_of_tokens}),
    ("rllm", "cispo", "", {"clip_low": -INF}),
    ("rllm", "dppo_tv", "delta=0.02", {"keep_directional": False}),
    ("rllm", "dppo_tv", "delta=0.02", {"keep": Keep.KL}),
    ("rllm", "dppo_tv", "delta_low", {"keep_low": -0.03}),
    ("rllm", "dppo_kl", "delta=0.002", {"keep_high": 0.004}),
    ("rllm", "dppo_kl", "delta=0.002", {"keep": Keep.TV}),
    ("rllm", "gspo", "", {"level": Level.TOKEN}),
    ("rllm", "gspo", "eps_clip=0.0003", {"clip_high": 1.01}),
    ("rllm", "icepop", "icepop_alpha", {"keep_low": 0.5}),
    ("rllm", "icepop", "icepop_alpha", {"anchor": Anchor.OLD}),
    ("rllm", "echo", "env_loss_coef=0.5", {"obs_coef": 0.05}),
    ("rllm", "reinforce_kl", "", {"log_ratio_clamp": NONE}),
    ("rllm", "reinforce_kl", "ratio_clamp", {"clip_high": INF}),
    ("rllm", "reinforce_kl", "bwd_kl_coef=0.3", {"kl_backward_coef": 0.2}),
    ("rllm", "reinforce_kl", "bwd_kl_coef=0.3", {"kl_backward": KLSampled.K3}),
    ("rllm", "reinforce_kl", "fwd_kl_coef=0.2", {"kl_forward_coef": 0.3}),
    ("rllm", "reinforce_kl", "fwd_kl_coef=0.2", {"kl_target": KLTarget.REF}),
    ("cosmos", "clipped", "", {"dual_clip": INF}),
    ("cosmos", "clipped", "lower_bound_ratio=1.1", {"dual_clip": 1.2}),
    ("cosmos", "clipped", "kl_beta", {"kl_coef": 0.2}),
    ("cosmos", "clipped", "kl_beta", {"kl_clamp": NONE}),
    ("cosmos", "clipped", "weight of the step", {"rule": None}),
    ("cosmos", "clipped", "max_response_length=11", {"max_tokens": 12}),
    ("cosmos", "gspo", "", {"level": Level.TOKEN}),
    ("cosmos", "gspo", "", {"log_ratio_clamp": (-INF, -1.0)}),
    ("cosmos", "legacy_pg", "", {"reduction": "token-sum"}),
    ("cosmos_rl", "grpo", "", {"dual_clip": INF}),
    ("cosmos_rl", "grpo", "epsilon_low=0.2, epsilon_high=-1.0", {"clip_high": 1.2}),
    ("cosmos_rl", "grpo", "epsilon_low=0.2, epsilon_high=-1.0", {"log_ratio_clamp": NONE}),
    ("cosmos_rl", "grpo", "aipo_rho=1.1", {"delta": INF}),
    ("cosmos_rl", "grpo", "aipo_rho=1.1", {"clip_high": INF}),
    ("cosmos_rl", "grpo", "kl_beta", {"kl_log_ratio_clamp": NONE, "kl_clamp": NONE}),
    ("cosmos_rl", "grpo", "kl_beta=0.2, unbiased", {"kl_ratio": KLRatio.NONE}),
    ("cosmos_rl", "grpo", "kl_beta=0.2, unbiased", {"kl_ratio": KLRatio.DETACHED}),
    ("cosmos_rl", "grpo", "use_decoupled_loss=True, behav", {"is_correction": Correction.TRUNCATE}),
    ("cosmos_rl", "grpo", "use_decoupled_loss=True, behav", {"is_high": 1.2}),
    ("cosmos_rl", "grpo", "use_decoupled_loss=True, behav", {"is_level": CorrectionLevel.GEOMETRIC}),
    ("cosmos_rl", "grpo", "use_rollout", {"anchor": Anchor.OLD}),
    ("cosmos_rl", "grpo", "entropy", {"entropy_coef": 0.2}),
    ("cosmos_rl", "grpo", "balance", {"rule": None}),
    ("cosmos_rl", "gspo", "", {"level": Level.TOKEN}),
    ("cosmos_rl", "gspo", "aipo_rho", {"log_ratio_clamp": (-INF, 10.0)}),
    ("cosmos_rl", "gspo", "off_policy", {"keep_low": 0.5}),
    ("cosmos_rl", "gspo", "off_policy", {"keep_directional": False}),
    ("nemo_rl", "clipped_pg", "reference_policy_kl_penalty=0.0", {"reduction": "seq-mean-token-mean"}),
    ("nemo_rl", "clipped_pg", "reference_policy_kl_penalty=0.3, reference", {"kl_gradient": KLGradient.OWN}),
    ("nemo_rl", "clipped_pg", "reference_policy_kl_penalty=0.3, reference", {"kl": KL.K2}),
    ("nemo_rl", "clipped_pg", "kl_input_clamp", {"kl_gradient": KLGradient.STRAIGHT_THROUGH, "kl": KL.K2}),
    ("nemo_rl", "clipped_pg", "reference_policy_kl_penalty=0.0, ratio_clip_c=1.1", {"dual_clip": INF}),
    ("nemo_rl", "disable_ppo_ratio", "", {"rule": rule_of_tokens}),
    ("nemo_rl", "force_on_policy_ratio", "", {"anchor": Anchor.OLD}),
    ("nemo_rl", "use_cispo", "", {"clip_high": 4.0}),
    ("nemo_rl", "sequence_level_importance_ratios", "", {"level": Level.TOKEN}),
    ("nemo_rl", "sequence_level_importance_ratios", "", {"clip_high": 1.02}),
    ("tinker", "ppo", "", {"anchor": Anchor.SELF}),
    ("tinker", "ppo", "", {"reduction": "token-mean"}),
    ("tinker", "cispo", "", {"clip_high": 1.2}),
    ("tinker", "importance_sampling", "", {"log_ratio_clamp": (-20.0, 20.0)}),
    ("tinker", "dro", "beta=0.05", {"penalty_coef": 0.1}),
]


@pytest.mark.parametrize(("trainer", "loss", "option", "change"), MUTANTS)
def test_mutant_differs(trainer: str, loss: str, option: str, change: dict[str, Any]) -> None:
    case = case_of(trainer, loss, option)
    spec = preset_of(trainer)(loss, **case.options)
    assert differs(case, replace(spec, **change))


@pytest.mark.parametrize("name", ["clipped_pg", "sequence_level_importance_ratios"])
def test_mutants_of_nemo_rl_corrections_differ(name: str) -> None:
    """Each type of truncation is told from the others, at its own level."""
    corrected = [c for c in cases_of("nemo_rl") if c.loss == name and "truncated_importance" in c.option]
    assert len(corrected) >= 3
    for case in corrected:
        spec = presets.nemo_rl(name, **case.options)
        level = CorrectionLevel.TOKEN if spec.is_level == CorrectionLevel.SEQUENCE else CorrectionLevel.SEQUENCE
        changes: list[dict[str, Any]] = [{"is_level": level}]
        if spec.is_reject == Reject.GEOMETRIC:
            changes += [{"is_reject": Reject.TOKEN}, {"is_reject_high": 5.0}]
        else:
            other = Correction.MASK if spec.is_correction == Correction.TRUNCATE else Correction.TRUNCATE
            changes += [{"is_high": 5.0}, {"is_correction": other}]
        for change in changes:
            assert differs(case, replace(spec, **change)), (case.option, change)


# ---------------------------------------------------------------- refusals

REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("rllm", "ppo_clip", {"kl_beta": 0.1}, r"kl_beta: no built-in loss of rLLM reads it; got 0.1; use .*kl='k3'"),
    ("rllm", "gspo", {"loss_agg_mode": "token-mean"}, r"loss_agg_mode: rLLM's gspo pins 'seq-mean-token-mean'"),
    ("rllm", "ppo_clip", {"loss_agg_mode": "token-sum"}, r"loss_agg_mode: .* expects one of .*; got 'token-sum'"),
    ("rllm", "ppo_clip", {"delta": 0.1}, r"delta: presets.rllm\('ppo_clip'\) never reads it"),
    ("rllm", "dppo_kl", {"loss_params": {"delta_low": 0.1}}, r"delta_low: presets.rllm\('dppo_kl'\) never reads it"),
    ("rllm", "reinforce_kl", {"kl_approx": 1}, r"kl_approx: expected True \(k3\) or False"),
    ("rllm", "vanilla", {}, r"loss: presets.rllm knows ppo_clip, .*; got 'vanilla'"),
    ("cosmos", "clipped", {"importance_sampling_level": "sequence"}, r"lower_bound_ratio: .*pass lower_bound_ratio=0"),
    ("cosmos", "gspo", {"lower_bound_ratio": 3.0}, r"lower_bound_ratio: .*never reads the dual clip; got 3.0"),
    ("cosmos", "clipped", {"lower_bound_ratio": 1.0}, r"lower_bound_ratio: .*> 1, or 0 \(off\); got 1.0"),
    ("cosmos", "clipped", {"max_response_length": 8}, r"max_response_length: loss_type='token-mean' never reads it"),
    ("cosmos", "dr_grpo", {}, r"max_response_length: .*positive int; got None; pass rollout.max_tokens"),
    ("cosmos", "dr_grpo", {"max_response_length": True}, r"max_response_length: .*positive int; got True"),
    ("cosmos", "dr_grpo", {"max_response_length": 8.5}, r"max_response_length: .*positive int; got 8.5"),
    ("cosmos", "clipped", {"temperature": 0.7}, r"temperature: .*does not support it; got 0.7; apply it where"),
    ("cosmos", "clipped", {"importance_sampling_level": "group"}, r"importance_sampling_level: .*got 'group'"),
    *[
        ("cosmos", "legacy_pg", {key: 1}, rf"{key}: presets.cosmos\('legacy_pg'\) does not support it; got 1")
        for key in ("epsilon_low", "lower_bound_ratio", "kl_beta", "loss_type", "importance_sampling_level")
    ],
    ("cosmos_rl", "grpo", {"lower_bound_ratio": 0}, r"lower_bound_ratio: .*> 1; got 0; .*pass a large number"),
    ("cosmos_rl", "grpo", {"off_policy_masking_delta": 0.1}, r"off_policy_masking_delta: .*pass advantages of 0"),
    ("cosmos_rl", "grpo", {"positive_nll_coef": 0.1}, r"positive_nll_coef: .*add coef"),
    ("cosmos_rl", "grpo", {"entropy_coeff": 0.1, "loss_type": "token-sum"}, r"entropy_coeff: .*'token-sum'"),
    (
        "cosmos_rl",
        "gspo",
        {"kl_beta": 0.1, "unbiased_kl_estimate": True},
        r"unbiased_kl_estimate: .*use variant 'grpo'",
    ),
    (
        "cosmos_rl",
        "grpo",
        {"behav_imp_weight_cap": 2.0},
        r"behav_imp_weight_cap: only use_decoupled_loss=True reads it",
    ),
    ("cosmos_rl", "grpo", {"aipo_rho": 1.0}, r"aipo_rho: .*number > 1; got 1.0"),
    (
        "cosmos_rl",
        "grpo",
        {"unbiased_loss_max_tokens": 9},
        r"unbiased_loss_max_tokens: .*use loss_type='seq-mean-token",
    ),
    ("cosmos_rl", "grpo", {"balance_dp_token": True, "loss_type": "token-sum"}, r"balance_dp_token: .*never reads it"),
    (
        "cosmos_rl",
        "grpo",
        {"use_rollout_logprobs_for_loss": True, "use_decoupled_loss": True},
        r"use_rollout_logprobs_for_loss: cosmos-rl refuses it together with use_decoupled_loss",
    ),
    ("nemo_rl", "clipped_pg", {"use_on_policy_kl_approximation": True}, r"use_on_policy_kl_approximation: .*yourself"),
    ("nemo_rl", "clipped_pg", {"positive_example_nll_weight": 0.1}, r"positive_example_nll_weight: .*add weight"),
    ("nemo_rl", "clipped_pg", {"ratio_clip_c": 1.0}, r"ratio_clip_c: .*number > 1, or None \(off\); got 1.0"),
    ("nemo_rl", "disable_ppo_ratio", {"ratio_clip_c": 3.0}, r"ratio_clip_c: it has no effect"),
    ("nemo_rl", "force_on_policy_ratio", {"ratio_clip_max": 0.3}, r"ratio_clip_max: .*leaves no ratio to clip"),
    ("nemo_rl", "use_cispo", {"disable_ppo_ratio": True}, r"use_cispo: NeMo-RL refuses it together with disable_ppo"),
    ("nemo_rl", "use_cispo", {"token_level_loss": False}, r"token_level_loss: NeMo-RL's use_cispo requires True"),
    ("nemo_rl", "sequence_level_importance_ratios", {"token_level_loss": True}, r"token_level_loss: .*pass False"),
    ("nemo_rl", "clipped_pg", {"truncated_importance_sampling_type": "tis"}, r"truncated_importance_sampling_type: "),
    ("nemo_rl", "clipped_pg", {"reference_policy_kl_type": "k4"}, r"reference_policy_kl_type: .*got 'k4'"),
    ("tinker", "gspo", {}, r"loss: presets.tinker has no 'gspo': its formula is not published"),
    ("tinker", "stable_reinforce", {}, r"loss: presets.tinker has no 'stable_reinforce'"),
    ("tinker", "cross_entropy", {}, r"loss: presets.tinker has no 'cross_entropy': it is supervised"),
    ("tinker", "dro", {}, r"beta: presets.tinker\('dro'\) has no default for it"),
    ("tinker", "importance_sampling", {"clip_low_threshold": 0.5}, r"clip_low_threshold: .*never reads it"),
]


@pytest.mark.parametrize(("trainer", "loss", "options", "message"), REFUSED)
def test_refused_by_name(trainer: str, loss: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset_of(trainer)(loss, **options)


def test_nemo_rl_refuses_truncations_without_their_bounds() -> None:
    on = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"}
    with pytest.raises(ValueError, match=r"truncated_importance_sampling_ratio: .*> 0 for 'icepop'; got None"):
        presets.nemo_rl(**on)
    with pytest.raises(ValueError, match=r"truncated_importance_sampling_ratio_min: .*for 'icepop'; got None"):
        presets.nemo_rl(**on, truncated_importance_sampling_ratio=2.0)
    masked = {**on, "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 2.0}
    with pytest.raises(ValueError, match="refuses 'seq-mask-tis' with sequence_level_importance_ratios"):
        presets.nemo_rl("sequence_level_importance_ratios", **masked, truncated_importance_sampling_ratio_min=0.5)


def test_cosmos_warns_of_epsilons_of_a_token_at_the_sequence_level() -> None:
    with pytest.warns(UserWarning, match="epsilon_low, epsilon_high: 0.2, 0.2 have a token's scale"):
        presets.cosmos(importance_sampling_level="sequence", lower_bound_ratio=0)


def test_rllm_icepop_refuses_a_call_without_the_sampler() -> None:
    batch = make_policy_batch("ragged")
    with pytest.raises(ValueError, match="logp_rollout: the loss 'icepop' reads it"):
        policy_loss(presets.rllm("icepop"), batch.logp, sequence_advantages=batch.advantages, mask=batch.mask)


# ---------------------------------------------------------------- normaliser rules, names

RULES: list[tuple[str, str, dict[str, Any], dict[str, float], float | None]] = [
    ("rllm", "ppo_clip", {"loss_agg_mode": "token-mean"}, {"tokens": 40, "sequences": 4}, 40.0),
    ("rllm", "ppo_clip", {}, {"tokens": 40, "sequences": 4}, 4.0),
    ("rllm", "ppo_clip", {"loss_agg_mode": "seq-mean-token-sum"}, {"sequences": 0}, 1.0),
    ("rllm", "ppo_clip", {}, {}, None),
    ("cosmos", "clipped", {}, {"objective_weight_sum": 12}, 12.0),
    ("cosmos", "clipped", {}, {"objective_weight_sum": 0}, 1.0),
    ("cosmos", "clipped", {}, {}, None),
    ("cosmos_rl", "grpo", {}, {"tokens": 30, "dp_workers": 3}, (30 + 1e-8) / 3),
    ("cosmos_rl", "grpo", {"loss_type": "seq-mean-token-sum"}, {"sequences": 5}, 5.0),
    ("cosmos_rl", "grpo", {"loss_type": "token-sum"}, {"tokens": 30}, None),
    ("cosmos_rl", "grpo", {}, {}, None),
    ("nemo_rl", "clipped_pg", {}, {"global_valid_toks": 30, "global_valid_seqs": 5}, 30 + 1e-8),
    ("nemo_rl", "clipped_pg", {"token_level_loss": False}, {"global_valid_toks": 30, "global_valid_seqs": 5}, 5 + 1e-8),
    ("nemo_rl", "clipped_pg", {}, {}, None),
    ("tinker", "ppo", {}, {}, None),
]


@pytest.mark.parametrize(("trainer", "loss", "options", "counts", "want"), RULES)
def test_normaliser_rule(
    trainer: str, loss: str, options: dict[str, Any], counts: dict[str, float], want: float | None
) -> None:
    assert preset_of(trainer)(loss, **options).normalizer(**counts) == want


def test_two_micro_batches_under_the_rule_give_the_step() -> None:
    batch = make_policy_batch("ragged", rows=6)
    spec = presets.nemo_rl(reference_policy_kl_penalty=0.0)
    total = spec.normalizer(global_valid_toks=float(batch.mask.sum()))

    def loss(rows: slice, normalizer: float | None) -> torch.Tensor:
        args = {"logp_old": batch.logp_old[rows], "mask": batch.mask[rows], "normalizer": normalizer}
        return policy_loss(spec, batch.logp[rows], sequence_advantages=batch.advantages[rows], **args).loss

    parts = loss(slice(0, 2), total) + loss(slice(2, 6), total)
    torch.testing.assert_close(parts, loss(slice(0, 6), None))


def test_rllm_takes_loss_params_as_a_dict() -> None:
    assert presets.rllm("dppo_tv", loss_params={"delta": 0.1}) == presets.rllm("dppo_tv", delta=0.1)


def test_nemo_rl_takes_a_flag_as_the_loss() -> None:
    assert presets.nemo_rl("use_cispo") == presets.nemo_rl(use_cispo=True)
    assert presets.nemo_rl(force_on_policy_ratio=True, disable_ppo_ratio=True).name == "importance_sampling"


def test_metrics_under_the_trainers_names() -> None:
    batch = make_policy_batch("ragged")
    spec = presets.rllm("ppo_clip", eps_clip=0.1)
    args = {"logp_old": batch.logp_old, "mask": batch.mask, "sequence_advantages": batch.advantages}
    named = spec.named_metrics(policy_loss(spec, batch.logp, **args).metrics)
    ratio = (batch.logp - batch.logp_old).exp()[batch.mask]
    # clipping changes the ratio: the sign of the advantage plays no part
    assert float(named["ppo/clip_frac"]) == pytest.approx(float((ratio != ratio.clamp(0.9, 1.1)).float().mean()))
