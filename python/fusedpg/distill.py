"""Full-vocabulary distillation: divergences of a student's token distribution from a teacher's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import dispatch, distill_ops, distill_reference, linear_distill, validate
from .batch import check_normalizer, flat_mask, make_layout
from .distill_checks import (
    TopK,
    check_divergence,
    check_student,
    check_teacher,
    check_top_k_range,
    check_units,
    student_rows,
)
from .distill_ops import weighted_sum
from .hidden_states import HiddenStates, Scores
from .linear import all_logits
from .linear_checks import check_rows_of_hidden, check_workspace
from .linear_walk import Head
from .metrics import Metrics
from .ops import compute_dtype
from .rows import as_batch, rows3d
from .weights import Weights, inverse_denominator, token_weights

__all__ = ["DISTILL_METRIC_NAMES", "DistillMetrics", "DistillOutput", "TopK", "distillation_loss"]

#: keys of `DistillMetrics`: means over the selected tokens, in nats, and their number
DISTILL_METRIC_NAMES = ("divergence", "student_entropy", "teacher_entropy", "tokens")


class DistillMetrics(Metrics):
    """`DISTILL_METRIC_NAMES` -> 0-d tensor over the selected tokens, read lazily; `merge` is exact, as sums are kept.

    A token's divergence and entropies count once whatever its fractional mask weight. Means of nothing are 0.
    """

    @classmethod
    def of_rows(cls, w: Tensor, *rows: Tensor) -> DistillMetrics:
        """Metrics of one call from (divergence, student entropy, teacher entropy) per row."""
        selected = w != 0
        totals = [torch.where(selected, row, 0.0).sum(dtype=torch.float64).to(row.dtype) for row in rows]
        return cls(torch.stack([*totals, selected.sum().to(w.dtype)]), w.new_empty(0))

    def merge(self, *others: Metrics) -> DistillMetrics:
        """Metrics of the union of several calls."""
        totals = torch.stack([m.totals.double() for m in (self, *others)]).sum(0)
        return DistillMetrics(totals.to(self.totals.dtype), self.extrema)

    def __getitem__(self, name: str) -> Tensor:
        if name not in DISTILL_METRIC_NAMES:
            raise KeyError(name)
        tokens = self.totals[-1]
        return tokens if name == "tokens" else self.totals[DISTILL_METRIC_NAMES.index(name)] / tokens.clamp(min=1)

    def __iter__(self) -> Iterator[str]:
        return iter(DISTILL_METRIC_NAMES)

    def __len__(self) -> int:
        return len(DISTILL_METRIC_NAMES)


@dataclass(frozen=True)
class DistillOutput:
    """One distillation loss, as `distillation_loss` returns it.

    Attributes:
        loss: 0-d, differentiable; numerator / (normalizer or weight), exactly 0 and connected when that is 0.
        numerator, weight: 0-d, detached; their sums over micro-batches and ranks give the unsplit loss.
        per_token: (N,) or (B, T), detached: each token's divergence in nats, without its weight.
        metrics: means over the selected tokens, read lazily.
        backend: what ran: "cpu", "triton" or "reference".
    """

    loss: Tensor
    numerator: Tensor
    weight: Tensor
    per_token: Tensor
    metrics: DistillMetrics
    backend: str


def distillation_loss(
    student_logits: Scores,
    teacher: Tensor | TopK | HiddenStates,
    *,
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    reduction: str = "token-mean",
    max_tokens: int | None = None,
    normalizer: Tensor | float | None = None,
    workspace_mib: float | None = None,
    backend: str = "auto",
) -> DistillOutput:
    """A divergence between student and teacher over the whole vocabulary, and its gradient in the student's logits.

    With p = softmax(student_logits/temperature), q = softmax(teacher/teacher_temperature), sums over the vocabulary:

    ============  =======================================  ==============================================
    divergence    value of a token                         gradient * temperature
    ============  =======================================  ==============================================
    reverse_kl    KL(p||q) = sum p (log p - log q)         p (log p - log q - KL(p||q))
    forward_kl    KL(q||p) = sum q (log q - log p)         p - q
    jsd           beta KL(q||m) + (1-beta) KL(p||m),       (1-beta) p (log(p/m) - KL(p||m))
                  m = beta q + (1-beta) p
    ============  =======================================  ==============================================

    `jsd` is the generalised Jensen-Shannon divergence of Agarwal et al., "On-Policy Distillation of Language Models"
    (GKD, arXiv:2306.13649), with beta the teacher's share of the mixture m. Nothing is multiplied by
    temperature^2. 0 log 0 is 0: a column that both exclude (-inf) adds nothing. One with a finite logit in the first
    distribution of a KL and -inf in the second makes the token's KL inf; its gradient then means nothing.

    Per row, each matrix of logits is read from memory once and the gradient is written once: the statistics of both
    distributions come from one sweep; the gradient, and for `jsd` the value before it, from further sweeps of a row
    that is still in cache. For fp16 students and under torch.compile the gradient is formed in backward, which reads
    both again. Nothing else of the vocabulary's size times the number of tokens is allocated. Where a side comes as
    hidden states with a head, its logits exist a tile at a time, rows of weight 0 enter no product, and d weight is
    summed in fp32; the gradients are those of `hidden`, `weight` and `bias` of the student.

    Args:
        student_logits: (N, V) packed or (B, T, V) padded, fp32, bf16, fp16, or fp64 (reference and cpu), any strides;
            the only differentiable argument; or `HiddenStates(hidden, weight)`.
        teacher: the teacher's logits, same shape, any of those dtypes; or the teacher's `HiddenStates`, of any hidden
            size; or `TopK(ids, logps)`, with which forward_kl alone is defined: KL over the K listed tokens and one
            bucket for the rest of either distribution, whose probability is 1 less the listed ones' (at least 2^-24 in
            the student).
        divergence: "reverse_kl", "forward_kl" or "jsd".
        beta: in (0, 1); read by jsd.
        mask: (N,) or (B, T), bool or weights in [0, 1]: rows where it is 0 are not read and get gradient 0.
        cu_seqlens: (S+1,) int32 or int64, the boundaries of packed sequences.
        temperature: of the student, > 0.
        teacher_temperature: None is `temperature`. A top-k teacher's log-probs are taken as they are.
        reduction, max_tokens: how tokens are weighed, as in `loss_spec`.
        normalizer: one number that divides the numerator instead of the local weight.
        workspace_mib: of the tiles where a side comes as hidden states, as in `linear_token_logprobs`.
        backend: "auto", "cpu", "triton" or "reference".

    Returns:
        DistillOutput with `loss` (0-d, differentiable, numerator / (normalizer or weight), exactly 0 and connected when
        that is 0), `numerator` and `weight` (0-d, detached; sums of both over micro-batches and ranks give the unsplit
        loss), `per_token` ((N,) or (B, T), detached, without weights), `metrics` (`DistillMetrics`) and `backend`.

    Raises:
        TypeError, ValueError, RuntimeError: by name of the argument, with what was expected, what came and the fix.

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649; Gu et al., MiniLLM (reverse KL),
        arXiv:2306.08543.
    """
    check_student(student_logits)
    check_teacher(teacher, student_logits)
    kind = check_divergence(divergence, beta, teacher, teacher_temperature)
    temperature = validate.check_positive("temperature", temperature)
    if teacher_temperature is not None:
        teacher_temperature = validate.check_positive("teacher_temperature", teacher_temperature)
    shape, vocab, base = student_rows(student_logits)
    dtype = _computed(student_logits)
    w, scale, weight = _weights(base.detach()[..., 0], dtype, mask, cu_seqlens, reduction, max_tokens, normalizer)
    if isinstance(teacher, TopK):
        check_top_k_range(teacher, w != 0, vocab)
    options = (kind, float(beta), temperature, teacher_temperature or temperature)
    wide = not isinstance(teacher, TopK) and _computed(teacher) == torch.float64
    name = dispatch.resolve(backend, base.device, torch.float64 if wide else dtype)
    if name == "reference":
        rows = _reference(_logits(student_logits, w != 0), _logits(teacher, w != 0), w, scale, options)
    elif isinstance(student_logits, HiddenStates) or isinstance(teacher, HiddenStates):
        rows = _chunked(student_logits, teacher, w, scale, options, check_workspace(workspace_mib), name)
    else:
        rows = _native(student_logits, teacher, w, scale, options, name)
    loss, per_token, student_entropy, teacher_entropy, numerator = rows
    return DistillOutput(
        loss=loss,
        numerator=numerator.detach(),
        weight=weight,
        per_token=per_token.detach().view(shape),
        metrics=DistillMetrics.of_rows(w, per_token.detach(), student_entropy, teacher_entropy),
        backend=name,
    )


def _computed(scores: Scores) -> torch.dtype:
    """The dtype that a side's divergence is computed in."""
    if isinstance(scores, HiddenStates):
        return Head(scores.hidden, scores.weight, scores.bias).compute
    return compute_dtype(scores.dtype)


def _weights(
    base: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    reduction: str,
    max_tokens: int | None,
    normalizer: Tensor | float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight of every row (N,), 1/denominator, the reduction's unit count)."""
    layout = make_layout(base, "student_logits", cu_seqlens)
    reduction = check_units(reduction, max_tokens, layout)
    rows_mask = flat_mask(mask, base, "student_logits")
    units: Weights = token_weights(rows_mask, layout, reduction, max_tokens, dtype=dtype, device=base.device)
    if normalizer is not None:
        check_normalizer(normalizer)
    return units.w.to(dtype).contiguous(), inverse_denominator(units.weight, normalizer), units.weight


Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _reference(student: Tensor, teacher: Tensor | TopK, w: Tensor, scale: Tensor, options: tuple[Any, ...]) -> Rows:
    """(loss, divergence, student entropy, teacher entropy, numerator) in plain torch."""
    active, flat = w != 0, student.reshape(-1, student.shape[-1])
    if isinstance(teacher, TopK):
        listed = teacher.rows()
        out = distill_reference.top_k_divergence(flat, *listed, active, options[2])
    else:
        out = distill_reference.divergence(flat, teacher.detach().reshape(flat.shape), active, *options)
    numerator = weighted_sum(w, out[0])
    return numerator * scale, *out, numerator


def _logits(scores: Any, active: Tensor) -> Any:
    """All of a side's logits, scaled; a top-k teacher as it is."""
    if not isinstance(scores, HiddenStates):
        return scores
    logits = all_logits(scores.hidden, scores.weight, scores.bias, active)
    return logits if scores.logit_scale == 1.0 else logits * scores.logit_scale


def _chunked(
    student: Scores,
    teacher: Tensor | TopK | HiddenStates,
    w: Tensor,
    scale: Tensor,
    options: tuple[Any, ...],
    workspace: int,
    backend: str,
) -> Rows:
    """The same in chunks of rows, for a side that comes as hidden states."""
    kind, beta, temperature, teacher_temperature = options
    mine, own_scale = _side(student)
    if isinstance(teacher, TopK):
        ids, logps = teacher.rows()
        theirs: tuple[Tensor | None, ...] = (logps, None, None)
    else:
        ids = None
        theirs, teacher_scale = _side(teacher)
        theirs = tuple(None if t is None else t.detach() for t in theirs)
        teacher_temperature /= teacher_scale
    # fp16 logits' gradients wait for the loss scale; those of a head are kept in fp32
    early = torch.is_grad_enabled() and not (mine[1] is None and mine[0].dtype == torch.float16)
    wanted = [early and t is not None and t.requires_grad for t in mine]
    numbers = (kind, beta, temperature / own_scale, teacher_temperature)
    return linear_distill.op(*mine, *theirs, ids, w, scale, *numbers, *wanted, workspace, backend)[:5]


def _side(scores: Scores) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], float]:
    """((rows (B, T, D) or logits (B, T, V), weight, bias), what the logits are multiplied by)."""
    if isinstance(scores, HiddenStates):
        hidden, weight, bias = check_rows_of_hidden(scores.hidden, scores.weight, scores.bias)
        return (as_batch(hidden), weight, bias), scores.logit_scale
    return (rows3d(scores), None, None), 1.0


def _native(
    student: Tensor, teacher: Tensor | TopK, w: Tensor, scale: Tensor, options: tuple[Any, ...], backend: str
) -> Rows:
    """The same through the kernels."""
    logits = rows3d(student)
    if isinstance(teacher, TopK):
        return distill_ops.top_k(logits, *teacher.rows(), w, scale, options[2], backend)[:5]
    # fp16 gradients keep their range only when the upstream factor (a loss scale) is known before the rounding; a
    # traced graph plans its own memory
    early = student.dtype != torch.float16 and not torch.compiler.is_compiling()
    form_grad = early and student.requires_grad and torch.is_grad_enabled()
    return distill_ops.distill(logits, rows3d(teacher.detach()), w, scale, *options, form_grad, backend)[:5]
