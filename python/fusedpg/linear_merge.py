"""Joins the statistics of vocabulary blocks to those of whole rows, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockMerge:
    """Running maximum, log-sum, entropy and target logit of every row of `like`.

    A row's blocks come in the order of the vocabulary, so its bits depend on the block size alone. `slope` multiplies
    differences of logits, a number or (N,).
    """

    def __init__(self, like: Tensor, slope: Tensor | float) -> None:
        new = lambda value: torch.full(like.shape, value, dtype=torch.float64, device=like.device)  # noqa: E731
        self.slope = slope
        self.max, self.log_sum, self.entropy, self.target = new(-torch.inf), new(-torch.inf), new(0.0), new(-torch.inf)

    def add(
        self, rows: Tensor, has_target: Tensor, logp: Tensor, entropy: Tensor, row_max: Tensor, log_sum: Tensor
    ) -> None:
        """One block of some rows, as stage A returns it; `logp` counts where the block has the target."""
        slope = self.slope if isinstance(self.slope, float) else self.slope[rows]
        old, new = self.max[rows], row_max.double()
        top = torch.maximum(old, new)
        down, lift = ((torch.where(m == top, 0.0, (m - top) * slope)) for m in (old, new))
        # a block of -inf alone has no sum
        block = torch.where(new == -torch.inf, -torch.inf, log_sum.double() + lift)
        before = self.log_sum[rows] + down
        total = torch.logaddexp(before, block)
        if entropy.numel():
            shares = [torch.where(part == -torch.inf, 0.0, (part - total).exp()) for part in (before, block)]
            terms = zip(shares, (self.entropy[rows], entropy.double()), strict=True)
            self.entropy[rows] = sum(torch.where(w == 0, 0.0, w * (h - w.log())) for w, h in terms)
        target = torch.where(has_target, logp.double() + log_sum.double() + lift, self.target[rows] + down)
        self.max[rows], self.log_sum[rows], self.target[rows] = top, total, target

    def result(self, rows: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logp, entropy or empty, row_max, log_sum) of some rows; NaN for a row of -inf alone."""
        log_sum = self.log_sum[rows]
        log_sum = torch.where(log_sum == -torch.inf, torch.nan, log_sum)
        entropy = self.entropy[rows] if want_entropy else self.entropy[:0]
        entropy = torch.where(log_sum.isnan(), torch.nan, entropy) if want_entropy else entropy
        return self.target[rows] - log_sum, entropy, self.max[rows], log_sum
