"""One check for each invariant of `distillation_loss`, and the top-k form of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import validate
from .axes import REDUCTION_ALIASES, Divergence
from .hidden_states import HiddenStates, Scores
from .linear_checks import check_rows_of_hidden
from .spec_checks import check_reduction
from .weights import Layout

DIVERGENCES = {member.name.lower(): member.value for member in Divergence}


@dataclass(frozen=True)
class TopK:
    """A teacher by its K most likely tokens: distinct `ids` (..., K) int32 or int64, and their log-probs (..., K).

    The log-probs are of the full distribution (they need not sum to 1). Where fewer than K tokens are listed the last
    ones have log-prob -inf and any id: they belong to the rest.

    Attributes:
        ids: token ids (..., K), distinct within a row.
        logps: their log-probs in nats (..., K), any float dtype; constants.
    """

    ids: Tensor
    logps: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """(ids, log-probs) as flat rows (N, K), detached."""
        shape = (-1, self.ids.shape[-1]) if self.ids.numel() else (0, self.ids.shape[-1])
        return self.ids.reshape(shape).to(torch.int64).contiguous(), self.logps.detach().reshape(shape).contiguous()


def check_student(student: Any) -> None:
    """Floating logits (N, V) or (B, T, V) with V >= 1, or hidden states with their head."""
    if isinstance(student, HiddenStates):
        check_rows_of_hidden(student.hidden, student.weight, student.bias)
        if student.softcap is not None:
            raise ValueError(
                f"student_logits: a divergence has no soft cap; got HiddenStates(softcap={student.softcap!r}); compute "
                "the capped logits and pass those"
            )
        return
    if not isinstance(student, Tensor) or student.dtype not in validate.FLOATS:
        got = student.dtype if isinstance(student, Tensor) else type(student).__name__
        raise TypeError(f"student_logits: expected a tensor of float32, bfloat16, float16 or float64; got {got}")
    if student.ndim not in (2, 3) or student.shape[-1] < 1:
        raise ValueError(
            f"student_logits: expected shape (N, V) packed or (B, T, V) padded, V >= 1; got {tuple(student.shape)}"
        )


def check_teacher(teacher: Any, student: Scores) -> None:
    """Logits of the student's shape, hidden states with a head, or top-k log-probs, on its device."""
    rows, vocab, device = student_rows(student)
    if isinstance(teacher, HiddenStates):
        check_student(teacher)
        theirs = student_rows(teacher)
        if theirs[:2] != (rows, vocab):
            raise ValueError(
                f"teacher: expected hidden states and a head for tokens {rows} and a vocabulary of {vocab}; got "
                f"{theirs[0]} and {theirs[1]}; both models need one vocabulary: slice off the head's padded rows"
            )
        return
    if isinstance(teacher, TopK):
        _check_top_k(teacher, student)
        return
    if not isinstance(teacher, Tensor):
        raise TypeError(
            "teacher: expected logits like student_logits, HiddenStates(hidden, weight) or TopK(ids, logps); got "
            f"{type(teacher).__name__}"
        )
    if teacher.dtype not in validate.FLOATS:
        raise TypeError(f"teacher: expected float32, bfloat16, float16 or float64 logits; got {teacher.dtype}")
    if teacher.shape != (*rows, vocab):
        raise ValueError(
            f"teacher: expected logits of shape {(*rows, vocab)} (that of student_logits); got "
            f"{tuple(teacher.shape)}; both models need one vocabulary: slice off padded columns before the call"
        )
    validate.check_device("teacher", teacher, "student_logits", device)


def student_rows(student: Scores) -> tuple[tuple[int, ...], int, Tensor]:
    """(shape of the tokens, vocabulary, a tensor on the device)."""
    if isinstance(student, HiddenStates):
        return tuple(student.hidden.shape[:-1]), student.weight.shape[0], student.hidden
    return tuple(student.shape[:-1]), student.shape[-1], student


def _check_top_k(teacher: TopK, student: Scores) -> None:
    ids, logps = teacher.ids, teacher.logps
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"teacher.ids: expected int32 or int64 token ids; got {got}")
    if not isinstance(logps, Tensor) or not logps.is_floating_point():
        got = logps.dtype if isinstance(logps, Tensor) else type(logps).__name__
        raise TypeError(f"teacher.logps: expected a float tensor; got {got}")
    rows, vocab, device = student_rows(student)
    if ids.ndim != len(rows) + 1 or tuple(ids.shape[:-1]) != rows or not 1 <= ids.shape[-1] <= vocab:
        raise ValueError(f"teacher.ids: expected shape {(*rows, 'K')} with 1 <= K <= {vocab}; got {tuple(ids.shape)}")
    if logps.shape != ids.shape:
        raise ValueError(f"teacher.logps: expected shape {tuple(ids.shape)} (that of ids); got {tuple(logps.shape)}")
    for name, tensor in (("teacher.ids", ids), ("teacher.logps", logps)):
        validate.check_device(name, tensor, "student_logits", device)


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


def check_divergence(
    divergence: Any, beta: Any, teacher: Tensor | TopK | HiddenStates, teacher_temperature: Any
) -> int:
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
