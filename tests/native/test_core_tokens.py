"""Stage B and the one-pass loss of the C++ core against the reference's autograd in fp64, for every build."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedpg import cpu, reference
from fusedpg.metrics import SUM_NAMES
from fusedpg.spec import KL, Anchor, KLRatio, KLTarget, Level, LossSpec, Surrogate

ISAS = cpu.available_isas()
STREAMS = ("w", "advantages", "logp_old", "logp_ref", "logp_rollout", "is_weights")
LENGTHS = (7, 0, 1, 40, 16, 133)
CLIP = {"clip_low": 0.8, "clip_high": 1.28}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clamped": {"log_ratio_clamp": (-0.2, 0.3)},
    "dual": {"dual_clip": 1.4, "delta": 1.6},
    **{
        f"{kl.name}-{rho.name}": {"kl": kl, "kl_coef": 0.3, "kl_ratio": rho}
        for kl, rho in itertools.product((KL.K1, KL.K2, KL.K3, KL.ABS), KLRatio)
    },
    "kl-clamps": {"kl": KL.K3, "kl_coef": 0.3, "kl_clamp": (0.0, 0.05), "kl_log_ratio_clamp": (-0.4, 0.4)},
    "kl-straight": {"kl": KL.K3, "kl_coef": 0.3, "kl_straight_through": True, "kl_target": KLTarget.ROLLOUT},
    "entropy": {"entropy_coef": 0.05},
    "self": {"anchor": Anchor.SELF},
    "rollout": {"anchor": Anchor.ROLLOUT},
}


def make_spec(surrogate: Surrogate, level: Level, variant: str) -> LossSpec:
    band = CLIP if surrogate in (Surrogate.CLIPPED_RATIO, Surrogate.CISPO) else {}
    return LossSpec("test", surrogate, level, **{**band, **VARIANTS[variant]})


SPECS = {
    f"{s.name}-{level.name}-{v}": make_spec(s, level, v)
    for s, level, v in itertools.product(Surrogate, Level, VARIANTS)
    if level == Level.TOKEN or s != Surrogate.REINFORCE
}


def batch(n: int, dtype: torch.dtype, seed: int = 0, masked: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rand = lambda: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    logp = -rand().abs() - 0.1
    b = {
        "logp": logp,
        "entropy": rand().abs(),
        "w": torch.rand(n, generator=g, dtype=torch.float64) + 0.1,
        "advantages": rand() * (torch.rand(n, generator=g) > 0.1),
        "logp_old": logp + 0.3 * rand(),
        "logp_ref": logp + 0.5 * rand(),
        "logp_rollout": logp + 0.2 * rand(),
        "is_weights": rand().abs() * (torch.rand(n, generator=g) > 0.2),
    }
    if masked:
        off = torch.rand(n, generator=g) < 0.25
        for name in b:
            b[name][off] = 0.0 if name == "w" else torch.nan
    return {k: v.to(dtype) for k, v in b.items()}


def native(spec: LossSpec, b: dict[str, Tensor], cu: Tensor | None, with_is: bool) -> tuple[Tensor, ...]:
    streams = [b[s] if s != "is_weights" or with_is else None for s in STREAMS]
    return cpu.token_loss(spec.encode(), b["logp"], b["entropy"], *streams, cu)


def truth(spec: LossSpec, b: dict[str, Tensor], cu: Tensor, with_is: bool) -> tuple[Tensor, ...]:
    b = {k: v.double() for k, v in b.items()}
    lengths = cu.diff()
    segment = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    fields = {s: b[s] for s in STREAMS if s != "is_weights" or with_is}
    tokens = reference.Tokens(**fields, segment=segment, num_segments=lengths.numel())
    logp, entropy = b["logp"].requires_grad_(), b["entropy"].requires_grad_()
    numerator, x, sums = reference.token_loss(spec, logp, entropy, tokens)
    c, e = torch.autograd.grad(numerator, (logp, entropy), allow_unused=True)
    c = torch.zeros_like(logp) if c is None else c
    vector = torch.stack([sums[name].double() for name in SUM_NAMES])
    vector[SUM_NAMES.index("active")] = (c != 0).sum()
    return x.detach(), c, torch.zeros(0) if spec.entropy_coef == 0 else e, vector.detach()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSEDPG_CPU_ISA", request.param)
    return str(request.param)


GROUPS = {name.rsplit("-", 1)[0] for name in SPECS if name.endswith("-plain")}


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_matches_the_reference(isa: str, group: str) -> None:
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    batches = {torch.float64: 1e-12, torch.float32: 2e-5}
    for name, dtype, with_is in itertools.product(SPECS, batches, (False, True)):
        if not name.startswith(group + "-"):
            continue
        b = batch(int(cu[-1]), dtype)
        got = native(SPECS[name], b, cu, with_is)
        want = truth(SPECS[name], b, cu, with_is)
        tolerance = batches[dtype]
        for g, t, what in zip(got, want, ("per_token", "c", "e", "sums"), strict=True):
            where = f"{name} {what} with_is={with_is}"
            torch.testing.assert_close(
                g.double(), t.double(), rtol=tolerance, atol=tolerance, msg=lambda m, w=where: f"{w}: {m}"
            )


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 127, 4096, 4097, 20_000])
def test_sizes_and_thread_counts(isa: str, n: int) -> None:
    spec = SPECS["CLIPPED_RATIO-TOKEN-K3-NONE"]
    b = batch(n, torch.float32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native(spec, b, None, True))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, o) for a, o in zip(results[0], other, strict=True))
    want = truth(spec, b, torch.tensor([0, n]), True)
    torch.testing.assert_close(results[0][3].double(), want[3], rtol=1e-5, atol=1e-5)


SHAPES = {
    "one huge": [30_000],
    "many tiny": [1] * 9000,
    "empty ones": [0, 0, 5, 0, 9000, 0],
    "around a piece": [4095, 4096, 4097, 8192, 8193],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", [Level.SEQUENCE, Level.SEQUENCE_TOKEN])
def test_sequences(isa: str, level: Level, shape: str) -> None:
    spec = make_spec(Surrogate.CLIPPED_RATIO, level, "plain")
    cu = torch.tensor([0, *SHAPES[shape]]).cumsum(0)
    b = batch(int(cu[-1]), torch.float64)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(native(spec, b, cu, False))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, o) for a, o in zip(results[0], other, strict=True))
    for g, t in zip(results[0], truth(spec, b, cu, False), strict=True):
        torch.testing.assert_close(g, t.to(g.dtype), rtol=1e-10, atol=1e-10)


def test_avx2_and_avx512_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [one for one in ISAS if one in ("v3", "v4", "v4bf16")]
    if len(fused) < 2:
        pytest.skip("needs a machine with AVX-512")
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    b = batch(int(cu[-1]), torch.float32)
    for spec in SPECS.values():
        results = []
        for one in fused[:2]:
            monkeypatch.setenv("FUSEDPG_CPU_ISA", one)
            results.append(native(spec, b, cu, True))
        assert all(torch.equal(a.nan_to_num(7), c.nan_to_num(7)) for a, c in zip(*results, strict=True))


def test_unmasked_nan_stays_visible(isa: str) -> None:
    for name, spec in SPECS.items():
        b = batch(40, torch.float32, masked=False)
        b["logp"][3] = torch.nan
        b["advantages"][3] = 0.0
        per_token, _, _, sums = native(spec, b, torch.tensor([0, 20, 40]), False)
        assert per_token[3].isnan(), name
        assert sums[0].isnan(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["CLIPPED_RATIO-TOKEN-K3-LIVE", "CISPO-TOKEN-entropy", "CLIPPED_RATIO-SEQUENCE-plain"])
def test_one_pass_is_the_three_stages_to_the_bit(isa: str, name: str, dtype: torch.dtype) -> None:
    spec, vocab, n = SPECS[name], 5003, 24
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(2, 12, vocab, generator=g, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab, (n,), generator=g)
    b = batch(n, compute)
    logits.view(n, vocab)[b["w"] == 0] = torch.nan
    base = torch.log_softmax(logits.view(n, vocab).double(), -1).gather(1, targets[:, None])[:, 0]
    for i, s in enumerate(("logp_old", "logp_ref", "logp_rollout")):
        b[s] = (base + 0.1 * (i + 1) * torch.randn(n, generator=g)).to(compute)
    streams = [b[s] for s in STREAMS[1:]]
    cu, scale = torch.tensor([0, 12, 24]), torch.tensor(0.25, dtype=compute)
    args = (targets, b["w"], scale, *streams, cu, None, 0.8, 0.0, 1.0, False)
    grad = torch.full_like(logits, torch.nan)
    got = cpu.loss_forward(spec.encode(), logits, *args, grad)

    want_entropy = spec.entropy_coef != 0
    rows = cpu.logprob_forward(logits, targets, b["w"] != 0, None, 0.8, 0.0, 1.0, want_entropy)
    tokens = cpu.token_loss(spec.encode(), rows[0], rows[1], b["w"], *streams, cu)
    want = torch.full_like(logits, torch.nan)
    e = tokens[2] * scale if want_entropy else None
    h = rows[1] if want_entropy else None
    cpu.logprob_backward(logits, targets, rows[2], rows[3], h, tokens[1] * scale, e, None, 0.8, 0.0, 1.0, want)
    assert all(torch.equal(a, w) for a, w in zip(got, (*rows, *tokens), strict=True))
    assert torch.equal(grad, want)
    assert grad.isfinite().all()
    assert (grad.view(n, vocab)[b["w"] == 0] == 0).all()
    assert (grad != 0).any()
    assert all(
        torch.equal(a, w) for a, w in zip(cpu.loss_forward(spec.encode(), logits, *args, None), got, strict=True)
    )
    cpu.loss_forward(spec.encode(), logits, *args, logits)
    assert torch.equal(logits, want)
