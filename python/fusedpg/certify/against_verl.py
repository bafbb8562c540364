"""Rows of the verl preset against verl's own functions, on the same stored values: verl's in fp64, ours in fp32."""

from __future__ import annotations

from collections.abc import Iterator

from ..presets._verl import ENTRY_OF
from . import verl_oracle
from .rows import Row, not_installed
from .verl_compare import UNBOUNDED, difference
from .verl_errors import error_rows
from .verl_jobs import jobs

FIX = "pip install --no-deps verl==0.9.1, then its omegaconf, tensordict<=0.10.0, codetiming and transformers<5.11"


def rows(backend: str = "auto") -> Iterator[Row]:
    """One row for each loss, reduction and option of the preset, then verl's known errors."""
    try:
        oracle = verl_oracle.load()
    except Exception as error:  # whatever an installation lacks, the table says it
        yield from not_installed("verl", "", ENTRY_OF, f"{type(error).__name__}: {error}; {FIX}")
        return
    for job in jobs():
        notes = [job.spec.note, "without ratios of exp(200), inf in fp32" if job.loss in UNBOUNDED else ""]
        found = difference(oracle, job, backend)
        note = "; ".join(filter(None, notes))
        yield found.row("verl", oracle.version, job.loss, job.spec.reduction, job.label, note)
    yield from error_rows(oracle, backend)
