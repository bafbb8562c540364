"""The demo's training: a little likelihood, then GRPO with sampled groups and several updates a rollout."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg.outputs import LossOutput

from .task import VOCABULARY, SortTask
from .tiny_lm import answer_logits, build_model, generate


@dataclass(frozen=True)
class Settings:
    """What a run is made of; the defaults are the demo."""

    seed: int = 0
    device: str = "cpu"
    steps: int = 100
    prompts: int = 32
    group: int = 16
    epochs: int = 2
    minibatches: int = 2
    warmup_reward: float = 0.2
    warmup_steps: int = 600
    warmup_batch: int = 128
    eval_prompts: int = 512
    lr: float = 1e-4
    lr_ramp: int = 10
    warmup_lr: float = 1e-3
    kl_coef: float = 0.01
    width: int = 64
    layers: int = 2
    longest: int = 6


@dataclass(frozen=True)
class Rollout:
    """Sampled groups with what stays fixed during the updates: log-probs of the sampler and of the frozen reference."""

    prompts: Tensor
    answers: Tensor
    mask: Tensor
    advantages: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    reward: float
    backend: str


@dataclass(frozen=True)
class StepReport:
    """One GRPO step: the rollout's reward, the metrics of its updates, and the speed of the whole step."""

    step: int
    reward: float
    clip_frac: float
    kl: float
    approx_kl: float
    ratio_max: float
    tokens_per_second: float


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """(r - mean)/(std + 1e-4) within each group of samples of one prompt; exactly 0 where all rewards are equal."""
    r = rewards.view(-1, group)
    centred = r - r.mean(1, keepdim=True)
    constant = (r == r[:, :1]).all(1, keepdim=True)
    return torch.where(constant, 0.0, centred / (r.std(1, keepdim=True) + 1e-4)).flatten()


class Trainer:
    """A tiny policy, its optimizer and the task; every loss goes through `policy_loss_from_logits`."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = torch.device(settings.device)
        self.task = SortTask(longest=settings.longest)
        positions = 2 * (settings.longest + 1)
        self.model = build_model(VOCABULARY, positions, settings.width, settings.layers).to(self.device)
        self.reference: Any = None
        self.last: Rollout | None = None
        self.prompt_rng = torch.Generator().manual_seed(settings.seed)
        self.sample_rng = torch.Generator(self.device).manual_seed(settings.seed)
        self.grpo = fusedpg.loss_spec("grpo", kl_coef=settings.kl_coef, reduction="token-mean")
        self.likelihood = fusedpg.loss_spec("reinforce", reduction="token-mean")
        self.backend = "none yet"

    def evaluate(self) -> float:
        """Mean reward of one sample for each of `eval_prompts` prompts that are the same every time."""
        rng = torch.Generator().manual_seed(10_000 + self.settings.seed)
        sampler = torch.Generator(self.device).manual_seed(20_000 + self.settings.seed)
        prompts, answers = (t.to(self.device) for t in self.task.sample(self.settings.eval_prompts, rng))
        completions = generate(self.model, prompts, self.task.answer_length, sampler)
        return self.task.reward(completions, answers).mean().item()

    def warm_up(self) -> Iterator[tuple[int, float]]:
        """Likelihood steps until the sampled reward passes `warmup_reward`; yields (step, reward) at each check.

        The likelihood of the right answer is the REINFORCE loss with advantage 1.
        """
        s = self.settings
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=s.warmup_lr, weight_decay=0.0)
        for step in range(1, s.warmup_steps + 1):
            prompts, answers = (t.to(self.device) for t in self.task.sample(s.warmup_batch, self.prompt_rng))
            logits = answer_logits(self.model, prompts, answers)
            mask = self.task.mask(answers)
            out = fusedpg.policy_loss_from_logits(self.likelihood, logits, answers, advantages=1.0, mask=mask)
            self._update(optimizer, out)
            if step % 10 == 0:
                reward = self.evaluate()
                yield step, reward
                if reward >= s.warmup_reward:
                    break
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def train(self) -> Iterator[StepReport]:
        """GRPO steps: one rollout, `epochs * minibatches` updates, one report."""
        s = self.settings
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=s.lr, weight_decay=0.0)
        for step in range(1, s.steps + 1):
            start = time.perf_counter()
            for group in optimizer.param_groups:  # Adam's first steps are otherwise as long as all others
                group["lr"] = s.lr * min(1.0, step / s.lr_ramp)
            rollout = self.last = self.rollout()
            metrics = [out.metrics for out in self._updates(rollout, optimizer)]
            values = metrics[0].merge(*metrics[1:]).to_dict()
            elapsed = time.perf_counter() - start
            yield StepReport(
                step=step,
                reward=rollout.reward,
                clip_frac=values["clip_frac"],
                kl=values["kl"],
                approx_kl=values["approx_kl_k3"],
                ratio_max=values["ratio_max"],
                tokens_per_second=rollout.mask.sum().item() / elapsed,
            )

    @torch.no_grad()
    def rollout(self) -> Rollout:
        """Sample `group` completions a prompt, reward them, and fix what the updates compare with."""
        s = self.settings
        drawn = self.task.sample(s.prompts, self.prompt_rng)
        prompts, answers = (t.to(self.device).repeat_interleave(s.group, 0) for t in drawn)
        completions = generate(self.model, prompts, self.task.answer_length, self.sample_rng)
        rewards = self.task.reward(completions, answers)
        mask = self.task.mask(completions)
        old = fusedpg.token_logprobs(answer_logits(self.model, prompts, completions), completions, mask=mask)
        ref = fusedpg.token_logprobs(answer_logits(self.reference, prompts, completions), completions, mask=mask)
        advantages = group_advantages(rewards, s.group)
        reward = rewards.mean().item()
        return Rollout(prompts, completions, mask, advantages, old.logp, ref.logp, reward, old.backend)

    def loss(self, rollout: Rollout, rows: Tensor, **options: Any) -> LossOutput:
        """The GRPO loss of some sequences of a rollout under the current policy."""
        return self.loss_of(rollout, rows, self.loss_logits(rollout, rows), **options)

    def loss_logits(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """The current policy's logits for some sequences of a rollout."""
        return answer_logits(self.model, rollout.prompts[rows], rollout.answers[rows])

    def loss_of(self, rollout: Rollout, rows: Tensor, logits: Tensor, **options: Any) -> LossOutput:
        """The same from logits that are already there."""
        return fusedpg.policy_loss_from_logits(
            self.grpo,
            logits,
            rollout.answers[rows],
            logp_old=rollout.logp_old[rows],
            logp_ref=rollout.logp_ref[rows],
            sequence_advantages=rollout.advantages[rows],
            mask=rollout.mask[rows],
            **options,
        )

    def _updates(self, rollout: Rollout, optimizer: torch.optim.Optimizer) -> Iterator[LossOutput]:
        count = rollout.answers.shape[0]
        for _ in range(self.settings.epochs):
            order = torch.randperm(count, generator=self.prompt_rng).to(self.device)
            for rows in order.chunk(self.settings.minibatches):
                out = self.loss(rollout, rows)
                self._update(optimizer, out)
                yield out

    def _update(self, optimizer: torch.optim.Optimizer, out: LossOutput) -> None:
        self.backend = out.backend
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
