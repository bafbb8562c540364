"""The Triton kernels against the fp64 reference, launched through `fusedpg.gpu` with blocks small enough to cross."""

import itertools

import pytest
import torch

from fusedpg import gpu, reference
from fusedpg.kernels import launch
from fusedpg.spec import KL, Anchor, KLRatio, KLTarget, Level, LossSpec, Surrogate

BLOCK, CHUNK = 64, 128
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: one row, inside a vector, and one less, equal and more than a block and two chunks
WIDTHS = [1, 3, 17, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK + 1]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(launch, "VOCABULARY", launch.Shape(block=BLOCK, threads=64, chunk=CHUNK))
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


def check_logprob(logits, targets, active=None, temperature=0.7, softcap=0.0, logit_scale=1.3, entropy=True, out=None):
    """A and C against fp64; returns the gradient's tensor."""
    row_temperature = temperature if isinstance(temperature, torch.Tensor) else None
    scalar = 1.0 if row_temperature is not None else temperature
    knobs = (row_temperature, scalar, softcap, logit_scale)
    leaf, want_logp, want_entropy = truth(logits, targets, active, temperature, softcap, logit_scale)
    logp, h, row_max, log_sum = gpu.logprob_forward(logits, targets, active, *knobs, entropy)
    close(logp, want_logp.detach())
    assert h.numel() == (targets.numel() if entropy else 0)
    n = targets.numel()
    c, e = make_logits((n,), torch.float32, 1.0, 5), make_logits((n,), torch.float32, 1.0, 6)
    if active is not None:
        c, e = torch.where(active, c, 0.0), torch.where(active, e, 0.0)
    score = (want_logp * c).sum()
    if entropy:
        close(h, want_entropy.detach())
        score = score + (want_entropy * e).sum()
    (want,) = torch.autograd.grad(score, leaf)
    if out is None:
        out = torch.full(logits.shape, NAN, dtype=logits.dtype, device=DEVICE)
    extra = (h, c, e) if entropy else (None, c, None)
    gpu.logprob_backward(logits, targets, row_max, log_sum, *extra, *knobs, out)
    close(out.reshape(want.shape), want, logits.dtype)
    return out


# ---------------------------------------------------------------- stages A and C


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("entropy", [False, True], ids=["logp", "entropy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprob_matches_fp64(dtype, entropy, softcap, split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    for v in WIDTHS:
        check_logprob(make_logits((1, 3, v), dtype), make_targets(3, v), entropy=entropy, softcap=softcap)


def test_row_temperature():
    temperature = torch.tensor([0.5, 1.0, 2.0, 7.0], device=DEVICE)
    check_logprob(make_logits((1, 4, 70), torch.float32), make_targets(4, 70), temperature=temperature)


def strided(kind, dtype):
    """(logits view, its storage) of 2 x 3 rows of 141 logits."""
    if kind == "shifted":  # the hidden shift of language models: [:, :-1]
        whole = make_logits((2, 4, 141), dtype)
        return whole[:, :-1], whole
    if kind == "padded":
        whole = make_logits((2, 3, 160), dtype)
        return whole[..., 3:144], whole
    if kind == "unaligned":
        whole = make_logits((2 * 3 * 141 + 5,), dtype)
        return whole[5:].view(2, 3, 141), whole
    whole = make_logits((3, 2, 141), dtype)
    return whole.transpose(0, 1), whole


KINDS = ["shifted", "padded", "unaligned", "transposed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(kind, dtype):
    logits, _ = strided(kind, dtype)
    check_logprob(logits, make_targets(6, 141))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_writes_the_view_and_nothing_else(kind, dtype):
    logits, whole = strided(kind, dtype)
    expected = whole.clone()
    separate = check_logprob(logits, make_targets(6, 141))
    check_logprob(logits, make_targets(6, 141), out=logits)
    assert torch.equal(logits, separate)
    expected.as_strided(logits.shape, logits.stride(), logits.storage_offset()).copy_(separate)
    assert torch.equal(whole, expected)


def test_expanded_rows():
    check_logprob(make_logits((1, 1, 99), torch.float32).expand(2, 3, 99), make_targets(6, 99))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_masked_rows_are_not_read(split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    logits, targets = make_logits((1, 4, 300), torch.float32), make_targets(4, 300)
    active = torch.tensor([True, False, True, False], device=DEVICE)
    clean = logits.clone()
    logits[0, 1], logits[0, 3] = NAN, INF
    targets[1] = 1 << 40
    result = gpu.logprob_forward(logits, targets, active, None, 1.0, 0.0, 1.0, True)
    wanted = gpu.logprob_forward(clean, targets, active, None, 1.0, 0.0, 1.0, True)
    for got, want in zip(result, wanted, strict=True):
        assert torch.equal(got, want)
        assert (got[~active] == 0).all()


def test_target_outside_the_vocabulary_is_nan():
    logits = make_logits((1, 3, 50), torch.float32)
    targets = torch.tensor([-1, 50, 7], device=DEVICE)
    logp = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, False)[0]
    assert logp.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_broken_rows_are_nan_like_log_softmax(dtype, split, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 100 if split else 0)
    v = 2 * CHUNK + 3
    columns = [0, 1, 9, BLOCK, CHUNK + 9, v - 1]
    cases = list(itertools.product([NAN, INF], columns))
    # a broken row between two sound ones, and last a row that is -inf throughout
    logits, targets = make_logits((1, 2 * len(cases) + 3, v), dtype), make_targets(2 * len(cases) + 3, v)
    for i, (value, column) in enumerate(cases):
        logits[0, 2 * i + 1, column] = value
    logits[0, -2] = -INF
    logp, entropy, _, _ = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, True)
    broken = [i % 2 == 1 for i in range(len(logp))]
    assert logp.isnan().tolist() == entropy.isnan().tolist() == broken


def test_minus_inf_columns_have_no_probability():
    v = 2 * CHUNK + 3
    logits, targets = make_logits((1, 4, v), torch.float32), torch.tensor([5, 0, v - 1, 140], device=DEVICE)
    logits[0, 0, 10:] = -INF  # whole blocks and chunks
    logits[0, 1, 1:-1] = -INF
    logits[0, 2, : v - 4] = -INF
    logits[0, 3, ::2] = -INF  # its target too
    leaf, want, want_entropy = truth(logits, targets, None, 1.0, 0.0, 1.0)
    logp, entropy, row_max, log_sum = gpu.logprob_forward(logits, targets, None, None, 1.0, 0.0, 1.0, True)
    close(logp, want.detach())
    close(entropy, want_entropy.detach())
    out = torch.full_like(logits, NAN)
    c = e = torch.ones(4, device=DEVICE)
    gpu.logprob_backward(logits, targets, row_max, log_sum, entropy, c, e, None, 1.0, 0.0, 1.0, out)
    assert out.isfinite().all()
    assert (out[0, 1, 1:-1] == 0).all()
    assert (out[0, 0, 10:] == 0).all()
    assert leaf.shape == out[0].shape


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e9, 1e9])
def test_a_common_offset_costs_nothing(offset):
    steps = torch.arange(0, 300, device=DEVICE).remainder(7).float() * 64.0
    logits = (offset + steps).view(1, 1, 300)
    targets = torch.tensor([5], device=DEVICE)
    logp = gpu.logprob_forward(logits, targets, None, None, 8.0, 0.0, 1.0, False)[0]
    want = (logits[0, 0].double() / 8.0).log_softmax(-1)[5]
    assert abs(logp.double().item() - want.item()) <= 1e-6 * abs(want.item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_split_or_whole(dtype, monkeypatch):
    for v in (CHUNK + 1, 2 * CHUNK + 8, 3 * CHUNK + 5):
        logits, targets = make_logits((1, 5, v), dtype), make_targets(5, v)
        results = []
        for below in (0, 100):
            monkeypatch.setattr(launch, "SPLIT_BELOW", below)
            results.append(gpu.logprob_forward(logits, targets, None, None, 0.9, 0.0, 1.1, True))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------- losses


def specs():
    """Every surrogate, level, anchor, KL estimator and clamp at least once, with the combinations that interact."""
    clip = {"clip_low": 0.8, "clip_high": 1.2}
    yield LossSpec("reinforce", Surrogate.REINFORCE)
    for surrogate in list(Surrogate)[1:]:
        bounds = {} if surrogate == Surrogate.IMPORTANCE_RATIO else clip
        for level in Level:
            yield LossSpec("x", surrogate, level=level, **bounds)
            yield LossSpec("x", surrogate, level=level, log_ratio_clamp=(-0.3, 0.2), **bounds)
    yield LossSpec("x", Surrogate.CLIPPED_RATIO, dual_clip=1.3, **clip)
    yield LossSpec("x", Surrogate.CLIPPED_RATIO, delta=1.1, entropy_coef=0.02, **clip)
    for anchor in (Anchor.SELF, Anchor.ROLLOUT):
        yield LossSpec("x", Surrogate.CLIPPED_RATIO, anchor=anchor, **clip)
    for kl, ratio in itertools.product(list(KL)[1:], KLRatio):
        yield LossSpec("x", Surrogate.CLIPPED_RATIO, kl=kl, kl_coef=0.3, kl_ratio=ratio, **clip)
    live = {"kl": KL.K3, "kl_coef": 0.3, "kl_ratio": KLRatio.LIVE}
    yield LossSpec("x", Surrogate.CLIPPED_RATIO, level=Level.SEQUENCE, entropy_coef=0.02, **live, **clip)
    yield LossSpec("x", Surrogate.CLIPPED_RATIO, kl_clamp=(0.0, 0.05), kl_log_ratio_clamp=(-0.3, 0.3), **live, **clip)
    target = {"kl_straight_through": True, "kl_target": KLTarget.ROLLOUT}
    yield LossSpec("x", Surrogate.CLIPPED_RATIO, kl=KL.K1, kl_coef=0.2, **target, **clip)


SPECS = list(specs())
LENGTHS = [3, 0, 1, 7, 0, 5]


class Batch:
    """16 tokens in six sequences, two of them empty; masked tokens hold NaN."""

    def __init__(self, dtype=torch.float32, v=CHUNK + 11, is_weights=True, overflow=False):
        n = sum(LENGTHS)
        self.logits, self.targets = make_logits((1, n, v), dtype, 2.0), make_targets(n, v)
        draw = lambda seed, spread: make_logits((n,), torch.float32, spread, seed)  # noqa: E731
        self.w = draw(11, 1.0).abs() + 0.5
        self.adv = draw(12, 1.0)
        logp = self.logits.float().log_softmax(-1)[0].gather(1, self.targets[:, None])[:, 0]
        self.old, self.ref, self.rollout = (logp + draw(s, 0.3) for s in (13, 14, 15))
        self.is_weights = draw(16, 1.0).abs() if is_weights else None
        self.adv[5] = 0.0
        if overflow:
            self.old[5] = -1e4  # the ratio is inf where A = 0
        if is_weights:
            self.is_weights[6] = 0.0
        for hole in (2, 9):
            self.w[hole] = 0.0
            self.logits[0, hole] = NAN
            for t in (self.adv, self.old, self.ref, self.rollout, *([self.is_weights] if is_weights else [])):
                t[hole] = NAN
        self.cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], device=DEVICE)
        self.scale = torch.tensor(0.37, device=DEVICE)

    def tokens(self):
        d = lambda t: None if t is None else t.double()  # noqa: E731
        segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(DEVICE)
        return reference.Tokens(
            self.w.double(),
            d(self.adv),
            d(self.old),
            d(self.ref),
            d(self.rollout),
            d(self.is_weights),
            segment,
            len(LENGTHS),
        )

    def optional(self):
        return self.adv, self.old, self.ref, self.rollout, self.is_weights

    def loss(self, spec, out, want_entropy=True, cu=True):
        return gpu.loss_forward(
            spec.encode(), self.logits, self.targets, self.w, self.scale, *self.optional(), self.cu if cu else None,
            None, 0.9, 0.0, 1.0, want_entropy, out,
        )  # fmt: skip


def sums_close(got, want, spec):
    names = list(want)
    for i, name in enumerate(names):
        if name != "active":
            close(got[i : i + 1], want[name].detach().reshape(1), scale=30.0)


# the split path runs the same stage B: a sample of the specs, and every sequence level, is enough there
PATHS = [(s, "whole") for s in SPECS] + [
    (s, "split") for i, s in enumerate(SPECS) if s.level != Level.TOKEN or i % 6 == 0
]


@pytest.mark.parametrize(("spec", "path"), PATHS, ids=lambda value: value if isinstance(value, str) else "")
def test_loss_and_gradient_match_autograd(spec, path, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 0 if path == "whole" else 100)
    # an infinite ratio times a KL term is not 0
    overflow = spec.kl_ratio == KLRatio.NONE and spec.level == Level.TOKEN
    b = Batch(is_weights=path == "whole", overflow=overflow)
    leaf, logp, entropy = truth(b.logits, b.targets, b.w != 0, 0.9, 0.0, 1.0)
    numerator, x, sums = reference.token_loss(spec, logp, entropy, b.tokens())
    (want,) = torch.autograd.grad(numerator * b.scale.double(), leaf, retain_graph=True)
    want_c = torch.autograd.grad(numerator, logp, allow_unused=True)[0]
    out = torch.full_like(b.logits, NAN)
    got = b.loss(spec, out)
    close(got[0], logp.detach())
    close(got[1], entropy.detach())
    close(got[4], x.detach(), scale=8.0)
    close(got[5], want_c, scale=8.0)
    sums_close(got[7], sums, spec)
    assert got[7][14] == (want_c != 0).sum()
    assert (out[0, b.w == 0] == 0).all()
    close(out[0], want, scale=4.0)


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_has_the_bits_of_out_of_place(dtype, level, monkeypatch):
    for below in (0, 100):
        monkeypatch.setattr(launch, "SPLIT_BELOW", below)
        spec = LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.8, clip_high=1.2, entropy_coef=0.01)
        b = Batch(dtype)
        out = torch.full_like(b.logits, NAN)
        separate = b.loss(spec, out)
        together = b.loss(spec, b.logits)
        assert torch.equal(b.logits, out)
        assert all(torch.equal(s, t) for s, t in zip(separate, together, strict=True))


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name)
def test_every_path_has_the_same_bits(level, monkeypatch):
    """One launch, split launches, forward only, and stage B alone."""
    spec = LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.8, clip_high=1.2)
    b = Batch()
    results, grads = [], []
    for below, gradient in itertools.product((0, 100), (False, True)):
        monkeypatch.setattr(launch, "SPLIT_BELOW", below)
        out = torch.full_like(b.logits, NAN) if gradient else None
        results.append(b.loss(spec, out))
        grads += [out] if gradient else []
    for other in results[1:]:
        assert all(torch.equal(s, t) for s, t in zip(results[0], other, strict=True))
    assert torch.equal(*grads)
    alone = gpu.token_loss(spec.encode(), results[0][0], results[0][1], b.w, *b.optional(), b.cu)
    assert all(torch.equal(s, t) for s, t in zip(results[0][4:], alone, strict=True))


def test_token_level_needs_no_sequences_and_no_optional_tensor():
    b = Batch(is_weights=False)
    b.old = b.ref = b.rollout = None
    spec = LossSpec("x", Surrogate.CLIPPED_RATIO, clip_low=0.8, clip_high=1.2)
    per_token, c = b.loss(spec, None, want_entropy=False, cu=False)[4:6]
    on = b.w != 0
    assert torch.equal(per_token[on], -b.adv[on])  # the ratio is exactly 1
    assert torch.equal(c[on], -b.adv[on] * b.w[on])


def test_garbage_bounds_stay_inside():
    b = Batch()
    spec = LossSpec("x", Surrogate.CLIPPED_RATIO, level=Level.SEQUENCE, clip_low=0.8, clip_high=1.2)
    for garbage in ([-(1 << 40), 5, 3, 1 << 40, 2, 900, -7], [0, 0, 0, 0, 0, 0, 0]):
        b.cu = torch.tensor(garbage, device=DEVICE)
        b.loss(spec, torch.empty_like(b.logits))


def test_empty_batch():
    b = Batch()
    for name in ("logits", "targets", "w", "adv", "old", "ref", "rollout", "is_weights"):
        t = getattr(b, name)
        setattr(b, name, t[:, :0] if name == "logits" else t[:0])
    b.cu = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for level in Level:
        spec = LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.8, clip_high=1.2, entropy_coef=0.1)
        result = b.loss(spec, torch.empty_like(b.logits))
        assert all(t.numel() == 0 for t in result[:7])
        assert result[7].tolist() == [0.0] * 15 + [INF, -INF, -INF]


def test_all_masked():
    b = Batch()
    b.w = torch.zeros_like(b.w)
    b.logits.fill_(NAN)
    for level in Level:
        out = torch.full_like(b.logits, NAN)
        result = b.loss(LossSpec("x", Surrogate.CLIPPED_RATIO, level=level, clip_low=0.8, clip_high=1.2), out)
        assert (out == 0).all()
        assert all((t == 0).all() for t in result[:6])
        assert result[7].tolist() == [0.0] * 15 + [INF, -INF, -INF]


def test_fp64_is_refused():
    with pytest.raises(TypeError, match="float64"):
        gpu.logprob_forward(
            torch.zeros(1, 1, 4, dtype=torch.float64, device=DEVICE),
            make_targets(1, 4),
            None,
            None,
            1.0,
            0.0,
            1.0,
            False,
        )
