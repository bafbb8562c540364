"""The Triton backend: plans launches over `fusedpg.kernels`, never synchronises with the host.

Works on CUDA, ROCm and XPU tensors, and on CPU tensors when Triton interprets (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fusedpg.kernels import launch, logprob, one_pass, segments, token_loss as tokens

from .spec import Level

__all__ = ["logprob_forward", "logprob_backward", "token_loss", "loss_forward"]

_LEVEL, _ENTROPY_COEF = 1, 18
_STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def logprob_forward(
    logits: Tensor,
    targets: Tensor,
    active: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stage A -> (logp, entropy, row_max, log_sum), fp32 (N,) each; entropy is empty when not wanted."""
    w = None if active is None else active.to(torch.float32)
    rows = _Rows(logits, targets, w, row_temperature, temperature, softcap, logit_scale)
    with _on(logits):
        return _forward(rows, want_entropy).public()


def logprob_backward(
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    c: Tensor,
    e: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    logit_scale: float,
    out: Tensor,
) -> None:
    """Stage C: write c*dlogp/dlogits + e*dH/dlogits to `out`, which may be `logits` itself."""
    rows = _Rows(logits, targets, None, row_temperature, temperature, softcap, logit_scale)
    with _on(logits):
        _backward(rows, row_max, log_sum, entropy, c, e, None, out)


def token_loss(
    spec: list[float],
    logp: Tensor,
    entropy: Tensor | None,
    w: Tensor,
    advantages: Tensor,
    logp_old: Tensor | None,
    logp_ref: Tensor | None,
    logp_rollout: Tensor | None,
    is_weights: Tensor | None,
    cu: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stage B alone -> (per_token, c, e, sums); c and e without the scale, e empty when the spec has no entropy."""
    _check_device(logp)
    b = _Tokens(spec, w, advantages, logp_old, logp_ref, logp_rollout, is_weights, cu, logp.device)
    with _on(logp):
        if b.sequence_level:
            _sequence_means(b, logp)
        return _token_loss(b, logp, entropy)


def loss_forward(
    spec: list[float],
    logits: Tensor,
    targets: Tensor,
    w: Tensor,
    scale: Tensor,
    advantages: Tensor,
    logp_old: Tensor | None,
    logp_ref: Tensor | None,
    logp_rollout: Tensor | None,
    is_weights: Tensor | None,
    cu: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    logit_scale: float,
    want_entropy: bool,
    grad_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Stages A and B, and C into `grad_out` -> (logp, entropy, row_max, log_sum, per_token, c, e, sums)."""
    rows = _Rows(logits, targets, w, row_temperature, temperature, softcap, logit_scale)
    b = _Tokens(spec, w, advantages, logp_old, logp_ref, logp_rollout, is_weights, cu, logits.device)
    want_entropy = want_entropy or b.has_entropy_term
    with _on(logits):
        pass_c = grad_out is not None
        if rows.split or (not b.sequence_level and grad_out is None):
            stats = _forward(rows, want_entropy)
            if b.sequence_level:
                _sequence_means(b, stats.logp)
        elif b.sequence_level:
            stats = _sequence_forward(rows, b, want_entropy)
        else:
            stats = _one_pass(rows, b, want_entropy, scale, grad_out)
            pass_c = False
        entropy = stats.entropy if want_entropy else None
        per_token, c, e, sums = _token_loss(b, stats.logp, entropy)
        if pass_c:
            e_term = e if b.has_entropy_term else None
            h_term = entropy if b.has_entropy_term else None
            _backward(rows, stats.row_max, stats.log_sum, h_term, c, e_term, scale, grad_out)
    return (*stats.public(), per_token, c, e, sums)


# ---------------------------------------------------------------- arguments


class _Rows:
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
                f"logits: the triton backend computes in fp32 and takes float32, bfloat16 or float16, got {logits.dtype}; "
                "use backend='reference' (or 'cpu' for CPU tensors) for float64"
            )
        _check_device(logits)
        batch, self.T, self.V = logits.shape
        self.N = batch * self.T
        self.device = logits.device
        self.logits, self.targets, self.w, self.row_temperature = logits, targets, w, row_temperature
        self.chunks = max(1, triton.cdiv(self.V, launch.VOCABULARY.chunk))
        self.split = launch.split_rows(self.N, self.chunks, self.device)
        self.softcap = float(softcap)
        self.map = {"temperature": float(temperature), "softcap": self.softcap, "logit_scale": float(logit_scale)}
        self.base, shift = _aligned_base(logits)
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
        w = 0 if self.w is None else launch.HAS_W
        return w | (0 if self.row_temperature is None else launch.HAS_ROW_TEMPERATURE)

    def flags(self, entropy: bool) -> dict[str, Any]:
        """The compile-time choices of a vocabulary kernel."""
        constants = {"ENTROPY": entropy, "SOFTCAP": self.softcap > 0.0}
        return {**constants, **launch.options(launch.VOCABULARY, self.device, constants)}


class _Tokens:
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
        self.w, self.cu, self.N = w, cu, w.numel()
        self.sequence_level = spec[_LEVEL] != Level.TOKEN and self.N > 0
        self.has_entropy_term = spec[_ENTROPY_COEF] != 0.0
        if self.sequence_level and cu is None:
            raise ValueError("cu: a sequence-level loss needs the sequence bounds, got None")
        self.given = 0
        optional = {
            "logp_old_ptr": (logp_old, launch.HAS_LOGP_OLD),
            "logp_ref_ptr": (logp_ref, launch.HAS_LOGP_REF),
            "logp_rollout_ptr": (logp_rollout, launch.HAS_LOGP_ROLLOUT),
            "is_weights_ptr": (is_weights, launch.HAS_IS_WEIGHTS),
        }
        self.tensors: dict[str, Any] = {"spec_ptr": _spec_tensor(tuple(spec), device), "adv_ptr": advantages}
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
class _Statistics:
    """The outputs of stage A; `entropy` stands on another tensor where it is not wanted."""

    logp: Tensor
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor
    has_entropy: bool

    @classmethod
    def empty(cls, rows: _Rows, want_entropy: bool) -> _Statistics:
        new = functools.partial(torch.empty, rows.N, dtype=torch.float32, device=rows.device)
        logp = new()
        return cls(logp, new() if want_entropy else logp, new(), new(), want_entropy)

    def arguments(self) -> dict[str, Any]:
        return {
            "logp_ptr": self.logp,
            "entropy_ptr": self.entropy,
            "row_max_ptr": self.row_max,
            "log_sum_ptr": self.log_sum,
        }

    @property
    def given(self) -> int:
        return launch.HAS_ENTROPY if self.has_entropy else 0

    def public(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = self.entropy if self.has_entropy else self.logp.new_empty(0)
        return self.logp, entropy, self.row_max, self.log_sum


@functools.lru_cache(maxsize=256)
def _spec_tensor(spec: tuple[float, ...], device: torch.device) -> Tensor:
    """The spec on the device, copied there once."""
    return torch.tensor(spec, dtype=torch.float32, device=device)


def _aligned_base(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor that begins at the 16-byte boundary at or before `tensor`, and the elements between the two.

    Triton compiles for the alignment of a pointer; a view at an odd offset would get the slow code of an odd address.
    """
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    if shift > tensor.storage_offset() or tensor.data_ptr() % tensor.element_size():
        return tensor, 0
    return tensor.as_strided((1,), (1,), tensor.storage_offset() - shift), shift


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and not isinstance(logprob.logprob_forward_kernel, _interpreted()):
        raise RuntimeError(
            "the triton backend got CPU tensors: move them to a GPU, use backend='cpu', or set TRITON_INTERPRET=1 before "
            "fusedpg is imported to run the kernels in Triton's interpreter"
        )


@functools.cache
def _interpreted() -> type:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The tensor's device as the current one, for the launches inside."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(tensor.device.type).device(tensor.device)


# ---------------------------------------------------------------- launches


def _loop() -> dict[str, int]:
    return {"BLOCK": launch.VOCABULARY.block, "CHUNK": launch.VOCABULARY.chunk}


def _forward(rows: _Rows, want_entropy: bool) -> _Statistics:
    """Stage A, one program a row or, for few rows, one a chunk."""
    stats = _Statistics.empty(rows, want_entropy)
    if rows.N == 0:
        return stats
    row = {**rows.arguments(), "w_ptr": rows.weights(), "given": rows.given | stats.given}
    outputs = {"target_ptr": rows.targets, **stats.arguments()}
    flags = rows.flags(want_entropy)
    if not rows.split:
        logprob.logprob_forward_kernel[(rows.N,)](**row, **outputs, **_loop(), **flags)
        return stats
    parts = torch.empty(3, rows.N * rows.chunks, dtype=torch.float32, device=rows.device)
    states = {"part_max_ptr": parts[0], "part_sum_ptr": parts[1], "part_entropy_ptr": parts[2], "chunks": rows.chunks}
    logprob.logprob_split_kernel[(rows.N * rows.chunks,)](**row, **states, **_loop(), **flags)
    logprob.logprob_combine_kernel[(rows.N,)](**row, **outputs, **states, **flags)
    return stats


def _sequence_forward(rows: _Rows, b: _Tokens, want_entropy: bool) -> _Statistics:
    """Stage A and the sequence means in one launch."""
    assert b.cu is not None
    stats = _Statistics.empty(rows, want_entropy)
    sequences = b.cu.numel() - 1
    if sequences < 1:
        return _forward(rows, want_entropy)
    arguments = {**rows.arguments(), **b.arguments(), **b.means(), **stats.arguments()}
    one_pass.sequence_forward_kernel[(rows.N,)](
        **arguments,
        target_ptr=rows.targets,
        cu_ptr=b.cu,
        counter_ptr=torch.zeros(sequences, dtype=torch.int32, device=rows.device),
        N=rows.N,
        S=sequences,
        given=rows.given | b.given | stats.given,
        TOKENS=launch.SEQUENCE.block,
        **_loop(),
        **rows.flags(want_entropy),
    )
    return stats


def _one_pass(rows: _Rows, b: _Tokens, want_entropy: bool, scale: Tensor, out: Tensor) -> _Statistics:
    """Stages A, B and C of a token-level loss in one launch."""
    stats = _Statistics.empty(rows, want_entropy)
    if rows.N == 0:
        return stats
    one_pass.one_pass_kernel[(rows.N,)](
        **rows.arguments(),
        **b.arguments(),
        **stats.arguments(),
        **_out_arguments(out),
        target_ptr=rows.targets,
        scale_ptr=scale,
        given=rows.given | b.given | stats.given | launch.HAS_SCALE,
        **_loop(),
        **rows.flags(want_entropy),
    )
    return stats


def _backward(
    rows: _Rows,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    c: Tensor,
    e: Tensor | None,
    scale: Tensor | None,
    out: Tensor,
) -> None:
    """Stage C, one program a (row, chunk)."""
    if rows.N == 0:
        return
    has_entropy = e is not None
    logprob.logprob_backward_kernel[(rows.N * rows.chunks,)](
        **rows.arguments(),
        **_out_arguments(out),
        target_ptr=rows.targets,
        row_max_ptr=row_max,
        log_sum_ptr=log_sum,
        entropy_ptr=entropy if has_entropy else c,
        c_ptr=c,
        e_ptr=e if has_entropy else c,
        scale_ptr=c if scale is None else scale,
        chunks=rows.chunks,
        given=rows.given | (0 if scale is None else launch.HAS_SCALE),
        **_loop(),
        **rows.flags(has_entropy),
    )


def _out_arguments(out: Tensor) -> dict[str, Any]:
    base, shift = _aligned_base(out)
    return {"out_ptr": base, "out_stride_b": out.stride(0), "out_stride_t": out.stride(1), "out_shift": shift}


def _sequence_means(b: _Tokens, logp: Tensor) -> None:
    """z and D of every sequence from finished log-probabilities."""
    assert b.cu is not None
    sequences = b.cu.numel() - 1
    if sequences < 1:
        return
    segments.segments_kernel[(sequences,)](
        **b.arguments(),
        **b.means(),
        logp_ptr=logp,
        cu_ptr=b.cu,
        N=b.N,
        given=b.given,
        TOKENS=launch.SEQUENCE.block,
        **launch.options(launch.SEQUENCE, logp.device),
    )


def _token_loss(b: _Tokens, logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, c, e and the sums, the sequence means being known."""
    per_token, c = torch.empty_like(b.w), torch.empty_like(b.w)
    e = torch.empty_like(b.w) if b.has_entropy_term else b.w.new_empty(0)
    sums = torch.empty(tokens.NSUMS, dtype=torch.float32, device=logp.device)
    blocks = triton.cdiv(b.N, launch.TOKENS.block)
    partial = torch.empty(max(blocks, 1), tokens.WIDTH, dtype=torch.float64, device=logp.device)
    if blocks == 0:
        sums.zero_()
        sums[15] = torch.inf
        sums[16:] = -torch.inf
        return per_token, c, e, sums
    tokens.token_block_kernel[(blocks,)](
        **b.arguments(),
        **b.means(),
        logp_ptr=logp,
        entropy_ptr=logp if entropy is None else entropy,
        per_token_ptr=per_token,
        c_ptr=c,
        e_ptr=e if b.has_entropy_term else c,
        partial_ptr=partial,
        N=b.N,
        given=b.given | (0 if entropy is None else launch.HAS_ENTROPY),
        BLOCK=launch.TOKENS.block,
        **launch.options(launch.TOKENS, logp.device),
    )
    tokens.token_finish_kernel[(1,)](
        partial_ptr=partial,
        sums_ptr=sums,
        blocks=blocks,
        BLOCK=launch.FINISH.block,
        **launch.options(launch.FINISH, logp.device),
    )
    return per_token, c, e, sums
