"""What every command prints through: a console as wide as the tables, a progress bar; and the choice of a device."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """One bar with a label; it disappears when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def make_console(stderr: bool = False) -> Console:
    """A console that is as wide as the tables need where no terminal sets the width."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=140)


def choose_device(name: str) -> str:
    """`auto` is cuda where there is a device."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
