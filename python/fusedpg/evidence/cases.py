"""What is counted and compiled: this library's calls and other libraries', on the same logits, ids and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..certify import verl_oracle
from ..distill import distillation_loss
from ..functional import policy_loss_from_logits, token_logprobs
from ..losses import CATALOGUE

OURS = "fusedpg"
FORWARD, ENTROPY, TOKEN, SEQUENCE = "log-probs", "log-probs, entropy", "token-level loss", "sequence-level loss"
CROSS_ENTROPY, DISTILL, HEAD = "cross entropy", "reverse KL of two models", "log-probs from hidden states"
#: of the head that a case from hidden states multiplies with: its kernels know the width only as a multiple of 16
WIDTH = 128
IGNORED = -100


@dataclass
class Problem:
    """Completions and their logits with one position more than there are targets, as trainers hold them."""

    logits: Tensor  # (B, T + 1, V), a leaf
    ids: Tensor  # (B, T), as are the rest
    mask: Tensor
    advantages: Tensor
    logp_old: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, V)."""
        return (*self.ids.shape, self.logits.shape[-1])

    @property
    def places(self) -> Tensor:
        """The logits that have a target."""
        return self.logits[:, :-1]


def make_problem(tokens: int, vocab: int, active: str = "all", padding: int = 0) -> Problem:
    """Two sequences in bf16, every ratio 1, so that no row is clipped and each has a gradient.

    `active`: "all", or what the second sequence lacks: "mask" or "advantage". `padding`: columns between two rows.
    """
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(2, tokens + 1, vocab + padding, generator=g).to(torch.bfloat16)
    logits = wide[..., :vocab]
    ids = torch.randint(0, vocab, (2, tokens), generator=g)
    logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[..., None]).squeeze(-1)
    mask, advantages = torch.ones(2, tokens, dtype=torch.int64), torch.ones(2, tokens)
    if active == "mask":
        mask[1] = 0
    elif active == "advantage":
        advantages[1] = 0.0
    return Problem(logits.requires_grad_(), ids, mask, advantages, logp)


@contextlib.contextmanager
def _unchanged(target: str) -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Case:
    """One library's way to one result. `on` makes its host code choose what it chooses on a target's device."""

    library: str
    task: str
    run: Callable[[Problem], None]
    on: Callable[[str], contextlib.AbstractContextManager[None]] = _unchanged
    needs_advantages: bool = False
    from_hidden: bool = False


# ---------------------------------------------------------------- this library


def _ours_logprobs(p: Problem, entropy: bool) -> None:
    with torch.no_grad():
        token_logprobs(p.places, p.ids, mask=p.mask.bool(), return_entropy=entropy, backend="triton")


def _ours_loss(p: Problem, name: str) -> None:
    of_sequences = name == "gspo"
    out = policy_loss_from_logits(
        CATALOGUE[name],
        p.places,
        p.ids,
        logp_old=p.logp_old,
        mask=p.mask.bool(),
        backend="triton",
        advantages=None if of_sequences else p.advantages,
        sequence_advantages=p.advantages[:, 0] if of_sequences else None,
    )
    out.loss.backward()


def _ours_distill(p: Problem) -> None:
    teacher = p.places.detach().clone()
    distillation_loss(p.places, teacher, mask=p.mask.bool(), backend="triton").loss.backward()


def ours() -> list[Case]:
    """Scoring, the loss that needs its own row alone, the loss with sums over sequences, distillation."""
    return [
        Case(OURS, FORWARD, lambda p: _ours_logprobs(p, entropy=False)),
        Case(OURS, ENTROPY, lambda p: _ours_logprobs(p, entropy=True)),
        Case(OURS, TOKEN, lambda p: _ours_loss(p, "dapo"), needs_advantages=True),
        Case(OURS, SEQUENCE, lambda p: _ours_loss(p, "gspo"), needs_advantages=True),
        Case(OURS, DISTILL, _ours_distill),
    ]


# ---------------------------------------------------------------- Liger


def _liger_logprobs(p: Problem) -> None:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    fused_selective_log_softmax(p.logits.detach(), p.ids, 1.0, p.mask)


def _liger_loss(p: Problem, level: str) -> None:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss, _ = triton_grpo_loss(
        p.logits,
        p.logp_old,
        None,
        p.ids,
        p.advantages[:, 0].contiguous(),
        p.mask,
        temperature=1.0,
        beta=0.0,
        eps_high=0.28,
        inplace=False,
        loss_type="dapo",
        importance_sampling_level=level,
        reduce=True,
    )
    loss.backward()


def _liger_cross_entropy(p: Problem) -> None:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # it writes the gradient over its input, behind autograd's back: over a copy with the same distance between rows
    rows = torch.empty_strided((p.ids.numel(), p.shape[-1]), (p.logits.stride(1), 1), dtype=p.logits.dtype)
    rows.copy_(p.places.detach().reshape(rows.shape)).requires_grad_()
    loss, *_ = LigerCrossEntropyFunction.apply(rows, p.ids.masked_fill(p.mask == 0, IGNORED).view(-1), None)
    loss.backward()


_LIGER_NAMES = {"sm_80": "ampere_ada", "sm_90": "hopper", "sm_100": "blackwell", "gfx942": "cdna3"}


@contextlib.contextmanager
def _liger_on(target: str) -> Iterator[None]:
    from liger_kernel.ops import cross_entropy

    with (
        mock.patch.object(cross_entropy, "infer_device_arch", return_value=_LIGER_NAMES[target]),
        mock.patch.object(cross_entropy, "is_hip", return_value=target.startswith("gfx")),
    ):
        yield


def liger() -> list[Case]:
    """What Liger has for the same results; its cross entropy is the token-level loss with every advantage 1."""
    return [
        Case("Liger", FORWARD, _liger_logprobs),
        Case("Liger", TOKEN, lambda p: _liger_loss(p, "token"), needs_advantages=True),
        Case("Liger", SEQUENCE, lambda p: _liger_loss(p, "sequence"), needs_advantages=True),
        Case("Liger", CROSS_ENTROPY, _liger_cross_entropy, on=_liger_on),
    ]


# ---------------------------------------------------------------- verl


def _verl_kernels() -> Any:
    with verl_oracle.import_environment():
        return import_module("verl.utils.kernel.kernels")


def _verl_head(p: Problem) -> None:
    kernels = _verl_kernels()
    labels = p.ids.view(-1)
    hidden = torch.zeros(labels.numel(), WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(p.shape[-1], WIDTH, dtype=torch.bfloat16)
    number = kernels.get_entropy_reduction_enum_number("none")
    logp, entropy, *saved = kernels.efficient_entropy_forward(hidden, weight, labels, number, 1.0)
    upstream = torch.ones_like(logp), torch.zeros_like(entropy)
    kernels.efficient_entropy_backward(*upstream, hidden, weight, labels, *saved, number)


@contextlib.contextmanager
def _verl_on(target: str) -> Iterator[None]:
    """Its host functions take tensors on a GPU only, and from Hopper on load through tensor descriptors."""
    kernels = _verl_kernels()
    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True),
        mock.patch.object(kernels, "SUPPORT_CUDA_TMA", target in ("sm_90", "sm_100")),
    ):
        yield


def verl() -> list[Case]:
    """verl's fused head, from hidden states: it has registers and spills to show, and no logits to read."""
    return [Case("verl", HEAD, _verl_head, on=_verl_on, from_hidden=True)]


def rivals() -> list[Case]:
    """Everything that is not ours."""
    return [*liger(), *verl()]


def with_logits() -> list[Case]:
    """Everything whose kernels read logits."""
    return [case for case in (*ours(), *rivals()) if not case.from_hidden]
