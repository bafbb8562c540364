"""verl's FSDP engine with and without logits: the same model, micro-batch, log-probs, entropy and gradients."""

from types import SimpleNamespace

import pytest
import tiny_verl
import torch

pytestmark = [pytest.mark.filterwarnings("ignore"), tiny_verl.needs_verl]

LENGTHS = [7, 3, 9, 5]


@pytest.fixture(scope="module")
def verl():
    return tiny_verl.load()


def tiny_model(**config):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=301, **sizes, **heads, **config)).eval()


def engine_of(cls, model, bucket=0):
    """verl's engine around a model, as `initialize` leaves it on one rank without sharding."""
    engine = object.__new__(cls)
    engine.module = model
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = False, 1
    engine.pad_to_length, engine.pad_to_length_bucket = bool(bucket), bucket or 1
    engine.compute_entropy_from_logits = tiny_verl.load().fsdp.verl_F.entropy_from_logits
    return engine


def tokens(temperature=1.0, packed=True, entropy=True, seed=1, **more):
    from tensordict import TensorDict

    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 301, (n,), generator=g) for n in LENGTHS]
    places = [torch.arange(n) for n in LENGTHS]
    data = {"input_ids": tiny_verl.jagged(ids), "position_ids": tiny_verl.jagged(places)}
    if isinstance(temperature, torch.Tensor):
        data["temperature"] = temperature
    td = TensorDict(data, batch_size=[len(LENGTHS)])
    plain = {} if "temperature" in data else {"temperature": temperature}
    flags = {"use_remove_padding": packed, "calculate_entropy": entropy}
    tiny_verl.load().tu.assign_non_tensor(td, **flags, **plain, **more)
    return td


def step(engine, td):
    """What `forward_step` does between the micro-batch and the loss, then a backward of both outputs."""
    engine.module.zero_grad(set_to_none=True)
    inputs, args = engine.prepare_model_inputs(td)
    output = engine.prepare_model_outputs(engine.module(**inputs, use_cache=False), args, td, None)
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    total = (output["log_probs"].values() * weights).sum()
    if "entropy" in output:
        total = total + (output["entropy"].values() * weights.flip(0)).sum()
    total.backward()
    grads = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    return output, grads


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("temperature", "entropy", "bucket", "config"),
    [
        (1.0, True, 0, {}),
        (0.7, False, 0, {}),
        (torch.tensor([0.5, 1.0, 1.3, 2.0]), True, 0, {"tie_word_embeddings": True}),
        (0.9, True, 16, {}),
    ],
    ids=["plain", "temperature", "by-sample,tied", "bucket"],
)
def test_same_scores_and_gradients(verl, temperature, entropy, bucket, config, packed):
    td = tokens(temperature, packed, entropy)
    model = tiny_model(**config)
    theirs, grads = step(engine_of(verl.fsdp.FSDPEngineWithLMHead, model, bucket), td)
    verl.engine.score_in_forward(model)
    ours, fused = step(engine_of(verl.engine.FusedFSDPEngine, model, bucket), td)
    assert set(ours) == set(theirs) == {"log_probs", *(["entropy"] if entropy else [])}
    for name, values in theirs.items():
        assert torch.equal(ours[name].offsets(), values.offsets())
        torch.testing.assert_close(ours[name].values(), values.values(), atol=2e-6, rtol=2e-6)
    assert set(fused) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(fused[name], grad, atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_no_logits_are_formed(verl, monkeypatch):
    model = tiny_model()
    verl.engine.score_in_forward(model)
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: pytest.fail("the head was called"))
    output, grads = step(engine_of(verl.engine.FusedFSDPEngine, model), tokens())
    assert output["log_probs"].is_nested
    assert "lm_head.weight" in grads


def test_the_model_scores_its_own_way_without_labels(verl):
    """Generation and whatever else calls the model still gets logits."""
    model = tiny_model()
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    verl.engine.score_in_forward(model)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk"])
def test_what_needs_logits_is_refused(verl, name):
    engine = engine_of(verl.engine.FusedFSDPEngine, tiny_model())
    with pytest.raises(ValueError, match=f"{name}: it reads whole rows of logits"):
        engine.prepare_model_inputs(tokens(**{name: True}))


def test_refused_before_the_model_is_built(verl):
    engine = engine_of(verl.engine.FusedFSDPEngine, None)
    engine.model_config = SimpleNamespace(use_fused_kernels=True)
    with pytest.raises(ValueError, match="use_fused_kernels: it replaces the model's forward"):
        engine._build_module()


def test_an_adapter_on_the_head_is_refused_as_it_is_built(verl, monkeypatch):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["lm_head"], r=2)
    monkeypatch.setattr(verl.fsdp.FSDPEngine, "_build_lora_module", lambda self, module: get_peft_model(module, config))
    engine = engine_of(verl.engine.FusedFSDPEngine, None)
    with pytest.raises(ValueError, match="expected an output head without adapter"):
        engine._build_lora_module(tiny_model())


def test_adapters(verl):
    """Failure case 121: those of the body train; one on the head is refused at the latest when it would be read."""
    from peft import LoraConfig, get_peft_model

    for target, where in ((["q_proj"], None), (["lm_head"], "adapter")):
        model = tiny_model()
        verl.engine.score_in_forward(model)
        wrapped = get_peft_model(model, LoraConfig(target_modules=target, r=2))
        engine = engine_of(verl.engine.FusedFSDPEngine, wrapped)
        if where is None:
            _, grads = step(engine, tokens())
            assert grads
            assert all("lora_" in name for name in grads)
        else:
            with pytest.raises(ValueError, match="expected an output head without adapter"):
                step(engine, tokens())
