"""TRL's other trainers through its own protocol of a fused head, and the protocol itself."""

import pytest
import torch

pytest.importorskip("trl")

from transformers import Qwen3ForCausalLM
from trl_runs import assert_same_runs, both

from fusedpg import linear_walk
from fusedpg.certify import tiny_trl
from fusedpg.certify.tiny_trl import history, make_model
from fusedpg.integrations.trl import attach_fused_head, fuse_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(kind):
    words = tiny_trl.PROMPTS
    if kind == "sft":
        return [{"prompt": a, "completion": " " + b} for a in words for b in words]
    if kind == "dpo":
        return [{"prompt": a, "chosen": " " + b, "rejected": " " + a} for a in words for b in words if a != b]
    return [{"prompt": a, "completion": " " + b, "label": a < b} for a in words for b in words]


def other(kind, path, after=None, model=None):
    """A run of RLOO, SFT, DPO or KTO."""
    import trl
    from datasets import Dataset

    drop = {"num_generations", "max_completion_length"} if kind != "rloo" else set()
    common = {k: v for k, v in tiny_trl.COMMON.items() if k not in drop}
    config, trainer_class = getattr(trl, kind.upper() + "Config"), getattr(trl, kind.upper() + "Trainer")
    args = config(output_dir=str(path / "out"), max_steps=3, **common)
    more = {"reward_funcs": tiny_trl.even_ids} if kind == "rloo" else {}
    data = tiny_trl.prompts() if kind == "rloo" else Dataset.from_list(rows(kind))
    source = make_model(path) if model is None else model
    with tiny_trl.one_thread():
        torch.manual_seed(0)
        trainer = trainer_class(
            model=source, args=args, train_dataset=data, processing_class=tiny_trl.tokenizer(), **more
        )
        if after is not None:
            after(trainer)
        trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["rloo", "sft", "dpo", "kto"])
def test_other_trainers(kind, tmp_path, monkeypatch):
    stock = other(kind, tmp_path)
    calls = []
    real = linear_walk.product
    monkeypatch.setattr(linear_walk, "product", lambda *a, **k: (calls.append(a), real(*a, **k))[1])
    fused = other(kind, tmp_path, fuse_trainer)
    assert calls
    assert_same_runs(stock, fused)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preference_trainers_of_a_capped_model(kind, tmp_path):
    """They log the mean of all capped logits, which no single product gives."""
    runs = [other(kind, tmp_path, after, gemma2(tmp_path)) for after in (None, fuse_trainer)]
    assert any("logits/chosen" in step for step in history(runs[0]))
    assert_same_runs(*runs)


def gemma2(path):
    """A saved Gemma 2, whose logits go through a soft cap."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    where = path / "gemma2"
    if not where.exists():
        torch.manual_seed(0)
        tok = tiny_trl.tokenizer()
        config = Gemma2Config(
            vocab_size=tiny_trl.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0,
            initializer_range=0.2, pad_token_id=tok.pad_token_id, bos_token_id=tok.bos_token_id,
            eos_token_id=tok.eos_token_id,
        )  # fmt: skip
        Gemma2ForCausalLM(config).save_pretrained(where)
        tok.save_pretrained(where)
    return str(where)


def moe(path):
    """A saved mixture of experts with an auxiliary loss."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    where = path / "moe"
    if not where.exists():
        torch.manual_seed(0)
        tok = tiny_trl.tokenizer()
        config = Qwen3MoeConfig(
            vocab_size=tiny_trl.VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
            num_experts_per_tok=2, router_aux_loss_coef=0.5, max_position_embeddings=128,
            pad_token_id=tok.pad_token_id, bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id,
        )  # fmt: skip
        Qwen3MoeForCausalLM(config).save_pretrained(where)
        tok.save_pretrained(where)
    return str(where)


def test_the_auxiliary_loss_of_experts(tmp_path):
    """TRL's own head computes it, in SFT as in GRPO, which says so."""
    runs = [other("sft", tmp_path, after, moe(tmp_path)) for after in (None, fuse_trainer)]
    assert all(step["aux_loss"] > 0 for step in history(runs[0]))
    assert_same_runs(*runs)
    fused = both(tmp_path, model=moe(tmp_path), max_steps=2)
    assert fused.why_two_passes.startswith("router_aux_loss_coef:")


def test_experts_without_trl_s_head_are_refused_before_any_work(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(moe(tmp_path))
    attach_fused_head(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^output_router_logits: TRL's own head computes the auxiliary loss"):
        model(input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True)


def capped(path, cap):
    """A model whose logits, between the layers' random ones, go through a soft cap that bends them."""
    model = Qwen3ForCausalLM.from_pretrained(make_model(path))
    model.config.final_logit_softcapping = cap
    if cap is not None:
        with torch.no_grad():
            model.lm_head.weight.mul_(30)
    return model


@pytest.mark.parametrize("cap", [None, 2.0])
def test_every_field_of_the_protocol(cap, tmp_path):
    """Against TRL's own head on one batch, in value and gradient."""
    from trl.trainer.utils import add_fused_lm_head

    fields = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")
    ids = torch.randint(0, tiny_trl.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = labels[1] = -100
    results = []
    for attach in (add_fused_lm_head, attach_fused_head):
        model = capped(tmp_path, cap)
        attach(model, temperature=0.7, outputs=fields)
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.log_probs.sum() + 0.3 * out.entropy.sum()).backward()
        results.append((out, model.lm_head.weight.grad, model.model.embed_tokens.weight.grad))
    theirs, ours = results
    for name in (*fields, "loss", "label_mask"):
        torch.testing.assert_close(ours[0][name], theirs[0][name], rtol=1e-5, atol=1e-5)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_other_calls_go_through_as_before(tmp_path):
    ids = torch.randint(0, tiny_trl.VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    plain = Qwen3ForCausalLM.from_pretrained(make_model(tmp_path))
    before = plain(input_ids=ids, labels=labels)
    attach_fused_head(plain)
    after = plain(input_ids=ids, labels=labels)
    assert torch.equal(before.logits, after.logits)
    assert before.loss == after.loss
