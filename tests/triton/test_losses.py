"""Every loss in the Triton kernels against the fp64 reference, launched through `fusedpg.gpu`."""

import itertools

import pytest
import torch

import fusedpg
from fusedpg import gpu, reference
from fusedpg.kernels import launch
from fusedpg.metrics import SUM_NAMES
from fusedpg.spec import (
    KL,
    STREAMS,
    Anchor,
    Correction,
    CorrectionLevel,
    Keep,
    KLGradient,
    KLRatio,
    KLSampled,
    KLTarget,
    Level,
    LossSpec,
    Reject,
    Selection,
    Surrogate,
)
from triton_tools.inputs import CHUNK, DEVICE, DTYPES, close, make_logits, make_targets, truth, use_small_blocks

INF, NAN = float("inf"), float("nan")
CLIP = {"clip_low": 0.8, "clip_high": 1.2}
#: fields without which a surrogate means little
OWN = {
    Surrogate.CLIPPED_RATIO: CLIP,
    Surrogate.CISPO: CLIP,
    Surrogate.SAPO: {"tau_pos": 1.0, "tau_neg": 1.5},
    Surrogate.TOPR: {"clip_low": 0.9, "clip_high": 1.1},
    Surrogate.VESPO: {
        **{"k_pos": 2.0, "k_neg": 1.5, "lambda_pos": 1.5, "lambda_neg": 1.0},
        **{"token_clip": (-0.4, 0.3), "log_w_clamp": (-0.8, 0.9)},
    },
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


def spec(surrogate=Surrogate.CLIPPED_RATIO, **fields):
    return LossSpec("x", surrogate, **{**OWN.get(surrogate, {}), **fields})


def surrogates():
    """Every surrogate at every level it has, with and without a clamp that binds."""
    for surrogate, level in itertools.product(Surrogate, Level):
        if level == Level.TOKEN or surrogate not in (Surrogate.REINFORCE, Surrogate.VESPO):
            yield spec(surrogate, level=level)
            yield spec(surrogate, level=level, log_ratio_clamp=(-0.3, 0.2))
    yield spec(dual_clip=1.3)
    yield spec(delta=1.1, entropy_coef=0.02)
    yield spec(Surrogate.REINFORCE, penalty_coef=0.3)
    yield spec(Surrogate.IMPORTANCE_RATIO, level=Level.SEQUENCE, token_clip=(-0.1, 0.15))
    yield spec(level=Level.SEQUENCE, token_clip=(-0.1, 0.15))
    for anchor in (Anchor.SELF, Anchor.ROLLOUT):
        yield spec(anchor=anchor)
        yield spec(Surrogate.VESPO, anchor=anchor)


def divergences():
    """Every KL estimator, ratio weight, gradient, target and forward form."""
    for kl, ratio in itertools.product(list(KL)[1:], KLRatio):
        yield spec(kl=kl, kl_coef=0.3, kl_ratio=ratio)
    clamps = {"kl_clamp": (0.0, 0.05), "kl_log_ratio_clamp": (-0.3, 0.3)}
    for gradient, ratio in itertools.product(list(KLGradient)[1:], KLRatio):
        yield spec(kl=KL.K3, kl_coef=0.3, kl_ratio=ratio, kl_gradient=gradient, **clamps)
    live = {"kl": KL.K3, "kl_coef": 0.3, "kl_ratio": KLRatio.LIVE}
    yield spec(level=Level.SEQUENCE, entropy_coef=0.02, **live)
    yield spec(**live, **clamps)
    yield spec(kl=KL.K1, kl_coef=0.2, kl_gradient=KLGradient.STRAIGHT_THROUGH, kl_target=KLTarget.ROLLOUT)
    for form, target in itertools.product(list(KLSampled)[1:], KLTarget):
        yield spec(Surrogate.CISPO, kl_forward=form, kl_forward_coef=0.3, kl_target=target)
        both = {"kl_forward": form, "kl_forward_coef": 0.3, "kl_backward": form, "kl_backward_coef": 0.2}
        yield spec(**both, kl_target=target, kl_log_ratio_clamp=(-0.2, 0.2), **live)


def masks():
    """Keep masks, selections, and the observation term."""
    bounds = {Keep.RATIO: (0.85, 1.15), Keep.TV: (-0.003, 0.004), Keep.KL: (-0.002, 0.001)}
    for (keep, (low, high)), directional in itertools.product(bounds.items(), (False, True)):
        yield spec(Surrogate.CISPO, keep=keep, keep_low=low, keep_high=high, keep_directional=directional)
    yield spec(level=Level.SEQUENCE, keep=Keep.RATIO, keep_low=0.9, keep_high=1.1)
    yield spec(Surrogate.IMPORTANCE_RATIO, keep=Keep.TV, keep_high=0.002, penalty_coef=0.3, anchor=Anchor.ROLLOUT)
    yield spec(selection=Selection.CLIP_COV, select_ratio=0.5)
    yield spec(Surrogate.IMPORTANCE_RATIO, selection=Selection.KL_COV, select_ratio=0.5, select_coef=0.7)
    for level in Level:
        yield spec(level=level, obs_coef=0.2, entropy_coef=0.02)


def corrections():
    """Correction weights and rejections at every level, and with what interacts with them."""
    bounds = {"is_low": 0.8, "is_high": 1.25}
    reject_bounds = {"is_reject_low": 0.75, "is_reject_high": 1.2}
    for kind, level in itertools.product(list(Correction)[1:], CorrectionLevel):
        yield spec(is_correction=kind, is_level=level, **bounds)
    for reject, level in itertools.product(list(Reject)[1:], CorrectionLevel):
        yield spec(is_correction=Correction.TRUNCATE, is_level=level, is_reject=reject, **bounds, **reject_bounds)
    for reject in list(Reject)[1:]:
        yield spec(is_reject=reject, **reject_bounds)
    geometric = {"is_correction": Correction.TRUNCATE, "is_level": CorrectionLevel.GEOMETRIC, "is_missing_one": True}
    for anchor in Anchor:
        yield spec(Surrogate.CISPO, anchor=anchor, **geometric, **bounds)
    yield spec(level=Level.SEQUENCE, **geometric, **bounds)
    yield spec(Surrogate.VESPO, is_correction=Correction.TRUNCATE, is_missing_one=True, **bounds)
    yield spec(Surrogate.VESPO, is_correction=Correction.MASK, **bounds)
    yield spec(Surrogate.REINFORCE, penalty_coef=0.3, is_correction=Correction.MASK, **bounds)


SPECS = [*surrogates(), *divergences(), *masks(), *corrections()]
LENGTHS = [3, 0, 1, 7, 0, 5, 2]
HOLES = (2, 9, 16, 17)  # the last two are a whole sequence


class Batch:
    """18 tokens in seven sequences, two of them empty and one fully masked; masked tokens hold NaN."""

    def __init__(self, spec, dtype=torch.float32, v=CHUNK + 11, is_weights=False, overflow=False):
        n = sum(LENGTHS)
        self.spec = spec
        self.logits, self.targets = make_logits((1, n, v), dtype, 2.0), make_targets(n, v)
        draw = lambda seed, spread: make_logits((n,), torch.float32, spread, seed)  # noqa: E731
        self.w = draw(11, 1.0).abs() + 0.5
        self.adv = draw(12, 1.0)
        logp = self.logits.float().log_softmax(-1)[0].gather(1, self.targets[:, None])[:, 0]
        self.old, self.ref, self.rollout = (logp + draw(s, 0.3) for s in (13, 14, 15))
        self.is_weights = draw(16, 1.0).abs() if is_weights and not spec.has_correction else None
        self.selected = (draw(17, 1.0) > 0).float() if spec.selection != Selection.NONE else None
        self.obs = None
        self.adv[5] = 0.0
        if overflow:
            self.old[5] = -1e4  # the ratio is inf where A = 0
        if self.is_weights is not None:
            self.is_weights[6] = 0.0
        observed = {4: 0.7, 9: 0.3, 17: 1.2} if spec.obs_coef else {}  # a policy token, and two that only observe
        if observed:
            self.obs = torch.zeros_like(self.w)
        for row, weight in observed.items():
            self.obs[row] = weight
        for hole in HOLES:
            self.w[hole] = 0.0
            if hole not in observed:
                self.logits[0, hole] = NAN
            for stream in (self.adv, self.old, self.ref, self.rollout, self.is_weights, self.selected):
                if stream is not None:
                    stream[hole] = NAN
        if spec.is_missing_one:
            self.rollout[4] = self.rollout[12] = NAN
        self.cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], device=DEVICE)
        self.scale = torch.tensor(0.37, device=DEVICE)

    @property
    def streams(self):
        return [self.adv, self.old, self.ref, self.rollout, self.is_weights, self.obs, self.selected]

    @property
    def read(self):
        """Rows whose logp a term needs."""
        return self.w != 0 if self.obs is None else (self.w != 0) | (self.obs != 0)

    def tokens(self):
        """The constants as the reference takes them, in fp64."""
        segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(DEVICE)
        streams = {name: None if s is None else s.double() for name, s in zip(STREAMS, self.streams, strict=True)}
        return reference.Tokens(w=self.w.double(), segment=segment, num_segments=len(LENGTHS), **streams)

    def loss(self, out, want_entropy=True, cu=True):
        return gpu.loss_forward(
            self.spec.encode(), self.logits, self.targets, self.w, self.scale, self.streams, self.cu if cu else None,
            None, 0.9, 0.0, 1.0, want_entropy, out,
        )  # fmt: skip


def agree(b):
    """Run the kernels and the reference; compare log-probs, losses, coefficients, sums and gradient."""
    leaf, logp, entropy = truth(b.logits, b.targets, b.read, 0.9, 0.0, 1.0)
    numerator, x, sums = reference.token_loss(b.spec, logp, entropy, b.tokens())
    (want,) = torch.autograd.grad(numerator * b.scale.double(), leaf, retain_graph=True)
    want_c = torch.autograd.grad(numerator, logp, allow_unused=True)[0]
    out = torch.full_like(b.logits, NAN)
    got = b.loss(out)
    close(got[0], logp.detach())
    close(got[1], entropy.detach())
    close(got[4], x.detach(), scale=8.0)
    close(got[5], want_c, scale=8.0)
    assert list(sums) == list(SUM_NAMES)
    for i, name in enumerate(SUM_NAMES):
        if name != "active":
            close(got[7][i : i + 1], sums[name].detach().reshape(1), scale=30.0)
    assert got[7][SUM_NAMES.index("active")] == (want_c != 0).sum()
    assert (out[0, ~b.read] == 0).all()
    close(out[0], want, scale=4.0)
    return got


# the split path runs the same stage B: a sample of the specs, and those with sums over sequences, is enough there
PATHS = [(s, "whole") for s in SPECS]
PATHS += [(s, "split") for i, s in enumerate(SPECS) if i % (3 if s.needs_segments else 8) == 0]


@pytest.mark.parametrize(("spec", "path"), PATHS, ids=lambda value: value if isinstance(value, str) else "")
def test_loss_and_gradient_match_autograd(spec, path, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT_BELOW", 0 if path == "whole" else 100)
    # an infinite ratio times a KL term is not 0, and a sequence shares it
    overflow = spec.kl_ratio == KLRatio.NONE and not spec.needs_segments and spec.penalty_coef == 0.0
    overflow = overflow and not spec.has_correction and spec.selection == Selection.NONE
    agree(Batch(spec, is_weights=path == "whole", overflow=overflow))


@pytest.mark.parametrize("name", list(fusedpg.CATALOGUE))
def test_catalogue(name):
    spec = fusedpg.CATALOGUE[name]
    agree(Batch(spec, is_weights=True))


@pytest.mark.parametrize("level", list(Level), ids=lambda level: level.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_has_the_bits_of_out_of_place(dtype, level, monkeypatch):
    for below in (0, 100):
        monkeypatch.setattr(launch, "SPLIT_BELOW", below)
        b = Batch(spec(level=level, entropy_coef=0.01, obs_coef=0.1), dtype)
        out = torch.full_like(b.logits, NAN)
        separate = b.loss(out)
        together = b.loss(b.logits)
        assert torch.equal(b.logits, out)
        assert all(torch.equal(s, t) for s, t in zip(separate, together, strict=True))


SAME_BITS = {
    **{level.name: spec(level=level) for level in Level},
    "vespo": spec(Surrogate.VESPO, is_correction=Correction.TRUNCATE, is_high=1.2),
    "geometric": spec(is_correction=Correction.MASK, is_level=CorrectionLevel.GEOMETRIC, is_low=0.9, is_high=1.2),
    "observation": spec(obs_coef=0.1),
    "dppo_kl": fusedpg.CATALOGUE["dppo_kl"],
    "sapo": fusedpg.CATALOGUE["sapo"],
    "ipo": fusedpg.CATALOGUE["ipo"],
}


@pytest.mark.parametrize("spec", SAME_BITS.values(), ids=SAME_BITS)
def test_every_path_has_the_same_bits(spec, monkeypatch):
    """One launch, split launches, forward only, and stage B alone."""
    b = Batch(spec)
    results, grads = [], []
    for below, gradient in itertools.product((0, 100), (False, True)):
        monkeypatch.setattr(launch, "SPLIT_BELOW", below)
        out = torch.full_like(b.logits, NAN) if gradient else None
        results.append(b.loss(out))
        grads += [out] if gradient else []
    for other in results[1:]:
        assert all(torch.equal(s, t) for s, t in zip(results[0], other, strict=True))
    assert torch.equal(*grads)
    alone = gpu.token_loss(spec.encode(), results[0][0], results[0][1], b.w, b.streams, b.cu)
    assert all(torch.equal(s, t) for s, t in zip(results[0][4:], alone, strict=True))


def test_token_level_needs_no_sequences_and_no_optional_tensor():
    b = Batch(spec())
    b.old = b.ref = b.rollout = None
    per_token, c = b.loss(None, want_entropy=False, cu=False)[4:6]
    on = b.w != 0
    assert torch.equal(per_token[on], -b.adv[on])  # the ratio is exactly 1
    assert torch.equal(c[on], -b.adv[on] * b.w[on])


def test_sums_over_sequences_need_their_bounds():
    with pytest.raises(ValueError, match="cu: the loss sums over sequences"):
        Batch(spec(Surrogate.VESPO)).loss(None, cu=False)


# ---------------------------------------------------------------- infinities, NaN, nothing


@pytest.mark.parametrize("level", [Level.TOKEN, Level.SEQUENCE], ids=lambda level: level.name)
def test_sapo_is_flat_where_the_ratio_overflows(level):
    b = Batch(spec(Surrogate.SAPO, level=level))
    b.adv[3] = -2.0
    b.old[3] = -1e4  # alone in its sequence
    per_token, c = b.loss(None)[4:6]
    assert per_token[3].item() == pytest.approx(2.0 * 4.0 / 1.5)
    assert c[3] == 0.0


@pytest.mark.parametrize("is_level", list(CorrectionLevel), ids=lambda level: level.name)
def test_a_missing_rollout_weighs_one(is_level):
    """A token without one has weight 1, or its sequence's, and stays out of the metrics; a sequence may have none."""
    correction = {"is_correction": Correction.TRUNCATE, "is_level": is_level, "is_high": 1.1, "is_missing_one": True}
    b = Batch(spec(**correction))
    b.rollout[11:16] = NAN
    got = agree(b)
    on = b.w != 0
    assert got[7][SUM_NAMES.index("is_tokens")] == (on & ~b.rollout.isnan()).sum()
    plain = Batch(spec())
    assert torch.equal(got[4][11:16], plain.loss(None)[4][11:16])


@pytest.mark.parametrize("is_level", list(CorrectionLevel), ids=lambda level: level.name)
def test_a_nan_rollout_stays_visible(is_level):
    b = Batch(spec(is_correction=Correction.MASK, is_level=is_level, is_low=0.5, is_high=2.0))
    b.rollout[6] = NAN
    got = b.loss(None)
    sharing = [6] if is_level == CorrectionLevel.TOKEN else [4, 5, 6, 7, 8, 10]
    assert got[4].isnan().nonzero()[:, 0].tolist() == sharing
    for name in ("numerator", "is_weight", "is_weight_max"):
        assert got[7][SUM_NAMES.index(name)].isnan()
    assert got[7][SUM_NAMES.index("is_tokens")] == (b.w != 0).sum()


def test_a_given_weight_may_be_missing_too():
    b = Batch(spec(is_missing_one=True), is_weights=True)
    b.is_weights[7] = NAN
    got = agree(b)
    assert got[7][SUM_NAMES.index("is_tokens")] == (b.w != 0).sum() - 1


def test_a_nan_logit_survives_masks_weights_and_clips():
    for loss in (
        spec(),
        spec(Surrogate.SAPO),
        spec(Surrogate.TOPR),
        spec(Surrogate.CISPO, keep=Keep.TV, keep_high=0.1),
    ):
        for row in (5, 6):  # A = 0 and not
            b = Batch(loss)
            b.logits[0, row, 3] = NAN
            got = b.loss(torch.empty_like(b.logits))
            assert got[4].isnan().nonzero()[:, 0].tolist() == [row]
            assert got[7][0].isnan()


def test_an_observed_row_needs_no_policy_stream():
    """Advantage, anchors and weights of a row that only observes hold NaN, and nothing of it shows."""
    b = Batch(spec(obs_coef=0.2, is_correction=Correction.TRUNCATE, is_high=1.1))
    logp, per_token, c = (b.loss(None)[i] for i in (0, 4, 5))
    for row in (9, 17):
        assert per_token[row] == -torch.tensor(0.2) * logp[row]
        assert c[row] == -torch.tensor(0.2) * b.obs[row]


def test_garbage_bounds_stay_inside():
    b = Batch(spec(level=Level.SEQUENCE))
    for garbage in ([-(1 << 40), 5, 3, 1 << 40, 2, 900, -7], [0, 0, 0, 0, 0, 0, 0]):
        b.cu = torch.tensor(garbage, device=DEVICE)
        b.loss(torch.empty_like(b.logits))


NOTHING = [spec(level=level, entropy_coef=0.1) for level in Level] + [spec(Surrogate.VESPO), spec(obs_coef=0.1)]
NO_SUMS = [0.0] * 16 + [INF, -INF, -INF]


@pytest.mark.parametrize("spec", NOTHING, ids=lambda s: f"{s.surrogate.name}-{s.level.name}")
def test_empty_batch(spec):
    b = Batch(spec)
    for name in ("logits", "targets", "w", "adv", "old", "ref", "rollout", "obs"):
        t = getattr(b, name)
        setattr(b, name, t if t is None else t[:, :0] if name == "logits" else t[:0])
    b.cu = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    result = b.loss(torch.empty_like(b.logits))
    assert all(t.numel() == 0 for t in result[:7])
    assert result[7].tolist() == NO_SUMS


@pytest.mark.parametrize("spec", NOTHING, ids=lambda s: f"{s.surrogate.name}-{s.level.name}")
def test_all_masked(spec):
    b = Batch(spec)
    b.w = torch.zeros_like(b.w)
    b.obs = None if b.obs is None else torch.zeros_like(b.obs)
    b.logits.fill_(NAN)
    out = torch.full_like(b.logits, NAN)
    result = b.loss(out)
    assert (out == 0).all()
    assert all((t == 0).all() for t in result[:7])
    assert result[7].tolist() == NO_SUMS
