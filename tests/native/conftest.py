"""Every test that asks for `isa` runs once for each build of the core that this machine can run."""

from __future__ import annotations

import pytest

from fusedpg import cpu


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSEDPG_CPU_ISA", request.param)
    assert cpu.isa() == request.param
    return str(request.param)
