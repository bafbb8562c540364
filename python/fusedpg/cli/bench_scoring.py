"""Scoring: log-probs with entropy and no gradient, what an old or a reference policy needs, from logits and from
hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import availability, hidden_rivals
from . import scoring_forms as forms
from .availability import (
    LIGER_SCORE,
    LIGER_SELECTIVE,
    QUACK_CE,
    TRL_HEAD,
    TRL_SELECTIVE,
    VERL_HEAD,
    VERL_KERNEL,
    VERL_LOGITS,
)
from .hidden_truth import random_head
from .scoring_forms import Score
from .timing import Contender, Outcome, Verdict, judged

OURS, OURS_LOGP = "fusedpg", "fusedpg, without entropy"
EAGER, COMPILED, CROSS_ENTROPY = "torch eager", "torch.compile", "F.cross_entropy, without entropy"
COPY, READ = "copy into a buffer", "sum of the logits"
PRODUCT, PRODUCT_FP32 = "bare product", "bare product, upcast"
LOGITS_OTHERS = (TRL_SELECTIVE, VERL_LOGITS, LIGER_SELECTIVE, QUACK_CE)
HIDDEN_OTHERS = (TRL_HEAD, VERL_HEAD, LIGER_SCORE, VERL_KERNEL)
#: of max(1, |value|): ours, others in fp32, others that round logits or log-probs to 16 bits
TOLERANCE, FP32_TOLERANCE, LOOSE = 1e-5, 1e-4, 0.1
BLOCK = 64


@dataclass(frozen=True)
class LogitsProblem:
    """Logits of std 3 and what is true of them in fp64; `padded` ends with the row that Liger's kernel expects."""

    padded: Tensor
    targets: Tensor
    logp: Tensor
    entropy: Tensor
    spare: Tensor

    @property
    def logits(self) -> Tensor:
        """(N, V)."""
        return self.padded[:-1]

    @property
    def bytes(self) -> int:
        """One read of the logits."""
        return self.logits.numel() * self.logits.element_size()


@dataclass(frozen=True)
class HiddenProblem:
    """Hidden states and a head whose logits have std 3, and what is true of them in fp64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    logp: Tensor
    entropy: Tensor

    @property
    def flops(self) -> int:
        """Of the product."""
        return 2 * self.hidden.numel() * self.weight.shape[0]


def make_logits(tokens: int, vocab: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> LogitsProblem:
    """Random logits and targets."""
    rng = torch.Generator(device).manual_seed(seed)
    padded = torch.zeros(tokens + 1, vocab, dtype=dtype, device=device)
    logits = padded[:-1]
    for rows in logits.split(BLOCK):
        rows.copy_(torch.randn(rows.shape, generator=rng, device=device) * 3)
    targets = torch.randint(0, vocab, (tokens,), generator=rng, device=device)
    blocks = (rows.double() for rows in logits.split(BLOCK))
    return LogitsProblem(padded, targets, *exact_scores(blocks, targets), torch.zeros_like(logits))


def make_hidden(
    tokens: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> HiddenProblem:
    """Random hidden states, head and targets."""
    rng = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = random_head(tokens, vocab, width, dtype, rng)
    wide = weight.double().t()
    blocks = (rows.double() @ wide for rows in hidden.split(BLOCK))
    return HiddenProblem(hidden, weight, targets, *exact_scores(blocks, targets))


def exact_scores(blocks: Iterator[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of logits in fp64, a block of rows at a time."""
    logp, entropy = [], []
    for logits, ids in zip(blocks, targets.split(BLOCK), strict=True):
        log_probs = torch.log_softmax(logits, -1)
        logp.append(log_probs.gather(-1, ids[:, None]).squeeze(-1))
        entropy.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


# ------------------------------------------------------------------ who scores


def logits_contenders(problem: LogitsProblem, compiled: bool = True) -> list[Contender]:
    """The rows of the table from logits. Compilation happens at the first run, which is never timed."""
    scorer = partial(_scorer, problem, (problem.logits, problem.targets))
    tolerance = FP32_TOLERANCE if problem.logits.dtype == torch.float32 else LOOSE
    rows = [
        scorer(OURS, forms.fused, TOLERANCE, ours=True),
        scorer(OURS_LOGP, forms.fused_logp, TOLERANCE, ours=True),
        scorer(EAGER, forms.eager, FP32_TOLERANCE),
        scorer(CROSS_ENTROPY, forms.cross_entropy, tolerance),
    ]
    if compiled:
        rows.append(scorer(COMPILED, torch.compile(forms.eager, dynamic=False), FP32_TOLERANCE))
    others: dict[str, Score] = {
        TRL_SELECTIVE: forms.trl_selective,
        VERL_LOGITS: forms.verl_logits,
        QUACK_CE: forms.quack_cross_entropy,
    }
    rows += [scorer(name, others[name], tolerance) for name in _here(tuple(others), problem.logits)]
    for name in _here((LIGER_SELECTIVE,), problem.logits):
        rows.append(_scorer(problem, (problem.padded, problem.targets), name, forms.liger_selective, tolerance))
    return [*rows, Contender(READ, partial(_read, problem)), Contender(COPY, partial(_copy, problem), work=2.0)]


def hidden_contenders(problem: HiddenProblem) -> list[Contender]:
    """The rows of the table from hidden states."""
    scorer = partial(_scorer, problem, (problem.hidden, problem.weight, problem.targets))
    tolerance = FP32_TOLERANCE if problem.weight.dtype == torch.float32 else LOOSE
    rows = [
        scorer(OURS, forms.fused_linear, TOLERANCE, ours=True),
        scorer(OURS_LOGP, forms.fused_linear_logp, TOLERANCE, ours=True),
        scorer(EAGER, forms.eager_linear, tolerance),
    ]
    others: dict[str, Score] = {
        TRL_HEAD: hidden_rivals.trl_scores,
        VERL_HEAD: forms.verl_head,
        LIGER_SCORE: forms.liger_scores,
        VERL_KERNEL: forms.verl_kernel,
    }
    rows += [scorer(name, others[name], tolerance) for name in _here(tuple(others), problem.hidden)]
    return [*rows, *_bare_products(problem)]


def _here(names: Sequence[str], tensor: Tensor) -> list[str]:
    return [name for name in names if availability.runs(name, tensor.device)]


def _scorer(
    problem: LogitsProblem | HiddenProblem,
    arguments: tuple[Tensor, ...],
    name: str,
    score: Score,
    tolerance: float,
    ours: bool = False,
) -> Contender:
    check = partial(_judge, problem.logp, problem.entropy, tolerance)
    return Contender(name, partial(_run, score, arguments), check, ours=ours)


def _run(score: Score, arguments: tuple[Tensor, ...]) -> Outcome:
    with torch.no_grad():
        logp, entropy = score(*arguments)
    return Outcome(logp=logp, entropy=entropy)


def _judge(logp: Tensor, entropy: Tensor, tolerance: float, outcome: Outcome) -> Verdict:
    assert outcome.logp is not None
    errors = {"logp": _error(outcome.logp, logp)}
    if outcome.entropy is not None:
        errors["entropy"] = _error(outcome.entropy, entropy)
    return judged(errors, dict.fromkeys(errors, tolerance))


def _error(got: Tensor, true: Tensor) -> float:
    return ((got.double().reshape(-1) - true).abs() / true.abs().clamp(min=1)).max().item()


# ------------------------------------------------------------------ ceilings


def _read(problem: LogitsProblem) -> Outcome:
    problem.logits.sum()
    return Outcome()


def _copy(problem: LogitsProblem) -> Outcome:
    problem.spare.copy_(problem.logits)
    return Outcome()


def _bare_products(problem: HiddenProblem) -> list[Contender]:
    """Into a buffer that is there, from operands that are already upcast."""
    operands = [(PRODUCT, problem.hidden, problem.weight)]
    if problem.weight.dtype != torch.float32:
        operands.append((PRODUCT_FP32, problem.hidden.float(), problem.weight.float()))
    result = []
    for name, hidden, weight in operands:
        buffer = torch.zeros(len(hidden), len(weight), dtype=weight.dtype, device=weight.device)
        result.append(Contender(name, partial(_product, hidden, weight, buffer)))
    return result


def _product(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Outcome:
    torch.mm(hidden, weight.t(), out=buffer)
    return Outcome()
