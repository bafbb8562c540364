"""prime-rl's custom loss: LossInputs of one sequence to LossOutputs."""

import re
import types

import pytest
import torch
from oracles import KINDS, assert_same, assert_step

import fusedpg
from fusedpg.certify.adapters import prime_rl
from fusedpg.certify.adapters.batches import batch, rows_grad
from fusedpg.certify.adapters.compare import stand_in
from fusedpg.certify.adapters.prime_rl import CASES, MEMBERS, MODULE, LossInputs, sequences
from fusedpg.integrations.prime_rl import fused_loss, loss_of


@pytest.fixture(autouse=True)
def prime():
    with stand_in(MODULE, **MEMBERS):
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=[f"{c.loss}-{c.option}" for c in CASES])
def test_prime_s_own_losses(case, kind):
    assert_step(prime_rl, case, kind)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "vespo", "topr"])
def test_catalogue_losses_are_anchored_on_the_sampler(name):
    b = batch("holes")
    inputs, leaves = sequences(b)
    out = [fused_loss(one, name) for one in inputs]
    sum(one.loss for one in out).backward()
    leaf = b.logp.double().requires_grad_()
    spec = fusedpg.loss_spec(name).replace(reduction="token-sum")
    fields = {n: b.logp_rollout.double() for n in ("logp_old", "logp_rollout")}
    want = fusedpg.policy_loss(
        spec, leaf, **fields, mask=b.mask, sequence_advantages=b.advantages.double(), backend="reference"
    )
    want.loss.backward()
    total = sum(one.loss.detach() for one in out)
    assert_same(total, rows_grad(leaves, b.logp), want.loss.detach(), leaf.grad, limit=2e-5)
    assert all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in out[0].metrics.values())


def test_weights_multiply_each_token():
    b = batch("holes", per_token=True)
    (one, *_), (leaf, *_) = sequences(b)
    one.loss_weights = torch.linspace(0.0, 3.0, len(leaf))
    loss = fused_loss(one, "reinforce").loss
    loss.backward()
    want = torch.where(one.loss_mask, -one.advantages * one.loss_weights, 0.0)
    torch.testing.assert_close(leaf.grad, want)
    torch.testing.assert_close(loss.detach(), (want * leaf.detach()).sum())


def test_reference_log_probs_of_both_versions():
    b = batch("ragged")
    inputs, _ = sequences(b)
    older = types.SimpleNamespace(**vars(inputs[0]))
    older.teacher_logprobs = older.__dict__.pop("ref_logprobs")
    new, old = (fused_loss(one, "grpo", kl_coef=0.1).loss for one in (inputs[0], older))
    torch.testing.assert_close(new, old)
    inputs[0].ref_logprobs = None
    with pytest.raises(ValueError, match="^logp_ref: the loss 'grpo' reads it"):
        fused_loss(inputs[0], "grpo", kl_coef=0.1)


@pytest.mark.parametrize("name", ["default", "gspo", "reinforce"])
@pytest.mark.parametrize("length", [0, 5])
def test_nothing_selected_is_a_connected_zero(name, length):
    leaf = torch.full((length,), -1.0, requires_grad=True)
    zeros = torch.zeros(length)
    out = fused_loss(LossInputs(leaf, zeros, None, zeros + 1, zeros.bool()), name)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("ppo_clip", {"reduction": "token-mean"}, "reduction: prime-rl sums over tokens"),
        ("ppo_clip", {"entropy_coef": 0.1}, "entropy_coef: prime-rl's LossInputs cannot honour it"),
        ("echo", {}, "obs_coef: prime-rl's LossInputs cannot honour it"),
        ("clip_cov", {}, "selection: prime-rl's LossInputs cannot honour it"),
        ("dr_grpo", {}, "loss: 'dr_grpo' divides by sequences"),
        ("default", {"teacher_tau": 1.0}, "teacher_tau: presets.prime_rl('default') does not support it"),
        ("default", {"epsilon_low": 1.0}, "epsilon_low: presets.prime_rl('default') never reads it"),
    ],
)
def test_refused_from_the_config(loss, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        loss_of(loss, **options)


def test_unknown_terms_of_the_inputs_are_refused():
    (one, *_), _ = sequences(batch("ragged"))
    one.trainer_mask_logprobs = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="^trainer_mask_logprobs: the fused loss has no term"):
        fused_loss(one)
