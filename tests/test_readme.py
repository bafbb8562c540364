"""The README's Python snippets run as written, in order, in one namespace."""

import importlib.util
import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_snippets_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 2
    namespace: dict = {}
    for block in blocks:
        if "integrations.trl" in block and importlib.util.find_spec("trl") is None:
            continue
        exec(compile(block, str(README), "exec"), namespace)
    assert "cpu" in capsys.readouterr().out
    assert namespace["logits"].grad is not None
    assert namespace["head"].grad.any()
    logp, spec, fusedpg = namespace["logp"], namespace["spec"], namespace["fusedpg"]
    whole = logp.detach().clone().requires_grad_()
    fusedpg.policy_loss(spec, whole, **namespace["constants"]).loss.backward()
    torch.testing.assert_close(logp.grad, whole.grad)
