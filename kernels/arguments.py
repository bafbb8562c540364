"""The kernels' arguments as tensors and numbers: what is optional, aligned, strided or shared between launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fusedpg.spec import ENTROPY_COEF, LEVEL, Level

from . import launch

_STORAGE = (torch.float32, torch.bfloat16, torch.float16)


class Rows:
    """The logits as the kernels see them: an aligned base, strides, and what maps a logit."""

    def __init__(
        self,
        logits: Tensor,
        targets: Tensor,
        w: Tensor | None,
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

    def weights(self) -> Tensor:
        """The rows' weights, or a stand-in that is not read."""
        return self.targets.view(torch.float32) if self.w is None else self.w

    @property
    def given(self) -> int:
        """Which of the optional tensors there are."""
        w = 0 if self.w is None else launch.HAS_W
        return w | (0 if self.row_temperature is None else launch.HAS_ROW_TEMPERATURE)

    def flags(self, entropy: bool) -> dict[str, Any]:
        """The compile-time choices of a vocabulary kernel."""
        constants = {"ENTROPY": entropy, "SOFTCAP": self.softcap > 0.0}
        return {**constants, **launch.options(launch.VOCABULARY, self.device, constants)}


class Tokens:
    """The per-token inputs of stage B; a tensor that was not given is stood in for by `w` and not read."""

    def __init__(
        self,
        spec: list[float],
        w: Tensor,
        advantages: Tensor,
        logp_old: Tensor | None,
        logp_ref: Tensor | None,
        logp_rollout: Tensor | None,
        is_weights: Tensor | None,
        cu: Tensor | None,
        device: torch.device,
    ) -> None:
        w = w.to(torch.float32)
        self.w, self.cu, self.N = w, cu, w.numel()
        self.sequence_level = spec[LEVEL] != Level.TOKEN and self.N > 0
        self.has_entropy_term = spec[ENTROPY_COEF] != 0.0
        if self.sequence_level and cu is None:
            raise ValueError("cu: a sequence-level loss needs the sequence bounds, got None")
        self.given = 0
        optional = {
            "logp_old_ptr": (logp_old, launch.HAS_LOGP_OLD),
            "logp_ref_ptr": (logp_ref, launch.HAS_LOGP_REF),
            "logp_rollout_ptr": (logp_rollout, launch.HAS_LOGP_ROLLOUT),
            "is_weights_ptr": (is_weights, launch.HAS_IS_WEIGHTS),
        }
        self.tensors: dict[str, Any] = {"spec_ptr": spec_tensor(tuple(spec), device), "adv_ptr": advantages}
        for name, (tensor, flag) in optional.items():
            self.given |= 0 if tensor is None else flag
            self.tensors[name] = w if tensor is None else tensor
        # sequence means; zeros, so that a token of no sequence is defined
        shape = (self.N if self.sequence_level else 0,)
        self.z, self.adjoint = w.new_zeros(shape), w.new_zeros(shape)

    def arguments(self) -> dict[str, Any]:
        """What every kernel of stage B takes."""
        return {**self.tensors, "w_ptr": self.w}

    def means(self) -> dict[str, Any]:
        """Where the sequence means live."""
        if not self.sequence_level:
            return {"z_ptr": self.w, "adjoint_ptr": self.w}
        return {"z_ptr": self.z, "adjoint_ptr": self.adjoint}


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
