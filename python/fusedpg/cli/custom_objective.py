"""A loss written against `LossContext` as an Objective: its body runs between native log-probs and native gradient.

The batch brings the counts of the whole optimizer step (`step_tokens`, `step_sequences`), so `ctx.aggregate` has
already normalised over the step when a chunk's loss comes back: chunks simply add, `Reduction.SUM`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg import MetricAdapter, Objective, OldLogpCache, PolicyBatch, Reduction, ResolvedLoss
from fusedpg.objective import model_scores

PREFIX = "custom/"


def build_custom_objective(rl: fusedpg.GRPOConfig, context: Any, *, loss: str) -> Objective:
    """The registered loss `loss` under the knobs of a GRPO config: clip range, KL coefficient and reduction.

    A body's own metrics are public as `train/<name>`; of the objective's own there are the loss and what any loss over
    an importance ratio has.
    """
    backend = getattr(context, "backend", "auto")
    resolved = fusedpg.resolve_loss(
        loss,
        backend,
        loss_agg_mode=rl.loss_type,
        eps_clip=rl.epsilon_low,
        eps_clip_high=rl.epsilon_high,
        kl_beta=rl.kl_beta,
    )
    cache = OldLogpCache(rl.temperature, several_updates=not rl.on_policy, backend=backend)
    return Objective(
        partial(_custom_loss, resolved=resolved, temperature=rl.temperature, cache=cache),
        Reduction.SUM,
        old_logp_cache=cache,
        metric_adapter=MetricAdapter(
            PREFIX,
            {name: name for name in ("loss", "tokens", "approx_kl_k3", "ratio_max")},
            weighted_by={f"{PREFIX}approx_kl_k3": f"{PREFIX}tokens"},
            extrema={f"{PREFIX}ratio_max": "max"},
            loss=f"{PREFIX}loss",
        ),
        identity={"name_or_path": context.name_or_path, "loss_fn": loss, "loss_agg_mode": rl.loss_type},
    )


def _custom_loss(
    model: Any, batch: Any, *, resolved: ResolvedLoss, temperature: float, cache: OldLogpCache
) -> tuple[Tensor, dict[str, Any]]:
    data = PolicyBatch.of(batch)
    old = cache.lookup(data)
    result = resolved.from_logits(
        model_scores(model, batch),
        data.targets,
        logp_old=old,
        sequence_advantages=data.sequence_advantages,
        mask=data.mask,
        logp_ref=data.logp_ref,
        logp_rollout=data.logp_rollout,
        step_tokens=getattr(batch, "step_tokens", None),
        step_sequences=getattr(batch, "step_sequences", None),
        temperature=temperature,
    )
    if old is None:  # this forward is the behaviour policy's
        old = result.logp
        cache.keep(data.batch_id, old)
    chosen = data.mask != 0
    log_ratio = torch.where(chosen, result.logp - old, 0.0)
    k3 = (log_ratio.expm1() - log_ratio).sum() / chosen.sum().clamp(min=1)
    return result.loss, {
        f"{PREFIX}loss": result.loss.detach(),
        f"{PREFIX}tokens": chosen.sum(),
        f"{PREFIX}approx_kl_k3": k3,
        f"{PREFIX}ratio_max": log_ratio.amax().exp(),
        **{f"train/{name}": value for name, value in result.metrics.items()},
    }
