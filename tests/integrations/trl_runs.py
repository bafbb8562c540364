"""Whole TRL runs, stock and fused, compared number by number."""

import math

from fusedpg.certify.tiny_trl import grpo, history


def assert_same_runs(stock, fused, loss=1e-5, grad=1e-4):
    """Every logged number but times and speeds, of training and of evaluation; NaN where TRL's own is."""
    pairs = list(zip(stock.state.log_history, fused.state.log_history, strict=True))
    assert history(stock)
    for theirs, ours in pairs:
        assert set(theirs) == set(ours)
        for name, value in theirs.items():
            if any(word in name for word in ("time", "per_second")) or not isinstance(value, float):
                continue
            limit = grad * abs(value) if name == "grad_norm" else loss * max(1.0, abs(value))
            same = ours[name] == value or (math.isnan(value) and math.isnan(ours[name]))
            assert same or abs(ours[name] - value) <= limit, (name, value, ours[name])


def both(path, **options):
    """The fused GRPO run, once it is stock's."""
    from trl import GRPOTrainer

    from fusedpg.integrations.trl import FusedGRPOTrainer

    stock, fused = (grpo(path, trainer, **options) for trainer in (GRPOTrainer, FusedGRPOTrainer))
    assert_same_runs(stock, fused)
    return fused
