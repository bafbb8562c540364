"""Which build of the core runs, and what is said when none can."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

from fusedpg import cpu


def test_best_build_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEDPG_CPU_ISA", raising=False)
    assert cpu.isa() == cpu.available_isas()[0]
    assert "generic" in cpu.available_isas()


def test_unknown_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDPG_CPU_ISA", "v9")
    with pytest.raises(ValueError, match=r"FUSEDPG_CPU_ISA: expected one of .*generic.*, got 'v9'"):
        cpu.logprob_forward(torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int64), None, None, 1.0, 0.0, 1.0, False)


def test_missing_core_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_core(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if "_core" in (fromlist or ()):
            raise ImportError("no such module")
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without_core)
    cpu._core.cache_clear()
    with pytest.raises(ImportError, match=r"no such module.*pip install -e \..*FUSEDPG_NO_NATIVE=1"):
        cpu.ensure_available()
    monkeypatch.undo()
    cpu._core.cache_clear()
    cpu.ensure_available()


@pytest.mark.parametrize(
    ("index", "value", "text"), [(0, 9.0, "surrogate code"), (9, 3.0, "needs logp_ref"), (1, 1.0, "cu: ")]
)
def test_core_refuses_what_it_cannot_index(index: int, value: float, text: str) -> None:
    spec = [0.0] * 24
    spec[index] = value
    rows = torch.zeros(3)
    with pytest.raises(ValueError, match=text):
        cpu.token_loss(spec, rows, None, rows, rows, None, None, None, None, None)
