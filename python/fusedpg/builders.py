"""Objectives that a config selects.

Builders are module-level functions and an objective's `fn` is a `functools.partial` over plain values, so both reach
worker processes by pickle.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .config import GRPOConfig, OPDConfig, PolicyGradientConfig
from .distill import DISTILL_METRIC_NAMES
from .metric_adapter import OBJECTIVE_WEIGHT_SUM, MetricAdapter, ObjectiveMetrics
from .metrics import Metrics
from .objective import Objective, PolicyBatch, Reduction, model_scores, require
from .old_logp import OldLogpCache
from .policy_objective import LOSS, build_policy_objective
from .preflight import check_knobs, policy_spec, reads_ratio, selected


def build_grpo_objective(rl: GRPOConfig, context: Any) -> Objective:
    """The GRPO objective that a config selects: clipped (GRPO, Dr-GRPO, GSPO, DAPO) or legacy_pg.

    Args:
        rl: the resolved algorithm config.
        context: the trainer's: `name_or_path`, the policy's identity, and `max_response_length`, read when
            `loss_type="seq-mean-token-sum-fixed"`; optionally `backend` ("auto").

    Returns:
        An Objective over `PolicyBatch`es with `sequence_advantages` (or, at token level, `advantages`).

    Raises:
        TypeError, ValueError: a knob that the selected surrogate never reads, a response bound that is none.
    """
    if not isinstance(rl, GRPOConfig):
        raise TypeError(f"rl: expected a GRPOConfig; got {type(rl).__name__}")
    check_knobs(rl)
    spec = policy_spec(rl, getattr(context, "max_response_length", None))
    return build_policy_objective(
        spec,
        prefix="grpo/",
        temperature=rl.temperature,
        backend=getattr(context, "backend", "auto"),
        old_logp_cache=_cache(rl, context),
        identity=_identity(rl, context),
        one_advantage_a_response=rl.importance_sampling_level == "sequence",
    )


def build_opd_objective(rl: OPDConfig, context: Any) -> Objective:
    """On-policy distillation: the clipped surrogate over a teacher's signal, or a divergence over the vocabulary.

    Mode `advantage` reads `teacher_logp` (targets' shape) from the batch: the advantage of a token is
    teacher_logp - π_old's log-prob. Mode `direct` reads `teacher`, whatever `fusedpg.distill.distillation_loss` takes.

    Args:
        rl: the resolved algorithm config.
        context: as in `build_grpo_objective`.

    Raises:
        TypeError, ValueError: a knob that the selected mode never reads, a context without identity.
    """
    if not isinstance(rl, OPDConfig):
        raise TypeError(f"rl: expected an OPDConfig; got {type(rl).__name__}")
    check_knobs(rl)
    length = getattr(context, "max_response_length", None)
    backend = getattr(context, "backend", "auto")
    spec = policy_spec(rl, length)
    if rl.distillation_mode == "advantage":
        return build_policy_objective(
            spec,
            prefix="opd/",
            temperature=rl.temperature,
            backend=backend,
            old_logp_cache=_cache(rl, context),
            identity=_identity(rl, context),
            from_teacher=True,
        )
    fn = partial(
        _direct_loss,
        divergence=rl.divergence,
        beta=rl.jsd_beta,
        temperature=rl.temperature,
        reduction=spec.reduction,
        max_tokens=spec.max_tokens,
        backend=backend,
    )
    names = {name: name for name in (LOSS, *DISTILL_METRIC_NAMES)}
    return Objective(
        fn,
        Reduction.TOKEN_SUM,
        metric_adapter=MetricAdapter("opd/", names, loss=f"opd/{LOSS}"),
        identity=_identity(rl, context),
    )


# ------------------------------------------------------------------ what a builder assembles


def _cache(rl: PolicyGradientConfig, context: Any) -> OldLogpCache | None:
    if not reads_ratio(rl):
        return None
    return OldLogpCache(
        rl.temperature,
        several_updates=rl.epochs > 1 or (rl.n_mini is not None and rl.n_mini > 1),
        certified=rl.certified_deterministic_forward,
        backend=getattr(context, "backend", "auto"),
    )


def _identity(rl: PolicyGradientConfig, context: Any) -> dict[str, Any]:
    """What decides the loss; the ratio's level appears only where it is not a token's."""
    selector, _, value = selected(rl).partition("=")
    identity: dict[str, Any] = {
        "name_or_path": require_context(context, "name_or_path"),
        selector: value.strip("'"),
        "loss_type": rl.loss_type,
    }
    if reads_ratio(rl):
        for key in ("epsilon_low", "epsilon_high", "lower_bound_ratio", "kl_beta", "temperature"):
            identity[key] = getattr(rl, key)
    elif isinstance(rl, OPDConfig):
        identity |= {"divergence": rl.divergence, "temperature": rl.temperature}
        if rl.divergence == "jsd":
            identity["jsd_beta"] = rl.jsd_beta
    if rl.importance_sampling_level == "sequence":
        identity["importance_sampling_level"] = "sequence"
    if rl.loss_type == "seq-mean-token-sum-fixed":
        identity["max_response_length"] = context.max_response_length
    return identity


def require_context(context: Any, name: str) -> Any:
    """A value that the trainer's context must carry."""
    value = getattr(context, name, None)
    if value is None:
        raise ValueError(f"context: builders read {name!r}; got none; pass SimpleNamespace({name}=..., ...)")
    return value


def _direct_loss(
    model: Any,
    batch: Any,
    *,
    divergence: str,
    beta: float,
    temperature: float,
    reduction: str,
    max_tokens: int | None,
    backend: str,
) -> tuple[Tensor, ObjectiveMetrics]:
    """One chunk of direct distillation: a divergence over the whole vocabulary, task reward unread."""
    from .distill import distillation_loss

    data = PolicyBatch.of(batch)
    teacher = require("teacher", data.teacher, "distillation_mode='direct'")
    out = distillation_loss(
        model_scores(model, batch),
        teacher,
        divergence=divergence,
        beta=beta,
        mask=data.mask,
        cu_seqlens=data.cu_seqlens,
        temperature=temperature,
        reduction=reduction,
        max_tokens=max_tokens,
        backend=backend,
    )
    scalars = {f"opd/{LOSS}": out.loss.detach(), OBJECTIVE_WEIGHT_SUM: out.weight}
    if isinstance(out.metrics, Metrics):
        return out.loss, ObjectiveMetrics(scalars, {"opd/": out.metrics})
    return out.loss, ObjectiveMetrics({**{f"opd/{k}": v for k, v in out.metrics.items()}, **scalars})
