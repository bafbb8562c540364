"""On-policy distillation in both modes, and preference pairs."""

import itertools
import math
import sys
import types

import pytest
import torch
from toy import CONTEXT, Policy, assert_same, gradients, make_batch, split, whole_gradients

import fusedpg
from fusedpg.accumulate import StepAccumulator
from fusedpg.builders import build_opd_objective
from fusedpg.config import DPOConfig, OPDConfig
from fusedpg.dpo import build_dpo_objective, preference_loss, sequence_logprobs
from fusedpg.metric_adapter import OBJECTIVE_WEIGHT_SUM
from fusedpg.recipes import build_opd_config


def teacher_batch(**changes):
    batch = make_batch(packed=changes.pop("packed", False))
    teacher = Policy(seed=4)
    batch["teacher_logp"] = fusedpg.token_logprobs(teacher(batch), batch["targets"], backend="reference").logp.detach()
    del batch["sequence_advantages"]
    return batch | changes


# ------------------------------------------------------------------ advantage mode


@pytest.mark.parametrize("packed", [False, True])
def test_the_teachers_signal_is_the_advantage(packed):
    """Advantage mode: teacher_logp - π_old's log-prob a token, through the clipped surrogate."""
    batch = teacher_batch(packed=packed)
    objective = build_opd_objective(build_opd_config().rl, CONTEXT)
    loss, got, metrics = whole_gradients(objective, batch)
    model = Policy()
    out = fusedpg.policy_loss_from_logits(
        fusedpg.presets.cosmos("clipped"),
        model(batch),
        batch["targets"],
        logp_old=batch["logp_old"],
        advantages=batch["teacher_logp"] - batch["logp_old"],
        mask=batch["mask"],
        cu_seqlens=batch.get("cu_seqlens"),
        backend="reference",
    )
    out.loss.backward()
    assert loss == out.loss
    assert_same(got, gradients(model))
    gap = (batch["logp_old"] - batch["teacher_logp"])[batch["mask"]].mean()
    torch.testing.assert_close(metrics["opd/teacher_kl"], gap)
    public = objective.public_metrics(metrics)
    assert "train/teacher_kl" in public
    assert OBJECTIVE_WEIGHT_SUM not in public


def test_on_policy_the_student_signal_is_its_own():
    """Before the first update π_old is the student itself: the gradient is that of -(teacher - student)*logp."""
    batch = teacher_batch(logp_old=None)
    loss, got, metrics = whole_gradients(build_opd_objective(OPDConfig(), CONTEXT), batch)
    model = Policy()
    logp = torch.log_softmax(model(batch), -1).gather(-1, batch["targets"][..., None])[..., 0]
    signal = (batch["teacher_logp"] - logp).detach()
    (-(signal * logp)[batch["mask"]].mean()).backward()
    assert_same(got, gradients(model))
    torch.testing.assert_close(loss, -signal[batch["mask"]].mean())
    torch.testing.assert_close(metrics["opd/teacher_kl"], loss)


def test_masked_teacher_values_are_not_read():
    batch = teacher_batch()
    want = whole_gradients(build_opd_objective(OPDConfig(), CONTEXT), batch)
    batch["teacher_logp"] = torch.where(batch["mask"], batch["teacher_logp"], torch.nan)
    got = whole_gradients(build_opd_objective(OPDConfig(), CONTEXT), batch)
    assert got[0] == want[0]
    assert_same(got[1], want[1])
    assert torch.isfinite(got[2]["opd/teacher_kl"])


def test_advantage_mode_splits_like_the_whole():
    batch = teacher_batch()
    objective = build_opd_objective(OPDConfig(loss_type="seq-mean-token-mean"), CONTEXT)
    loss, want, metrics = whole_gradients(objective, batch)
    model = Policy()
    result = StepAccumulator(objective, model).step(split(batch | {"sequence_advantages": torch.zeros(8)}, [2, 5]))
    assert_same(gradients(model), want)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.metrics["train/teacher_kl"], metrics["opd/teacher_kl"])


def test_a_missing_teacher_is_named():
    """The producer's signal is declared data: without it the objective fails loudly."""
    batch = teacher_batch()
    del batch["teacher_logp"]
    with pytest.raises(ValueError, match=r"^batch: distillation_mode='advantage' reads 'teacher_logp'; got none"):
        build_opd_objective(OPDConfig(), CONTEXT)(Policy(), batch)


# ------------------------------------------------------------------ direct mode


def stand_in(student_logits, teacher, **options):
    """Reverse KL over the vocabulary, written out; remembers its options."""
    stand_in.options = options
    t = options["temperature"]
    log_p, log_q = torch.log_softmax(student_logits / t, -1), torch.log_softmax(teacher / t, -1)
    per_token = (log_p.exp() * (log_p - log_q)).sum(-1)
    m = options["mask"].double()
    numerator, weight = (per_token * m).sum(), m.sum()
    loss = numerator * torch.where(weight > 0, 1.0 / weight, 0.0)
    metrics = {"divergence": loss.detach()}
    return types.SimpleNamespace(
        loss=loss,
        numerator=numerator.detach(),
        weight=weight,
        per_token=per_token,
        metrics=metrics,
        backend="reference",
    )


@pytest.fixture
def direct(monkeypatch):
    """Direct mode over the stand-in; its warning is expected."""
    module = types.ModuleType("fusedpg.distill")
    module.distillation_loss = stand_in
    monkeypatch.setitem(sys.modules, "fusedpg.distill", module)

    def build(**knobs):
        with pytest.warns(UserWarning, match="task reward and group advantage are not training signals"):
            return build_opd_objective(OPDConfig(distillation_mode="direct", **knobs), CONTEXT)

    return build


def direct_batch():
    batch = make_batch()
    del batch["sequence_advantages"]
    return batch | {"teacher": Policy(seed=4)(batch).detach()}


def test_direct_mode_hands_the_divergence_its_options(direct):
    """A divergence over the vocabulary from the prepared teacher; advantages are not read."""
    batch = direct_batch()
    objective = direct(temperature=0.8, divergence="jsd", jsd_beta=0.3, loss_type="seq-mean-token-sum-fixed")
    objective(Policy(), batch)
    options = dict(stand_in.options)
    assert options.pop("mask") is batch["mask"]
    assert options == {
        "divergence": "jsd",
        "beta": 0.3,
        "cu_seqlens": None,
        "temperature": 0.8,
        "reduction": "seq-mean-token-sum-norm",
        "max_tokens": 7,
        "backend": "reference",
    }
    assert objective.old_logp_cache is None
    assert objective.identity == {
        "name_or_path": "toy",
        "distillation_mode": "direct",
        "loss_type": "seq-mean-token-sum-fixed",
        "divergence": "jsd",
        "jsd_beta": 0.3,
        "temperature": 0.8,
        "max_response_length": 7,
    }


def test_direct_mode_splits_like_the_whole(direct):
    batch = direct_batch()
    objective = direct()
    loss, want, _ = whole_gradients(objective, batch)
    model = Policy()
    result = StepAccumulator(objective, model).step(split(batch | {"sequence_advantages": torch.zeros(8)}, [1, 2, 5]))
    assert_same(gradients(model), want)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.metrics["train/divergence"], loss)
    del batch["teacher"]
    with pytest.raises(ValueError, match=r"^batch: distillation_mode='direct' reads 'teacher'; got none"):
        objective(Policy(), batch)


# ------------------------------------------------------------------ DPO


def pairs(packed=False):
    """Four pairs; the second has no token at all."""
    batch = make_batch(packed=packed)
    if packed:
        rows = torch.searchsorted(batch["cu_seqlens"], torch.arange(len(batch["targets"])), right=True) - 1
        batch["mask"] = batch["mask"] & (rows % 4 != 1)
    else:
        batch["mask"] = batch["mask"] & (torch.arange(8) % 4 != 1)[:, None]
    return batch


def sums(logp, batch):
    values = torch.where(batch["mask"], logp, 0.0)
    if "cu_seqlens" not in batch:
        return values.sum(1)
    cu = batch["cu_seqlens"].tolist()
    return torch.stack([values[a:b].sum() for a, b in itertools.pairwise(cu)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_is_its_formula(loss, smoothing, packed):
    """Sigmoid and IPO over sums of native log-probs; gradient through the policy only."""
    batch = pairs(packed)
    objective = build_dpo_objective(DPOConfig(loss=loss, beta=0.3, label_smoothing=smoothing), CONTEXT)
    got_loss, got, metrics = whole_gradients(objective, batch)
    model = Policy()
    logp = torch.log_softmax(model(batch), -1).gather(-1, batch["targets"][..., None])[..., 0]
    gain = sums(logp, batch) - sums(batch["logp_ref"], batch)
    h = (gain[:4] - gain[4:])[[0, 2, 3]]
    if loss == "ipo":
        want = ((h - 1 / 0.6) ** 2).mean()
    else:
        want = -((1 - smoothing) * torch.sigmoid(0.3 * h).log() + smoothing * torch.sigmoid(-0.3 * h).log()).mean()
    want.backward()
    torch.testing.assert_close(got_loss, want.detach())
    assert_same(got, gradients(model))
    assert metrics[OBJECTIVE_WEIGHT_SUM] == 3
    torch.testing.assert_close(metrics["dpo/reward_margin"], 0.3 * h.detach().mean())
    assert metrics["dpo/accuracy"] == (h > 0).double().mean()


def test_dpo_reference_comes_in_three_ways():
    """A token, a sequence, or the frozen reference's scorer."""
    batch = pairs()
    objective = build_dpo_objective(DPOConfig(), CONTEXT)
    reference = Policy(seed=3)
    logp = fusedpg.token_logprobs(reference(batch), batch["targets"], mask=batch["mask"], backend="reference").logp
    want = objective(Policy(), {**batch, "logp_ref": logp})[0]
    given = {k: v for k, v in batch.items() if k != "logp_ref"}
    torch.testing.assert_close(objective(Policy(), {**given, "ref_sequence_logp": sums(logp, batch).detach()})[0], want)
    objective.reference_scorer.bind(reference)
    torch.testing.assert_close(objective(Policy(), given)[0], want)
    with pytest.raises(ValueError, match=r"^ref_sequence_logp: expected shape \(8,\).*got \(3,\)"):
        objective(Policy(), {**given, "ref_sequence_logp": torch.zeros(3)})


def test_dpo_splits_at_pairs():
    """OBJECTIVE_WEIGHT_SUM counts pairs; a chunk of whole pairs, and one with none, add up."""
    batch = pairs()
    objective = build_dpo_objective(DPOConfig(), CONTEXT)
    loss, want, _ = whole_gradients(objective, batch)
    chunks = [{k: v[[*r, *(i + 4 for i in r)]] for k, v in batch.items()} for r in ([0, 3], [1], [2])]
    model = Policy()
    result = StepAccumulator(objective, model).step(chunks)
    assert_same(gradients(model), want)
    torch.testing.assert_close(result.loss, loss)
    with pytest.raises(ValueError, match=r"^batch: expected P chosen sequences .* got 7 sequences"):
        objective(Policy(), {k: v[:7] for k, v in batch.items()})


def test_preference_literals():
    """h = 0 is ln 2; IPO is 0 at h = 1/(2 beta)."""
    h = torch.tensor([0.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(preference_loss(h, "sigmoid", 0.1)[0].item(), math.log(2))
    assert preference_loss(h, "ipo", 0.1)[1] == 0
    torch.testing.assert_close(
        preference_loss(h, "sigmoid", 0.1, 0.2)[1].item(), 0.8 * 0.474076984180107 + 0.2 * 0.974076984180107
    )
    with pytest.raises(ValueError, match=r"^loss: expected 'sigmoid' or 'ipo'; got 'hinge'"):
        preference_loss(h, "hinge", 0.1)


def test_a_nan_stays_in_its_sequence():
    logp = torch.tensor([1.0, torch.nan, 2.0, 3.0])
    cu = torch.tensor([0, 2, 2, 4])
    got = sequence_logprobs(logp, torch.tensor([1.0, 1.0, 0.5, 1.0]), cu)
    assert got[0].isnan()
    assert got[1:].tolist() == [0.0, 4.0]
    assert sequence_logprobs(logp, torch.tensor([True, False, True, True]), cu).tolist() == [1.0, 0.0, 5.0]
    with pytest.raises(ValueError, match=r"^cu_seqlens: packed sequences need their boundaries"):
        sequence_logprobs(logp, torch.ones(4), None)
