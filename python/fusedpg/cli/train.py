"""The demo's training loop: a little likelihood, then reinforcement learning through the two library contracts.

A collected batch is annotated while its groups are whole, split into chunks, its behaviour log-probs are frozen, and it
serves several updates of several chunks each. Which loss runs is nowhere to be seen: the config selects it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

import fusedpg
from fusedpg import PolicyBatch, ReferenceScorer, StepAccumulator, StepResult, dispatch
from fusedpg.annotators import annotate_advantages

from .objectives import choose
from .task import VOCABULARY, SortTask
from .tiny_lm import Policy, build_policy


@dataclass(frozen=True)
class Settings:
    """What a run is made of; the defaults are the demo."""

    objective: str = "grpo"
    seed: int = 0
    device: str = "cpu"
    steps: int = 100
    prompts: int = 32
    group: int = 16
    #: passes over a collected batch, and updates of one pass
    epochs: int = 2
    minibatches: int = 2
    #: chunks whose gradients one update accumulates
    chunks: int = 2
    warmup_reward: float = 0.2
    warmup_steps: int = 600
    warmup_batch: int = 128
    teacher_reward: float = 0.9
    teacher_seconds: float = 60.0
    eval_prompts: int = 512
    lr: float = 1e-4
    lr_ramp: int = 10
    warmup_lr: float = 1e-3
    width: int = 64
    layers: int = 2
    longest: int = 6

    @property
    def samples(self) -> int:
        """Completions of one collected batch."""
        return self.prompts * self.group

    def options(self) -> tuple[str, ...]:
        """What the config must know of the run."""
        return (
            f"rl.epochs={self.epochs}",
            f"rl.batch_per_replica={self.samples}",
            f"rl.mini_batch_per_replica={self.samples // self.minibatches}",
            f"rollout.max_tokens={self.longest + 1}",
        )


@dataclass(frozen=True)
class Chunk(PolicyBatch):
    """A prepared batch, with the counts of the optimizer step that it is part of."""

    step_tokens: Tensor | None = None
    step_sequences: Tensor | None = None

    def rows(self, rows: Tensor, name: int) -> Chunk:
        """Some of its sequences, under a name of their own."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[rows] for k, v in values.items() if isinstance(v, Tensor)}, batch_id=name)


@dataclass(frozen=True)
class Rollout:
    """A collected batch in chunks, the mean reward, and the k3 KL of the sampling policy from the one at the start."""

    chunks: list[Chunk]
    reward: float
    kl: float
    tokens: int


@dataclass(frozen=True)
class StepReport:
    """One step: its rollout, the public metrics of its updates, and the speed of the whole."""

    step: int
    reward: float
    kl: float
    tokens_per_second: float
    metrics: dict[str, float]


def merged(name: str, values: list[float]) -> float:
    """A public metric over several updates: extrema stay extrema, the rest are means."""
    if name.endswith(("_max", "_min")):
        return max(values) if name.endswith("_max") else min(values)
    return sum(values) / len(values)


class Trainer:
    """A tiny policy and its task. Raises `UnknownObjective` when the settings name none."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.device = torch.device(settings.device)
        self.choice = choose(settings.objective, settings.options())
        self.objective = self.choice.objective()
        self.task = SortTask(longest=settings.longest)
        positions = 2 * (settings.longest + 1)
        self.policy = build_policy(VOCABULARY, positions, settings.width, settings.layers).to(self.device)
        temperature = self.choice.config.rl.temperature
        self.reference, self.teacher = ReferenceScorer(temperature), ReferenceScorer(temperature)
        self.prompt_rng = torch.Generator().manual_seed(settings.seed)
        self.sample_rng = torch.Generator(self.device).manual_seed(settings.seed)
        self.backend = dispatch.resolve("auto", self.device, torch.float32)
        self.last: Rollout | None = None

    # -------------------------------------------------------------- reinforcement learning

    def train(self) -> Iterator[StepReport]:
        """One rollout, its updates, one report; `steps` times."""
        s = self.settings
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=s.lr, weight_decay=0.0)
        accumulator = StepAccumulator(self.objective, self.policy)
        for step in range(1, s.steps + 1):
            start = time.perf_counter()
            for group in optimizer.param_groups:  # Adam's first steps are otherwise as long as all others
                group["lr"] = s.lr * min(1.0, step / s.lr_ramp)
            rollout = self.last = self.collect()
            self.objective.old_logp_cache.freeze(self.policy, rollout.chunks)
            results = [self._update(accumulator, optimizer, chunks) for chunks in self._updates(rollout.chunks)]
            elapsed = time.perf_counter() - start
            metrics = {name: merged(name, [float(r.metrics[name]) for r in results]) for name in results[0].metrics}
            yield StepReport(step, rollout.reward, rollout.kl, rollout.tokens / elapsed, metrics)

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Sample `group` completions a prompt, reward and annotate them, then split the batch, groups and all."""
        s = self.settings
        drawn = self.task.sample(s.prompts, self.prompt_rng)
        prompts, answers = (t.to(self.device).repeat_interleave(s.group, 0) for t in drawn)
        completions, logp_rollout = self.policy.generate(prompts, self.task.answer_length, self.sample_rng)
        rewards = self.task.reward(completions, answers)
        whole = Chunk(
            input_ids=torch.cat([prompts, completions], 1),
            targets=completions,
            mask=self.task.mask(completions),
            sequence_advantages=annotate_advantages(self.choice.config.rl, rewards, s.group),
            logp_rollout=logp_rollout,
        )
        logp_ref = self.reference(whole)
        whole = replace(whole, logp_ref=logp_ref, teacher_logp=self.teacher(whole) if self.choice.distils else None)
        away = (logp_ref - logp_rollout)[whole.mask]
        parts = torch.randperm(s.samples, generator=self.prompt_rng).to(self.device).chunk(s.minibatches * s.chunks)
        return Rollout(
            [whole.rows(rows, name) for name, rows in enumerate(parts)],
            reward=rewards.mean().item(),
            kl=(away.expm1() - away).mean().item(),
            tokens=away.numel(),
        )

    def _updates(self, chunks: list[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks of one update after the other: every chunk once an epoch, in a new order."""
        for _ in range(self.settings.epochs):
            order = torch.randperm(len(chunks), generator=self.prompt_rng)
            for part in order.split(self.settings.chunks):
                yield [chunks[i] for i in part.tolist()]

    @staticmethod
    def _update(accumulator: StepAccumulator, optimizer: torch.optim.Optimizer, chunks: list[Chunk]) -> StepResult:
        """One optimizer step over several chunks."""
        tokens = torch.stack([chunk.mask.sum() for chunk in chunks]).sum()
        sequences = torch.stack([chunk.mask.any(1).sum() for chunk in chunks]).sum()
        optimizer.zero_grad(set_to_none=True)
        result = accumulator.step(replace(chunk, step_tokens=tokens, step_sequences=sequences) for chunk in chunks)
        torch.nn.utils.clip_grad_norm_(accumulator.parameters, 1.0)
        optimizer.step()
        return result

    # -------------------------------------------------------------- likelihood

    def warm_up(self) -> Iterator[tuple[int, float]]:
        """Likelihood steps until the sampled reward passes `warmup_reward`; yields (step, reward) at each check."""
        s = self.settings
        yield from self._imitate(self.policy, s.warmup_reward, s.warmup_steps)
        self.reference.bind(copy.deepcopy(self.policy).requires_grad_(False))

    def teach(self) -> Iterator[tuple[int, float]]:
        """A teacher: a copy of the policy after more likelihood, until `teacher_reward` or `teacher_seconds`."""
        s = self.settings
        teacher = copy.deepcopy(self.policy)
        end = time.perf_counter() + s.teacher_seconds
        for step, reward in self._imitate(teacher, s.teacher_reward, 100_000):
            yield step, reward
            if time.perf_counter() > end:
                break
        self.teacher.bind(teacher.requires_grad_(False))

    def _imitate(self, policy: Policy, enough: float, steps: int) -> Iterator[tuple[int, float]]:
        """Steps on right answers, whose likelihood is the REINFORCE loss with advantage 1."""
        s = self.settings
        objective = fusedpg.build_policy_objective(
            fusedpg.loss_spec("reinforce", reduction="token-mean"), prefix="likelihood/"
        )
        optimizer = torch.optim.AdamW(policy.parameters(), lr=s.warmup_lr, weight_decay=0.0)
        accumulator = StepAccumulator(objective, policy)
        for step in range(1, steps + 1):
            prompts, answers = (t.to(self.device) for t in self.task.sample(s.warmup_batch, self.prompt_rng))
            batch = Chunk(
                input_ids=torch.cat([prompts, answers], 1),
                targets=answers,
                mask=self.task.mask(answers),
                sequence_advantages=torch.ones(s.warmup_batch, device=self.device),
            )
            self._update(accumulator, optimizer, [batch])
            if step % 10 == 0:
                reward = self.evaluate(policy)
                yield step, reward
                if reward >= enough:
                    break

    def evaluate(self, policy: Policy | None = None) -> float:
        """Mean reward of one sample for each of `eval_prompts` prompts that are the same every time."""
        rng = torch.Generator().manual_seed(10_000 + self.settings.seed)
        sampler = torch.Generator(self.device).manual_seed(20_000 + self.settings.seed)
        prompts, answers = (t.to(self.device) for t in self.task.sample(self.settings.eval_prompts, rng))
        completions, _ = (policy or self.policy).generate(prompts, self.task.answer_length, sampler)
        return self.task.reward(completions, answers).mean().item()
