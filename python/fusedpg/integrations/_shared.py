"""What the adapters share: per-token values for a trainer's own reducer, packing, metrics as floats, specs by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional import policy_loss
from ..losses import loss_spec
from ..outputs import LossOutput
from ..spec import Level, LossSpec


class _Known(torch.autograd.Function):
    """Per-token values whose derivatives by logp (and entropy) are known."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, entropy: Tensor | None, values: Tensor, c: Tensor, e: Tensor | None) -> Tensor:
        ctx.save_for_backward(c, e)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        c, e = ctx.saved_tensors
        return torch.where(c == 0, 0.0, c * g), None if e is None else torch.where(e == 0, 0.0, e * g), None, None, None


def per_token_loss(
    spec: LossSpec, logp: Tensor, *, mask: Tensor | None = None, entropy: Tensor | None = None, **fields: Any
) -> tuple[Tensor, LossOutput]:
    """The loss of each token, differentiable, for a reducer that is not this library's, and the call's output.

    Under a weighted sum the gradient is exact when the weight is one number a sequence (a token, where the loss has a
    ratio a token): all that means over tokens, samples and steps do. The mask selects; it does not weigh.

    Args:
        spec: its reduction plays no part.
        logp: (N,) or (B, T).
        mask, entropy, fields: as in `policy_loss`.
    """
    bare = spec.replace(reduction="token-sum", max_tokens=None)
    chosen = None if mask is None else mask != 0
    dtype = torch.float64 if logp.dtype == torch.float64 else torch.float32
    logp = logp.to(dtype)
    reads_entropy = bare.entropy_coef != 0.0
    if reads_entropy and entropy is not None:
        entropy = entropy.to(dtype)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in ((logp, entropy) if reads_entropy else (logp,)) if t is not None]
        given = leaves[-1] if reads_entropy and entropy is not None else entropy
        out = policy_loss(bare, leaves[0], entropy=given, mask=chosen, normalizer=1.0, **fields)
        found = torch.autograd.grad(out.loss, leaves)
    values = out.per_token if chosen is None else torch.where(chosen, out.per_token, 0.0)
    e = found[1] if len(found) == 2 else None
    x: Tensor = _Known.apply(logp, entropy if e is not None else None, values, found[0], e)
    return x, out


def sequence_values(values: Tensor, mask: Tensor, cu_seqlens: Tensor | None, name: str = "advantages") -> Tensor:
    """(S,) of per-token values that are one number a sequence, 0 for a sequence without a token.

    Raises:
        ValueError: a sequence whose tokens differ, which a loss with one ratio a sequence cannot use.
    """
    on = mask != 0
    low, high = torch.where(on, values, torch.inf), torch.where(on, values, -torch.inf)
    if values.ndim == 2:
        least, most = (low.amin(1), high.amax(1)) if values.shape[1] else (low.sum(1), low.sum(1))
    else:
        assert cu_seqlens is not None
        offsets = cu_seqlens.long()
        least = torch.segment_reduce(low, "min", offsets=offsets, unsafe=True, initial=torch.inf)
        most = torch.segment_reduce(high, "max", offsets=offsets, unsafe=True, initial=-torch.inf)
    some = most >= least
    if bool((some & (most > least)).any()):
        raise ValueError(
            f"{name}: expected one value a sequence, as the loss has one ratio a sequence; got tokens of one sequence "
            "that differ; use a loss with a ratio a token, or 'gspo_token'"
        )
    return torch.where(some, most, 0.0)


def advantages_of(spec: LossSpec, values: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Per-token advantages as the argument that the loss's level takes."""
    if spec.level != Level.SEQUENCE:
        return {"advantages": values}
    return {"sequence_advantages": sequence_values(values, mask, cu_seqlens)}


def boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Cumulative lengths (S+1,)."""
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def packed(tensors: Sequence[Tensor], name: str) -> Tensor:
    """1-D tensors end to end; an empty list is no token at all."""
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor) or t.ndim != 1:
            got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name}: expected 1-D tensors, one a sample; got {got} at {i}")
    return torch.cat(list(tensors)) if tensors else torch.zeros(0)


def floats(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Plain floats; reads the device once."""
    if not metrics:
        return {}
    names = list(metrics)
    values = torch.stack([torch.as_tensor(metrics[name]).detach().double().cpu() for name in names]).tolist()
    return {f"{prefix}{name}": value for name, value in zip(names, values, strict=True)}


def options_from(config: Any) -> dict[str, Any]:
    """A trainer's config (mapping, dataclass, pydantic model or namespace) as a flat dict."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if is_dataclass(config):
        return {f.name: getattr(config, f.name) for f in fields_of(config)}
    dump = getattr(type(config), "model_dump", None)
    return dict(dump(config)) if dump is not None else dict(vars(config))


def spec_of(loss: str | LossSpec, options: Mapping[str, Any]) -> LossSpec:
    """A spec as it is, or a catalogue entry with its knobs.

    Raises:
        ValueError: an unknown name or knob; knobs beside a spec.
    """
    if not isinstance(loss, LossSpec):
        return loss_spec(loss, **options)
    if options:
        raise ValueError(f"{next(iter(options))}: {loss.name!r} came as a spec, which has its own; drop the option")
    return loss


def refuse_terms(
    spec: LossSpec, where: str, *, entropy: str = "", observations: str = "", whole_batch: str = ""
) -> None:
    """Refuse by name what a seam has no data for; an empty reason honours it."""
    for field, on, reason in (
        ("entropy_coef", spec.entropy_coef != 0.0, entropy),
        ("obs_coef", spec.obs_coef != 0.0, observations),
        ("selection", spec.batch_global, whole_batch),
    ):
        if on and reason:
            raise ValueError(f"{field}: {where} cannot honour it; got it in the loss {spec.name!r}; {reason}")
