"""Cases 53-73: ratios, clipping, sequence arithmetic, KL gradients and the metrics that report them."""

import math

import pytest
import torch
from cases import advantages_for, assert_bits, close, from_logits, from_logp, leaf, random, spec_with, tensor

import fusedpg
from fusedpg.spec import REDUCTIONS, Anchor, Level

NAN, INF = math.nan, math.inf


def logs(ratios):
    return [math.log(r) for r in ratios]


def test_case_053_reported_ratio_and_log_ratio_agree(backend):
    """PrimeIntellect-ai/prime-rl#2973: one was clamped, the other raw. Both are clamped here."""
    spec = fusedpg.loss_spec("ppo_clip", log_ratio_clamp=20.0)
    out, _ = from_logp(spec, leaf([-1.0]), logp_old=tensor([-31.0]), advantages=1.0, backend=backend)
    assert out.metrics["approx_kl"] == -20
    close(out.metrics["ratio_mean"], math.exp(20))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_case_054_clamped_fraction_counts_unmasked_tokens(backend, name):
    """PrimeIntellect-ai/prime-rl#1329: numerator over all positions, denominator over unmasked ones."""
    spec = fusedpg.loss_spec(name, reduction="token-mean")
    logp = leaf([[29.0, 29.0, 29.0, -1.0]])
    out, _ = from_logp(
        spec,
        logp,
        logp_old=tensor([[-1.0] * 4]),
        mask=tensor([[0.0, 0.0, 0.0, 1.0]]),
        backend=backend,
        **advantages_for(spec, tensor([1.0]), (1, 4)),
    )
    for metric in ("out_of_band_frac", "clip_frac", "approx_kl", "approx_kl_k3"):
        assert out.metrics[metric] == 0
    for metric in ("ratio_mean", "ratio_max", "ratio_min", "tokens", "keep_frac"):
        assert out.metrics[metric] == 1


def test_case_055_kl_term_leaves_the_policy_term_alone(backend):
    """huggingface/trl#6637: one temporary held two different log-ratios."""
    logp = random(2) - 2
    kwargs = {"logp_old": logp - 0.1, "logp_ref": logp - 3, "advantages": tensor([1.0, -1.0]), "backend": backend}
    off, off_grad = from_logp(fusedpg.loss_spec("ppo_clip"), logp.clone().requires_grad_(), **kwargs)
    tiny = fusedpg.loss_spec("ppo_clip", kl="k3", kl_coef=1e-12)
    on, on_grad = from_logp(tiny, logp.clone().requires_grad_(), **kwargs)
    torch.testing.assert_close(on.loss, off.loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(on_grad, off_grad, rtol=0, atol=1e-6)
    for name in ("clip_frac", "ratio_mean", "approx_kl", "approx_kl_k3"):
        assert on.metrics[name] == off.metrics[name]
    close(on.metrics["kl"], math.exp(-3) + 3 - 1)


def test_case_056_ratio_against_given_and_absent_old_logp(backend):
    """meta-pytorch/torchforge#571: logp minus its own detached copy although behaviour log-probs exist."""
    spec = fusedpg.loss_spec("importance_sampling")
    given, _ = from_logp(spec, leaf([-1.0]), logp_old=tensor([-1.3]), advantages=2.0, backend=backend)
    close(given.metrics["ratio_mean"], 1.34986)
    with pytest.warns(UserWarning, match="logp_old: got None, so the loss 'importance_sampling' runs on-policy"):
        absent, grad = from_logp(spec, leaf([-1.0]), advantages=2.0, backend=backend)
    assert absent.metrics["ratio_mean"] == 1
    assert grad == -2
    itself, grad = from_logp(spec.replace(anchor=Anchor.SELF), leaf([-1.0]), advantages=2.0, backend=backend)
    assert itself.metrics["ratio_mean"] == 1
    assert grad == -2


@pytest.mark.parametrize("name", list(fusedpg.CATALOGUE))
def test_case_057_masked_position_has_no_influence(backend, name):
    """MakazhanAlpamys/Soup#723, #744: a batch statistic taken before the mask."""
    spec = spec_with(name, fusedpg.CATALOGUE[name].reduction, kl="k3", kl_coef=0.1)
    mask = torch.ones(3, 3)
    mask[1, 2] = 0
    base, old = random(3, 3) * 0.1 - 1, random(3, 3, seed=1) * 0.1 - 1
    results = []
    for value in (-1.0, -9.0, NAN):
        logp = base.clone()
        logp[1, 2] = old[1, 2] + value
        kwargs = advantages_for(spec, tensor([1.0, -1.0, 0.5]), (3, 3))
        if spec.needs_logp_rollout:
            kwargs["logp_rollout"] = old
        if spec.obs_coef:
            kwargs["obs_mask"] = 1 - torch.eye(3)
            kwargs["obs_mask"][1, 2] = 0
        torch.manual_seed(0)
        results.append(
            from_logp(spec, logp.requires_grad_(), logp_old=old, logp_ref=old, mask=mask, backend=backend, **kwargs)
        )
    for out, grad in results[1:]:
        assert_bits(out.loss, results[0][0].loss)
        assert_bits(grad, results[0][1])
        assert out.metrics.to_dict() == results[0][0].metrics.to_dict()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_case_058_packed_equals_padded(backend, name, reduction):
    """modelscope/ms-swift#5965, #6548: one length assumed instead of segments."""
    lengths = [1, 2, 3]
    mask = torch.zeros(3, 3)
    for i, n in enumerate(lengths):
        mask[i, :n] = 1
    spec = spec_with(name, reduction, epsilon_low=0.05, epsilon_high=0.05)
    logp, old, adv = random(3, 3, scale=0.2) - 1, random(3, 3, seed=1, scale=0.2) - 1, tensor([1.0, -1.0, 2.0])
    padded, padded_grad = from_logp(
        spec, logp.clone().requires_grad_(), logp_old=old, sequence_advantages=adv, mask=mask, backend=backend
    )
    keep = mask.bool()
    packed, packed_grad = from_logp(
        spec,
        logp[keep].clone().requires_grad_(),
        logp_old=old[keep],
        sequence_advantages=adv,
        cu_seqlens=tensor([0, 1, 3, 6], torch.int64),
        backend=backend,
    )
    torch.testing.assert_close(packed.numerator, padded.numerator)
    assert_bits(packed.weight, padded.weight)
    torch.testing.assert_close(packed.per_token, padded.per_token[keep])
    torch.testing.assert_close(packed_grad, padded_grad[keep])
    # the ratios themselves, from the definition
    d = (logp - old).double()
    means = [(d[i, :n].mean()).exp().item() for i, n in enumerate(lengths)]
    close(packed.metrics["ratio_min"], min(means))
    close(packed.metrics["ratio_max"], max(means))


def test_case_059_sequence_mean_and_token_mean(backend):
    """ServiceNow/Fast-LLM#544: lengths 1 and 3, sequence losses 1 and 0."""
    mask = tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    logp = tensor([[-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])  # reinforce with A = 1 has loss -logp
    for reduction, expected in (("seq-mean-token-mean", 0.5), ("token-mean", 0.25)):
        out = fusedpg.policy_loss(spec_with("reinforce", reduction), logp, advantages=1.0, mask=mask, backend=backend)
        close(out.loss, expected)


def test_case_060_sequence_ratio_is_a_mean(backend):
    """huggingface/trl#5814, #5815: log-ratios were summed instead of averaged."""
    spec = fusedpg.loss_spec("gspo")
    out, _ = from_logp(
        spec,
        torch.full((1, 300), -1.0).requires_grad_(),
        logp_old=torch.full((1, 300), -0.998),
        sequence_advantages=tensor([1.0]),
        backend=backend,
    )
    close(out.metrics["ratio_mean"], math.exp(-0.002))  # 0.998; the sum would give 0.549


@pytest.mark.parametrize(("level", "expected"), [("geometric", math.exp(-0.002)), ("sequence", math.exp(-0.6))])
def test_case_060_correction_by_mean_or_by_product(backend, level, expected):
    """huggingface/trl#5814, #5815: the mean form 0.998 and the product form 0.549 of a correction weight are two options with two names."""
    out, _ = from_logp(
        fusedpg.loss_spec("ppo_clip", is_correction="truncate", is_high=2.0, is_level=level),
        torch.full((1, 300), -1.0).requires_grad_(),
        logp_old=torch.full((1, 300), -1.0),
        logp_rollout=torch.full((1, 300), -0.998),
        sequence_advantages=tensor([1.0]),
        backend=backend,
    )
    close(out.metrics["is_weight_mean"], expected)
    close(out.per_token, torch.full((1, 300), -expected))


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_case_061_sequence_ratio_overflow(backend, name, advantage):
    """verl-project/verl#2775: exponential of an unbounded mean log-ratio."""
    spec = fusedpg.loss_spec(name)
    out, grad = from_logp(
        spec,
        leaf([[149.0, 149.0]]),
        logp_old=tensor([[-1.0, -1.0]]),
        sequence_advantages=tensor([advantage]),
        backend=backend,
    )
    expected = -(1 + 4e-4) if advantage > 0 else math.exp(10)  # the log-ratio is at most 10
    close(out.loss, expected)
    close(out.per_token, [[expected, expected]])
    assert (grad == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
def test_case_062_rejection_mask_in_every_mode(backend, name, reduction):
    """arcee-ai/NeMo-RL#24: the sequence-level path used the raw masks."""
    spec = spec_with(name, reduction)
    logp, old = random(2, 3, scale=0.1) - 1, random(2, 3, seed=1, scale=0.1) - 1
    extra = tensor([[0.0], [1.0]]).expand(2, 3)
    adv = tensor([3.0, 1.0])

    def run(rows, **kwargs):
        new = logp[rows].clone().requires_grad_()
        return from_logp(
            spec,
            new,
            logp_old=old[rows],
            backend=backend,
            **kwargs,
            **advantages_for(spec, adv[rows], tuple(new.shape)),
        )

    both, grad = run(slice(0, 2), mask=extra)
    alone, alone_grad = run(slice(1, 2))
    assert_bits(both.numerator, alone.numerator)
    assert_bits(both.weight, alone.weight)
    assert (grad[0] == 0).all()
    assert_bits(grad[1:], alone_grad)
    weighed, weighed_grad = run(slice(0, 2), is_weights=extra.contiguous())
    assert (weighed_grad[0] == 0).all()
    assert (weighed.per_token[0] == 0).all()


def test_case_063_clip_fractions(backend):
    """huggingface/trl#3032, #3144, #3175: comparison direction and the sign of the advantage."""
    spec = fusedpg.loss_spec("ppo_clip")
    old = tensor([-3.0] * 6)
    logp = (old + tensor(logs([1.5, 0.5, 1.5, 0.5, 1.5, 0.5]))).requires_grad_()
    advantages = tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    mask = tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    out, grad = from_logp(spec, logp, logp_old=old, advantages=advantages, mask=mask, backend=backend)
    m = out.metrics
    assert (m["clip_frac_high"], m["clip_frac_low"], m["clip_frac"]) == (0.25, 0.25, 0.5)
    assert m["out_of_band_frac"] == 1.0
    assert (grad == 0).tolist() == [True, False, False, True, True, True]
    with_zero, _ = from_logp(spec, logp, logp_old=old, advantages=advantages, backend=backend)
    close(with_zero.metrics["clip_frac"], 2 / 6)  # A = 0 never counts


def test_case_064_lower_bound_is_one_minus_epsilon(backend):
    """ChenmienTan/RL2#21: the bound was eps instead of 1 - eps."""
    spec = fusedpg.loss_spec("ppo_clip", epsilon_low=0.2, epsilon_high=0.28)
    out, grad = from_logp(spec, leaf(logs([0.5])), logp_old=tensor([0.0]), advantages=-1.0, backend=backend)
    close(out.loss, 0.8)
    assert grad == 0


def test_case_065_dual_clip_is_for_negative_advantages(backend):
    """thu-ml/tianshou#433: the cap c*A applied whatever the sign."""
    spec = fusedpg.loss_spec("ppo_dual_clip", dual_clip=3.0)
    positive, grad = from_logp(spec, leaf(logs([0.5])), logp_old=tensor([0.0]), advantages=1.0, backend=backend)
    close(positive.loss, -0.5)  # the wrong form gives -3
    close(grad, [-0.5])
    negative, grad = from_logp(spec, leaf(logs([10.0])), logp_old=tensor([0.0]), advantages=-1.0, backend=backend)
    close(negative.loss, 3.0)
    assert grad == 0
    assert negative.metrics["dual_clip_frac"] == 1
    assert positive.metrics["dual_clip_frac"] == 0


@pytest.mark.parametrize("constant", [0.5, 1.0, NAN, -INF, 0.0, -3.0])
def test_case_066_dual_clip_constant(constant):
    """opendilab/PPOxFamily#95: a constant of at most 1 was accepted."""
    with pytest.raises(ValueError, match="dual_clip: expected a number"):
        fusedpg.loss_spec("ppo_dual_clip", dual_clip=constant)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.2, None, (0.8, 1.2)),  # None beside a number: symmetric
        (0.2, 0.2, (0.8, 1.2)),
        (0.0, 0.0, (1.0, 1.0)),
        (0.3, 0.2, (0.7, 1.2)),
        (-0.1, 0.2, None),
        (1.0, 4.0, (0.0, 5.0)),
        (1.5, 0.2, (-0.5, 1.2)),  # no ratio is negative: no lower bound
        (INF, INF, (-INF, INF)),  # off
        (NAN, 0.2, None),
        (0.2, NAN, None),
        (0.2, -0.1, None),
    ],
)
def test_case_067_clip_bounds(low, high, expected):
    """areal-project/AReaL#285, anthonytorlucci/rlevo#469, chainer/chainerrl#340: no common validation."""
    if expected is None:
        with pytest.raises(ValueError, match=r"epsilon_(low|high): expected a"):
            fusedpg.loss_spec("ppo_clip", epsilon_low=low, epsilon_high=high)
        return
    spec = fusedpg.loss_spec("ppo_clip", epsilon_low=low, epsilon_high=high)
    assert (spec.clip_low, spec.clip_high) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token"])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("ratio", [1.25, 0.75, 1.0])
def test_case_068_gradient_at_a_tie(backend, name, ratio, advantage):
    """linkedin/Liger-Kernel#1373: a two-way select without the tie."""
    base = fusedpg.loss_spec(name, reduction="token-sum", log_ratio_clamp=None)
    kwargs = {"logp_old": tensor([[-1.0]]), "sequence_advantages": tensor([advantage]), "backend": backend}
    logp = leaf([[-1.0 + math.log(ratio)]])
    measured = from_logp(base.replace(clip_low=0.0, clip_high=9.0), logp, **kwargs)[0].metrics["ratio_mean"].item()
    bounds = {"clip_low": min(measured, 1.0), "clip_high": max(measured, 1.0)}  # exactly the bits of the ratio
    out, grad = from_logp(base.replace(**bounds), logp, **kwargs)
    close(out.loss, -advantage * measured)
    close(grad, [[-advantage * measured]])  # dL/dratio = -A at the exact bound, as torch.max and clamp have it
    assert out.metrics["out_of_band_frac"] == 0


def test_case_069_extrema_merge_as_extrema(backend):
    """NVIDIA-NeMo/RL#1818: min and max averaged over micro-batches."""
    spec = fusedpg.loss_spec("ppo_clip")
    parts = [
        from_logp(spec, leaf(logs(r)), logp_old=tensor([0.0, 0.0]), advantages=1.0, backend=backend)[0].metrics
        for r in ([0.8, 1.1], [1.0, 1.6])
    ]
    merged = parts[0].merge(parts[1])
    close(merged["ratio_min"], 0.8)
    close(merged["ratio_max"], 1.6)
    close(merged["ratio_mean"], 4.5 / 4)
    close(parts[1]["ratio_min"], 1.0)


def test_case_070_metrics_are_divided_by_the_selected_tokens(backend):
    """PrimeIntellect-ai/prime-rl#580, NovaSky-AI/SkyRL#462: divided by the padded length."""
    logp = random(1, 8) - 2
    mask = tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    out, _ = from_logp(
        fusedpg.loss_spec("ppo_clip"),
        logp.clone().requires_grad_(),
        logp_old=logp,
        advantages=1.0,
        mask=mask,
        backend=backend,
    )
    assert out.metrics["ratio_mean"] == 1
    assert out.weight == 2
    close(out.numerator, -2.0)
    assert out.metrics["tokens"] == 2


def test_case_071_per_sequence_values_are_not_broadcast(backend):
    """verl-project/verl#3245: [B] next to [B,T], hidden when B == T."""
    spec = fusedpg.loss_spec("reinforce")
    logp = torch.full((3, 3), -1.0)
    values = tensor([1.0, 2.0, 3.0])
    for wrong in (values, values[:, None], values[None]):
        with pytest.raises(ValueError, match=r"advantages: expected shape \(3, 3\).*sequence_advantages"):
            fusedpg.policy_loss(spec, logp, advantages=wrong, backend=backend)
    with pytest.raises(ValueError, match=r"is_weights: expected shape \(3, 3\)"):
        fusedpg.policy_loss(spec, logp, advantages=1.0, is_weights=values, backend=backend)
    out = fusedpg.policy_loss(spec, logp, sequence_advantages=values, backend=backend)
    close(out.per_token, [[1.0] * 3, [2.0] * 3, [3.0] * 3])  # along the rows


@pytest.mark.parametrize("values", [[-1.3, 0.0, 0.7], [0.0, 1.0, 1.5], [0.0, NAN, 1.0], [0.0, INF, 1.0]])
def test_case_072_advantages_in_the_place_of_the_mask(backend, values):
    """verl-project/verl#2506: a positional mix-up."""
    spec = fusedpg.loss_spec("reinforce")
    with pytest.raises(ValueError, match=r"mask: expected weights in \[0, 1\].*check that advantages"):
        fusedpg.policy_loss(spec, tensor([-1.0] * 3), advantages=1.0, mask=tensor(values), backend=backend)
    with pytest.raises(TypeError, match="positional argument"):
        fusedpg.policy_loss(spec, tensor([-1.0] * 3), tensor(values), backend=backend)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ("k1", [0.0, 0.0, 0.0]),  # zero mean: the score function integrates to 0
        ("k2", [0.36023, -0.14947, -0.21077]),  # the true reverse KL
        ("k3", [0.4, 0.0, -0.4]),  # p - q: the forward KL
        ("k3+", [0.36023, -0.14947, -0.21077]),
        ("k1+", [0.36023, -0.14947, -0.21077]),
    ],
)
def test_case_073_expected_kl_gradients(backend, kl, expected):
    """OpenRLHF/OpenRLHF#1309, verl-project/verl#2953, THUDM/slime#1004, #1039: exact enumeration of V = 3."""
    policy, reference = tensor([0.6, 0.3, 0.1]), tensor([0.2, 0.3, 0.5])
    logits = policy.log().repeat(3, 1).requires_grad_()  # row t scores token t, weighed by its probability
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum", kl=kl, kl_coef=1.0)
    out, grad = from_logits(
        spec, logits, torch.arange(3), advantages=0.0, mask=policy, logp_ref=reference.log(), backend=backend
    )
    close(grad.sum(0), expected, atol=1e-5)
    if kl != "k2":  # k1 and k3 are unbiased
        true_kl = sum(p * math.log(p / q) for p, q in ((0.6, 0.2), (0.3, 0.3), (0.1, 0.5)))
        close(out.numerator, true_kl)
    assert (spec.kl_gradient.name == "STRAIGHT_THROUGH") == kl.endswith("+")
    assert fusedpg.CATALOGUE["grpo"].kl.name == "K3"
    assert fusedpg.CATALOGUE["grpo"].kl_gradient.name == "OWN"
    assert spec.level == Level.TOKEN


@pytest.mark.parametrize(
    ("knobs", "gradient", "value"),
    [
        # the score term makes the expected gradient of an unbiased estimator that of the reverse KL
        ({"kl": "k1", "kl_coef": 1.0, "kl_gradient": "score"}, [0.36023, -0.14947, -0.21077], 0.49822),
        ({"kl": "k3", "kl_coef": 1.0, "kl_gradient": "score"}, [0.36023, -0.14947, -0.21077], 0.49822),
    ],
    ids=str,
)
def test_case_073_score_terms(backend, knobs, gradient, value):
    """NVIDIA-NeMo/RL#2506: a KL estimate on the policy's own samples needs the score function's term."""
    out, grad = enumerated(backend, tensor([0.6, 0.3, 0.1]), knobs)
    close(out.numerator, value, atol=1e-5)
    close(grad.sum(0), gradient, atol=1e-5)


@pytest.mark.parametrize(
    ("knobs", "gradient", "value"),
    [
        # KL(q||p) = 0.58500 with gradient p - q; -log p is its cross entropy
        ({"kl_backward": "score", "kl_backward_coef": 1.0}, [0.4, 0.0, -0.4], 1.61465),
        ({"kl_backward": "k3", "kl_backward_coef": 1.0}, [0.4, 0.0, -0.4], 0.58500),
        # KL(p||q) = 0.49822; the score form has its gradient and no meaningful value
        ({"kl_forward": "score", "kl_forward_coef": 1.0}, [0.36023, -0.14947, -0.21077], None),
        ({"kl_forward": "k3", "kl_forward_coef": 1.0}, [0.36023, -0.14947, -0.21077], 0.49822),
    ],
    ids=str,
)
def test_case_073_kl_of_the_samplers_tokens(backend, knobs, gradient, value):
    """NVIDIA-NeMo/RL#2506: both directions, estimated on samples of the other policy."""
    out, grad = enumerated(backend, tensor([0.2, 0.3, 0.5]), knobs)
    close(grad.sum(0), gradient, atol=1e-5)
    if value is not None:
        close(out.numerator, value, atol=1e-5)


def enumerated(backend, sampler, knobs):
    """Expectations over V = 3 tokens drawn from `sampler`, the policy being 0.6, 0.3, 0.1 and the reference 0.2, 0.3, 0.5."""
    policy, reference = tensor([0.6, 0.3, 0.1]), tensor([0.2, 0.3, 0.5])
    logits = policy.log().repeat(3, 1).requires_grad_()
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum", **knobs)
    return from_logits(
        spec, logits, torch.arange(3), advantages=0.0, mask=sampler, logp_ref=reference.log(), backend=backend
    )
