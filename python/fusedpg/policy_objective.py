"""Any `LossSpec` as an Objective: π_old frozen, the reference scored, metrics named, chunks that add up."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .functional import policy_loss
from .hidden_states import Scores, scored_logprobs, scored_loss
from .metric_adapter import OBJECTIVE_NUMERATOR, OBJECTIVE_WEIGHT_SUM, MetricAdapter, ObjectiveMetrics
from .metrics import METRIC_NAMES
from .objective import Objective, PolicyBatch, Reduction, model_scores, require, sequence_sums
from .old_logp import OldLogpCache, ReferenceScorer
from .outputs import LossOutput
from .spec import Anchor, Level, LossSpec, Surrogate
from .weights import inverse_denominator

#: the internal metric that the objective itself adds to those of the op
LOSS = "loss"
#: what it adds where a response has one ratio and one advantage: the ratio, and the responses that the clip drops, each
#: response counted once
RESPONSE_METRICS = ("response_ratio_mean", "response_clip_frac")


def build_policy_objective(
    spec: LossSpec,
    *,
    prefix: str = "policy/",
    temperature: float = 1.0,
    backend: str = "auto",
    old_logp_cache: OldLogpCache | None = None,
    reference_scorer: ReferenceScorer | None = None,
    identity: Mapping[str, Any] | None = None,
    from_teacher: bool = False,
    one_advantage_a_response: bool = False,
) -> Objective:
    """Any loss of the catalogue as an Objective over batches such as `PolicyBatch`.

    Args:
        spec: from `fusedpg.loss_spec` or a preset. A loss that depends on the whole batch (`spec.batch_global`) is no
            sum over chunks and is refused.
        prefix: of the internal metric names.
        temperature: of the loss, and of the cache and the scorer made here.
        backend: "auto", "cpu", "triton" or "reference".
        old_logp_cache: made here when None and the loss is anchored on π_old.
        reference_scorer: made here when None and the loss has a KL term to a reference.
        identity: provenance; the spec's fields when None.
        from_teacher: advantages are teacher_logp - π_old.
        one_advantage_a_response: refuse per-token advantages. With them the stop-gradient form of a sequence's ratio
            is no longer the paper's objective. Without them there are metrics a response (`RESPONSE_METRICS`).

    Returns:
        `Reduction.TOKEN_SUM` with OBJECTIVE_WEIGHT_SUM = `out.weight`; `Reduction.SUM` for `reduction="token-sum"`.

    Raises:
        ValueError: a loss that depends on the whole batch.
    """
    if spec.batch_global:
        raise ValueError(
            f"spec: the loss {spec.name!r} selects tokens over the whole batch, so chunks do not add up; got it in an "
            "objective; call policy_loss_from_logits on the unsplit batch"
        )
    if old_logp_cache is None and _forms_old_ratio(spec):
        old_logp_cache = OldLogpCache(temperature, backend=backend)
    if reference_scorer is None and spec.needs_logp_ref:
        reference_scorer = ReferenceScorer(temperature, backend)
    names = {name: name for name in (LOSS, *METRIC_NAMES)}
    weighted_by: dict[str, str] = {}
    if from_teacher:
        names["teacher_kl"] = "teacher_kl"
        weighted_by = {f"{prefix}teacher_kl": f"{prefix}tokens"}
    if one_advantage_a_response:
        names |= {name: name for name in RESPONSE_METRICS}
        weighted_by |= {f"{prefix}{name}": f"{prefix}sequences" for name in RESPONSE_METRICS}
    fn = partial(
        _policy_gradient_loss,
        spec=spec,
        prefix=prefix,
        temperature=temperature,
        backend=backend,
        old_logp_cache=old_logp_cache,
        reference_scorer=reference_scorer,
        from_teacher=from_teacher,
        one_advantage_a_response=one_advantage_a_response,
    )
    return Objective(
        fn,
        Reduction.SUM if spec.reduction == "token-sum" else Reduction.TOKEN_SUM,
        old_logp_cache=old_logp_cache,
        metric_adapter=MetricAdapter(
            prefix,
            names,
            weighted_by=weighted_by,
            loss=f"{prefix}{LOSS}",
        ),
        identity={"objective": spec.name, "reduction": spec.reduction} if identity is None else identity,
        reference_scorer=reference_scorer,
    )


def _forms_old_ratio(spec: LossSpec) -> bool:
    return spec.anchor == Anchor.OLD and (spec.surrogate != Surrogate.REINFORCE or spec.penalty_coef != 0.0)


def _policy_gradient_loss(
    model: Any,
    batch: Any,
    *,
    spec: LossSpec,
    prefix: str,
    temperature: float,
    backend: str,
    old_logp_cache: OldLogpCache | None,
    reference_scorer: ReferenceScorer | None,
    from_teacher: bool,
    one_advantage_a_response: bool,
) -> tuple[Tensor, ObjectiveMetrics]:
    """One chunk: the loss from logits or hidden states, with π_old from the batch, the cache, or this very forward."""
    data = PolicyBatch.of(batch)
    _check_advantages(spec, data, from_teacher, one_advantage_a_response)
    old = data.logp_old if old_logp_cache is None else old_logp_cache.lookup(data)
    _warn_of_coarse(spec, old)
    ref = data.logp_ref
    if spec.needs_logp_ref and ref is None:
        assert reference_scorer is not None
        ref = reference_scorer(batch)
    fields: dict[str, Any] = {
        "mask": data.mask,
        "logp_ref": ref,
        "logp_rollout": data.logp_rollout,
        "obs_mask": data.obs_mask,
        "is_weights": data.is_weights,
        "cu_seqlens": data.cu_seqlens,
        "backend": backend,
        # an observation term leaves a numerator even where no policy token gives it a weight
        "normalizer": 1.0 if spec.obs_coef else None,
    }
    scores = model_scores(model, batch)
    if from_teacher:
        out, old = _loss_from_teacher(spec, scores, data, old, temperature, fields)
    else:
        fields |= {"advantages": data.advantages, "sequence_advantages": data.sequence_advantages}
        # while the policy still is π_old its own log-probs anchor the ratio: exactly 1, with no second forward
        run = spec.replace(anchor=Anchor.SELF) if old is None and _forms_old_ratio(spec) else spec
        out = scored_loss(run, scores, data.targets, logp_old=old, temperature=temperature, **fields)
        old = out.logp if old is None else old
    if old_logp_cache is not None and data.logp_old is None and torch.is_grad_enabled():
        old_logp_cache.keep(data.batch_id, old)
    loss = out.loss
    scalars = {OBJECTIVE_WEIGHT_SUM: out.weight}
    if spec.obs_coef:
        scalars[OBJECTIVE_NUMERATOR] = out.loss
        loss = out.loss * inverse_denominator(out.weight, None)
    scalars[f"{prefix}{LOSS}"] = loss.detach()
    if from_teacher:
        assert data.teacher_logp is not None
        scalars[f"{prefix}teacher_kl"] = _masked_mean(old - data.teacher_logp, data.mask)
    if one_advantage_a_response:
        means = _response_means(spec, out.logp - old, data)
        scalars |= {f"{prefix}{name}": mean for name, mean in zip(RESPONSE_METRICS, means, strict=True)}
    return loss, ObjectiveMetrics(scalars, {prefix: out.metrics})


def _loss_from_teacher(
    spec: LossSpec, scores: Scores, data: PolicyBatch, old: Tensor | None, temperature: float, fields: dict[str, Any]
) -> tuple[LossOutput, Tensor]:
    """The clipped surrogate with advantages teacher_logp - π_old; (output, π_old)."""
    assert data.teacher_logp is not None
    if old is not None:
        advantages = data.teacher_logp - old
        out = scored_loss(
            spec, scores, data.targets, logp_old=old, advantages=advantages, temperature=temperature, **fields
        )
        return out, old
    lp = scored_logprobs(scores, data.targets, mask=data.mask, temperature=temperature, backend=fields["backend"])
    old = lp.logp.detach()
    return policy_loss(spec, lp.logp, logp_old=old, advantages=data.teacher_logp - old, **fields), old


def _check_advantages(spec: LossSpec, data: PolicyBatch, from_teacher: bool, one_a_response: bool) -> None:
    """The annotation that the loss reads is there, and of its own kind."""
    if from_teacher:
        require("teacher_logp", data.teacher_logp, "distillation_mode='advantage'")
        return
    if data.advantages is None:
        require("sequence_advantages", data.sequence_advantages, f"the loss {spec.name!r}")
    elif one_a_response:
        raise ValueError(
            "advantages: importance_sampling_level='sequence' takes one advantage a response; got one value a token; "
            "pass sequence_advantages of shape (S,), or use importance_sampling_level='token'"
        )


def _warn_of_coarse(spec: LossSpec, old: Tensor | None) -> None:
    if spec.level != Level.TOKEN and old is not None and old.dtype in (torch.bfloat16, torch.float16):
        warnings.warn(
            f"logp_old: {old.dtype} rounds a log-prob more coarsely than a sequence's ratio is clipped "
            f"([{spec.clip_low:g}, {spec.clip_high:g}]), so the clip is noise; pass float32",
            UserWarning,
            stacklevel=3,
        )


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of a mask, each counted once; 0 over none."""
    chosen = mask != 0
    return torch.where(chosen, values, 0.0).sum() / chosen.sum().clamp(min=1)


def _response_means(spec: LossSpec, log_ratio: Tensor, data: PolicyBatch) -> tuple[Tensor, Tensor]:
    """Means over the responses with a token: the ratio, and whether the clip drops the response; 0 over none."""
    assert data.sequence_advantages is not None
    chosen = data.mask != 0
    values = (torch.where(chosen, log_ratio, 0.0).double(), chosen.double())
    total, tokens = (sequence_sums(v, data.cu_seqlens) for v in values)
    low, high = spec.log_ratio_clamp
    ratio = (total / tokens.clamp(min=1)).clamp(low, high).exp()
    a = data.sequence_advantages
    dropped = ((ratio > spec.clip_high) & (a > 0)) | ((ratio < spec.clip_low) & (a < 0))
    held = tokens > 0
    count = held.sum().clamp(min=1)
    return torch.where(held, ratio, 0.0).sum() / count, (dropped & held).sum() / count
