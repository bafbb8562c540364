"""Errors name the argument, what was expected, what came, and the fix."""

import pytest
import torch

import fusedpg
from fusedpg import TopK

X = torch.zeros(2, 3)
IDS, LOGPS = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)

CASES = [
    ({"student": [[0.0]]}, TypeError, r"student_logits: expected a tensor of float32.*got list"),
    ({"student": X.long()}, TypeError, r"student_logits: expected .*got torch.int64"),
    ({"student": X[0]}, ValueError, r"student_logits: expected shape \(N, V\).*got \(3,\)"),
    ({"student": X[:, :0]}, ValueError, r"student_logits: .*V >= 1; got \(2, 0\)"),
    ({"teacher": None}, TypeError, r"teacher: expected logits.*TopK.*got NoneType"),
    ({"teacher": X.long()}, TypeError, r"teacher: expected float32.*got torch.int64"),
    ({"teacher": X[:, :2]}, ValueError, r"teacher: expected logits of shape \(2, 3\).*got \(2, 2\).*slice off"),
    ({"teacher": X[:1]}, ValueError, r"teacher: expected logits of shape \(2, 3\).*got \(1, 3\)"),
    ({"divergence": "kl"}, ValueError, r"divergence: expected one of reverse_kl, forward_kl, jsd; got 'kl'"),
    ({"beta": 0.0}, ValueError, r"beta: expected .*\(0, 1\); got 0.0; at the ends"),
    ({"beta": 1}, ValueError, r"beta: .*got 1"),
    ({"beta": True}, ValueError, r"beta: .*got True"),
    ({"beta": float("nan")}, ValueError, r"beta: .*got nan"),
    ({"temperature": 0.0}, ValueError, r"temperature: expected a finite number > 0; got 0.0"),
    ({"teacher_temperature": -1.0}, ValueError, r"teacher_temperature: expected a finite number > 0; got -1.0"),
    ({"mask": torch.ones(3)}, ValueError, r"mask: expected shape \(2,\).*like student_logits.*got \(3,\)"),
    ({"mask": torch.tensor([2.0, 0.0])}, ValueError, r"mask: expected weights in \[0, 1\]"),
    ({"reduction": "mean"}, ValueError, r"reduction: expected one of token-mean.*got 'mean'"),
    ({"reduction": "seq-mean-token-sum"}, ValueError, r"cu_seqlens: .*packed input; got None"),
    ({"reduction": "seq-mean-token-sum-norm"}, ValueError, r"max_tokens: .*positive int; got None"),
    ({"max_tokens": 5}, ValueError, r"max_tokens: reduction 'token-mean' never reads it; got 5"),
    ({"cu_seqlens": torch.tensor([0, 1])}, ValueError, r"cu_seqlens: expected 0 = cu\[0\].*= 2; got \[0, 1\]"),
    ({"normalizer": -1.0}, ValueError, r"normalizer: expected a finite number > 0; got -1.0"),
    ({"backend": "gpu"}, ValueError, r"backend: expected one of auto, cpu, triton, reference; got 'gpu'"),
    ({"teacher": X.double(), "backend": "triton"}, ValueError, r"backend: 'triton' computes in float32"),
    ({"teacher": TopK(IDS, LOGPS)}, ValueError, r"divergence: a TopK teacher defines 'forward_kl' alone; got 'reverse"),
    ({"teacher": TopK(IDS.float(), LOGPS)}, TypeError, r"teacher.ids: expected int32 or int64.*got torch.float32"),
    ({"teacher": TopK(IDS, IDS)}, TypeError, r"teacher.logps: expected a float tensor; got torch.int64"),
    ({"teacher": TopK(IDS[0], LOGPS[0])}, ValueError, r"teacher.ids: expected shape \(2, 'K'\).*got \(1,\)"),
    (
        {"teacher": TopK(IDS[:, :0], LOGPS[:, :0])},
        ValueError,
        r"teacher.ids: expected shape .*1 <= K <= 3; got \(2, 0\)",
    ),
    ({"teacher": TopK(IDS, LOGPS[:, 0])}, ValueError, r"teacher.logps: expected shape \(2, 1\).*got \(2,\)"),
    (
        {"teacher": TopK(IDS + 3, LOGPS), "divergence": "forward_kl"},
        ValueError,
        r"teacher.ids: expected ids in \[0, 3\) at unmasked tokens; got 3 at row 0",
    ),
    (
        {"teacher": TopK(IDS, LOGPS), "divergence": "forward_kl", "teacher_temperature": 2.0},
        ValueError,
        r"teacher_temperature: a TopK teacher's log-probs are taken as they are",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), CASES, ids=[c[2][:40] for c in CASES])
def test_refused(arguments, error, message):
    arguments = {"student": X, "teacher": X, **arguments}
    with pytest.raises(error, match="^" + message):
        fusedpg.distillation_loss(arguments.pop("student"), arguments.pop("teacher"), **arguments)
