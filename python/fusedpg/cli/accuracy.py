"""P7: log-probability and gradient errors against fp64 of the same stored logits, with common offsets up to 1e9."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedpg

from .bench_options import DTYPES, Options
from .report import Job, Section, Target
from .timing import Tick

OFFSETS = (0.0, 1e3, -1e3, 1e6, -1e6, 1e9, -1e9)
LOGP_TARGET = 1e-6
GRAD_TARGET = 2.0


@dataclass(frozen=True)
class Accuracy:
    """Largest errors over the rows of one dtype and offset, for ours and for torch eager."""

    dtype: str
    offset: float
    logp: float
    grad: float
    eager_logp: float
    eager_grad: float

    @property
    def met(self) -> bool:
        """Whether P7 holds here."""
        return self.logp <= LOGP_TARGET and self.grad <= GRAD_TARGET

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**vars(self), "met": self.met}


def measure(rows: int, vocab: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Iterator[Accuracy]:
    """One result for each dtype and each offset that the dtype can store."""
    for dtype in dtypes:
        for offset in OFFSETS:
            if abs(offset) < torch.finfo(dtype).max / 2:
                yield _one(rows, vocab, device, dtype, offset)


def cases(dtypes: tuple[torch.dtype, ...]) -> int:
    """How many results `measure` yields."""
    return sum(abs(offset) < torch.finfo(dtype).max / 2 for dtype in dtypes for offset in OFFSETS)


def _one(rows: int, vocab: int, device: torch.device, dtype: torch.dtype, offset: float) -> Accuracy:
    rng = torch.Generator(device).manual_seed(7)
    # beside a large offset logits are multiples of its spacing: spread them over several of these
    spread = max(3.0, abs(offset) * torch.finfo(dtype).eps)
    logits = (torch.randn(rows, vocab, generator=rng, device=device, dtype=torch.float64) * spread + offset).to(dtype)
    # never the most likely token: where it has all the mass, 1 - p is nothing but fp32's own cancellation
    targets = (logits.argmax(-1) + torch.randint(1, vocab, (rows,), generator=rng, device=device)) % vocab
    wide = logits.double()
    logp64 = torch.log_softmax(wide, -1)
    grad64 = -logp64.exp()
    grad64.scatter_add_(-1, targets[:, None], torch.ones_like(grad64[:, :1]))
    truth = logp64.gather(-1, targets[:, None]).squeeze(-1)

    ours = _errors(*_fused(logits, targets), truth, grad64, dtype)
    eager = _errors(*_eager(logits, targets), truth, grad64, dtype)
    return Accuracy(str(dtype).removeprefix("torch."), offset, *ours, *eager)


def _fused(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Through the one-pass loss: REINFORCE with A = -1 and a normalizer of 1 has dL/dlogp = 1 exactly."""
    leaf = logits.detach().requires_grad_()
    spec = fusedpg.loss_spec("reinforce", reduction="token-mean")
    out = fusedpg.policy_loss_from_logits(spec, leaf, targets, advantages=-1.0, normalizer=1.0)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.logp, grad


def _eager(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    logp = torch.log_softmax(leaf.float(), -1).gather(-1, targets[:, None]).squeeze(-1)
    (grad,) = torch.autograd.grad(logp.sum(), leaf)
    return logp.detach(), grad


def _errors(logp: Tensor, grad: Tensor, truth: Tensor, grad64: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """(logp error over max(1, |logp|), gradient error in roundings of the row's largest gradient)."""
    logp_error = ((logp.double() - truth).abs() / truth.abs().clamp(min=1)).max().item()
    rounding = torch.finfo(dtype).eps / 2
    worst = (grad.double() - grad64).abs().amax(-1) / grad64.abs().amax(-1)
    return logp_error, worst.max().item() / rounding


# ------------------------------------------------------------------ the table


def jobs(options: Options) -> list[Job]:
    """One table."""
    chosen = tuple(DTYPES[name] for name in options.accuracy_dtypes)
    return [Job(cases(chosen), partial(section, options, chosen))]


def section(options: Options, dtypes: tuple[torch.dtype, ...], tick: Tick) -> Section:
    """Measure all cases and judge the worst."""
    results = []
    for result in measure(options.accuracy_rows, options.vocab, options.place, dtypes):
        results.append(result)
        tick(f"{result.dtype} {result.offset:g}")
    worst_logp, worst_grad = max(r.logp for r in results), max(r.grad for r in results)
    return Section(
        title=f"P7: errors against fp64 of the same stored logits, {options.accuracy_rows} rows, V = {options.vocab}",
        columns=["dtype", "offset", "logp error", "gradient error", "torch eager logp", "torch eager gradient"],
        cells=[
            [r.dtype, f"{r.offset:g}", f"{r.logp:.1e}", f"{r.grad:.2f}", f"{r.eager_logp:.1e}", f"{r.eager_grad:.2f}"]
            for r in results
        ],
        targets=[
            Target("logp error", worst_logp, LOGP_TARGET, at_least=False, unit=""),
            Target("gradient error", worst_grad, GRAD_TARGET, at_least=False, unit=" roundings"),
        ],
        notes=[
            "logp: relative to max(1, |logp|); gradient: in roundings (half a unit in the last place) of the storage "
            "dtype at the row's largest gradient; targets are random tokens except the most likely one; offsets "
            "that fp16 cannot store are left out",
        ],
        record={"suite": "P7", "vocab": options.vocab, "results": [r.to_json() for r in results]},
        broken=not all(r.met for r in results),
    )
