"""Batch-global selections: tokens picked by the covariance of their log-prob and advantage over the whole call.

Cui et al., The Entropy Mechanism of RL for Reasoning Language Models, arXiv:2505.22617, sections 4.2 and 4.3. Needs
every log-prob of the batch, so such a loss is stage A, the selection here, stage B, stage C; the number of picked
tokens is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import STREAMS, LossSpec, Selection


def _covariance(logp: Tensor, adv: Tensor, chosen: Tensor) -> Tensor:
    """(A - mean A)*(logp - mean logp) of the chosen tokens, (number chosen,)."""
    a, lp = adv[chosen], logp[chosen]
    return (a - a.mean()) * (lp - lp.mean())


def clip_cov(
    logp: Tensor, adv: Tensor, chosen: Tensor, outside: Tensor, ratio: float, low: float, high: float
) -> Tensor:
    """Indices of a random share `ratio` of the tokens: those inside the clip band with low < covariance < high.

    The draw is `torch.randperm` of the global CPU generator, as in the paper's code: `torch.manual_seed` repeats it.
    """
    rows = chosen.nonzero()[:, 0]
    cov = _covariance(logp, adv, rows)
    candidates = rows[(cov < high) & (cov > low) & ~outside[rows]]
    wanted = min(max(int(ratio * len(rows)), 1), len(candidates))
    order = torch.randperm(len(candidates))[:wanted]
    return candidates[order.to(candidates.device)]


def kl_cov(logp: Tensor, adv: Tensor, chosen: Tensor, ratio: float) -> Tensor:
    """Indices of the share `ratio` of the tokens with the largest covariance, at least one."""
    rows = chosen.nonzero()[:, 0]
    if len(rows) == 0:
        return rows
    wanted = max(1, int(len(rows) * ratio))
    return rows[torch.topk(_covariance(logp, adv, rows), wanted).indices]


def select_kernel(
    logp: Tensor,
    w: Tensor,
    streams: list[Tensor | None],
    codes: list[float],
) -> Tensor:
    """1 on the selected tokens, 0 elsewhere; `codes` are those of `selection_codes`."""
    selection, ratio, low, high, clip_low, clip_high, clamp_low, clamp_high, anchor_index = codes
    adv, chosen = streams[0], w != 0
    assert adv is not None
    if selection == Selection.CLIP_COV:
        anchor = streams[int(anchor_index)] if anchor_index >= 0 else None
        r = (logp - (logp if anchor is None else anchor)).clamp(clamp_low, clamp_high).exp()
        outside = ((r > clip_high) & (adv > 0)) | ((r < clip_low) & (adv < 0))
        picked = clip_cov(logp, adv, chosen, outside, ratio, low, high)
    else:
        picked = kl_cov(logp, adv, chosen, ratio)
    return torch.zeros_like(logp).index_fill_(0, picked, 1.0)


def selection_codes(spec: LossSpec) -> list[float]:
    """The numbers of a spec that decide its selection."""
    anchor = {"OLD": STREAMS.index("logp_old"), "ROLLOUT": STREAMS.index("logp_rollout")}.get(spec.anchor.name, -1)
    return [
        float(spec.selection.value),
        spec.select_ratio,
        spec.select_low,
        spec.select_high,
        spec.clip_low,
        spec.clip_high,
        *spec.log_ratio_clamp,
        float(anchor),
    ]
