"""The CPU backend: hands tensors to the C++ core as addresses, sizes and strides; allocates what it returns.

The core is compiled for several instruction sets and picks the best at run time; `FUSEDPG_CPU_ISA` (read at every call)
forces one of `available_isas()`. It runs on `torch.get_num_threads()` threads; results do not depend on their number.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch  # before the core: torch's OpenMP runtime is then the one that both use
from torch import Tensor

from .spec import ENTROPY_COEF, segments_needed

__all__ = [
    "available_isas",
    "distill",
    "ensure_available",
    "has_product",
    "isa",
    "logprob_backward",
    "logprob_forward",
    "loss_forward",
    "product",
    "token_loss",
    "want_huge_pages",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_NO_MATRIX = (0, 0, 0, 0, 0, 0)
_WORTH_A_THREAD = 16_384
_HUGE_PAGE = 2 << 20


@functools.cache
def _core() -> ModuleType:
    try:
        from . import _core as core
    except ImportError as error:
        raise ImportError(
            f"fusedpg: the compiled CPU core cannot be imported: {error}. Expected the extension module fusedpg._core. "
            "It is built by `pip install -e .` (or `pip install .`) with a C++17 compiler, unless FUSEDPG_NO_NATIVE=1 "
            "is set; backend='reference' needs no core."
        ) from error
    return core


def ensure_available() -> None:
    """Raise ImportError, saying why and how to fix it, when the compiled core cannot be imported."""
    _core()


def isa() -> str:
    """The build in use: "v4", "v3", "v2" (x86-64 levels), "v4bf16" (v4 with AVX512-BF16) or "generic"."""
    return str(_core().isa())


def available_isas() -> list[str]:
    """The values of FUSEDPG_CPU_ISA that this machine can run, best first."""
    return list(_core().available_isas())


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
    """Stage A: (logp, entropy, row_max, log_sum), each (N,); entropy is empty when not wanted."""
    rows = _new_rows(logits, want_entropy)
    logit_map = (_address(row_temperature), temperature, softcap, logit_scale)
    code, threads, matrix = _DTYPES[logits.dtype], _threads(logits.numel()), _matrix(logits)
    _core().logprob_forward(code, threads, matrix, targets.data_ptr(), _address(active), logit_map, _addresses(rows))
    return rows


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
    """Stage C: the gradient of `sum(c*logp + e*entropy)`, into `out`, which may be `logits` itself."""
    saved = (0, _address(entropy), row_max.data_ptr(), log_sum.data_ptr())
    logit_map = (_address(row_temperature), temperature, softcap, logit_scale)
    _core().logprob_backward(
        _DTYPES[logits.dtype],
        _threads(logits.numel()),
        _matrix(logits),
        targets.data_ptr(),
        saved,
        c.data_ptr(),
        _address(e),
        logit_map,
        _matrix(out),
    )


def token_loss(
    spec: list[float],
    logp: Tensor,
    entropy: Tensor | None,
    w: Tensor,
    streams: list[Tensor | None],
    cu: Tensor | None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stage B: (per_token, c, e, sums); c and e are multiplied by `scale`, e is empty without an entropy term.

    `streams` are the per-token constants in the order of `fusedpg.spec.STREAMS`.
    """
    mask = w if w.dtype == torch.bool and not segments_needed(spec) else None
    weights = None if mask is not None else w.to(logp.dtype)
    out = _new_token_outputs(spec, logp)
    code, threads = _DTYPES[logp.dtype], _threads(logp.numel())
    tokens = _tokens(logp.numel(), weights, streams, cu, mask)
    outputs = (*_addresses(out), 1.0 if scale is None else float(scale))
    _core().token_loss(code, threads, spec, logp.data_ptr(), _address(entropy), tokens, outputs)
    return out


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
    """Stages A and B, and with `grad_out` C: (logp, entropy, row_max, log_sum, per_token, c, e, sums).

    A loss that sums over sequences needs every logp of a sequence first and reads the logits twice; any other, once.
    """
    rows = _new_rows(logits, want_entropy or spec[ENTROPY_COEF] != 0)
    outputs = _new_token_outputs(spec, rows[0])
    weights = w.to(rows[0].dtype)  # alive until the core has returned
    _core().loss_forward(
        _DTYPES[logits.dtype],
        _threads(logits.numel()),
        spec,
        _matrix(logits),
        targets.data_ptr(),
        scale.data_ptr(),
        _tokens(rows[0].numel(), weights, streams, cu),
        (_address(row_temperature), temperature, softcap, logit_scale),
        _addresses(rows),
        (*_addresses(outputs), 1.0),
        _NO_MATRIX if grad_out is None else _matrix(grad_out),
    )
    return (*rows, *outputs)


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
    rows = tuple(torch.empty_like(w) for _ in range(3))
    _core().distill(
        (_DTYPES[student.dtype], _DTYPES[teacher.dtype]),
        _threads(student.numel()),
        _matrix(student),
        _matrix(teacher),
        (kind, beta, temperature, teacher_temperature, float(scale)),
        w.data_ptr(),
        _addresses(rows),
        _NO_MATRIX if grad_out is None else _matrix(grad_out),
    )
    return rows  # type: ignore[return-value]


def has_product() -> bool:
    """Whether the core is there and its build in use multiplies 16-bit operands ("v4bf16").

    A FUSEDPG_CPU_ISA that names no build is refused by the call that computes.
    """
    with contextlib.suppress(ImportError, ValueError):
        return bool(_core().has_product())
    return False


def want_huge_pages(fresh: Tensor) -> Tensor:
    """The same tensor, its memory not touched yet, to be mapped in huge pages as it is written; a hint."""
    with contextlib.suppress(ImportError):
        _core().want_huge_pages(fresh.data_ptr(), fresh.untyped_storage().nbytes())
    return fresh


def product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, keep: Tensor | None = None) -> None:
    """fp32 `out` = a @ b, or += a @ b, of bf16 operands; one in fp32 is rounded to bf16 as it is read.

    `out` in bf16 is the sum rounded once; nothing can be added to it. A row of `out` has the same bits whatever rows
    and columns come with it. With `keep` (int64) it is a[keep] @ b, or a[:, keep] @ b where `a` is a transposed view:
    of the rows in memory only those are read.
    """
    assert out.dtype == torch.float32 or (out.dtype == torch.bfloat16 and not add)
    assert out.stride(1) == 1
    (left, (dtype, data, *sizes, lane_stride, depth_stride)), right = _operand(a), _operand(b.t())
    if keep is not None:
        assert left is a
        assert keep.dtype == torch.int64
        assert keep.is_contiguous()
        sizes[0 if depth_stride == 1 else 1] = keep.numel()
    assert out.shape == (sizes[0], b.shape[1])
    _core().product(
        _threads(sizes[0] * sizes[1] * b.shape[1]),
        (dtype, data, *sizes, lane_stride, depth_stride),
        _address(keep),
        right[1],
        (_DTYPES[out.dtype], out.data_ptr(), out.stride(0), add),
    )


# ------------------------------------------------------------------ tensors as the core takes them


def _operand(lanes: Tensor) -> tuple[Tensor, tuple[int, int, int, int, int, int]]:
    """(lanes, depth) with one stride of 1, to be held until the core has returned, and what the core takes of it."""
    held = lanes if 1 in lanes.stride() else lanes.contiguous()
    return held, (_DTYPES[held.dtype], held.data_ptr(), *held.shape, *held.stride())


def _address(tensor: Tensor | None) -> int:
    """Where the data is; 0 for None and for an empty tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple(t.data_ptr() for t in tensors)


def _matrix(logits: Tensor) -> tuple[int, int, int, int, int, int]:
    """(address, B, T, V, stride of B, stride of T)."""
    batch, tokens, vocab = logits.shape
    return logits.data_ptr(), batch, tokens, vocab, logits.stride(0), logits.stride(1)


def _tokens(
    count: int, w: Tensor | None, streams: list[Tensor | None], cu: Tensor | None, mask: Tensor | None = None
) -> tuple[Any, ...]:
    """(count, w, streams, cu, sequences, mask)."""
    sequences = 0 if cu is None else cu.numel() - 1
    return count, _address(w), [_address(s) for s in streams], _address(cu), sequences, _address(mask)


def _threads(values: int) -> int:
    """One thread for small work: waking a second costs more than it saves. Results do not depend on it."""
    return 1 if values < _WORTH_A_THREAD else torch.get_num_threads()


def _new_rows(logits: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (logp, entropy, row_max, log_sum): the core writes every element."""
    rows = logits.shape[0] * logits.shape[1]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    new = functools.partial(torch.empty, dtype=dtype)
    return new(rows), new(rows if want_entropy else 0), new(rows), new(rows)


def _new_token_outputs(spec: list[float], logp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (per_token, c, e, sums)."""
    rows = logp.numel()
    new = functools.partial(_new_pages, dtype=logp.dtype)
    return new(rows), new(rows), new(rows if spec[ENTROPY_COEF] != 0 else 0), new(_core().NSUMS)


def _new_pages(count: int, dtype: torch.dtype) -> Tensor:
    """`torch.empty(count)`, beginning at a huge page when it fills one: a million tokens are two faults, not 1024."""
    if count * dtype.itemsize < _HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    memory = torch.empty(count + _HUGE_PAGE // dtype.itemsize, dtype=dtype)
    skip = -memory.data_ptr() % _HUGE_PAGE // dtype.itemsize
    return memory[skip : skip + count]
