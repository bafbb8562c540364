"""The same batch through the native backend and the reference: agreement, time and peak memory of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg.outputs import LossOutput

from .memory import peak_extra_bytes
from .train import Trainer

LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4

Loss = Callable[[Tensor, str], LossOutput]


@dataclass(frozen=True)
class Comparison:
    """Largest differences, the gradient's relative to its largest entry, and what each backend took."""

    what: str
    backend: str
    loss_difference: float
    grad_difference: float
    native_seconds: float
    reference_seconds: float
    native_bytes: int | None
    reference_bytes: int | None

    @property
    def agree(self) -> bool:
        """Whether the differences are rounding of fp32 arithmetic."""
        return self.loss_difference <= LOSS_LIMIT and self.grad_difference <= GRAD_LIMIT


def compare_own_batch(trainer: Trainer) -> Comparison:
    """The demo's last rollout under the policy that its updates made: ratios have moved, some are clipped."""
    rollout = trainer.last
    assert rollout is not None
    rows = torch.arange(rollout.answers.shape[0], device=rollout.answers.device)
    with torch.no_grad():
        model_logits = trainer.loss_logits(rollout, rows)
    shape = " x ".join(map(str, model_logits.shape))
    loss: Loss = lambda logits, backend: trainer.loss_of(rollout, rows, logits, backend=backend)  # noqa: E731
    return _compare(f"the demo's own batch, logits {shape}", model_logits.contiguous(), loss)


def compare_large(device: torch.device, tokens: int, vocab: int) -> Comparison:
    """Random logits with the vocabulary of a real model: where the memory and the time are."""
    rng = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=rng, device=device) * 3
    targets = torch.randint(0, vocab, (tokens,), generator=rng, device=device)
    with torch.no_grad():
        logp = fusedpg.token_logprobs(logits, targets).logp
    noise = torch.randn(2, tokens, generator=rng, device=device) * 0.1
    options: dict[str, Any] = {
        "logp_old": logp + noise[0],
        "logp_ref": logp + noise[1],
        "advantages": torch.randn(tokens, generator=rng, device=device),
    }
    spec = fusedpg.loss_spec("grpo", reduction="token-mean")

    def loss(values: Tensor, backend: str) -> LossOutput:
        return fusedpg.policy_loss_from_logits(spec, values, targets, backend=backend, **options)

    return _compare(f"random logits {tokens} x {vocab}, fp32", logits, loss)


def _compare(what: str, logits: Tensor, loss: Loss) -> Comparison:
    def run(backend: str) -> tuple[LossOutput, Tensor]:
        leaf = logits.detach().requires_grad_()
        out = loss(leaf, backend)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        return out, grad

    native, grad = run("auto")
    reference, expected = run("reference")
    scale = expected.abs().amax().clamp(min=1e-30)
    loss_difference = (native.loss - reference.loss).abs().item()
    grad_difference = ((grad - expected).abs().amax() / scale).item()
    del grad, expected
    device = logits.device
    return Comparison(
        what=what,
        backend=native.backend,
        loss_difference=loss_difference,
        grad_difference=grad_difference,
        native_seconds=_best_seconds(lambda: run("auto"), device),
        reference_seconds=_best_seconds(lambda: run("reference"), device),
        native_bytes=peak_extra_bytes(lambda: run("auto"), device),
        reference_bytes=peak_extra_bytes(lambda: run("reference"), device),
    )


def _best_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
