"""Presets against formulas written down by hand: plain torch in fp64, gradients by autograd.

A module `transcribed_<trainer>` holds a list of `Case`; `rows_of_cases` turns it into rows of the parity table. What a
formula gets is a `Fields`: every tensor (B, T) in fp64, with masked places already selected away (0), so that a
formula may multiply by its mask as trainers do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..outputs import LossOutput
from ..presets.base import TrainerSpec
from .cases import KINDS, PolicyBatch, make_policy_batch
from .rows import Difference, Row

#: kinds beyond those of `certify.cases`: ratios of e^+-30 on negative advantages, where a dual clip or a clamp binds;
#: and ratios of several times either bound, with both signs
OWN_KINDS = ("negative-30", "spread")
ALL_KINDS = (*KINDS, *OWN_KINDS)
#: how far fp32 may move a log-ratio that sits on a bound: a tie may fall on either side of it
TIE = 4e-7
#: kinds without a ratio that leaves fp32 when nothing bounds it; `EXTREME` is the one that has it
EXTREME = ("ratio-200",)
BOUNDED = tuple(kind for kind in ALL_KINDS if kind not in EXTREME)
#: kinds for a term that amplifies the rounding of fp32 log-ratios themselves
MODERATE = tuple(kind for kind in BOUNDED if not kind.endswith("-30"))


@dataclass(frozen=True)
class Fields:
    """What a formula reads, (B, T) each, fp64, 0 at masked places; `mask` and `obs_mask` hold 0 and 1.

    `entropy` is a fixed function of `logp`, so that its gradient is part of the comparison.
    """

    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    logp_rollout: Tensor
    advantages: Tensor
    mask: Tensor
    obs_mask: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Case:
    """One row of the table: a trainer's loss with its options, and its formula.

    `formula(fields, **counts)` is the scalar loss. `counts`, from a batch, are the trainer's own global counts: they go
    to the formula and to the preset's normaliser rule; none means the counts of the batch itself.
    """

    loss: str
    options: Mapping[str, Any]
    formula: Callable[..., Tensor]
    #: what the row says of the options
    option: str = ""
    counts: Callable[[PolicyBatch], Mapping[str, float]] | None = None
    kinds: tuple[str, ...] = ALL_KINDS
    #: kinds on which this library runs in fp64 as well: fp32 cannot hold the ratio, or rounds a mean of such log-ratios
    #: by more than the limits
    kinds_fp64: tuple[str, ...] = ()
    #: also with one advantage a token
    token_advantages: bool = False
    #: where the kind `ties` puts its ratios: on 1 - clip and 1 + clip
    clip: float = 0.2
    #: the observation mask: "apart" turns a part of the selected tokens into it, "same" is the mask itself
    observes: str = ""
    #: the sampler is the policy of `logp_old`: for a ratio anchored on `logp_rollout`
    sampler_is_old: bool = False
    #: arguments of policy_loss to leave out, for a trainer that does not have them
    without: tuple[str, ...] = ()


def rows_of_cases(preset: Callable[..., TrainerSpec], cases: Iterable[Case], backend: str = "auto") -> Iterator[Row]:
    """One row a case."""
    for case in cases:
        spec = preset(case.loss, **case.options)
        found = difference(case, spec, backend)
        yield found.row(spec.trainer, spec.version, case.loss, spec.reduction, case.option, spec.note)


def difference(case: Case, spec: TrainerSpec, backend: str = "auto") -> Difference:
    """The largest differences between `spec` in fp32 and the case's formula in fp64 over all its batches."""
    found = Difference()
    for kind in (*case.kinds, *case.kinds_fp64):
        for per_token in (False, True)[: 1 + case.token_advantages]:
            batch = _batch(kind, case.clip)
            if kind in case.kinds_fp64:
                batch = batch.to(torch.float64)
            if case.sampler_is_old:
                batch = replace(batch, logp_rollout=batch.logp_old)
            obs_mask = batch.mask if case.observes == "same" else torch.zeros_like(batch.mask)
            if case.observes == "apart":
                batch, obs_mask = _with_observations(batch)
            _compare(found, case, spec, batch, obs_mask, per_token, backend)
    return found


@lru_cache(64)
def _batch(kind: str, clip: float) -> PolicyBatch:
    if kind not in OWN_KINDS:
        return make_policy_batch(kind, clip=clip)
    if kind == "negative-30":
        batch = make_policy_batch("ratio-30")
        return replace(batch, advantages=-batch.advantages, token_advantages=-batch.token_advantages)
    batch = make_policy_batch("holes", seed=1, rows=6)
    moved = [batch.logp + 6.0 * (t - batch.logp) for t in (batch.logp_old, batch.logp_rollout)]
    return replace(batch, logp_old=moved[0], logp_rollout=moved[1])


def _compare(
    found: Difference,
    case: Case,
    spec: TrainerSpec,
    batch: PolicyBatch,
    obs_mask: Tensor,
    per_token: bool,
    backend: str,
) -> None:
    counts = {} if case.counts is None else dict(case.counts(batch))
    normalizer = spec.normalizer(**counts)

    def ours(leaf: Tensor) -> LossOutput:
        return _loss(case, spec, batch, leaf, obs_mask, per_token, normalizer, backend)

    wide = batch.to(torch.float64)
    side = torch.zeros_like(wide.logp)
    if batch.kind == "ties":
        side = _side_of_ties(case, batch, wide, obs_mask, per_token, counts, ours)

    def theirs(leaf: Tensor) -> Tensor:
        return case.formula(_fields(wide, leaf + side, obs_mask, per_token), **counts)

    found.add(spec, batch, ours, theirs, wide, normalizer)


def _loss(
    case: Case,
    spec: TrainerSpec,
    batch: PolicyBatch,
    leaf: Tensor,
    obs_mask: Tensor,
    per_token: bool,
    normalizer: float | None,
    backend: str,
) -> LossOutput:
    args: dict[str, Any] = {
        "logp_old": batch.logp_old,
        "logp_ref": batch.logp_ref,
        "logp_rollout": batch.logp_rollout,
        "mask": batch.mask,
        "normalizer": normalizer,
        "backend": backend,
    }
    args["advantages" if per_token else "sequence_advantages"] = (
        batch.token_advantages if per_token else batch.advantages
    )
    if spec.obs_coef != 0.0:
        args["obs_mask"] = obs_mask
    if spec.entropy_coef != 0.0:
        args["entropy"] = _entropy(leaf)
    for name in case.without:
        args.pop(name, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="logp_old: got None", category=UserWarning)
        return policy_loss(spec, leaf, **args)


def _fields(batch: PolicyBatch, logp: Tensor, obs_mask: Tensor, per_token: bool) -> Fields:
    """The batch with masked places selected away."""
    on = batch.mask
    pick = lambda t, where=on: torch.where(where, t, 0.0)  # noqa: E731
    advantages = batch.token_advantages if per_token else batch.advantages[:, None].expand_as(batch.logp)
    return Fields(
        logp=pick(logp, on | obs_mask),
        logp_old=pick(batch.logp_old),
        logp_ref=pick(batch.logp_ref),
        logp_rollout=pick(batch.logp_rollout),
        advantages=pick(advantages),
        mask=on.double(),
        obs_mask=obs_mask.double(),
        entropy=pick(_entropy(logp)),
    )


def _entropy(logp: Tensor) -> Tensor:
    """Something positive that depends on logp."""
    return -0.3 * logp


def _with_observations(batch: PolicyBatch) -> tuple[PolicyBatch, Tensor]:
    """Every third selected place observes instead of acting: (the batch, the observation mask)."""
    third = torch.arange(batch.mask.numel()).view_as(batch.mask) % 3 == 2
    return replace(batch, mask=batch.mask & ~third), batch.mask & third


def _side_of_ties(
    case: Case,
    batch: PolicyBatch,
    wide: PolicyBatch,
    obs_mask: Tensor,
    per_token: bool,
    counts: Mapping[str, float],
    ours: Callable[[Tensor], LossOutput],
) -> Tensor:
    """A shift of at most `TIE` a token, to the side of a bound on which the rounding of fp32 has put it."""
    leaf = batch.logp.clone().requires_grad_()
    (got,) = torch.autograd.grad(ours(leaf).loss, leaf)
    errors, shifts = [], (0.0, -TIE, TIE)
    for shift in shifts:
        other = wide.logp.clone().requires_grad_()
        loss = case.formula(_fields(wide, other + shift, obs_mask, per_token), **counts)
        (want,) = torch.autograd.grad(loss, other)
        errors.append((got.double() - want).abs())
    stacked = torch.stack(errors)
    # only a token that differs at its own place is on a tie
    nearest = torch.where(stacked[0] > 1e-5 * stacked[0].max().clamp(min=1e-30), stacked.argmin(0), 0)
    return torch.tensor(shifts, dtype=torch.float64)[nearest]
