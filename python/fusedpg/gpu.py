"""The Triton backend: plans launches over `fusedpg.kernels`, never synchronises with the host.

Works on CUDA, ROCm and XPU tensors, and on CPU tensors when Triton interprets (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor

try:
    import triton
except ImportError as error:
    raise ImportError(
        f"fusedpg: Triton, which compiles the GPU kernels, cannot be imported: {error}; pip install 'triton>=3.6' "
        "(triton-windows on Windows), or use backend='cpu' or backend='reference'"
    ) from error

if sys.version_info < (3, 11) and os.environ.get("TRITON_INTERPRET") == "1":
    # The interpreter puts print in a builtin's place while it runs, and imports this module in there; Python 3.10 knows
    # no signature of print, so the module must have been imported before.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")

from fusedpg.kernels import distill as divergences
from fusedpg.kernels import launch, logprob, one_pass, rescale, segments
from fusedpg.kernels import token_loss as tokens
from fusedpg.kernels.arguments import Rows, Statistics, Tokens, aligned_base
from fusedpg.spec import STREAMS

__all__ = [
    "distill",
    "ensure_available",
    "logprob_backward",
    "logprob_forward",
    "loss_forward",
    "rescale_",
    "token_loss",
]


def ensure_available() -> None:
    """Raise ImportError, with the fix, where the kernels cannot run at all."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        raise ImportError(f"triton 3.6 or newer is needed, got {triton.__version__}: pip install -U triton")
    if not isinstance(logprob.logprob_forward_kernel, _interpreted()) and not torch.accelerator.is_available():
        raise ImportError(
            "there is no GPU: use backend='cpu', or set TRITON_INTERPRET=1 before fusedpg is imported to run the "
            "kernels in Triton's interpreter"
        )


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
    _check_device(logits)
    rows = Rows(logits, targets, active, None, row_temperature, temperature, softcap, logit_scale)
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
    _check_device(logits)
    rows = Rows(logits, targets, None, None, row_temperature, temperature, softcap, logit_scale)
    with _on(logits):
        _backward(rows, row_max, log_sum, entropy, c, e, None, out)


def token_loss(
    spec: list[float],
    logp: Tensor,
    entropy: Tensor | None,
    w: Tensor,
    streams: list[Tensor | None],
    cu: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stage B alone -> (per_token, c, e, sums); c and e times `scale`, e empty when the spec has no entropy.

    `streams` are the tensors of `fusedpg.spec.STREAMS`; `cu` bounds the sequences where `segments_needed(spec)`.
    """
    _check_device(logp)
    b = Tokens(spec, w, streams, cu, logp.device)
    with _on(logp):
        if b.has_segments:
            _segments(b, logp)
        per_token, c, e, sums = _token_loss(b, logp, entropy)
        if scale is not None:
            c, e = c.mul_(scale), e.mul_(scale)
        return per_token, c, e, sums


def loss_forward(
    spec: list[float],
    logits: Tensor,
    targets: Tensor,
    w: Tensor,
    scale: Tensor,
    streams: list[Tensor | None],
    cu: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float,
    logit_scale: float,
    want_entropy: bool,
    grad_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Stages A and B, and C into `grad_out` -> (logp, entropy, row_max, log_sum, per_token, c, e, sums)."""
    _check_device(logits)
    observed = streams[STREAMS.index("obs_weights")]
    rows = Rows(logits, targets, w, observed, row_temperature, temperature, softcap, logit_scale)
    b = Tokens(spec, w, streams, cu, logits.device)
    want_entropy = want_entropy or b.has_entropy_term
    with _on(logits):
        one_launch = not b.has_segments and not rows.split
        if grad_out is not None and one_launch:
            stats = _one_pass(rows, b, want_entropy, scale, grad_out)
        elif b.has_segments and not rows.split:
            stats = _sequence_forward(rows, b, want_entropy)
        else:
            stats = _forward(rows, want_entropy)
            if b.has_segments:
                _segments(b, stats.logp)
        entropy = stats.entropy if want_entropy else None
        per_token, c, e, sums = _token_loss(b, stats.logp, entropy)
        if grad_out is not None and not one_launch:
            e_term = e if b.has_entropy_term else None
            h_term = entropy if b.has_entropy_term else None
            _backward(rows, stats.row_max, stats.log_sum, h_term, c, e_term, scale, grad_out)
    return (*stats.public(), per_token, c, e, sums)


def distill(
    student: Tensor,
    teacher: Tensor,
    w: Tensor,
    scale: Tensor,
    kind: int,
    beta: float,
    temperature: float,
    teacher_temperature: float,
    grad_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence, student entropy, teacher entropy) of every row; the gradient times w*scale into `grad_out`."""
    _check_device(student)
    batch, length, vocab = student.shape
    rows = tuple(torch.empty_like(w) for _ in range(3))
    if batch * length == 0:
        return rows  # type: ignore[return-value]
    x, shift = aligned_base(student)
    y, y_shift = aligned_base(teacher)
    constants = {"KIND": kind, "GRAD": grad_out is not None}
    with _on(student):
        divergences.distill_kernel[(batch * length,)](
            x_ptr=x,
            y_ptr=y,
            **_out_arguments(student if grad_out is None else grad_out),
            w_ptr=w,
            scale_ptr=scale,
            value_ptr=rows[0],
            student_entropy_ptr=rows[1],
            teacher_entropy_ptr=rows[2],
            T=length,
            V=vocab,
            stride_b=student.stride(0),
            stride_t=student.stride(1),
            shift=shift,
            y_stride_b=teacher.stride(0),
            y_stride_t=teacher.stride(1),
            y_shift=y_shift,
            temperature=temperature,
            teacher_temperature=teacher_temperature,
            beta=beta,
            BLOCK=launch.PAIRS.block,
            **constants,
            **launch.options(launch.PAIRS, student.device, constants),
        )
    return rows  # type: ignore[return-value]


def _check_device(tensor: Tensor) -> None:
    if tensor.device.type == "cpu" and not isinstance(logprob.logprob_forward_kernel, _interpreted()):
        raise RuntimeError(
            "the triton backend got CPU tensors: move them to a GPU, use backend='cpu', or set TRITON_INTERPRET=1 "
            "before fusedpg is imported to run the kernels in Triton's interpreter"
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


def rescale_(grad: Tensor, factor: Tensor) -> None:
    """`grad *= factor` for a gradient (B, T, V) of ours; where the device finds factor 1 it moves nothing."""
    batch, length, vocab = grad.shape
    if grad.numel() == 0:
        return
    _check_device(grad)
    chunks = triton.cdiv(vocab, launch.VOCABULARY.chunk)
    with _on(grad):
        rescale.rescale_kernel[(batch * length * chunks,)](
            **_out_arguments(grad),
            scale_ptr=factor.to(torch.float32),
            T=length,
            V=vocab,
            chunks=chunks,
            **_loop(),
            **launch.options(launch.VOCABULARY, grad.device, {}),
        )


# ---------------------------------------------------------------- launches


def _loop() -> dict[str, int]:
    return {"BLOCK": launch.VOCABULARY.block, "CHUNK": launch.VOCABULARY.chunk}


def _forward(rows: Rows, want_entropy: bool) -> Statistics:
    """Stage A, one program a row or, for few rows, one a chunk."""
    stats = Statistics.empty(rows, want_entropy)
    if rows.N == 0:
        return stats
    row = {**rows.arguments(), **rows.weights(), "given": rows.given | stats.given}
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


def _sequence_forward(rows: Rows, b: Tokens, want_entropy: bool) -> Statistics:
    """Stage A and what a sequence's tokens share in one launch."""
    assert b.cu is not None
    stats = Statistics.empty(rows, want_entropy)
    sequences = b.cu.numel() - 1
    if sequences < 1:
        return _forward(rows, want_entropy)
    arguments = {**rows.arguments(), **b.arguments(), **b.shared(), **stats.arguments()}
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


def _one_pass(rows: Rows, b: Tokens, want_entropy: bool, scale: Tensor, out: Tensor) -> Statistics:
    """Stages A, B and C of a loss without sums over sequences in one launch."""
    stats = Statistics.empty(rows, want_entropy)
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
    rows: Rows,
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
    base, shift = aligned_base(out)
    return {"out_ptr": base, "out_stride_b": out.stride(0), "out_stride_t": out.stride(1), "out_shift": shift}


def _segments(b: Tokens, logp: Tensor) -> None:
    """What every sequence's tokens share, from finished log-probabilities."""
    assert b.cu is not None
    sequences = b.cu.numel() - 1
    if sequences < 1:
        return
    segments.segments_kernel[(sequences,)](
        **b.arguments(),
        **b.shared(),
        logp_ptr=logp,
        cu_ptr=b.cu,
        N=b.N,
        given=b.given,
        TOKENS=launch.SEQUENCE.block,
        **launch.options(launch.SEQUENCE, logp.device),
    )


def _token_loss(b: Tokens, logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, c, e and the sums, whatever a sequence's tokens share being known."""
    per_token, c = torch.empty_like(b.w), torch.empty_like(b.w)
    e = torch.empty_like(b.w) if b.has_entropy_term else b.w.new_empty(0)
    sums = torch.empty(tokens.NSUMS, dtype=torch.float32, device=logp.device)
    blocks = triton.cdiv(b.N, launch.TOKENS.block)
    partial = torch.empty(max(blocks, 1), tokens.WIDTH, dtype=torch.float64, device=logp.device)
    if blocks == 0:
        sums.zero_()
        sums[-3] = torch.inf
        sums[-2:] = -torch.inf
        return per_token, c, e, sums
    tokens.token_block_kernel[(blocks,)](
        **b.arguments(),
        **b.shared(),
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
