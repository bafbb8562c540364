"""torchforge's f(logits, **targets) against hand-written torch, plain and compiled."""

import re

import pytest
import torch
from oracles import KINDS, assert_same

import fusedpg
from fusedpg.certify.adapters import torchforge
from fusedpg.certify.adapters.batches import batch, step_batch
from fusedpg.certify.adapters.torchforge import PROMPT
from fusedpg.integrations.torchforge import logits_loss


def inputs(kind="holes", empty=False):
    return torchforge.inputs(batch(kind, empty=empty))


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_recipe(kind):
    b = step_batch(kind, False)
    assert_same(*torchforge.step(b), *torchforge.want(b))


def test_it_compiles():
    """As the trainer does before the first step."""
    logits, targets = inputs()
    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    fn = logits_loss("dapo")
    plain = {k: v for k, v in targets.items() if k != "ref_logprobs"}
    fn(eager, **plain).backward()
    torch.compile(fn, backend="aot_eager")(compiled, **plain).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


def test_old_log_probs_and_token_advantages():
    logits, targets = inputs()
    old = targets.pop("ref_logprobs")
    per_token = targets["advantages"].expand(old.shape).contiguous()
    one = logits_loss("cispo")(logits, **targets, old_logprobs=old)
    two = logits_loss("cispo")(logits, **{**targets, "advantages": per_token}, old_logprobs=old)
    torch.testing.assert_close(one, two)
    want = fusedpg.policy_loss_from_logits(
        fusedpg.loss_spec("cispo"), logits[:, PROMPT - 1 : -1], targets["response"], logp_old=old,
        sequence_advantages=targets["advantages"][:, 0], mask=targets["padding_mask"],
    )  # fmt: skip
    torch.testing.assert_close(one, want.loss)


def test_nothing_selected_is_a_connected_zero():
    logits, targets = inputs(empty=True)
    leaf = logits.requires_grad_()
    loss = logits_loss("grpo")(leaf, **targets)
    loss.backward()
    assert loss.item() == 0.0
    assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("loss", "knobs", "message"),
    [
        ("echo", {}, "obs_coef: torchforge's loss cannot honour it"),
        ("clip_cov", {}, "selection: torchforge's loss cannot honour it"),
        ("grpo", {"beta": 0.1}, "beta: the loss 'grpo' never reads it"),
    ],
)
def test_refused_at_construction(loss, knobs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        logits_loss(loss, **knobs)


def test_targets_are_refused_by_name():
    logits, targets = inputs()
    with pytest.raises(ValueError, match="^targets: expected ref_logprobs, old_logprobs, generator_logprobs; got 'kl'"):
        logits_loss("grpo")(logits, **targets, kl=logits)
    with pytest.raises(ValueError, match="^advantages: the loss has one ratio a sequence"):
        logits_loss("gspo")(logits, **{**targets, "advantages": targets["ref_logprobs"]})
