"""One comparison of the verl preset with verl on the same stored values: verl in fp64, this library in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..functional import policy_loss
from ..outputs import LossOutput
from ..spec import LossSpec, Reject
from .cases import KINDS, PolicyBatch, make_policy_batch
from .rows import Difference
from .verl_jobs import Job
from .verl_oracle import Oracle, Result

#: losses without a bound of the log-ratio: exp(200) is inf in fp32, in verl as here
UNBOUNDED = ("clip_cov", "kl_cov", "geo_mean")
#: a batch, and whether its advantages are a token's
Case = tuple[PolicyBatch, bool]
#: what verl should return for a batch and its logp
Right = Callable[[PolicyBatch, Tensor], Tensor]


def batches(job: Job) -> Iterator[Case]:
    """Two of every kind, the second with wider ratios and the other signs; under local normalisation one of the two."""
    per_token = job.loss != "geo_mean"
    for i, kind in enumerate(KINDS):
        if kind == "ratio-200" and job.loss in UNBOUNDED:
            continue
        if job.scope == "global" or i % 2 == 0:
            yield _decided(make_policy_batch(kind)), per_token
        if job.scope == "global" or i % 2 == 1:
            other = _decided(make_policy_batch(kind, seed=1), width=1.0 if "ratio" in kind else 4.0)
            yield replace(other, logp_ref=other.logp_old, advantages=-other.advantages), False


def _decided(batch: PolicyBatch, width: float = 1.0) -> PolicyBatch:
    """Log-ratios times `width`, no log-prob above 0, and no ratio within rounding of a bound.

    There fp32 and fp64 may fall on different sides; a ratio of 1 is exact in both and stays.
    """
    if batch.kind == "ties":
        width = 1.001
    old = batch.logp + width * (batch.logp_old - batch.logp)
    known = batch.mask & (old > -0.01)
    return replace(batch, logp_old=torch.where(known, -0.01, old))


# ------------------------------------------------------------------ one comparison


def difference(
    oracle: Oracle,
    job: Job,
    backend: str,
    spec: LossSpec | None = None,
    over: Iterable[Case] | None = None,
    right: Right | None = None,
    clean: bool = True,
) -> Difference:
    """The largest differences of a job.

    `spec` replaces its preset, `right` what verl computes; verl gets finite values at masked places unless not `clean`.
    """
    found = Difference()
    run = job.spec if spec is None else spec
    for batch, per_token in batches(job) if over is None else over:
        other = batch.to(torch.float64)
        other = other.cleaned() if clean else other
        normalizer = normalizer_of(oracle, job, other)
        mine = partial(ours, job, run, batch, per_token=per_token, normalizer=normalizer, backend=backend)
        verls = partial(_verl_loss, oracle, job, other, per_token) if right is None else partial(right, other)
        found.add(run, batch, mine, verls, other, normalizer)
    return found


def _verl_loss(oracle: Oracle, job: Job, batch: PolicyBatch, per_token: bool, leaf: Tensor) -> Tensor:
    return theirs(oracle, job, batch, leaf, per_token).loss


def normalizer_of(oracle: Oracle, job: Job, batch: PolicyBatch) -> float | None:
    """The preset's denominator; locally a rejection needs the counts of the mask that is left."""
    spec, counts = job.spec, dict(job.counts)
    if job.loss == "geo_mean" and not job.options.get("correct"):
        return spec.normalizer(rows=batch.mask.shape[0])
    if spec.is_reject != Reject.NONE and not counts:
        kept = oracle.kept(job.options, batch)
        counts = {"batch_num_tokens": int(kept.sum()), "global_batch_size": int(kept.any(1).sum())}
    return spec.normalizer(**counts)


def weights_of(batch: PolicyBatch) -> Tensor:
    """Weights as a trainer forms them, some of them 0; NaN at masked places."""
    g = torch.Generator().manual_seed(7)
    weights = (2 * torch.rand(batch.mask.shape, generator=g) - 0.2).clamp(min=0.0)
    return torch.where(batch.mask, weights, torch.nan)


def entropy_of(job: Job, logp: Tensor, mask: Tensor) -> Tensor | None:
    """An entropy that is a function of logp, so that one gradient holds both."""
    if not job.options.get("entropy_coeff"):
        return None
    chosen = torch.where(mask, logp, -1.0)
    return -chosen.exp() * chosen


@contextmanager
def _same_draw(job: Job) -> Iterator[None]:
    """The random choice of clip_cov repeated; the caller's generator is left as it was."""
    if job.loss != "clip_cov":
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def ours(
    job: Job, spec: LossSpec, batch: PolicyBatch, leaf: Tensor, per_token: bool, normalizer: float | None, backend: str
) -> LossOutput:
    """This library on the batch as it is."""
    bypass = job.loss == "bypass_mode"
    weights = weights_of(batch) if job.weights else None
    if weights is not None and job.loss == "geo_mean":
        weights = geometric_mean(weights, batch.mask)
    with _same_draw(job):
        return policy_loss(
            spec,
            leaf,
            entropy=entropy_of(job, leaf, batch.mask),
            logp_old=None if bypass else batch.logp_old,
            advantages=batch.token_advantages if per_token else None,
            sequence_advantages=None if per_token else batch.advantages,
            mask=batch.mask,
            logp_ref=batch.logp_ref,
            logp_rollout=batch.logp_old if bypass else batch.logp_rollout,
            is_weights=weights,
            normalizer=normalizer,
            backend=backend,
        )


def theirs(oracle: Oracle, job: Job, batch: PolicyBatch, leaf: Tensor, per_token: bool) -> Result:
    """verl on the batch, in its dtype; rows of advantages are spread over their tokens."""
    spread = batch.token_advantages if per_token else batch.advantages[:, None].expand_as(batch.logp).contiguous()
    weights = torch.where(batch.mask, weights_of(batch), 0.0).to(leaf.dtype) if job.weights else None
    entropy = entropy_of(job, leaf, batch.mask)
    with _same_draw(job):
        return oracle.policy_loss(job.loss, job.options, batch, leaf, spread, job.counts, weights, entropy)


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Each sequence's exp(mean of log(weight + 1e-10)) at its tokens, what verl's geo_mean multiplies by."""
    logs = torch.where(mask, (weights.double() + 1e-10).log(), 0.0)
    mean = logs.sum(1) / mask.sum(1).clamp(min=1)
    return mean.exp()[:, None].expand_as(weights).float()
