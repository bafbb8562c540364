"""Tinker's policy losses, written down from its documentation of each: plain sums over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import tinker
from .rows import Row
from .transcription import ALL_KINDS, BOUNDED, EXTREME, Case, Fields, rows_of_cases


def ratio(b: Fields) -> Tensor:
    """The learner's probability over the sampler's, unbounded."""
    return torch.exp(b.logp - b.logp_rollout)


def importance_sampling(b: Fields) -> Tensor:
    """Minus the sum of r*A."""
    return -(ratio(b) * b.advantages * b.mask).sum()


def ppo(b: Fields, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    """Minus the sum of min(r*A, clip(r)*A)."""
    r = ratio(b)
    objective = torch.min(r * b.advantages, r.clamp(clip_low_threshold, clip_high_threshold) * b.advantages)
    return -(objective * b.mask).sum()


def cispo(b: Fields, clip_low_threshold: float = 0.0, clip_high_threshold: float = 4.0) -> Tensor:
    """Minus the sum of sg[clip(r)]*logp*A."""
    weight = ratio(b).clamp(clip_low_threshold, clip_high_threshold).detach()
    return -(weight * b.logp * b.advantages * b.mask).sum()


def dro(b: Fields, beta: float) -> Tensor:
    """Minus the sum of A*logp - beta/2*(log r)^2."""
    penalty = (b.logp - b.logp_rollout) ** 2
    return -((b.logp * b.advantages - 0.5 * beta * penalty) * b.mask).sum()


def _case(
    body: Callable[..., Tensor], sampler_is_old: bool = True, kinds: tuple[str, ...] = ALL_KINDS, **options: Any
) -> Case:
    said = ", ".join(f"{k}={v}" for k, v in options.items())
    return Case(
        body.__name__,
        options,
        lambda b: body(b, **options),
        said,
        kinds=kinds,
        kinds_fp64=EXTREME if kinds is BOUNDED else (),
        token_advantages=True,
        sampler_is_old=sampler_is_old,
    )


def cases() -> Iterator[Case]:
    """Every loss with its defaults and with other thresholds; also where the sampler is not the old policy."""
    yield _case(importance_sampling, kinds=BOUNDED)
    yield _case(ppo)
    yield _case(ppo, clip_low_threshold=0.9, clip_high_threshold=1.5)
    yield _case(cispo)
    yield _case(cispo, clip_low_threshold=0.8, clip_high_threshold=1.2)
    yield _case(dro, beta=0.05)
    yield _case(dro, beta=1.0)
    for body in (importance_sampling, ppo, cispo):
        yield _case(body, sampler_is_old=False)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss and group of options."""
    yield from rows_of_cases(tinker, cases(), backend)
