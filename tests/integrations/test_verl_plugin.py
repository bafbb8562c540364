"""What `import verl` does in a fresh interpreter, with this package's entry point as its metadata declares it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_verl

pytestmark = tiny_verl.needs_verl

ROOT = Path(__file__).parents[2]
REGISTRY = "import verl\nfrom verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as found\n"


def entry_points():
    """The lines that pyproject.toml declares, as an installer writes them."""
    lines = iter((ROOT / "pyproject.toml").read_text().splitlines())
    assert any(line == '[project.entry-points."verl.plugins"]' for line in lines)
    declared = []
    for line in lines:
        if not line.strip():
            break
        declared.append(line.replace('"', ""))
    return "\n".join(["[verl.plugins]", *declared, ""])


@pytest.fixture
def site(tmp_path):
    """A folder ahead of the installed packages: the entry point, and as much of Ray as verl imports when there is none."""
    info = tmp_path / "fusedpg-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fusedpg\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points())
    if importlib.util.find_spec("ray") is None:
        (tmp_path / "ray.py").write_text("class ObjectRef: ...\n")
    return tmp_path


def fresh(site, code, **variables):
    path = os.pathsep.join([str(site), *sys.path])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "FUSEDPG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**environment, "PYTHONPATH": path, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_import_verl_alone_makes_the_losses_selectable(site):
    code = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as found, get_policy_loss_fn\n"
        "ours = sorted(name for name in found if name.startswith('fusedpg_'))\n"
        "print(len(ours), get_policy_loss_fn('fusedpg_vanilla'), type(found['vanilla']).__name__)\n"
    )
    out, err = fresh(site, code)
    assert out == "12 PolicyLoss(loss='vanilla', backend='auto') function\n"
    assert "fusedpg:" not in err


@pytest.mark.parametrize(
    ("value", "replaced"), [("1", "True True"), ("vanilla, gspo", "True False"), ("0", "False False")]
)
def test_replacement_on_request(site, value, replaced):
    code = REGISTRY + "print(*(type(found[n]).__name__ == 'PolicyLoss' for n in ('vanilla', 'cispo')))\n"
    out, _ = fresh(site, code, FUSEDPG_VERL_REPLACE=value)
    assert out == replaced + "\n"


def test_external_modules_do_the_same(site):
    """The way before 0.9.0, and together with the entry point."""
    code = REGISTRY + "print('fusedpg_cispo' in found)\n"
    for policy in ("none", "auto"):
        given = {"VERL_USE_EXTERNAL_MODULES": "fusedpg.integrations.verl", "VERL_USE_EXTERNAL_PLUGINS": policy}
        assert fresh(site, code, **given)[0] == "True\n"


def test_importing_the_module_first(site):
    """verl's own import then meets the module half imported."""
    code = (
        "import fusedpg.integrations.verl as fused\n"
        + REGISTRY
        + "print(found['fusedpg_dro'] == fused.PolicyLoss('dro'))\n"
    )
    out, err = fresh(site, code)
    assert out == "True\n"
    assert "fusedpg:" not in err


def test_a_failing_import_says_why(site):
    """verl itself goes on without the losses and says nothing."""
    code = (
        "import sys\nsys.modules['fusedpg.integrations._verl_losses'] = None\n"
        + REGISTRY
        + "print('fusedpg_dro' in found)\n"
    )
    out, err = fresh(site, code)
    assert out == "False\n"
    assert (
        "fusedpg: its verl losses are NOT registered: ModuleNotFoundError: import of fusedpg.integrations._verl_" in err
    )
    assert "fix the cause (pip install" in err


def test_a_wrong_variable_says_which(site):
    out, err = fresh(site, REGISTRY + "print('fusedpg_dro' in found)\n", FUSEDPG_VERL_REPLACE="grpo")
    assert out == "False\n"
    assert "ValueError: FUSEDPG_VERL_REPLACE: replace: expected names among vanilla, " in err


def test_nothing_of_the_engine_is_imported_until_it_is_named(site):
    code = "import sys, verl\nprint('fusedpg.integrations._verl_engine' in sys.modules)\n"
    assert fresh(site, code)[0] == "False\n"


def test_the_engine_is_found_by_its_vendor(site):
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import verl\n"
        "from verl.workers.engine import EngineRegistry as registry\n"
        "for backend in ('fsdp', 'fsdp2'):\n"
        "    print(registry.get_engine_cls('language_model', backend).__name__)\n"
        "print(registry.get_engine_cls('value_model', 'fsdp').__name__)\n"
    )
    out, err = fresh(site, code, VERL_ENGINE_VENDOR="fusedpg", VERL_ENGINE_DEVICE="cuda")
    assert out.split() == ["FusedFSDPEngine", "FusedFSDPEngine", "FSDPEngineWithValueHead"]
    assert "fusedpg:" not in err
