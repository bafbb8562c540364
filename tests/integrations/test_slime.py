"""slime's custom loss function against its transcribed losses, under slime's own reducer."""

import re
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from oracles import KINDS, assert_same, batch, fields, lists

from fusedpg.certify.transcribed_slime import CASES
from fusedpg.integrations.slime import check_args, fused_loss

IDS = [f"{case.loss}-{case.option}" for case in CASES]
TEMPERATURE = 0.7
PROMPTS = (2, 1, 3, 2)
#: slime runs 'reinforce' by another switch than the advantage estimator
RUN = [(case, name) for case, name in zip(CASES, IDS, strict=True) if case.loss != "reinforce"]


def arguments(loss="ppo", **options):
    """The command line, by its contract; slime's defaults."""
    own = {
        "advantage_estimator": loss if loss in ("gspo", "cispo") else "grpo",
        "rollout_temperature": TEMPERATURE,
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "use_unbiased_kl": False,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "custom_tis_function_path": None,
        "use_opsm": False,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "custom_pg_loss_reducer_function_path": None,
    }
    return SimpleNamespace(**own | options)


def micro_batch(b):
    """(batch, logits (1, T, 2) of all samples end to end, the places of their response tokens in the batch)."""
    ls = lists(b)
    rows, tokens, lengths = [], [], [len(t) for t in ls.logp]
    for prompt, logp in zip(PROMPTS, ls.logp, strict=True):
        scored = TEMPERATURE * torch.stack([logp, torch.log1p(-logp.exp())], -1)
        # rows of the prompt but its last, the response's rows, and the row after the last token
        rows += [torch.full((prompt - 1, 2), torch.nan), scored, torch.full((1, 2), torch.nan)]
        tokens.append(torch.cat([torch.ones(prompt, dtype=torch.int64), torch.zeros(len(logp), dtype=torch.int64)]))
    given = {
        "unconcat_tokens": tokens,
        "total_lengths": [p + n for p, n in zip(PROMPTS, lengths, strict=True)],
        "response_lengths": lengths,
        "loss_masks": [m.int() for m in ls.mask],
        "log_probs": ls.logp_old,
        "advantages": ls.advantages,
        "rollout_log_probs": ls.logp_rollout,
        "ref_log_probs": ls.logp_ref,
    }
    return given, torch.cat(rows)[None].requires_grad_()


def reducer(given, per_token=False, divide=1.0):
    """slime's sum of the samples' means, or of tokens, by its contract."""

    def sum_of_sample_mean(x):
        total = 0.0
        for part, mask in zip(x.split(given["response_lengths"]), given["loss_masks"], strict=True):
            kept = torch.where(mask != 0, part, 0.0).sum()
            total = total + (kept if per_token else kept / mask.sum().clamp(min=1)) / divide
        return total

    return sum_of_sample_mean


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [c for c, _ in RUN], ids=[i for _, i in RUN])
def test_losses(case, kind):
    b = batch(kind, case.token_advantages)
    given, logits = micro_batch(b)
    per_token = case.options.get("calculate_per_token_loss", False)
    loss, reported = fused_loss(arguments(case.loss, **case.options), given, logits, reducer(given, per_token))
    loss.backward()
    full = torch.stack([b.logp, torch.log1p(-b.logp.exp())], -1).double()
    leaf = (TEMPERATURE * full).requires_grad_()
    p = torch.log_softmax(leaf / TEMPERATURE, -1)
    counts = {"global_batch_size": 1.0, "num_tokens": 1.0}
    want = case.formula(fields(b, p[..., 0], entropy=-(p.exp() * p).sum(-1)), **counts)
    want.backward()
    got, end = torch.zeros_like(leaf), 0
    for row, prompt, n in zip(got, PROMPTS, given["response_lengths"], strict=True):
        row[:n] = logits.grad[0, end + prompt - 1 : end + prompt - 1 + n]
        end += prompt + n
    assert_same(loss, got, want.detach(), leaf.grad, limit=3e-5)
    assert not torch.isnan(logits.grad).any()
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
