"""Cases 1-16: NaN and infinity in masked, overflowing, filtered and broken entries."""

import math

import pytest
import torch
from cases import (
    advantages_for,
    assert_bits,
    assert_finite,
    assert_same_output,
    close,
    eager_reduce,
    from_logits,
    from_logp,
    leaf,
    random,
    random_ids,
    spec_with,
    tensor,
)

import fusedpg
from fusedpg.spec import REDUCTIONS

NAN, INF = math.nan, math.inf
E20 = math.exp(20)


def test_case_001_nan_old_logp_at_a_masked_token(backend):
    """OpenRLHF/OpenRLHF#1240: the mask multiplied NaN."""
    logp = leaf([[-1.0, -2.0]])
    out, grad = from_logp(
        fusedpg.loss_spec("ppo_clip"),
        logp,
        logp_old=tensor([[-1.0, NAN]]),
        advantages=tensor([[2.0, 3.0]]),
        mask=tensor([[1.0, 0.0]]),
        backend=backend,
    )
    close(out.numerator, -2.0)  # -A*r = -2*exp(-1+1)
    close(out.weight, 1.0)
    assert out.metrics["approx_kl"] == 0
    close(grad, [[-2.0, 0.0]])
    assert grad[0, 1] == 0
    assert_finite(out, grad)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", ["bool", "fractional"])
def test_case_002_every_reduction_selects(backend, reduction, weights):
    """verl-project/verl#6349: one of several reductions used a select."""
    x = [[1.0, 2.0, 3.0, NAN], [NAN, 5.0, 6.0, 7.0]]
    mask = tensor([[1.0, 0.5, 1.0, 0.0], [0.0, 1.0, 0.5, 1.0]])
    if weights == "bool":
        mask = mask != 0
    logp = (-tensor(x)).requires_grad_()  # reinforce with A = 1 has x = -logp
    out, grad = from_logp(spec_with("reinforce", reduction), logp, advantages=1.0, mask=mask, backend=backend)
    numerator, weight = eager_reduce(tensor(x), mask.float(), reduction)
    close(out.numerator, numerator)
    close(out.weight, weight)
    assert_finite(out, grad)
    assert grad[0, 3] == 0
    assert grad[1, 0] == 0


@pytest.mark.parametrize("name", ["grpo", "ppo_dual_clip", "cispo", "importance_sampling", "gspo", "gspo_token"])
def test_case_003_bad_masked_entries_change_no_bit(backend, name):
    """NVIDIA-NeMo/RL#4120: exponentials taken before the mask."""
    spec = fusedpg.loss_spec(name, kl="k3", kl_coef=0.1)
    mask = tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    logp = [[-1.0, 149.0, -1.0, -1.0], [NAN, INF, -INF, 1e38], [-1.0, -2.0, NAN, -0.5]]
    old = [[-1.1, -1.0, -INF, -1.0], [NAN, INF, -INF, -1e38], [-1.2, -1.9, -1.0, -0.5]]
    ref = [[-1.3, -1.0, -1.0, NAN], [NAN, INF, -INF, 0.0], [-1.1, -2.0, NAN, -0.7]]

    def run(repair):
        logp_leaf, old_t, ref_t = (
            torch.where(mask != 0, tensor(v), 0.0) if repair else tensor(v) for v in (logp, old, ref)
        )
        logp_leaf.requires_grad_()
        adv = advantages_for(spec, tensor([1.0, 2.0, -1.0]), (3, 4))
        return from_logp(spec, logp_leaf, logp_old=old_t, logp_ref=ref_t, mask=mask, backend=backend, **adv)

    (bad, bad_grad), (good, good_grad) = run(False), run(True)
    assert_finite(bad, bad_grad)
    assert_same_output(bad, good)
    assert_bits(bad_grad, good_grad)


@pytest.mark.parametrize("name", ["ppo_clip", "importance_sampling", "cispo"])
@pytest.mark.parametrize("filtered_by", ["mask", "is_weights"])
def test_case_004_rejected_token_contributes_nothing(backend, name, filtered_by):
    """PrimeIntellect-ai/prime-rl#2084, #2085: a keep-filter multiplied an overflowed ratio."""
    spec = fusedpg.loss_spec(name, reduction="token-sum", log_ratio_clamp=None)
    args = {filtered_by: tensor([0.0, 1.0])}
    logp = leaf([-2.0, -1.0])
    out, grad = from_logp(spec, logp, logp_old=tensor([-120.0, -1.0]), advantages=1.0, backend=backend, **args)
    expected = 1.0 if name == "cispo" else -1.0  # -q*A*logp with q = 1, logp = -1; else -A*r with r = 1
    close(out.numerator, expected)
    close(grad, [0.0, -1.0])
    assert grad[0] == 0
    assert out.per_token[0] == 0
    if filtered_by == "mask":
        assert_finite(out, grad)


@pytest.mark.parametrize("clamp", [20.0, None], ids=["clamp20", "noclamp"])
@pytest.mark.parametrize("advantage", [0.0, -0.0, 1.0, -1.0])
def test_case_005_zero_advantage_and_an_overflowing_ratio(backend, clamp, advantage):
    """radixark/miles#1363: inf*0 in the unclipped branch."""
    for name in ("ppo_clip", "ppo_dual_clip"):
        spec = fusedpg.loss_spec(name, log_ratio_clamp=clamp)
        out, grad = from_logp(spec, leaf([-1.0]), logp_old=tensor([-121.0]), advantages=advantage, backend=backend)
        if advantage == 0:
            assert out.loss == 0
            assert grad == 0
        elif advantage > 0:
            close(out.loss, -1.2)  # the clip wins
            assert grad == 0
        elif name == "ppo_dual_clip":
            close(out.loss, 3.0)  # -A*dual_clip
            assert grad == 0
        elif clamp is None:
            assert out.loss == INF  # documented: without a clamp nothing bounds a negative advantage
        else:
            close(out.loss, E20)  # capped by the log-ratio clamp, where the gradient is 0
            assert grad == 0


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_case_006_large_gaps_are_bounded_and_nan_is_not(backend, stored, advantage):
    """verl-project/verl#1779, THUDM/slime#2198: the exponent is formed in fp32 with a bound; NaN stays."""
    gaps = [-200.0, -88.0, -0.5, 0.0, 0.25, 88.0, 89.0, 200.0, NAN]
    old = torch.zeros(len(gaps), dtype=stored)
    kwargs = {"logp_old": old, "advantages": advantage, "backend": backend}
    spec = fusedpg.loss_spec("importance_sampling", reduction="token-sum")
    out, grad = from_logp(spec, leaf(gaps), **kwargs)
    bounded = [math.exp(min(max(g, -20.0), 20.0)) for g in gaps[:-1]]
    close(out.per_token, [-advantage * r for r in bounded] + [NAN], atol=1e-12)
    slopes = [-advantage * r if -20 <= g <= 20 else 0.0 for g, r in zip(gaps[:-1], bounded, strict=True)]
    close(grad[:-1], slopes)
    assert torch.isnan(out.loss)
    # the bound leaves the normal range alone, bit for bit
    free, _ = from_logp(
        fusedpg.loss_spec("importance_sampling", reduction="token-sum", log_ratio_clamp=None), leaf(gaps), **kwargs
    )
    assert_bits(out.per_token[2:5], free.per_token[2:5])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_case_007_kl_of_a_drifted_policy(backend, stored):
    """huggingface/trl#6550: exp of an unbounded reference gap."""
    logp, old, ref = leaf([-96.0], stored), tensor([-96.0], stored), tensor([-1.0], stored)
    spec = fusedpg.loss_spec("grpo", kl_coef=0.04)
    out, grad = from_logp(
        spec,
        logp,
        logp_old=old,
        logp_ref=ref,
        advantages=tensor([1.0]),
        backend=backend,
        cu_seqlens=tensor([0, 1], torch.int64),
    )
    cap = E20 - 20 - 1  # k3 at the clamped gap of 20
    close(out.metrics["kl"], cap)
    close(out.loss, -1.0 + 0.04 * cap)
    close(grad, [-1.0])  # the policy part alone: the clamped KL has gradient 0
    plain, plain_grad = from_logp(
        fusedpg.loss_spec("grpo", kl=None),
        leaf([-96.0], stored),
        logp_old=old,
        advantages=tensor([1.0]),
        backend=backend,
        cu_seqlens=tensor([0, 1], torch.int64),
    )
    close(plain.loss, -1.0)
    assert_bits(grad, plain_grad)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("clamp", [20.0, None], ids=["clamp20", "noclamp"])
def test_case_008_padding_sentinel_in_a_kl_diagnostic(backend, kl, clamp):
    """modelscope/ms-swift#9767: padding carries -1e9."""
    spec = fusedpg.loss_spec("ppo_clip", kl=kl, kl_coef=0.5, kl_log_ratio_clamp=clamp)
    mask = tensor([[1.0, 1.0, 0.0]])

    def run(columns):
        logp = leaf([[-1.0, -1.5, -1e9]])
        out = fusedpg.policy_loss(
            spec,
            logp[:, :columns],
            logp_old=tensor([[-1.0, -1.5, -1.0]])[:, :columns],
            logp_ref=tensor([[-1.0, -1.0, 0.0]])[:, :columns],
            advantages=1.0,
            mask=mask[:, :columns],
            backend=backend,
        )
        (grad,) = torch.autograd.grad(out.loss, logp)
        return out, grad

    (three, g3), (two, g2) = run(3), run(2)
    assert_finite(three, g3)
    close(three.loss, two.loss.item())
    close(three.metrics["kl"], two.metrics["kl"].item())
    assert_bits(g3, g2)


@pytest.mark.parametrize(
    ("logits", "dtype", "expected"),
    [
        ([[1.0, -INF]], torch.float32, 0.0),
        ([[2.0, 2.0, -INF]], torch.float32, math.log(2)),
        ([[60000.0, -60000.0]], torch.float16, 0.0),
    ],
)
def test_case_009_entropy_with_zero_probabilities(backend, logits, dtype, expected):
    """huggingface/trl#7221: 0*-inf in p*log p."""
    out = fusedpg.token_logprobs(tensor(logits, dtype), tensor([0], torch.int64), return_entropy=True, backend=backend)
    close(out.entropy, [expected])


def test_case_010_entropy_gradient_next_to_a_zero_probability(backend):
    """huggingface/trl#7252: an undefined product stayed in the graph."""
    logits = leaf([[0.0, 0.0, -INF]])
    out = fusedpg.token_logprobs(logits, tensor([0], torch.int64), return_entropy=True, backend=backend)
    (-out.entropy.sum()).backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_case_011_padded_vocabulary(backend):
    """NovaSky-AI/SkyRL#2259: padded vocabulary columns are -inf."""
    values = random(4, 8)
    values[:, 5:] = -INF
    values[1, :5] = -INF  # no finite logit
    values[2, 3] = NAN
    values[3, 2] = INF
    before = values.clone()
    logits = values.requires_grad_()
    out = fusedpg.token_logprobs(logits, tensor([1, 1, 1, 1], torch.int64), return_entropy=True, backend=backend)
    assert torch.isnan(out.logp[1:]).all()
    assert torch.isnan(out.entropy[1:]).all()
    plain = torch.log_softmax(before[0, :5].double(), -1)
    close(out.logp[0], plain[1].item())
    close(out.entropy[0], -(plain.exp() * plain).sum().item())
    (out.logp[0] + 2 * out.entropy[0]).backward()
    assert torch.isfinite(logits.grad[0]).all()
    assert (logits.grad[0, 5:] == 0).all()
    assert_bits(logits.detach(), before)


def test_case_012_entropy_gradient_formula(backend):
    """ByteDance-Seed/VeOmni#720: d entropy/dz = -p*(z - sum(p*z)), p = 0 gives exactly 0."""
    logits = leaf([[0.0, 0.5, -200.0, -INF]])
    out = fusedpg.token_logprobs(logits, tensor([0], torch.int64), return_entropy=True, backend=backend)
    out.entropy.sum().backward()
    p0, p1 = 1 / (1 + math.exp(0.5)), math.exp(0.5) / (1 + math.exp(0.5))
    mean = 0.5 * p1
    close(logits.grad, [[-p0 * (0 - mean), -p1 * (0.5 - mean), 0.0, 0.0]])
    assert logits.grad[0, 2] == 0  # exp(-200.97) is 0 in fp32
    assert logits.grad[0, 3] == 0


@pytest.mark.parametrize("block", [1, 16, 64, 1024, 4096])
def test_case_013_row_begins_with_a_masked_stretch(backend, block):
    """flashinfer-ai/flashinfer#1178, gabrieldemarmiesse/torch-mojo-backend#319: exp(-inf - -inf)."""
    values = random(2, 2 * block + 1)
    values[:, :block] = -INF
    target = tensor([2 * block, 2 * block], torch.int64)
    logits = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(logits, target, return_entropy=True, backend=backend)
    (out.logp + out.entropy).sum().backward()
    truth = torch.log_softmax(values.double(), -1)
    close(out.logp, truth[:, -1])
    assert torch.isfinite(out.entropy).all()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, :block] == 0).all()


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "importance_sampling"])
def test_case_014_infinite_old_logp(backend, name):
    """NVIDIA-NeMo/RL#4154: the difference of infinities was formed before the mask."""
    spec = fusedpg.loss_spec(name)
    logp, old = [-1.0, -INF, -2.0], tensor([-1.0, -INF, -1.0])
    masked, grad = from_logp(
        spec, leaf(logp), logp_old=old, advantages=1.0, mask=tensor([1.0, 0.0, 1.0]), backend=backend
    )
    assert_finite(masked, grad)
    assert grad[1] == 0
    assert masked.weight == 2
    visible, _ = from_logp(spec, leaf(logp), logp_old=old, advantages=1.0, backend=backend)
    assert torch.isnan(visible.loss)  # never a silent 0 that the weight counts
    assert torch.isnan(visible.per_token[1])
    assert torch.isfinite(visible.per_token[[0, 2]]).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("given", [False, True], ids=["formed", "given"])
def test_case_015_missing_rollout_logp(backend, level, given):
    """huggingface/trl#6693: a NaN for one token's rollout log-prob stopped the training."""
    logp_old = [[-1.25, -1.5, -2.25]]
    rollout = [[-1.0, NAN, -2.0]]
    knobs = {} if given else {"is_correction": "truncate", "is_high": 2.0, "is_level": level}
    spec = fusedpg.loss_spec("ppo_clip", is_missing="one", **knobs)

    def call(logp_rollout):
        logp = leaf([[-1.2, -1.4, -2.2]])
        if given:
            weights = (tensor(logp_old) - tensor(logp_rollout)).exp()
            extra = {"is_weights": weights}
        else:
            extra = {"logp_rollout": tensor(logp_rollout)}
        return from_logp(
            spec, logp, logp_old=tensor(logp_old), advantages=tensor([[1.0, 2.0, 3.0]]), backend=backend, **extra
        )

    out, grad = call(rollout)
    assert_finite(out, grad)
    other, other_grad = call([[-1.0, -1.5, -2.0]])  # the same with a ratio of exactly 1
    w = math.exp(-0.25)
    ratio = (tensor([[-1.2, -1.4, -2.2]]) - tensor(logp_old)).exp()
    if level == "geometric" and not given:  # the mean over the two tokens that have one
        close(grad, -w * tensor([[1.0, 2.0, 3.0]]) * ratio)
        return
    assert_bits(out.per_token[:, [0, 2]], other.per_token[:, [0, 2]])
    assert_bits(grad[:, [0, 2]], other_grad[:, [0, 2]])
    if given or level == "token":
        assert_bits(out.per_token, other.per_token)
        assert_bits(grad, other_grad)
        close(out.metrics["is_weight_mean"], w)  # over the two tokens that have a rollout log-prob
        close(out.metrics["is_weight_max"], w)
    elif level == "sequence":
        close(grad, -w * w * tensor([[1.0, 2.0, 3.0]]) * ratio)
    close(out.metrics["is_masked_frac"], 0.0)


def test_case_015_without_the_option_it_stays_visible(backend):
    """huggingface/trl#6693: a NaN that nobody declared missing is an error of the caller, not a weight of 1."""
    spec = fusedpg.loss_spec("ppo_clip", is_correction="truncate", is_high=2.0)
    out, _ = from_logp(
        spec,
        leaf([[-1.0, -2.0]]),
        logp_old=tensor([[-1.0, -2.0]]),
        logp_rollout=tensor([[-1.0, NAN]]),
        advantages=tensor([[1.0, 1.0]]),
        backend=backend,
    )
    assert torch.isnan(out.loss)
    assert torch.isfinite(out.per_token[0, 0])


@pytest.mark.parametrize("vocab", [64, 1500])
def test_case_016_broken_rows_stay_broken(backend, vocab):
    """triton-lang/triton#7349, tenstorrent/tt-metal#56056: NaN survives the max; masked rows are never read."""
    values = random(5, vocab)
    values[0, 40] = NAN
    values[1] = -INF
    values[2, 7] = INF
    values[3, 8], values[3, 7] = NAN, INF
    targets = random_ids(vocab, 5)
    out = fusedpg.token_logprobs(values, targets, return_entropy=True, backend=backend)
    expected = torch.log_softmax(values, -1).gather(-1, targets[:, None])[:, 0]
    assert torch.isnan(expected[:4]).all()
    assert torch.isnan(out.logp[:4]).all()
    assert torch.isnan(out.entropy[:4]).all()
    close(out.logp[4], expected[4].item())
    mask = tensor([0, 0, 0, 0, 1]).bool()
    logits = values.clone().requires_grad_()
    masked = fusedpg.token_logprobs(logits, targets, mask=mask, return_entropy=True, backend=backend)
    assert masked.logp[:4].tolist() == [0.0] * 4
    assert masked.entropy[:4].tolist() == [0.0] * 4
    (masked.logp + masked.entropy).sum().backward()
    assert (logits.grad[:4] == 0).all()
    loss, grad = from_logits(
        fusedpg.loss_spec("reinforce"), logits, targets, advantages=1.0, mask=mask, backend=backend
    )
    assert_finite(loss, grad)
