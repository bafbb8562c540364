"""Advantages of whole groups, computed before dispatch."""

import math

import pytest
import torch

from fusedpg.annotators import group_relative, leave_one_out, mean_centred

ALL = [group_relative, mean_centred, leave_one_out]


def test_literals():
    """r = 0 1 1 4: mean 1.5, deviations -1.5 -.5 -.5 2.5, variance (2.25 + .25 + .25 + 6.25)/3 = 3."""
    r = torch.tensor([0.0, 1.0, 1.0, 4.0])
    centred = torch.tensor([-1.5, -0.5, -0.5, 2.5])
    assert torch.equal(mean_centred(r, 4), centred)
    torch.testing.assert_close(group_relative(r, 4, eps=0.5), centred / (math.sqrt(3) + 0.5))
    # the others' means: 6/3 = 2, 5/3, 5/3, 2/3
    torch.testing.assert_close(leave_one_out(r, 4), torch.tensor([-2.0, -2 / 3, -2 / 3, 10 / 3]))


@pytest.mark.parametrize("annotate", ALL)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e8 + 1, 1e30])
def test_a_constant_group_gets_exactly_zero(annotate, value):
    """However its mean rounds, and beside a group that is not constant."""
    r = torch.tensor([value] * 3 + [0.0, 1.0, 2.0])
    got = annotate(r, 3)
    assert torch.equal(got[:3], torch.zeros(3))
    assert got[3] < 0 < got[5]


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e9, 1e15])
def test_the_variance_does_not_cancel(offset):
    """A common offset leaves the advantages as they were: E[r^2] - E[r]^2 would lose all digits."""
    r = torch.tensor([0.0, 1.0, 1.0, 4.0, 2.0, 0.5, 7.0], dtype=torch.float64)
    for annotate in ALL:
        torch.testing.assert_close(annotate(r + offset, 7), annotate(r, 7), rtol=1e-12, atol=0)


def test_groups_by_id():
    """Members of a group may stand anywhere; the order of the rewards is kept."""
    r = torch.tensor([0.0, 10.0, 2.0, 30.0])
    ids = torch.tensor([7, 3, 7, 3])
    assert mean_centred(r, 2, group_ids=ids).tolist() == [-1.0, -10.0, 1.0, 10.0]
    assert mean_centred(r, 2).tolist() == [-5.0, 5.0, -14.0, 14.0]


@pytest.mark.parametrize("annotate", ALL)
def test_incomplete_groups_are_refused(annotate):
    """Group statistics run while the complete group is present: a rank may hold only part of one."""
    with pytest.raises(
        ValueError, match=r"^rewards: expected whole groups of 4; got 6 rewards, 2 of them in an incomplete"
    ):
        annotate(torch.zeros(6), 4)
    with pytest.raises(ValueError, match=r"^group_ids: expected 2 rewards in every group; got 1 in group 0"):
        annotate(torch.zeros(4), 2, group_ids=torch.tensor([0, 1, 1, 1]))


@pytest.mark.parametrize("annotate", ALL)
def test_arguments(annotate):
    for size in (1, 0, True, 2.0):
        with pytest.raises(ValueError, match=r"^group_size: expected an int >= 2"):
            annotate(torch.zeros(4), size)
    with pytest.raises(TypeError, match=r"^rewards: expected real numbers of shape \(N,\)"):
        annotate(torch.zeros(2, 2), 2)
    with pytest.raises(ValueError, match=r"^rewards: expected finite numbers; got nan at index 1"):
        annotate(torch.tensor([0.0, torch.nan]), 2)
    with pytest.raises(TypeError, match=r"^group_ids: expected integers of shape \(4,\)"):
        annotate(torch.zeros(4), 2, group_ids=torch.zeros(4))
    with pytest.raises(ValueError, match=r"^eps: expected a number > 0; got 0"):
        group_relative(torch.zeros(4), 2, eps=0)
    assert annotate(torch.zeros(0), 2).shape == (0,)
    assert annotate(torch.zeros(4, dtype=torch.int64), 2).dtype == torch.float32
    assert annotate(torch.zeros(4, dtype=torch.float64), 2).dtype == torch.float64
