"""Bad input: the error names the argument, what was expected, what came and the fix. And no input is ever written."""

import math
import re
import warnings

import pytest
import torch

import fusedpg
from fusedpg import dispatch

NAN, INF = math.nan, math.inf
I64 = torch.int64


def good():
    """Arguments of a working padded call, grpo with KL."""
    return {
        "logits": torch.zeros(2, 3, 5),
        "targets": torch.zeros(2, 3, dtype=I64),
        "logp_old": torch.zeros(2, 3),
        "logp_ref": torch.zeros(2, 3),
        "advantages": torch.ones(2, 3),
        "mask": torch.ones(2, 3),
    }


def packed():
    """The same as packed rows."""
    flat = {k: v.reshape(6, *v.shape[2:]) for k, v in good().items()}
    return {**flat, "cu_seqlens": torch.tensor([0, 3, 6])}


GRPO = fusedpg.loss_spec("grpo")


def call(backend, base, changes, spec=GRPO):
    arguments = {**base, **changes}
    return fusedpg.policy_loss_from_logits(
        spec, arguments.pop("logits"), arguments.pop("targets"), backend=backend, **arguments
    )


def test_the_good_calls_work(backend):
    call(backend, good(), {})
    call(backend, packed(), {})


def meta(*shape, dtype=torch.float32):
    """Stands in for a second device."""
    return torch.zeros(shape, dtype=dtype, device="meta")


PER_TOKEN = ["logp_old", "logp_ref", "advantages", "mask", "is_weights"]
SHAPE = (
    "expected shape (2, 3) (one value a token, like targets); got {}; nothing is broadcast: expand it explicitly, or"
)

BAD_PADDED = [
    # shapes
    ({"logits": torch.zeros(2, 4, 5)}, ValueError, "logits: expected shape (2, 3, 'V') (targets' shape plus the vocabulary); got (2, 4, 5); logits[i] scores targets[i], so slice or shift both before the call"),
    ({"logits": torch.zeros(6, 5)}, ValueError, "logits: expected shape (2, 3, 'V')"),
    ({"logits": torch.zeros(2, 3, 0)}, ValueError, "logits: expected a vocabulary of at least 1; got (2, 3, 0)"),
    ({"targets": torch.zeros(2, 3, 1, dtype=I64)}, ValueError, "targets: expected shape (N,) packed or (B, T) padded; got (2, 3, 1)"),
    ({"targets": torch.zeros((), dtype=I64)}, ValueError, "targets: expected shape (N,) packed or (B, T) padded; got ()"),
    *(({name: torch.ones(shape)}, ValueError, f"{name}: " + SHAPE.format(shape)) for name in PER_TOKEN for shape in ((2,), (3,), (2, 1), (1, 3), (6,), (3, 2), ())),
    ({"temperature": torch.ones(2)}, ValueError, "temperature: expected shape (2, 3) (one value a token, like targets); got (2,)"),
    # dtypes
    ({"logits": torch.zeros(2, 3, 5, dtype=torch.int32)}, TypeError, "logits: expected a tensor of float32, bfloat16, float16 or float64; got torch.int32"),
    ({"logits": [[[0.0]]]}, TypeError, "logits: expected a tensor of float32, bfloat16, float16 or float64; got list"),
    ({"targets": torch.zeros(2, 3)}, TypeError, "targets: expected int32 or int64 token ids; got torch.float32; cast with .long()"),
    ({"targets": torch.zeros(2, 3, dtype=torch.uint8)}, TypeError, "targets: expected int32 or int64 token ids; got torch.uint8; cast with .long()"),
    ({"targets": [0]}, TypeError, "targets: expected an integer tensor; got list"),
    ({"mask": torch.ones(2, 3, dtype=torch.complex64)}, TypeError, "mask: expected real numbers; got torch.complex64"),
    ({"mask": [1, 1, 1]}, TypeError, "mask: expected a tensor of shape (2, 3); got list"),
    ({"logp_old": 0.0}, TypeError, "logp_old: expected a tensor of shape (2, 3); got float"),
    ({"advantages": [1.0]}, TypeError, "advantages: expected a tensor of shape (2, 3); got list"),
    # devices
    *(({name: meta(2, 3)}, ValueError, f"{name}: expected device cpu (that of targets); got meta; move it with .to()") for name in PER_TOKEN),
    ({"targets": meta(2, 3, dtype=I64)}, ValueError, "targets: expected device cpu (that of logits); got meta; move it with .to()"),
    ({"temperature": meta(2, 3)}, ValueError, "temperature: expected device cpu (that of targets); got meta"),
    # values
    ({"targets": torch.full((2, 3), 5)}, ValueError, "targets: expected ids in [0, 5) at unmasked places; got 5 at index [0, 0]; mask ignored tokens out with `mask`"),
    ({"targets": torch.tensor([[0, 0, 0], [0, -100, 0]])}, ValueError, "got -100 at index [1, 1]"),
    ({"mask": torch.full((2, 3), 1.5)}, ValueError, "mask: expected weights in [0, 1] (bool, or float with 0 = masked); got values from 1.5 to 1.5; check that advantages"),
    ({"mask": torch.tensor([[1, 1, 1], [1, 1, -1]])}, ValueError, "mask: expected weights in [0, 1] (bool, or float with 0 = masked); got values from -1 to 1"),
    ({"mask": torch.full((2, 3), NAN)}, ValueError, "mask: expected weights in [0, 1]"),
    ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0; got 0.0; greedy rollouts have no tempered distribution"),
    ({"temperature": "1"}, ValueError, "temperature: expected a finite number > 0; got '1'"),
    ({"temperature": True}, ValueError, "temperature: expected a finite number > 0; got True"),
    ({"temperature": torch.zeros(2, 3)}, ValueError, "temperature: expected finite numbers > 0; got values from 0 to 0"),
    ({"temperature": torch.full((2, 3), NAN)}, ValueError, "temperature: expected finite numbers > 0; got values from nan to nan"),
    ({"softcap": 0.0}, ValueError, "softcap: expected a finite number > 0; got 0.0"),
    ({"softcap": -1}, ValueError, "softcap: expected a finite number > 0; got -1"),
    ({"logit_scale": INF}, ValueError, "logit_scale: expected a finite number > 0; got inf"),
    ({"logit_scale": 0.0}, ValueError, "logit_scale: expected a finite number > 0; got 0.0"),
    ({"normalizer": 0.0}, ValueError, "normalizer: expected a finite number > 0; got 0.0"),
    ({"normalizer": -2}, ValueError, "normalizer: expected a finite number > 0; got -2"),
    ({"normalizer": NAN}, ValueError, "normalizer: expected a finite number > 0; got nan"),
    ({"normalizer": torch.ones(2)}, ValueError, "normalizer: expected one number; got shape (2,); sum it first"),
    # meaning
    ({"logp_ref": None}, ValueError, "logp_ref: the loss 'grpo' reads it (see its kl, anchor and is_correction); got None; pass the log-probs"),
    ({"advantages": None}, ValueError, "advantages: expected exactly one of advantages (one value a token) and sequence_advantages (one a sequence); got neither"),
    ({"sequence_advantages": torch.ones(2)}, ValueError, "got both"),
    ({"advantages": None, "sequence_advantages": torch.ones(3)}, ValueError, "sequence_advantages: expected shape (2,), one value a sequence; got (3,)"),
    ({"advantages": None, "sequence_advantages": 1.0}, ValueError, "sequence_advantages: expected shape (2,), one value a sequence; got float"),
    ({"advantages": None, "sequence_advantages": meta(2)}, ValueError, "sequence_advantages: expected device cpu (that of the batch); got meta"),
    ({"obs_mask": torch.ones(2, 3)}, ValueError, "obs_mask: the loss 'grpo' has no observation term and never reads it; got a tensor; drop it or pass obs_coef to loss_spec"),
    ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens: expected None for padded input (2, 3) (each row is a sequence); got a tensor; flatten the batch to (N,)"),
    ({"metrics": "all"}, ValueError, "metrics: expected 'full' or 'none'; got 'all'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"), BAD_PADDED, ids=lambda v: "" if isinstance(v, (str, type)) else "-".join(v)
)
def test_bad_padded_input(backend, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(backend, good(), changes)


CU = "cu_seqlens: expected 0 = cu[0] <= cu[1] <= ... <= cu[-1] = 6; got {}; build it as cumsum of the sequence lengths"
BAD_PACKED = [
    ({"cu_seqlens": None}, ValueError, "cu_seqlens: the loss 'grpo' (level token, reduction 'seq-mean-token-mean') works on sequences and expects their boundaries for packed input; got None; pass cumulative lengths (S+1,)"),
    ({"cu_seqlens": torch.tensor([1, 6])}, ValueError, CU.format([1, 6])),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, CU.format([0, 5])),
    ({"cu_seqlens": torch.tensor([0, 7])}, ValueError, CU.format([0, 7])),
    ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, CU.format([0, 4, 3, 6])),
    ({"cu_seqlens": torch.tensor([0, -1, 6])}, ValueError, CU.format([0, -1, 6])),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, ValueError, "cu_seqlens: expected int32 or int64 of shape (S+1,); got torch.float32 (2,)"),
    ({"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, "cu_seqlens: expected int32 or int64 of shape (S+1,); got torch.int64 (1, 2)"),
    ({"cu_seqlens": torch.zeros(0, dtype=I64)}, ValueError, "cu_seqlens: expected int32 or int64 of shape (S+1,); got torch.int64 (0,)"),
    ({"cu_seqlens": meta(2, dtype=I64)}, ValueError, "cu_seqlens: expected device cpu (that of targets); got meta"),
    ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens: expected int32 or int64 of shape (S+1,); got list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    BAD_PACKED,
    ids=lambda v: "" if isinstance(v, (str, type, tuple)) else str(next(iter(v.values()))),
)
def test_bad_packed_input(backend, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(backend, packed(), changes)


def test_sequence_losses_want_sequence_advantages(backend):
    spec = fusedpg.loss_spec("gspo")
    message = "advantages: the loss 'gspo' has one ratio a sequence and expects one advantage a sequence; got one"
    with pytest.raises(ValueError, match=re.escape(message)):
        call(backend, good(), {}, spec)
    call(backend, good(), {"advantages": None, "sequence_advantages": torch.ones(2)}, spec)
    call(backend, good(), {"advantages": 1.0}, spec)  # one number for all is one a sequence as well
    with pytest.raises(
        ValueError, match="sequence_advantages: packed input needs cu_seqlens to tell the sequences apart"
    ):
        call(
            backend,
            packed(),
            {"advantages": None, "sequence_advantages": torch.ones(2), "cu_seqlens": None},
            fusedpg.loss_spec("ppo_clip"),
        )


def test_absent_old_logp_is_said(backend):
    with warnings.catch_warnings(record=True) as caught:  # not pytest.warns, which raises the interpreter's own again
        warnings.simplefilter("always")
        call(backend, good(), {"logp_old": None})
    ours = [w for w in caught if "logp_old" in str(w.message)]
    assert [w.category for w in ours] == [UserWarning]
    assert str(ours[0].message).startswith(
        "logp_old: got None, so the loss 'grpo' runs on-policy: every ratio is exactly 1 and its gradient that"
    )
    assert str(ours[0].message).endswith("pass logp_old, or say so with loss_spec(..., anchor='self')")
    assert ours[0].filename == __file__, "the warning points at the caller"
    call(backend, good(), {"logp_old": None}, GRPO.replace(anchor=fusedpg.loss_spec("ppo_clip", anchor="self").anchor))
    call(backend, good(), {"logp_old": None}, fusedpg.loss_spec("reinforce"))  # reads no ratio


def test_rollout_anchor_needs_its_stream(backend):
    spec = fusedpg.loss_spec("ppo_clip", anchor="rollout")
    with pytest.raises(
        ValueError,
        match=re.escape("logp_rollout: the loss 'ppo_clip' reads it (see its kl, anchor and is_correction); got None"),
    ):
        call(backend, good(), {}, spec)
    with pytest.raises(ValueError, match=re.escape("logp_rollout: expected shape (2, 3)")):
        call(backend, good(), {"logp_rollout": torch.ones(2)}, spec)


def small(**extra):
    return {"logp_old": torch.zeros(2, 3), "advantages": torch.ones(2, 3), **extra}


@pytest.mark.parametrize(
    ("name", "knobs", "changes", "message"),
    [
        ("icepop", {}, {}, "logp_rollout: the loss 'icepop' reads it (see its kl, anchor and is_correction); got None"),
        ("topr", {}, {}, "logp_rollout: the loss 'topr' reads it"),
        ("ipo", {}, {}, "logp_rollout: the loss 'ipo' reads it"),
        ("grpo", {"kl": None, "is_correction": "mask", "is_high": 2}, {}, "logp_rollout: the loss 'grpo' reads it"),
        ("grpo", {"kl": None, "is_reject": "token", "is_reject_high": 2}, {}, "logp_rollout: the loss 'grpo' reads it"),
        ("ppo_clip", {"kl_forward": "k3", "kl_forward_coef": 0.1}, {}, "logp_ref: the loss 'ppo_clip' reads it"),
        (
            "ppo_clip",
            {"is_correction": "truncate", "is_high": 2},
            {"is_weights": torch.ones(2, 3), "logp_rollout": torch.zeros(2, 3)},
            "is_weights: the loss 'ppo_clip' forms its weights from logp_rollout (is_correction, is_reject); got a tensor",
        ),
        (
            "echo",
            {},
            {},
            "obs_mask: the loss 'echo' has obs_coef=0.05 and reads it; got None; pass the mask of the obs",
        ),
        ("echo", {}, {"obs_mask": torch.ones(2, 2)}, "obs_mask: expected shape (2, 3)"),
        ("echo", {}, {"obs_mask": torch.full((2, 3), 2.0)}, "obs_mask: expected weights in [0, 1]"),
        ("gmpo", {}, {}, "advantages: the loss 'gmpo' has one ratio a sequence and expects one advantage a sequence"),
        ("luspo", {}, {}, "advantages: the loss 'luspo' has one ratio a sequence"),
    ],
    ids=str,
)
def test_what_a_loss_reads_must_be_there(backend, name, knobs, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fusedpg.policy_loss(fusedpg.loss_spec(name, **knobs), torch.zeros(2, 3), backend=backend, **small(**changes))


def test_packed_products_want_boundaries(backend):
    args = {"logp_old": torch.zeros(3), "advantages": torch.ones(3), "backend": backend}
    with pytest.raises(ValueError, match="cu_seqlens: the loss 'vespo' .* works on sequences"):
        fusedpg.policy_loss(fusedpg.loss_spec("vespo"), torch.zeros(3), **args)
    spec = fusedpg.loss_spec("ppo_clip", is_correction="mask", is_high=2, is_level="geometric")
    with pytest.raises(ValueError, match="cu_seqlens: the loss 'ppo_clip' .* works on sequences"):
        fusedpg.policy_loss(spec, torch.zeros(3), logp_rollout=torch.zeros(3), **args)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_inplace_with_a_selection(native_backend, name):
    logits = torch.zeros(2, 3, 5, requires_grad=True) + 0.0
    with pytest.raises(ValueError, match=f"inplace: the loss '{name}' selects tokens over the whole batch"):
        fusedpg.policy_loss_from_logits(
            fusedpg.loss_spec(name),
            logits,
            torch.zeros(2, 3, dtype=torch.int64),
            inplace=True,
            backend=native_backend,
            **small(),
        )


def test_wrong_spec(backend):
    for wrong in ("grpo", None, {}):
        with pytest.raises(
            TypeError, match=re.escape(f"spec: expected a LossSpec; got {type(wrong).__name__}; build one with")
        ):
            call(backend, good(), {}, wrong)


# ------------------------------------------------------------------ policy_loss


@pytest.mark.parametrize(
    ("logp", "got"),
    [
        (torch.zeros(2, dtype=I64), "torch.int64 (2,)"),
        (torch.zeros(2, 3, 4), "torch.float32 (2, 3, 4)"),
        (torch.zeros(()), "torch.float32 ()"),
        ([0.0], "list"),
    ],
)
def test_bad_logp(backend, logp, got):
    message = f"logp: expected a float tensor of shape (N,) or (B, T); got {got}"
    with pytest.raises(TypeError, match=re.escape(message)):
        fusedpg.policy_loss(fusedpg.loss_spec("reinforce"), logp, advantages=1.0, backend=backend)


def test_bad_entropy(backend):
    spec = fusedpg.loss_spec("reinforce", entropy_coef=0.1)
    message = "entropy: the loss 'reinforce' has entropy_coef=0.1 and reads it; got None; pass token_logprobs(..., return_entropy=True)"
    with pytest.raises(ValueError, match=re.escape(message)):
        fusedpg.policy_loss(spec, torch.zeros(2), advantages=1.0, backend=backend)
    with pytest.raises(
        ValueError, match=re.escape("entropy: expected shape (2,) (one value a token, like logp); got (3,)")
    ):
        fusedpg.policy_loss(spec, torch.zeros(2), entropy=torch.zeros(3), advantages=1.0, backend=backend)
    with pytest.raises(
        TypeError, match=re.escape("entropy: expected a float tensor; got torch.int64; cast with .float()")
    ):
        fusedpg.policy_loss(spec, torch.zeros(2), entropy=torch.zeros(2, dtype=I64), advantages=1.0, backend=backend)


def test_arguments_are_named_like_their_base(backend):
    with pytest.raises(
        ValueError, match=re.escape("logp_old: expected shape (2, 3) (one value a token, like logp); got (3,)")
    ):
        fusedpg.policy_loss(
            fusedpg.loss_spec("ppo_clip"), torch.zeros(2, 3), logp_old=torch.zeros(3), advantages=1.0, backend=backend
        )


# ------------------------------------------------------------------ backends


@pytest.mark.parametrize("function", ["token_logprobs", "policy_loss_from_logits", "policy_loss"])
def test_backend_names(function):
    z, t, spec = torch.zeros(2, 3), torch.zeros(2, dtype=I64), fusedpg.loss_spec("reinforce")
    calls = {
        "token_logprobs": lambda name: fusedpg.token_logprobs(z, t, backend=name),
        "policy_loss_from_logits": lambda name: fusedpg.policy_loss_from_logits(
            spec, z, t, advantages=1.0, backend=name
        ),
        "policy_loss": lambda name: fusedpg.policy_loss(spec, z[:, 0], advantages=1.0, backend=name),
    }
    for wrong in ("cuda", "CPU", "", None):
        with pytest.raises(
            ValueError, match=re.escape(f"backend: expected one of auto, cpu, triton, reference; got {wrong!r}")
        ):
            calls[function](wrong)


def test_backend_from_the_environment(monkeypatch):
    z, t = torch.zeros(2, 3), torch.zeros(2, dtype=I64)
    monkeypatch.setenv("FUSEDPG_BACKEND", "reference")
    assert fusedpg.token_logprobs(z, t).backend == "reference"
    assert fusedpg.token_logprobs(z, t, backend="cpu").backend == "cpu"  # the argument wins
    monkeypatch.setenv("FUSEDPG_BACKEND", "gpu")
    with pytest.raises(ValueError, match="FUSEDPG_BACKEND: expected one of auto, cpu, triton, reference; got 'gpu'"):
        fusedpg.token_logprobs(z, t)
    monkeypatch.setenv("FUSEDPG_BACKEND", "auto")
    assert fusedpg.token_logprobs(z, t).backend == "cpu"


def test_triton_refuses_fp64():
    with pytest.raises(
        ValueError, match=re.escape("backend: 'triton' computes in float32; got torch.float64; use 'reference' or cast")
    ):
        fusedpg.token_logprobs(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=I64), backend="triton")


def test_cpu_refuses_other_devices():
    with pytest.raises(
        ValueError, match=re.escape("backend: 'cpu' expects CPU tensors; got meta; use 'auto' or move the tensors")
    ):
        fusedpg.token_logprobs(meta(2, 3), meta(2, dtype=I64), backend="cpu")


def test_triton_refuses_cpu_tensors_outside_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(
        ValueError,
        match=re.escape("backend: 'triton' expects tensors on a GPU; got cpu; use 'auto', or set TRITON_INTERPRET=1"),
    ):
        dispatch.resolve("triton", torch.device("cpu"), torch.float32)


def test_debug_reads_values_of_other_devices(monkeypatch):
    from fusedpg import validate

    assert not validate.reads_values(meta(2))
    monkeypatch.setenv("FUSEDPG_DEBUG", "1")
    assert validate.reads_values(meta(2))


# ------------------------------------------------------------------ in place


def inplace_loss(logits, backend, spec=None):
    rows = logits.shape[0]
    return fusedpg.policy_loss_from_logits(
        spec or fusedpg.loss_spec("reinforce"),
        logits,
        torch.zeros(rows, dtype=I64),
        advantages=1.0,
        inplace=True,
        backend=backend,
    ).loss


def test_inplace_on_the_reference():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "inplace: expected a native backend ('cpu' or 'triton'); got backend='reference'; drop the option"
        ),
    ):
        inplace_loss(torch.zeros(2, 3, requires_grad=True) * 1, "reference")


def test_inplace_on_a_leaf(backend):
    with pytest.raises(
        ValueError, match=re.escape("inplace: expected logits computed by an operation; got a leaf that requires grad")
    ):
        inplace_loss(torch.zeros(2, 3, requires_grad=True), backend)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda z: z[:1].expand(4, 3),
            "inplace: expected logits whose elements do not share memory; got strides (0, 1) for shape (4, 3)",
        ),
        (
            lambda z: z.as_strided((3, 3), (2, 1)),
            "inplace: expected logits whose elements do not share memory; got strides (2, 1)",
        ),
        (lambda z: z.t(), "inplace: expected unit stride along the vocabulary; got strides (1, 3)"),
        (lambda z: z[:, ::2], "inplace: expected unit stride along the vocabulary; got strides (3, 2)"),
    ],
    ids=["expanded", "overlapping", "transposed", "column_step"],
)
def test_inplace_on_memory_that_is_not_its_own(backend, make, message):
    z = torch.zeros(4, 3, requires_grad=True) * 1
    with pytest.raises(ValueError, match=re.escape(message) + ".*pass inplace=False"):
        inplace_loss(make(z), backend)


@pytest.mark.parametrize("name", ["reinforce", "gspo_token"])
def test_inplace_twice(native_backend, name):
    root = torch.zeros(2, 3, requires_grad=True)
    spec = (
        fusedpg.loss_spec(name, anchor="self", reduction="token-sum")
        if name != "reinforce"
        else fusedpg.loss_spec(name)
    )
    kwargs = {"advantages": 1.0, "inplace": True, "backend": native_backend, "cu_seqlens": torch.tensor([0, 2])}
    loss = fusedpg.policy_loss_from_logits(spec, root * 1, torch.zeros(2, dtype=I64), **kwargs).loss
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"inplace: expected one backward; got a second one; .*pass inplace=False to keep the graph"
    ):
        loss.backward()


@pytest.mark.parametrize("name", ["reinforce", "gspo_token"])
def test_inplace_logits_changed_before_backward(native_backend, name):
    root = torch.zeros(2, 3, requires_grad=True)
    logits = root * 1
    spec = (
        fusedpg.loss_spec(name, anchor="self", reduction="token-sum")
        if name != "reinforce"
        else fusedpg.loss_spec(name)
    )
    kwargs = {"advantages": 1.0, "inplace": True, "backend": native_backend, "cu_seqlens": torch.tensor([0, 2])}
    loss = fusedpg.policy_loss_from_logits(spec, logits, torch.zeros(2, dtype=I64), **kwargs).loss
    with torch.no_grad():
        logits.add_(1.0)
    with pytest.raises(
        RuntimeError,
        match=r"inplace: expected the logits untouched between the loss and its backward; .*pass inplace=False",
    ):
        loss.backward()


def test_inplace_under_compile(native_backend):
    torch._dynamo.reset()

    def loss(z):
        return inplace_loss(z * 1, native_backend)

    with pytest.raises(Exception, match=r"inplace: expected False under torch\.compile"):
        torch.compile(loss, fullgraph=True, backend="eager")(torch.zeros(2, 3, requires_grad=True))
    torch._dynamo.reset()


# ------------------------------------------------------------------ nothing is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_inputs_keep_their_bits(backend, name, dtype, padded):
    """Forward and backward, from logits and from log-probs: every argument is bit-equal afterwards."""
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(ValueError, match="'triton' computes in float32"):
            dispatch.resolve("triton", torch.device("cpu"), dtype)
        return
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3) if padded else (6,)
    random = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    arguments = {
        "logp_old": random(*shape) - 2,
        "logp_ref": random(*shape) - 2,
        "is_weights": random(*shape).abs(),
        "mask": (torch.rand(shape, generator=generator) > 0.3).to(dtype),
        "normalizer": torch.tensor(3.0, dtype=dtype),
        "sequence_advantages": random(2),
    }
    if not padded:
        arguments["cu_seqlens"] = torch.tensor([0, 2, 6])
    tensors = {
        **arguments,
        "logits": random(*shape, 7),
        "targets": torch.randint(7, shape, generator=generator),
        "temperature": random(*shape).abs() + 0.5,
        "logp": random(*shape) - 2,
        "entropy": random(*shape).abs(),
    }
    before = {k: v.clone() for k, v in tensors.items()}
    spec = fusedpg.loss_spec(name, kl="k3", kl_coef=0.1, entropy_coef=0.05)
    for key in ("logits", "logp", "entropy"):
        tensors[key].requires_grad_()
    from_logits = fusedpg.policy_loss_from_logits(
        spec,
        tensors["logits"],
        tensors["targets"],
        temperature=tensors["temperature"],
        return_entropy=True,
        backend=backend,
        **arguments,
    )
    from_logp = fusedpg.policy_loss(spec, tensors["logp"], entropy=tensors["entropy"], backend=backend, **arguments)
    lp = fusedpg.token_logprobs(
        tensors["logits"], tensors["targets"], mask=arguments["mask"], return_entropy=True, backend=backend
    )
    total = from_logits.loss + from_logp.loss + lp.logp.sum() + lp.entropy.sum()
    total.backward(retain_graph=True)
    total.backward()
    for key, old in before.items():
        assert torch.equal(tensors[key].detach(), old), f"{key} was written"
    assert {k for k, v in tensors.items() if v.grad is not None} == {"logits", "logp", "entropy"}


@pytest.mark.parametrize("name", ["reinforce", "gspo_token"])
def test_inplace_writes_the_logits_only(native_backend, name):
    """With inplace=True the logits' own memory holds their gradient, and nothing else changes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 5, generator=generator)
    constants = {
        "logp_old": torch.randn(4, generator=generator) - 2,
        "cu_seqlens": torch.tensor([0, 1, 4]),
        "mask": torch.tensor([1.0, 0.0, 1.0, 1.0]),
    }
    before = {k: v.clone() for k, v in constants.items()}
    spec, targets = fusedpg.loss_spec(name), torch.zeros(4, dtype=I64)
    fenced = torch.full((6, 9), 7.0)
    fenced[1:5, 2:7] = values

    def step(logits, root, inplace):
        out = fusedpg.policy_loss_from_logits(
            spec, logits, targets, advantages=1.0, inplace=inplace, backend=native_backend, **constants
        )
        return torch.autograd.grad(out.loss, root)[0]

    leaf = values.clone().requires_grad_()
    plain = step(leaf, leaf, False)
    root = fenced.requires_grad_()
    whole = root * 1.0
    view = whole[1:5, 2:7]
    grad = step(view, root, True)
    torch.testing.assert_close(grad[1:5, 2:7], plain, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(view.detach(), plain, rtol=1e-6, atol=1e-8)
    outside = torch.ones(6, 9, dtype=torch.bool)
    outside[1:5, 2:7] = False
    assert (whole.detach()[outside] == 7.0).all()
    assert (grad[outside] == 0).all()
    assert all(torch.equal(constants[k], v) for k, v in before.items())


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_normalizer_tensor_is_checked_like_a_number(value):
    with pytest.raises(ValueError, match=r"normalizer: expected a number >= 0 \(0 for an empty step\); got"):
        fusedpg.policy_loss(
            fusedpg.loss_spec("reinforce"),
            torch.zeros(2),
            advantages=1.0,
            normalizer=torch.tensor(value),
            backend="cpu",
        )
