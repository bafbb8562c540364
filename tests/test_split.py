"""Split = whole: (numerator, weight) and gradients summed over micro-batches equal the unsplit call."""

import itertools
import random

import pytest
import torch

import fusedpg
from fusedpg.metrics import Metrics
from fusedpg.spec import REDUCTIONS
from support import TERMS, applies, make_case, run, spec_for

LENGTHS = (5, 0, 1, 6, 3, 2, 4)


def micro_batches(case, packed: bool, cuts: list[int]):
    """The case cut at sequence boundaries: (slice of the tokens, the sub-case's keyword arguments)."""
    bounds = [0, *cuts, len(LENGTHS)]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    for first, last in itertools.pairwise(bounds):
        part = slice(int(offsets[first]), int(offsets[last])) if packed else slice(first, last)
        kwargs = {}
        for key, value in case.kwargs.items():
            if value is None:
                kwargs[key] = None
            elif key == "cu_seqlens":
                kwargs[key] = offsets[first : last + 1] - offsets[first]
            elif key == "sequence_advantages":
                kwargs[key] = value[first:last]
            else:
                kwargs[key] = value[part]
        yield part, type(case)(case.logits[part], case.targets[part], kwargs)


def check_split(name: str, reduction: str, terms: str, packed: bool, backend: str, cuts: list[int], tolerance: float):
    spec = spec_for(name, reduction, terms)
    dtype = torch.float64 if backend in ("reference", "cpu") else torch.float32
    case = make_case(spec, dtype=dtype, packed=packed, lengths=LENGTHS, seed=len(cuts))
    whole = run(spec, case, backend)
    numerator, weight, metrics = 0.0, 0.0, []
    grad = torch.zeros_like(whole.grad)
    for part, micro in micro_batches(case, packed, cuts):
        got = run(spec, micro, backend, normalizer=1.0)
        numerator = numerator + got.values["numerator"]
        weight = weight + got.values["weight"]
        grad[part] = got.grad
        metrics.append(got.output.metrics)
    if reduction == "token-sum":
        weight = torch.tensor(1.0)  # its unit is the sum itself, whatever the number of calls
    torch.testing.assert_close(weight.double(), whole.values["weight"], rtol=0, atol=0)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(numerator, whole.values["numerator"], **close)
    torch.testing.assert_close(numerator / weight, whole.values["loss"], **close)
    torch.testing.assert_close(grad / weight, whole.grad, **close)
    merged = Metrics.merge(*metrics)
    for key, value in whole.output.metrics.items():
        torch.testing.assert_close(merged[key].double(), value.double(), **close, msg=key)


#: a selection over the whole call is no sum over micro-batches; `LossSpec.batch_global` says so
ADDITIVE = [name for name, spec in fusedpg.CATALOGUE.items() if not spec.batch_global]


def terms_of(name: str) -> list[str]:
    return [terms for terms in TERMS if applies(name, terms)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ADDITIVE)
def test_any_split_equals_the_whole(name: str, reduction: str):
    """Random cuts, fp64: the identity holds to rounding on the reference and on the compiled core."""
    rng = random.Random(f"{name} {reduction}")
    for backend in ("reference", "cpu"):
        for packed in (False, True):
            cuts = sorted(rng.sample(range(1, len(LENGTHS)), rng.randint(1, len(LENGTHS) - 1)))
            check_split(name, reduction, rng.choice(terms_of(name)), packed, backend, cuts, 1e-11)


@pytest.mark.parametrize("terms", ["observation", "is-mask-geometric", "is-truncate"])
@pytest.mark.parametrize("name", ["ppo_clip", "gmpo", "luspo", "echo"])
def test_corrections_and_observations_split(name: str, terms: str):
    for reduction, packed in itertools.product(REDUCTIONS, (False, True)):
        check_split(name, reduction, terms, packed, "cpu", [2, 3, 5], 1e-11)


@pytest.mark.parametrize("name", ADDITIVE)
def test_split_on_triton(name: str):
    rng = random.Random(name)
    reduction = rng.choice(REDUCTIONS)
    check_split(name, reduction, rng.choice(terms_of(name)), rng.random() < 0.5, "triton", [1, 4], 2e-5)


@pytest.mark.parametrize("name", ["ppo_clip", "reinforce", "cispo", "dppo_tv", "sapo", "ipo", "topr"])
def test_a_token_level_loss_may_be_cut_inside_a_sequence(name: str):
    """token-mean knows no sequences: chunks of rows sum to the whole."""
    spec = spec_for(name, "token-mean", "k3-entropy")
    case = make_case(spec, dtype=torch.float64, packed=True, lengths=LENGTHS)
    case.kwargs["cu_seqlens"] = None
    whole = run(spec, case, "cpu")
    for size in (1, 2, 5, len(case.targets)):
        numerator = weight = 0.0
        for part in torch.arange(len(case.targets)).split(size):
            kwargs = {k: None if v is None else v[part] for k, v in case.kwargs.items()}
            got = run(spec, type(case)(case.logits[part], case.targets[part], kwargs), "cpu")
            numerator, weight = numerator + got.values["numerator"], weight + got.values["weight"]
        torch.testing.assert_close(numerator, whole.values["numerator"], rtol=1e-12, atol=1e-12)
        assert weight == whole.values["weight"]
