"""Batches of hidden states and an output head, the fp64 truth, and error budgets measured on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg import linear_plan, linear_walk
from fusedpg.spec import LossSpec
from support import F32, LENGTHS, Result, backend_device, largest, make_case, operand_rounding

GRADIENTS = ("hidden", "weight", "bias")

#: walk -> (rows of the products, fewest and most rows of a chunk) that a batch of ten tokens crosses
WALKS: dict[str, tuple[int, int, int]] = {
    "chunks": (4, 4, 4),  # of tokens, or of whole sequences of at most 4 tokens
    "short": (2, 2, 2),  # the longest sequence does not fit: two passes where the loss sums over sequences
    "whole": (4, 8192, 4096),  # two passes with the whole vocabulary
    "blocks": (4, 4096, 4096),  # two passes over blocks of 16 columns, in chunks of 4 rows
}


def use_walk(monkeypatch, walk: str) -> None:
    """Rows of products and chunks that a small batch crosses."""
    granule, least, most = WALKS[walk]
    monkeypatch.setattr(linear_plan, "GRANULE", granule)
    monkeypatch.setattr(linear_walk, "GRANULE", granule)
    monkeypatch.setattr(linear_walk, "ACCELERATOR_GRANULE", granule)
    monkeypatch.setattr(linear_plan, "LEAST_ROWS", least)
    monkeypatch.setattr(linear_plan, "MOST_ROWS", most)


def smallest_workspace(hidden: Tensor, weight: Tensor) -> float:
    """MiB in which blocks of 16 columns and the fewest rows fit, and nothing else."""
    shape = linear_walk.Head(hidden, weight, None).shape(True, True)
    columns = linear_plan.COLUMNS
    return linear_plan._bytes(shape, linear_plan.GRANULE, columns, columns if shape.cast else 0) / linear_plan.MIB


@dataclass
class HeadCase:
    """One batch in its storage dtypes, with holes in the mask and rubbish behind it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)


def make_head_case(
    spec: LossSpec,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32),
    packed: bool = True,
    bias: bool = True,
    vocab: int = 37,
    width: int = 7,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> HeadCase:
    """The ragged batch of `make_case`, its logits being the product of hidden states and a head."""
    case = make_case(spec, dtype=torch.float64, packed=packed, vocab=vocab, seed=seed, lengths=lengths)
    g = torch.Generator().manual_seed(seed + 1)
    hidden = torch.randn(*case.targets.shape, width, generator=g).to(dtypes[0])
    weight = (2 * torch.randn(vocab, width, generator=g) / width**0.5).to(dtypes[1])
    shift = torch.randn(vocab, generator=g).to(dtypes[1]) if bias else None
    logits = torch.nn.functional.linear(*(None if t is None else t.double() for t in (hidden, weight, shift)))
    logp = torch.log_softmax(logits, -1).gather(-1, case.targets.clamp(min=0)[..., None])[..., 0]
    for name, distance in (("logp_old", 0.3), ("logp_ref", 0.5), ("logp_rollout", 0.2)):
        near = (logp + distance * torch.randn(logp.shape, generator=g)).float()
        case.kwargs[name] = torch.where(case.kwargs[name].isfinite(), near, case.kwargs[name])
    hidden[case.logits.isnan().any(-1)] = torch.nan
    return HeadCase(hidden, weight, shift, case.targets, case.kwargs)


def run_head(
    spec: LossSpec,
    case: HeadCase,
    backend: str,
    *,
    upstream: float = 1.0,
    double: bool = False,
    frozen: Sequence[str] = (),
    **extra: Any,
) -> Result:
    """Loss and gradients of one case on one backend; `grad` holds those of hidden, weight and bias end to end."""
    device = backend_device(backend)
    leaves: dict[str, Tensor] = {}
    for name in GRADIENTS:
        stored = getattr(case, name)
        if stored is not None:
            own = stored.to(device, torch.float64 if double else stored.dtype, copy=True)
            leaves[name] = own.requires_grad_(name not in frozen)
    kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in {**case.kwargs, **extra}.items()}
    torch.manual_seed(0)  # a random selection repeats
    out = fusedpg.policy_loss_from_hidden(
        spec,
        leaves["hidden"],
        leaves["weight"],
        case.targets.to(device),
        bias=leaves.get("bias"),
        backend=backend,
        **kwargs,
    )
    (out.loss * upstream).backward()
    values = {name: getattr(out, name) for name in ("loss", "numerator", "weight", "logp", "per_token")}
    values |= {f"metric:{k}": v for k, v in out.metrics.items()}
    if out.entropy is not None:
        values["entropy"] = out.entropy
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for name, grad in grads.items():
        assert grad.dtype == leaves[name].dtype
        values[f"grad:{name}"] = grad
    flat = torch.cat([g.double().flatten() for g in grads.values()]) if grads else torch.zeros(0)
    return Result({k: v.detach().double().cpu() for k, v in values.items()}, flat.cpu(), out)


def check_head_case(spec: LossSpec, case: HeadCase, backend: str, label: str, **extra: Any) -> Result:
    """One case against the fp64 truth; the budget of each value is twice the error of fp32 on the same inputs.

    Gradients may be one storage rounding further away, and what rounding the products' operands does where a device
    takes 16-bit ones; the floor covers inputs on which fp32 happens to be exact.
    """
    options = {k: v for k, v in extra.items() if k != "workspace_mib"}
    want = run_head(spec, case, "reference", double=True, **options)
    errors = _rounding(spec, case, want, **options)
    head = linear_walk.Head(*(t.to(backend_device(backend)) for t in (case.hidden, case.weight)), None)
    if head.operands != head.compute:
        for name, error in _operand_rounding(spec, case, head.operands, **options).items():
            errors[name] = errors[name] + error
    got = run_head(spec, case, backend, **extra)
    assert got.output.backend == backend
    assert set(got.values) == set(want.values)
    for name, expected in want.values.items():
        size = want.size(name)
        budget = 2 * errors[name] + 8 * F32 * (1 + size)
        if name.startswith("grad:"):
            stored = getattr(case, name.removeprefix("grad:"))
            storage = largest(expected.to(stored.dtype).double() - expected)
            budget = 2 * (errors[name] + storage) + 8 * F32 * size
        actual = got.values[name]
        assert actual.shape == expected.shape, f"{label} {name}: shape {actual.shape} against {expected.shape}"
        error = largest(actual - expected)
        assert error <= budget, f"{label} {name}: {error:.3e} over budget {budget:.3e} ({actual} against {expected})"
    return got


def _rounding(spec: LossSpec, case: HeadCase, want: Result, **extra: Any) -> dict[str, Tensor]:
    """Largest errors of the reference in fp32, on the case and with hidden dimensions and vocabulary reordered."""
    vocab, width = case.weight.shape
    g = torch.Generator().manual_seed(1)
    orders = [(torch.arange(vocab), torch.arange(width))]
    orders += [(torch.randperm(vocab, generator=g), torch.randperm(width, generator=g)) for _ in range(3)]
    errors: dict[str, Tensor] = {}
    for columns, inner in orders:
        place, back = columns.argsort(), inner.argsort()
        moved = replace(
            case,
            hidden=case.hidden.float()[..., inner],
            weight=case.weight.float()[columns][:, inner],
            bias=None if case.bias is None else case.bias.float()[columns],
            targets=torch.where(case.targets >= 0, place[case.targets.clamp(min=0)], case.targets),
        )
        values = run_head(spec, moved, "reference", **extra).values
        restore = {
            "grad:hidden": lambda x, back=back: x[..., back],
            "grad:weight": lambda x, place=place, back=back: x[place][:, back],
            "grad:bias": lambda x, place=place: x[place],
        }
        for name, expected in want.values.items():
            value = restore.get(name, lambda x: x)(values[name])
            error = largest(value - expected)
            errors[name] = torch.maximum(errors.get(name, error), error)
    return errors


def _operand_rounding(spec: LossSpec, case: HeadCase, dtype: torch.dtype, **extra: Any) -> dict[str, Tensor]:
    """What one rounding of the logits' gradient to the dtype of the products' operands does to both gradients."""
    hidden, weight = torch.nan_to_num(case.hidden.double()), case.weight.double()
    logits = torch.nn.functional.linear(hidden, weight, None if case.bias is None else case.bias.double())
    leaf = logits.requires_grad_()
    torch.manual_seed(0)  # a random selection repeats
    out = fusedpg.policy_loss_from_logits(spec, leaf, case.targets, backend="reference", **{**case.kwargs, **extra})
    (exact,) = torch.autograd.grad(out.loss, leaf)
    return dict(zip(("grad:hidden", "grad:weight"), operand_rounding(exact, hidden, weight, dtype), strict=True))
