"""What tests of the drop-ins share: a step against its oracle."""

import torch

from fusedpg.certify.adapters.batches import KINDS, step_batch

__all__ = ["KINDS", "assert_same", "assert_step"]


def assert_same(value, grad, want, want_grad, limit: float = 1e-5) -> None:
    """Relative to the larger of 1 and the truth's own size."""
    value, scale = value.detach(), max(1.0, float(want.abs()))
    assert abs(float(value) - float(want)) <= limit * scale, (float(value), float(want))
    size = max(float(want_grad.abs().max()), 1e-3)
    worst = float((grad.double() - want_grad).abs().max())
    assert worst <= limit * size, (worst, size)


def assert_step(trainer, case, kind: str, limit: float = 1e-5) -> None:
    """Two micro-batches and an empty one, added up as the trainer does, are the unsplit step in fp64."""
    b = step_batch(kind, case.token_advantages)
    ours = trainer.step(case, b)
    assert torch.isfinite(ours.grad).all()
    assert_same(*ours, *trainer.want(case, b), limit=limit)
