"""The same inputs give the same bits: across calls, threads, ISAs, batches and concurrent Python threads."""

import concurrent.futures

import pytest
import torch

import fusedpg
from support import backend_device, make_case, spec_for


def call(
    backend: str,
    name: str = "ppo_clip",
    *,
    vocab: int = 5003,
    terms: str = "k3-entropy",
    dtype: torch.dtype = torch.float32,
):
    spec = spec_for(name, "token-mean", terms)
    case = make_case(spec, dtype=dtype, packed=True, vocab=vocab, lengths=(17, 9, 0, 24))
    device = backend_device(backend)
    logits = case.logits.to(device).requires_grad_()
    kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.kwargs.items()}
    out = fusedpg.policy_loss_from_logits(spec, logits, case.targets.to(device), backend=backend, **kwargs)
    out.loss.backward()
    return [out.loss.detach(), out.logp, out.per_token, out.metrics.totals, out.metrics.extrema, logits.grad]


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
def test_repeated_calls(name: str, native_backend: str):
    vocab = 5003 if native_backend == "cpu" else 259
    assert_same_bits(call(native_backend, name, vocab=vocab), call(native_backend, name, vocab=vocab))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_one_thread_or_two(name: str, threads):
    threads(1)
    one = call("cpu", name)
    threads(2)
    assert_same_bits(one, call("cpu", name))


def test_isas_of_the_same_arithmetic(monkeypatch: pytest.MonkeyPatch):
    """AVX2 and AVX-512 builds run the same 16 lanes and the same fused multiply-adds."""
    from fusedpg import cpu

    fused = [isa for isa in cpu.available_isas() if isa in ("v3", "v4", "v4bf16")]
    if len(fused) < 2:
        pytest.skip("needs a processor with AVX-512")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = []
        for isa in fused:
            monkeypatch.setenv("FUSEDPG_CPU_ISA", isa)
            results.append(call("cpu", dtype=dtype))
        for other in results[1:]:
            assert_same_bits(results[0], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_does_not_see_its_batch_on_cpu(dtype: torch.dtype):
    """One row alone, in a batch of 7 and of 4,096, at other positions, with and without gradient: the same bits."""
    vocab = 4099
    rows = (3 * torch.randn(4096, vocab)).to(dtype)
    targets = torch.randint(0, vocab, (4096,))
    full = fusedpg.token_logprobs(rows, targets, return_entropy=True, backend="cpu")
    seven = fusedpg.token_logprobs(rows[100:107], targets[100:107], return_entropy=True, backend="cpu")
    assert torch.equal(full.logp[100:107], seven.logp)
    assert torch.equal(full.entropy[100:107], seven.entropy)
    for i in (100, 103):
        alone = fusedpg.token_logprobs(rows[i : i + 1], targets[i : i + 1], return_entropy=True, backend="cpu")
        assert torch.equal(alone.logp, full.logp[i : i + 1])
        assert torch.equal(alone.entropy, full.entropy[i : i + 1])
    spec = fusedpg.loss_spec("ppo_clip", anchor="self")
    logits = rows[:64].clone().requires_grad_()
    out = fusedpg.policy_loss_from_logits(spec, logits, targets[:64], advantages=1.0, backend="cpu")
    assert torch.equal(out.logp, full.logp[:64])


def test_a_row_does_not_see_its_batch_on_triton():
    """The few-rows split and the one-program path agree bit for bit (rows of equal alignment)."""
    device = backend_device("triton")
    vocab = 264
    rows = 3 * torch.randn(4096 if device.type == "cuda" else 200, vocab, device=device)
    targets = torch.randint(0, vocab, (len(rows),), device=device)
    full = fusedpg.token_logprobs(rows, targets, return_entropy=True, backend="triton")
    for part in (slice(0, 1), slice(5, 12), slice(len(rows) - 1, len(rows))):
        some = fusedpg.token_logprobs(rows[part], targets[part], return_entropy=True, backend="triton")
        assert torch.equal(full.logp[part], some.logp)
        assert torch.equal(full.entropy[part], some.entropy)


def test_on_policy_ratio_is_exactly_one(native_backend: str):
    """logp of the scoring pass, fed back as logp_old: ratio 1, clip fraction 0, KL 0, to the bit."""
    device = backend_device(native_backend)
    logits = torch.randn(6, 264, device=device).requires_grad_()
    targets = torch.randint(0, 264, (6,), device=device)
    old = fusedpg.token_logprobs(logits.detach(), targets, backend=native_backend).logp
    spec = fusedpg.loss_spec("ppo_clip")
    out = fusedpg.policy_loss_from_logits(spec, logits, targets, logp_old=old, advantages=1.0, backend=native_backend)
    m = out.metrics
    assert (m["ratio_min"], m["ratio_max"], m["clip_frac"], m["approx_kl"], m["approx_kl_k3"]) == (1, 1, 0, 0, 0)


def test_two_python_threads_do_not_disturb_each_other():
    want = call("cpu")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for got in pool.map(lambda _: call("cpu"), range(8)):
            assert_same_bits(got, want)
