"""Whole TRL runs, stock and fused: the same losses, gradient norms and metrics step by step."""

import pytest
import torch

pytest.importorskip("trl")

from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
from trl_runs import assert_same_runs, both

from fusedpg import linear_walk
from fusedpg.certify.against_trl_runs import run_options
from fusedpg.certify.tiny_trl import grpo, make_model
from fusedpg.integrations.trl import FusedGRPOTrainer, attach_fused_head

pytestmark = pytest.mark.filterwarnings("ignore")

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
#: several updates of a generated batch, each of two micro-batches, with a reference
SEVERAL = {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 4}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(loss, tmp_path):
    fused = both(tmp_path, **run_options(loss))
    assert fused.why_two_passes is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_sampling_level": "sequence"},
        {"gradient_checkpointing": True},
        {"temperature": 0.7, "beta": 0.1, "use_bias_correction_kl": False},
        {"mask_truncated_completions": True, "max_completion_length": 3},
        {"scale_rewards": False, "gradient_accumulation_steps": 1},
        {"eval_strategy": "steps", "eval_steps": 1, "loss_type": "grpo", "beta": 1.0},
        {"cast_lm_head_to_fp32": True},
    ],
    ids=lambda o: ",".join(o) or "defaults",
)
def test_options_in_one_pass(options, tmp_path):
    assert both(tmp_path, **options).why_two_passes is None


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 5.0},
        {"off_policy_mask_threshold": 0.01, **SEVERAL},
        {"top_entropy_quantile": 0.5},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_in_two_passes(options, tmp_path):
    """Honoured through TRL's own loss over fused log-probs; the trainer says which option it is."""
    fused = both(tmp_path, **options)
    assert fused.why_two_passes.startswith(next(iter(options)) + ":")


def altered(trainer_class, alter):
    """The trainer with generated batches changed by `alter(batch)`."""

    class Altered(trainer_class):
        _name = "GRPO"

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            alter(batch)
            return batch

    return Altered


def mask_tools(batch):
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 1::3] = 0


def mask_first_rows(batch):
    """A whole micro-batch and a row of the next without a token."""
    batch["completion_mask"][:5] = 0


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "luspo"])
@pytest.mark.parametrize("alter", [mask_tools, mask_first_rows])
def test_masks(alter, loss, tmp_path):
    options = {**run_options(loss), "shuffle_dataset": False}
    runs = [grpo(tmp_path, altered(trainer, alter), **options) for trainer in (GRPOTrainer, FusedGRPOTrainer)]
    assert_same_runs(*runs)


@pytest.mark.parametrize("tie", [False, True])
def test_tied_and_untied_heads_learn_alike(tie, tmp_path):
    """Equal parameters after the run, the head's among them."""
    source = make_model(tmp_path, tie=tie)
    runs = [grpo(tmp_path, trainer, model=source, **SEVERAL) for trainer in (GRPOTrainer, FusedGRPOTrainer)]
    assert_same_runs(*runs)
    theirs, ours = (dict(run.model.named_parameters()) for run in runs)
    start = dict(Qwen3ForCausalLM.from_pretrained(source).named_parameters())
    head = "model.embed_tokens.weight" if tie else "lm_head.weight"
    assert (ours[head] != start[head]).any()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-5)


def test_lora_on_the_body(tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}

    def with_lora(trainer):
        return lambda **kwargs: trainer(**kwargs, **lora)

    runs = [grpo(tmp_path, with_lora(trainer), beta=0.04) for trainer in (GRPOTrainer, FusedGRPOTrainer)]
    assert_same_runs(*runs)
    assert runs[1].why_two_passes is None


def test_lora_on_the_head_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(Qwen3ForCausalLM.from_pretrained(make_model(tmp_path)), config)
    with pytest.raises(ValueError, match=r"^model: expected an output head without adapter.*target_modules"):
        attach_fused_head(model)


def test_prompt_learning_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    model = Qwen3ForCausalLM.from_pretrained(make_model(tmp_path))
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"^model: expected no prompt-learning PEFT"):
        attach_fused_head(wrapped)


def test_unknown_output_is_refused(tmp_path):
    model = Qwen3ForCausalLM.from_pretrained(make_model(tmp_path))
    with pytest.raises(ValueError, match=r"^outputs: expected fields among log_probs, .*got \['logits'\]"):
        attach_fused_head(model, outputs=("logits",))
    with pytest.raises(ValueError, match=r"^model: expected output embeddings"):
        attach_fused_head(torch.nn.Linear(2, 2))


def test_the_loss_costs_three_products_a_micro_batch(tmp_path, monkeypatch):
    """Training without a reference: a product forward and two of the gradient, and no logits of TRL's own."""
    calls = []
    real = linear_walk.product
    monkeypatch.setattr(linear_walk, "product", lambda *a, **k: (calls.append(a), real(*a, **k))[1])
    steps, micro_batches = 3, 2
    fused = grpo(tmp_path, FusedGRPOTrainer, max_steps=steps)
    assert fused.why_two_passes is None
    assert len(calls) == 3 * steps * micro_batches
