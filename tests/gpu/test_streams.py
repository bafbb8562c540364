"""Work runs on the caller's stream and on the tensors' device, whichever is current; nothing waits for the GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import NAMES, SIZES, WITHOUT_WAITING, assert_same_bits, make

import fusedpg
from fusedpg import validate


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_work_is_ordered_on_a_side_stream(name: str, gpu: torch.device):
    """The stream is held up, then gives the inputs their values: a kernel on any other stream reads what was there."""
    work, later = (make(name, gpu, SIZES["cuda"], seed=seed) for seed in (0, 1))
    stale, want = work.call(), later.call()
    assert not torch.equal(stale[0], want[0])
    torch.cuda.synchronize(gpu)
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        work.refill(later)
        got = work.call()
    stream.synchronize()
    assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_what_follows_on_the_stream_sees_the_results(name: str, gpu: torch.device):
    """Without a synchronisation between the call and the copy of its results."""
    work = make(name, gpu, SIZES["cuda"])
    want = [value.cpu() for value in work.call()]
    stream = torch.cuda.Stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        copies = [torch.empty_like(value).copy_(value) for value in work.call()]
    torch.cuda.current_stream(gpu).wait_stream(stream)
    assert_same_bits([value.cpu() for value in copies], want)


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_nothing_waits_for_the_gpu(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """No copy from the host and no value read back, forward and backward."""
    work = make(name, device, SIZES[device.type])
    work.call()  # the numbers of a loss are copied to a device once
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            work.call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    monkeypatch.setattr(validate, "reads_values", lambda tensor: False)  # as on a GPU
    with Waits() as waits:
        work.call()
    assert not waits.seen


class Waits(TorchDispatchMode):
    """Operators that would wait for a GPU; reading an upstream gradient is what only the CPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("aten.lift_fresh", "aten.nonzero", "aten.masked_select", "aten.unique")
        booleans = str(func).startswith("aten.index") and any(
            index is not None and index.dtype == torch.bool for index in (args[1] if len(args) > 1 else ())
        )
        if str(func).startswith(waits) or booleans:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ devices


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_device_need_not_be_current(name: str, gpu: torch.device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 if gpu.index == 0 else 0)
    size = SIZES["cuda"]
    want = make(name, gpu, size).call()
    work = make(name, other, size)
    work.inputs = {key: value.to(other) for key, value in make(name, gpu, size).inputs.items()}
    assert torch.cuda.current_device() == gpu.index
    got = work.call()
    assert torch.cuda.current_device() == gpu.index
    assert {value.device for value in got} == {other}
    assert_same_bits([value.to(gpu) for value in got], want)


@pytest.mark.gpu
def test_the_current_device_is_left_alone(gpu: torch.device):
    """Also by a call that fails."""
    before = torch.cuda.current_device()
    for name in NAMES:
        make(name, gpu, SIZES["cpu"]).call()
    with pytest.raises(ValueError, match="logits: expected shape"):
        fusedpg.token_logprobs(torch.zeros(2, 3, device=gpu), torch.zeros(3, dtype=torch.int64, device=gpu))
    assert torch.cuda.current_device() == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["targets", "logp_old", "advantages", "mask", "weight"])
def test_an_argument_left_on_the_cpu(name: str, gpu: torch.device):
    """A named error, not an illegal address."""
    work = make("hidden ppo_clip" if name == "weight" else "ppo_clip", gpu, SIZES["cpu"])
    work.inputs[name] = work.inputs[name].cpu()
    said = "sequence_advantages" if name == "advantages" else name
    with pytest.raises(ValueError, match=rf"{said}: expected .*cuda.*; got cpu"):
        work.call()


@pytest.mark.gpu
def test_cpu_tensors_are_refused_by_name_and_run_by_default(gpu: torch.device):
    logits, targets = torch.randn(3, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="'triton' expects tensors on a GPU; got cpu"):
        fusedpg.token_logprobs(logits, targets, backend="triton")
    with pytest.raises(ValueError, match="'cpu' expects CPU tensors; got cuda"):
        fusedpg.token_logprobs(logits.to(gpu), targets.to(gpu), backend="cpu")
    assert fusedpg.token_logprobs(logits.to(gpu), targets.to(gpu)).backend == "triton"
