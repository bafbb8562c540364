"""Small batches with rubbish behind the masks, and one call of a resolved loss."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedpg
from support import backend_device

VOCAB = 11
LENGTHS = (4, 2, 0, 3)
LAYOUTS = ("padded", "packed", "datum")


@dataclass
class Data:
    logits: Tensor
    targets: Tensor
    kwargs: dict[str, Any]

    @property
    def logp(self) -> Tensor:
        """The targets' log-probs, with the logits' rubbish."""
        ids = self.targets.clamp(min=0)
        return torch.log_softmax(self.logits, -1).gather(-1, ids[..., None])[..., 0]


def make(layout: str = "padded", dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 0.3) -> Data:
    """Action and observation tokens apart, some tokens in neither; every field is NaN or inf where it is masked."""
    g = torch.Generator().manual_seed(seed)
    shape = {"padded": (len(LENGTHS), max(LENGTHS)), "packed": (sum(LENGTHS),), "datum": (10,)}[layout]
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    logits, targets = 2.0 * rand(*shape, VOCAB), torch.randint(0, VOCAB, shape, generator=g)
    kind = torch.rand(shape, generator=g)
    if layout == "padded":
        kind[torch.arange(shape[1]) >= torch.tensor(LENGTHS)[:, None]] = 1.0
    action, obs = kind < 0.6, (kind > 0.6) & (kind < 0.85)
    logp = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    fields = {name: logp + spread * rand(*shape) for name in ("logp_old", "logp_ref", "logp_rollout")}
    fields["advantages"] = rand(*shape)
    for values, rubbish in zip(fields.values(), (torch.nan, torch.inf, -torch.inf, torch.nan), strict=True):
        values[~action] = rubbish
    logits[~(action | obs)] = torch.nan
    targets[~(action | obs)] = -100
    cu = torch.tensor([0, *LENGTHS]).cumsum(0) if layout == "packed" else None
    kwargs = {k: v.to(dtype) for k, v in fields.items()} | {"mask": action, "obs_mask": obs, "cu_seqlens": cu}
    return Data(logits.to(dtype), targets, kwargs)


def on(data: Data, backend: str) -> Data:
    """The same batch on the backend's device."""
    device = backend_device(backend)
    move = lambda v: v.to(device) if isinstance(v, Tensor) else v  # noqa: E731
    return Data(move(data.logits), move(data.targets), {k: move(v) for k, v in data.kwargs.items()})


def from_logits(loss: Any, data: Data, **more: Any) -> tuple[Any, Tensor]:
    """The result and the gradient of the logits."""
    logits = data.logits.clone().requires_grad_()
    result = loss.from_logits(logits, data.targets, **{**data.kwargs, **more})
    result.loss.backward()
    assert logits.grad is not None
    return result, logits.grad


def from_logp(loss: Any, data: Data, **more: Any) -> tuple[Any, Tensor]:
    """The result and the gradient of the log-probs."""
    logp = data.logp.requires_grad_()
    result = loss.from_logp(logp, **{**data.kwargs, **more})
    result.loss.backward()
    assert logp.grad is not None
    return result, logp.grad


def agree(got: Tensor | float, want: Tensor | float, ulps: float = 32) -> None:
    """Equal up to a few roundings of the wider error: fp64 arithmetic for fp64 tensors, fp32 for the rest."""
    got, want = torch.as_tensor(got).detach().cpu(), torch.as_tensor(want).detach().cpu()
    eps = torch.finfo(got.dtype if got.is_floating_point() else torch.float64).eps
    size = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=ulps * eps * (1 + size))


_count = itertools.count()


def capture(agg_mode: str | None = None, **config: Any) -> tuple[Any, list[Any]]:
    """Register a loss that keeps its contexts, and resolve it."""
    seen: list[Any] = []
    name = f"capture-{next(_count)}"

    @fusedpg.register_loss(name, agg_mode=agg_mode)
    def body(ctx: fusedpg.LossContext) -> Any:
        seen.append(ctx)
        return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {}

    return fusedpg.resolve_loss(name, **config), seen
