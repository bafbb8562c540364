"""The kernels' arguments as tensors and numbers: what is optional, aligned, strided or shared between launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fusedpg.spec import ENTROPY_COEF, segments_needed

from . import launch

_STORAGE = (torch.float32, torch.bfloat16, torch.float16)


class Rows:
    """The logits as the kernels see them: an aligned base, strides, and what maps a logit."""

    def __init__(
        self,
        logits: Tensor,
        targets: Tensor,
        w: Tensor | None,
        obs_weights: Tensor | None,
        row_temperature: Tensor | None,
        temperature: float,
        softcap: float,
        logit_scale: float,
    ) -> None:
        if logits.dtype not in _STORAGE:
            raise TypeError(
                f"logits: the triton backend takes float32, bfloat16 or float16, got {logits.dtype}; "
                "use backend='reference' (or 'cpu' for CPU tensors) for float64"
            )
        batch, self.T, self.V = logits.shape
        self.N = batch * self.T
        self.device = logits.device
        self.logits, self.targets, self.row_temperature = logits, targets, row_temperature
        self.w = None if w is None else w.to(torch.float32)
        self.obs_weights = obs_weights
        self.chunks = max(1, triton.cdiv(self.V, launch.VOCABULARY.chunk))
        self.split = launch.split_rows(self.N, self.chunks, self.device)
        self.softcap = float(softcap)
        self.map = {"temperature": float(temperature), "softcap": self.softcap, "logit_scale": float(logit_scale)}
        self.base, shift = aligned_base(logits)
        self.place = {
            "T": self.T,
            "V": self.V,
            "stride_b": logits.stride(0),
            "stride_t": logits.stride(1),
            "shift": shift,
        }

    def arguments(self) -> dict[str, Any]:
        """What every vocabulary kernel takes."""
        dummy = self.targets.view(torch.float32)
        temperature = dummy if self.row_temperature is None else self.row_temperature
        return {"x_ptr": self.base, "row_temperature_ptr": temperature, **self.place, **self.map}

    def weights(self) -> dict[str, Tensor]:
        """What decides which rows are read; a stand-in that is not read for a missing one."""
        dummy = self.targets.view(torch.float32)
        return {
            "w_ptr": dummy if self.w is None else self.w,
            "obs_weights_ptr": dummy if self.obs_weights is None else self.obs_weights,
        }

    @property
    def given(self) -> int:
        """Which of the optional tensors there are."""
        flags = {
            launch.HAS_W: self.w,
            launch.HAS_OBS_WEIGHTS: self.obs_weights,
            launch.HAS_ROW_TEMPERATURE: self.row_temperature,
        }
        return sum(flag for flag, tensor in flags.items() if tensor is not None)

    def flags(self, entropy: bool) -> dict[str, Any]:
        """The compile-time choices of a vocabulary kernel."""
        constants = {"ENTROPY": entropy, "SOFTCAP": self.softcap > 0.0}
        return {**constants, **launch.options(launch.VOCABULARY, self.device, constants)}


#: per-token constants of stage B in the order of `fusedpg.spec.STREAMS`: argument and flag
_STREAMS = (
    ("adv_ptr", 0),
    ("logp_old_ptr", launch.HAS_LOGP_OLD),
    ("logp_ref_ptr", launch.HAS_LOGP_REF),
    ("logp_rollout_ptr", launch.HAS_LOGP_ROLLOUT),
    ("is_weights_ptr", launch.HAS_IS_WEIGHTS),
    ("obs_weights_ptr", launch.HAS_OBS_WEIGHTS),
    ("selected_ptr", launch.HAS_SELECTED),
)


class Tokens:
    """The per-token inputs of stage B; a tensor that was not given is stood in for by `w` and not read."""

    def __init__(
        self,
        spec: list[float],
        w: Tensor,
        streams: list[Tensor | None],
        cu: Tensor | None,
        device: torch.device,
    ) -> None:
        w = w.to(torch.float32)
        self.w, self.cu, self.N = w, cu, w.numel()
        self.has_segments = segments_needed(spec) and self.N > 0
        self.has_entropy_term = spec[ENTROPY_COEF] != 0.0
        if self.has_segments and cu is None:
            raise ValueError("cu: the loss sums over sequences and needs their bounds, got None")
        self.given = launch.HAS_SEGMENTS if self.has_segments else 0
        self.tensors: dict[str, Any] = {"spec_ptr": spec_tensor(tuple(spec), device)}
        for (name, flag), tensor in zip(_STREAMS, streams, strict=True):
            self.given |= 0 if tensor is None else flag
            self.tensors[name] = w if tensor is None else tensor
        # neutral, so that a token of no sequence is defined
        shape = (self.N if self.has_segments else 0,)
        self.z, self.adjoint, self.factor = w.new_zeros(shape), w.new_zeros(shape), w.new_ones(shape)

    def arguments(self) -> dict[str, Any]:
        """What every kernel of stage B takes."""
        return {**self.tensors, "w_ptr": self.w}

    def shared(self) -> dict[str, Any]:
        """Where the values that a sequence's tokens share live."""
        if not self.has_segments:
            return {"z_ptr": self.w, "adjoint_ptr": self.w, "factor_ptr": self.w}
        return {"z_ptr": self.z, "adjoint_ptr": self.adjoint, "factor_ptr": self.factor}


@dataclass
class Statistics:
    """The outputs of stage A; `entropy` stands on another tensor where it is not wanted."""

    logp: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    has_entropy: bool

    @classmethod
    def empty(cls, rows: Rows, want_entropy: bool) -> Statistics:
        """Room for the outputs of a launch."""
        new = functools.partial(torch.empty, rows.N, dtype=torch.float32, device=rows.device)
        logp = new()
        return cls(logp, new() if want_entropy else logp, new(), new(), want_entropy)

    def arguments(self) -> dict[str, Any]:
        """Where stage A writes."""
        return {
            "logp_ptr": self.logp,
            "entropy_ptr": self.entropy,
            "row_max_ptr": self.row_max,
            "log_sum_ptr": self.log_sum,
        }

    @property
    def given(self) -> int:
        """Whether the entropy is wanted, as a flag."""
        return launch.HAS_ENTROPY if self.has_entropy else 0

    def public(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logp, entropy or an empty tensor, row_max, log_sum)."""
        entropy = self.entropy if self.has_entropy else self.logp.new_empty(0)
        return self.logp, entropy, self.row_max, self.log_sum


@functools.lru_cache(maxsize=256)
def spec_tensor(spec: tuple[float, ...], device: torch.device) -> Tensor:
    """The spec on the device, copied there once."""
    return torch.tensor(spec, dtype=torch.float32, device=device)


def aligned_base(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor that begins at the 16-byte boundary at or before `tensor`, and the elements between the two.

    Triton compiles for the alignment of a pointer; a view at an odd offset would get the slow code of an odd address.
    """
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    if tensor.numel() == 0 or shift > tensor.storage_offset() or tensor.data_ptr() % tensor.element_size():
        return tensor, 0
    return tensor.as_strided((1,), (1,), tensor.storage_offset() - shift), shift
