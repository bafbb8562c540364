"""Autograd, splits, reductions, metrics, compilation, memory, and direct distillation through the objective."""

import itertools
import warnings

import pytest
import torch
from teachers import DIVERGENCES, Pair, make_pair, run

import fusedpg
from fusedpg import distill_ops
from fusedpg.cli import memory
from fusedpg.spec import REDUCTIONS
from support import backend_device


def leaf_and_loss(backend, dtype=torch.float32, divergence="jsd"):
    device = backend_device(backend)
    pair = make_pair((3, 41), dtype, dtype, masked=True)
    leaf = pair.student.to(device).requires_grad_()
    teacher = pair.teacher.to(device).requires_grad_()
    mask = pair.mask.to(device)
    out = fusedpg.distillation_loss(leaf, teacher, divergence=divergence, mask=mask, backend=backend)
    return leaf, teacher, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_retained_graph_twice(dtype, backend):
    """A second backward equals the first, one with upstream 3 is thrice as large, and the first gradient stays."""
    leaf, teacher, out = leaf_and_loss(backend, dtype)
    (first,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
    kept = first.clone()
    (again,) = torch.autograd.grad(out.loss, leaf, retain_graph=True)
    (third,) = torch.autograd.grad(out.loss, leaf, torch.tensor(3.0, device=leaf.device))
    rounding = 2 * torch.finfo(dtype).eps
    assert torch.equal(first, kept)
    assert torch.equal(again, first)
    torch.testing.assert_close(third, 3 * first, rtol=2 * rounding, atol=1e-7)
    assert teacher.grad is None


def test_only_the_student_has_a_gradient(backend):
    leaf, teacher, out = leaf_and_loss(backend)
    out.loss.backward()
    assert leaf.grad is not None
    assert teacher.grad is None
    assert not any(t.requires_grad for t in (out.per_token, out.numerator, out.weight, out.metrics["divergence"]))


@pytest.mark.parametrize("upstream", [0.0, -1.0, 0.125, 65536.0])
def test_upstream_gradient(upstream, backend):
    pair = make_pair((4, 23), masked=True)
    one, got = run(pair, backend), run(pair, backend, upstream=upstream)
    torch.testing.assert_close(got.grad, upstream * one.grad, rtol=1e-5, atol=1e-12)
    if upstream == 0:
        assert (got.grad == 0).all()


def test_fp16_gradient_is_formed_with_the_loss_scale(backend):
    """Probabilities below fp16's least number survive when the upstream factor lifts them."""
    pair = Pair(torch.tensor([[0.0, -19.0]]).half(), torch.tensor([[0.0, -40.0]]))
    assert run(pair, backend, divergence="forward_kl").grad[0, 1] == 0
    scaled = run(pair, backend, divergence="forward_kl", upstream=65536.0).grad[0, 1].item()
    assert scaled == pytest.approx(65536 * 5.6e-9, rel=0.02)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_gradcheck(divergence, name):
    pair = make_pair((3, 7), torch.float64, torch.float64)
    excluded = torch.full((3, 2), -torch.inf, dtype=torch.float64)
    teacher = torch.cat([pair.teacher, excluded], 1)
    knobs = {"divergence": divergence, "beta": 0.3, "temperature": 0.7, "teacher_temperature": 1.3, "backend": name}

    def loss(x):
        return fusedpg.distillation_loss(torch.cat([x, excluded], 1), teacher, **knobs).loss

    assert torch.autograd.gradcheck(loss, (pair.student.requires_grad_(),))


def test_no_grad_does_forward_work_only(native_backend, monkeypatch):
    formed = []
    native = distill_ops.dispatch.native(native_backend)
    original = native.distill
    monkeypatch.setattr(native, "distill", lambda *a: formed.append(a[-1] is not None) or original(*a))
    pair = make_pair((3, 9))
    with torch.no_grad():
        out = fusedpg.distillation_loss(pair.student.requires_grad_(), pair.teacher, backend=native_backend)
    assert not out.loss.requires_grad
    fusedpg.distillation_loss(pair.student.detach(), pair.teacher, backend=native_backend)
    fusedpg.distillation_loss(pair.student, pair.teacher, backend=native_backend).loss.backward()
    assert formed == [False, False, True]


# ------------------------------------------------------------------ units


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_split_is_the_whole(reduction, packed, backend):
    """Numerators, weights, metrics and gradients of micro-batches add to those of the batch, empty ones included."""
    lengths = (4, 0, 3, 2)
    dtype = torch.float32 if backend == "triton" else torch.float64
    whole = make_pair((4, 4, 11), dtype, dtype, masked=True)
    whole.mask &= torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    if packed:
        keep = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
        whole = Pair(whole.student[keep], whole.teacher[keep], whole.mask[keep])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    knobs = {"reduction": reduction, "max_tokens": 7 if reduction.endswith("norm") else None, "divergence": "jsd"}

    def part(first, last, **extra):
        rows = slice(int(offsets[first]), int(offsets[last])) if packed else slice(first, last)
        cu = offsets[first : last + 1] - offsets[first] if packed else None
        pair = Pair(whole.student[rows], whole.teacher[rows], whole.mask[rows])
        return run(pair, backend, cu_seqlens=cu, **knobs, **extra)

    want = part(0, 4)
    parts = [part(a, b, normalizer=1.0) for a, b in itertools.pairwise((0, 1, 2, 4))]
    weight = torch.ones(()) if reduction == "token-sum" else sum(p.values["weight"] for p in parts)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    assert weight == want.values["weight"]
    torch.testing.assert_close(sum(p.values["numerator"] for p in parts) / weight, want.values["loss"], **close)
    torch.testing.assert_close(torch.cat([p.grad for p in parts]) / weight, want.grad, **close)
    merged = parts[0].output.metrics.merge(*(p.output.metrics for p in parts[1:]))
    assert tuple(merged) == fusedpg.DISTILL_METRIC_NAMES
    for name, value in want.output.metrics.items():
        torch.testing.assert_close(merged[name], value, **close)


def test_weights_and_normalizer(backend):
    """A fractional mask weighs the loss, not the metrics; a normalizer divides the numerator."""
    pair = make_pair((3, 12))
    pair.mask = torch.tensor([0.5, 0.0, 1.0])
    got = run(pair, backend)
    x = got.values["per_token"]
    assert got.values["weight"] == 1.5
    torch.testing.assert_close(got.values["loss"], (0.5 * x[0] + x[2]) / 1.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.values["metric:divergence"], (x[0] + x[2]) / 2, rtol=1e-6, atol=0)
    assert got.values["metric:tokens"] == 2
    by_eight = run(pair, backend, normalizer=torch.tensor(8.0))
    torch.testing.assert_close(by_eight.values["loss"], got.values["loss"] * 1.5 / 8, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_eight.grad, got.grad * 1.5 / 8, rtol=1e-5, atol=1e-9)


def test_an_all_masked_batch_is_zero_and_connected(backend):
    pair = make_pair((2, 3, 8), torch.bfloat16)
    pair.mask = torch.zeros(2, 3, dtype=torch.bool)
    pair.student[:] = torch.nan
    got = run(pair, backend, reduction="seq-mean-token-mean", divergence="jsd")
    assert got.values["loss"] == 0
    assert (got.grad == 0).all()
    assert got.output.metrics.to_dict() == dict.fromkeys(fusedpg.DISTILL_METRIC_NAMES, 0.0)


# ------------------------------------------------------------------ torch.compile, memory


def test_fullgraph_and_fakes(native_backend):
    device = backend_device(native_backend)
    pair = make_pair((5, 13), masked=True)
    teacher, mask = pair.teacher.to(device), pair.mask.to(device)

    def step(x):
        out = fusedpg.distillation_loss(x, teacher, divergence="jsd", mask=mask, backend=native_backend)
        return out.loss, out.metrics["divergence"], out.per_token

    torch._dynamo.reset()
    results = []
    for f in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = pair.student.to(device).requires_grad_()
        loss, *rest = f(x)
        (grad,) = torch.autograd.grad(loss, x)
        results.append((loss.detach(), *rest, grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    torch._dynamo.reset()


def test_operators_pass_opcheck():
    pair = make_pair((1, 3, 9))
    w, scale = torch.tensor([1.0, 0.0, 1.0]), torch.tensor(0.5)
    for form_grad in (False, True):
        args = (pair.student.requires_grad_(), pair.teacher, w, scale, 2, 0.3, 1.0, 1.0, form_grad, "cpu")
        torch.library.opcheck(distill_ops.distill, args, test_utils=("test_schema", "test_faketensor"))
    ids = torch.tensor([[0, 3], [1, 2], [8, 4]])
    args = (pair.student, ids, torch.full((3, 2), -1.5), w, scale, 1.0, "cpu")
    torch.library.opcheck(distill_ops.top_k, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", [*DIVERGENCES, "top-k"])
def test_memory(kind):
    """Nothing of the size of tokens times vocabulary but the gradient: 16 MiB of bf16 logits, scratch included."""
    rows, vocab = 256, 1 << 15
    x, y = torch.randn(rows, vocab).bfloat16().requires_grad_(), torch.randn(rows, vocab).bfloat16()
    target = y if kind != "top-k" else fusedpg.TopK(*reversed(torch.log_softmax(y.float(), -1).topk(8)))
    knobs = {"divergence": kind if kind != "top-k" else "forward_kl", "backend": "cpu"}
    fusedpg.distillation_loss(x, target, **knobs).loss.backward()  # thread pools and lazy imports
    x.grad = None
    cpu = torch.device("cpu")
    with torch.no_grad():
        forward = memory.peak_extra_bytes(lambda: fusedpg.distillation_loss(x, target, **knobs).loss, cpu)
    whole = memory.peak_extra_bytes(
        lambda: torch.autograd.grad(fusedpg.distillation_loss(x, target, **knobs).loss, x), cpu
    )
    if forward is None or whole is None:
        pytest.skip("this system does not report the peak of the resident memory")
    matrix = rows * vocab * 2
    assert forward < matrix / 8
    assert 0.9 * matrix < whole < 1.125 * matrix


# ------------------------------------------------------------------ through the objective


def test_direct_distillation_runs_on_it(backend):
    """The builder's objective reports these metrics, and merges them exactly over chunks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rl = fusedpg.OPDConfig(distillation_mode="direct", divergence="jsd", jsd_beta=0.3, temperature=0.8)
        context = type("Context", (), {"name_or_path": "toy", "backend": backend})()
        objective = fusedpg.build_opd_objective(rl, context)
    device = backend_device(backend)
    pair = make_pair((3, 4, 11), masked=True)
    model = torch.nn.Embedding(3, 44).to(device)

    def logits_of(batch):
        return model(batch["rows"]).view(-1, 4, 11)

    def chunk(rows):
        return {
            "rows": rows.to(device),
            "targets": torch.zeros(len(rows), 4, dtype=torch.int64, device=device),
            "mask": pair.mask[rows].to(device),
            "teacher": pair.teacher[rows].to(device),
        }

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, batch):
            return logits_of(batch)

    chunks = [chunk(torch.tensor([0])), chunk(torch.tensor([1, 2]))]
    result = fusedpg.StepAccumulator(objective, Policy()).step(chunks)
    whole = chunk(torch.arange(3))
    want = fusedpg.distillation_loss(
        logits_of(whole), whole["teacher"], divergence="jsd", beta=0.3, temperature=0.8, mask=whole["mask"]
    )
    torch.testing.assert_close(result.loss.float(), want.loss.detach())
    for name, value in want.metrics.items():
        torch.testing.assert_close(result.metrics[f"train/{name}"].float(), value, msg=name)
