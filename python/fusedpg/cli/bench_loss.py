"""P4: stage B alone. One policy loss over a million tokens with its metrics, against verl's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedpg import LossSpec, dispatch, loss_spec, policy_loss

from . import memory, rivals
from .bench_options import Options
from .report import Job, Section, broken, columns, refusals, rounds_note, row_cells, speed_target
from .timing import Contender, Outcome, Tick, Verdict, judged, measure, ticks

OURS, EAGER, COMPILED = "fusedpg", "verl's function, eager", "verl's function, torch.compile"
TARGETS = ((EAGER, 5.0), (COMPILED, 1.0))
SEQUENCE = 4096


@dataclass
class Tokens:
    """A padded batch of responses with ragged ends: what a trainer has when the log-probs are computed."""

    logp: Tensor
    logp_old: Tensor
    advantages: Tensor
    mask: Tensor

    def leaf(self) -> Tensor:
        """Fresh differentiable log-probs in the same memory."""
        return self.logp.detach().requires_grad_()


def make_tokens(tokens: int, device: torch.device, seed: int = 0) -> Tokens:
    """(B, 4096) log-probs in fp32 (one short row where there are fewer tokens), 75 % of the places real on average."""
    rng = torch.Generator(device).manual_seed(seed)
    length = min(SEQUENCE, tokens)
    shape = (max(1, tokens // length), length)
    logp = -torch.rand(shape, generator=rng, device=device) * 3
    ends = torch.randint(length // 2, length + 1, (shape[0], 1), generator=rng, device=device)
    return Tokens(
        logp=logp,
        logp_old=logp + torch.randn(shape, generator=rng, device=device) * 0.15,
        advantages=torch.randn(shape, generator=rng, device=device),
        mask=torch.arange(length, device=device) < ends,
    )


def contenders(tokens: Tokens, compiled: bool = True) -> list[Contender]:
    """Each computes loss, gradient, clip fraction and approximate KL."""
    spec = loss_spec("ppo_clip", epsilon_low=rivals.EPSILON_LOW, epsilon_high=rivals.EPSILON_HIGH)
    check = policy_check(tokens)
    rows = [
        Contender(OURS, partial(_ours, tokens, spec), check, ours=True),
        Contender(EAGER, partial(_verl, tokens, rivals.verl_policy_loss), check),
    ]
    if compiled:
        function = torch.compile(rivals.verl_policy_loss, dynamic=False)
        rows.append(Contender(COMPILED, partial(_verl, tokens, function), check))
    return rows


def _ours(tokens: Tokens, spec: LossSpec) -> Outcome:
    leaf = tokens.leaf()
    out = policy_loss(spec, leaf, logp_old=tokens.logp_old, advantages=tokens.advantages, mask=tokens.mask)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    out.metrics["clip_frac"], out.metrics["approx_kl"]
    return Outcome(out.loss.detach(), grad)


def _verl(tokens: Tokens, function: Callable[..., Any]) -> Outcome:
    leaf = tokens.leaf()
    loss, clip_fraction, kl = function(leaf, tokens.logp_old, tokens.advantages, tokens.mask)
    (grad,) = torch.autograd.grad(loss, leaf)
    del clip_fraction, kl
    return Outcome(loss.detach(), grad)


def policy_check(tokens: Tokens) -> Callable[[Outcome], Verdict]:
    """Judges loss and gradient against the same function in fp64."""
    leaf = tokens.logp.double().requires_grad_()
    loss, _, _ = rivals.verl_policy_loss(leaf, tokens.logp_old.double(), tokens.advantages.double(), tokens.mask)
    (grad,) = torch.autograd.grad(loss, leaf)
    # a ratio that rounding moves across the clip bound changes its gradient: such tokens are not compared
    ratio = (tokens.logp.double() - tokens.logp_old.double()).exp()
    bounds = (1 - rivals.EPSILON_LOW, 1 + rivals.EPSILON_HIGH)
    clear = torch.stack([(ratio - b).abs() > 1e-5 for b in bounds]).all(0)
    return partial(_judge, loss.detach(), grad, clear)


def _judge(loss: Tensor, grad: Tensor, clear: Tensor, outcome: Outcome) -> Verdict:
    assert outcome.loss is not None
    assert outcome.grad is not None
    loss_error = (outcome.loss.double() - loss).abs() / loss.abs().clamp(min=1)
    grad_error = ((outcome.grad.double() - grad).abs() * clear).max() / grad.abs().max()
    errors = {"loss": loss_error.item(), "grad": grad_error.item()}
    return judged(errors, dict.fromkeys(errors, 1e-5))


# ------------------------------------------------------------------ the table


def jobs(options: Options) -> Iterator[Job]:
    """One table; a run takes milliseconds, so three times the rounds."""
    count = len(contenders(make_tokens(2, options.place), options.compiled))
    yield Job(ticks(count, 3 * options.rounds), partial(section, options))


def section(options: Options, tick: Tick) -> Section:
    """Measure all rows and judge them."""
    device, rounds = options.place, 3 * options.rounds
    tokens = make_tokens(options.loss_tokens, device)
    rows = measure(contenders(tokens, options.compiled), lambda: None, rounds, device, tick)
    by_name = {row.name: row for row in rows}
    ours = by_name[OURS]
    selected = 100 * tokens.mask.float().mean().item()
    return Section(
        title=f"P4: policy loss and gradient from log-probs with metrics, fp32, {tokens.logp.numel()} tokens",
        columns=columns("fusedpg", "loss / grad"),
        cells=[row_cells(row, ours) for row in rows],
        targets=[speed_target(f"against {name}", by_name.get(name), ours, bound) for name, bound in TARGETS],
        notes=[
            rounds_note(rows, rounds),
            f"shape {tuple(tokens.logp.shape)}, {selected:.0f} % of the places selected; "
            "verl computes its clip fraction and approximate KL, fusedpg its full metric vector",
            f"extra memory: {memory.HOW[device.type]}",
            *refusals(rows),
        ],
        record={
            "suite": "P4",
            "tokens": options.loss_tokens,
            "dtype": "fp32",
            "backend": dispatch.resolve("auto", device, torch.float32),
            "rows": [row.to_json() for row in rows],
        },
        broken=broken(rows),
    )
