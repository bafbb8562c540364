"""Bytes of logits that the kernels move, counted in the interpreter: the claim behind the speed, gated."""

import os

import pytest
import torch

import fusedpg
from fusedpg import gpu
from fusedpg.evidence.global_traffic import GlobalTraffic
from fusedpg.kernels import launch
from fusedpg.kernels.arguments import spec_tensor
from fusedpg.spec import Level, LossSpec, Surrogate

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counts in Triton's interpreter")

N, V = 6, 1003  # odd: every row has another alignment
# nothing is clipped: a clipped row has no gradient and would not be read again
SPEC = {level: LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.0, clip_high=1e9) for level in Level}

WIDE = {"is_correction": "truncate", "is_low": 0.1, "is_high": 1e9}
#: losses whose token needs its own row alone, with bounds that drop nothing
LOCAL = {
    "sapo": {},
    "topr": {},
    "dppo_tv": {"delta": 0.9},
    "dppo_kl": {"delta": 90.0},
    "icepop": {"alpha": 0.0, "beta": 1e9},
    "ipo": {"delta": 0.9},
    "dro": {"beta": 0.1},
    "reinforce_kl": {"bwd_kl_coef": 0.1, "fwd_kl_coef": 0.1},
    "cispo": {**WIDE, "is_reject": "token", "is_reject_high": 1e9},
}
#: losses with sums over sequences
BY_SEQUENCE = {
    "gmpo": {"epsilon_low": 9.0, "epsilon_high": 9.0},
    "vespo": {"lambda_pos": 0.1, "lambda_neg": 0.1},
    "luspo": {"clip_low": 0.0, "clip_high": 1e9},
    "cispo": {**WIDE, "is_level": "sequence"},
    "reinforce": {"is_reject": "geometric", "is_reject_high": 1e9},
}


def losses(table):
    return [pytest.param(fusedpg.loss_spec(name, **knobs), id=name) for name, knobs in table.items()]


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
        self.old, self.ref, self.rollout = (torch.full((N,), -7.0) for _ in range(3))
        self.obs = None
        self.cu = torch.tensor([0, N // 2, N])
        self.scale = torch.tensor(0.5)

    def loss(self, spec, out):
        spec = SPEC[spec] if isinstance(spec, Level) else spec
        ref = self.ref if spec.needs_logp_ref else None
        rollout = self.rollout if spec.needs_logp_rollout else None
        streams = {"adv": self.adv, "old": self.old, "ref": ref, "rollout": rollout, "weights": None, "obs": self.obs}
        inputs = {"logits": self.logits, "targets": self.targets, "w": self.w, "scale": self.scale, "cu": self.cu}
        inputs |= {name: stream for name, stream in streams.items() if stream is not None}
        if out is not None and out is not self.logits:
            inputs["out"] = out
        numbers = spec.encode()
        with GlobalTraffic(**inputs).naming(lambda size: "scratch") as traffic:
            traffic.name("spec", spec_tensor(tuple(numbers), self.logits.device))
            gpu.loss_forward(
                numbers, self.logits, self.targets, self.w, self.scale, [*streams.values(), None], self.cu,
                None, 1.0, 0.0, 1.0, False, out,
            )  # fmt: skip
        assert traffic.outside == []
        return traffic

    def per_logit(self, amount):
        return amount / (N * V)


# the row's target is read a second time, and so are the sectors that two rows or two chunks share
GATHER = 2 / V
SHARED = 2 * 32 / V


def test_forward_reads_the_logits_once(split):
    run = Run()
    traffic = run.loss(Level.TOKEN, None)
    assert run.per_logit(traffic.read("logits")) == pytest.approx(2.0 + GATHER)
    assert traffic.written("logits") == 0


@pytest.mark.parametrize("spec", [pytest.param(SPEC[Level.TOKEN], id="ppo_clip"), *losses(LOCAL)])
def test_one_pass_touches_four_bytes_a_logit(spec):
    run = Run()
    out = torch.empty_like(run.logits)
    traffic = run.loss(spec, out)
    unique = traffic.unique("load", "logits") + traffic.unique("store", "out")
    assert run.per_logit(unique) == pytest.approx(4.0, abs=SHARED)
    # the second read of a row follows its first at once: at worst it misses every cache
    assert run.per_logit(traffic.read("logits") + traffic.written("out")) <= 6.0 + GATHER
    assert traffic.written("out") == N * V * 2


SEQUENCE = [pytest.param(SPEC[level], id=level.name) for level in Level if level != Level.TOKEN]


@pytest.mark.parametrize("spec", [*SEQUENCE, *losses(BY_SEQUENCE)])
def test_sums_over_sequences_read_twice_and_write_once(spec, split):
    run = Run()
    assert spec.needs_segments
    traffic = run.loss(spec, torch.empty_like(run.logits))
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
def test_rows_that_only_observe_are_read(level, split):
    """Weight 0 and an observation weight: read like any other; neither: untouched."""
    run = Run()
    run.w[1] = run.w[4] = 0.0
    run.adv[1] = run.old[1] = torch.nan  # no policy stream of the row counts
    run.obs = torch.zeros(N)
    run.obs[1] = 0.5
    spec = SPEC[level].replace(obs_coef=0.1)
    traffic = run.loss(spec, out := torch.empty_like(run.logits))
    assert traffic.read("logits") / V / (N - 1) == pytest.approx(4.0 + GATHER, abs=16 * 2 / V)
    assert traffic.touched("logits", run.logits[0, 1])
    assert not traffic.touched("logits", run.logits[1, 1])
    assert out[0, 1].isfinite().all()
    assert (out[0, 1] != 0).any()
    assert (out[1, 1] == 0).all()


def test_observation_stays_in_one_pass():
    run = Run()
    run.obs = torch.full((N,), 0.5)
    traffic = run.loss(fusedpg.loss_spec("echo", clip_low=0.0, clip_high=1e9), out := torch.empty_like(run.logits))
    unique = traffic.unique("load", "logits") + traffic.unique("store", "out")
    assert run.per_logit(unique) == pytest.approx(4.0, abs=SHARED)
    assert traffic.written("out") == out.numel() * 2


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
