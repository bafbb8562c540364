"""liger-kernel 0.8.5: its chunked linear-and-loss (`LigerFusedLinearGRPOLoss`), from hidden states, on a CPU.

Ours takes the logits `hidden @ weight.T + bias`. Liger forms log-probs in fp32 whatever it is given, so both sides
are fp32. Its denominators count every row of the batch, those without a token too; they go to `normalizer=`.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss_from_logits, token_logprobs
from ..losses import loss_spec
from ..outputs import LossOutput
from ..spec import LossSpec
from .cases import PolicyBatch, make_policy_batch
from .rows import Difference, Row, not_installed

VERSION = "0.8.5"
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
MAX_TOKENS = 16
_HIDDEN, _VOCABULARY = 6, 13
_KINDS = ("ragged", "holes", "masked-row", "ratio-30")
UNCLAMPED: Mapping[str, Any] = {"log_ratio_clamp": None}
#: Liger's default beta, with neither of the catalogue's clamps
_KL: Mapping[str, Any] = {"kl": "k3", "kl_coef": 0.04, "kl_log_ratio_clamp": None}


@dataclass(frozen=True)
class Head:
    """The inputs of a linear layer and what follows it; `targets` holds the sampled ids."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Case:
    """One row: Liger's loss and options, the same loss here, and what both are called with."""

    liger: str
    spec: LossSpec
    options: Mapping[str, Any] = field(default_factory=dict)
    option: str = ""
    bias: bool = False
    #: "token" or "sequence": a correction weight a token, or one a sequence
    is_ratio: str = ""
    #: Liger's `num_items_in_batch`
    items: int | None = None
    kinds: tuple[str, ...] = _KINDS


def unclamped(loss: str, **knobs: Any) -> LossSpec:
    """A catalogue entry without the clamp of the log-ratio, which Liger does not have."""
    return loss_spec(loss, **{**UNCLAMPED, **knobs})


def clip_loss(reduction: str, **knobs: Any) -> LossSpec:
    """PPO's clip under one of Liger's reductions."""
    return unclamped("ppo_clip", reduction=reduction, **knobs)


def _gspo(reduction: str) -> LossSpec:
    return unclamped("gspo", epsilon_low=0.2, epsilon_high=0.2, reduction=reduction)


_SEQUENCE = {"importance_sampling_level": "sequence"}
#: for a term that amplifies the rounding of the log-ratios, which both sides do in fp32
_MODERATE = ("ragged", "holes", "masked-row")
DAPO, _GRPO = clip_loss("token-mean"), clip_loss("seq-mean-token-mean")
CASES = (
    Case("grpo", _GRPO),
    Case("bnpo", DAPO),
    Case("dr_grpo", clip_loss("seq-mean-token-sum-norm", max_tokens=MAX_TOKENS), {"max_completion_length": MAX_TOKENS}),
    Case("dapo", DAPO),
    Case("cispo", unclamped("cispo", clip_low=None, clip_high=5.0), {"epsilon_high": 5.0}, "epsilon_high 5"),
    Case("sapo", unclamped("sapo")),
    Case(
        "sapo",
        unclamped("sapo", tau_pos=0.5, tau_neg=2.0),
        {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
        "temperatures 0.5, 2",
    ),
    Case("luspo", unclamped("luspo", epsilon_low=0.2, epsilon_high=0.2), _SEQUENCE, "sequence level"),
    Case("vespo", unclamped("vespo"), kinds=_MODERATE),
    Case(
        "vespo",
        unclamped("vespo", k_pos=1.0, lambda_pos=2.0, k_neg=2.0, lambda_neg=1.5),
        {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5},
        "own k, lambda",
        kinds=_MODERATE,
    ),
    Case(
        "dapo",
        clip_loss("token-mean", epsilon_low=0.1, epsilon_high=0.28),
        {"epsilon_low": 0.1, "epsilon_high": 0.28},
        "epsilon 0.1, 0.28",
    ),
    Case("dapo", clip_loss("token-mean", delta=1.5), {"delta": 1.5}, "delta 1.5"),
    Case("grpo", _gspo("seq-mean-token-mean"), _SEQUENCE, "sequence level"),
    Case("bnpo", _gspo("token-mean"), _SEQUENCE, "sequence level", kinds=("ragged",)),
    Case("grpo", clip_loss("seq-mean-token-mean", **_KL), {"beta": 0.04}, "beta 0.04", kinds=_MODERATE),
    Case(
        "cispo",
        unclamped("cispo", clip_low=None, clip_high=5.0, **_KL),
        {"beta": 0.04, "epsilon_high": 5.0},
        "beta 0.04",
        kinds=_MODERATE,
    ),
    Case(
        "dapo",
        clip_loss("token-mean", kl_ratio="live", **_KL),
        {"beta": 0.04, "use_bias_correction_kl": True},
        "beta 0.04, bias correction",
        kinds=_MODERATE,
    ),
    Case("dapo", DAPO, option="correction (B, T)", is_ratio="token"),
    Case("grpo", _GRPO, option="correction (B, 1)", is_ratio="sequence"),
    Case("vespo", unclamped("vespo"), option="correction (B, T)", is_ratio="token", kinds=_MODERATE),
    Case("dapo", DAPO, option="num_items_in_batch 40", items=40),
    Case("dapo", DAPO, {"temperature": 0.7}, "temperature 0.7, bias", bias=True),
    Case("dapo", DAPO, {"chunk_size": 3}, "chunk_size 3"),
)


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row a loss and option, then one for each of Liger's errors."""
    if importlib.util.find_spec("liger_kernel") is None:
        yield from not_installed("liger", VERSION, LOSSES, "pip install --no-deps liger-kernel==0.8.5 packaging numpy")
        return
    for case in CASES:
        found = difference(case, case.spec, backend)
        yield found.row("liger", VERSION, case.liger, case.spec.reduction, case.option)
    from .liger_errors import error_rows

    yield from error_rows(backend)


def difference(case: Case, spec: LossSpec, backend: str = "auto") -> Difference:
    """The largest differences in the loss and in d hidden and d weight over the case's batches."""
    found = Difference()
    for kind in case.kinds:
        for leaf in ("hidden", "weight"):
            _compare(found, case, spec, kind, leaf, backend)
    return found


def _compare(found: Difference, case: Case, spec: LossSpec, kind: str, leaf: str, backend: str) -> None:
    temperature = case.options.get("temperature", 1.0)
    batch, head = make_head(kind, temperature, case.bias)
    normalizer = denominator(case, batch.mask)
    weights = _correction(case, batch)

    def ours(value: Tensor) -> LossOutput:
        h = replace(head, **{leaf: value})
        return policy_loss_from_logits(
            spec,
            h.hidden @ h.weight.T + h.bias,
            h.targets,
            logp_old=batch.logp_old,
            logp_ref=batch.logp_ref,
            sequence_advantages=batch.advantages,
            mask=batch.mask,
            is_weights=None if weights is None else weights.expand_as(batch.mask).contiguous(),
            normalizer=normalizer,
            temperature=temperature,
            backend=backend,
        )

    def theirs(value: Tensor) -> Tensor:
        return liger_loss(case, batch, replace(head, **{leaf: value}), weights)

    start = replace(batch, logp=getattr(head, leaf))
    found.add(spec, start, ours, theirs, start, normalizer)


def liger_loss(case: Case, batch: PolicyBatch, head: Head, weights: Tensor | None = None) -> Tensor:
    """The scalar of `LigerFusedLinearGRPOLoss`, not compiled, one row a chunk unless the case says otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    options: dict[str, Any] = {"beta": 0.0, "compiled": False, **case.options, "loss_type": case.liger}
    options["use_ref_model"] = options["beta"] != 0.0
    loss, _ = LigerFusedLinearGRPOLoss(**options)(
        head.hidden,
        head.weight,
        head.targets,
        batch.mask.float(),
        batch.advantages,
        head.bias,
        ref_per_token_logps=batch.logp_ref,
        old_per_token_logps=batch.logp_old,
        vllm_is_ratio=weights,
        num_items_in_batch=case.items,
    )
    out: Tensor = loss
    return out


@lru_cache(32)
def make_head(kind: str, temperature: float = 1.0, bias: bool = False) -> tuple[PolicyBatch, Head]:
    """A batch of one kind whose log-probs are those of a linear layer, at the distances that the kind asks for."""
    drawn = make_policy_batch(kind)
    g = torch.Generator().manual_seed(len(kind))
    hidden = torch.randn(*drawn.mask.shape, _HIDDEN, generator=g)
    weight = torch.randn(_VOCABULARY, _HIDDEN, generator=g)
    shift = torch.randn(_VOCABULARY, generator=g) * float(bias)
    targets = torch.randint(0, _VOCABULARY, drawn.mask.shape, generator=g)
    head = Head(hidden, weight, shift, targets)
    logp = token_logprobs(hidden @ weight.T + shift, targets, temperature=temperature, backend="reference").logp
    streams = ("logp_old", "logp_ref", "logp_rollout")
    # a masked place holds anything finite: Liger multiplies by its mask
    moved: dict[str, Any] = {
        name: logp + torch.nan_to_num(getattr(drawn, name) - drawn.logp, 0.5, 0.5, 0.5) for name in streams
    }
    return replace(drawn, logp=logp, **moved), head


def denominator(case: Case, mask: Tensor) -> float:
    """Liger's own denominator: rows with and without a token, or tokens, or the count that it was given."""
    if case.items is not None:
        return float(case.items)
    per_row = case.liger in ("grpo", "sapo", "dr_grpo", "luspo")
    return float(mask.shape[0] if per_row else mask.sum())


def _correction(case: Case, batch: PolicyBatch) -> Tensor | None:
    if not case.is_ratio:
        return None
    ratio = (batch.logp_old - batch.logp_rollout).exp().clamp(max=2.0)
    if case.is_ratio == "sequence":
        return ratio.mean(1, keepdim=True)
    # vespo takes the product over a whole row, masked places too
    return torch.where(batch.mask, ratio, 1.0)
