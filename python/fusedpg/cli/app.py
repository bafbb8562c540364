"""Commands and their options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .bench_command import bench_command, plot_command
from .console import choose_device, make_console, progress_bar
from .doctor_command import doctor_command
from .train import Settings

app = typer.Typer(
    name="fusedpg",
    help="Fused policy-gradient losses for LLM reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench_command)
app.command("plot")(plot_command)
app.command("doctor")(doctor_command)


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
