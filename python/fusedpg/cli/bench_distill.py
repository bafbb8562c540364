"""Distillation: divergence and gradient from both models' logits, against PyTorch eager and Liger where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fusedpg import dispatch, distillation_loss

from . import availability, memory
from .availability import LIGER_JSD
from .bench_logits import TOLERANCE, Tolerance
from .bench_options import DTYPES, Options
from .report import Job, Section, broken, bytes_gauge, columns, refusals, rounds_note, row_cells, speed_target
from .timing import Contender, Outcome, Tick, Verdict, judged, measure, ticks

OURS, EAGER, COPY = "fusedpg", "torch eager", "read both, write one"
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
BETA = 0.5
#: factor that eager must take of ours
TARGET = 5.0


@dataclass
class Problem:
    """Both models' logits in one dtype, and the divergence between them."""

    student: Tensor
    teacher: Tensor
    divergence: str

    @property
    def bytes(self) -> int:
        """One read of each and one write of the gradient."""
        return 3 * self.student.numel() * self.student.element_size()

    def leaf(self) -> Tensor:
        """Fresh differentiable logits in the same memory."""
        return self.student.detach().requires_grad_()


def make_problem(
    tokens: int, vocab: int, dtype: torch.dtype, device: torch.device, divergence: str, seed: int = 0
) -> Problem:
    """A teacher of std 3 and a student near it, as in on-policy distillation."""
    rng = torch.Generator(device).manual_seed(seed)
    student, teacher = (torch.empty(tokens, vocab, dtype=dtype, device=device) for _ in range(2))
    for mine, theirs in zip(student.split(64), teacher.split(64), strict=True):
        theirs.copy_(torch.randn(theirs.shape, generator=rng, device=device) * 3)
        mine.copy_(theirs + torch.randn(mine.shape, generator=rng, device=device))
    return Problem(student, teacher, divergence)


def eager_loss(student: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    """Mean divergence as trainers write it: two log_softmax in fp32, then the sum over the vocabulary."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p, log_q = torch.log_softmax(student.to(wide), -1), torch.log_softmax(teacher.to(wide), -1)
    if divergence == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if divergence == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.log(BETA * q + (1 - BETA) * p)
    return (BETA * (q * (log_q - log_m)).sum(-1) + (1 - BETA) * (p * (log_p - log_m)).sum(-1)).mean()


def contenders(problem: Problem) -> list[Contender]:
    """The rows of the table; Liger's kernel needs a GPU."""
    truth = make_truth(problem)
    tolerance = TOLERANCE[problem.student.dtype]
    # two log_softmax of a hundred thousand columns leave eager an fp32 gradient wrong in the fifth digit
    eager = Tolerance(tolerance.loss, max(tolerance.grad, 1e-4))
    rows = [
        Contender(OURS, partial(_ours, problem), partial(_judge, truth, tolerance), ours=True),
        Contender(EAGER, partial(_eager, problem), partial(_judge, truth, eager)),
    ]
    if availability.runs(LIGER_JSD, problem.student.device):
        # its gradient passes through the logits' dtype twice; the errors are printed
        loose = Tolerance(1e-3, 0.05)
        rows.append(Contender(LIGER_JSD, partial(_liger, problem), partial(_judge, truth, loose)))
    return [*rows, Contender(COPY, partial(_copy, problem))]


def _copy(problem: Problem) -> Outcome:
    """The same bytes without the arithmetic, into new memory as the gradient is."""
    torch.add(problem.student, problem.teacher)
    return Outcome()


def _ours(problem: Problem) -> Outcome:
    leaf = problem.leaf()
    out = distillation_loss(leaf, problem.teacher, divergence=problem.divergence, beta=BETA)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return Outcome(out.loss.detach(), grad)


def _eager(problem: Problem) -> Outcome:
    leaf = problem.leaf()
    loss = eager_loss(leaf, problem.teacher, problem.divergence)
    (grad,) = torch.autograd.grad(loss, leaf)
    return Outcome(loss.detach(), grad)


def _liger(problem: Problem) -> Outcome:
    """Liger takes log-probabilities; its beta 0 and 1 are forward and reverse KL."""
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": BETA}[problem.divergence]
    leaf = problem.leaf()
    log_p, log_q = (torch.log_softmax(x.float(), -1) for x in (leaf, problem.teacher))
    loss = availability.load(LIGER_JSD).LigerJSD(beta=beta)(log_p, log_q)
    (grad,) = torch.autograd.grad(loss, leaf)
    return Outcome(loss.detach(), grad)


@dataclass(frozen=True)
class Truth:
    """The loss over all rows, and the gradient on some, in fp64."""

    loss: Tensor
    rows: Tensor
    grad: Tensor


def make_truth(problem: Problem) -> Truth:
    """By autograd in fp64, a block of rows at a time."""
    tokens = problem.student.shape[0]
    some = torch.tensor(sorted({0, (tokens - 1) // 3, (tokens - 1) // 2, tokens - 1}), device=problem.student.device)
    blocks = zip(problem.student.split(64), problem.teacher.split(64), strict=True)
    with torch.no_grad():
        parts = [eager_loss(s.double(), t.double(), problem.divergence) * len(s) for s, t in blocks]
    leaf = problem.student[some].double().requires_grad_()
    part = eager_loss(leaf, problem.teacher[some].double(), problem.divergence) * len(some) / tokens
    (grad,) = torch.autograd.grad(part, leaf)
    return Truth(torch.stack(parts).sum() / tokens, some, grad)


def _judge(truth: Truth, tolerance: Tolerance, outcome: Outcome) -> Verdict:
    assert outcome.loss is not None
    assert outcome.grad is not None
    loss_error = ((outcome.loss.double() - truth.loss).abs() / truth.loss.abs().clamp(min=1)).item()
    difference = (outcome.grad[truth.rows].double() - truth.grad).abs().amax(-1)
    grad_error = (difference / truth.grad.abs().amax(-1)).max().item()
    errors = {"loss": loss_error, "grad": grad_error}
    return judged(errors, {"loss": tolerance.loss, "grad": tolerance.grad})


# ------------------------------------------------------------------ the table


def jobs(options: Options) -> Iterator[Job]:
    """A table for each dtype and divergence."""
    for name in options.dtypes:
        tiny = make_problem(1, 2, DTYPES[name], options.place, DIVERGENCES[0])
        count = len(contenders(tiny))
        for divergence in DIVERGENCES:
            yield Job(ticks(count, options.rounds), partial(section, options, name, divergence))


def section(options: Options, dtype: str, divergence: str, tick: Tick) -> Section:
    """Measure all rows and judge them."""
    device, tokens = options.place, options.distilled_tokens
    problem = make_problem(tokens, options.vocab, DTYPES[dtype], device, divergence)
    rows = measure(contenders(problem), lambda: None, options.rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS]
    gauge = bytes_gauge("GB/s (2R+1W)", problem.bytes, by_name[COPY])
    return Section(
        title=f"Distillation, {divergence} and its gradient, {dtype}, N = {tokens}, V = {options.vocab}",
        columns=columns("fusedpg", "loss / grad", gauge),
        cells=[row_cells(row, ours, gauge) for row in rows],
        targets=[speed_target("against torch eager", by_name[EAGER], ours, TARGET)],
        notes=[
            f"{rounds_note(rows, options.rounds)}; {gauge.note()}",
            f"student and teacher logits of {problem.bytes / 3e6:.0f} MB each; the extra memory holds the gradient: "
            f"{memory.HOW[device.type]}",
            *availability.absent([LIGER_JSD], device),
            *refusals(rows),
        ],
        record={
            "suite": "distill",
            "tokens": tokens,
            "vocab": options.vocab,
            "dtype": dtype,
            "divergence": divergence,
            "gauge": gauge.to_json(),
            "backend": dispatch.resolve("auto", device, DTYPES[dtype]),
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(rows),
    )
