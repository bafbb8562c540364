"""Random batches, the fp64 truth, and error budgets measured on the same inputs: what tests and `doctor` judge by."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .functional import policy_loss_from_logits
from .spec import Level, LossSpec

F32 = torch.finfo(torch.float32).eps


def backend_device(backend: str) -> torch.device:
    """Triton tests use the GPU where there is one, else CPU tensors under the interpreter."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


@dataclass
class Case:
    """One batch in the storage dtype, with holes in the mask and rubbish behind it."""

    logits: Tensor
    targets: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)


LENGTHS = (4, 0, 1, 3, 2)


def make_case(
    spec: LossSpec,
    *,
    dtype: torch.dtype,
    packed: bool,
    vocab: int = 37,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> Case:
    """A ragged batch: a hole in one sequence, an empty one, a fully masked one; NaN and inf at masked places."""
    g = torch.Generator().manual_seed(seed)
    if packed:
        shape: tuple[int, ...] = (sum(lengths),)
    else:
        shape = (len(lengths), max(lengths))
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    logits = (2.0 * rand(*shape, vocab)).to(dtype)
    targets = torch.randint(0, vocab, shape, generator=g)
    mask = torch.rand(shape, generator=g) > 0.25
    if packed:
        cu = torch.tensor([0, *lengths]).cumsum(0)
    else:
        mask &= torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
        cu = None
    logp = torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])[..., 0]
    streams = {
        "logp_old": (logp + 0.3 * rand(*shape)).float(),
        "logp_ref": (logp + 0.5 * rand(*shape)).float(),
        "logp_rollout": (logp + 0.2 * rand(*shape)).float(),
    }
    for i, stream in enumerate(streams.values()):
        stream[~mask] = (torch.nan, torch.inf, -torch.inf)[i]
    observed = mask
    kwargs: dict[str, Any] = {**streams, "mask": mask, "cu_seqlens": cu}
    if spec.obs_coef:
        kwargs["obs_mask"] = torch.rand(shape, generator=g) > 0.6  # some of them policy tokens too
        observed = mask | kwargs["obs_mask"]
    logits[~observed] = torch.nan
    targets[~observed] = -100
    if spec.level == Level.SEQUENCE:
        kwargs["sequence_advantages"] = rand(len(lengths)).float()
    else:
        kwargs["advantages"] = rand(*shape).float()
    return Case(logits, targets, kwargs)


@dataclass
class Result:
    """What one call computed, as fp64 on the CPU."""

    values: dict[str, Tensor]
    grad: Tensor
    output: Any

    def size(self, name: str) -> Tensor:
        """What the rounding of a value is relative to: its largest entry, of a sum at least that of its terms."""
        size = largest(self.values[name])
        if name in ("loss", "numerator") and size > 0:
            terms = self.values["per_token"].abs().sum()
            size = torch.maximum(size, terms * size / largest(self.values["numerator"]))
        return size


def run(
    spec: LossSpec, case: Case, backend: str, *, upstream: float = 1.0, double: bool = False, **extra: Any
) -> Result:
    """Loss and gradient of one case on one backend; `double` casts the stored inputs to fp64 first."""
    device = backend_device(backend)
    logits = case.logits.to(device)
    logits = (logits.double() if double else logits.clone()).requires_grad_()
    kwargs: dict[str, Any] = {
        k: v.to(device) if isinstance(v, Tensor) else v for k, v in {**case.kwargs, **extra}.items()
    }
    torch.manual_seed(0)  # a random selection repeats
    out = policy_loss_from_logits(spec, logits, case.targets.to(device), backend=backend, **kwargs)
    (out.loss * upstream).backward()
    values = {
        "loss": out.loss,
        "numerator": out.numerator,
        "weight": out.weight,
        "logp": out.logp,
        "per_token": out.per_token,
        **{f"metric:{k}": v for k, v in out.metrics.items()},
    }
    if out.entropy is not None:
        values["entropy"] = out.entropy
    assert logits.grad is not None
    return Result({k: v.detach().double().cpu() for k, v in values.items()}, logits.grad.double().cpu(), out)


def truth(spec: LossSpec, case: Case, **extra: Any) -> Result:
    """The fp64 reference on the stored inputs."""
    return run(spec, case, "reference", double=True, **extra)


@dataclass
class Rounding:
    """How far ordinary fp32 arithmetic is from the truth on one case: largest error of each value and the gradient."""

    values: dict[str, Tensor]
    grad: Tensor


def rounding(spec: LossSpec, case: Case, want: Result, **extra: Any) -> Rounding:
    """Measured with the reference's formulas in fp32, on the case and with its vocabulary in three other orders.

    The order of the columns changes nothing but how sums are rounded, so one lucky order does not set the budget.
    """
    vocab = case.logits.shape[-1]
    g = torch.Generator().manual_seed(1)
    orders = [torch.arange(vocab), *(torch.randperm(vocab, generator=g) for _ in range(3))]
    errors: dict[str, Tensor] = {}
    grad = torch.zeros((), dtype=torch.float64)
    for order in orders:
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(vocab))
        targets = torch.where(case.targets >= 0, place[case.targets.clamp(min=0)], case.targets)
        got = run(spec, replace(case, logits=case.logits.float()[..., order], targets=targets), "reference", **extra)
        for name, expected in want.values.items():
            error = largest(got.values[name] - expected)
            errors[name] = torch.maximum(errors.get(name, error), error)
        grad = torch.maximum(grad, largest(got.grad[..., place] - want.grad))
    return Rounding(errors, grad)


def largest(x: Tensor) -> Tensor:
    """max |x|, 0 for an empty tensor."""
    return x.abs().max() if x.numel() else torch.zeros((), dtype=torch.float64)


def store(grad: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """A gradient after one rounding to its storage dtype, as the platform under test rounds.

    Triton's interpreter truncates to bf16; compiled kernels round to nearest, like everything else.
    """
    if dtype == torch.bfloat16 and backend == "triton" and backend_device(backend).type == "cpu":
        return (grad.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    return grad.to(dtype).double()


def disagreement(got: Result, want: Result, fp32: Rounding, dtype: torch.dtype, label: str = "") -> str | None:
    """What of a result is too far from the truth, None where nothing is.

    Errors stay within twice the fp32 error measured on the same inputs, plus one storage rounding of the gradient. The
    floor of a few fp32 units covers inputs on which fp32 happens to be exact; sums are floored by their terms.
    """
    for name, expected in want.values.items():
        budget = 2 * fp32.values[name] + 8 * F32 * (1 + want.size(name))
        actual = got.values[name]
        if actual.shape != expected.shape:
            return f"{label} {name}: shape {actual.shape} against {expected.shape}"
        error = largest(actual - expected)
        if not error <= budget:
            return f"{label} {name}: error {error:.3e} over budget {budget:.3e} ({actual} against {expected})"
    stored = largest(store(want.grad, dtype, got.output.backend) - want.grad)
    # vespo's factor is a product over the sequence to a power up to 3: so is its relative rounding
    units = 24 if label.startswith("vespo") else 8
    budget = 2 * (stored + fp32.grad) + units * F32 * largest(want.grad)
    error = largest(got.grad - want.grad)
    return None if error <= budget else f"{label} gradient: error {error:.3e} over budget {budget:.3e}"
