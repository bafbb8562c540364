"""One micro-batch of a GRPO run in TRL, forward and backward of the whole model: stock against `FusedGRPOTrainer`."""

from __future__ import annotations

import copy
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedpg.dispatch import resolve

from . import memory
from .bench_options import Options
from .report import Job, Section, broken, columns, refusals, rounds_note, row_cells, speed_target
from .timing import Contender, Outcome, Row, Tick, Verdict, judged, measure, ticks

OURS, STOCK = "FusedGRPOTrainer", "GRPOTrainer"
ROWS, COMPLETION, PROMPT = 8, 64, 8
#: what stock must take of ours, in time and in memory
TARGET = 1.0


def refusal() -> str | None:
    """Why the suite cannot run; None when it can."""
    try:
        version("trl")
    except ImportError:
        return "TRL is not installed: pip install 'fusedpg[trl]'"
    return None


def jobs(options: Options) -> list[Job]:
    """One table, or the reason why there is none."""
    reason = refusal()
    if reason is not None:
        absent = Section("TRL: one micro-batch", ["what"], [], notes=[reason], record={"suite": "trl", "rows": []})
        return [Job(0, lambda tick: absent)]
    return [Job(ticks(2, options.rounds), partial(section, options))]


@dataclass
class Run:
    """A trainer between two optimizer steps, and the micro-batch of its next."""

    trainer: Any
    batch: dict[str, Tensor]

    def step(self) -> Outcome:
        """Loss and gradients of every parameter; the head's is what is checked."""
        model = self.trainer.model
        model.zero_grad(set_to_none=True)
        loss = self.trainer._compute_loss(model, self.batch)
        loss.backward()
        return Outcome(loss.detach(), model.lm_head.weight.grad)


def make_run(trainer_class: Any, folder: Path, vocab: int) -> Run:
    """A tiny Qwen3 with a head of `vocab` rows; half of the completions' tokens are padding on average."""
    from ..certify import tiny_trl

    trainer = tiny_trl.grpo_trainer(
        folder,
        trainer_class,
        model=tiny_trl.make_model(folder, vocab=vocab),
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        gradient_accumulation_steps=1,
        max_completion_length=COMPLETION,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return Run(trainer, make_batch(vocab))


def make_batch(vocab: int) -> dict[str, Tensor]:
    """What TRL hands to its loss."""
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(COMPLETION // 4, COMPLETION, (ROWS, 1), generator=g)
    mask = (torch.arange(COMPLETION) < ends).long()
    return {
        "prompt_ids": torch.randint(3, vocab, (ROWS, PROMPT), generator=g),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, vocab, (ROWS, COMPLETION), generator=g),
        "completion_mask": mask,
        "advantages": torch.randn(ROWS, generator=g),
        "num_items_in_batch": mask.sum(),
    }


def _truth(run: Run) -> tuple[Tensor, Tensor]:
    """(loss, d head) of TRL's own loss on the same parameters in fp64."""
    exact = Run(copy.copy(run.trainer), run.batch)
    exact.trainer.model = copy.deepcopy(run.trainer.model).double()
    outcome = exact.step()
    assert outcome.loss is not None
    assert outcome.grad is not None
    return outcome.loss, outcome.grad


def _judge(loss: Tensor, grad: Tensor, outcome: Outcome) -> Verdict:
    assert outcome.loss is not None
    assert outcome.grad is not None
    errors = {
        "loss": (outcome.loss.double() - loss).abs().item(),
        "d head": ((outcome.grad.double() - grad).abs().max() / grad.abs().max()).item(),
    }
    return judged(errors, dict.fromkeys(errors, 1e-4))


def make_runs(folder: Path, vocab: int) -> dict[str, Run]:
    """Both trainers, silently."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        from trl import GRPOTrainer

        from ..integrations.trl import FusedGRPOTrainer

        kinds = {OURS: FusedGRPOTrainer, STOCK: GRPOTrainer}
        return {name: make_run(kind, folder, vocab) for name, kind in kinds.items()}


def contenders(runs: dict[str, Run]) -> list[Contender]:
    """The rows of the table."""
    check = partial(_judge, *_truth(runs[STOCK]))
    return [Contender(name, run.step, check, ours=name == OURS) for name, run in runs.items()]


def section(options: Options, tick: Tick) -> Section:
    """Measure both trainers' step."""
    vocab, rounds = options.vocab, options.rounds
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = make_runs(Path(folder), vocab)
        rows = measure(contenders(runs), lambda: None, rounds, torch.device("cpu"), tick)
    return _table({row.name: row for row in rows}, runs[OURS], vocab, rounds)


def _table(rows: dict[str, Row], run: Run, vocab: int, rounds: int) -> Section:
    ours, stock = rows[OURS], rows[STOCK]
    model = run.trainer.model
    tokens = int(run.batch["completion_mask"].sum())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return Section(
        title=f"TRL {version('trl')}: loss and backward of a micro-batch, {ROWS} x {COMPLETION} completion tokens "
        f"({tokens} not padding), V = {vocab}, D = {model.config.hidden_size}",
        columns=columns("fusedpg", "loss / d head"),
        cells=[row_cells(row, ours) for row in rows.values()],
        targets=[speed_target(f"against stock {STOCK}", stock, ours, TARGET)],
        notes=[
            rounds_note(list(rows.values()), rounds),
            f"the gradients of all parameters are {gradients / 1e6:.0f} MB of the extra memory; {memory.HOW['cpu']}",
            *refusals(list(rows.values())),
        ],
        record={
            "suite": "trl",
            "vocab": vocab,
            "backend": resolve("auto", model.device, torch.float32),
            "rows": [row.to_json() for row in rows.values()],
        },
        broken=broken(list(rows.values())),
    )
