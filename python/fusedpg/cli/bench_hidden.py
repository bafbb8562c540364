"""P2 and P3: loss and gradients from hidden states, against the three bare products and others' fused heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fusedpg import linear_token_logprobs, loss_spec, policy_loss_from_hidden
from fusedpg.linear_plan import MIB, LinearPlan, LinearShape, plan_linear
from fusedpg.linear_walk import Head
from fusedpg.workspace import default_workspace

from . import availability, hidden_rivals, rivals
from .availability import (
    CUT_CE,
    LIGER_CE,
    LIGER_CHUNKED,
    LIGER_SCALED,
    QUACK_LINEAR,
    TORCH_CE,
    TRL_HEAD,
    VERL_KERNEL,
)
from .bench_logits import LOOSE, TOLERANCE, Tolerance
from .hidden_rivals import Tokens
from .hidden_truth import Truth, logp_check, loss_check, make_truth, random_head
from .timing import Contender, Outcome

OURS, SCORE = "fusedpg", "fusedpg, log-probs alone"
INACTIVE, IDLE = "half the rows masked", "half without advantage"
FLAT = ("fusedpg, small workspace, N/2", "fusedpg, small workspace, N")
GEMMS, GEMMS_FP32 = "three bare products", "three bare products, upcast"
SEQUENCES = 4
LOGP_TOLERANCE = 1e-5

Loss = Callable[[Tokens, Tensor, Tensor], Tensor]
PPO_RIVALS: tuple[tuple[str, Loss], ...] = (
    (hidden_rivals.EAGER, hidden_rivals.eager_loss),
    (TRL_HEAD, hidden_rivals.trl_loss),
    (LIGER_CHUNKED, hidden_rivals.liger_loss),
    (LIGER_SCALED, hidden_rivals.liger_scaled_loss),
    (VERL_KERNEL, hidden_rivals.verl_loss),
)
CE_RIVALS: tuple[tuple[str, Loss], ...] = (
    (TORCH_CE, hidden_rivals.torch_cross_entropy),
    (LIGER_CE, hidden_rivals.liger_cross_entropy),
    (QUACK_LINEAR, hidden_rivals.quack_cross_entropy),
    (CUT_CE, hidden_rivals.cut_cross_entropy),
)
#: those that are measured with inactive rows too, where the vocabulary is small
HALVED = (TRL_HEAD, LIGER_CHUNKED)
HALVED_VOCAB = 65_536
#: products of a row (forward, d hidden, d weight) over those of the dense loss
HALF_WORK, IDLE_WORK, SCORE_WORK = 1 / 2, (1 + 2 * 0.5) / 3, 1 / 3


@dataclass(frozen=True)
class Problem:
    """A head and a batch in one dtype; `truth` belongs to these rows."""

    hidden: Tensor
    weight: Tensor
    tokens: Tokens
    truth: Truth

    @property
    def flops(self) -> int:
        """Of the three products."""
        return 6 * self.hidden.numel() * self.weight.shape[0]

    @property
    def gradient_bytes(self) -> int:
        """Of d hidden and d weight as they are returned."""
        return (self.hidden.numel() + self.weight.numel()) * self.weight.element_size()

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Fresh differentiable hidden states and weight in the same memory."""
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def first(self, count: int) -> Problem:
        """The same head with the first rows."""
        old = self.tokens
        some = old.sequence_advantages[: sequences(count)]
        tokens = Tokens(old.targets[:count], old.logp_old[:count], some, old.mask[:count])
        return replace(self, hidden=self.hidden[:count], tokens=tokens, truth=self.truth.first(count))

    def masked(self) -> Problem:
        """Every second row without a weight."""
        mask = torch.arange(len(self.hidden), device=self.hidden.device) % 2 == 0
        old = self.tokens
        return replace(self, tokens=Tokens(old.targets, old.logp_old, old.sequence_advantages, mask))

    def idle(self) -> Problem:
        """Every second sequence without an advantage: what a group of equal rewards is given."""
        old = self.tokens
        some = torch.arange(old.sequences, device=self.hidden.device) % 2 == 0
        return replace(
            self, tokens=Tokens(old.targets, old.logp_old, old.sequence_advantages.where(some, 0.0), old.mask)
        )

    @property
    def shape(self) -> LinearShape:
        """What the planner sees of loss and gradients."""
        return Head(self.hidden.unsqueeze(0), self.weight, None).shape(gradient=True, weight_gradient=True)

    @property
    def workspace(self) -> int:
        """The default, in bytes."""
        return default_workspace(self.hidden.device, self.shape)

    def plan(self, workspace: int = 0) -> LinearPlan:
        """Ours for loss and gradients, in some bytes of workspace."""
        return plan_linear(self.shape, workspace or self.workspace)

    def small_workspace(self) -> int:
        """The fewest MiB that hold a quarter of the rows (and no fewer than three products need)."""
        for mib in range(1, self.workspace // MIB):
            try:
                plan = self.plan(mib * MIB)
            except ValueError:
                continue
            if plan.products == 3 and plan.rows >= len(self.hidden) // 4:
                return mib
        return self.workspace // MIB


def sequences(tokens: int) -> int:
    """Sequences in a batch."""
    return SEQUENCES if tokens % SEQUENCES == 0 else 1


def make_problem(
    tokens: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Problem:
    """Logits of std 3. The ratios stay inside the clip band: every row has a gradient, none is skipped."""
    rng = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = random_head(tokens, vocab, width, dtype, rng)
    truth = make_truth(hidden, weight, targets)
    noise = (torch.rand(tokens, generator=rng, device=device) - 0.5) * 0.2
    advantages = torch.randn(sequences(tokens), generator=rng, device=device)
    mask = torch.ones(tokens, dtype=torch.bool, device=device)
    return Problem(hidden, weight, Tokens(targets, (truth.logp + noise).float(), advantages, mask), truth)


def contenders(problem: Problem) -> list[Contender]:
    """The rows of the table."""
    device, dtype = problem.hidden.device, problem.weight.dtype
    masked = problem.masked()
    score = partial(_score, problem), logp_check(problem.truth, LOGP_TOLERANCE)
    rows = [
        _ours(OURS, problem),
        _ours(f"{OURS}, {INACTIVE}", masked, work=HALF_WORK),
        _ours(f"{OURS}, {IDLE}", problem.idle(), work=IDLE_WORK),
        Contender(SCORE, *score, ours=True, work=SCORE_WORK),
        *_bare_products(problem),
    ]
    # the others round logits or their gradient to 16 bits where hidden is; their errors are printed
    tolerance = Tolerance(1e-5, 1e-4) if dtype == torch.float32 else LOOSE
    for name, loss in PPO_RIVALS:
        if availability.runs(name, device):
            check = loss_check(problem.truth, problem.tokens.ppo, tolerance)
            rows.append(Contender(name, partial(_rival, problem, loss), check))
            if name in HALVED and len(problem.weight) <= HALVED_VOCAB:
                check = loss_check(masked.truth, masked.tokens.ppo, tolerance)
                run = partial(_rival, masked, loss)
                rows.append(Contender(f"{name}, {INACTIVE}", run, check, work=HALF_WORK))
    mean = loss_check(problem.truth, lambda logp: -logp.mean(), tolerance)
    rows += [
        Contender(name, partial(_rival, problem, loss), mean)
        for name, loss in CE_RIVALS
        if availability.runs(name, device)
    ]
    small = problem.small_workspace()
    halves = problem.first(max(1, len(problem.hidden) // 2))
    return [*rows, _ours(FLAT[0], halves, small, HALF_WORK), _ours(FLAT[1], problem, small)]


def absent(device: torch.device) -> list[str]:
    """Who is not among the rows, and why."""
    return availability.absent([name for name, _ in (*PPO_RIVALS, *CE_RIVALS)], device)


# ------------------------------------------------------------------ what is timed


def _ours(name: str, problem: Problem, workspace: int | None = None, work: float = 1.0) -> Contender:
    check = loss_check(problem.truth, problem.tokens.ppo, TOLERANCE[problem.weight.dtype])
    return Contender(name, partial(_loss, problem, workspace), check, ours=True, work=work)


def _loss(problem: Problem, workspace: int | None) -> Outcome:
    tokens, (hidden, weight) = problem.tokens, problem.leaves()
    shape = (tokens.sequences, -1)
    out = policy_loss_from_hidden(
        loss_spec("ppo_clip", epsilon_low=rivals.EPSILON_LOW, epsilon_high=rivals.EPSILON_HIGH),
        hidden.view(*shape, hidden.shape[1]) if tokens.sequences > 1 else hidden.unsqueeze(0),
        weight,
        tokens.targets.view(shape),
        logp_old=tokens.logp_old.view(shape),
        sequence_advantages=tokens.sequence_advantages,
        mask=tokens.mask.view(shape),
        workspace_mib=workspace,
    )
    return Outcome(out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight)))


def _score(problem: Problem) -> Outcome:
    with torch.no_grad():
        return Outcome(linear_token_logprobs(problem.hidden, problem.weight, problem.tokens.targets).logp)


def _rival(problem: Problem, function: Loss) -> Outcome:
    hidden, weight = problem.leaves()
    loss = function(problem.tokens, hidden, weight)
    return Outcome(loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


def _bare_products(problem: Problem) -> list[Contender]:
    """Into buffers that are there, from operands that are already upcast: no cast, no allocation in their time."""
    operands = [(GEMMS, problem.hidden, problem.weight)]
    if problem.weight.dtype != torch.float32:
        operands.append((GEMMS_FP32, problem.hidden.float(), problem.weight.float()))
    size = min(len(problem.hidden), problem.plan().rows)
    result = []
    for name, hidden, weight in operands:
        tile = torch.zeros(size, len(weight), dtype=weight.dtype, device=weight.device)
        buffers = (tile, torch.zeros_like(hidden), torch.zeros_like(weight))
        result.append(Contender(name, partial(_products, hidden, weight, *buffers)))
    return result


def _products(hidden: Tensor, weight: Tensor, tile: Tensor, d_hidden: Tensor, d_weight: Tensor) -> Outcome:
    with torch.no_grad():
        for top in range(0, len(hidden), len(tile)):
            x = hidden[top : top + len(tile)]
            logits = tile[: len(x)]
            torch.mm(x, weight.t(), out=logits)
            torch.mm(logits, weight, out=d_hidden[top : top + len(tile)])
            if top:
                d_weight.addmm_(logits.t(), x)
            else:
                torch.mm(logits.t(), x, out=d_weight)
    return Outcome()
