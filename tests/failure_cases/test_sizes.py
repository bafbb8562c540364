"""Cases 23-33: 64-bit offsets, grids, tiles and targets outside the vocabulary."""

import math

import pytest
import torch
from cases import assert_bits, close, from_logits, random, random_ids, tensor

import fusedpg
from fusedpg import dispatch, reference

#: backends whose time for tens of thousands of rows is short; the kernels themselves run there on a GPU
MANY_ROWS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.gpu)]


def rows_past_2_31(rows: int, vocab: int, stride: int) -> torch.Tensor:
    """bf16 logits whose last row starts past element 2^31; memory is reserved, and used only where it is written."""
    assert (rows - 1) * stride > 2**31
    base = torch.empty((rows - 1) * stride + vocab, dtype=torch.bfloat16)
    return base.as_strided((rows, vocab), (stride, 1))


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
def test_case_023_last_row_past_2_31_elements(backend):
    """huggingface/trl#7266: row*stride in 32 bit. Every row but the last is masked, so its memory is never touched."""
    rows, vocab = 14136, 151936
    logits = rows_past_2_31(rows, vocab, vocab)
    last = random(1, vocab, dtype=torch.bfloat16)
    logits[-1] = last[0]
    targets = torch.zeros(rows, dtype=torch.int64)
    targets[-1] = vocab - 1
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[-1] = True
    many = fusedpg.token_logprobs(logits, targets, mask=mask, return_entropy=True, backend=backend)
    one = fusedpg.token_logprobs(last, targets[-1:], return_entropy=True, backend=backend)
    assert_bits(many.logp[-1:], one.logp)
    assert_bits(many.entropy[-1:], one.entropy)
    assert (many.logp[:-1] == 0).all()


@pytest.mark.gpu
def test_case_023_gradient_past_2_31_elements():
    """huggingface/trl#7266: the gradient of that row, in a buffer of 4.3 GB."""
    rows, vocab = 14136, 151936
    base = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    last = random(1, vocab, dtype=torch.bfloat16)
    base[-1] = last[0]
    targets = torch.full((rows,), vocab - 1, dtype=torch.int64)
    spec = fusedpg.loss_spec("reinforce", reduction="token-sum")
    out, grad = from_logits(spec, base.requires_grad_(), targets, advantages=1.0, backend="triton")
    one, one_grad = from_logits(spec, last.requires_grad_(), targets[-1:], advantages=1.0, backend="triton")
    assert_bits(out.logp[-1:], one.logp)
    assert_bits(grad[-1:], one_grad)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo_token"])
def test_case_024_huge_row_stride(backend, name):
    """fla-org/flash-linear-attention#1082, thu-ml/SageAttention#386: 32-bit index times a large stride."""
    rows, vocab = 9, 50
    values = random(rows, vocab, dtype=torch.bfloat16)
    view = rows_past_2_31(rows, vocab, 2**28 + 8)
    view.copy_(values)
    targets = random_ids(vocab, rows)
    spec = fusedpg.loss_spec(name, entropy_coef=0.1)
    kwargs = {"logp_old": random(rows, seed=1) - 4, "advantages": random(rows, seed=2), "backend": backend}
    kwargs["cu_seqlens"] = tensor([0, 4, rows], torch.int64)
    plain, plain_grad = from_logits(spec, values.requires_grad_(), targets, **kwargs)
    # as a leaf the view is its own root: its gradient is a fresh small tensor
    strided, strided_grad = from_logits(spec, view.detach().requires_grad_(), targets, **kwargs)
    assert_bits(strided.loss, plain.loss)
    assert_bits(strided.logp, plain.logp)
    assert_bits(strided_grad, plain_grad)


def test_case_025_scatter_and_saved_statistics_are_64_bit(native_backend):
    """PaddlePaddle/Paddle#30590: the label scatter had its own 32-bit index. Here the gradient overwrites the view."""
    rows, vocab, stride = 9, 40, 2**28 + 8
    values = random(rows, vocab, dtype=torch.bfloat16)
    view = rows_past_2_31(rows, vocab, stride)
    view.copy_(values)
    targets = random_ids(vocab, rows)
    native = dispatch.native(native_backend)
    maps = (None, 1.0, 0.0, 1.0)
    logp, entropy, row_max, log_sum = native.logprob_forward(view[None], targets, None, *maps, True)
    c, e = torch.ones(rows), torch.full((rows,), 0.5)
    native.logprob_backward(view[None], targets, row_max, log_sum, entropy, c, e, *maps, view[None])
    leaf = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(leaf, targets, return_entropy=True, backend=native_backend)
    (out.logp + 0.5 * out.entropy).sum().backward()
    assert_bits(logp, out.logp.detach())
    assert_bits(view, leaf.grad)
    assert view[-1, targets[-1]] > 0


@pytest.mark.parametrize("backend", MANY_ROWS)
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "one_token_rows"])
def test_case_026_more_than_65535_rows(backend, padded, monkeypatch):
    """linkedin/Liger-Kernel#1294, triton-lang/triton#3299: a grid axis ends at 65,535."""
    monkeypatch.setattr(reference, "ROW_CHUNK", 2**14)  # fewer and larger steps
    rows, vocab = 65600, 32
    logits, targets = random(rows, vocab), random_ids(vocab, rows)
    truth = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
    shape = (rows, 1) if padded else (rows,)
    leaf = logits.reshape(*shape, vocab).requires_grad_()
    reduction = "seq-mean-token-mean" if padded else "token-sum"
    out, grad = from_logits(
        fusedpg.loss_spec("reinforce", reduction=reduction),
        leaf,
        targets.reshape(shape),
        advantages=1.0,
        backend=backend,
    )
    torch.testing.assert_close(out.logp.reshape(-1).double(), truth, rtol=0, atol=2e-6)
    p = torch.softmax(logits.double(), -1)
    expected = p - torch.nn.functional.one_hot(targets, vocab)
    torch.testing.assert_close(grad.reshape(rows, vocab).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
def test_case_027_every_row_of_a_very_large_batch_is_written(backend):
    """triton-lang/triton#7260: a launch over the limit did nothing, silently."""
    rows, vocab = 2**22, 8
    logits = torch.zeros(rows, vocab)
    logits[-1] = random(1, vocab)[0]
    out = fusedpg.token_logprobs(logits, torch.full((rows,), 3), backend=backend)
    assert (out.logp[:-1] == out.logp[0]).all()
    close(out.logp[0], -math.log(8))
    close(out.logp[-1], torch.log_softmax(logits[-1].double(), -1)[3].item())


@pytest.mark.parametrize("vocab", [65536, 65537, 102400, 151936, 256000, 262144])
def test_case_028_large_vocabularies(backend, vocab):
    """unslothai/unsloth#19, #91: a whole row had to fit one block."""
    check_rows(backend, 2, vocab)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1_048_577), (3, 200_000)])
def test_case_029_tile_is_capped(backend, rows, vocab):
    """meta-pytorch/tritonbench#269, modelscope/ms-swift#7883: a tile grew with the vocabulary."""
    check_rows(backend, rows, vocab)


def check_rows(backend: str, rows: int, vocab: int) -> None:
    """logp and its gradient against fp64, the last column a target."""
    values = random(rows, vocab, scale=3)
    targets = torch.full((rows,), vocab - 1)
    targets[0] = 0
    leaf = values.clone().requires_grad_()
    out = fusedpg.token_logprobs(leaf, targets, return_entropy=True, backend=backend)
    out.logp.sum().backward()
    truth = torch.log_softmax(values.double(), -1)
    close(out.logp, truth.gather(-1, targets[:, None])[:, 0].cpu(), atol=1e-5)
    close(out.entropy, -(truth.exp() * truth).sum(-1).cpu(), atol=1e-4)
    expected = -truth.exp()
    expected.scatter_add_(-1, targets[:, None], torch.ones_like(expected[:, :1]))
    close(leaf.grad, expected.cpu(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [-1, 8, 9, 2**31 - 1, -100])
def test_case_030_targets_outside_the_vocabulary(backend, dtype, bad):
    """tenstorrent/tt-metal#53209, axolotl-ai-cloud/axolotl#3510: wild reads."""
    logits = random(3, 8)
    targets = tensor([0, bad, 7], dtype)
    if logits.device.type == "cpu":
        with pytest.raises(
            ValueError, match=rf"targets: expected ids in \[0, 8\) at unmasked places; got {bad} at index \[1\]"
        ):
            fusedpg.token_logprobs(logits, targets, backend=backend)
        with pytest.raises(ValueError, match="mask ignored tokens out with `mask`"):
            fusedpg.policy_loss_from_logits(
                fusedpg.loss_spec("reinforce"), logits, targets, advantages=1.0, backend=backend
            )
    else:
        assert torch.isnan(fusedpg.token_logprobs(logits, targets, backend=backend).logp[1])
    masked = fusedpg.token_logprobs(logits, targets, mask=tensor([1, 0, 1]).bool(), backend=backend)
    clean = fusedpg.token_logprobs(logits, tensor([0, 0, 7], dtype), backend=backend)
    assert masked.logp[1] == 0
    assert_bits(masked.logp[[0, 2]], clean.logp[[0, 2]])


@pytest.mark.parametrize("bad", [-1, 8, 2**40, -(2**40)])
def test_case_030_kernels_never_read_outside_a_row(native_backend, bad):
    """tenstorrent/tt-metal#53209: below the checks the kernels answer NaN for that row alone."""
    logits, targets = random(3, 8)[None], torch.tensor([0, bad, 7])
    maps = (None, 1.0, 0.0, 1.0)
    logp, _, row_max, log_sum = dispatch.native(native_backend).logprob_forward(logits, targets, None, *maps, False)
    assert torch.isnan(logp).tolist() == [False, True, False]
    out = torch.full_like(logits, 7.0)
    c = torch.ones_like(logp)
    dispatch.native(native_backend).logprob_backward(logits, targets, row_max, log_sum, None, c, None, *maps, out)
    assert torch.isfinite(out[0, [0, 2]]).all()


def test_case_031_ignore_label_is_not_an_address(backend):
    """open-lm-engine/lm-engine#505: logits[row, -100] was loaded before the test."""
    logits = random(3, 8).requires_grad_()
    targets = tensor([-100, 1, 2], torch.int64)  # row 0 is the very start of the allocation
    mask = tensor([0.0, 1.0, 1.0])
    out = fusedpg.token_logprobs(logits, targets, mask=mask, return_entropy=True, backend=backend)
    assert out.logp[0] == 0
    assert out.entropy[0] == 0
    loss, grad = from_logits(
        fusedpg.loss_spec("reinforce"), logits, targets, advantages=1.0, mask=mask, backend=backend
    )
    assert (grad[0] == 0).all()
    assert loss.weight == 2
    middle = fusedpg.token_logprobs(logits, tensor([1, -100, 2]).long(), mask=tensor([1.0, 0.0, 1.0]), backend=backend)
    assert middle.logp[1] == 0


@pytest.mark.parametrize(
    "vocab",
    [1, 2, 3, 15, 16, 17, 33, 127, 128, 129, 1023, 1024, 1025, 8191, 8192, 8193, 16385, 32767, 32769, 65537, 100002],
)
def test_case_032_columns_past_v_never_contribute(backend, vocab):
    """verl-project/verl#2899, #2656: padded columns entered the log-sum-exp as logit 0."""
    logits = torch.full((2, vocab), -50.0).requires_grad_()
    targets = tensor([0, vocab - 1], torch.int64)
    out = fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=backend)
    close(out.logp, [-math.log(vocab)] * 2, atol=2e-6)  # V = 129: -4.8598; zero padding would give -54.84
    close(out.entropy, [math.log(vocab)] * 2, atol=2e-5)
    assert (out.logp <= 0).all()
    out.logp.sum().backward()
    expected = torch.full((2, vocab), -1.0 / vocab, dtype=torch.float64)
    expected.scatter_add_(-1, targets[:, None], torch.ones(2, 1, dtype=torch.float64))
    close(logits.grad, expected.cpu(), atol=1e-7)


def test_case_033_rank_of_the_input(backend, monkeypatch):
    """verl-project/verl#6446: chunked entropy looped over the vocabulary."""
    monkeypatch.setattr(reference, "ROW_CHUNK", 2)
    logits, targets = random(5, 7), random_ids(7, 5)
    packed = fusedpg.token_logprobs(logits, targets, return_entropy=True, backend=backend)
    padded = fusedpg.token_logprobs(logits[None], targets[None], return_entropy=True, backend=backend)
    assert_bits(packed.entropy, padded.entropy[0])
    assert_bits(packed.logp, padded.logp[0])
    truth = torch.log_softmax(logits.double(), -1)
    close(packed.entropy, -(truth.exp() * truth).sum(-1).cpu())
    with pytest.raises(ValueError, match=r"targets: expected shape \(N,\) packed or \(B, T\) padded; got \(1, 1, 5\)"):
        fusedpg.token_logprobs(logits[None, None], targets[None, None], backend=backend)
    with pytest.raises(ValueError, match=r"logits: expected shape \(5, 'V'\)"):
        fusedpg.token_logprobs(logits[None], targets, backend=backend)
