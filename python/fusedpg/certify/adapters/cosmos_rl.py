"""cosmos-rl's `compute_loss` over 1-D selected tokens, under the counts of the whole minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations.cosmos_rl import compute_loss
from ...presets._cosmos_rl import VERSION, options_of
from .. import own_code
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_cosmos_rl import cases, of_all_workers
from ..transcription import Case
from .batches import Outcome, differentiated, parts_of, summed, truth
from .compare import OWN_CODE, TRANSCRIBED, rows_of_steps

#: the entropy bonus and the workers' counts are the trainer's own
CASES = [case for case in cases() if case.counts is not of_all_workers and "entropy_coeff" not in case.options]


def config(**options: Any) -> SimpleNamespace:
    """cosmos-rl's config with its defaults."""
    return SimpleNamespace(
        train=SimpleNamespace(train_policy=SimpleNamespace(**{"variant": "grpo", **options_of(), **options}))
    )


def call(
    b: PolicyBatch,
    variant: str = "grpo",
    counts: dict[str, float] | None = None,
    function: Callable[..., tuple[Tensor, Tensor, Tensor]] = compute_loss,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(leaf, result) of a call as the trainer makes it: (N,) selected tokens, (B, T) advantages and masks."""
    pick = lambda t: t[b.mask]  # noqa: E731
    leaf = pick(b.logp).clone().requires_grad_()
    cu = torch.cat([torch.zeros(1), b.mask.sum(1).cumsum(0)]).int()
    old = pick(b.logp_rollout if options.pop("use_rollout_logprobs_for_loss", False) else b.logp_old)
    lists = [row[m].tolist() for row, m in zip(b.logp_rollout, b.mask, strict=True)]
    result = function(
        leaf,
        old,
        pick(b.logp_ref),
        b.token_advantages,
        cu,
        config(variant=variant, **options),
        b.mask,
        rollout_per_token_logps=lists if options.get("use_decoupled_loss") else None,
        **({} if counts is None else {"normalization_counts": counts}),
    )
    return leaf, result


def step(case: Case, b: PolicyBatch, backend: str = "auto") -> Outcome:
    """The sum of micro-batches; `compute_loss` takes the backend of its tensors."""
    counts = {"tokens": float(b.mask.sum()), "sequences": b.mask.shape[0], "dp_workers": 1}

    def one(part: PolicyBatch) -> Outcome:
        leaf, (loss, _, _) = call(part, case.loss, counts, **case.options)
        return in_rows(differentiated(loss, leaf), part)

    return summed(map(one, parts_of(b)))


def in_rows(selected: Outcome, b: PolicyBatch) -> Outcome:
    """With the gradient of the selected tokens as (B, T)."""
    full = torch.zeros_like(b.logp)
    full[b.mask] = selected.grad
    return Outcome(selected.loss, full)


def own(case: Case, b: PolicyBatch) -> Outcome:
    """cosmos-rl's own function over the unsplit minibatch, in fp64."""
    code = own_code.cosmos_rl()
    assert code is not None
    wide = b.to(torch.float64)
    leaf, (loss, _, _) = call(wide, case.loss, function=code.compute_loss, **case.options)
    return in_rows(differentiated(loss, leaf), wide)


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit minibatch, by the transcription."""
    counts: dict[str, Any] = {} if case.counts is None else dict(case.counts(b))
    return truth(b, case.formula, **counts)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a variant."""
    beside = (want, TRANSCRIBED) if own_code.cosmos_rl() is None else (own, OWN_CODE)
    yield from rows_of_steps("cosmos_rl", VERSION, CASES, step, beside[0], backend, beside[1])
