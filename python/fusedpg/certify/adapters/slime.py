"""slime's custom loss function over the logits of concatenated samples, under slime's own reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations.slime import fused_loss
from ...presets._slime import VERSION
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_slime import CASES as EVERY
from ..transcription import Case
from .batches import Outcome, differentiated, lists, parts_of, summed, truth_of_logits, two_way
from .compare import rows_of_steps

#: slime runs 'reinforce' by another switch than the advantage estimator
CASES = [case for case in EVERY if case.loss != "reinforce"]
TEMPERATURE = 0.7
PROMPTS = (2, 1, 3, 2)


def arguments(loss: str = "ppo", **options: Any) -> SimpleNamespace:
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


def micro_batch(b: PolicyBatch) -> tuple[dict[str, Any], Tensor]:
    """(batch, logits (1, T, 2) of all samples end to end): NaN in rows that score no response token."""
    ls = lists(b)
    rows, tokens, lengths = [], [], [len(t) for t in ls.logp]
    prompts = PROMPTS[: len(lengths)]
    for prompt, logp in zip(prompts, ls.logp, strict=True):
        # rows of the prompt but its last, the response's rows, and the row after the last token
        blank = [torch.full((n, 2), torch.nan) for n in (prompt - 1, 1)]
        rows += [blank[0], TEMPERATURE * two_way(logp), blank[1]]
        tokens.append(torch.cat([torch.ones(prompt, dtype=torch.int64), torch.zeros(len(logp), dtype=torch.int64)]))
    given = {
        "unconcat_tokens": tokens,
        "total_lengths": [p + n for p, n in zip(prompts, lengths, strict=True)],
        "response_lengths": lengths,
        "loss_masks": [m.int() for m in ls.mask],
        "log_probs": ls.logp_old,
        "advantages": ls.advantages,
        "rollout_log_probs": ls.logp_rollout,
        "ref_log_probs": ls.logp_ref,
    }
    return given, torch.cat(rows)[None].requires_grad_()


def reducer(given: dict[str, Any], per_token: bool = False, divide: float = 1.0) -> Callable[[Tensor], Tensor]:
    """slime's sum of the samples' means, or of tokens, by its contract."""

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for part, mask in zip(x.split(given["response_lengths"]), given["loss_masks"], strict=True):
            kept = torch.where(mask != 0, part, 0.0).sum()
            total = total + (kept if per_token else kept / mask.sum().clamp(min=1)) / divide
        return total

    return sum_of_sample_mean


def response_rows(grad: Tensor, given: dict[str, Any], like: Tensor) -> Tensor:
    """The gradient of the response's rows as (B, T, 2)."""
    full, end = torch.zeros(*like.shape, 2), 0
    for row, total, n in zip(full, given["total_lengths"], given["response_lengths"], strict=True):
        row[:n] = grad[0, end + total - n - 1 : end + total - 1]
        end += total
    return full


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of micro-batches; the loss takes the backend of its tensors."""
    per_token = case.options.get("calculate_per_token_loss", False)

    def one(part: PolicyBatch) -> Outcome:
        given, logits = micro_batch(part)
        loss, _ = fused_loss(arguments(case.loss, **case.options), given, logits, reducer(given, per_token))
        found = differentiated(loss, logits)
        return Outcome(found.loss, response_rows(found.grad, given, part.logp))

    return summed(map(one, parts_of(b)))


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit step, by the logits."""
    return truth_of_logits(b, case, TEMPERATURE, global_batch_size=1.0, num_tokens=1.0)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row an `advantage_estimator` that decides the loss."""
    yield from rows_of_steps("slime", VERSION, CASES, step, want, backend)
