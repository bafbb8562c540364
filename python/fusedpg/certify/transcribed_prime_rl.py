"""prime-rl's default and ipo losses, transcribed: one sum over tokens divided by the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import _prime_rl
from .cases import PolicyBatch
from .rows import Row
from .transcription import Case, Fields, rows_of_cases


def rows(backend: str = "auto") -> Iterator[Row]:
    """Both losses with their thresholds."""
    yield from rows_of_cases(_prime_rl.prime_rl, CASES, backend)


def _formula(loss: str, o: dict[str, Any]) -> Callable[..., Tensor]:
    def formula(f: Fields, *, rl_scale: float = 1.0) -> Tensor:
        log_ratio = f.logp - f.logp_rollout
        moved = f.logp.detach().exp() - f.logp_rollout.exp()
        if loss == "default":
            above, below = moved > o.get("dppo_mask_high", 0.2), moved < -o.get("dppo_mask_low", 0.2)
            dropped = torch.where(f.advantages > 0, above, below)
        else:
            dropped = moved.abs() > o.get("ipo_threshold", 0.1)
        kept = f.mask * (~dropped)
        policy = kept * f.advantages * log_ratio.exp()
        squared = f.mask * log_ratio**2
        return (-policy + o.get("kl_tau", 1e-3) * squared).sum() / rl_scale

    return formula


def _case(loss: str, option: str = "", *, scaled: bool = False, **options: Any) -> Case:
    return Case(
        loss,
        options,
        _formula(loss, options),
        option,
        counts=_scale if scaled else None,
        token_advantages=True,
    )


def _scale(batch: PolicyBatch) -> dict[str, float]:
    """The tokens of three such micro-batches."""
    return {"rl_scale": 3.0 * float(batch.mask.sum())}


CASES = (
    _case("default"),
    _case("default", "loss scale", scaled=True),
    _case("default", "mask 0.05, 0.1", dppo_mask_low=0.05, dppo_mask_high=0.1),
    _case("default", "kl_tau 0", kl_tau=0.0),
    _case("default", "kl_tau 0.1", kl_tau=0.1),
    _case("ipo"),
    _case("ipo", "loss scale", scaled=True),
    _case("ipo", "ipo_threshold 0.03, kl_tau 0.01", ipo_threshold=0.03, kl_tau=0.01),
)
