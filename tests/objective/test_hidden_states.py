"""A model that returns hidden states with its head trains like one that returns logits, under every objective."""

import itertools

import pytest
import torch
from toy import ADDITIVE, CONTEXT, Policy, assert_same, gradients, make_batch, spec_of, split

import fusedpg
from fusedpg import HiddenStates, linear_walk
from fusedpg.accumulate import StepAccumulator
from fusedpg.builders import build_grpo_objective, build_opd_objective
from fusedpg.config import DPOConfig, GRPOConfig, OPDConfig
from fusedpg.dpo import build_dpo_objective
from fusedpg.old_logp import OldLogpCache
from fusedpg.policy_objective import build_policy_objective


class HiddenPolicy(Policy):
    """The same parameters; hands over what would become the logits."""

    def forward(self, batch):
        ids = batch["input_ids"] if isinstance(batch, dict) else batch.input_ids
        return HiddenStates(self.table[ids].tanh(), self.head.t())


def train(policy, objective, batch):
    model = policy()
    loss, metrics = objective(model, batch)
    loss.backward()
    return loss.detach(), gradients(model), metrics


def compare(objective_of, batch):
    """Loss, metrics and gradients of both models."""
    (loss, grads, metrics), (other, others, mine) = (train(p, objective_of(), batch) for p in (Policy, HiddenPolicy))
    torch.testing.assert_close(other, loss, rtol=1e-9, atol=1e-12)
    assert_same(others, grads)
    assert set(metrics) == set(mine)
    for name in metrics:
        torch.testing.assert_close(torch.as_tensor(mine[name]), torch.as_tensor(metrics[name]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ADDITIVE)
def test_every_loss(name, packed):
    for reduction in ("token-mean", "seq-mean-token-mean"):
        spec = spec_of(name, reduction)
        compare(lambda spec=spec: build_policy_objective(spec, backend="cpu"), make_batch(spec, packed=packed))


@pytest.mark.filterwarnings("ignore:epsilon_low:UserWarning")
def test_grpo_with_a_frozen_old_policy_and_a_reference():
    for knobs in (
        {"kl_beta": 0.1},
        {"grpo_surrogate": "legacy_pg"},
        {"importance_sampling_level": "sequence", "lower_bound_ratio": 0.0},
    ):
        batch = make_batch()
        del batch["logp_old"]
        compare(lambda knobs=knobs: build_grpo_objective(GRPOConfig(**knobs), CONTEXT), batch)


def test_the_cache_and_the_scorer_never_see_logits(monkeypatch):
    """Scoring costs one product a chunk and keeps no graph."""
    calls = []
    real = linear_walk.product
    monkeypatch.setattr(linear_walk, "product", lambda *a, **k: (calls.append(a), real(*a, **k))[1])
    batch = make_batch() | {"batch_id": 0}
    del batch["logp_old"]
    cache = OldLogpCache(certified=True, backend="cpu")
    cache.freeze(HiddenPolicy(), [batch])
    assert len(calls) == 1
    logits = OldLogpCache(certified=True, backend="cpu")
    logits.freeze(Policy(), [batch])
    data = fusedpg.PolicyBatch.of(batch)
    torch.testing.assert_close(cache.lookup(data), logits.lookup(data))


def test_dpo_pairs():
    batch = make_batch()

    def objective():
        objective = build_dpo_objective(DPOConfig(), CONTEXT)
        objective.reference_scorer.bind(HiddenPolicy(seed=3))
        return objective

    del batch["logp_ref"]
    compare(objective, batch)


@pytest.mark.filterwarnings("ignore:distillation_mode:UserWarning")
@pytest.mark.parametrize("teacher_hidden", [False, True])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_direct_distillation(divergence, teacher_hidden):
    teacher = HiddenPolicy(seed=7) if teacher_hidden else Policy(seed=7)
    batch = make_batch()
    with torch.no_grad():
        batch["teacher"] = teacher(batch)
    rl = OPDConfig(distillation_mode="direct", divergence=divergence)
    compare(lambda: build_opd_objective(rl, CONTEXT), batch)


def test_distillation_by_advantage():
    batch = make_batch()
    batch["teacher_logp"] = batch.pop("logp_ref")
    compare(lambda: build_opd_objective(OPDConfig(), CONTEXT), batch)
    del batch["logp_old"]
    compare(lambda: build_opd_objective(OPDConfig(), CONTEXT), batch)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "echo"])
def test_split_equals_whole(name):
    spec = spec_of(name, "seq-mean-token-mean")
    batch = make_batch(spec)
    objective = build_policy_objective(spec, backend="cpu")
    _, whole, _ = train(HiddenPolicy, objective, batch)
    for cuts in ([3], [1, 2, 6], [4, 4]):
        model = HiddenPolicy()
        StepAccumulator(build_policy_objective(spec, backend="cpu"), model).step(split(batch, cuts))
        assert_same(gradients(model), whole, str(cuts))


@pytest.mark.parametrize("path", ["native", "custom"])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "icepop", "echo", "reinforce_kl"])
def test_resolved_losses(name, path):
    """`ResolvedLoss.from_hidden` equals `from_logits` of the product, the head's bias in it."""
    batch = make_batch()
    model = Policy()
    hidden, weight = model.table[batch["input_ids"]].tanh().detach(), model.head.detach().t().contiguous()
    bias = torch.linspace(-1, 1, weight.shape[0], dtype=weight.dtype)
    fields = {k: batch[k] for k in ("logp_old", "logp_ref", "logp_rollout", "sequence_advantages", "mask")}
    fields["obs_mask"] = ~batch["mask"]
    loss = fusedpg.resolve_loss(name, backend="cpu", path=path)
    results = []
    for through_hidden in (False, True):
        h, w, b = (t.clone().requires_grad_() for t in (hidden, weight, bias))
        if through_hidden:
            out = loss.from_hidden(h, w, batch["targets"], bias=b, workspace_mib=1, **fields)
        else:
            out = loss.from_logits(h @ w.t() + b, batch["targets"], **fields)
        out.loss.backward()
        results.append((out, h.grad, w.grad, b.grad))
    for a, b in itertools.zip_longest(*(r[1:] for r in results)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0][0].loss, results[1][0].loss)
    assert results[1][0].path == path


def test_a_cap_or_a_scale_comes_from_one_place():
    hidden, weight, targets = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.long)
    loss = fusedpg.resolve_loss("ppo_clip", backend="cpu")
    fields = {"logp_old": torch.zeros(4), "advantages": 1.0}
    states = HiddenStates(hidden, weight, softcap=3.0, logit_scale=2.0)
    own = loss.from_logits(states, targets, **fields)
    given = loss.from_logits(HiddenStates(hidden, weight), targets, softcap=3.0, logit_scale=2.0, **fields)
    assert own.loss == given.loss
    assert own.loss != loss.from_logits(HiddenStates(hidden, weight), targets, **fields).loss
    with pytest.raises(ValueError, match=r"^softcap: HiddenStates brings its own, 3.0; got 4.0 as well"):
        loss.from_logits(states, targets, softcap=4.0, **fields)
    with pytest.raises(ValueError, match=r"^logit_scale: HiddenStates brings its own, 2.0; got 4.0 as well"):
        loss.from_logits(states, targets, logit_scale=4.0, **fields)
