"""The verl preset against verl's own code: every row, mutants that must not pass, metrics."""

import math
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fusedpg.certify import rows_of
from fusedpg.certify import verl_oracle as oracle_module
from fusedpg.certify.cases import make_policy_batch
from fusedpg.certify.verl_compare import batches, difference, ours, theirs
from fusedpg.certify.verl_jobs import KL_TYPES, REQUIRED, Job, reduction
from fusedpg.presets._verl import ENTRY_OF, verl
from fusedpg.spec import (
    INF,
    KL,
    REDUCTIONS,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    Level,
    Reject,
    Surrogate,
)

if find_spec("verl") is None:  # it has no release for Python 3.13
    pytest.skip("needs verl==0.9.1 (certify-no-deps.txt)", allow_module_level=True)


@pytest.fixture(scope="module")
def oracle() -> oracle_module.Oracle:
    return oracle_module.load()


# ------------------------------------------------------------------ the rows


#: (loss, start of the option) of verl's own errors; what is not listed here is equal
ERRORS = {
    ("geo_mean", "correct=True, global"),
    ("gpg", "inf and NaN at masked places"),
    ("bypass_mode", "fully masked micro-batch, global"),
    ("bypass_mode", "loss_type=reinforce, rollout_is=token, rollout_is_threshold=0.5_0.6, global, all outside"),
    # verl's local mean of no tokens is 0/0; geo_mean divides by rows
    *((loss, "fully masked micro-batch, local") for loss in ENTRY_OF if loss != "geo_mean"),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_row_is_equal_or_a_known_error_of_verl(backend: str, oracle: oracle_module.Oracle) -> None:
    rows = list(rows_of("verl", backend))
    found = [
        f"{r.loss} {r.reduction} {r.option}: {r.value:.1e}, {r.gradient:.1e}" for r in rows if r.verdict == "differs"
    ]
    assert not found
    assert {r.verdict for r in rows} == {"equal", "trainer errs"}
    assert {(r.loss, r.option) for r in rows if r.verdict == "trainer errs"} == ERRORS
    assert {r.version for r in rows} == {"0.9.1"}
    assert all(r.cases > 0 for r in rows)
    matrix = {(r.loss, r.reduction, r.option) for r in rows}
    for loss in set(ENTRY_OF) - {"sapo", "geo_mean", "dro"}:
        assert {(loss, mode, scope) for mode in REDUCTIONS for scope in ("local", "global")} <= matrix
    assert {f"kl_loss_type={kind}{plus}" for kind in KL_TYPES for plus in ("", "+")} <= {
        r.option.split(",")[0] for r in rows
    }


def test_the_preset_knows_every_loss_that_verl_registers(oracle: oracle_module.Oracle) -> None:
    assert set(oracle.algos.POLICY_LOSS_REGISTRY) == set(ENTRY_OF)


def test_defaults_are_those_of_verls_config_classes(oracle: oracle_module.Oracle) -> None:
    from fusedpg.presets import _verl

    actor = oracle.config("vanilla", {}, {})
    places = (actor, actor.policy_loss, actor.policy_loss.rollout_correction)
    tables = {**_verl._READS, **{f"bypass {kind}": reads for kind, reads in _verl._BYPASS_READS.items()}}
    # weights are an option of the decoupled mode, off in verl's YAML, and metrics alone in bypass_mode's ppo_clip
    for loss, reads in tables.items():
        for key, default in reads.items():
            if key in ("correct", "loss_type") or (key == "rollout_is" and default is None):
                continue
            (theirs_default,) = [getattr(place, key) for place in places if hasattr(place, key)]
            assert theirs_default == default, (loss, key)
    kl = verl(use_kl_loss=True)
    assert (kl.kl, kl.kl_coef, kl.kl_gradient) == (KL.K3, actor.kl_loss_coef, KLGradient.OWN)
    assert (kl.reduction, kl.entropy_coef) == (actor.loss_agg_mode, actor.entropy_coeff)


def test_importing_verl_leaves_nothing_behind(oracle: oracle_module.Oracle) -> None:
    assert "ray" not in sys.modules or sys.modules["ray"].__spec__ is not None
    assert os.environ.get("VERL_USE_EXTERNAL_PLUGINS") != "none"


def test_clip_covs_draw_leaves_the_callers_generator_alone(oracle: oracle_module.Oracle) -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    difference(oracle, Job("clip_cov"), "reference", over=list(batches(Job("clip_cov")))[:1])
    assert torch.equal(torch.rand(3), want)


def test_without_verl_the_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'verl'")

    monkeypatch.setattr(oracle_module, "load", missing)
    rows = list(rows_of("verl", "reference"))
    assert {r.verdict for r in rows} == {"not installed"}
    assert [r.loss for r in rows] == list(ENTRY_OF)
    assert "No module named 'verl'; pip install" in rows[0].note


# ------------------------------------------------------------------ mutants

KL_JOB = {"use_kl_loss": True, "kl_loss_coef": 0.2}
ROLLOUT = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2}
REJECTED = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.5"}

MUTANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vanilla", {}, {"clip_low": 0.75}),
    ("vanilla", {}, {"clip_high": 1.25}),
    ("vanilla", {}, {"dual_clip": INF}),
    ("vanilla", {}, {"reduction": "seq-mean-token-mean"}),
    ("vanilla", {"clip_ratio_c": 1e12}, {"log_ratio_clamp": (-INF, INF)}),
    ("vanilla", reduction("seq-mean-token-sum-norm"), {"max_tokens": 8}),
    ("vanilla", {}, {"surrogate": Surrogate.IMPORTANCE_RATIO}),
    ("vanilla", KL_JOB, {"kl": KL.K2}),
    ("vanilla", KL_JOB, {"kl_clamp": (-INF, INF)}),
    ("vanilla", KL_JOB, {"kl_gradient": KLGradient.STRAIGHT_THROUGH}),
    ("vanilla", KL_JOB, {"kl_gradient": KLGradient.SCORE}),
    ("vanilla", KL_JOB, {"kl_ratio": KLRatio.LIVE}),
    ("vanilla", {**KL_JOB, "kl_loss_type": "k3+"}, {"kl_gradient": KLGradient.OWN}),
    ("vanilla", {"entropy_coeff": 0.05}, {"entropy_coef": -0.05}),
    ("vanilla", {"rollout_is": "token", "rollout_is_threshold": 1.2}, {"is_high": 1.3}),
    ("vanilla", {"rollout_is": "token", "rollout_is_threshold": 1.2}, {"is_level": CorrectionLevel.SEQUENCE}),
    ("vanilla", {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}, {"is_correction": Correction.TRUNCATE}),
    ("dppo_tv", {}, {"keep_directional": False}),
    ("dppo_tv", {}, {"keep_high": 0.3}),
    ("dppo_tv", {}, {"clip_high": INF}),
    ("dppo_tv", {}, {"keep": Keep.KL}),
    ("dppo_kl", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}, {"keep_directional": False}),
    ("dppo_kl", {}, {"keep": Keep.TV}),
    ("gspo", {}, {"level": Level.TOKEN}),
    ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {"clip_high": 1 + 5e-4}),
    ("gspo", {}, {"log_ratio_clamp": (-INF, INF)}),
    ("sapo", {}, {"tau_neg": 1.0}),
    ("sapo", {}, {"tau_pos": 1.05}),
    ("gpg", {}, {"surrogate": Surrogate.CISPO}),
    ("clip_cov", {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.1}, {"select_low": 0.5}),
    ("clip_cov", {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.1}, {"select_ratio": 0.1}),
    ("kl_cov", {"kl_cov_ratio": 0.3}, {"select_ratio": 0.2}),
    ("kl_cov", {"kl_cov_ratio": 0.3}, {"select_coef": 0.2}),
    ("geo_mean", {}, {"token_clip": (-0.2, 0.3)}),
    ("geo_mean", {}, {"token_clip": (-0.3, 0.2)}),
    ("dro", {"dro_beta": 0.3}, {"penalty_coef": 0.15}),
    ("cispo", {}, {"clip_low": -INF}),
    ("cispo", {}, {"surrogate": Surrogate.CLIPPED_RATIO}),
    ("bypass_mode", ROLLOUT, {"is_high": INF}),
    ("bypass_mode", ROLLOUT, {"is_correction": Correction.NONE, "is_low": -INF, "is_high": INF}),
    ("bypass_mode", REJECTED, {"is_reject": Reject.SEQUENCE}),
    ("bypass_mode", REJECTED, {"is_reject_low": 0.6, "is_reject_high": 1.5}),  # bounds of r, not of 1/r
]


@pytest.mark.parametrize(
    ("loss", "options", "changes"), MUTANTS, ids=[f"{loss}-{'-'.join(c)}" for loss, _, c in MUTANTS]
)
def test_a_mutant_differs_from_verl(
    oracle: oracle_module.Oracle, loss: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    job = Job(loss, options)
    mutant = job.spec.replace(**changes)
    assert mutant != job.spec
    assert any(
        not difference(oracle, job, "reference", mutant, over=[case]).within for case in reversed(list(batches(job)))
    )


def test_dppo_kl_differs_from_verl_where_a_probability_is_outside_the_catalogues_bounds(
    oracle: oracle_module.Oracle,
) -> None:
    # 1 - p' = 0.016, 1 - p = 1e-8: verl's divergence is 0.016*ln(0.016/2e-8) - 0.016 = 0.202, above 0.2; with p bounded
    # by 1 - 1e-6 it is 0.016*ln(0.016/1e-6) - 0.016 = 0.139
    batch = make_policy_batch("ragged")
    logp, old = batch.logp.clone(), batch.logp_old.clamp(max=-0.01)
    batch = replace(batch, logp=logp, logp_old=old, advantages=batch.advantages.abs())
    old[0, 0] = math.log(1 - 0.016)
    for q, agrees in ((1e-8, False), (1e-4, True)):
        logp[0, 0] = math.log1p(-q)
        assert difference(oracle, Job("dppo_kl"), "reference", over=[(batch, False)]).within == agrees
    assert "1 - 1e-6" in verl("dppo_kl").note


# ------------------------------------------------------------------ metrics


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("loss", ENTRY_OF)
def test_named_metrics_are_verls_numbers(oracle: oracle_module.Oracle, loss: str, backend: str) -> None:
    jobs = [Job(loss, REQUIRED.get(loss, {}))]
    if loss == "bypass_mode":
        jobs += [Job(loss, ROLLOUT), Job(loss, {"loss_type": "reinforce"})]
    for job in jobs:
        for batch, per_token in batches(job):
            out = ours(job, job.spec, batch, batch.logp, per_token, None, backend)
            other = batch.to(torch.float64).cleaned()
            want = theirs(oracle, job, other, other.logp, per_token).metrics
            got = job.spec.named_metrics(out.metrics)
            for name, value in got.items():
                assert float(value) == pytest.approx(want[name], rel=1e-5, abs=1e-6), (batch.kind, name)


def test_metrics_that_are_other_numbers_have_no_name(oracle: oracle_module.Oracle) -> None:
    unnamed = {
        ("gspo", "actor/ppo_kl", "approx_kl"),  # verl's is not bounded by 10
        ("geo_mean", "actor/ppo_kl", "approx_kl"),  # verl's is not clipped
        ("geo_mean", "actor/pg_clipfrac", "clip_frac_high"),  # verl counts both sides
        ("kl_cov", "actor/ppo_kl", "approx_kl"),  # verl's is of |log-ratio|
        ("dppo_tv", "actor/pg_clipfrac", "clip_frac"),  # verl's is 1 - keep_frac
    }
    for loss, name, metric in unnamed:
        job = Job(loss)
        assert name not in dict(job.spec.metric_names)
        far = 0.0
        for batch, per_token in batches(job):
            out = ours(job, job.spec, batch, batch.logp, per_token, None, "reference")
            other = batch.to(torch.float64).cleaned()
            want = theirs(oracle, job, other, other.logp, per_token).metrics[name]
            far = max(far, abs(float(out.metrics[metric]) - want))
        assert far > 1e-3, (loss, name)
