"""Exactness by rows: masked rows, rows without a coefficient, empty batches, a row's bits whatever its batch."""

import pytest
import torch
from heads import GRADIENTS, WALKS, HeadCase, make_head_case, run_head, smallest_workspace, use_walk

import fusedpg
from fusedpg import linear_plan
from support import backend_device, spec_for

NAMES = ("dapo", "gspo", "gmpo", "echo")


def kept_rows(case: HeadCase, keep: torch.Tensor) -> HeadCase:
    """Only some rows of a packed case; every sequence keeps its name and shortens."""
    cu = case.kwargs["cu_seqlens"]
    segment = torch.searchsorted(cu, torch.arange(len(keep)), right=True) - 1
    lengths = torch.bincount(segment[keep], minlength=len(cu) - 1)
    kwargs = {}
    for key, value in case.kwargs.items():
        per_token = torch.is_tensor(value) and value.shape == keep.shape
        kwargs[key] = value[keep] if per_token else value
    kwargs["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return HeadCase(case.hidden[keep], case.weight, case.bias, case.targets[keep], kwargs)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", NAMES)
def test_masking_equals_removing_the_rows(name: str, walk: str, monkeypatch):
    """Bit for bit: the masked rows enter no product at all."""
    use_walk(monkeypatch, walk)
    spec = spec_for(name, "token-mean", "observation" if name == "echo" else "k3-entropy")
    case = make_head_case(spec, seed=6, width=24)
    keep = case.kwargs["mask"] | case.kwargs.get("obs_mask", torch.tensor(False))
    assert 0 < keep.sum() < len(keep)
    extra = {"workspace_mib": smallest_workspace(case.hidden, case.weight)} if walk == "blocks" else {}
    whole = run_head(spec, case, "cpu", **extra)
    part = run_head(spec, kept_rows(case, keep), "cpu", **extra)
    for key, value in part.values.items():
        full = whole.values[key]
        assert torch.equal(full[keep] if full.shape[:1] == keep.shape else full, value), key
    assert (whole.values["grad:hidden"][~keep] == 0).all()
    assert (whole.values["logp"][~keep] == 0).all()


def clipped_case(active: int, count: int) -> tuple[fusedpg.LossSpec, HeadCase, torch.Tensor]:
    """PPO rows of which some have a gradient, and which; the others are clipped on the side that stops it."""
    spec = fusedpg.loss_spec("ppo_clip", reduction="token-sum")
    case = make_head_case(spec, vocab=61, width=24, lengths=(count,), seed=1)
    case.hidden = torch.randn(count, 24, generator=torch.Generator().manual_seed(2))
    case.targets = case.targets.clamp(min=0)
    logp = fusedpg.linear_token_logprobs(case.hidden, case.weight, case.targets, bias=case.bias).logp
    kept = torch.randperm(count, generator=torch.Generator().manual_seed(3)) < active
    old = torch.where(kept, logp, logp - 1)  # ratio e, advantage 1: clipped
    case.kwargs = {"logp_old": old, "advantages": 1.0}
    return spec, case, kept


@pytest.mark.parametrize(("native_backend", "active"), [*(("cpu", n) for n in (0, 1, 150, 290, 300)), ("triton", 20)])
def test_rows_without_a_coefficient_leave_the_gradient(native_backend: str, active: int):
    spec, case, kept = clipped_case(active, 300 if native_backend == "cpu" else 40)
    got = run_head(spec, case, native_backend)
    assert got.output.metrics["active_tokens"] == active
    assert (got.values["grad:hidden"][~kept] == 0).all()
    assert (got.values["grad:hidden"][kept] != 0).any(-1).all()
    kwargs = {"logp_old": case.kwargs["logp_old"][kept], "advantages": 1.0}
    alone = run_head(
        spec, HeadCase(case.hidden[kept], case.weight, case.bias, case.targets[kept], kwargs), native_backend
    )
    alone.values["grad:hidden"] = torch.zeros_like(got.values["grad:hidden"]).index_put_(
        (kept,), alone.values["grad:hidden"]
    )
    for name in GRADIENTS:
        torch.testing.assert_close(got.values[f"grad:{name}"], alone.values[f"grad:{name}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "clip_cov"])
def test_nothing_selected_anywhere(name: str, backend: str):
    """Finite, zero, connected, although every hidden state is NaN."""
    spec = spec_for(name, "seq-mean-token-mean", "observation" if name == "echo" else "plain")
    case = make_head_case(spec, packed=False)
    case.hidden[:] = torch.nan
    none = torch.zeros(case.targets.shape, dtype=torch.bool)
    got = run_head(spec, case, backend, mask=none, **({"obs_mask": none} if name == "echo" else {}))
    assert got.values["loss"] == got.values["numerator"] == got.values["weight"] == 0
    for key in GRADIENTS:
        assert (got.values[f"grad:{key}"] == 0).all()
        assert got.values[f"grad:{key}"].shape == getattr(case, key).shape
    assert all(torch.isfinite(v).all() for v in got.values.values())


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_no_tokens(name: str, shape: tuple, backend: str):
    device = backend_device(backend)
    weight = torch.randn(9, 5, device=device, requires_grad=True)
    hidden = torch.zeros(*shape, 5, device=device, requires_grad=True)
    targets = torch.zeros(shape, dtype=torch.int64, device=device)
    kwargs = {"logp_old": torch.zeros(shape, device=device)}
    if len(shape) == 1:
        kwargs["cu_seqlens"] = torch.tensor([0, 0, 0], device=device)
    kwargs["sequence_advantages"] = torch.ones(2 if len(shape) == 1 else shape[0], device=device)
    out = fusedpg.policy_loss_from_hidden(fusedpg.loss_spec(name), hidden, weight, targets, backend=backend, **kwargs)
    out.loss.backward()
    assert out.loss == 0
    assert (weight.grad == 0).all()
    assert hidden.grad.shape == hidden.shape
    scored = fusedpg.linear_token_logprobs(hidden, weight, targets, return_entropy=True, backend=backend)
    assert scored.logp.shape == scored.entropy.shape == shape
    (scored.logp.sum() + scored.entropy.sum()).backward()


@pytest.mark.parametrize("width", [1, 3])
def test_one_token_type(width: int, backend: str):
    """V = 1: probability one, no gradient."""
    spec = fusedpg.loss_spec("reinforce", entropy_coef=0.1)
    case = make_head_case(spec, vocab=1, width=width)
    got = run_head(spec, case, backend, return_entropy=True)
    assert (got.values["logp"] == 0).all()
    assert (got.values["entropy"] == 0).all()
    assert all((got.values[f"grad:{name}"] == 0).all() for name in GRADIENTS)


def test_padded_equals_packed(native_backend: str):
    for name in NAMES if native_backend == "cpu" else ("gspo",):
        spec = spec_for(name, "seq-mean-token-mean", "observation" if name == "echo" else "k3-entropy")
        padded = make_head_case(spec, packed=False, seed=3)
        count, length = padded.targets.shape
        kwargs = {
            key: value.flatten() if torch.is_tensor(value) and value.ndim == 2 else value
            for key, value in padded.kwargs.items()
        }
        kwargs["cu_seqlens"] = torch.arange(count + 1) * length
        packed = HeadCase(padded.hidden.flatten(0, 1), padded.weight, padded.bias, padded.targets.flatten(), kwargs)
        a, b = run_head(spec, padded, native_backend), run_head(spec, packed, native_backend)
        for key, value in b.values.items():
            assert torch.equal(a.values[key].reshape(value.shape), value), f"{name} {key}"


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_sequence_longer_than_the_budget(name: str, monkeypatch):
    """Two passes agree with whole sequences, the log-probs bit for bit."""
    spec = spec_for(name, "seq-mean-token-mean", "k3-entropy")
    case = make_head_case(spec, width=24, seed=2, lengths=(300, 41))
    results = []
    for rows in (320, 192):
        monkeypatch.setattr(linear_plan, "MOST_ROWS", rows)
        results.append(run_head(spec, case, "cpu"))
    for key, value in results[0].values.items():
        torch.testing.assert_close(results[1].values[key], value, rtol=2e-5, atol=1e-6, msg=key)
    assert torch.equal(results[0].values["logp"], results[1].values["logp"])


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 37), (67, 1001), (896, 2003), (1, 5)], ids=str)
def test_a_row_does_not_see_its_batch(shape: tuple, dtype: torch.dtype):
    """Alone, among 7 and among 4,096 or 1,100, with and without gradient, whatever is masked around it."""
    width, vocab = shape
    count = 4096 if width * vocab < 100_000 else 1100
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=g).to(dtype)
    weight = (2 * torch.randn(vocab, width, generator=g) / width**0.5).to(dtype)
    targets = torch.randint(0, vocab, (count,), generator=g)
    full = fusedpg.linear_token_logprobs(hidden, weight, targets, return_entropy=True, backend="cpu")
    for rows in (slice(100, 101), slice(100, 107), slice(64, 127), slice(1, count)):
        part = fusedpg.linear_token_logprobs(hidden[rows], weight, targets[rows], return_entropy=True, backend="cpu")
        assert torch.equal(part.logp, full.logp[rows])
        assert torch.equal(part.entropy, full.entropy[rows])
    mask = torch.rand(count, generator=g) > 0.7
    masked = fusedpg.linear_token_logprobs(hidden, weight, targets, mask=mask, backend="cpu").logp
    assert torch.equal(masked[mask], full.logp[mask])
    leaf = hidden[:300].clone().requires_grad_()
    for name in ("dapo", "gspo"):
        args = {"sequence_advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 300]), "logp_old": full.logp[:300]}
        spec = fusedpg.loss_spec(name, entropy_coef=0.1)
        out = fusedpg.policy_loss_from_hidden(spec, leaf, weight, targets[:300], backend="cpu", **args)
        assert torch.equal(out.logp, full.logp[:300])
        assert out.metrics["ratio_min"] == out.metrics["ratio_max"] == 1


@pytest.mark.parametrize("workspace", [0.7, 1.0, 1.3, 1.7, 2.0, 2.4, 3.0])
def test_a_gradient_does_not_change_a_row(workspace: float):
    """Around the workspace at which whole rows begin to fit, and with two passes besides."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(80, 40, generator=g), torch.randn(3001, 40, generator=g)
    targets = torch.randint(0, 3001, (80,), generator=g)
    kwargs = {"workspace_mib": workspace, "backend": "cpu"}
    silent = fusedpg.linear_token_logprobs(hidden, weight, targets, **kwargs).logp
    scored = fusedpg.linear_token_logprobs(hidden.clone().requires_grad_(), weight, targets, **kwargs).logp
    spec = fusedpg.loss_spec("reinforce")
    trained = fusedpg.policy_loss_from_hidden(
        spec, hidden.clone().requires_grad_(), weight, targets, advantages=1.0, **kwargs
    ).logp
    assert torch.equal(silent, scored.detach())
    assert torch.equal(silent, trained)


def test_the_workspace_changes_rounding_only():
    spec = spec_for("dapo", "token-mean", "k3-entropy")
    case = make_head_case(spec, vocab=1201, width=33, lengths=(300, 41))
    results = [run_head(spec, case, "cpu", workspace_mib=mib) for mib in (None, 2.5, 1.0, 0.3, 0.06)]
    for other in results[1:]:
        for key, value in results[0].values.items():
            torch.testing.assert_close(other.values[key], value, rtol=2e-5, atol=1e-6, msg=key)


def test_the_same_call_gives_the_same_bits():
    spec = spec_for("gspo", "token-mean", "k3-entropy")
    case = make_head_case(spec, vocab=1201, width=33, lengths=(300, 41), dtypes=(torch.bfloat16, torch.bfloat16))
    first = run_head(spec, case, "cpu", workspace_mib=1.5)
    for _ in range(2):
        again = run_head(spec, case, "cpu", workspace_mib=1.5)
        assert all(torch.equal(again.values[key], value) for key, value in first.values.items())
