"""Cases of the trainers' seams: adapters on the head, wrappers, options that a fused path would drop, idle ranks."""

import types

import pytest
import torch
from cases import random, random_ids

import fusedpg
from processes import on_each


class Model(torch.nn.Module):
    """A table, a head with a bias, and the fused loss inside the forward, as DDP wants it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(random(11, 6))
        self.head = torch.nn.Linear(6, 11)
        with torch.no_grad():
            self.head.weight.copy_(random(11, 6, seed=1))
            self.head.bias.copy_(random(11, seed=2))

    def forward(self, ids, targets, mask):
        return fusedpg.policy_loss_from_hidden(
            fusedpg.loss_spec("ppo_clip", anchor="self"),
            self.table[ids],
            self.head.weight,
            targets,
            bias=self.head.bias,
            advantages=1.0,
            mask=mask,
            normalizer=8.0,
        ).loss


def _step(rank, masked_rank, poison):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = Model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ids, targets = (random_ids(11, 2, 4, seed=2 * rank + i) for i in range(2))
    mask = torch.full((2, 4), rank != masked_rank)
    if poison and rank == masked_rank:
        ids = torch.full_like(ids, 10)
        with torch.no_grad():
            model.table[10] = torch.nan
    wrapped(ids, targets, mask).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), 0.1).step()
    return [t.tolist() for t in gradients], [p.detach()[:10].tolist() for p in model.parameters()]


@pytest.mark.parametrize("poison", [False, True])
def test_case_020_a_rank_with_nothing_to_train_on(poison):
    """lightseekorg/TorchSpec#32: sharded training hangs where one rank's parameters take no part in the exchange."""
    ranks = on_each(_step, 1, poison)
    alone = Model()
    ids, targets = (random_ids(11, 2, 4, seed=i) for i in range(2))
    alone(ids, targets, torch.ones(2, 4)).backward()
    for gradients, _ in ranks:
        for got, parameter in zip(gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got), parameter.grad / 2)


def test_case_122_replicas_stay_equal():
    """huggingface/trl#3260: replicas drift apart where the fused loss is called on an unwrapped submodule."""
    (first, parameters), (second, others) = on_each(_step, None, False)
    assert first == second
    assert parameters == others
    assert any(torch.tensor(g).any() for g in first)


def test_case_121_an_adapter_on_the_head():
    """huggingface/trl#4612: a fused loss reads the frozen base weight, and the adapter gets no gradient."""
    pytest.importorskip("trl")
    from fusedpg.integrations.trl import attach_fused_head

    head = torch.nn.Linear(4, 9)
    head.requires_grad_(False)
    head.lora_A = torch.nn.Linear(4, 2, bias=False)
    model = torch.nn.Module()
    model.get_output_embeddings = lambda: head
    with pytest.raises(
        ValueError, match=r"^model: expected an output head without adapter; got Linear.*target_modules"
    ):
        attach_fused_head(model)
    hidden, targets = random(3, 4), random_ids(9, 3)
    with pytest.raises(TypeError, match=r"^weight: expected a tensor; got Linear; it carries LoRA adapters"):
        fusedpg.linear_token_logprobs(hidden, head, targets)


@pytest.mark.parametrize(
    "option",
    ["router_aux_loss_coef", "entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold", "loss_type"],
)
def test_case_123_options_are_never_dropped(option):
    """huggingface/trl#7270: a fused kernel trains another objective; auxiliary loss and entropy bonus vanish."""
    pytest.importorskip("trl")
    from trl import GRPOConfig

    from fusedpg.integrations.trl import grpo_spec

    args = GRPOConfig(use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8)
    trainer = types.SimpleNamespace(
        args=args, loss_type="dapo", aux_loss_enabled=False, use_vllm=False, vllm_importance_sampling_correction=True
    )
    grpo_spec(trainer)
    on = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "off_policy_mask_threshold": 0.5}
    if option == "router_aux_loss_coef":
        trainer.aux_loss_enabled = True
    elif option == "loss_type":
        trainer.loss_type = "a loss of tomorrow"
    else:
        setattr(args, option, on[option])
    with pytest.raises(ValueError, match=r"^loss: presets.trl knows" if option == "loss_type" else f"^{option}:"):
        grpo_spec(trainer)
