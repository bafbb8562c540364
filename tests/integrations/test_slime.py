"""slime's custom loss function against its transcribed losses, under slime's own reducer."""

import re
import sys
import types

import pytest
import torch
from oracles import KINDS, assert_step

from fusedpg.certify.adapters import slime
from fusedpg.certify.adapters.batches import batch
from fusedpg.certify.adapters.slime import CASES, PROMPTS, arguments, micro_batch, reducer
from fusedpg.integrations.slime import check_args, fused_loss

IDS = [f"{case.loss}-{case.option}" for case in CASES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_losses(case, kind):
    assert_step(slime, case, kind, limit=3e-5)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_is_reported(case):
    given, logits = micro_batch(batch("holes", case.token_advantages))
    loss, reported = fused_loss(arguments(case.loss, **case.options), given, logits, reducer(given))
    assert reported["loss"].item() == loss.item()
    assert not any(value.requires_grad for value in reported.values())


def test_rows_outside_responses_get_no_gradient():
    given, logits = micro_batch(batch("ragged"))
    loss, _ = fused_loss(arguments(), given, logits, reducer(given))
    loss.backward()
    scored = torch.isfinite(logits.detach()).all(-1)
    assert not logits.grad[~scored].any()
    assert logits.grad[scored].any()


def test_metrics_go_through_the_reducer():
    b = batch("holes")
    given, logits = micro_batch(b)
    _, reported = fused_loss(arguments(entropy_coef=0.01), given, logits, reducer(given))
    kl = (((b.logp_old - b.logp) * b.mask).sum(1) / b.mask.sum(1)).sum()
    assert float(reported["ppo_kl"]) == pytest.approx(float(kl), rel=1e-4)
    assert set(reported) == {"loss", "ppo_kl", "entropy_loss"}


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_nothing_selected_is_a_connected_zero(loss):
    b = batch("ragged")
    given, logits = micro_batch(b)
    given["loss_masks"] = [torch.zeros_like(m) for m in given["loss_masks"]]
    out, _ = fused_loss(arguments(loss), given, logits, reducer(given))
    out.backward()
    assert out.item() == 0.0
    assert not logits.grad.any()


def test_empty_responses_keep_the_graph():
    given, _ = micro_batch(batch(empty=True))
    logits = torch.zeros(1, sum(PROMPTS), 2, requires_grad=True)
    assert given["response_lengths"] == [0] * 4
    out, _ = fused_loss(arguments(), given, logits, reducer(given))
    out.backward()
    assert out.item() == 0.0
    assert not logits.grad.any()


def test_the_custom_reducer_of_the_policy_term(monkeypatch):
    """Dr. GRPO: a constant divisor."""
    module = types.ModuleType("of_the_test_reducer")

    def build(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        given = {"response_lengths": response_lengths, "loss_masks": loss_masks}
        return reducer(given, per_token=True, divide=100.0)

    module.build = build
    monkeypatch.setitem(sys.modules, module.__name__, module)
    given, logits = micro_batch(batch("holes"))
    args = arguments(custom_pg_loss_reducer_function_path="of_the_test_reducer.build")
    loss, _ = fused_loss(args, given, logits, reducer(given))
    want, _ = fused_loss(arguments(), given, logits, reducer(given, per_token=True))
    torch.testing.assert_close(loss, want / 100.0)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size: vocabulary-sharded logits are not supported"),
        ({"context_parallel_size": 4}, "context_parallel_size: split sequences are not supported; got 4"),
        ({"use_opsm": True}, "use_opsm: the fused loss does not have it"),
        ({"true_on_policy_mode": True}, "true_on_policy_mode: the fused loss does not have it"),
        (
            {"use_tis": True, "custom_tis_function_path": "my.function"},
            "custom_tis_function_path: presets.slime('ppo')",
        ),
        (
            {"custom_pg_loss_reducer_function_path": "a.b", "entropy_coef": 0.1},
            "custom_pg_loss_reducer_function_path: slime reduces the policy term with it",
        ),
        (
            {"custom_pg_loss_reducer_function_path": "no_such_module.build"},
            "custom_pg_loss_reducer_function_path: expected module.function; got 'no_such_module.build'",
        ),
    ],
)
def test_refused_before_the_run(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_args(arguments(**options))


def test_lists_are_checked_by_name():
    given, logits = micro_batch(batch("ragged"))
    given["advantages"] = [t[None] for t in given["advantages"]]
    with pytest.raises(ValueError, match="^advantages: expected 1-D tensors, one a sample"):
        fused_loss(arguments(), given, logits, reducer(given))
    given["response_lengths"] = given["total_lengths"]
    with pytest.raises(ValueError, match="^response_lengths: expected less than the sample's"):
        fused_loss(arguments(), given, logits, reducer(given))
