"""Random batches, the fp64 truth, and error budgets measured on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fusedpg
from fusedpg import losses
from fusedpg.spec import Keep, Level, LossSpec


def backend_device(backend: str) -> torch.device:
    """Triton tests use the GPU where there is one, else CPU tensors under the interpreter."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


F32 = torch.finfo(torch.float32).eps

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


@dataclass
class Case:
    """One batch in the storage dtype, with holes in the mask and rubbish behind it."""

    logits: Tensor
    targets: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)


LENGTHS = (4, 0, 1, 3, 2)


def make_case(
    spec: LossSpec,
    *,
    dtype: torch.dtype,
    packed: bool,
    vocab: int = 37,
    seed: int = 0,
    lengths: tuple[int, ...] = LENGTHS,
) -> Case:
    """A ragged batch: a hole in one sequence, an empty one, a fully masked one; NaN and inf at masked places."""
    g = torch.Generator().manual_seed(seed)
    if packed:
        shape: tuple[int, ...] = (sum(lengths),)
    else:
        shape = (len(lengths), max(lengths))
    rand = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    logits = (2.0 * rand(*shape, vocab)).to(dtype)
    targets = torch.randint(0, vocab, shape, generator=g)
    mask = torch.rand(shape, generator=g) > 0.25
    if packed:
        cu = torch.tensor([0, *lengths]).cumsum(0)
    else:
        mask &= torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
        cu = None
    logp = torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])[..., 0]
    streams = {
        "logp_old": (logp + 0.3 * rand(*shape)).float(),
        "logp_ref": (logp + 0.5 * rand(*shape)).float(),
        "logp_rollout": (logp + 0.2 * rand(*shape)).float(),
    }
    for i, stream in enumerate(streams.values()):
        stream[~mask] = (torch.nan, torch.inf, -torch.inf)[i]
    observed = mask
    kwargs: dict[str, Any] = {**streams, "mask": mask, "cu_seqlens": cu}
    if spec.obs_coef:
        kwargs["obs_mask"] = torch.rand(shape, generator=g) > 0.6  # some of them policy tokens too
        observed = mask | kwargs["obs_mask"]
    logits[~observed] = torch.nan
    targets[~observed] = -100
    if spec.level == Level.SEQUENCE:
        kwargs["sequence_advantages"] = rand(len(lengths)).float()
    else:
        kwargs["advantages"] = rand(*shape).float()
    return Case(logits, targets, kwargs)


@dataclass
class Result:
    """What one call computed, as fp64 on the CPU."""

    values: dict[str, Tensor]
    grad: Tensor
    output: Any


def run(
    spec: LossSpec, case: Case, backend: str, *, upstream: float = 1.0, double: bool = False, **extra: Any
) -> Result:
    """Loss and gradient of one case on one backend; `double` casts the stored inputs to fp64 first."""
    device = backend_device(backend)
    logits = case.logits.to(device)
    logits = (logits.double() if double else logits.clone()).requires_grad_()
    kwargs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in {**case.kwargs, **extra}.items()}
    torch.manual_seed(0)  # a random selection repeats
    out = fusedpg.policy_loss_from_logits(spec, logits, case.targets.to(device), backend=backend, **kwargs)
    (out.loss * upstream).backward()
    values = {
        "loss": out.loss,
        "numerator": out.numerator,
        "weight": out.weight,
        "logp": out.logp,
        "per_token": out.per_token,
        **{f"metric:{k}": v for k, v in out.metrics.items()},
    }
    if out.entropy is not None:
        values["entropy"] = out.entropy
    assert logits.grad is not None
    return Result({k: v.detach().double().cpu() for k, v in values.items()}, logits.grad.double().cpu(), out)


def truth(spec: LossSpec, case: Case, **extra: Any) -> Result:
    """The fp64 reference on the stored inputs."""
    return run(spec, case, "reference", double=True, **extra)


@dataclass
class Rounding:
    """How far ordinary fp32 arithmetic is from the truth on one case: the largest error of each value and of the gradient."""

    values: dict[str, Tensor]
    grad: Tensor


def rounding(spec: LossSpec, case: Case, want: Result, **extra: Any) -> Rounding:
    """Measured with the reference's formulas in fp32, on the case and with its vocabulary in three other orders.

    The order of the columns changes nothing but how sums are rounded, so one lucky order does not set the budget.
    """
    vocab = case.logits.shape[-1]
    g = torch.Generator().manual_seed(1)
    orders = [torch.arange(vocab), *(torch.randperm(vocab, generator=g) for _ in range(3))]
    errors: dict[str, Tensor] = {}
    grad = torch.zeros((), dtype=torch.float64)
    for order in orders:
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(vocab))
        targets = torch.where(case.targets >= 0, place[case.targets.clamp(min=0)], case.targets)
        got = run(spec, replace(case, logits=case.logits.float()[..., order], targets=targets), "reference", **extra)
        for name, expected in want.values.items():
            error = largest(got.values[name] - expected)
            errors[name] = torch.maximum(errors.get(name, error), error)
        grad = torch.maximum(grad, largest(got.grad[..., place] - want.grad))
    return Rounding(errors, grad)


def largest(x: Tensor) -> Tensor:
    """max |x|, 0 for an empty tensor."""
    return x.abs().max() if x.numel() else torch.zeros((), dtype=torch.float64)


def store(grad: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """A gradient after one rounding to its storage dtype, as the platform under test rounds.

    Triton's interpreter truncates to bf16; compiled kernels round to nearest, like everything else.
    """
    if dtype == torch.bfloat16 and backend == "triton" and backend_device(backend).type == "cpu":
        return (grad.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    return grad.to(dtype).double()


def assert_agrees(got: Result, want: Result, fp32: Rounding, dtype: torch.dtype, label: str = "") -> None:
    """Errors stay within twice the fp32 error measured on the same inputs, plus one storage rounding of the gradient.

    The floor of a few fp32 units covers inputs on which fp32 happens to be exact; sums are floored by their terms.
    """
    terms = want.values["per_token"].abs().sum()
    for name, expected in want.values.items():
        size = largest(expected)
        if name in ("loss", "numerator") and size > 0:
            size = torch.maximum(size, terms * size / largest(want.values["numerator"]))
        budget = 2 * fp32.values[name] + 8 * F32 * (1 + size)
        actual = got.values[name]
        assert actual.shape == expected.shape, f"{label} {name}: shape {actual.shape} against {expected.shape}"
        error = largest(actual - expected)
        assert error <= budget, (
            f"{label} {name}: error {error:.3e} over budget {budget:.3e} ({actual} against {expected})"
        )
    stored = largest(store(want.grad, dtype, got.output.backend) - want.grad)
    # vespo's factor is a product over the sequence to a power up to 3: so is its relative rounding
    units = 24 if label.startswith("vespo") else 8
    budget = 2 * (stored + fp32.grad) + units * F32 * largest(want.grad)
    error = largest(got.grad - want.grad)
    assert error <= budget, f"{label} gradient: error {error:.3e} over budget {budget:.3e}"


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
