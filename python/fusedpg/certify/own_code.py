"""A trainer's own functions, read out of its installed package without importing it, which would ask for a cluster."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def load(
    package: str, distribution: str, wanted: str, files: Mapping[str, Sequence[str]], **given: Any
) -> SimpleNamespace | None:
    """Definitions of one version of a package, by name; None where that version is not installed.

    Args:
        package, distribution: what is imported, and what pip calls it.
        wanted: the version.
        files: the functions and classes of each file, relative to the package, before those that use them.
        given: other names that the definitions use, besides torch and np.

    Raises:
        LookupError: a file does not define a name.
    """
    folder = _folder(package, distribution, wanted)
    if folder is None:
        return None
    names: dict[str, Any] = {"torch": torch, "np": np, **given}
    for file, definitions in files.items():
        found = {getattr(node, "name", ""): node for node in ast.parse((folder / file).read_text()).body}
        missing = [name for name in definitions if name not in found]
        if missing:
            raise LookupError(f"{package} {wanted}: expected {', '.join(missing)} in {file}; got none")
        lazily = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)  # their types stay unread
        module = ast.Module([lazily, *(found[name] for name in definitions)], [])
        exec(compile(ast.fix_missing_locations(module), str(folder / file), "exec"), names)
    return SimpleNamespace(**{name: names[name] for definitions in files.values() for name in definitions})


def _folder(package: str, distribution: str, wanted: str) -> Path | None:
    try:
        if version(distribution) != wanted:
            return None
        spec = importlib.util.find_spec(package)
    except (PackageNotFoundError, ValueError):  # a stand-in has no spec
        return None
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


@cache
def cosmos_rl() -> SimpleNamespace | None:
    """`compute_loss` of cosmos-rl."""
    from typing import Optional

    from ..presets._cosmos_rl import VERSION

    file = "policy/trainer/llm_trainer/grpo_trainer.py"
    files = {file: ("_apply_off_policy_mask", "compute_loss")}
    return load("cosmos_rl", "cosmos-rl", VERSION, files, List=list, Optional=Optional, Tuple=tuple)


@cache
def areal() -> SimpleNamespace | None:
    """`ppo_actor_loss_fn` and `sapo_loss_fn` of AReaL."""
    from dataclasses import dataclass

    from ..presets._areal import VERSION

    files = {
        "utils/data.py": ("KLEstimator",),
        "utils/functional/functional.py": (
            *("_compute_sequence_level_ratio_and_advantages", "RejectionSamplingResult", "_check_bounds"),
            *("apply_rejection_sampling", "ppo_actor_loss_fn", "sapo_loss_fn"),
        ),
    }
    return load("areal", "areal", VERSION, files, dataclass=dataclass)
