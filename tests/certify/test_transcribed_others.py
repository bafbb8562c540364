"""SkyRL, slime, prime-rl, AReaL and OpenRLHF: transcribed formulas, mutants of every axis, and what is refused."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from fusedpg import presets
from fusedpg.certify.rows import Row
from fusedpg.certify.transcription import difference
from fusedpg.presets import losses_of
from fusedpg.spec import Anchor, Correction, CorrectionLevel, KLRatio, Level, Reject

TRAINERS = ("skyrl", "slime", "prime_rl", "areal", "openrlhf")
BACKENDS = ("reference", "cpu")


def _module(trainer: str) -> ModuleType:
    return import_module(f"fusedpg.certify.transcribed_{trainer}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_row_is_equal(trainer: str, backend: str) -> None:
    table: list[Row] = list(_module(trainer).rows(backend))
    assert [row for row in table if row.verdict != "equal"] == []
    assert {row.loss for row in table} == set(losses_of(trainer))
    assert len({(row.loss, row.option) for row in table}) == len(table)


#: (trainer, loss, option of its row, change of the spec): the change must be seen
MUTANTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("skyrl", "regular", "", {"clip_high": 1.3}),
    ("skyrl", "dual_clip", "eps 0.1, 0.3, clip_ratio_c 1.25", {"dual_clip": 1.5}),
    ("skyrl", "gspo", "", {"level": Level.TOKEN}),
    ("skyrl", "cispo", "", {"clip_low": 0.9}),
    ("skyrl", "sapo", "", {"tau_neg": 1.0}),
    ("skyrl", "rollout_is", "", {"anchor": Anchor.OLD}),
    ("skyrl", "dppo", "binary_tv 0.05, 0.1", {"keep_low": -0.1}),
    ("skyrl", "dppo", "binary_kl 0.05", {"keep_high": 0.2}),
    ("skyrl", "dppo", "", {"penalty_coef": 1e-3}),
    ("skyrl", "clip_cov", "clip_ratio 1, 0.1 to 5", {"select_low": 1.0}),
    ("skyrl", "kl_cov", "kl_cov_frac 0.5, coef 2", {"select_ratio": 0.2}),
    ("skyrl", "regular", "token_mean", {"reduction": "seq-mean-token-mean"}),
    ("skyrl", "regular", "max_seq_len 16", {"max_tokens": 15}),
    ("skyrl", "regular", "token TIS 1.2", {"is_high": 1.3}),
    ("skyrl", "regular", "sequence TIS", {"is_level": CorrectionLevel.TOKEN}),
    ("skyrl", "cispo", "token TIS, geometric mask", {"is_reject_high": 1.1}),
    ("skyrl", "dual_clip", "token TIS, token mask", {"is_reject": Reject.SEQUENCE}),
    ("skyrl", "regular", "sequence_mean, kl k3", {"kl_coef": 0.11}),
    ("slime", "ppo", "", {"clip_low": 0.7}),
    ("slime", "ppo", "eps_clip_c 1.25", {"dual_clip": 1.5}),
    ("slime", "ppo", "TIS", {"is_high": 1.2}),
    ("slime", "cispo", "IcePop 0.8, 1.2", {"is_correction": Correction.TRUNCATE}),
    ("slime", "gspo", "TIS", {"level": Level.SEQUENCE_TOKEN}),
    ("slime", "gspo", "per token", {"reduction": "seq-mean-token-mean"}),
    ("slime", "reinforce", "TIS", {"anchor": Anchor.OLD}),
    ("slime", "cispo", "unbiased kl k2", {"kl_ratio": KLRatio.NONE}),
    ("slime", "ppo", "kl low_var_kl", {"kl_clamp": (-1.0, 1.0)}),
    ("slime", "ppo", "entropy 0.01", {"entropy_coef": 0.02}),
    ("prime_rl", "default", "", {"keep_high": 0.1}),
    ("prime_rl", "default", "kl_tau 0.1", {"penalty_coef": 0.1}),
    ("prime_rl", "ipo", "ipo_threshold 0.03, kl_tau 0.01", {"keep_directional": True}),
    ("prime_rl", "ipo", "", {"anchor": Anchor.OLD}),
    ("areal", "ppo", "eps 0.1, 0.3", {"clip_high": 1.2}),
    ("areal", "ppo", "c_clip 1.25", {"dual_clip": 1.5}),
    ("areal", "ppo", "sequence level", {"level": Level.TOKEN}),
    ("areal", "ppo", "mask tokens outside 0.8, 1.1", {"is_correction": Correction.TRUNCATE}),
    ("areal", "ppo", "clamp tokens to 1.1", {"is_high": 5.0}),
    ("areal", "ppo", "mask sequences by mean", {"is_level": CorrectionLevel.TOKEN}),
    ("areal", "ppo", "mask sequences by sum", {"is_reject": Reject.GEOMETRIC}),
    ("areal", "sapo", "sequence level", {"level": Level.TOKEN}),
    ("openrlhf", "ppo", "", {"log_ratio_clamp": (-0.1, 0.1)}),
    ("openrlhf", "ppo", "dual_clip 1.25", {"dual_clip": 1.5}),
    ("openrlhf", "ppo", "IcePop (token, mask) 0.8 to 1.2", {"is_low": 0.9}),
    ("openrlhf", "ppo", "seq-mask-TIS 0.95 to 1.05", {"is_level": CorrectionLevel.GEOMETRIC}),
    ("openrlhf", "gspo", "anchored on the sampler", {"anchor": Anchor.OLD}),
    ("openrlhf", "ppo", "kl k3", {"kl_clamp": (-0.01, 0.01)}),
    ("openrlhf", "ppo", "entropy 0.01", {"entropy_coef": 0.0}),
]


@pytest.mark.parametrize(
    ("trainer", "loss", "option", "change"),
    MUTANTS,
    ids=[f"{t}-{loss}-{o}-{next(iter(c))}" for t, loss, o, c in MUTANTS],
)
def test_a_mutant_differs(trainer: str, loss: str, option: str, change: dict[str, Any]) -> None:
    (case,) = (c for c in _module(trainer).CASES if (c.loss, c.option) == (loss, option))
    spec = getattr(presets, trainer)(loss, **case.options)
    assert not difference(case, spec.replace(**change), "reference").within


#: (trainer, loss, options, the start of the message, a part that says what to do instead)
REFUSED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("skyrl", "cross_entropy", {}, "loss: presets.skyrl knows regular", ""),
    ("skyrl", "regular", {"loss_reduction": "prompt_mean"}, "loss_reduction", "scale the advantages"),
    ("skyrl", "kl_cov", {"loss_reduction": "token_mean"}, "loss_reduction", "expects None"),
    ("skyrl", "regular", {"use_kl_loss": True}, "use_kl_loss", "loss_reduction='sequence_mean'"),
    ("skyrl", "regular", {"outlier_token_is_threshold_high": 100.0}, "outlier_token_is_threshold_high", "is_weights"),
    ("skyrl", "rollout_is", {"tis_ratio_type": "token"}, "tis_ratio_type", "is_weights"),
    ("skyrl", "regular", {"clip_ratio_c": 3.0}, "clip_ratio_c", "never reads it"),
    ("skyrl", "regular", {"use_tis": True}, "use_tis", "tis_ratio_type='token'"),
    (
        "skyrl",
        "regular",
        {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
        "token_mask_is_threshold_low",
        "is_weights",
    ),
    ("skyrl", "dppo", {"dppo_type": "topk_tv"}, "dppo_type", "'binary_kl'"),
    ("slime", "ppo", {"use_opsm": True}, "use_opsm", "is_weights=0"),
    ("slime", "ppo", {"use_score_centering": True}, "use_score_centering", "no LossSpec"),
    ("slime", "cispo", {"eps_clip_c": 3.0}, "eps_clip_c", "never reads it"),
    ("slime", "ppo", {"custom_tis_function_path": "my.function"}, "custom_tis_function_path", "is_weights"),
    ("slime", "ppo", {"use_tis": True, "use_rollout_logprobs": True}, "use_tis", "is_weights"),
    (
        "slime",
        "ppo",
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
        "use_unbiased_kl",
        "kl_loss_type='k3'",
    ),
    ("slime", "gspo", {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True}, "use_unbiased_kl", "second"),
    ("prime_rl", "default", {"adv_tau": 0.5}, "adv_tau", "multiply"),
    ("prime_rl", "default", {"teacher_tau": 0.1}, "teacher_tau", "advantages"),
    ("prime_rl", "custom", {}, "loss: presets.prime_rl knows default, ipo", ""),
    ("prime_rl", "default", {"import_path": "my.loss"}, "import_path", "policy_loss"),
    ("areal", "ppo", {"m2_threshold": 0.04}, "m2_threshold", "`mask`"),
    ("areal", "ppo", {"behave_imp_weight_cap": 5.0}, "behave_imp_weight_cap", "rejection_sampling={'upper': cap}"),
    ("areal", "ppo", {"rejection_sampling": {}}, "rejection_sampling", "use_decoupled_loss=True"),
    ("areal", "ppo", {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k3"}}, "metric", "is_weights"),
    (
        "areal",
        "ppo",
        {"use_decoupled_loss": True, "rejection_sampling": {"level": "sequence", "agg": "max"}},
        "agg",
        "is_weights",
    ),
    (
        "areal",
        "ppo",
        {"use_decoupled_loss": True, "rejection_sampling": {}, "importance_sampling_level": "sequence"},
        "rejection_sampling",
        "`mask`",
    ),
    ("areal", "sapo", {"c_clip": 3.0}, "c_clip", "never reads it"),
    ("openrlhf", "ppo", {"unbiased_gradient": True}, "unbiased_gradient", "kl_ratio='detached'"),
    (
        "openrlhf",
        "ppo",
        {"is_correction_level": "token", "is_correction_gating": "tv"},
        "is_correction_gating",
        "is_weights",
    ),
    ("openrlhf", "ppo", {"is_correction_level": "seq", "is_correction_mode": "clip"}, "is_correction_mode", "'mask'"),
    ("openrlhf", "gspo", {"use_loss": True}, "use_loss", "token mean"),
    ("openrlhf", "ppo", {"loss_agg_mode": "seq-mean-token-mean", "entropy_coef": 0.1}, "entropy_coef", "token mean"),
    (
        "openrlhf",
        "ppo",
        {"is_correction_threshold": (1, 2, 3), "is_correction_level": "token"},
        "is_correction_threshold",
        "(LOW, HIGH)",
    ),
]


@pytest.mark.parametrize(
    ("trainer", "loss", "options", "start", "fix"), REFUSED, ids=[f"{r[0]}-{r[1]}-{r[3]}" for r in REFUSED]
)
def test_what_no_spec_expresses_is_refused_by_name(
    trainer: str, loss: str, options: dict[str, Any], start: str, fix: str
) -> None:
    with pytest.raises(ValueError, match=f"^{start}") as error:
        getattr(presets, trainer)(loss, **options)
    assert fix in str(error.value)


def test_normalisers() -> None:
    assert presets.skyrl().normalizer() == 1.0
    assert presets.skyrl(loss_reduction="token_mean").normalizer(tokens=0) == 1.0
    assert presets.skyrl(loss_reduction="sequence_mean").normalizer(batch_size=8) == 8.0
    assert presets.slime().normalizer(global_batch_size=32) == 32.0
    assert presets.slime(calculate_per_token_loss=True).normalizer(num_tokens=100) == 100.0
    assert presets.prime_rl().normalizer() == 1.0
    assert presets.prime_rl().normalizer(rl_scale=50) == 50.0
    assert presets.areal().normalizer(tokens=0) == 1.0
    assert presets.openrlhf().normalizer(batch_num_tokens=100, dp_size=4) == 25.0
    assert presets.openrlhf("gspo").normalizer(global_batch_size=8, dp_size=4) == 2.0
    assert presets.openrlhf().normalizer() is None
