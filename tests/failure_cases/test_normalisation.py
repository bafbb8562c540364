"""Cases 74-86: who divides by what. The pair (numerator, weight) sums; the caller divides once."""

import pytest
import torch
from cases import (
    advantages_for,
    assert_bits,
    close,
    from_logits,
    from_logp,
    leaf,
    random,
    random_ids,
    spec_with,
    tensor,
)

import fusedpg
from fusedpg import reference
from fusedpg.spec import REDUCTIONS


def reinforce_sums(backend, losses, mask=None, reduction="token-mean"):
    """(numerator, weight) of given per-token losses: reinforce with A = 1 has loss -logp."""
    out = fusedpg.policy_loss(
        spec_with("reinforce", reduction),
        -tensor(losses),
        advantages=1.0,
        mask=None if mask is None else tensor(mask),
        backend=backend,
    )
    return out.numerator.item(), out.weight.item()


def summed(pairs):
    """The loss of all micro-batches together."""
    numerators, weights = zip(*pairs, strict=True)
    return sum(numerators) / sum(weights)


def micro_batches(backend, sizes, scale_by):
    """Gradients of 8 tokens in micro-batches of `sizes`, the numerator divided by `scale_by`."""
    logp, old, adv = random(8) * 0.1 - 1, random(8, seed=1) * 0.1 - 1, random(8, seed=2)
    new = logp.clone().requires_grad_()
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        fusedpg.policy_loss(
            fusedpg.loss_spec("ppo_clip"),
            new[rows],
            logp_old=old[rows],
            advantages=adv[rows],
            normalizer=scale_by,
            backend=backend,
        ).loss.backward()
        start += size
    return new.grad


def test_case_074_a_skipped_step_leaves_nothing_behind(backend):
    """PrimeIntellect-ai/prime-rl#1961: the tokens of a skipped step still counted."""
    good = reinforce_sums(backend, [1.0, 2.0, 3.0, 4.0])
    reinforce_sums(backend, [float("nan")] * 4)  # the caller drops both parts of this pair
    assert reinforce_sums(backend, [1.0, 2.0, 3.0, 4.0]) == good == (10.0, 4.0)


def test_case_075_window_of_accumulation(backend):
    """huggingface/trl#6024, #5619: the denominator counted another window."""
    whole = micro_batches(backend, [8], 4.0)[:4]  # what one batch of the first four tokens would give
    window = micro_batches(backend, [2, 2, 2, 2], 4.0)[:4]
    assert_bits(window, whole)
    single = micro_batches(backend, [4, 4], None)[:4]  # its own weight is the window's token count
    assert_bits(window, single)


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [1] * 8, [5, 3]], ids=str)
def test_case_076_gradient_does_not_depend_on_accumulation(backend, sizes):
    """modelscope/ms-swift#10117, #10116: loss already global, divided again."""
    assert_bits(micro_batches(backend, sizes, 8.0), micro_batches(backend, [8], None))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kl", [None, "k3"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_case_077_fused_equals_eager_over_the_option_grid(backend, reduction, kl, entropy_coef):
    """linkedin/Liger-Kernel#1082, huggingface/trl#5890: 100x larger gradients than the plain path."""
    logits, targets = random(2, 4, 5), random_ids(5, 2, 4)
    mask = tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    old, ref, adv = random(2, 4, seed=1) * 0.2 - 1.6, random(2, 4, seed=2) * 0.2 - 1.6, random(2, 4, seed=3)
    weights = torch.full((2, 4), 0.01)
    spec = spec_with("ppo_clip", reduction, kl=kl, kl_coef=0.1 if kl else 0.0, entropy_coef=entropy_coef)

    eager = logits.double().requires_grad_()
    z = torch.log_softmax(eager, -1)
    logp = z.gather(-1, targets[..., None])[..., 0]
    r = (logp - old.double()).exp()
    x = torch.max(-adv.double() * r, -adv.double() * r.clamp(0.8, 1.2)) * weights.double()
    if kl:
        x = x + 0.1 * ((ref.double() - logp).exp() - (ref.double() - logp) - 1)
    x = x + entropy_coef * (z.exp() * z).sum(-1)
    m = mask.double()
    per_sequence = {"seq-mean-token-mean": m.sum(1, keepdim=True), "seq-mean-token-sum-norm": 8.0}.get(reduction, 1.0)
    units = {"token-mean": 5.0, "token-sum": 1.0}.get(reduction, 2.0)
    expected = (x * m / per_sequence).sum() / units
    expected.backward()

    fused = logits.clone().requires_grad_()
    value = 0.0
    for row in range(2):  # two micro-steps
        rows = slice(row, row + 1)
        out = fusedpg.policy_loss_from_logits(
            spec,
            fused[rows],
            targets[rows],
            logp_old=old[rows],
            logp_ref=ref[rows],
            advantages=adv[rows],
            is_weights=weights[rows],
            mask=mask[rows],
            normalizer=units,
            backend=backend,
        )
        out.loss.backward()
        value += out.loss.item()
    assert value == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(fused.grad.double(), eager.grad, rtol=1e-5, atol=1e-6)


def test_case_078_token_mean_of_micro_batches(backend):
    """verl-project/verl#5625, #906, NovaSky-AI/SkyRL#925, modelscope/twinkle#292: a mean of means."""
    padded = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    mask = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    both = summed([reinforce_sums(backend, padded, mask)])
    split = summed([reinforce_sums(backend, padded[i : i + 1], mask[i : i + 1]) for i in range(2)])
    assert both == split == pytest.approx(0.2)  # the mean of means would be 0.5


@pytest.mark.parametrize("reduction", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_case_079_sequence_mean_over_ranks(backend, reduction):
    """verl-project/verl#5798: the world size went into the wrong place."""
    ranks = [reinforce_sums(backend, [[1.0], [1.0]], reduction=reduction) for _ in range(3)]
    assert summed(ranks) == pytest.approx(1.0)
    # averaging ranks: each uses the global weight over the world size
    logp = leaf([[-1.0], [-1.0]])
    spec = spec_with("reinforce", reduction)
    losses = [
        fusedpg.policy_loss(spec, logp, advantages=1.0, normalizer=6.0 / 3, backend=backend).loss for _ in range(3)
    ]
    assert (sum(losses) / 3).item() == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_case_080_padding_width_has_no_influence(backend, reduction):
    """verl-project/verl#3741, #5366: the divisor was the padded length."""
    results = []
    for width in (4, 9):
        losses, mask = torch.zeros(2, width), torch.zeros(2, width)
        losses[0, :2], mask[0, :2] = tensor([1.0, 2.0]), 1
        losses[1, :4], mask[1, :4] = tensor([4.0, 5.0, 6.0, 7.0]), 1
        results.append(reinforce_sums(backend, losses.tolist(), mask.tolist(), reduction))
    assert results[0] == results[1]
    if reduction == "seq-mean-token-sum-norm":
        assert results[0] == (25.0 / 8, 2.0)  # the divisor is an argument: max_tokens = 8


@pytest.mark.parametrize("reduction", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_case_081_last_smaller_micro_batch(backend, reduction):
    """NovaSky-AI/SkyRL#1637: integer division of batch by micro-batch."""
    losses = [[float(i + 1)] * 2 for i in range(5)]
    split = [reinforce_sums(backend, losses[i : i + 2], reduction=reduction) for i in (0, 2, 4)]
    whole = reinforce_sums(backend, losses, reduction=reduction)
    assert sum(n for n, _ in split) == pytest.approx(whole[0])
    assert sum(w for _, w in split) == whole[1] == (10.0 if reduction == "token-mean" else 5.0)


def test_case_082_ignored_tokens_do_not_count(backend):
    """ROCm/TransformerEngine#336: divided by N instead of valid tokens."""
    assert reinforce_sums(backend, [9.0, 2.0, 9.0, 9.0], [0.0, 1.0, 0.0, 0.0]) == (2.0, 1.0)


@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_case_083_chunked_gradient(backend, chunk, monkeypatch):
    """ROCm/aiter#5165: a gradient N times too large when rows are processed in chunks."""
    logits, targets, adv = random(6, 5), random_ids(5, 6), random(6, seed=1)
    spec = fusedpg.loss_spec("reinforce")
    whole = logits.clone().requires_grad_()
    fusedpg.policy_loss_from_logits(spec, whole, targets, advantages=adv, backend=backend).loss.backward()
    monkeypatch.setattr(reference, "ROW_CHUNK", chunk)  # the reference's own chunks
    inner = logits.clone().requires_grad_()
    fusedpg.policy_loss_from_logits(spec, inner, targets, advantages=adv, backend=backend).loss.backward()
    outer = logits.clone().requires_grad_()  # the caller's chunks
    for start in range(0, 6, chunk):
        rows = slice(start, start + chunk)
        fusedpg.policy_loss_from_logits(
            spec, outer[rows], targets[rows], advantages=adv[rows], normalizer=6.0, backend=backend
        ).loss.backward()
    torch.testing.assert_close(inner.grad, whole.grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(outer.grad, whole.grad, rtol=1e-6, atol=1e-8)


def test_case_084_dropped_rows_leave_both_parts(backend):
    """huggingface/trl#6369: removed from the sum but still counted in the divisor."""
    numerator, weight = reinforce_sums(backend, [[1.0, 2.0], [5.0, 6.0]], [[1.0, 1.0], [0.0, 0.0]])
    assert (numerator, weight) == (3.0, 2.0)


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_case_085_empty_shard_and_empty_row(backend, reduction):
    """verl-project/verl#6464, redai-studio/Relax#285: counts clamped to 1 per shard or sample."""
    losses, mask = [[9.0] * 4, [1.0, 2.0, 3.0, 9.0]], [[0.0] * 4, [1.0, 1.0, 1.0, 0.0]]
    whole = reinforce_sums(backend, losses, mask, reduction)
    shards = [reinforce_sums(backend, [row], [m], reduction) for row, m in zip(losses, mask, strict=True)]
    assert shards[0] == (0.0, 0.0)
    assert whole == (sum(n for n, _ in shards), sum(w for _, w in shards))
    assert whole[1] == (3.0 if reduction == "token-mean" else 1.0)
    halves = [  # two context-parallel halves of each row
        reinforce_sums(backend, [row[h] for row in losses], [m[h] for m in mask], "token-mean")
        for h in (slice(0, 2), slice(2, 4))
    ]
    assert sum(w for _, w in halves) == 3.0
    assert sum(n for n, _ in halves) == 6.0


def test_case_086_kl_is_averaged_over_the_mask(backend):
    """allenai/open-instruct#535: a scalar mean of an unmasked KL matrix."""
    logp = leaf([[-1.0, -1.0, -1.0, -1.0]])
    ref = logp.detach() - tensor([[1.0, 1.0, 9.0, 9.0]])
    spec = fusedpg.loss_spec("reinforce", kl="k1", kl_coef=0.1)
    out, grad = from_logp(
        spec, logp, advantages=0.0, logp_ref=ref, mask=tensor([[1.0, 1.0, 0.0, 0.0]]), backend=backend
    )
    close(out.numerator, 0.2)
    close(grad, [[0.1, 0.1, 0.0, 0.0]])
    assert out.metrics["kl"] == 1
    assert out.weight == 2


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_case_083_sequence_losses_chunked_by_sequence(backend, name):
    """ROCm/aiter#5165: the same for losses that know sequences."""
    spec = fusedpg.loss_spec(name, kl=None)
    logits, targets, old = random(3, 2, 5), random_ids(5, 3, 2), random(3, 2, seed=1) * 0.1 - 1.6
    adv = tensor([1.0, -1.0, 0.5])
    whole = from_logits(
        spec,
        logits.clone().requires_grad_(),
        targets,
        logp_old=old,
        backend=backend,
        **advantages_for(spec, adv, (3, 2)),
    )
    parts = [
        from_logits(
            spec,
            logits[i : i + 1].clone().requires_grad_(),
            targets[i : i + 1],
            logp_old=old[i : i + 1],
            backend=backend,
            **advantages_for(spec, adv[i : i + 1], (1, 2)),
        )
        for i in range(3)
    ]
    torch.testing.assert_close(torch.cat([g for _, g in parts]), whole[1], rtol=1e-6, atol=1e-8)
    close(whole[0].numerator, sum(o.numerator.item() for o, _ in parts))
