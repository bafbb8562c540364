"""cosmos-framework's GRPO objective, written down from its guide to customising an objective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..presets import cosmos
from .cases import PolicyBatch
from .rows import Row
from .transcription import ALL_KINDS, BOUNDED, EXTREME, Case, Fields, rows_of_cases


def clipped(b: Fields, low: float, high: float, dual: float, level: str) -> Tensor:
    """The clipped surrogate with the dual clip (0: off) at a token's ratio, or at a response's without it."""
    c = b.logp
    if level == "token":
        r = torch.exp((c - b.logp_old).clamp(-20.0, 20.0))
    else:
        z = ((c - b.logp_old) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1.0)
        r = torch.exp((z.detach() + (c - c.detach())).clamp(max=10.0))
    x = -torch.min(r * b.advantages, r.clamp(1.0 - low, 1.0 + high) * b.advantages)
    return torch.where(b.advantages < 0, torch.min(x, -dual * b.advantages), x) if dual else x


def k3(b: Fields) -> Tensor:
    """The non-negative estimator of KL(policy||ref): log-ratio in +-20, value in +-10."""
    log_ratio = (b.logp_ref - b.logp).clamp(-20.0, 20.0)
    return (torch.exp(log_ratio) - log_ratio - 1.0).clamp(-10.0, 10.0)


def reduce(x: Tensor, b: Fields, loss_type: str, length: int | None, weight: float | None) -> Tensor:
    """The numerator of a loss type over OBJECTIVE_WEIGHT_SUM: tokens, or sequences."""
    per_sequence = (x * b.mask).sum(1)
    tokens = b.mask.sum(1)
    if loss_type == "token-mean":
        return per_sequence.sum() / (float(tokens.sum()) if weight is None else weight)
    if loss_type == "seq-mean-token-mean":
        per_sequence = per_sequence / tokens.clamp(min=1.0)
    elif loss_type == "seq-mean-token-sum-fixed":
        assert length is not None
        per_sequence = per_sequence / length
    return per_sequence.sum() / (float((tokens > 0).sum()) if weight is None else weight)


def _case(
    loss: str,
    options: dict[str, Any],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 3.0,
    level: str = "token",
    loss_type: str = "token-mean",
    kl_beta: float = 0.0,
    whole_step: bool = False,
) -> Case:
    length = options.get("max_response_length")

    def formula(b: Fields, objective_weight_sum: float | None = None) -> Tensor:
        x = -b.advantages * b.logp if loss == "legacy_pg" else clipped(b, low, high, dual, level)
        return reduce(x + kl_beta * k3(b), b, loss_type, length, objective_weight_sum)

    said = ", ".join(f"{k}={v}" for k, v in options.items() if k != "loss_type")
    said = "; ".join(part for part in (said, "weight of the step" if whole_step else "") if part)
    # the sequence level takes one advantage a response
    return Case(
        loss,
        options,
        formula,
        said,
        step_weight if whole_step else None,
        token_advantages=level == "token",
        clip=low,
        kinds=ALL_KINDS if level == "token" else BOUNDED,
        kinds_fp64=() if level == "token" else EXTREME,
    )


def step_weight(batch: PolicyBatch) -> dict[str, float]:
    """A step of more than this batch; what it counts is the caller's affair."""
    return {"objective_weight_sum": 2.0 * float(batch.mask.sum()) + 5.0}


def cases() -> Iterator[Case]:
    """Surrogates x loss types x weights, then the knobs of the surrogate."""
    types: list[tuple[str, dict[str, Any]]] = [
        ("token-mean", {}),
        ("seq-mean-token-mean", {}),
        ("seq-mean-token-sum", {}),
        ("seq-mean-token-sum-fixed", {"max_response_length": 11}),
    ]
    sequence = {"importance_sampling_level": "sequence", "lower_bound_ratio": 0}
    paper = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    for loss_type, more in types:
        options = {"loss_type": loss_type, **more}
        for whole_step in (False, True):
            yield _case("clipped", options, loss_type=loss_type, whole_step=whole_step)
        yield _case("clipped", {**options, "kl_beta": 0.1}, loss_type=loss_type, kl_beta=0.1)
        at_sequence = {**options, **sequence, **paper}
        yield _case("clipped", at_sequence, low=3e-4, high=4e-4, dual=0, level="sequence", loss_type=loss_type)
    yield _case("clipped", {"lower_bound_ratio": 0}, dual=0)
    yield _case("clipped", {"lower_bound_ratio": 1.1}, dual=1.1)
    yield _case("clipped", {"epsilon_low": 0.1, "epsilon_high": 0.28}, low=0.1, high=0.28)
    mean = "seq-mean-token-mean"
    yield _case("gspo", {}, low=3e-4, high=4e-4, dual=0, level="sequence", loss_type=mean)
    yield _case("gspo", {"kl_beta": 0.1}, low=3e-4, high=4e-4, dual=0, level="sequence", loss_type=mean, kl_beta=0.1)
    fixed = "seq-mean-token-sum-fixed"
    yield _case("dr_grpo", {"max_response_length": 11}, loss_type=fixed, whole_step=True)
    for whole_step in (False, True):
        yield _case("legacy_pg", {}, whole_step=whole_step)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a surrogate, loss type, weight and group of knobs."""
    yield from rows_of_cases(cosmos, cases(), backend)
