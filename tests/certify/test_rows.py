"""What a row of the parity table is: its differences, its verdict, and the batches that it is measured on."""

import math
import sys
from importlib.util import find_spec

import pytest
import torch

import fusedpg
from fusedpg import certify
from fusedpg.certify.cases import KINDS, make_policy_batch
from fusedpg.certify.rows import Difference, not_installed

SPEC = fusedpg.loss_spec("ppo_clip")


def eager(batch):
    """PPO's token mean in plain fp64."""
    wide = batch.cleaned().to(torch.float64)

    def loss(logp):
        ratio = (logp - wide.logp_old).clamp(-20, 20).exp()
        adv = wide.advantages[:, None]
        x = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
        return torch.where(wide.mask, x, 0.0).sum() / wide.mask.sum()

    return wide, loss


def ours(batch, spec=SPEC):
    def loss(logp):
        return fusedpg.policy_loss(
            spec,
            logp,
            logp_old=batch.logp_old,
            sequence_advantages=batch.advantages,
            mask=batch.mask,
            backend="reference",
        )

    return loss


@pytest.mark.parametrize("kind", KINDS)
def test_an_equal_loss_is_equal_and_a_mutant_differs(kind):
    batch = make_policy_batch(kind)
    wide, theirs = eager(batch)
    same, other = Difference(), Difference()
    same.add(SPEC, batch, ours(batch), theirs, wide)
    assert same.row("t", "1", "ppo", "token-mean").verdict == "equal"
    mutant = SPEC.replace(clip_high=1.0, clip_low=0.99)
    other.add(mutant, batch, ours(batch, mutant), theirs, wide)
    row = other.row("t", "1", "ppo", "token-mean")
    assert row.verdict == "differs"
    assert row.gradient > 1e-3


def test_a_nan_is_infinitely_far():
    batch = make_policy_batch("ragged")
    wide, _ = eager(batch)
    found = Difference()
    found.add(SPEC, batch, ours(batch), lambda logp: logp.sum() * torch.nan, wide)
    assert found.value == math.inf
    assert found.gradient == math.inf
    assert found.row("t", "1", "ppo", "token-mean").verdict == "differs"


def test_no_case_is_no_proof():
    assert Difference().row("t", "1", "ppo", "token-mean").verdict == "differs"


def test_kinds_are_what_they_say():
    ties = make_policy_batch("ties")
    ratios = (ties.logp - ties.logp_old).exp()
    for wanted in (0.8, 1.0, 1.2):
        assert (torch.isclose(ratios, torch.tensor(wanted), rtol=1e-6)).any()
    assert not make_policy_batch("masked-row").mask.any(1).all()
    holes = make_policy_batch("holes").mask
    assert ((~holes[:, :-1]) & holes[:, 1:]).any(), "a masked token before an unmasked one"
    for size in (30, 200):
        batch = make_policy_batch(f"ratio-{size}")
        gaps = (batch.logp - batch.logp_old)[batch.mask]
        assert gaps.max() >= size - 1e-3
        assert gaps.min() <= -size + 1e-3
    rubbish = make_policy_batch("inf-masked")
    assert not torch.isfinite(rubbish.logp_old[~rubbish.mask]).any()
    assert torch.isfinite(rubbish.cleaned().logp_old).all()


def test_what_is_not_installed_is_said():
    (row,) = not_installed("verl", "0.9.1", ["vanilla"], "pip install verl")
    assert row.verdict == "not installed"
    assert row.note == "pip install verl"


def test_unknown_oracle():
    with pytest.raises(
        ValueError, match="oracle: expected one of verl, trl, polgrad, liger, transcribed, adapters, trl_runs; got 'x'"
    ):
        next(certify.rows_of("x"))


def test_every_oracle_is_there():
    """The other files skip what is not installed; where everything can be, nothing may be missing."""
    wanted = ["polgrad", "liger_kernel"]
    wanted += ["trl"] if sys.version_info >= (3, 11) else []
    wanted += ["cosmos_rl", *(["areal"] if (3, 11) <= sys.version_info < (3, 13) else [])]
    wanted += ["verl"] if sys.version_info < (3, 13) else []
    assert [name for name in wanted if find_spec(name) is None] == []
