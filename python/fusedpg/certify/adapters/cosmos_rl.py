"""cosmos-rl's `compute_loss` over 1-D selected tokens, under the counts of the whole minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...integrations.cosmos_rl import compute_loss
from ...presets._cosmos_rl import VERSION
from .. import own_code
from ..cases import PolicyBatch
from ..rows import Row
from ..transcribed_cosmos_rl import cases, of_all_workers
from ..transcription import Case
from .batches import Outcome, parts_of, truth
from .compare import OWN_CODE, TRANSCRIBED, rows_of_steps

#: the entropy bonus and the workers' counts are the trainer's own
CASES = [case for case in cases() if case.counts is not of_all_workers and "entropy_coeff" not in case.options]
DEFAULTS: dict[str, Any] = {
    "variant": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": 3.0,
    "aipo_rho": None,
    "loss_type": "token-mean",
    "unbiased_loss_max_tokens": None,
    "balance_dp_token": False,
    "kl_beta": 0.0,
    "unbiased_kl_estimate": False,
    "use_decoupled_loss": False,
    "behav_imp_weight_cap": None,
    "use_rollout_logprobs_for_loss": False,
    "off_policy_masking_delta": None,
    "entropy_coeff": 0.0,
    "positive_nll_coef": None,
}


def config(**options: Any) -> SimpleNamespace:
    """cosmos-rl's config with its defaults."""
    return SimpleNamespace(train=SimpleNamespace(train_policy=SimpleNamespace(**DEFAULTS | options)))


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
    loss, grads = torch.zeros(()), []
    for part in parts_of(b):
        leaf, (one, _, _) = call(part, case.loss, counts, **case.options)
        one.backward()
        loss = loss + one.detach()
        full = torch.zeros_like(part.logp)
        assert leaf.grad is not None
        full[part.mask] = leaf.grad
        grads.append(full)
    return Outcome(loss, torch.cat(grads))


def own(case: Case, b: PolicyBatch) -> Outcome:
    """cosmos-rl's own function over the unsplit minibatch, in fp64."""
    code = own_code.cosmos_rl()
    assert code is not None
    wide = b.to(torch.float64)
    leaf, (loss, _, _) = call(wide, case.loss, function=code.compute_loss, **case.options)
    (grad,) = torch.autograd.grad(loss, leaf)
    full = torch.zeros_like(wide.logp)
    full[b.mask] = grad
    return Outcome(loss.detach(), full)


def want(case: Case, b: PolicyBatch) -> Outcome:
    """The unsplit minibatch, by the transcription."""
    counts: dict[str, Any] = {} if case.counts is None else dict(case.counts(b))
    return truth(b, case.formula, **counts)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a variant."""
    beside = (want, TRANSCRIBED) if own_code.cosmos_rl() is None else (own, OWN_CODE)
    yield from rows_of_steps("cosmos_rl", VERSION, CASES, step, beside[0], backend, beside[1])
