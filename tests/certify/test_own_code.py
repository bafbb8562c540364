"""Functions read out of trainers' packages: what the transcriptions were written from, and still equal."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fusedpg.certify import own_code
from fusedpg.certify.adapters import areal, cosmos_rl
from fusedpg.certify.adapters.batches import KINDS, step_batch

TRAINERS = {"areal": areal, "cosmos_rl": cosmos_rl}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_transcription_is_the_trainer_s_own(name):
    if getattr(own_code, name)() is None:
        pytest.skip(f"{name} is not installed in the version that the preset follows (certify-no-deps.txt)")
    trainer = TRAINERS[name]
    for case in trainer.CASES:
        trained = False
        for kind in KINDS:
            b = step_batch(kind, case.token_advantages)
            own, transcribed = trainer.own(case, b), trainer.want(case, b)
            # AReaL rounds the weights of a rejection to fp32
            torch.testing.assert_close(own.loss, transcribed.loss, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(own.grad, transcribed.grad, rtol=1e-6, atol=1e-7)
            trained |= bool(own.grad.any())
        assert trained, case  # a rejection may drop one of the batches


def package(tmp_path, monkeypatch, text):
    """An installed package `of_the_test` 1.0 of one file, which cannot be imported."""
    info = tmp_path / "of_the_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-the-test\nVersion: 1.0\n")
    (tmp_path / "of_the_test").mkdir()
    (tmp_path / "of_the_test" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "of_the_test" / "loss.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def load(version, *names):
    return own_code.load("of_the_test", "of-the-test", version, {"loss.py": names}, scale=2)


def test_definitions_without_an_import(tmp_path, monkeypatch):
    text = (
        "import no_such_module\ndef twice(x: no_such_module.T): return scale * x\ndef loss(x): return twice(x).sum()\n"
    )
    package(tmp_path, monkeypatch, text)
    assert load("1.0", "twice", "loss").loss(torch.ones(3)) == 6
    assert load("1.1", "twice", "loss") is None
    assert own_code.load("no_such_package", "no-such-package", "1.0", {}) is None
    with pytest.raises(LookupError, match=r"^of_the_test 1.0: expected half in loss.py; got none"):
        load("1.0", "half")


def test_a_stand_in_is_not_an_installation(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "def loss(x): return x\n")
    assert load("1.0", "loss") is not None
    monkeypatch.setitem(sys.modules, "of_the_test", SimpleNamespace(__spec__=None))
    assert load("1.0", "loss") is None
