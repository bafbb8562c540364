"""The metric vector that every backend fills, its names, and its exact merge over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

#: what a backend's stage B returns: sums over the selected tokens, then extrema (+inf / -inf when empty)
SUM_NAMES = (
    "numerator",
    "tokens",
    "ratio",
    "clip_low",
    "clip_high",
    "dual_clip",
    "out_of_band",
    "approx_kl",
    "approx_kl_k3",
    "kl",
    "entropy",
    "is_weight",
    "is_masked",
    "keep",
    "active",
    "is_tokens",
    "ratio_min",
    "ratio_max",
    "is_weight_max",
)
NSUMS = len(SUM_NAMES)
NEXTREMA = 3
_INDEX = {name: i for i, name in enumerate(SUM_NAMES)}
#: counts that the caller knows; they follow the sums in `Metrics.totals`
_COUNTS = ("kl_tokens", "entropy_tokens", "weight", "sequences")
_TOTAL = {name: i for i, name in enumerate((*SUM_NAMES[:-NEXTREMA], *_COUNTS))}

#: metric -> (name in totals, name of the count that divides it)
_MEANS = {
    "ratio_mean": ("ratio", "tokens"),
    "clip_frac_low": ("clip_low", "tokens"),
    "clip_frac_high": ("clip_high", "tokens"),
    "dual_clip_frac": ("dual_clip", "tokens"),
    "out_of_band_frac": ("out_of_band", "tokens"),
    "keep_frac": ("keep", "tokens"),
    "approx_kl": ("approx_kl", "tokens"),
    "approx_kl_k3": ("approx_kl_k3", "tokens"),
    "kl": ("kl", "kl_tokens"),
    "entropy": ("entropy", "entropy_tokens"),
    "is_weight_mean": ("is_weight", "is_tokens"),
    "is_masked_frac": ("is_masked", "is_tokens"),
}
_EXTREMA = {"ratio_min": ("tokens", 0), "ratio_max": ("tokens", 1), "is_weight_max": ("is_tokens", 2)}
_PLAIN = {"tokens": "tokens", "sequences": "sequences", "active_tokens": "active"}

#: keys of `Metrics`, in order
METRIC_NAMES = (
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "clip_frac",
    "clip_frac_low",
    "clip_frac_high",
    "dual_clip_frac",
    "out_of_band_frac",
    "keep_frac",
    "approx_kl",
    "approx_kl_k3",
    "kl",
    "entropy",
    "is_weight_mean",
    "is_weight_max",
    "is_masked_frac",
    "tokens",
    "sequences",
    "active_tokens",
)


class Metrics(Mapping[str, Tensor]):
    """Name -> 0-d tensor over the selected tokens; nothing is read back to the host until a value is.

    Ratios and the two `approx_kl` use the log-ratio after its clamp, at the loss's own level, so that every reported
    pair satisfies ratio = exp(log-ratio). `clip_frac*` are directional (r > clip_high with A > 0, r < clip_low with
    A < 0); `out_of_band_frac` is not. Means carry their counts: `merge` is exact. Means and extrema of nothing are 0.
    """

    def __init__(self, totals: Tensor, extrema: Tensor) -> None:
        self.totals = totals
        self.extrema = extrema

    @classmethod
    def from_sums(cls, sums: Tensor, weight: Tensor, sequences: Tensor, *, has_kl: bool, has_entropy: bool) -> Metrics:
        """Metrics of one call from the vector of a backend."""
        tokens = sums[_INDEX["tokens"]][None]
        # flags copied from the host would wait for the GPU, and break the capture of a CUDA graph
        none = torch.zeros_like(tokens)
        counts = (tokens if has_kl else none, tokens if has_entropy else none, weight.to(sums)[None])
        return cls(torch.cat([sums[:-NEXTREMA], *counts, sequences.to(sums)[None]]), sums[-NEXTREMA:])

    @classmethod
    def empty(cls) -> Metrics:
        """No metrics at all (`metrics="none"`)."""
        return cls(torch.empty(0), torch.empty(0))

    def merge(self, *others: Metrics) -> Metrics:
        """Metrics of the union of several calls: sums and counts add, extrema stay extrema; no metrics add nothing."""
        parts = [m for m in (self, *others) if m.totals.numel()]
        if not parts:
            return self
        totals = torch.stack([m.totals.double() for m in parts]).sum(0).to(parts[0].totals.dtype)
        extrema = torch.stack([m.extrema for m in parts])
        return Metrics(totals, torch.stack([extrema[:, 0].amin(), extrema[:, 1].amax(), extrema[:, 2].amax()]))

    def _total(self, name: str) -> Tensor:
        return self.totals[_TOTAL[name]]

    def __getitem__(self, name: str) -> Tensor:
        if name not in METRIC_NAMES or self.totals.numel() == 0:
            raise KeyError(name)
        if name == "clip_frac":
            return (self._total("clip_low") + self._total("clip_high")) / self._total("tokens").clamp(min=1)
        if name in _MEANS:
            total, count = _MEANS[name]
            return self._total(total) / self._total(count).clamp(min=1)
        if name in _EXTREMA:
            count, i = _EXTREMA[name]
            return torch.where(self._total(count) > 0, self.extrema[i], 0.0)
        return self._total(_PLAIN[name])

    def __iter__(self) -> Iterator[str]:
        return iter(METRIC_NAMES if self.totals.numel() else ())

    def __len__(self) -> int:
        return len(METRIC_NAMES) if self.totals.numel() else 0

    def to_dict(self) -> dict[str, float]:
        """Plain floats; reads the device once."""
        if len(self) == 0:
            return {}
        values = torch.stack([self[name].double() for name in self]).tolist()
        return dict(zip(self, values, strict=True))

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{k}={v:.6g}' for k, v in self.to_dict().items())})"
