"""Inputs of the kernel tests, the fp64 truth, and how close a kernel's results must be to it."""

import torch

from fusedpg import reference
from fusedpg.kernels import launch

BLOCK, CHUNK = 64, 128
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def use_small_blocks(monkeypatch):
    """Launch shapes that a few dozen tokens and a few hundred columns cross."""
    monkeypatch.setattr(launch, "VOCABULARY", launch.Shape(block=BLOCK, threads=64, chunk=CHUNK))
    monkeypatch.setattr(launch, "PAIRS", launch.Shape(block=BLOCK, threads=64, chunk=CHUNK))
    monkeypatch.setattr(launch, "TOKENS", launch.Shape(block=16, threads=64))
    monkeypatch.setattr(launch, "SEQUENCE", launch.Shape(block=4, threads=64))
    monkeypatch.setattr(launch, "FINISH", launch.Shape(block=4, threads=64))
    monkeypatch.setattr(launch, "SPLIT_BELOW", 0)


def rounding(dtype):
    """One storage rounding; the interpreter truncates to bf16, hardware rounds to nearest (see test_aot)."""
    return torch.finfo(dtype).eps


def close(got, want, dtype=torch.float32, scale=1.0):
    bound = rounding(dtype) * want.abs() + 4e-6 * scale * (1.0 + want.abs())
    both_nan = got.isnan() & want.isnan()
    same = got.double() == want
    assert bool((both_nan | same | ((got.double() - want).abs() <= bound)).all()), (got, want)


def make_logits(shape, dtype, spread=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(DEVICE)


def make_targets(n, v, seed=1):
    return torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def truth(logits, targets, active, temperature, softcap, logit_scale):
    """fp64 (leaf, logp, entropy) of the stored logits."""
    leaf = logits.double().reshape(-1, logits.shape[-1]).clone().requires_grad_()
    on = torch.ones_like(targets, dtype=torch.bool) if active is None else active
    logp, entropy = reference.logprobs(leaf, targets, on, temperature, softcap, logit_scale, True)
    return leaf, logp, entropy
