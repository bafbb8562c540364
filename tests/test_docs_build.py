"""The documentation builds without a warning, and its reference has every public symbol."""

import subprocess
import sys
import zlib

import pytest

from pages import ROOT
from test_public_docs import INTEGRATIONS, PUBLIC

pytest.importorskip("furo")


def build(out):
    """The pages, as `make docs` writes them."""
    options = ["-W", "--keep-going", "-q", "-d", out / "trees"]
    command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", out / "html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


def objects(html):
    """Names of the Python objects in a built reference."""
    raw = (html / "objects.inv").read_bytes()
    text = zlib.decompress(raw[raw.index(b"zlib.\n") + 6 :]).decode()
    return {line.split()[0] for line in text.splitlines() if " py:" in line}


def test_the_pages_build_and_have_every_public_symbol(tmp_path):
    html = build(tmp_path)
    integrations = {f"fusedpg.integrations.{path.stem}" for path in INTEGRATIONS if path.stem != "__init__"}
    assert len(integrations) >= 12
    assert not {*PUBLIC, *integrations} - objects(html)
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if not (html / page).exists()]
