"""Tinker's `forward_backward_custom`: the loss over its data, and the weights that its client sends."""

import re
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, assert_step

import fusedpg
from fusedpg.certify.adapters import tinker as trainer
from fusedpg.certify.adapters.batches import batch, lists
from fusedpg.certify.adapters.tinker import CASES, TensorData, client, datums
from fusedpg.integrations.tinker import custom_loss, own_loss

IDS = [f"{case.loss}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_own_losses(case, kind):
    assert_step(trainer, case, kind)


def test_metrics_carry_the_loss_s_name():
    b = batch("holes", per_token=True)
    ls = lists(b)
    spec = own_loss("ppo")
    _, metrics, _ = client(custom_loss(spec), datums(ls), ls.logp)
    assert metrics[f"{spec.name}/tokens"] == float(b.mask.sum())


def test_the_weights_reproduce_the_gradient():
    """Backend cross-entropy is sum(-logp*weights): its gradient is that of the loss."""
    ls = lists(batch("ragged"))
    loss_fn = custom_loss("ppo_clip", epsilon_low=0.1, epsilon_high=0.1)
    _, _, weights = client(loss_fn, datums(ls), ls.logp)
    direct = [row.clone().requires_grad_() for row in ls.logp]
    loss_fn(datums(ls), direct)[0].backward()
    surrogate = [row.clone().requires_grad_() for row in ls.logp]
    sum((-row * w).sum() for row, w in zip(surrogate, weights, strict=True)).backward()
    for ours, theirs in zip(direct, surrogate, strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad)


def test_a_mean_counts_the_call_or_what_is_given():
    b = batch("holes")
    ls = lists(b)
    own = custom_loss("reinforce")(datums(ls), ls.logp)[0]
    halved = custom_loss("reinforce", normalizer=2.0 * float(b.mask.sum()))(datums(ls), ls.logp)[0]
    torch.testing.assert_close(halved, own / 2)


def test_old_and_reference_log_probs():
    b = batch("holes")
    ls = lists(b)
    fn = custom_loss("grpo", kl_coef=0.1)
    loss, _, _ = client(fn, datums(ls, ("mask", "old_logprobs", "ref_logprobs")), ls.logp)
    spec = fusedpg.loss_spec("grpo", kl_coef=0.1)
    args = {"logp_old": b.logp_old, "logp_ref": b.logp_ref, "mask": b.mask}
    want = fusedpg.policy_loss(spec, b.logp, **args, sequence_advantages=b.advantages).loss
    torch.testing.assert_close(loss.detach(), want)


@pytest.mark.parametrize("wrap", [TensorData, lambda t: t, lambda t: t.tolist()])
def test_forms_of_values(wrap):
    ls = lists(batch("ragged"))
    want = custom_loss("cispo")(datums(ls), ls.logp)[0]
    torch.testing.assert_close(custom_loss("cispo")(datums(ls, wrap=wrap), ls.logp)[0], want)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "reinforce"])
def test_masked_and_empty_data_are_zeros(name):
    b = batch("ragged", empty=True)
    ls = lists(b)
    rows = list(b.logp)  # nothing selected, rows of full length
    full = SimpleNamespace(**vars(ls) | {n: list(getattr(b, n)) for n in ("logp_rollout", "mask")})
    full.advantages = list(b.token_advantages)
    loss, metrics, weights = client(custom_loss(name), datums(full), rows)
    assert loss.item() == 0.0
    assert not any(w.any() for w in weights)
    assert all(value == value for value in metrics.values())
    assert custom_loss(name)([], [])[0].item() == 0.0


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: custom_loss("ppo"), "name: expected one of"),
        (lambda: custom_loss("ppo_clip", entropy_coef=0.1), "entropy_coef: Tinker's forward_backward_custom cannot"),
        (lambda: custom_loss("reinforce", epsilon_low=0.1), "epsilon_low: the loss 'reinforce' never reads it"),
        (lambda: custom_loss(own_loss("ppo"), beta=1.0), "beta: 'ppo_clip' came as a spec"),
        (lambda: own_loss("gspo"), "its formula is not published"),
    ],
)
def test_refused_at_construction(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_data_are_checked_by_name():
    ls = lists(batch("ragged"))
    with pytest.raises(ValueError, match=r"expects loss_fn_inputs\['mask'\]"):
        custom_loss("ppo_clip")(datums(ls, ()), ls.logp)
    short = datums(ls)
    short[1].loss_fn_inputs["advantages"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"\['advantages'\] of shape \(\d,\) at 1"):
        custom_loss("ppo_clip")(short, ls.logp)
    some = datums(ls)
    del some[2].loss_fn_inputs["mask"]
    with pytest.raises(ValueError, match=r"\['mask'\] in every datum; got none at 2"):
        custom_loss("ppo_clip")(some, ls.logp)
    with pytest.raises(ValueError, match=r"expected 1-D tensors, one a sample; got \(4, 1\) at 0"):
        custom_loss("ppo_clip")(datums(ls), [torch.zeros(4, 1)] * len(ls.logp))
    without = datums(ls)
    for datum in without:
        del datum.loss_fn_inputs["logprobs"]
    with pytest.raises(ValueError, match=r"reads loss_fn_inputs\['logprobs'\], the sampler's; got none"):
        custom_loss("ppo_clip")(without, ls.logp)
    with pytest.raises(ValueError, match=r"^logprobs_list: expected one tensor a datum, 4; got 1"):
        custom_loss("ppo_clip")(datums(ls), ls.logp[:1])


# ------------------------------------------------------------------ the SDK itself


def test_the_sdk_s_client_sends_our_gradients():
    """The client side of tinker's SDK, without the service."""
    tinker = pytest.importorskip("tinker", exc_type=ImportError)
    from tinker.lib.public_interfaces.training_client import TrainingClient

    ls = lists(batch("ragged"))
    rows = range(len(ls.logp))
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1] * len(ls.logp[i])),
            loss_fn_inputs={
                "target_tokens": torch.zeros(len(ls.logp[i]), dtype=torch.int64),
                "logprobs": ls.logp_rollout[i],
                "advantages": ls.advantages[i],
                "mask": ls.mask[i].float(),
            },
        )
        for i in rows
    ]
    forward = SimpleNamespace(
        loss_fn_outputs=[{"logprobs": tinker.TensorData.from_torch(ls.logp[i])} for i in rows], metrics={}
    )
    result = TrainingClient._compute_custom_loss(data, custom_loss("gspo_token", epsilon_low=3e-4), forward)
    _, _, want = client(custom_loss("gspo_token", epsilon_low=3e-4), datums(ls), ls.logp)
    for datum, weights in zip(result.data, want, strict=True):
        torch.testing.assert_close(datum.loss_fn_inputs["weights"].to_torch(), weights)
    assert result.metrics["gspo_token/sequences"] == len(ls.logp)
