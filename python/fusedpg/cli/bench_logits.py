"""P1: loss and gradient from logits, against PyTorch eager and compiled, cross entropy and copies of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedpg import LossSpec, loss_spec, policy_loss_from_logits

from . import availability, rivals
from .availability import LIGER_GRPO, QUACK_CE
from .timing import Contender, Outcome, Verdict, judged

INPLACE, OUT_OF_PLACE = "fusedpg in place", "fusedpg out of place"
EAGER, COMPILED = "torch eager", "torch.compile"
COPIES = ("copy into a buffer", "multiply in place")
#: who is a row only where its package is installed and its kernels run
OTHERS = (LIGER_GRPO, QUACK_CE)
#: (other row, factor it must take of ours) and the copy bound, for `INPLACE`
TARGETS = ((EAGER, 9.0), (COMPILED, 6.0))
COPY_TARGET = 1.15
MEMORY_TARGET = 0.01
#: on a GPU, percent of a copy's rate
GPU_TARGET = 85.0


@dataclass(frozen=True)
class Tolerance:
    """Largest error against fp64: of the loss (of max(1, |loss|)), of a gradient row (of its largest entry)."""

    loss: float
    grad: float


#: a gradient stored in the logits' dtype cannot be nearer than its rounding; fp32 arithmetic gets the rest
TOLERANCE = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-5, 2**-7),
    torch.float16: Tolerance(1e-5, 2**-10),
}
#: for rivals that compute the log-probability itself in 16 bits; their errors are printed beside their times
LOOSE = Tolerance(0.1, 0.3)


@dataclass
class Problem:
    """Inputs of one shape and dtype; `work` is what a contender reads and may overwrite, restored from `pristine`.

    `padded` is `work` with one row behind it, which Liger's kernel expects and ignores.
    """

    pristine: Tensor
    padded: Tensor
    spare: Tensor
    targets: Tensor
    logp_old: Tensor
    advantages: Tensor
    logp64: Tensor

    @property
    def work(self) -> Tensor:
        """The logits that contenders are given."""
        return self.padded[:-1]

    @property
    def bytes(self) -> int:
        """One read and one write of the logits."""
        return 2 * self.pristine.numel() * self.pristine.element_size()

    def prepare(self) -> None:
        """Fresh logits, the same for every contender."""
        self.work.copy_(self.pristine)

    def logits(self) -> tuple[Tensor, Tensor]:
        """(leaf, logits) in the work buffer: logits are an op's output, as a model hands them over."""
        leaf = self.work.detach().requires_grad_()
        return leaf, leaf.view_as(leaf)


def make_problem(tokens: int, vocab: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Random logits of std 3. The ratios stay inside the clip band: every row has a gradient, none is skipped."""
    rng = torch.Generator(device).manual_seed(seed)
    pristine = torch.empty(tokens, vocab, dtype=dtype, device=device)
    for rows in pristine.split(64):
        rows.copy_(torch.randn(rows.shape, generator=rng, device=device) * 3)
    targets = torch.randint(0, vocab, (tokens,), generator=rng, device=device)
    logp64 = _log_probs64(pristine, targets)
    noise = (torch.rand(tokens, generator=rng, device=device) - 0.5) * 0.2
    return Problem(
        pristine=pristine,
        padded=torch.empty(tokens + 1, vocab, dtype=dtype, device=device),
        spare=torch.zeros_like(pristine),
        targets=targets,
        logp_old=(logp64 + noise).float(),
        advantages=torch.randn(tokens, generator=rng, device=device),
        logp64=logp64,
    )


def contenders(problem: Problem, compiled: bool = True) -> list[Contender]:
    """The rows of the table. Compilation happens at the first run, which is never timed."""
    spec = loss_spec("ppo_clip", epsilon_low=rivals.EPSILON_LOW, epsilon_high=rivals.EPSILON_HIGH)
    check = policy_check(problem, TOLERANCE[problem.pristine.dtype])
    exact = problem.pristine.dtype == torch.float32
    selective_check = check if exact else policy_check(problem, LOOSE)
    rows = [
        Contender(INPLACE, partial(_ours, problem, spec, True), check, ours=True),
        Contender(OUT_OF_PLACE, partial(_ours, problem, spec, False), check, ours=True),
        Contender(EAGER, partial(_eager, problem, rivals.log_softmax_loss), check),
        Contender("torch eager, TRL form", partial(_eager, problem, rivals.selective_loss), selective_check),
    ]
    if compiled:
        function = torch.compile(rivals.log_softmax_loss, dynamic=False)
        rows.append(Contender(COMPILED, partial(_eager, problem, function), check))
    rows += [
        Contender("F.cross_entropy", partial(_cross_entropy, problem, F.cross_entropy), cross_entropy_check(problem)),
        *_others(problem),
        Contender(COPIES[0], partial(_copy, problem)),
        Contender(COPIES[1], partial(_multiply, problem)),
        Contender("copy into new memory", partial(_clone, problem)),
    ]
    return rows


def _others(problem: Problem) -> list[Contender]:
    device = problem.pristine.device
    rows = []
    if availability.runs(LIGER_GRPO, device):
        # one sequence, so one advantage
        alike = replace(problem, advantages=torch.ones_like(problem.advantages))
        rows.append(Contender(LIGER_GRPO, partial(_liger_grpo, alike), policy_check(alike, LOOSE)))
    if availability.runs(QUACK_CE, device):
        function = availability.load(QUACK_CE).cross_entropy
        rows.append(Contender(QUACK_CE, partial(_cross_entropy, problem, function), cross_entropy_check(problem)))
    return rows


# ------------------------------------------------------------------ what is timed


def _ours(problem: Problem, spec: LossSpec, inplace: bool) -> Outcome:
    leaf, logits = problem.logits()
    out = policy_loss_from_logits(
        spec, logits, problem.targets, logp_old=problem.logp_old, advantages=problem.advantages, inplace=inplace
    )
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return Outcome(out.loss.detach(), grad)


def _eager(problem: Problem, function: Callable[..., Tensor]) -> Outcome:
    leaf, logits = problem.logits()
    count = float(problem.targets.numel())
    loss = function(logits, problem.targets, problem.logp_old, problem.advantages, count)
    (grad,) = torch.autograd.grad(loss, leaf)
    return Outcome(loss.detach(), grad)


def _liger_grpo(problem: Problem) -> Outcome:
    """As its users call it: the gradient goes into the logits' memory."""
    leaf = problem.padded.detach().requires_grad_()
    loss, _ = availability.load(LIGER_GRPO).triton_grpo_loss(
        leaf.view(1, *leaf.shape),
        problem.logp_old[None],
        None,
        problem.targets[None],
        problem.advantages[:1],
        temperature=1.0,
        beta=0.0,
        eps_low=rivals.EPSILON_LOW,
        eps_high=rivals.EPSILON_HIGH,
        inplace=True,
        loss_type="dapo",
        reduce=True,
    )
    (grad,) = torch.autograd.grad(loss, leaf)
    return Outcome(loss.detach(), grad[:-1])


def _cross_entropy(problem: Problem, function: Callable[..., Tensor]) -> Outcome:
    leaf, logits = problem.logits()
    loss = function(logits, problem.targets)
    (grad,) = torch.autograd.grad(loss, leaf)
    return Outcome(loss.detach(), grad)


def _copy(problem: Problem) -> Outcome:
    problem.spare.copy_(problem.work)
    return Outcome()


def _multiply(problem: Problem) -> Outcome:
    problem.work.mul_(1.0)
    return Outcome()


def _clone(problem: Problem) -> Outcome:
    problem.work.clone()
    return Outcome()


# ------------------------------------------------------------------ what is true


def _log_probs64(logits: Tensor, targets: Tensor) -> Tensor:
    parts = []
    for rows, ids in zip(logits.split(64), targets.split(64), strict=True):
        wide = rows.double()
        parts.append(wide.gather(-1, ids[:, None]).squeeze(-1) - wide.logsumexp(-1))
    return torch.cat(parts)


def policy_check(problem: Problem, tolerance: Tolerance) -> Callable[[Outcome], Verdict]:
    """Judges a PPO result: the loss over all rows, the gradient on some, against autograd in fp64."""
    count = float(problem.targets.numel())
    constants = (problem.logp_old.double(), problem.advantages.double())
    loss = rivals.ppo_token_mean(problem.logp64, *constants, count)
    some = _some_rows(problem)
    leaf = problem.pristine[some].double().requires_grad_()
    logp_old, advantages = (values[some] for values in constants)
    part = rivals.log_softmax_loss(leaf, problem.targets[some], logp_old, advantages, count)
    (grad,) = torch.autograd.grad(part, leaf)
    return partial(_judge, loss, grad, some, tolerance)


def cross_entropy_check(problem: Problem) -> Callable[[Outcome], Verdict]:
    """Judges cross entropy in the same way; PyTorch rounds its loss to the logits' dtype."""
    some = _some_rows(problem)
    leaf = problem.pristine[some].double().requires_grad_()
    part = F.cross_entropy(leaf, problem.targets[some], reduction="sum") / problem.targets.numel()
    (grad,) = torch.autograd.grad(part, leaf)
    exact = problem.pristine.dtype == torch.float32
    tolerance = TOLERANCE[torch.float32] if exact else LOOSE
    return partial(_judge, -problem.logp64.mean(), grad, some, tolerance)


def _some_rows(problem: Problem) -> Tensor:
    last = problem.targets.numel() - 1
    return torch.tensor([0, last // 3, last // 2, last], device=problem.targets.device).unique()


def _judge(loss: Tensor, grad: Tensor, some: Tensor, tolerance: Tolerance, outcome: Outcome) -> Verdict:
    assert outcome.loss is not None
    assert outcome.grad is not None
    loss_error = (outcome.loss.double() - loss).abs() / loss.abs().clamp(min=1)
    difference = (outcome.grad[some].double() - grad).abs().amax(-1)
    grad_error = (difference / grad.abs().amax(-1)).max()
    errors = {"loss": loss_error.item(), "grad": grad_error.item()}
    limits: dict[str, Any] = {"loss": tolerance.loss, "grad": tolerance.grad}
    return judged(errors, limits)
