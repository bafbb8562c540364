"""Variants of the catalogue's losses; batches, truth and budgets are those of `fusedpg.selftest`."""

from __future__ import annotations

from typing import Any

import torch

import fusedpg
from fusedpg import losses
from fusedpg.selftest import (
    F32,
    LENGTHS,
    Case,
    Result,
    Rounding,
    backend_device,
    disagreement,
    largest,
    make_case,
    rounding,
    run,
    store,
    truth,
)
from fusedpg.spec import Keep, LossSpec

__all__ = [
    "F32",
    "LENGTHS",
    "Case",
    "Result",
    "Rounding",
    "backend_device",
    "disagreement",
    "largest",
    "make_case",
    "operand_rounding",
    "rounding",
    "run",
    "store",
    "truth",
]

#: the plain, KL and entropy variants of a loss; each KL row is another estimator, ratio weight or clamp
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k3": {"kl": "k3", "kl_coef": 0.1},
    "k1-live": {"kl": "k1", "kl_coef": 0.2, "kl_ratio": "live"},
    "k3-live-clamped": {
        "kl": "k3",
        "kl_coef": 0.3,
        "kl_ratio": "live",
        "kl_clamp": (0.0, 0.05),
        "kl_log_ratio_clamp": 0.4,
    },
    "k2-detached": {"kl": "k2", "kl_coef": 0.3, "kl_ratio": "detached"},
    "abs": {"kl": "abs", "kl_coef": 0.1},
    "k3+": {"kl": "k3+", "kl_coef": 0.1},
    "k1-rollout": {"kl": "k1", "kl_coef": 0.1, "kl_target": "rollout"},
    "entropy": {"entropy_coef": 0.05},
    "k3-entropy": {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.05},
    "k3-score": {"kl": "k3", "kl_coef": 0.1, "kl_gradient": "score", "kl_ratio": "detached"},
    "sampled-k3": {
        "kl": "k1",
        "kl_coef": 0.1,
        "kl_backward": "k3",
        "kl_backward_coef": 0.1,
        "kl_forward": "k3",
        "kl_forward_coef": 0.2,
    },
    "sampled-score": {
        "kl_backward": "score",
        "kl_backward_coef": 0.1,
        "kl_forward": "score",
        "kl_forward_coef": 0.2,
        "kl_target": "rollout",
    },
    "is-truncate": {"is_correction": "truncate", "is_high": 1.1},
    "is-mask-geometric": {"is_correction": "mask", "is_level": "geometric", "is_low": 0.9, "is_high": 1.2},
    "is-product-reject": {
        "is_correction": "truncate",
        "is_level": "sequence",
        "is_low": 0.5,
        "is_high": 1.5,
        "is_reject": "geometric",
        "is_reject_low": 0.85,
        "is_reject_high": 1.3,
    },
    "is-reject-token": {"is_reject": "token", "is_reject_low": 0.9, "is_reject_high": 1.2},
    "keep-ratio": {"keep": "ratio", "keep_low": 0.8, "keep_high": 1.25, "keep_directional": True},
    "observation": {"obs_coef": 0.3, "entropy_coef": 0.05},
}

#: knobs that a loss has no default for
REQUIRED: dict[str, dict[str, Any]] = {"dro": {"beta": 0.1}}
#: bounds so tight that they bind in a small batch
TIGHT: dict[str, dict[str, Any]] = {
    "gmpo": {"epsilon_low": 0.1, "epsilon_high": 0.15},
    "dppo_tv": {"delta": 0.02},
    "dppo_kl": {"delta": 0.01},
    "icepop": {"alpha": 0.85, "beta": 1.2},
    "ipo": {"delta": 0.02, "kl_tau": 0.1},
    "dro": {"beta": 0.3},
    "clip_cov": {"clip_cov_ratio": 0.4, "clip_cov_lb": 0.0, "clip_cov_ub": 50.0},
    "kl_cov": {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.5},
    "reinforce_kl": {"bwd_kl_coef": 0.1, "fwd_kl_coef": 0.2},
}


def applies(name: str, terms: str) -> bool:
    """Whether a loss reads the knobs of a variant, and they mean something for it."""
    knobs = TERMS[terms]
    own_mask = fusedpg.CATALOGUE[name].keep != Keep.NONE and "keep" in knobs
    own_kl = name == "reinforce_kl" and ("kl_backward" in knobs or "kl_target" in knobs)
    by_sequence = {"is_level", "is_reject"} & set(knobs)
    return (
        set(knobs) <= losses.ENTRIES[name].knobs
        and not own_mask
        and not own_kl
        and not (name == "vespo" and by_sequence)
    )


def spec_for(name: str, reduction: str, terms: str) -> LossSpec:
    """A catalogue entry with one reduction and one set of terms; an entry's own KL counts as a term."""
    knobs: dict[str, Any] = {"reduction": reduction, **TIGHT.get(name, {}), **TERMS[terms]}
    if reduction == "seq-mean-token-sum-norm":
        knobs["max_tokens"] = 7
    if "kl" not in knobs:
        knobs["kl"] = None
    return fusedpg.loss_spec(name, **knobs)


def assert_agrees(got: Result, want: Result, fp32: Rounding, dtype: torch.dtype, label: str = "") -> None:
    """`got` is within its budget of the truth."""
    problem = disagreement(got, want, fp32, dtype, label)
    assert problem is None, problem


class CountedCompiler:
    """AOTAutograd without code generation: what fullgraph and the fakes are tested on, in a fraction of the time."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        self.compilations = 0

        def forward(graph, inputs):
            self.compilations += 1
            return make_boxed_func(graph.forward)

        self._compile = aot_autograd(
            fw_compiler=forward, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward)
        )

    def __call__(self, graph, inputs):
        return self._compile(graph, inputs)


def operand_rounding(exact, hidden, weight, dtype):
    """What one rounding of the logits' exact gradient to `dtype` does to (d hidden, d weight); all fp64."""
    lost = (exact.to(dtype).double() - exact).flatten(0, -2)
    return largest(lost @ weight), largest(lost.t() @ hidden.flatten(0, -2))


def saved_storages(call):
    """(address -> bytes of each storage that autograd keeps for backward while `call` runs, its result)."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return kept, result
