"""The package for the tests: installed from the tree into a folder of its own, or, without the tools, copied there."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .running import Step

LEAST_SETUPTOOLS = 77


def missing_tools() -> list[str]:
    """What `pip install --no-build-isolation` of this package would stop for."""
    missing = [name for name in ("pip", "pybind11") if find_spec(name) is None]
    try:
        setuptools = int(metadata.version("setuptools").split(".")[0])
    except metadata.PackageNotFoundError:
        setuptools = 0
    if setuptools < LEAST_SETUPTOOLS:
        missing.append(f"setuptools>={LEAST_SETUPTOOLS}")
    missing += [name for name in ("cmake", "ninja") if shutil.which(name, path=search_path()) is None]
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        missing.append("a C++ compiler")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("Python.h")
    return missing


def search_path() -> str:
    """Programs that pip installed beside this Python come first, whether or not its environment is active."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def step(site: Path, limit: float) -> Step:
    """`pip install .` into `site`: no network, no other package, nothing outside the folder is changed."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--upgrade"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), "."]
    return Step(
        "build: pip install --no-build-isolation --no-deps .", command, limit, environment={"PATH": search_path()}
    )


def copy_tree(root: Path, site: Path) -> None:
    """The Python half of the package: the reference and the Triton kernels, which are all that a GPU test runs."""
    shutil.rmtree(site / "fusedpg", ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "kernels")
    shutil.copytree(root / "python" / "fusedpg", site / "fusedpg", ignore=ignored)
    shutil.copytree(root / "kernels", site / "fusedpg" / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
