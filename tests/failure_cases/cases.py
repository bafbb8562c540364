"""What the failure-case tests share: small builders, an independent eager loss, and the cases that wait.

The cases are those of the project's failure-case document: each a public issue of a neighbouring project, restated as
the smallest input that shows the same kind of failure here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg.spec import REDUCTIONS, Level

NUMBER_OF_CASES = 125

#: cases without a test, and why
WAITING: dict[int, str] = {}

#: cases tested for logits whose other half waits
PARTLY: dict[int, str] = {
    11: "the vocabulary split over shards comes with the distributed reductions",
    91: "a keep mask beside the logits is optional and not built; -inf columns say the same",
    92: "there is no helper that shifts targets: logits[i] scores targets[i]",
}


def leaf(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def random(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal times scale; the same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return numbers.to(torch.get_default_device()).to(dtype)


def random_ids(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(vocab, shape, generator=generator, device="cpu").to(torch.get_default_device())


def spec_with(name: str, reduction: str, **knobs: Any) -> fusedpg.LossSpec:
    """A catalogue entry under any reduction."""
    if reduction == "seq-mean-token-sum-norm":
        knobs["max_tokens"] = 8
    if name == "dro":
        knobs.setdefault("beta", 0.1)
    return fusedpg.loss_spec(name, reduction=reduction, **knobs)


def advantages_for(spec: fusedpg.LossSpec, per_sequence: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The advantage argument that the loss takes, from one value a sequence of a padded batch."""
    if spec.level == Level.SEQUENCE:
        return {"sequence_advantages": per_sequence}
    return {"advantages": per_sequence[:, None].expand(shape).contiguous()}


def from_logp(spec: fusedpg.LossSpec, logp: Tensor, **kwargs: Any) -> tuple[fusedpg.LossOutput, Tensor]:
    """The loss and d numerator/d logp."""
    out = fusedpg.policy_loss(spec, logp, normalizer=1.0, **kwargs)
    (grad,) = torch.autograd.grad(out.loss, logp)
    return out, grad


def from_logits(
    spec: fusedpg.LossSpec, logits: Tensor, targets: Tensor, **kwargs: Any
) -> tuple[fusedpg.LossOutput, Tensor]:
    """The loss and d numerator/d logits."""
    out = fusedpg.policy_loss_from_logits(spec, logits, targets, normalizer=1.0, **kwargs)
    (grad,) = torch.autograd.grad(out.loss, logits)
    return out, grad


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def head(
    rows: int = 6, width: int = 8, vocab: int = 11, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets."""
    hidden, weight = random(rows, width, seed=0, dtype=dtype), random(vocab, width, seed=1, dtype=dtype)
    return hidden, weight, random(vocab, seed=2, dtype=dtype), random_ids(vocab, rows, seed=0)


def eager_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) in fp64."""
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def eager_reduce(x: Tensor, mask: Tensor, reduction: str, max_tokens: int = 8) -> tuple[float, float]:
    """(numerator, weight) of per-token losses (B, T), masked entries selected out first, in plain Python floats."""
    assert reduction in REDUCTIONS
    rows = [
        [(m, v) for v, m in zip(xs, ms, strict=True) if m != 0]
        for xs, ms in zip(x.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    sums = [math.fsum(m * v for m, v in row) for row in rows]
    weights = [math.fsum(m for m, _ in row) for row in rows]
    if reduction == "token-mean":
        return math.fsum(sums), math.fsum(weights)
    if reduction == "token-sum":
        return math.fsum(sums), 1.0
    if reduction == "seq-mean-token-mean":
        return math.fsum(s / w for s, w in zip(sums, weights, strict=True)), float(len(rows))
    if reduction == "seq-mean-token-sum":
        return math.fsum(sums), float(len(rows))
    return math.fsum(sums) / max_tokens, float(len(rows))


def assert_finite(out: fusedpg.LossOutput, *grads: Tensor) -> None:
    for value in (out.loss, out.numerator, out.weight, out.per_token, *grads):
        assert torch.isfinite(value).all(), value
    for name, value in out.metrics.to_dict().items():
        assert math.isfinite(value), (name, value)


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, up to the payload of a NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_output(actual: fusedpg.LossOutput, expected: fusedpg.LossOutput) -> None:
    for name in ("loss", "numerator", "weight", "per_token"):
        assert_bits(getattr(actual, name), getattr(expected, name))
    assert actual.metrics.to_dict() == expected.metrics.to_dict()


def close(actual: Tensor, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Near literal values."""
    wanted = torch.as_tensor(expected, dtype=torch.float64).to("cpu")
    torch.testing.assert_close(actual.detach().double().cpu(), wanted, rtol=rtol, atol=atol, equal_nan=True)
