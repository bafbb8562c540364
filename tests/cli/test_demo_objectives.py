"""`python -m fusedpg demo --objective ...`: every objective learns; what cannot be selected says why."""

import pickle
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import fusedpg
from fusedpg import registry
from fusedpg.cli import demo, objectives, train
from fusedpg.cli.app import app

pytest.importorskip("transformers")

ICEPOP = '''
import fusedpg
import torch


@fusedpg.register_loss("demo_icepop")
def demo_icepop(ctx: fusedpg.LossContext):
    """Mask tokens whose train/inference ratio exp(logp_curr - logp_rollout) leaves [alpha, beta]."""
    if ctx.logp_rollout is None:
        raise ValueError("demo_icepop needs rollout log-probs, but ctx.logp_rollout is None")
    alpha = float(ctx.params.get("alpha", 0.5))
    beta = float(ctx.params.get("beta", 5.0))
    ratio = torch.exp(ctx.logp_curr.detach() - ctx.logp_rollout)   # detached weight, no grad
    keep = ((ratio >= alpha) & (ratio <= beta)).to(ctx.logp_curr.dtype)
    pg = -ctx.advantages * ratio * ctx.logp_curr * keep            # grad flows via logp_curr
    am = ctx.action_mask
    mask_frac = ((1.0 - keep) * am).sum() / am.sum().clamp(min=1.0)
    return ctx.aggregate(pg, am), {"demo_icepop/mask_frac": mask_frac.item()}


@fusedpg.register_loss("my_other_name")
def renamed(ctx):
    return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {}


def plain(ctx):
    return ctx.aggregate(-ctx.advantages * ctx.logp_curr, ctx.action_mask), {}


number = 3
'''
TINY = replace(demo.FAST, steps=1, prompts=4, group=4, warmup_steps=10, eval_prompts=8, chunks=2, teacher_seconds=0.0)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The seed's IcePop in a module of the user's, forgotten afterwards."""
    (tmp_path / "my_demo_losses.py").write_text(ICEPOP)
    (tmp_path / "my_broken_losses.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "my_taken_losses.py").write_text(
        "import fusedpg\n\n\n@fusedpg.register_loss('gspo')\ndef gspo(ctx): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    yield "my_demo_losses"
    sys.modules.pop("my_demo_losses", None)


def run(*args):
    return CliRunner().invoke(app, ["demo", "--fast", *args])


@pytest.mark.parametrize("name", ["dr_grpo", "gspo", "dapo", "opd"])
def test_every_recipe_learns(name, tmp_path):
    result = run("--objective", name, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert f"objective: {name} (Reduction.TOKEN_SUM" in result.output
    assert "clip fraction = train/clip_frac" in result.output
    assert ("KL to teacher = train/teacher_kl" in result.output) == (name == "opd")
    assert ("further likelihood steps" in result.output) == (name == "opd")
    assert (tmp_path / "reward.png").exists()


def test_a_loss_of_the_users_own_module_learns(module, tmp_path):
    result = run("--objective", f"{module}:demo_icepop", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Reduction.SUM" in result.output
    assert "demo_icepop/mask_frac = train/demo_icepop/mask_frac" in result.output
    assert "clip fraction" not in result.output  # the body has none
    assert "cpu / reference" in result.output or "triton / reference" in result.output


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ppo", ["expected one of grpo, dr_grpo, gspo, dapo, opd, or my_module:loss; got 'ppo'"]),
        ("a_module_nobody_has:loss", ["could not import 'a_module_nobody_has'", "ModuleNotFoundError"]),
        ("my_broken_losses:loss", ["could not import 'my_broken_losses'", "a_package_that_is_not_there"]),
        ("my_taken_losses:gspo", ["could not import 'my_taken_losses'", "'gspo' is a built-in loss"]),
        ("my_demo_losses:demo_icpop", ["a function 'demo_icpop' of a LossContext", "demo_icepop, my_other_name"]),
        ("my_demo_losses:number", ["a function 'number' of a LossContext"]),
        (":loss", ["could not import ''"]),
    ],
)
def test_what_cannot_be_selected_is_exit_status_2(module, name, parts, tmp_path):
    result = run("--objective", name, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.output.startswith("--objective: "), result.output
    assert all(part in result.output for part in parts), result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("attribute", "found"),
    [
        ("demo_icepop", "demo_icepop"),
        ("renamed", "my_other_name"),
        ("my_other_name", "my_other_name"),
        ("plain", "my_demo_losses:plain"),
    ],
)
def test_a_loss_is_found_by_its_function_or_its_name(module, attribute, found):
    choice = objectives.choose(f"{module}:{attribute}")
    assert choice.config.algorithm == choice.config.job.name == found
    objective = pickle.loads(pickle.dumps(choice.objective()))  # workers get it so
    assert objective.identity["loss_fn"] == found
    assert objective.fn.keywords["cache"] is objective.old_logp_cache


@pytest.mark.parametrize("name", list(objectives.OPTIONS))
def test_recipes_keep_their_own_knobs(name):
    options = demo.Settings().options()
    config = objectives.choose(name, options).config
    assert config.algorithm == config.job.name == name
    assert (config.rl.n_mini, config.rl.epochs, config.rollout.max_tokens) == (2, 2, 7)
    assert (config.rl.kl_beta != 0) == (name == "grpo")
    assert config.rl.importance_sampling_level == ("sequence" if name == "gspo" else "token")


@pytest.mark.parametrize("name", [*objectives.OPTIONS, "custom"])
def test_one_update_over_chunks_is_the_update_of_the_whole_batch(name, module):
    name = f"{module}:demo_icepop" if name == "custom" else name
    trainer = train.Trainer(replace(TINY, objective=name))
    list(trainer.warm_up())
    if trainer.choice.distils:
        list(trainer.teach())
    rng = torch.Generator().manual_seed(0)
    chunks = [replace(c, sequence_advantages=torch.randn(4, generator=rng)) for c in trainer.collect().chunks]
    masked = chunks[0].mask.clone()
    masked[:2] = False  # chunks of unequal weight
    chunks[0] = replace(chunks[0], mask=masked)
    whole = train.Chunk(
        **{
            key: torch.cat([getattr(chunk, key) for chunk in chunks])
            for key, value in vars(chunks[0]).items()
            if isinstance(value, torch.Tensor)
        },
        batch_id="whole",
    )
    gradients = []
    for batches in (chunks, [whole]):
        trainer.objective.old_logp_cache.freeze(trainer.policy, batches)
        accumulator = fusedpg.StepAccumulator(trainer.objective, trainer.policy)
        optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=0.0)
        result = trainer._update(accumulator, optimizer, batches)
        gradients.append((result.loss, [p.grad.clone() for p in trainer.policy.parameters()]))
    assert max(g.abs().max() for g in gradients[0][1]) > 1e-2
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_the_first_update_is_on_policy_and_later_ones_are_not():
    trainer = train.Trainer(TINY)
    list(trainer.warm_up())
    optimizer = torch.optim.AdamW(trainer.policy.parameters(), lr=1e-2)
    chunks = trainer.collect().chunks
    trainer.objective.old_logp_cache.freeze(trainer.policy, chunks)
    accumulator = fusedpg.StepAccumulator(trainer.objective, trainer.policy)
    ratios = [trainer._update(accumulator, optimizer, chunks).metrics["train/ratio_max"].item() for _ in range(2)]
    assert ratios[0] == 1.0
    assert ratios[1] > 1.01


def test_a_group_is_split_over_chunks_but_annotated_before(monkeypatch):
    rewards = torch.arange(16.0) % 5
    monkeypatch.setattr(train.SortTask, "reward", lambda self, completions, answers: rewards[: len(completions)])
    trainer = train.Trainer(TINY)
    list(trainer.warm_up())
    chunks = trainer.collect().chunks
    assert [len(chunk.targets) for chunk in chunks] == [4, 4, 4, 4]
    prompts = [{tuple(row) for row in chunk.input_ids[:, :5].tolist()} for chunk in chunks]
    assert any(a & b for i, a in enumerate(prompts) for b in prompts[:i])
    got = torch.cat([chunk.sequence_advantages for chunk in chunks]).sort().values
    torch.testing.assert_close(got, fusedpg.annotators.group_relative(rewards, 4).sort().values)


def test_merged_metrics():
    assert train.merged("train/clip_frac", [0.1, 0.3]) == pytest.approx(0.2)
    assert train.merged("train/ratio_max", [1.5, 1.2]) == 1.5
    assert train.merged("train/ratio_min", [0.5, 0.9]) == 0.5
