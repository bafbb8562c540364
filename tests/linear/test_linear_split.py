"""Split = whole from hidden states: numerators, weights, gradients and metrics summed over micro-batches."""

import itertools

import pytest
import torch
from heads import HeadCase, make_head_case, run_head, smallest_workspace, use_walk

from fusedpg.metrics import Metrics
from fusedpg.spec import REDUCTIONS
from support import spec_for

LENGTHS = (5, 0, 1, 4, 3, 2, 4)
CUTS = [[3], [1, 2, 6], [1, 2, 3, 4, 5, 6]]


def micro_batches(case: HeadCase, packed: bool, cuts: list[int]):
    """The case cut at sequence boundaries."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    for first, last in itertools.pairwise([0, *cuts, len(LENGTHS)]):
        part = slice(int(offsets[first]), int(offsets[last])) if packed else slice(first, last)
        kwargs = {key: value if value is None else value[part] for key, value in case.kwargs.items()}
        if packed:
            kwargs["cu_seqlens"] = offsets[first : last + 1] - offsets[first]
        if "sequence_advantages" in kwargs:
            kwargs["sequence_advantages"] = case.kwargs["sequence_advantages"][first:last]
        yield HeadCase(case.hidden[part], case.weight, case.bias, case.targets[part], kwargs)


def check_split(name: str, reduction: str, backend: str, packed: bool, cuts: list[int], tolerance: float, **extra):
    spec = spec_for(name, reduction, "k3-entropy")
    dtype = torch.float64 if backend == "cpu" else torch.float32
    case = make_head_case(spec, dtypes=(dtype, dtype), packed=packed, lengths=LENGTHS, seed=len(cuts))
    whole = run_head(spec, case, backend, **extra)
    parts = [run_head(spec, micro, backend, normalizer=1.0, **extra) for micro in micro_batches(case, packed, cuts)]
    total = {
        key: sum(part.values[key] for part in parts) for key in ("numerator", "weight", "grad:weight", "grad:bias")
    }
    weight = total["weight"] if reduction != "token-sum" else torch.tensor(1.0)
    hidden = torch.cat([part.values["grad:hidden"] for part in parts])
    close = {"rtol": tolerance, "atol": tolerance}
    assert weight == whole.values["weight"]
    torch.testing.assert_close(total["numerator"] / weight, whole.values["loss"], **close)
    torch.testing.assert_close(hidden / weight, whole.values["grad:hidden"], **close)
    for key in ("grad:weight", "grad:bias"):
        torch.testing.assert_close(total[key] / weight, whole.values[key], **close)
    merged = Metrics.merge(*(part.output.metrics for part in parts))
    for key, value in whole.output.metrics.items():
        torch.testing.assert_close(merged[key].double(), value.double(), **close, msg=key)


@pytest.mark.parametrize("walk", ["chunks", "blocks"])
@pytest.mark.parametrize("name", ["dapo", "gspo", "gmpo", "luspo", "cispo", "reinforce_kl"])
def test_any_split_equals_the_whole(name: str, walk: str, monkeypatch):
    """In fp64, whatever the walk: chunks of four rows, with one sequence longer than they are, or blocks."""
    use_walk(monkeypatch, walk)
    extra = {}
    if walk == "blocks":
        case = make_head_case(spec_for(name, "token-mean", "plain"), dtypes=(torch.float64, torch.float64))
        extra["workspace_mib"] = smallest_workspace(case.hidden, case.weight)
    for i, (reduction, packed) in enumerate(itertools.product(REDUCTIONS, (False, True))):
        check_split(name, reduction, "cpu", packed, CUTS[i % 3], 1e-11, **extra)


def test_split_on_triton(monkeypatch):
    use_walk(monkeypatch, "chunks")
    for name in ("dapo", "gspo"):
        check_split(name, "seq-mean-token-sum", "triton", True, CUTS[0], 2e-5)
