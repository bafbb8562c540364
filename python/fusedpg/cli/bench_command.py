"""`python -m fusedpg bench` and `plot`: measure, print, keep, draw, compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from . import bench, console, machine, models, regressions, results, summary
from .bench_options import Options
from .results import Record

Read = TypeVar("Read")
ALL = "all"


class Dtype(str, Enum):
    """Storage dtype of the logits; `all` is fp32 and bf16, and fp16 too for the accuracy."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    ALL = "all"


SUITES_HELP = "; ".join([*(f"{name}: {suite.about}" for name, suite in bench.SUITES.items()), "all; may be repeated"])


def bench_command(
    suite: Annotated[list[str], typer.Option(help=f"What to measure. {SUITES_HELP}.")] = [ALL],  # noqa: B006
    model: Annotated[
        str | None,
        typer.Option(help="Hidden size and vocabulary of a real model (qwen3-8b, ...); tokens are cut on a CPU."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of P1; P2 takes half, distillation and scoring an eighth.")
    ] = 1024,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary; P2 takes 32768 too.")] = 151_936,
    width: Annotated[int, typer.Option(min=1, help="Hidden size of P2, scoring and the sweeps.")] = 512,
    loss_tokens: Annotated[int, typer.Option(min=1, help="Tokens of P4.")] = 1 << 20,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed runs of each row, fewer for slow ones; P4 takes three times, P2 half.")
    ] = 9,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the logits.")] = Dtype.ALL,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 keeps torch's own number.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure torch.compile too.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", help="Take this report of an earlier run instead of measuring.")
    ] = None,
    plot_folder: Annotated[Path | None, typer.Option("--plots", help="Draw PNGs into this folder.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Compare with this older report: exits with 3 where a row regressed.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=1.0, help="Factor, relative to the copy of the same table, that is a regression.")
    ] = regressions.THRESHOLD,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of terminal tables.")] = False,
) -> None:
    """Measure loss and gradient beside PyTorch eager, torch.compile, other libraries, a plain copy and bare products.

    Every result is checked against fp64 in the same run; a wrong one is not timed. The end says of P1 to P7 which are
    met, with the figures. Exits with 1 where a result of ours is wrong, with 2 where an option is, with 3 where
    `--compare` finds a regression.
    """
    if threads:
        torch.set_num_threads(threads)
    one = None if dtype is Dtype.ALL else (dtype.value,)
    options = _for_model(
        Options(
            suites=_suites(suite),
            tokens=tokens,
            vocab=vocab,
            width=width,
            loss_tokens=loss_tokens,
            rounds=rounds,
            dtypes=one or ("fp32", "bf16"),
            accuracy_dtypes=one or ("fp32", "bf16", "fp16"),
            device=console.choose_device(device),
            compiled=compiled,
        ),
        model,
    )
    older = None if compare is None else _refusing("--compare", lambda: results.read(compare))
    run = _measured(options, markdown) if stored is None else _stored(stored, markdown)
    comparison = None if older is None else regressions.compare(older, run, threshold)
    _conclude(run, comparison, markdown)
    if json_path is not None and stored is None:
        results.write(json_path, run)
        _say(f"wrote {json_path}")
    if plot_folder is not None:
        _say(*_drawn(run, plot_folder))
    if any(section.get("broken") for section in run["sections"]):
        raise typer.Exit(1)
    if comparison is not None and comparison.failed:
        raise typer.Exit(3)


def plot_command(
    report: Annotated[Path, typer.Argument(help="What `bench --json` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNGs.")] = Path("fusedpg-plots"),
) -> None:
    """Draw a stored report: time and memory against N, percent of the ceiling, accuracy against speed."""
    drawn = _drawn(_refusing("REPORT", lambda: results.read(report)), out)
    _say(*drawn)
    if not drawn:
        _say(f"{report} has no table that a plot is made of: run the suites scaling, logits, hidden or scoring")
        raise typer.Exit(1)


# ------------------------------------------------------------------ options


def _refusing(option: str, make: Callable[[], Read]) -> Read:
    """A value, or one line and exit status 2."""
    try:
        return make()
    except ValueError as error:
        _say(f"{option}: {error}")
        raise typer.Exit(2) from None


def _suites(names: list[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in (*bench.SUITES, ALL)]
    if unknown:
        _say(f"--suite: expected some of {', '.join(bench.SUITES)} or {ALL}; got {unknown[0]!r}")
        raise typer.Exit(2)
    return () if ALL in names else tuple(names)


def _for_model(options: Options, name: str | None) -> Options:
    """The model's vocabulary and hidden size; on a CPU no more tokens through its head than it can afford."""
    if name is None:
        return options
    head = _refusing("--model", lambda: models.find(name))
    cut = models.cpu_tokens(head, options.tokens) if options.device == "cpu" else options.tokens
    return options.with_head(name.lower(), head.vocab, head.width, cut)


def _say(*lines: str) -> None:
    for line in lines:
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


# ------------------------------------------------------------------ a run


def _measured(options: Options, markdown: bool) -> Record:
    """Measure, and print each table as soon as it is there."""
    out, side = console.make_console(), console.make_console(stderr=True)
    info = machine.describe(options.place)
    _print_machine(out, info, markdown)
    sections = []
    start = time.perf_counter()
    with console.progress_bar(side) as progress:
        task = progress.add_task("compiling and checking", total=bench.total_ticks(options))
        for section in bench.run(options, lambda what: progress.update(task, advance=1, description=f"{what:<28}")):
            sections.append(section)
            if markdown:
                print(section.markdown(), end="\n\n", flush=True)
            else:
                section.show(out)
    _say(f"measured in {time.perf_counter() - start:.0f} s")
    return results.record(info, options, sections)


def _stored(path: Path, markdown: bool) -> Record:
    run = _refusing("--from", lambda: results.read(path))
    _print_machine(console.make_console(), run["machine"], markdown)
    return run


def _drawn(run: Record, folder: Path) -> list[str]:
    """A line for each plot; matplotlib is loaded by whoever asks for one."""
    from . import plots

    return [f"wrote {path}" for path in plots.draw(run, folder)]


def _print_machine(out: Console, info: dict[str, Any], markdown: bool) -> None:
    if markdown:
        print(machine.one_line(info), end="\n\n")
    else:
        out.print(machine.one_line(info), highlight=False, soft_wrap=True)


def _conclude(run: Record, comparison: regressions.Comparison | None, markdown: bool) -> None:
    """The promises, and what changed since the older run."""
    sections = run["sections"]
    if markdown:
        print(summary.markdown(sections), end="\n\n")
        if comparison is not None:
            print(regressions.markdown(comparison), end="\n\n")
        return
    out = console.make_console()
    summary.show(out, sections)
    if comparison is not None:
        regressions.show(out, comparison)
