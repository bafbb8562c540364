"""Every test starts and ends with the same registered losses."""

import pytest

from fusedpg import registry


@pytest.fixture(autouse=True)
def registered():
    before = dict(registry._LOSSES)
    yield
    registry._LOSSES.clear()
    registry._LOSSES.update(before)
