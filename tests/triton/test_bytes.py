"""Bytes of logits that the kernels move, counted in the interpreter: the claim behind the speed, gated."""

import os

import pytest
import torch

from fusedpg import gpu
from fusedpg.kernels import launch
from fusedpg.kernels.arguments import spec_tensor
from fusedpg.spec import Level, LossSpec, Surrogate
from triton_tools.global_traffic import GlobalTraffic

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter")

N, V = 6, 1003  # odd: every row has another alignment
# nothing is clipped: a clipped row has no gradient and would not be read again
SPEC = {level: LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.0, clip_high=1e9) for level in Level}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "VOCABULARY", launch.Shape(block=256, threads=64, chunk=512))
    monkeypatch.setattr(launch, "SPLIT_BELOW", 0)


@pytest.fixture(params=[0, 100], ids=["whole", "split"])
def split(request, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", request.param)
    return request.param > 0


class Run:
    """A batch, and what one call does to memory; every tensor a kernel may touch has a name."""

    def __init__(self, dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(2, N // 2, V, generator=generator).to(dtype)
        self.targets = torch.randint(0, V, (N,), generator=generator)
        self.w = torch.ones(N)
        self.adv = torch.randn(N, generator=generator)
        self.old = torch.full((N,), -7.0)
        self.cu = torch.tensor([0, N // 2, N])
        self.scale = torch.tensor(0.5)

    def loss(self, level, out):
        inputs = {"logits": self.logits, "targets": self.targets, "w": self.w, "adv": self.adv, "old": self.old}
        inputs |= {"cu": self.cu, "scale": self.scale}
        if out is not None and out is not self.logits:
            inputs["out"] = out
        spec = SPEC[level].encode()
        with GlobalTraffic(**inputs) as traffic, named_allocations(traffic):
            traffic.name("spec", spec_tensor(tuple(spec), self.logits.device))
            gpu.loss_forward(
                spec, self.logits, self.targets, self.w, self.scale, self.adv, self.old, None, None, None, self.cu,
                None, 1.0, 0.0, 1.0, False, out,
            )  # fmt: skip
        assert traffic.outside == []
        return traffic

    def per_logit(self, amount):
        return amount / (N * V)


class named_allocations:
    """Names "scratch" whatever gpu.py allocates while active."""

    def __init__(self, traffic):
        self.traffic = traffic

    def __enter__(self):
        self.kept, self.patch = [], pytest.MonkeyPatch()
        for owner, name in [(torch, "empty"), (torch, "zeros"), (torch, "empty_like"), (torch.Tensor, "new_zeros")]:
            self.patch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            self.kept.append(tensor)  # its address is not given to another tensor
            self.traffic.name("scratch", tensor)
            return tensor

        return made

    def __exit__(self, *exc):
        self.patch.undo()


# the row's target is read a second time, and so are the sectors that two rows or two chunks share
GATHER = 2 / V
SHARED = 2 * 32 / V


def test_forward_reads_the_logits_once(split):
    run = Run()
    traffic = run.loss(Level.TOKEN, None)
    assert run.per_logit(traffic.read("logits")) == pytest.approx(2.0 + GATHER)
    assert traffic.written("logits") == 0


def test_one_pass_touches_four_bytes_a_logit():
    run = Run()
    out = torch.empty_like(run.logits)
    traffic = run.loss(Level.TOKEN, out)
    unique = traffic.unique("load", "logits") + traffic.unique("store", "out")
    assert run.per_logit(unique) == pytest.approx(4.0, abs=SHARED)
    # the second read of a row follows its first at once: at worst it misses every cache
    assert run.per_logit(traffic.read("logits") + traffic.written("out")) <= 6.0 + GATHER
    assert traffic.written("out") == N * V * 2


@pytest.mark.parametrize("level", [Level.SEQUENCE, Level.SEQUENCE_TOKEN], ids=str)
def test_sequence_level_reads_twice_and_writes_once(level, split):
    run = Run()
    traffic = run.loss(level, torch.empty_like(run.logits))
    assert run.per_logit(traffic.read("logits")) == pytest.approx(4.0 + GATHER)
    assert run.per_logit(traffic.written("out")) == pytest.approx(2.0)


def test_in_place_needs_no_second_buffer(split):
    run = Run()
    traffic = run.loss(Level.TOKEN, run.logits)
    assert traffic.written("logits") == N * V * 2
    scratch = traffic.read("scratch") + traffic.written("scratch")
    assert scratch < 0.2 * N * V  # statistics, chunk states and partial sums: not of the logits' size


@pytest.mark.parametrize("level", list(Level), ids=str)
def test_masked_rows_are_never_read(level, split):
    run = Run()
    run.w[1] = run.w[4] = 0.0
    traffic = run.loss(level, torch.empty_like(run.logits))
    # one pass keeps a row's unaligned ends instead of reading them twice
    assert traffic.read("logits") / V / (N - 2) == pytest.approx(4.0 + GATHER, abs=16 * 2 / V)
    assert not traffic.touched("logits", run.logits[0, 1])
    assert not traffic.touched("logits", run.logits[1, 1])
    assert traffic.written("out") == N * V * 2


@pytest.mark.parametrize("level", list(Level), ids=str)
def test_rows_without_gradient_are_read_by_the_forward_only(level, split):
    run = Run()
    run.adv.zero_()
    traffic = run.loss(level, torch.empty_like(run.logits))
    assert run.per_logit(traffic.read("logits")) == pytest.approx(2.0 + GATHER)
    assert traffic.written("out") == N * V * 2


def test_backward_skips_rows_with_zero_coefficients():
    run = Run()
    statistics = gpu.logprob_forward(run.logits, run.targets, None, None, 1.0, 0.0, 1.0, True)
    _, entropy, row_max, log_sum = statistics
    c, e = torch.ones(N), torch.zeros(N)
    c[0] = c[3] = 0.0
    e[3] = 1.0
    out = torch.empty_like(run.logits)
    names = {"logits": run.logits, "out": out, "targets": run.targets, "entropy": entropy, "c": c, "e": e}
    with GlobalTraffic(**names, row_max=row_max, log_sum=log_sum) as traffic:
        gpu.logprob_backward(
            run.logits, run.targets, row_max, log_sum, entropy, c, e, None, 1.0, 0.0, 1.0, out
        )  # fmt: skip
    assert traffic.outside == []
    assert traffic.read("logits") == (N - 1) * V * 2
    assert traffic.written("out") == N * V * 2
    assert (out.view(N, V)[0] == 0).all()
