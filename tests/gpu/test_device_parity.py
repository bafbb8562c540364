"""The parity matrices on the compiled kernels: a share that no interpreter has time for, against fp64 on the CPU."""

import pytest
import teachers
import test_linear_parity
import torch
from heads import check_head_case, make_head_case

import fusedpg
import test_parity
from fusedpg.linear_plan import MIB, LinearShape, Mode, plan_linear
from support import assert_agrees, make_case, rounding, run, spec_for, truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: five hundred cases from logits and a hundred from hidden states, other ones than `make test` interprets
LOGITS = test_parity.FULL[6::29]
HIDDEN = test_linear_parity.FULL[4::19]


def test_the_shares_cover_every_axis():
    for axis in range(5):
        assert {case[axis] for case in LOGITS} == {case[axis] for case in test_parity.FULL}
    for axis in range(7):
        assert {case[axis] for case in HIDDEN} == {case[axis] for case in test_linear_parity.FULL}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_from_logits(name: str, dtype: torch.dtype):
    for case in LOGITS:
        if case[0] == name and case[2] == dtype:
            test_parity.check(case, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", fusedpg.CATALOGUE)
def test_from_hidden_states(name: str, monkeypatch: pytest.MonkeyPatch):
    for case in HIDDEN:
        if case[0] == name:
            test_linear_parity.check(case, "triton", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", teachers.DIVERGENCES)
def test_distillation(divergence: str):
    """Every pair of dtypes, each dtype at every size, at the launch shapes that run in earnest."""
    for seed, (student, teacher) in enumerate((a, b) for a in DTYPES for b in DTYPES):
        vocab = (77, 4099, 40_001)[(seed + seed // 3) % 3]
        pair = teachers.make_pair((2, 3, vocab), student, teacher, seed=seed, holes=True, masked=True)
        knobs = {"beta": 0.3, "temperature": 0.7, "teacher_temperature": 1.3}
        teachers.check(pair, "triton", f"{student} {teacher} {vocab}", divergence=divergence, **knobs)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(3, 151_936), (3, 151_665), (200, 32_769), (200, 4097)])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
def test_real_vocabularies(name: str, rows: int, vocab: int):
    """Whole launch shapes, odd vocabularies, rows that are split over programs and rows that are not."""
    spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
    for dtype in DTYPES if vocab < 100_000 else DTYPES[1:2]:
        batch = make_case(spec, dtype=dtype, packed=True, vocab=vocab, seed=rows, lengths=(rows - 2, 0, 1, 1))
        want = truth(spec, batch)
        assert_agrees(run(spec, batch, "triton"), want, rounding(spec, batch, want), dtype, f"{name} {dtype}")


SHAPE = {"vocab": 12_001, "width": 65, "lengths": (700, 3, 0, 450, 241)}
#: MiB -> walk of a loss of tokens and of one of sequences
WALKS = {2048.0: (Mode.TOKENS, Mode.SEQUENCES), 96.0: (Mode.TOKENS, Mode.TWO_PASSES), 20.0: 2 * (Mode.TWO_PASSES,)}


def test_the_workspaces_walk_differently():
    shape = LinearShape(SHAPE["vocab"], SHAPE["width"], cast=True, accumulate=True, granule=512)
    for workspace, modes in WALKS.items():
        plans = [plan_linear(shape, int(workspace * MIB), longest_sequence=longest) for longest in (0, 700)]
        assert tuple(plan.mode for plan in plans) == modes


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", test_linear_parity.DTYPES, ids=str)
@pytest.mark.parametrize("workspace", WALKS)
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_products_into_fp32(name: str, workspace: float, dtypes: tuple[torch.dtype, torch.dtype]):
    """Products of 16-bit operands with fp32 results, in chunks of real size and in blocks, odd vocabulary and width."""
    spec = spec_for(name, "token-mean", "k3-entropy")
    case = make_head_case(spec, dtypes=dtypes, seed=4, **SHAPE)
    check_head_case(spec, case, "triton", f"{name} {dtypes}", workspace_mib=workspace)
