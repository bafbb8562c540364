"""`python -m fusedpg doctor`: the command and its tables."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .console import make_console
from .doctor import Diagnosis, examine


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Time of the self-test; first cases run anyway.")] = 2.0,
) -> None:
    """Say what runs here and what does not, why, and how to fix it; compare what runs with fp64.

    Exits with 1 when a result differs. A backend that is missing is explained and is no failure.
    """
    diagnosis = examine(seconds)
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        show(make_console(), diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Facts, backends, and the self-test with its verdict."""
    facts = Table("", "", "", title="What is here", title_justify="left", show_header=False)
    for part, values in diagnosis.facts.items():
        for number, (name, value) in enumerate(values.items()):
            facts.add_row("" if number else part, name, "not installed" if value is None else _text(value))
        facts.add_section()
    console.print(facts)
    backends = Table("backend", "runs here", "why, and the fix", title="Backends", title_justify="left")
    for backend in diagnosis.backends:
        runs = "[green]yes[/green]" if backend.works else "[yellow]no[/yellow]"
        backends.add_row(backend.name, runs, escape(backend.says))
    console.print(backends)
    for line in diagnosis.checks.lines():
        console.print(line, style="bold red" if line.startswith("FAILED") else "", highlight=False, markup=False)
    verdict = "[green]all right[/green]" if diagnosis.ok else "[bold red]the self-test failed[/bold red]"
    console.print(f"{verdict} ({diagnosis.checks.seconds:.1f} s)", highlight=False)


def _text(value: object) -> str:
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))
