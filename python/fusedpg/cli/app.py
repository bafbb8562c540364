"""Commands and their options."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import bench, machine
from .doctor_command import doctor_command
from .train import Settings

app = typer.Typer(
    name="fusedpg",
    help="Fused policy-gradient losses for LLM reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor_command)


class Suite(str, Enum):
    """What `bench` measures."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    LOSS = "loss"
    DISTILL = "distill"
    TRL = "trl"
    ACCURACY = "accuracy"
    STATIC = "static"
    ALL = "all"


class Dtype(str, Enum):
    """Storage dtype of the logits; `all` is fp32 and bf16, and fp16 too for the accuracy."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    ALL = "all"


def progress_bar(console: Console) -> Progress:
    """One bar with a label; it disappears when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def make_console(stderr: bool = False) -> Console:
    """A console that is as wide as the tables need where no terminal sets the width."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=130)


def choose_device(name: str) -> str:
    """`auto` is cuda where there is a device."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


@app.command("demo")
def demo_command(
    objective: Annotated[str, typer.Option(help="grpo, dr_grpo, gspo, dapo, opd, or my_module:loss.")] = "grpo",
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and samples.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps; 0 takes the demo's own number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the reward plot.")] = Path("fusedpg-demo"),
    fast: Annotated[bool, typer.Option("--fast", help="A smaller task and fewer steps, for tests.")] = False,
) -> None:
    """Train a tiny language model through the native loss, offline, and compare it with the reference.

    Exits with 1 when the mean reward rises by less than 0.2 or the two backends disagree, and with 2 when there is no
    such objective.
    """
    from . import demo
    from .objectives import UnknownObjective

    base = demo.FAST if fast else Settings()
    settings = replace(base, objective=objective, seed=seed, device=choose_device(device), steps=steps or base.steps)
    large = demo.FAST_LARGE if fast else demo.LargeShape()
    try:
        problems = demo.run_demo(settings, large, out, make_console())
    except UnknownObjective as error:
        Console(stderr=True).print(f"--objective: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    for problem in problems:
        Console(stderr=True).print(f"FAILED: {problem}", style="bold red", highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@app.command("bench")
def bench_command(
    suite: Annotated[
        Suite,
        typer.Option(
            help="P1 (logits), P2 and P3 (hidden), P4 (loss alone), P5 (static), P7 (accuracy), distillation, TRL."
        ),
    ] = Suite.ALL,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of P1 and P2; distillation takes a quarter.")] = 1024,
    vocab: Annotated[
        int, typer.Option(min=2, help="Vocabulary; P2 takes 32768 too, and half the tokens for a larger one.")
    ] = 151_936,
    width: Annotated[int, typer.Option(min=1, help="Hidden size of P2.")] = 512,
    loss_tokens: Annotated[int, typer.Option(min=1, help="Tokens of P4.")] = 1 << 20,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed runs of each row; P4 takes three times, P2 a third as many.")
    ] = 9,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the logits.")] = Dtype.ALL,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 keeps torch's own number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure torch.compile too.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of terminal tables.")] = False,
) -> None:
    """Measure loss and gradient beside PyTorch eager, torch.compile, other libraries, a plain copy and bare products.

    Every result is checked against fp64 in the same run; a wrong one is not timed.
    """
    if threads:
        torch.set_num_threads(threads)
    one = None if dtype is Dtype.ALL else (dtype.value,)
    options = bench.Options(
        suites=bench.SUITES if suite is Suite.ALL else (suite.value,),
        tokens=tokens,
        vocab=vocab,
        width=width,
        loss_tokens=loss_tokens,
        rounds=rounds,
        dtypes=one or ("fp32", "bf16"),
        accuracy_dtypes=one or ("fp32", "bf16", "fp16"),
        device=choose_device(device),
        compiled=compiled,
    )
    info = machine.describe(torch.device(options.device))
    sections = _run_bench(options, info, markdown)
    if json_path is not None:
        record = {"machine": info, "options": vars(options), "sections": [s.to_json() for s in sections]}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(record, indent=1) + os.linesep)
        Console(stderr=True).print(f"wrote {json_path}", highlight=False)
    if any(section.broken for section in sections):
        raise typer.Exit(1)


def _run_bench(options: bench.Options, info: dict[str, Any], markdown: bool) -> list[bench.Section]:
    console, side = make_console(), make_console(stderr=True)
    if markdown:
        print(machine.one_line(info), end="\n\n")
    else:
        console.print(machine.one_line(info), highlight=False, soft_wrap=True)
    sections = []
    with progress_bar(side) as progress:
        task = progress.add_task("compiling and checking", total=bench.total_ticks(options))
        for section in bench.run(options, lambda what: progress.update(task, advance=1, description=f"{what:<28}")):
            sections.append(section)
            if markdown:
                print(section.markdown(), end="\n\n", flush=True)
            else:
                section.show(console)
    return sections


@app.command("losses")
def losses_command(
    name: Annotated[str | None, typer.Argument(help="One loss in full; without it, the table of all.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the documentation page instead.")] = False,
) -> None:
    """The catalogue: formulas, gradients, knobs with their defaults, sources, and the trainers that run each loss."""
    from ..losses import ALIASES, ENTRIES
    from . import catalogue

    if markdown:
        print(catalogue.markdown(), end="")
    elif name is None:
        catalogue.show_table(make_console())
    elif name in ENTRIES or name in ALIASES:
        catalogue.show_entry(make_console(), name)
    else:
        known = ", ".join((*ENTRIES, *ALIASES))
        Console(stderr=True).print(f"NAME: expected one of {known}; got {name!r}", highlight=False, soft_wrap=True)
        raise typer.Exit(2)


@app.command("parity")
def parity_command(
    trainer: Annotated[
        list[str] | None,
        typer.Argument(help="Oracles: verl, trl, polgrad, liger, transcribed; or adapters, trl_runs."),
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, cpu, triton or reference.")] = "auto",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a terminal table.")] = False,
) -> None:
    """Compare every preset with its trainer's own code (or its formula in fp64), in value and in gradient.

    By name only: `adapters` runs every trainer's drop-in over a step of two micro-batches and an empty one beside the
    trainer; `trl_runs` trains a tiny model with TRL, stock and fused, and compares losses and gradient norms.
    Exits with 1 when any row differs.
    """
    from ..certify import ORACLES, RUNS, rows_of
    from . import parity

    wanted = trainer or list(ORACLES)
    unknown = sorted(set(wanted) - {*ORACLES, *RUNS})
    if unknown:
        message = f"expected some of {', '.join(ORACLES + RUNS)}; got {unknown[0]!r}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        raise typer.Exit(2)
    rows = []
    with progress_bar(make_console(stderr=True)) as progress:
        task = progress.add_task("importing", total=None)
        for oracle in wanted:
            for row in rows_of(oracle, backend):
                rows.append(row)
                progress.update(task, advance=1, description=f"{row.trainer} {row.loss}"[:40])
    if markdown:
        print(parity.markdown(rows), end="")
    else:
        parity.show(make_console(), rows)
    if any(row.verdict == "differs" for row in rows):
        raise typer.Exit(1)
