"""TRL 1.16.0: presets against `GRPOTrainer._compute_loss`, mutants of every axis, metrics, refusals, denominators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl==1.16.0 (the `dev` extra)")

import fusedpg
from fusedpg.certify import against_trl
from fusedpg.certify.cases import KINDS, PolicyBatch, make_policy_batch
from fusedpg.certify.rows import Difference
from fusedpg.certify.trl_cases import CORRECTIONS, COUNTS, KLS, LOSSES, Case, cases, combinations
from fusedpg.certify.trl_oracle import Counts, load, trl_loss
from fusedpg.presets.base import TrainerSpec
from fusedpg.spec import INF, Correction, CorrectionLevel, KLRatio, Level

BACKENDS = ("reference", "cpu")
TABLES = [(loss, level) for loss in LOSSES for level in against_trl.levels(loss)]
SEQUENCE = {"importance_sampling_level": "sequence"}
DETACHED, LIVE = KLS[1:]
DEFAULT_MASK, TOKEN_CLIP, TOKEN_MASK, SEQUENCE_CLIP, SEQUENCE_MASK = CORRECTIONS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize(("loss", "level"), TABLES)
def test_every_combination_is_equal(loss: str, level: str, backend: str) -> None:
    table = list(against_trl.table(loss, level, backend))
    assert len(table) == (4 if loss == "vespo" else 5)
    assert [row for row in table if row.verdict != "equal"] == []
    assert min(row.cases for row in table) >= 12


def test_options_beside_the_spec_are_equal(backend: str) -> None:
    table = list(against_trl.other_options(backend))
    assert len(table) == 9
    assert [row for row in table if row.verdict != "equal"] == []


def test_known_errors_of_trl(backend: str) -> None:
    """A number that becomes equal is no error of TRL any more."""
    table = list(against_trl.errors_of_trl(backend))
    assert [row.verdict for row in table] == ["trainer errs"] * 4
    assert all(row.note for row in table)


def test_every_kind_count_and_shape_of_advantages_meets_every_group() -> None:
    met: dict[str, set[Any]] = {}
    for group, case in cases("dapo", "token"):
        met.setdefault(group, set()).add((case.batch.kind, case.token_advantages))
        met.setdefault("counts " + group, set()).add(case.counts)
    for group in {group for group, _ in combinations("dapo", "token")}:
        kinds = [kind for kind in KINDS if (group, kind) != ("KL times ratio", "ratio-200")]
        assert {kind for kind, _ in met[group]} == set(kinds), group
        assert {by_token for _, by_token in met[group]} == {True, False}
        assert met["counts " + group] == set(COUNTS)


def test_the_table_says_when_trl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_trl, "load", lambda: None)
    table = list(against_trl.rows())
    assert [row.loss for row in table] == list(LOSSES)
    assert {(row.verdict, row.note) for row in table} == {("not installed", "pip install 'trl==1.16.0'")}


# ------------------------------------------------------------------ mutants: what must not pass

Mutate = Callable[[TrainerSpec], TrainerSpec]


def changed(**fields: Any) -> Mutate:
    return lambda spec: replace(spec, **fields)


def swapped(a: str, b: str) -> Mutate:
    return lambda spec: replace(spec, **{a: getattr(spec, b), b: getattr(spec, a)})


MUTANTS: dict[str, tuple[str, dict[str, Any], Mutate]] = {
    "clip_low": ("dapo", {}, changed(clip_low=0.85)),
    "clip_high": ("grpo", {"epsilon_high": 0.28}, changed(clip_high=1.2)),
    "epsilon_high unread": ("bnpo", {"epsilon_high": 0.1}, changed(clip_high=1.2)),
    "delta off": ("dapo", {"delta": 1.3}, changed(delta=INF)),
    "delta off at sequence level": ("luspo", {**SEQUENCE, "epsilon": 0.04, "delta": 1.05}, changed(delta=INF)),
    "delta inside the band unread": ("grpo", {"delta": 1.1}, changed(clip_high=1.2)),
    "clamped log-ratio": ("dapo", DETACHED, changed(log_ratio_clamp=(-20.0, 0.1))),
    "KL off": ("dapo", LIVE, changed(kl_coef=0.0)),
    "KL clamped": ("dapo", DETACHED, changed(kl_clamp=(0.0, 0.05))),
    "KL not bias-corrected": ("dapo", LIVE, changed(kl_ratio=KLRatio.NONE)),
    "KL bias-corrected": ("grpo", DETACHED, changed(kl_ratio=KLRatio.LIVE)),
    "KL correction detached": ("sapo", {**LIVE, **SEQUENCE}, changed(kl_ratio=KLRatio.DETACHED)),
    "token level": ("grpo", SEQUENCE, changed(level=Level.TOKEN)),
    "sequence level": ("cispo", {}, changed(level=Level.SEQUENCE)),
    "gspo_token": ("luspo", {**SEQUENCE, **LIVE}, changed(level=Level.SEQUENCE_TOKEN)),
    "token mask truncates": ("dapo", TOKEN_MASK, changed(is_correction=Correction.TRUNCATE)),
    "token truncate masks": ("cispo", TOKEN_CLIP, changed(is_correction=Correction.MASK)),
    "sequence mask truncates": ("sapo", SEQUENCE_MASK, changed(is_correction=Correction.TRUNCATE)),
    "sequence truncate by token": ("grpo", SEQUENCE_CLIP, changed(is_level=CorrectionLevel.TOKEN)),
    "sequence product is a mean": ("dapo", SEQUENCE_CLIP, changed(is_level=CorrectionLevel.GEOMETRIC)),
    "clip_max": ("dapo", TOKEN_CLIP, changed(is_high=3.0)),
    "clip_min": ("dapo", TOKEN_CLIP, changed(is_low=-INF)),
    "missing is not one": ("dapo", DEFAULT_MASK, changed(is_missing_one=False)),
    "KL inside the correction": ("dapo", {**DETACHED, **TOKEN_CLIP}, changed(kl_coef=0.05)),
    "grpo by token": ("grpo", {}, changed(reduction="token-mean")),
    "luspo by sequence": ("luspo", SEQUENCE, changed(reduction="seq-mean-token-mean")),
    "max_completion_length": ("dr_grpo", {}, changed(max_tokens=511)),
    "cispo at 1 + epsilon_high": ("cispo", {"epsilon_high": 1.1}, changed(clip_high=2.1)),
    "cispo two-sided": ("cispo", {"epsilon_high": 1.1}, changed(clip_low=0.9)),
    "tau swapped": ("sapo", {}, swapped("tau_pos", "tau_neg")),
    "k swapped": ("vespo", {}, swapped("k_pos", "k_neg")),
    "lambda swapped": ("vespo", {}, swapped("lambda_pos", "lambda_neg")),
    "vespo without the weights": (
        "vespo",
        TOKEN_CLIP,
        changed(is_correction=Correction.NONE, is_low=-INF, is_high=INF),
    ),
    "vespo lambda unbounded": ("vespo", {"vespo_lambda_pos": 0.0, "vespo_k_pos": 0.5}, changed(lambda_pos=0.0)),
    "vespo product unbounded": ("vespo", {"vespo_k_pos": 0.1, **TOKEN_MASK}, changed(log_w_clamp=(-60.0, 20.0))),
}


def every_kind(loss: str, options: dict[str, Any], counts: Counts = COUNTS[2]) -> list[Case]:
    """One combination on every batch that fp32 can represent, off the bounds of the default band."""
    batches = [against_trl.batch_for(kind, options) for kind in KINDS if kind != "ties"]
    return [Case(loss, options, batch, counts) for batch in batches if batch is not None]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutated_spec_differs(name: str) -> None:
    loss, options, mutate = MUTANTS[name]
    true, mutant = Difference(), Difference()
    for case in every_kind(loss, options):
        case.compare(true, "reference")
        case.compare(mutant, "reference", spec=mutate(case.spec))
    assert true.within
    assert not mutant.within


WRONG_COUNTS = {
    "steps_per_generation": ("dapo", COUNTS[2], {"steps_per_generation": 2}),
    "default steps_per_generation": ("cispo", COUNTS[3], {"steps_per_generation": None}),
    "num_processes": ("vespo", COUNTS[2], {"num_processes": 1}),
    "num_items_in_batch": ("dapo", COUNTS[2], {"num_items_in_batch": 20}),
    "accumulation": ("grpo", COUNTS[1], {"gradient_accumulation_steps": 1}),
    "evaluation": ("bnpo", COUNTS[4], {"train": True}),
    "evaluation by items": ("dapo", COUNTS[4], {"train": True}),
    "tokens": ("bnpo", COUNTS[1], {"tokens": 20}),
    "rows that are not masked": ("luspo", COUNTS[1], {"rows": 3}),
    "rows of dr_grpo": ("dr_grpo", COUNTS[1], {"rows": 3}),
}


@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_a_wrong_count_differs(name: str) -> None:
    loss, counts, wrong = WRONG_COUNTS[name]
    case = Case(loss, {}, make_policy_batch("masked-row"), counts)
    true, mutant = Difference(), Difference()
    case.compare(true, "reference")
    by = case.spec.normalizer(**{**counts.of(case.batch.mask), **wrong})
    case.compare(mutant, "reference", normalizer=by)
    assert true.within
    assert not mutant.within


# ------------------------------------------------------------------ batches apart


@pytest.mark.parametrize("loss", LOSSES)
def test_a_fully_masked_batch_gives_zero(loss: str, backend: str) -> None:
    batch = make_policy_batch("ragged")
    batch = replace(batch, mask=torch.zeros_like(batch.mask), logp_old=torch.full_like(batch.logp, torch.nan))
    case = Case(loss, LIVE, batch, replace(COUNTS[2], elsewhere=0))
    leaf = batch.logp.clone().requires_grad_()
    out = case.ours(case.spec, leaf, case.normalizer(case.spec), backend)
    out.loss.backward()
    theirs, _ = case.theirs(batch.cleaned().logp.clone().requires_grad_())
    assert out.loss.item() == theirs.item() == 0.0
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_no_old_logp_says_that_it_runs_on_policy(backend: str) -> None:
    batch = make_policy_batch("holes")
    case = Case("dapo", {}, batch, on_policy=True)
    by = case.normalizer(case.spec)
    arguments = {"sequence_advantages": batch.advantages, "mask": batch.mask, "normalizer": by, "backend": backend}
    with pytest.warns(UserWarning, match="on-policy"):
        out = fusedpg.policy_loss(case.spec, batch.logp, **arguments)
    assert out.loss.item() == case.ours(case.spec, batch.logp, by, backend).loss.item()
    assert out.loss.item() == pytest.approx(case.theirs(batch.cleaned().logp.double())[0].item(), abs=1e-7)


def test_a_ratio_on_the_bound_keeps_the_gradient_as_in_trl() -> None:
    """In fp32, with the same exp: r == 1.2 passes, the next larger ratio does not."""
    near = torch.tensor(1.2).log() + torch.arange(-8, 9) * 2**-26
    on = near[near.exp() == torch.tensor(1.2)][:1]
    above = near[near.exp() > torch.tensor(1.2)][:1]
    for d, passes in ((on, True), (above, False)):
        logp = d[None] - 0.0
        batch = PolicyBatch("", logp, *(torch.zeros(1, 1),) * 3, torch.ones(1), torch.ones(1, 1), torch.ones(1, 1) > 0)
        case = Case("dapo", {}, batch)
        ours, theirs = logp.clone().requires_grad_(), logp.clone().requires_grad_()
        case.ours(case.spec, ours, 1.0, "reference").loss.backward()
        case.theirs(theirs)[0].backward()
        assert torch.equal(ours.grad, theirs.grad)
        assert bool(ours.grad != 0) == passes


def test_vespo_clamps_a_token_before_the_product(backend: str) -> None:
    """Log-ratios 25 and -19: 20 - 19 = 1 after the token's clamp, 6 without it."""
    logp, zeros, ones = torch.tensor([[-1.0, -20.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    old = torch.tensor([[-26.0, -1.0]])
    case = Case("vespo", {}, PolicyBatch("", logp, old, zeros, zeros, torch.ones(1), ones, ones > 0))
    true, mutant = Difference(), Difference()
    case.compare(true, backend)
    case.compare(mutant, backend, spec=replace(case.spec, token_clip=(-INF, INF)))
    assert true.within
    assert not mutant.within


def test_vespo_does_not_depend_on_the_padding(backend: str) -> None:
    """TRL's does where clip_max < 1: a masked token adds log(clip_max) to the product of its sequence."""
    options = {**TOKEN_CLIP, "vllm_importance_sampling_clip_max": 0.9}
    batch = make_policy_batch("ragged")
    pad = lambda t: torch.nn.functional.pad(t, (0, 3))  # noqa: E731
    names = ("logp", "logp_old", "logp_ref", "logp_rollout", "token_advantages", "mask")
    padded = replace(batch, **{name: pad(getattr(batch, name)) for name in names})
    ours, theirs = [], []
    for b in (batch, padded):
        case = Case("vespo", options, b)
        ours.append(case.ours(case.spec, b.logp, 30.0, backend).loss.item())
        theirs.append(case.theirs(b.logp.double())[0].item())
    assert ours[0] == pytest.approx(ours[1], rel=1e-6)
    assert abs(theirs[0] - theirs[1]) > 0.1 * abs(theirs[0])


def test_the_stand_in_is_the_unmodified_trainer() -> None:
    trainer, _ = load()
    assert trainer._compute_loss.__module__ == "trl.trainer.grpo_trainer"
    batch = make_policy_batch("ragged").to(torch.float64)
    loss, metrics = trl_loss("dapo", {}, batch, batch.logp)
    ratio = (batch.logp - batch.logp_old).exp()
    x = -torch.minimum(ratio * batch.advantages[:, None], ratio.clamp(0.8, 1.2) * batch.advantages[:, None])
    assert loss.item() == pytest.approx((x * batch.mask).sum().item() / int(batch.mask.sum()))
    assert "clip_ratio/region_mean" in metrics
