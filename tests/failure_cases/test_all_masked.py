"""Cases 17-22: nothing is selected, or nothing is there."""

import pytest
import torch
from cases import (
    advantages_for,
    assert_bits,
    assert_finite,
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
from fusedpg.spec import REDUCTIONS


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "reinforce"])
def test_case_017_no_trainable_token(backend, name, reduction):
    """NVIDIA-NeMo/RL#158, #166, verl-project/verl#782: mean over an empty set."""
    spec = spec_with(name, reduction, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    logits = random(2, 3, 4).requires_grad_()
    constants = {"logp_old": random(2, 3, seed=1), "logp_ref": random(2, 3, seed=2)}
    out = fusedpg.policy_loss_from_logits(
        spec,
        logits,
        random_ids(4, 2, 3),
        mask=torch.zeros(2, 3),
        backend=backend,
        **constants,
        **advantages_for(spec, tensor([1.0, -1.0]), (2, 3)),
    )
    out.loss.backward()
    assert_finite(out)
    assert out.loss == 0
    assert out.numerator == 0
    assert out.weight == (1 if reduction == "token-sum" else 0)  # the unit count of a sum is always 1
    assert out.metrics["tokens"] == 0
    assert all(value == 0 for value in out.metrics.to_dict().values() if value != out.weight)
    assert (logits.grad == 0).all()


def test_case_018_zero_loss_is_connected(backend):
    """huggingface/trl#5826, karpathy/nanochat#623: the zero had no graph."""
    logits = leaf([[0.1, 0.2, 0.3, 0.4]])
    out = fusedpg.policy_loss_from_logits(
        fusedpg.loss_spec("reinforce"),
        logits,
        tensor([1], torch.int64),
        advantages=1.0,
        mask=tensor([0.0]),
        backend=backend,
    )
    assert out.loss.requires_grad
    out.loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    logp = leaf([-1.0])
    fusedpg.policy_loss(
        fusedpg.loss_spec("reinforce"), logp, advantages=1.0, mask=tensor([0.0]), backend=backend
    ).loss.backward()
    assert logp.grad.tolist() == [0.0]


@pytest.mark.parametrize("name", ["ppo_clip", "gspo_token"])
def test_case_020_masked_nan_logits_keep_the_graph(backend, name):
    """lightseekorg/TorchSpec#32, modelscope/ms-swift#3476: the connection must not be 0*logits."""
    logits = torch.full((2, 3, 5), torch.nan).requires_grad_()
    out = fusedpg.policy_loss_from_logits(
        fusedpg.loss_spec(name, anchor="self"),
        logits,
        torch.zeros(2, 3, dtype=torch.int64),
        advantages=1.0,
        mask=torch.zeros(2, 3),
        backend=backend,
    )
    out.loss.backward()
    assert out.loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (0, 0)], ids=str)
def test_case_021_no_rows(backend, name, shape):
    """triton-lang/triton#10464, triton-lang/triton-ascend#1221: a grid of size 0."""
    spec = fusedpg.loss_spec(name, entropy_coef=0.1)

    def run(rows):
        logits = random(*rows, 32).requires_grad_()
        targets = random_ids(32, *rows)
        kwargs = {}
        if len(rows) == 1:
            kwargs["cu_seqlens"] = tensor([0, rows[0]], torch.int64)
        sequences = rows[0] if len(rows) == 2 else 1
        kwargs["sequence_advantages"] = torch.ones(sequences)
        out = fusedpg.policy_loss_from_logits(
            spec, logits, targets, logp_old=random(*rows), mask=torch.ones(rows), backend=backend, **kwargs
        )
        out.loss.backward()
        return out, logits

    run((8,) if len(shape) == 1 else (2, 4))  # the kernel exists before the empty call
    out, logits = run(shape)
    assert_finite(out)
    assert out.numerator == 0
    assert out.weight == 0
    assert out.logp.shape == shape
    assert out.per_token.shape == shape
    assert logits.grad.shape == (*shape, 32)
    lp = fusedpg.token_logprobs(logits, random_ids(32, *shape), return_entropy=True, backend=backend)
    assert lp.logp.shape == shape
    assert lp.entropy.shape == shape
    (lp.logp.sum() + lp.entropy.sum()).backward()


def test_case_021_no_vocabulary_is_an_error(backend):
    """triton-lang/triton#10464: a size that may not be 0."""
    with pytest.raises(ValueError, match=r"logits: expected a vocabulary of at least 1; got \(2, 0\)"):
        fusedpg.token_logprobs(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), backend=backend)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo"])
def test_case_022_row_lengths_0_1_5(backend, name, reduction):
    """modelscope/ms-swift#3069, unslothai/unsloth-zoo#832: one keep-length for a whole batch."""
    spec = spec_with(name, reduction, kl="k3", kl_coef=0.1)
    mask = torch.zeros(3, 5)
    mask[1, :1] = 1
    mask[2, :] = 1
    logp, old, ref = (random(3, 5, seed=s, scale=0.3) - 1 for s in range(3))
    adv = tensor([5.0, 1.0, -2.0])

    def run(rows):
        new = logp[rows].clone().requires_grad_()
        kwargs = advantages_for(spec, adv[rows], tuple(new.shape))
        return from_logp(spec, new, logp_old=old[rows], logp_ref=ref[rows], mask=mask[rows], backend=backend, **kwargs)

    whole, grad = run(slice(0, 3))
    parts = [run(slice(i, i + 1)) for i in range(3)]
    assert_finite(whole, grad)
    assert parts[0][0].numerator == 0
    assert (grad[0] == 0).all()
    assert (grad[1, 1:] == 0).all()
    close(whole.numerator, sum(out.numerator.item() for out, _ in parts))
    if reduction != "token-sum":
        assert whole.weight == sum(out.weight for out, _ in parts)
    for i, (_, part) in enumerate(parts):
        torch.testing.assert_close(grad[i : i + 1], part)
    assert whole.metrics["sequences"] == 2


def test_case_022_row_lengths_from_logits(backend):
    """modelscope/ms-swift#3069: the same through logits, garbage behind the end."""
    lengths = [0, 1, 5]
    mask = torch.zeros(3, 5)
    for i, n in enumerate(lengths):
        mask[i, :n] = 1
    clean = random(3, 5, 7)
    dirty = torch.where(mask[..., None] != 0, clean, torch.nan)
    targets = random_ids(7, 3, 5)
    spec = fusedpg.loss_spec("gspo", anchor="self")
    runs = [
        from_logits(
            spec,
            x.clone().requires_grad_(),
            targets,
            sequence_advantages=tensor([1.0, 2.0, 3.0]),
            mask=mask,
            backend=backend,
        )
        for x in (clean, dirty)
    ]
    assert_bits(runs[0][0].loss, runs[1][0].loss)
    assert_bits(runs[0][1], runs[1][1])
