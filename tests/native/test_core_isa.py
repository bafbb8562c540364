"""Which build of the core runs, and what is said when none can."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

from fusedpg import cpu
from fusedpg.spec import NPARAMS, STREAMS


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


CODES = {
    "surrogate": 0,
    "level": 1,
    "anchor": 2,
    "kl": 9,
    "kl_target": 11,
    "kl_ratio": 12,
    "kl_gradient": 13,
    "keep": 19,
    "is_correction": 23,
    "is_level": 24,
    "is_reject": 27,
    "selection": 34,
    "kl_forward": 37,
}


def refused(text: str, present: tuple[str, ...] = (), **entries: float) -> None:
    """Stage B of an encoded spec that is 0 but for `entries`, with advantages and the streams `present`, is refused."""
    spec = [0.0] * NPARAMS
    for name, value in entries.items():
        spec[CODES[name]] = value
    rows = torch.zeros(3)
    streams = [rows if name in ("advantages", *present) else None for name in STREAMS]
    with pytest.raises(ValueError, match=text):
        cpu.token_loss(spec, rows, None, rows, streams, None)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("value", [9.0, -1.0, float("nan")])
def test_core_refuses_an_unknown_code(name: str, value: float) -> None:
    refused(f"spec: {name} code .* is not in 0..", **{name: value})


def test_core_refuses_another_number_of_parameters() -> None:
    rows = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"spec: expected {NPARAMS} numbers .*got 24"):
        cpu.token_loss([0.0] * 24, rows, None, rows, [rows, *[None] * 6], None)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("KL term needs logp_ref", {"kl": 3}),
        ("KL term needs logp_rollout", {"kl": 3, "kl_target": 1}),
        ("KL term needs logp_ref", {"kl_forward": 1}),
        ("anchor needs logp_rollout", {"anchor": 2}),
        ("correction weight or rejection needs logp_rollout", {"is_correction": 1}),
        ("correction weight or rejection needs logp_rollout", {"is_reject": 1}),
        ("selected: the spec's selection", {"selection": 2}),
        ("cu: a spec that sums over sequences", {"level": 1}),
        ("cu: a spec that sums over sequences", {"surrogate": 6}),
    ],
    ids=str,
)
def test_core_refuses_a_missing_stream(text: str, entries: dict[str, float]) -> None:
    refused(text, **entries)


@pytest.mark.parametrize("entries", [{"is_correction": 1, "is_level": 2}, {"is_reject": 2}], ids=str)
def test_core_refuses_sequence_weights_without_sequences(entries: dict[str, float]) -> None:
    refused("cu: a spec that sums over sequences", ("logp_rollout",), **entries)
