"""Batches of tokens for stage B of the C++ core, the core's answer, and the truth: the reference's autograd in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedpg import cpu, reference
from fusedpg.metrics import SUM_NAMES
from fusedpg.spec import STREAMS, Anchor, KLTarget, LossSpec, Selection

LENGTHS = (7, 0, 1, 40, 16, 133)
#: the streams in the compute dtype that every batch holds
FIELDS = ("w", *STREAMS)


def batch(n: int, dtype: torch.dtype, seed: int = 0, masked: bool = True) -> dict[str, Tensor]:
    """Random tokens; a masked one is NaN in every stream, except that a masked observation token keeps its logp."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    logp = -rand().abs() - 0.1
    b = {
        "logp": logp,
        "entropy": rand().abs(),
        "w": torch.rand(n, generator=g, dtype=torch.float64) + 0.1,
        "advantages": rand() * (torch.rand(n, generator=g) > 0.1),
        "logp_old": logp + 0.3 * rand(),
        "logp_ref": logp + 0.5 * rand(),
        "logp_rollout": logp + 0.2 * rand(),
        "is_weights": rand().abs() * (torch.rand(n, generator=g) > 0.2),
    }
    off = torch.rand(n, generator=g) < 0.25 if masked else torch.zeros(n, dtype=torch.bool)
    observed = torch.rand(n, generator=g) < 0.3
    for name, stream in b.items():
        stream[off & ~observed if name == "logp" else off] = 0.0 if name == "w" else torch.nan
    b["obs_weights"] = torch.where(observed, rand().abs() + 0.1, 0.0)
    b["selected"] = (torch.rand(n, generator=g) < 0.3).double()
    return {k: v.to(dtype) for k, v in b.items()}


def given(spec: LossSpec, b: dict[str, Tensor], with_is: bool) -> dict[str, Tensor | None]:
    """The streams of a batch that a caller hands over for this spec; where the spec allows it, some are missing."""
    streams: dict[str, Tensor | None] = {name: b[name] for name in STREAMS}
    if spec.has_correction or not with_is:
        streams["is_weights"] = None
    if spec.obs_coef == 0.0:
        streams["obs_weights"] = None
    if spec.selection == Selection.NONE:
        streams["selected"] = None
    if spec.is_missing_one:
        name = "logp_rollout" if spec.has_correction else "is_weights"
        stream = streams[name]
        elsewhere = name == "logp_rollout" and (spec.anchor == Anchor.ROLLOUT or spec.kl_target == KLTarget.ROLLOUT)
        if stream is not None and not elsewhere:
            streams[name] = torch.where(torch.arange(stream.numel()) % 7 == 3, torch.nan, stream)
    return streams


def native(spec: LossSpec, b: dict[str, Tensor], cu: Tensor | None, with_is: bool) -> tuple[Tensor, ...]:
    """(per_token, c, e, sums) of the core."""
    streams = given(spec, b, with_is)
    return cpu.token_loss(spec.encode(), b["logp"], b["entropy"], b["w"], [streams[s] for s in STREAMS], cu)


def truth(spec: LossSpec, b: dict[str, Tensor], cu: Tensor, with_is: bool) -> tuple[Tensor, ...]:
    """The same from the reference."""
    streams = {k: None if v is None else v.double() for k, v in given(spec, b, with_is).items()}
    lengths = cu.diff()
    segment = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    tokens = reference.Tokens(w=b["w"].double(), **streams, segment=segment, num_segments=lengths.numel())
    logp, entropy = b["logp"].double().requires_grad_(), b["entropy"].double().requires_grad_()
    numerator, x, sums = reference.token_loss(spec, logp, entropy, tokens)
    c, e = torch.autograd.grad(numerator, (logp, entropy), allow_unused=True)
    c = torch.zeros_like(logp) if c is None else c
    vector = torch.stack([sums[name].double() for name in SUM_NAMES])
    vector[SUM_NAMES.index("active")] = (c != 0).sum()
    return x.detach(), c, torch.zeros(0) if spec.entropy_coef == 0 else e, vector.detach()


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float, where: str) -> None:
    """Equal within the tolerance, NaN to NaN."""
    for g, t, what in zip(got, want, ("per_token", "c", "e", "sums"), strict=True):
        message = lambda m, w=what: f"{where} {w}: {m}"  # noqa: E731
        torch.testing.assert_close(g.double(), t.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=message)
