"""Advantages of groups of completions, computed while each group is complete: before dispatch splits it.

With rewards r of one prompt's completions:

    group-relative   (r - mean) / (std + eps)        Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2
    mean-centred     r - mean                        Liu et al., Dr-GRPO, arXiv:2503.20783, section 3.2
    leave-one-out    r - mean of the others          Ahmadian et al., Back to Basics (RLOO), arXiv:2402.14740, section 2

Sums run in fp64 and the variance is that of the centred rewards, so that a large common offset cancels nothing; a group
of equal rewards gets exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def group_relative(rewards: Tensor, group_size: int, *, group_ids: Tensor | None = None, eps: float = 1e-4) -> Tensor:
    """(r - mean)/(std + eps) within each group, std with n - 1 in its denominator.

    Args:
        rewards: (N,) finite numbers, any real dtype.
        group_size: completions of one prompt, >= 2; every group must have exactly so many.
        group_ids: (N,) integers; members of a group may stand anywhere. None: consecutive groups.
        eps: added to the standard deviation, > 0.

    Returns:
        (N,) advantages, fp32 (fp64 for fp64 rewards), in the order of `rewards`.

    Raises:
        TypeError, ValueError: an incomplete group, rewards that are not finite, by name of the argument.
    """
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps > 0:
        raise ValueError(f"eps: expected a number > 0; got {eps!r}")
    grouped, order, dtype = _grouped(rewards, group_size, group_ids)
    centred = _centred(grouped)
    std = (centred.square().sum(1, keepdim=True) / (group_size - 1)).sqrt()
    return _ungrouped(centred / (std + eps), order, dtype)


def mean_centred(rewards: Tensor, group_size: int, *, group_ids: Tensor | None = None) -> Tensor:
    """r - mean within each group (`unbiased_advantage`).

    Args:
        rewards, group_size, group_ids: as in `group_relative`.

    Raises:
        TypeError, ValueError: as `group_relative`.
    """
    grouped, order, dtype = _grouped(rewards, group_size, group_ids)
    return _ungrouped(_centred(grouped), order, dtype)


def leave_one_out(rewards: Tensor, group_size: int, *, group_ids: Tensor | None = None) -> Tensor:
    """r minus the mean of the group's other rewards, which is n/(n - 1) * (r - mean).

    Args:
        rewards, group_size, group_ids: as in `group_relative`.

    Raises:
        TypeError, ValueError: as `group_relative`.
    """
    grouped, order, dtype = _grouped(rewards, group_size, group_ids)
    return _ungrouped(_centred(grouped) * (group_size / (group_size - 1)), order, dtype)


def annotate_advantages(rl: Any, rewards: Tensor, group_size: int, *, group_ids: Tensor | None = None) -> Tensor:
    """The advantages that a `GRPOConfig` selects: mean-centred for `unbiased_advantage`, else group-relative.

    Args:
        rl: the resolved algorithm config.
        rewards, group_size, group_ids: as in `group_relative`.

    Raises:
        TypeError, ValueError: as `group_relative`.
    """
    estimator = mean_centred if rl.unbiased_advantage else group_relative
    return estimator(rewards, group_size, group_ids=group_ids)


def _centred(grouped: Tensor) -> Tensor:
    """r - mean of (G, n) fp64.

    Relative to one member first: a common offset leaves before any sum, and a constant group is 0 exactly.
    """
    shifted = grouped - grouped[:, :1]
    return shifted - shifted.mean(1, keepdim=True)


def _grouped(rewards: Tensor, group_size: int, group_ids: Tensor | None) -> tuple[Tensor, Tensor | None, torch.dtype]:
    """Rewards as (G, n) fp64, the order that sorted them (None: they were), and the dtype of the result."""
    if not isinstance(rewards, Tensor) or rewards.ndim != 1 or rewards.is_complex():
        got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise TypeError(f"rewards: expected real numbers of shape (N,), one a completion; got {got}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 2:
        raise ValueError(
            f"group_size: expected an int >= 2 (one completion has nothing to be compared with); got {group_size!r}"
        )
    if not bool(torch.isfinite(rewards).all()):
        where = (~torch.isfinite(rewards)).nonzero()[0].item()
        raise ValueError(f"rewards: expected finite numbers; got {rewards[int(where)].item()} at index {where}")
    order = None if group_ids is None else _order(rewards, group_size, group_ids)
    count = rewards.numel()
    if count % group_size:
        raise ValueError(
            f"rewards: expected whole groups of {group_size}; got {count} rewards, {count % group_size} of them in an "
            "incomplete group; annotate before dispatch splits the groups"
        )
    values = rewards.double() if order is None else rewards.double()[order]
    return values.view(-1, group_size), order, torch.float64 if rewards.dtype == torch.float64 else torch.float32


def _order(rewards: Tensor, group_size: int, group_ids: Tensor) -> Tensor:
    """Positions of the rewards, group by group."""
    if not isinstance(group_ids, Tensor) or group_ids.shape != rewards.shape or group_ids.is_floating_point():
        got = (
            f"{group_ids.dtype} {tuple(group_ids.shape)}" if isinstance(group_ids, Tensor) else type(group_ids).__name__
        )
        raise TypeError(f"group_ids: expected integers of shape {tuple(rewards.shape)}, like rewards; got {got}")
    ids, counts = torch.unique(group_ids, return_counts=True)
    wrong = (counts != group_size).nonzero()
    if wrong.numel():
        i = int(wrong[0])
        raise ValueError(
            f"group_ids: expected {group_size} rewards in every group; got {int(counts[i])} in group {int(ids[i])}; "
            "annotate before dispatch splits the groups"
        )
    return torch.argsort(group_ids, stable=True)


def _ungrouped(values: Tensor, order: Tensor | None, dtype: torch.dtype) -> Tensor:
    flat = values.reshape(-1)
    if order is not None:
        flat = torch.empty_like(flat).scatter_(0, order, flat)
    return flat.to(dtype)
