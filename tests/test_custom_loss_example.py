"""The examples run offline, on a CPU, and do what they say."""

import re
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_custom_loss():
    """Both losses learn; the registered one takes the custom path."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, EXAMPLES / "custom_loss.py"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(\w+) +(\w+) +path: reward ([\d.]+) -> ([\d.]+)", done.stdout)
    assert [row[:2] for row in rows] == [("ppo_clip", "native"), ("soft_clip", "custom")]
    assert all(float(after) > float(before) + 0.2 for *_, before, after in rows), done.stdout
    assert time.monotonic() - start < 60
