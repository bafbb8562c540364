"""Stage B of the C++ core where exp overflows, weights vanish, streams lack a value, and sequences are empty."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedpg import cpu
from fusedpg.metrics import SUM_NAMES
from fusedpg.spec import STREAMS, Anchor, Correction, CorrectionLevel, Keep, Level, LossSpec, Reject, Surrogate

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.float64]


def run(spec: LossSpec, logp: Any, w: Any, cu: Any = None, dtype: torch.dtype = torch.float64, **streams: Any) -> dict:
    """Stage B of literal tokens; advantages are 1 unless given."""
    new = lambda values: torch.tensor(values, dtype=dtype)  # noqa: E731
    streams.setdefault("advantages", [1.0] * len(logp))
    flat = [new(streams[s]) if s in streams else None for s in STREAMS]
    cu = None if cu is None else torch.tensor(cu)
    per_token, c, _, sums = cpu.token_loss(spec.encode(), new(logp), None, new(w), flat, cu)
    return {"x": per_token, "c": c, **dict(zip(SUM_NAMES, sums.tolist(), strict=True))}


def close(got: Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sapo_saturates_without_nan(isa: str, dtype: torch.dtype) -> None:
    """r = inf: the gate is 1, x = -A*4/tau, and its derivative 0, not 0*inf; r = 0: the gate is sigmoid(-tau)."""
    spec = LossSpec("t", Surrogate.SAPO, tau_pos=2.0, tau_neg=0.5)
    old = [-3000.0, -3000.0, 3000.0, NAN]
    got = run(spec, [-1.0] * 4, [1.0] * 4, dtype=dtype, logp_old=old, advantages=[1.0, -1.0, 1.0, 0.0])
    close(got["x"], [-2.0, 8.0, -2.0 / (1 + math.exp(2.0)), NAN])
    close(got["c"], [0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topr_tapers_negative_advantages_only(isa: str, dtype: torch.dtype) -> None:
    """rho = e^0.7 clipped to 1 and e^-0.7; the band is counted where A <= 0."""
    spec = LossSpec("t", Surrogate.TOPR, anchor=Anchor.ROLLOUT, clip_low=0.6, clip_high=1.0)
    rollout = [-1.7, -1.7, -0.3]
    got = run(spec, [-1.0] * 3, [1.0] * 3, dtype=dtype, logp_rollout=rollout, advantages=[2.0, -2.0, -2.0])
    close(got["x"], [2.0, -2.0, -2 * 0.6])
    close(got["c"], [-2.0, 2.0, 2 * 0.6])
    assert (got["clip_high"], got["clip_low"], got["out_of_band"]) == (0, 1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vespo_takes_weights_into_the_product(isa: str, dtype: torch.dtype) -> None:
    """log W = (0.2 + log 2) + (-0.1 + log 1e-8): a weight of 0 counts as 1e-8; nothing is multiplied afterwards."""
    spec = LossSpec("t", Surrogate.VESPO, k_pos=0.1, lambda_pos=0.5, k_neg=9.0, lambda_neg=9.0)
    got = run(
        spec,
        [-1.0, -1.0, NAN],
        [2.0, 1.0, 0.0],
        [0, 3],
        dtype,
        logp_old=[-1.2, -0.9, NAN],
        is_weights=[2.0, 0.0, NAN],
        advantages=[1.0, 1.0, NAN],
    )
    log_w = 0.2 + math.log(2) - 0.1 + math.log(1e-8)
    phi = math.exp(0.5 + 0.1 * log_w - 0.5 * math.exp(log_w))
    close(got["x"], [phi, phi, 0.0])
    close(got["c"], [-2 * phi, -phi, 0.0])
    assert (got["is_tokens"], got["is_masked"]) == (2, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gmpo_passes_no_gradient_through_a_clipped_token(isa: str, dtype: torch.dtype) -> None:
    """A > 0: u = min(t, 0.4) = 0.4, -0.6; z = -0.1; only the second token gets w*D, D = -e^z. The band counts the first."""
    spec = LossSpec("t", Surrogate.IMPORTANCE_RATIO, Level.SEQUENCE, token_clip=(-0.4, 0.4))
    got = run(spec, [-1.0, -1.0], [1.0, 1.0], [0, 0, 2, 2], dtype, logp_old=[-2.0, -0.4])
    close(got["x"], [-math.exp(-0.1)] * 2)
    close(got["c"], [0.0, -math.exp(-0.1)])
    assert (got["clip_high"], got["clip_low"], got["out_of_band"], got["active"]) == (1, 0, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_token_leaves_no_inf_and_keeps_its_penalty(isa: str, dtype: torch.dtype) -> None:
    """r = e^900 is dropped by its keep mask: x is the penalty alone, 0.5/2*900^2, c its derivative."""
    spec = LossSpec("t", Surrogate.IMPORTANCE_RATIO, keep=Keep.RATIO, keep_high=5.0, penalty_coef=0.5)
    got = run(spec, [-1.0, -1.0], [1.0, 1.0], dtype=dtype, logp_old=[-901.0, -1.0])
    close(got["x"], [202500.0, -1.0])
    close(got["c"], [450.0, -1.0])
    assert (got["keep"], got["tokens"]) == (1, 2)


@pytest.mark.parametrize("keep", [Keep.RATIO, Keep.TV, Keep.KL])
def test_a_nan_is_never_dropped(isa: str, keep: Keep) -> None:
    spec = LossSpec("t", Surrogate.CISPO, keep=keep, keep_low=0.0, keep_high=0.0)
    got = run(spec, [-1.0, NAN, -1.0], [1.0] * 3, logp_old=[NAN, -1.0, -2.0], dtype=torch.float32)
    assert got["x"].isnan().tolist() == [True, True, False]
    assert got["keep"] == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_binary_kl_at_certainty(isa: str, dtype: torch.dtype) -> None:
    """p = 1, p' = 1/4: D = 1/4*log(1/4/(1-1e-6)) + 3/4*log(3/4/1e-6) = 9.7993, positive; and 0 where both are certain."""
    for bound, kept in ((9.799, 1), (9.8, 2)):
        spec = LossSpec("t", Surrogate.CISPO, keep=Keep.KL, keep_high=bound)
        got = run(spec, [0.0, 0.0], [1.0, 1.0], dtype=dtype, logp_old=[math.log(0.25), 0.0])
        assert got["keep"] == kept


ROLLOUT = {"is_correction": Correction.TRUNCATE, "is_low": 0.0, "is_high": INF}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", CorrectionLevel)
def test_a_rejected_infinite_weight_is_zero(isa: str, dtype: torch.dtype, level: CorrectionLevel) -> None:
    """rho = e^2000 = inf times the factor 0 is 0, not NaN."""
    spec = LossSpec("t", Surrogate.REINFORCE, **ROLLOUT, is_level=level, is_reject=Reject.TOKEN, is_reject_high=2.0)
    got = run(spec, [-1.0], [1.0], [0, 1], dtype, logp_rollout=[-2001.0])
    close(got["x"], [0.0])
    close(got["c"], [0.0])
    assert (got["is_masked"], got["is_weight"], got["active"]) == (1, 0, 0)


def test_missing_rollouts(isa: str) -> None:
    """Missing: weight 1 at token level, the sequence's elsewhere, never rejected by itself, out of the metrics.

    Two sequences: log rho = 0.2, missing, 0.4 (product e^0.6, mean over w = (1, 3): e^0.35); and only a missing one,
    whose ratio is 1, which a sequence's weight truncates to 1.1.
    """
    w, rollout, cu = [1.0, 1.0, 3.0, 1.0], [-1.2, NAN, -1.4, NAN], [0, 3, 4]
    e = math.exp
    for level, weights in (
        (CorrectionLevel.TOKEN, [e(0.2), 1.0, e(0.4), 1.0]),
        (CorrectionLevel.SEQUENCE, [e(0.6)] * 3 + [1.1]),
        (CorrectionLevel.GEOMETRIC, [e(0.35)] * 3 + [1.1]),
    ):
        spec = LossSpec("t", Surrogate.REINFORCE, **ROLLOUT, is_level=level, is_missing_one=True).replace(is_low=1.1)
        got = run(spec, [-1.0] * 4, w, cu, logp_rollout=rollout)
        close(got["x"], weights)
        assert got["is_tokens"] == 2
        assert got["is_weight_max"] == pytest.approx(max(weights[0], weights[2]))
        nan = run(spec.replace(is_missing_one=False), [-1.0] * 4, w, cu, logp_rollout=rollout)["x"].isnan()
        assert nan.tolist() == ([False, True, False, True] if level == CorrectionLevel.TOKEN else [True] * 4)
    rejecting = LossSpec("t", Surrogate.REINFORCE, is_reject=Reject.TOKEN, is_reject_low=1.3, is_missing_one=True)
    close(run(rejecting, [-1.0] * 4, w, cu, logp_rollout=rollout)["x"], [0.0, 1.0, 1.0, 1.0])
    sequences = rejecting.replace(is_reject=Reject.SEQUENCE, is_reject_low=1.9)
    close(run(sequences, [-1.0] * 4, w, cu, logp_rollout=rollout)["x"], [0.0, 0.0, 0.0, 0.0])


def test_missing_given_weights(isa: str) -> None:
    spec = LossSpec("t", Surrogate.REINFORCE, is_missing_one=True)
    got = run(spec, [-1.0] * 3, [1.0] * 3, is_weights=[0.5, NAN, 0.0])
    close(got["x"], [0.5, 1.0, 0.0])
    assert (got["is_tokens"], got["is_weight"], got["is_masked"], got["is_weight_max"]) == (2, 0.5, 1, 0.5)


def test_observation_tokens(isa: str) -> None:
    """x and c add where a token is both; a masked observation token is read, and counts as no token."""
    spec = LossSpec("t", Surrogate.REINFORCE, obs_coef=0.5)
    got = run(spec, [-1.0, -2.0, NAN], [2.0, 0.0, 0.0], advantages=[3.0, NAN, NAN], obs_weights=[4.0, 5.0, 0.0])
    close(got["x"], [3.0 + 0.5, 1.0, 0.0])
    close(got["c"], [-6.0 - 2.0, -2.5, 0.0])
    assert got["numerator"] == pytest.approx(2 * 3.0 + 4 * 0.5 + 5 * 1.0)
    assert (got["tokens"], got["active"]) == (1, 2)


def test_everything_masked_and_empty_sequences(isa: str) -> None:
    for spec in (
        LossSpec("t", Surrogate.VESPO),
        LossSpec("t", Surrogate.IMPORTANCE_RATIO, Level.SEQUENCE, token_clip=(-0.1, 0.1)),
        LossSpec("t", Surrogate.SAPO, is_reject=Reject.GEOMETRIC, is_reject_high=2.0),
    ):
        nan = [NAN] * 3
        got = run(spec, nan, [0.0] * 3, [0, 0, 2, 3, 3], logp_old=nan, logp_rollout=nan, advantages=nan)
        close(got["x"], [0.0] * 3)
        close(got["c"], [0.0] * 3)
        assert (got["tokens"], got["ratio_min"], got["is_weight_max"]) == (0, INF, -INF)
