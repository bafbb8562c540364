"""Every example runs as its docstring says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
#: what an example imports that may be missing
NEEDS = {"trl_grpo.py": ("trl",), "verl_loss.py": ("verl", "tensordict", "omegaconf")}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_example(path):
    missing = [name for name in NEEDS.get(path.name, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    run = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip()
