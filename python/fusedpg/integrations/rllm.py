"""rLLM: this library's losses as `fusedpg_<name>` in its registry, and a closure for its managed backends.

The package declares an entry point of `rllm.losses`, so that with both packages installed

    algorithm: {loss_fn: fusedpg_cispo, loss_params: {...}}

selects a native kernel. For Tinker and Fireworks, `managed_loss` is what `forward_backward_custom` takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from ..loss_call import LossInputs
from ..native_losses import NATIVE_NAMES, RLLM_LOSSES, NativePath, native_path
from ..resolve import resolve_loss
from ._datums import read_datums
from ._shared import advantages_of, floats, per_token_loss, refuse_terms

PREFIX = "fusedpg_"
_COMMON = ("eps_clip", "eps_clip_high", "kl_beta")
#: losses whose mathematics needs one aggregation; the others follow `loss_agg_mode`
PINS = {
    "gspo": "seq-mean-token-mean",
    "gspo_token": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum",
    "luspo": "seq-mean-token-sum",
}
#: what the registry does not get, and why
REFUSED = {
    "clip_cov": "it chooses tokens over the whole batch, which a context does not hold",
    "kl_cov": "it chooses tokens over the whole batch, which a context does not hold",
}
LOSSES = tuple(name for name in NATIVE_NAMES if name not in REFUSED)
MANAGED = ("tinker", "fireworks")


def fused_loss(ctx: Any, name: str) -> tuple[Tensor, dict[str, float]]:
    """A loss of this library over an rLLM context, reduced by the context.

    Args:
        ctx: the contract's LossContext: fields `logp_curr`, `logp_old`, `advantages`, `action_mask`, `obs_mask`,
            `logp_ref`, `logp_rollout`, `params`, and the reducer `aggregate`. (B, T), or (N,) for one datum.
        name: one of `LOSSES`.

    Raises:
        ValueError: a param that the loss never reads, or a field that it reads and the context lacks, by name.
    """
    path = _path(name, ctx.params)
    spec, mask = path.spec, ctx.action_mask
    datum = ctx.logp_curr.ndim == 1
    cu_seqlens = torch.arange(2, device=mask.device) * mask.shape[0] if datum and spec.needs_sequences else None
    inputs = LossInputs(
        logp_old=ctx.logp_old,
        mask=mask != 0,
        logp_ref=ctx.logp_ref,
        logp_rollout=ctx.logp_rollout,
        cu_seqlens=cu_seqlens,
    )
    x, out = per_token_loss(
        spec.replace(obs_coef=0.0),
        ctx.logp_curr,
        mask=mask,
        logp_old=ctx.logp_old,
        logp_ref=ctx.logp_ref,
        logp_rollout=ctx.logp_rollout,
        cu_seqlens=cu_seqlens,
        **advantages_of(spec, ctx.advantages, mask, cu_seqlens),
    )
    mode = PINS.get(name)
    if spec.max_tokens is not None:
        x = x / spec.max_tokens
    loss = ctx.aggregate(x, mask, mode) if mode else ctx.aggregate(x, mask)
    if spec.obs_coef:
        observed = mask if path.observes_actions else ctx.obs_mask
        loss = loss + spec.obs_coef * ctx.aggregate(-ctx.logp_curr, observed)
    named = path.named_metrics(out, inputs)
    return loss, floats(named, "" if name in RLLM_LOSSES else f"{name}/")


def _path(name: str, params: Mapping[str, Any] | None) -> NativePath:
    given = dict(params or {})
    try:
        return _cached(name, tuple(sorted(given.items())))
    except TypeError:  # a param that cannot be hashed
        return _build(name, given)


@lru_cache(256)
def _cached(name: str, params: tuple[tuple[str, Any], ...]) -> NativePath:
    return _build(name, dict(params))


def _build(name: str, given: dict[str, Any]) -> NativePath:
    if name in REFUSED:
        raise ValueError(f"name: rLLM's contract cannot carry {name!r}: {REFUSED[name]}; call policy_loss yourself")
    if "reduction" in given:
        raise ValueError(f"reduction: rLLM owns it; got {given['reduction']!r}; set algorithm.loss_agg_mode")
    common = {key: given.pop(key) for key in _COMMON if key in given}
    path = native_path(name, given, None, {key: value for key, value in common.items() if value is not None})
    refuse_terms(path.spec, f"rLLM's loss {PREFIX + name!r}", entropy="a context carries no entropy")
    return path


# ------------------------------------------------------------------ rLLM's registry


def _body(name: str) -> Callable[[Any], tuple[Tensor, dict[str, float]]]:
    def body(ctx: Any) -> tuple[Tensor, dict[str, float]]:
        return fused_loss(ctx, name)

    body.__name__ = body.__qualname__ = PREFIX + name
    body.__doc__ = f"`{name}` of fusedpg on its native kernel."
    return body


#: fusedpg_<name> -> body(ctx)
BODIES = {PREFIX + name: _body(name) for name in LOSSES}


def register(register_loss: Callable[..., Any]) -> tuple[str, ...]:
    """Register every body with a `register_loss(name, agg_mode=None)` of the contract; the names."""
    for name in LOSSES:
        register_loss(PREFIX + name, agg_mode=PINS.get(name))(BODIES[PREFIX + name])
    return tuple(BODIES)


def _rllm_register_loss() -> Callable[..., Any] | None:
    """rLLM's decorator; None without rLLM."""
    if "rllm" not in sys.modules and util.find_spec("rllm") is None:
        return None
    found = getattr(import_module("rllm"), "register_loss", None)
    return found or import_module("rllm.trainer.algorithms.loss").register_loss


# ------------------------------------------------------------------ managed backends


def managed_loss(
    name: str,
    backend: str = "tinker",
    *,
    params: Mapping[str, Any] | None = None,
    loss_agg_mode: str | None = None,
    step_tokens: float | None = None,
    step_sequences: float | None = None,
    kernels: str = "auto",
    **common: Any,
) -> Callable[[Any, Any], tuple[Tensor, dict[str, float]]]:
    """`fn(data, logprobs_list) -> (loss, metrics)` for `forward_backward_custom`.

    Each datum is one sequence; all of them are one call of the kernel.

    Args:
        name: as in `resolve_loss`: a native loss, with or without the prefix, or a registered one.
        backend: "tinker" divides here, by the counts of the call or by those given; "fireworks" returns the raw sum
            (over data of their sums, or of their means), which `optim_step` divides.
        params, loss_agg_mode, common: as in `resolve_loss`.
        step_tokens, step_sequences: of the whole optimizer step, for Tinker.
        kernels: "auto", "cpu", "triton" or "reference".

    Raises:
        ValueError: an unknown loss or backend, an option that the loss never reads, counts for Fireworks.
    """
    if backend not in MANAGED:
        raise ValueError(f"backend: expected one of {', '.join(MANAGED)}; got {backend!r}")
    if backend == "fireworks":
        if step_tokens is not None or step_sequences is not None:
            raise ValueError("step_tokens: Fireworks divides on the server; got counts of the step; drop them")
        step_tokens = step_sequences = 1.0
    name = name.removeprefix(PREFIX)
    if name in REFUSED:
        raise ValueError(f"name: rLLM's contract cannot carry {name!r}: {REFUSED[name]}")
    mode = PINS.get(name, loss_agg_mode) if name not in RLLM_LOSSES else loss_agg_mode
    if name == "dr_grpo":
        mode = None
    loss = resolve_loss(name, kernels, params, mode, **common)
    spec = getattr(loss.run, "spec", None)
    if spec is not None:
        refuse_terms(spec, f"the managed path of {name!r}", entropy="a datum carries no entropy")

    def loss_fn(data: Any, logprobs_list: Any) -> tuple[Tensor, dict[str, float]]:
        batch = read_datums(data, logprobs_list)
        fields = batch.fields(spec)
        result = loss.from_logp(batch.logp, **fields, step_tokens=step_tokens, step_sequences=step_sequences)
        return result.loss, floats(result.metrics, "" if "/" in next(iter(result.metrics), "/") else f"{name}/")

    return loss_fn


_register = _rllm_register_loss()
if _register is not None:
    register(_register)
