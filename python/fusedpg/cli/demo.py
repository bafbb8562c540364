"""`python -m fusedpg demo`: watch a small model learn through the native loss, then see both backends agree."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import machine, memory
from .compare import GRAD_LIMIT, LOSS_LIMIT, Comparison, compare_large, compare_own_batch
from .report import megabytes
from .task import text
from .train import Settings, StepReport, Trainer, merged

REQUIRED_RISE = 0.2


@dataclass(frozen=True)
class LargeShape:
    """Size of the last comparison."""

    sequences: int = 64
    length: int = 8
    vocab: int = 151_936


FAST = Settings(steps=45, prompts=16, longest=4, warmup_batch=64, eval_prompts=256, lr=3e-4)
FAST_LARGE = LargeShape(sequences=8, vocab=20_001)

#: column -> public metric; a column is shown when the objective reports it
COLUMNS = {
    "clip fraction": "train/clip_frac",
    "KL to sampler": "train/approx_kl_k3",
    "max ratio": "train/ratio_max",
    "KL to teacher": "train/teacher_kl",
}


def run_demo(settings: Settings, large: LargeShape, out: Path, console: Console) -> list[str]:
    """Train, show, plot and compare; returns what went wrong, nothing when all is well.

    Raises:
        UnknownObjective: `settings.objective` names none.
    """
    start = time.perf_counter()
    trainer = Trainer(settings)
    parameters = sum(p.numel() for p in trainer.policy.parameters())
    console.print(
        f"A randomly initialised Qwen3 ({parameters:,} parameters, {settings.device}) learns to sort letters: "
        "'dbca>' -> 'abcd.'",
        highlight=False,
    )
    console.print(machine.one_line(machine.describe(trainer.device)), highlight=False, style="dim", soft_wrap=True)
    with one_thread():
        warm, _ = _imitate("likelihood", trainer.warm_up(), console)
        before = trainer.evaluate()
        console.print(
            f"likelihood: {warm} steps (REINFORCE loss with advantage 1); held-out reward {before:.3f}; "
            f"loss backend: [bold]{trainer.backend}[/bold]",
            highlight=False,
        )
        if trainer.choice.distils:
            steps, reward = _imitate("teacher", trainer.teach(), console)
            console.print(f"teacher: {steps} further likelihood steps; held-out reward {reward:.3f}", highlight=False)
        _show_config(trainer, console)
        reports = _train(trainer, console)
        after = trainer.evaluate()
    _step_table(trainer, reports, console)
    console.print(
        f"held-out mean reward: {before:.3f} -> [bold]{after:.3f}[/bold] (rise {after - before:+.3f})", highlight=False
    )
    _samples(trainer, console)
    plot = _plot(trainer.choice.name, reports, before, after, out)
    console.print(f"reward plot: [bold]{plot}[/bold]", soft_wrap=True)
    comparisons = [
        compare_own_batch(trainer),
        compare_large(trainer.choice, trainer.backend, trainer.device, (large.sequences, large.length, large.vocab)),
    ]
    _comparison_table(comparisons, trainer.device, console)
    console.print(f"done in {time.perf_counter() - start:.0f} s")
    return _problems(before, after, comparisons)


@contextmanager
def one_thread() -> Iterator[None]:
    """Train on one CPU thread: for a model this small, waking the others costs more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _problems(before: float, after: float, comparisons: list[Comparison]) -> list[str]:
    found = []
    if after - before < REQUIRED_RISE:
        found.append(f"the mean reward rose by {after - before:.3f}; expected at least {REQUIRED_RISE}")
    for c in comparisons:
        if not c.agree:
            found.append(
                f"{c.backend} and reference disagree on {c.what}: loss by {c.loss_difference:.1e} (at most "
                f"{LOSS_LIMIT}), "
                f"gradient by {c.grad_difference:.1e} of its largest entry (at most {GRAD_LIMIT})"
            )
    return found


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _imitate(what: str, checks: Iterable[tuple[int, float]], console: Console) -> tuple[int, float]:
    """Run likelihood steps behind a bar; the last step and the reward there."""
    step, reward = 0, 0.0
    with _progress(console) as progress:
        task = progress.add_task(what, total=None)
        for step, reward in checks:
            progress.update(task, completed=step, description=f"{what}, reward {reward:.2f}")
    return step, reward


def _show_config(trainer: Trainer, console: Console) -> None:
    """The objective and every knob that is not its section's default: what the run's provenance says."""
    rl = trainer.choice.config.rl
    knobs = ", ".join(f"{key}={getattr(rl, key)}" for key in rl.non_default())
    reduction = trainer.objective.reduction
    console.print(
        f"objective: [bold]{trainer.choice.name}[/bold] (Reduction.{reduction.name}; {knobs})", highlight=False
    )


def _train(trainer: Trainer, console: Console) -> list[StepReport]:
    reports = []
    with _progress(console) as progress:
        task = progress.add_task(trainer.choice.name, total=trainer.settings.steps)
        for report in trainer.train():
            reports.append(report)
            progress.update(task, advance=1, description=f"{trainer.choice.name}, reward {report.reward:.2f}")
    return reports


def _columns(trainer: Trainer, reports: list[StepReport]) -> dict[str, str]:
    """Title -> public metric of what this objective reports, a custom body's own metrics last."""
    adapter = trainer.objective.metric_adapter
    assert adapter is not None
    mapped = {f"train/{leaf}" for leaf in adapter.names.values()}
    reported = reports[0].metrics
    shown = {title: name for title, name in COLUMNS.items() if name in reported}
    return shown | {name.removeprefix("train/"): name for name in reported if name not in mapped}


def _step_table(trainer: Trainer, reports: list[StepReport], console: Console) -> None:
    columns = _columns(trainer, reports)
    title = f"{trainer.choice.name}, means over the steps since the line before"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("step", "reward", "KL to start", *columns, "tokens/s"):
        table.add_column(column, justify="right")
    span = max(1, len(reports) // 10)
    for end in range(span, len(reports) + 1, span):
        part = reports[end - span : end]
        reward, kl, speed = (
            sum(getattr(r, name) for r in part) / span for name in ("reward", "kl", "tokens_per_second")
        )
        values = ((name, merged(name, [r.metrics[name] for r in part])) for name in columns.values())
        metrics = (f"{value:.{2 if name.endswith('_max') else 4}f}" for name, value in values)
        table.add_row(str(part[-1].step), f"{reward:.3f}", f"{kl:.4f}", *metrics, f"{speed:,.0f}")
    console.print(table)
    named = ", ".join(f"{title} = {name}" for title, name in columns.items())
    console.print(f"public names: {named}", style="dim", highlight=False, soft_wrap=True)


def _samples(trainer: Trainer, console: Console) -> None:
    rng = torch.Generator().manual_seed(1)
    prompts, answers = (t.to(trainer.device) for t in trainer.task.sample(4, rng))
    sampler = torch.Generator(trainer.device).manual_seed(1)
    completions, _ = trainer.policy.generate(prompts, trainer.task.answer_length, sampler)
    rewards = trainer.task.reward(completions, answers)
    shown = [
        f"{text(prompt).strip()}{text(completion).partition('.')[0]}. ({'right' if reward else 'wrong'})"
        for prompt, completion, reward in zip(prompts, completions, rewards, strict=True)
    ]
    console.print("samples: " + "   ".join(shown), highlight=False)


def _plot(name: str, reports: list[StepReport], before: float, after: float, out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1), layout="constrained")
    steps = [r.step for r in reports]
    top.plot(steps, [r.reward for r in reports], label="rollouts", linewidth=1)
    top.plot([0, steps[-1]], [before, after], "o", label="held-out prompts, before and after")
    top.set(ylabel="mean reward", ylim=(0, 1), title=f"{name} through fusedpg.StepAccumulator")
    top.legend(loc="lower right")
    for title in ("clip fraction", "KL to sampler"):
        if COLUMNS[title] in reports[0].metrics:
            bottom.plot(steps, [r.metrics[COLUMNS[title]] for r in reports], label=title, linewidth=1)
    bottom.set(xlabel="step")
    bottom.legend(loc="upper right")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.resolve()


def _comparison_table(comparisons: list[Comparison], device: torch.device, console: Console) -> None:
    table = Table(title="The same batch through both backends", title_justify="left", title_style="bold")
    table.add_column("", overflow="fold")
    for c in comparisons:
        table.add_column(c.what, justify="right", overflow="fold")
    native = comparisons[0].backend
    rows = {
        "backends": [f"{c.backend} / reference" for c in comparisons],
        "loss difference": [f"{c.loss_difference:.1e}" for c in comparisons],
        "gradient difference (of its largest entry)": [f"{c.grad_difference:.1e}" for c in comparisons],
        f"time, {native}": [f"{c.native_seconds * 1e3:.2f} ms" for c in comparisons],
        "time, reference": [f"{c.reference_seconds * 1e3:.2f} ms" for c in comparisons],
        f"peak memory, {native}": [f"{megabytes(c.native_bytes)} MB" for c in comparisons],
        "peak memory, reference": [f"{megabytes(c.reference_bytes)} MB" for c in comparisons],
        "memory, reference / native": [
            "-" if c.memory_saved is None else f"{c.memory_saved:.1f}x" for c in comparisons
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    console.print(
        f"loss and gradient; best time of 5; memory: {memory.HOW[device.type]}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
