"""Launch shapes that a few hundred columns cross."""

import pytest

from triton_tools.inputs import use_small_blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)
