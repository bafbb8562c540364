"""Batches on which trainers and presets are compared: ragged, with holes, fully masked rows, ties, extreme ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: what is unusual about a batch
KINDS = ("ragged", "holes", "masked-row", "ties", "ratio-30", "ratio-200", "inf-masked")


@dataclass(frozen=True)
class PolicyBatch:
    """A padded batch (B, T) in fp32; `advantages` is (B,), `token_advantages` (B, T)."""

    kind: str
    logp: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    logp_rollout: Tensor
    advantages: Tensor
    token_advantages: Tensor
    mask: Tensor

    def to(self, dtype: torch.dtype) -> PolicyBatch:
        """The same stored values in another float dtype."""
        floats = {
            name: v.to(dtype) for name, v in vars(self).items() if isinstance(v, Tensor) and v.dtype != torch.bool
        }
        return replace(self, **floats)  # type: ignore[arg-type]

    def cleaned(self) -> PolicyBatch:
        """The same batch with finite values at masked places: what trainers that multiply by the mask need."""
        pick = lambda t: torch.where(self.mask, t, -1.0)  # noqa: E731
        names = ("logp", "logp_old", "logp_ref", "logp_rollout")
        return replace(self, **{name: pick(getattr(self, name)) for name in names})  # type: ignore[arg-type]


def make_policy_batch(kind: str, seed: int = 0, rows: int = 4, length: int = 9, clip: float = 0.2) -> PolicyBatch:
    """A batch of one kind; `ties` puts ratios exactly on 1 - clip, 1 and 1 + clip, with advantages of both signs."""
    g = torch.Generator().manual_seed(1000 * KINDS.index(kind) + seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    logp = -(0.05 + 3 * torch.rand(rows, length, generator=g))
    old, ref, rollout = (logp + 0.25 * rand(rows, length) for _ in range(3))
    rollout = old + 0.2 * rand(rows, length)
    advantages, token_advantages = rand(rows), rand(rows, length)
    lengths = torch.randint(2, length + 1, (rows,), generator=g)
    lengths[0] = length
    mask = torch.arange(length)[None] < lengths[:, None]
    if kind == "holes":
        mask &= torch.rand(rows, length, generator=g) > 0.35
        mask[:, 0] = True
    elif kind == "masked-row":
        mask[rows // 2] = False
    elif kind == "ties":
        ratios = torch.tensor([1 - clip, 1.0, 1 + clip])
        logp = torch.zeros(rows, length) + logp[:, :1]
        old = logp - ratios[torch.randint(0, 3, (rows, length), generator=g)].log()
        advantages = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)
        token_advantages = torch.where(torch.rand(rows, length, generator=g) > 0.5, 1.0, -1.0)
    elif kind in ("ratio-30", "ratio-200"):
        size = float(kind.removeprefix("ratio-"))
        logp = logp.clone()
        old = old.clone()
        logp[0, 1], old[0, 1] = -1.0 - size, -1.0
        logp[1, 0], old[1, 0] = -1.0, -1.0 - size
        advantages[0], advantages[1] = 1.0, 0.5
        token_advantages[0, 1], token_advantages[1, 0] = 1.0, 0.5
    elif kind == "inf-masked":
        off = ~mask
        logp, old, ref, rollout = (
            torch.where(off, value, t)
            for t, value in zip((logp, old, ref, rollout), (-torch.inf, torch.inf, torch.nan, -torch.inf), strict=True)
        )
    return PolicyBatch(kind, logp, old, ref, rollout, advantages, token_advantages, mask)
