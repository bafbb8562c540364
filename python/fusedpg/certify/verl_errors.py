"""verl's known errors, each shown on verl itself: its number, and this library against the right one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..presets._verl import ENTRY_OF
from .cases import PolicyBatch, make_policy_batch
from .rows import Row
from .verl_compare import Case, Right, batches, difference, theirs
from .verl_jobs import GLOBAL, REQUIRED, Job, reduction
from .verl_oracle import Oracle


def error_rows(oracle: Oracle, backend: str) -> Iterator[Row]:
    """A row for each error, "equal" where the installed verl is right."""
    job = Job("geo_mean", {"correct": True})

    def on_global_batch(batch: PolicyBatch, leaf: Tensor) -> Tensor:
        by_rows = theirs(oracle, job, batch, leaf, per_token=False).loss
        return by_rows * batch.mask.shape[0] * GLOBAL["dp_size"] / GLOBAL["global_batch_size"]

    why = "it takes the mean over the rows of the micro-batch and reads no global count"
    yield _row(oracle, job, backend, job.label, batches(job), why, on_global_batch)
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        job = Job("gpg", reduction(mode))
        why = "it multiplies what is masked by 0"
        case = [(make_policy_batch("inf-masked"), True)]
        cleaned = partial(_of_clean, oracle, job)
        yield _row(oracle, job, backend, "inf and NaN at masked places", case, why, cleaned, clean=False)
    for loss in ENTRY_OF:
        for scope in ("global", "local"):
            job = Job(loss, REQUIRED.get(loss, {}), scope)
            case = [(masked_batch(), False)]
            yield _row(oracle, job, backend, f"fully masked micro-batch, {scope}", case, "no token, no loss", nothing)
    job = Job("bypass_mode", {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.5_0.6"})
    why = "a metric divides by the sum of the weights, all 0 here"
    yield _row(oracle, job, backend, f"{job.label}, all outside", [(on_policy_batch(), True)], why, nothing)


def _row(
    oracle: Oracle,
    job: Job,
    backend: str,
    option: str,
    cases: Iterable[Case],
    why: str,
    right: Right,
    clean: bool = True,
) -> Row:
    """This library against `right`; "trainer errs" where verl is not."""
    cases = list(cases)
    found = difference(oracle, job, backend, over=cases, right=right)
    row = found.row("verl", oracle.version, job.loss, job.spec.reduction, option)
    try:
        raw = difference(oracle, job, backend, over=cases, clean=clean)
    except (ValueError, ArithmeticError) as error:
        shown = f"raises {type(error).__name__}: {error}"
    else:
        if raw.within:
            return row
        shown = f"is {raw.value:.2g} off" if raw.value < float("inf") else "gives nan"
    return replace(row, verdict="trainer errs", note=f"verl {shown}: {why}") if found.within else row


def _of_clean(oracle: Oracle, job: Job, batch: PolicyBatch, leaf: Tensor) -> Tensor:
    return theirs(oracle, job, batch, leaf, per_token=True).loss


def nothing(batch: PolicyBatch, leaf: Tensor) -> Tensor:
    """The loss of no tokens."""
    return leaf.sum() * 0


def masked_batch() -> PolicyBatch:
    """A micro-batch without a selected token."""
    batch = make_policy_batch("ragged")
    return replace(batch, mask=torch.zeros_like(batch.mask))


def on_policy_batch() -> PolicyBatch:
    """Every ratio is 1."""
    batch = make_policy_batch("ragged")
    return replace(batch, logp_old=batch.logp)
