"""One check for each invariant of `distillation_loss`, and the top-k form of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import validate
from .axes import REDUCTION_ALIASES, Divergence
from .spec_checks import check_reduction
from .weights import Layout

DIVERGENCES = {member.name.lower(): member.value for member in Divergence}


@dataclass(frozen=True)
class TopK:
    """A teacher by its K most likely tokens: distinct `ids` (..., K) int32 or int64, and their log-probs (..., K).

    The log-probs are of the full distribution (they need not sum to 1). Where fewer than K tokens are listed the last
    ones have log-prob -inf and any id: they belong to the rest.
    """

    ids: Tensor
    logps: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """(ids, log-probs) as flat rows (N, K), detached."""
        shape = (-1, self.ids.shape[-1]) if self.ids.numel() else (0, self.ids.shape[-1])
        return self.ids.reshape(shape).to(torch.int64).contiguous(), self.logps.detach().reshape(shape).contiguous()


def check_student(student: Any) -> None:
    """Floating logits (N, V) or (B, T, V) with V >= 1."""
    if not isinstance(student, Tensor) or student.dtype not in validate.FLOATS:
        got = student.dtype if isinstance(student, Tensor) else type(student).__name__
        raise TypeError(f"student_logits: expected a tensor of float32, bfloat16, float16 or float64; got {got}")
    if student.ndim not in (2, 3) or student.shape[-1] < 1:
        raise ValueError(
            f"student_logits: expected shape (N, V) packed or (B, T, V) padded, V >= 1; got {tuple(student.shape)}"
        )


def check_teacher(teacher: Any, student: Tensor) -> None:
    """Logits of the student's shape, or top-k log-probs of its tokens, on its device."""
    if isinstance(teacher, TopK):
        _check_top_k(teacher, student)
        return
    if not isinstance(teacher, Tensor):
        raise TypeError(
            f"teacher: expected logits like student_logits, or TopK(ids, logps); got {type(teacher).__name__}; teacher "
            "hidden states with a head come with the hidden-state path: multiply them first"
        )
    if teacher.dtype not in validate.FLOATS:
        raise TypeError(f"teacher: expected float32, bfloat16, float16 or float64 logits; got {teacher.dtype}")
    if teacher.shape != student.shape:
        raise ValueError(
            f"teacher: expected logits of shape {tuple(student.shape)} (that of student_logits); got "
            f"{tuple(teacher.shape)}; both models need one vocabulary: slice off padded columns before the call"
        )
    validate.check_device("teacher", teacher, "student_logits", student)


def _check_top_k(teacher: TopK, student: Tensor) -> None:
    ids, logps = teacher.ids, teacher.logps
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"teacher.ids: expected int32 or int64 token ids; got {got}")
    if not isinstance(logps, Tensor) or not logps.is_floating_point():
        got = logps.dtype if isinstance(logps, Tensor) else type(logps).__name__
        raise TypeError(f"teacher.logps: expected a float tensor; got {got}")
    rows = tuple(student.shape[:-1])
    if ids.ndim != student.ndim or tuple(ids.shape[:-1]) != rows or not 1 <= ids.shape[-1] <= student.shape[-1]:
        raise ValueError(
            f"teacher.ids: expected shape {(*rows, 'K')} with 1 <= K <= {student.shape[-1]}; got {tuple(ids.shape)}"
        )
    if logps.shape != ids.shape:
        raise ValueError(f"teacher.logps: expected shape {tuple(ids.shape)} (that of ids); got {tuple(logps.shape)}")
    for name, tensor in (("teacher.ids", ids), ("teacher.logps", logps)):
        validate.check_device(name, tensor, "student_logits", student)


def check_top_k_range(teacher: TopK, active: Tensor, vocab: int) -> None:
    """Every id at an unmasked token is one of the vocabulary; masked ones may hold anything."""
    ids = teacher.ids.reshape(-1, teacher.ids.shape[-1]) if teacher.ids.numel() else teacher.ids
    if ids.numel() == 0 or not validate.reads_values(ids):
        return
    listed = teacher.logps.reshape(ids.shape) != -torch.inf
    bad = ((ids < 0) | (ids >= vocab)) & active[:, None] & listed
    if bad.any():
        row, k = bad.nonzero()[0].tolist()
        raise ValueError(
            f"teacher.ids: expected ids in [0, {vocab}) at unmasked tokens; got {int(ids[row, k])} at row {row}; mask "
            "ignored tokens out with `mask`"
        )


def check_divergence(divergence: Any, beta: Any, teacher: Tensor | TopK, teacher_temperature: Any) -> int:
    """The code of a divergence that is defined for the teacher; jsd's beta lies strictly between 0 and 1."""
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: expected one of {', '.join(DIVERGENCES)}; got {divergence!r}")
    number = isinstance(beta, (int, float)) and not isinstance(beta, bool)
    if not number or not 0.0 < beta < 1.0:
        raise ValueError(
            f"beta: expected the teacher's share of jsd's mixture, in (0, 1); got {beta!r}; at the ends jsd is 0: use "
            "divergence='forward_kl' or 'reverse_kl'"
        )
    if isinstance(teacher, TopK):
        if divergence != "forward_kl":
            raise ValueError(
                f"divergence: a TopK teacher defines 'forward_kl' alone; got {divergence!r}: reverse_kl and jsd need "
                "the teacher's probability of every token that the student may sample; pass logits"
            )
        if teacher_temperature is not None:
            raise ValueError(
                "teacher_temperature: a TopK teacher's log-probs are taken as they are and cannot be tempered; got "
                f"{teacher_temperature!r}; drop it"
            )
    return DIVERGENCES[divergence]


def check_units(reduction: str, max_tokens: int | None, layout: Layout) -> str:
    """The reduction, its alias resolved; one over sequences needs their bounds."""
    reduction = REDUCTION_ALIASES.get(reduction, reduction)
    check_reduction(reduction, max_tokens)
    if reduction.startswith("seq-") and not layout.padded and layout.cu_seqlens is None:
        raise ValueError(
            f"cu_seqlens: reduction {reduction!r} works on sequences and expects their boundaries for packed input; "
            "got None; pass cumulative lengths (S+1,)"
        )
    return reduction
