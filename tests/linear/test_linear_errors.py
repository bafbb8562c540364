"""Bad hidden states and heads: the error names the argument, what was expected, what came and the fix."""

import re

import pytest
import torch

import fusedpg


def good():
    return {
        "hidden": torch.zeros(2, 3, 4),
        "weight": torch.zeros(7, 4),
        "targets": torch.zeros(2, 3, dtype=torch.int64),
        "bias": torch.zeros(7),
    }


def loss(backend="auto", **changes):
    arguments = {**good(), **changes}
    positional = [arguments.pop(name) for name in ("hidden", "weight", "targets")]
    spec = fusedpg.loss_spec("reinforce")
    return fusedpg.policy_loss_from_hidden(spec, *positional, advantages=1.0, backend=backend, **arguments)


def logprobs(backend="auto", **changes):
    arguments = {**good(), **changes}
    positional = [arguments.pop(name) for name in ("hidden", "weight", "targets")]
    return fusedpg.linear_token_logprobs(*positional, backend=backend, **arguments)


class LoraHead(torch.nn.Linear):
    """What an adapter library makes of a head."""

    def __init__(self):
        super().__init__(4, 7)
        self.lora_A = torch.nn.Linear(4, 2)


def zero3():
    """A weight whose memory is elsewhere."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = torch.Size([7, 4])
    return weight


SHAPE = "; hidden[i] scores targets[i], so slice or shift both before the call"
DTYPE = "expected a tensor of float32, bfloat16, float16 or float64; got "
HEAD = "weight: expected shape (V, 4), the vocabulary by hidden's size; got "
ERRORS = [
    ({"hidden": torch.zeros(2, 4, 4)}, f"hidden: expected shape (2, 3, 'D') (targets' shape plus the hidden size); got (2, 4, 4){SHAPE}"),
    ({"hidden": torch.zeros(6, 4)}, f"hidden: expected shape (2, 3, 'D') (targets' shape plus the hidden size); got (6, 4){SHAPE}"),
    ({"hidden": torch.zeros(2, 3, 0)}, f"hidden: expected shape (2, 3, 'D') (targets' shape plus the hidden size); got (2, 3, 0){SHAPE}"),
    ({"hidden": torch.zeros(2, 3, 4, dtype=torch.int64)}, f"hidden: {DTYPE}torch.int64"),
    ({"hidden": [[0.0]]}, f"hidden: {DTYPE}list"),
    ({"hidden": torch.zeros(2, 3, 4, device="meta")}, "targets: expected device meta (that of hidden); got cpu; move it with .to()"),
    ({"weight": torch.zeros(4, 7)}, f"{HEAD}(4, 7); pass lm_head.weight as it is, not transposed"),
    ({"weight": torch.zeros(7, 5)}, f"{HEAD}(7, 5); pass lm_head.weight as it is, not transposed"),
    ({"weight": torch.zeros(0, 4)}, f"{HEAD}(0, 4); pass lm_head.weight as it is, not transposed"),
    ({"weight": torch.zeros(28)}, f"{HEAD}(28,); a flattened shard is not the matrix: call inside FSDP's summon_full_params, or from the model's forward"),
    ({"weight": torch.zeros(0)}, f"{HEAD}(0,); a flattened shard is not the matrix: call inside FSDP's summon_full_params, or from the model's forward"),
    ({"weight": torch.zeros(7, 4, dtype=torch.float8_e4m3fn)}, f"weight: {DTYPE}torch.float8_e4m3fn"),
    ({"weight": torch.zeros(7, 4, device="meta")}, "weight: expected device cpu (that of hidden); got meta; move it with .to()"),
    ({"weight": zero3()}, "weight: expected the whole matrix; got an empty one whose parameter says (7, 4): ZeRO-3 keeps it elsewhere; call inside deepspeed.zero.GatheredParameters([weight]), loss and backward"),
    ({"weight": torch.nn.Linear(4, 7)}, "weight: expected a tensor; got Linear; pass its .weight, and its .bias as bias"),
    ({"weight": LoraHead()}, "weight: expected a tensor; got LoraHead; it carries LoRA adapters, whose low-rank term no single matrix holds: merge them (merge_and_unload), or leave the head out of target_modules"),
    ({"bias": torch.zeros(4)}, "bias: expected shape (7,), one value a row of weight; got (4,)"),
    ({"bias": torch.zeros(1, 7)}, "bias: expected shape (7,), one value a row of weight; got (1, 7)"),
    ({"bias": torch.zeros(7, dtype=torch.int32)}, f"bias: {DTYPE}torch.int32"),
    ({"bias": torch.zeros(7, device="meta")}, "bias: expected device cpu (that of weight); got meta; move it with .to()"),
    ({"targets": torch.zeros(2, 3)}, "targets: expected int32 or int64 token ids; got torch.float32; cast with .long()"),
    ({"targets": torch.full((2, 3), 7)}, "targets: expected ids in [0, 7) at unmasked places; got 7 at index [0, 0]; mask ignored tokens out with `mask`"),
    ({"workspace_mib": 0}, "workspace_mib: expected a finite number > 0; got 0"),
    ({"workspace_mib": -3.0}, "workspace_mib: expected a finite number > 0; got -3.0"),
    ({"workspace_mib": 0.001}, "workspace_mib: expected at least 0.0098 for 64 rows of hidden size 4 and 16 columns of the vocabulary; got 0.001; raise it, or pass None"),
    ({"softcap": 0.0}, "softcap: expected a finite number > 0; got 0.0"),
    ({"logit_scale": -1.0}, "logit_scale: expected a finite number > 0; got -1.0"),
]  # fmt: skip


@pytest.mark.parametrize("call", [loss, logprobs])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[e[1][:60] for e in ERRORS])
def test_error_text(call, changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call(**changes)


def test_inplace_is_refused():
    message = "inplace: expected False: there are no logits here to overwrite; got True; drop the option"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loss(inplace=True)


def test_other_arguments_are_checked_against_targets():
    for changes, start in (
        ({"mask": torch.ones(3)}, r"mask: expected shape \(2, 3\) \(one value a token, like targets\)"),
        ({"mask": torch.full((2, 3), 2.0)}, r"mask: expected weights in \[0, 1\]"),
        ({"temperature": torch.ones(2)}, "temperature: "),
        ({"temperature": 0.0}, "temperature: "),
        ({"backend": "gpu"}, "backend: expected one of auto, cpu, triton, reference; got 'gpu'"),
    ):
        with pytest.raises((TypeError, ValueError), match=start):
            loss(**changes)
        with pytest.raises((TypeError, ValueError), match=start):
            logprobs(**changes)
    with pytest.raises(ValueError, match="metrics: "):
        loss(metrics="some")


def test_triton_refuses_fp64():
    with pytest.raises(ValueError, match="'triton' computes in float32; got torch.float64"):
        loss("triton", weight=torch.zeros(7, 4, dtype=torch.float64))


def test_masked_targets_and_int32_ids():
    targets = torch.tensor([[0, -100, 6], [3, 900, 1]], dtype=torch.int32)
    mask = torch.tensor([[1, 0, 1], [1, 0, 1]])
    got = logprobs(targets=targets, mask=mask).logp
    assert torch.equal(got, logprobs(targets=torch.zeros(2, 3, dtype=torch.int64), mask=mask).logp)
