"""Cases 108-117, 124 and 125: memory, registration, devices, imports, absent arguments."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import assert_bits, close, from_logits, from_logp, leaf, random, random_ids, tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusedpg
from fusedpg import reference
from support import saved_storages

KERNELS = Path(__file__).parents[2] / "kernels"


def saved_bytes(call):
    """Bytes that autograd keeps for backward while `call` runs."""
    kept, result = saved_storages(call)
    return sum(kept.values()), result


def test_case_108_entropy_as_a_metric_saves_rows_only(native_backend):
    """huggingface/trl#4013, THUDM/slime#2130: full-vocabulary temporaries, kept although the coefficient is 0."""
    rows, vocab = 6, 2000
    logits, targets = random(rows, vocab).requires_grad_(), random_ids(vocab, rows)
    own = logits.untyped_storage().nbytes()
    spec = fusedpg.loss_spec("reinforce")
    kwargs = {"advantages": 1.0, "backend": native_backend}
    for call in (
        lambda: fusedpg.policy_loss_from_logits(spec, logits, targets, return_entropy=True, **kwargs),
        lambda: fusedpg.policy_loss_from_logits(spec, logits, targets, **kwargs),
        lambda: fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=native_backend),
    ):
        kept, _ = saved_bytes(call)
        assert kept <= own + 256 * rows
    _, out = saved_bytes(lambda: fusedpg.policy_loss_from_logits(spec, logits, targets, return_entropy=True, **kwargs))
    assert not out.entropy.requires_grad


@pytest.mark.gpu
def test_case_108_entropy_peak_memory():
    """huggingface/trl#4013: tens of GB for a metric."""
    rows, vocab = 8192, 151936
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    fusedpg.token_logprobs(logits[:1], targets[:1], return_entropy=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fusedpg.token_logprobs(logits, targets, return_entropy=True)
    assert torch.cuda.max_memory_allocated() - before < 256 * rows


class PeakMemory(TorchDispatchMode):
    """Bytes of the live storages that operators made, those of `given` apart, and their peak."""

    def __init__(self, *given):
        super().__init__()
        self.live, self.peak = 0, 0
        self.storages = weakref.WeakKeyDictionary({t.untyped_storage(): True for t in given})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage not in self.storages:
                    self.storages[storage] = True
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.release, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def release(self, nbytes):
        self.live -= nbytes


def test_case_109_fallback_memory_grows_with_the_chunk(monkeypatch):
    """NVIDIA-NeMo/RL#4222: plain autograd over chunks keeps each of them."""
    monkeypatch.setattr(reference, "ROW_CHUNK", 64)
    rows, vocab = 1024, 1024
    logits, targets = random(rows, vocab).requires_grad_(), random_ids(vocab, rows)
    matrix, chunk = rows * vocab * 4, 64 * vocab * 4
    with PeakMemory(logits, targets) as forward:
        out = fusedpg.policy_loss_from_logits(
            fusedpg.loss_spec("reinforce"), logits, targets, advantages=1.0, return_entropy=True, backend="reference"
        )
    assert 0 < forward.peak < 12 * chunk < matrix
    kept, _ = saved_bytes(
        lambda: fusedpg.token_logprobs(logits, targets, return_entropy=True, backend="reference").logp.sum()
    )
    assert kept < matrix + 12 * chunk  # the logits themselves, and no copy of them
    out.loss.backward()
    assert torch.isfinite(logits.grad).all()


OPTIONS = {
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 2.0},
    "logit_scale": {"logit_scale": 1.5},
    "normalizer": {"normalizer": 3.0},
    "mask": {"mask": tensor([[1.0, 0.5, 0.0], [1.0, 1.0, 1.0]])},
    "is_weights": {"is_weights": tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 1.0]])},
    "row_temperature": {"temperature": tensor([[1.0, 0.5, 0.7], [2.0, 1.0, 1.0]])},
    "return_entropy": {"return_entropy": True},
    "no_metrics": {"metrics": "none"},
    "inplace": {"inplace": True},
}


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("name", ["grpo", "gspo_token"])
def test_case_110_options_mean_the_same_padded_and_packed(native_backend, name, option):
    """verl-project/verl#7582: an option was ignored in one of two branches."""
    spec = fusedpg.loss_spec(name, kl="k3", kl_coef=0.1, entropy_coef=0.05)
    values, targets = random(2, 3, 7), random_ids(7, 2, 3)
    streams = {
        "logp_old": random(2, 3, seed=1) * 0.1 - 2,
        "logp_ref": random(2, 3, seed=2) * 0.1 - 2,
        "advantages": random(2, 3, seed=3),
    }

    def run(options, packed):
        arguments = {**streams, **options}
        if packed:
            arguments = {k: v.to(values.device).reshape(-1) if torch.is_tensor(v) else v for k, v in arguments.items()}
            arguments["cu_seqlens"] = tensor([0, 3, 6], torch.int64)
        else:
            arguments = {k: v.to(values.device) if torch.is_tensor(v) else v for k, v in arguments.items()}
        root = (values.reshape(6, 7) if packed else values).clone().requires_grad_()
        logits = root * 1.0
        out = fusedpg.policy_loss_from_logits(
            spec, logits, targets.reshape(-1) if packed else targets, backend=native_backend, **arguments
        )
        (grad,) = torch.autograd.grad(out.loss, root)
        return out, grad

    padded, packed = run(OPTIONS[option], False), run(OPTIONS[option], True)
    assert_bits(padded[0].loss, packed[0].loss)
    assert_bits(padded[0].logp.reshape(-1), packed[0].logp)
    assert_bits(padded[1].reshape(6, 7), packed[1])
    assert padded[0].metrics.to_dict() == packed[0].metrics.to_dict()
    assert (padded[0].entropy is None) == (packed[0].entropy is None) == (option != "return_entropy")
    baseline, base_grad = run({}, False)
    changes_loss = option not in ("return_entropy", "no_metrics", "inplace")
    assert (baseline.loss != padded[0].loss).item() == changes_loss
    if not changes_loss:
        assert_bits(base_grad, padded[1])


def test_case_111_no_graph_break_and_few_compilations(native_backend):
    """axolotl-ai-cloud/axolotl#3788: raw kernels broke the compiled graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    spec = fusedpg.loss_spec("ppo_clip", anchor="self")

    def loss(logits, targets):
        return fusedpg.policy_loss_from_logits(spec, logits, targets, advantages=1.0, backend=native_backend).loss

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for rows in (5, 6, 7, 9):
        logits, targets = random(rows, 8).requires_grad_(), random_ids(8, rows)
        value = compiled(logits, targets)
        torch.testing.assert_close(value, loss(logits, targets))
        value.backward()
    assert counter.frame_count <= 2  # the first shape, then a dynamic one
    compiled(random(1, 8).requires_grad_(), random_ids(8, 1))
    assert counter.frame_count <= 3  # torch always specialises size 1


@pytest.mark.parametrize("name", ["ppo_clip", "gspo_token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_111_shapes_in_fake_mode(native_backend, name, dtype):
    """axolotl-ai-cloud/axolotl#3788: no shape-only implementation."""
    with FakeTensorMode():
        logits = torch.empty(2, 3, 8, dtype=dtype, requires_grad=True)
        targets = torch.zeros(2, 3, dtype=torch.int64)
        out = fusedpg.policy_loss_from_logits(
            fusedpg.loss_spec(name, entropy_coef=0.1),
            logits,
            targets,
            logp_old=torch.zeros(2, 3),
            advantages=1.0 if name == "ppo_clip" else torch.zeros(2, 3),
            mask=torch.ones(2, 3),
            return_entropy=True,
            backend=native_backend,
        )
        lp = fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=native_backend)
    for per_token in (out.logp, out.entropy, out.per_token, lp.logp, lp.entropy):
        assert (per_token.shape, per_token.dtype) == ((2, 3), torch.float32)
    assert (out.loss.shape, out.loss.dtype) == ((), torch.float32)
    assert (out.numerator.shape, out.weight.shape) == ((), ())
    assert out.loss.requires_grad
    assert lp.logp.requires_grad


@pytest.mark.parametrize("name", ["logp_old", "logp_ref", "advantages", "mask", "is_weights"])
def test_case_112_mixed_devices(backend, name):
    """linkedin/Liger-Kernel#1303, triton-lang/triton#2441, #5205: `meta` stands in for a second device."""
    arguments = {n: random(3) for n in ("logp_old", "logp_ref", "advantages")}
    arguments[name] = torch.empty(3, device="meta")
    spec = fusedpg.loss_spec("grpo", reduction="token-mean")
    with pytest.raises(ValueError, match=rf"{name}: expected device .* \(that of targets\); got meta; move it with"):
        fusedpg.policy_loss_from_logits(spec, random(3, 5), random_ids(5, 3), backend=backend, **arguments)


@pytest.mark.gpu
def test_case_112_current_device_is_left_alone():
    """linkedin/Liger-Kernel#1303: kernels started on the current device, not the tensor's."""
    before = torch.cuda.current_device()
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    logits = torch.zeros(3, 5, device=device, requires_grad=True)
    out = fusedpg.token_logprobs(logits, torch.zeros(3, dtype=torch.int64, device=device))
    out.logp.sum().backward()
    assert out.logp.device == device
    assert torch.cuda.current_device() == before


@pytest.mark.parametrize(("backend_name", "warp_size"), [("cuda", 32), ("hip", 32), ("hip", 64)])
def test_case_113_threads_in_a_program(backend_name, warp_size):
    """linkedin/Liger-Kernel#231, #266, #326: 32 warps of 64 threads are too many."""
    from fusedpg.kernels import launch

    variants = list(launch.reachable_variants())
    assert variants
    for _, constants, shape in variants:
        warps = launch.target_options(shape, backend_name, warp_size, constants)["num_warps"]
        assert warps >= 1
        assert warps & (warps - 1) == 0
        assert warps * warp_size <= 1024


@pytest.mark.gpu
def test_case_114_side_stream():
    """pytorch/pytorch#178547, #127531: launched on a cached default stream."""
    logits = random(512, 50000)
    targets = random_ids(50000, 512)
    expected = fusedpg.token_logprobs(logits * 3 + 1, targets).logp
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        out = fusedpg.token_logprobs(logits * 3 + 1, targets).logp
    stream.synchronize()
    assert_bits(out, expected)


def test_case_115_first_call_equals_second(backend):
    """triton-lang/triton#6547, #781, #54: tuning runs repeated an accumulating kernel."""
    logits, targets = random(5, 33), random_ids(33, 5)
    spec = fusedpg.loss_spec("reinforce", entropy_coef=0.3)
    runs = [
        from_logits(spec, logits.clone().requires_grad_(), targets, advantages=1.0, backend=backend) for _ in range(2)
    ]
    assert_bits(runs[0][0].loss, runs[1][0].loss)
    assert_bits(runs[0][1], runs[1][1])


def test_case_115_no_kernel_is_autotuned():
    """triton-lang/triton#6547: nothing of ours is run twice to be timed."""
    for path in KERNELS.glob("*.py"):
        assert "autotune" not in path.read_text(), path


def test_case_116_import_without_triton():
    """linkedin/Liger-Kernel#24, #79, triton-lang/triton#4938: the import failed where Triton is missing or moved."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fusedpg\n"
        "z = torch.zeros(2, 3)\n"
        "t = torch.zeros(2, dtype=torch.int64)\n"
        "print(fusedpg.token_logprobs(z, t, backend='reference').logp.tolist())\n"
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "try:\n"
        "    fusedpg.token_logprobs(z, t, backend='triton')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "-1.0986" in done.stdout
    assert "backend: 'triton' cannot run here" in done.stdout
    assert "pip install" in done.stdout


@pytest.mark.parametrize("name", ["targets", "mask", "advantages"])
def test_case_117_arguments_left_on_another_device(backend, name):
    """triton-lang/triton#174: CPU targets next to GPU logits gave an opaque error. `meta` stands in for the GPU."""
    arguments = {"targets": random_ids(5, 3), "mask": torch.ones(3), "advantages": torch.ones(3)}
    logits = random(3, 5)
    arguments[name] = torch.empty_like(arguments[name], device="meta")
    targets = arguments.pop("targets")
    with pytest.raises(ValueError, match=rf"{name}: expected device {logits.device.type}.*; got meta"):
        fusedpg.policy_loss_from_logits(fusedpg.loss_spec("reinforce"), logits, targets, backend=backend, **arguments)


@pytest.mark.parametrize("vocab", [5, 3])
def test_case_124_per_token_output_and_no_gradient(backend, vocab):
    """linkedin/Liger-Kernel#421, #507: reduction "none" gave one number; 0 when no gradient was needed."""
    values, targets = random(3, vocab), random_ids(vocab, 3)
    frozen = fusedpg.token_logprobs(values, targets, backend=backend)
    trained = fusedpg.token_logprobs(values.clone().requires_grad_(), targets, backend=backend)
    assert frozen.logp.shape == (3,)
    assert not frozen.logp.requires_grad
    assert_bits(frozen.logp, trained.logp.detach())
    spec = fusedpg.loss_spec("reinforce")
    losses = [
        fusedpg.policy_loss_from_logits(spec, z, targets, advantages=1.0, backend=backend)
        for z in (values, values.clone().requires_grad_())
    ]
    assert losses[0].loss != 0
    assert losses[0].per_token.shape == (3,)
    assert_bits(losses[0].loss, losses[1].loss.detach())
    close(losses[0].per_token, (-trained.logp.detach()).cpu())


def test_case_125_absent_reference(backend):
    """huggingface/trl#4040, #2806, nvidia-cosmos/cosmos-reason1#17: what an absent reference means."""
    logp, old = leaf([-1.0, -2.0]), tensor([-1.1, -1.9])
    kwargs = {"logp_old": old, "advantages": 1.0, "backend": backend}
    off = fusedpg.loss_spec("grpo", kl_coef=0.0, reduction="token-mean")
    absent, grad = from_logp(off, logp, **kwargs)
    broken, broken_grad = from_logp(off, logp, logp_ref=tensor([float("nan")] * 2), **kwargs)
    assert torch.isfinite(absent.loss)
    assert absent.metrics["kl"] == 0
    assert_bits(broken.loss, absent.loss)
    assert_bits(broken_grad, grad)
    on = fusedpg.loss_spec("grpo", kl_coef=0.1, reduction="token-mean")
    with pytest.raises(ValueError, match=r"logp_ref: the loss 'grpo' reads it .*got None; pass the log-probs"):
        from_logp(on, logp, **kwargs)
