"""Which module may import which, and what importing the package loads."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "fusedpg"
KERNELS = ROOT / "kernels"

#: module -> modules of the package that it may import; the command line may import anything, and nothing imports it
ARROWS = {
    "axes": set(),
    "spec_checks": {"axes"},
    "spec": {"axes", "spec_checks"},
    "knobs": {"spec"},
    "losses": {"knobs", "spec"},
    "weights": {"spec"},
    "metrics": {"spec"},
    "validate": {"spec"},
    "reference_terms": {"spec"},
    "reference": {"reference_terms", "spec"},
    "selection": {"spec"},
    "dispatch": {"reference", "cpu", "gpu"},
    "cpu": {"_core", "spec"},
    "gpu": {"kernels", "spec"},
    "kernels": {"kernels", "spec"},
    "ops": {"dispatch", "metrics", "selection", "spec"},
    "batch": {"ops", "spec", "validate", "weights"},
    "inplace": {"dispatch", "ops"},
    "outputs": {"batch", "metrics", "spec"},
    "rows": {"batch", "metrics", "ops", "reference", "spec", "validate"},
    "functional": {"batch", "dispatch", "inplace", "ops", "outputs", "rows", "selection", "spec", "validate"},
    "linear_plan": set(),
    "linear_merge": set(),
    "workspace": {"dispatch", "linear_plan"},
    "linear_walk": {"dispatch", "linear_plan", "workspace"},
    "linear_chunks": {"linear_plan"},
    "linear_stages": {"dispatch", "linear_merge", "linear_plan", "linear_walk"},
    "linear_ops": {
        "dispatch",
        "linear_chunks",
        "linear_plan",
        "linear_stages",
        "linear_walk",
        "metrics",
        "ops",
        "spec",
        "workspace",
    },
    "linear_checks": {"linear_plan", "validate"},
    "linear": {
        *("batch", "dispatch", "functional", "linear_checks", "linear_ops", "linear_walk", "outputs", "rows", "spec"),
        "validate",
    },
    "hidden_states": {"functional", "linear", "outputs", "spec"},
    "distill_reference": {"axes"},
    "distill_ops": {"axes", "dispatch", "ops"},
    "distill_checks": {"axes", "hidden_states", "linear_checks", "spec_checks", "validate", "weights"},
    "linear_distill": {
        *("dispatch", "distill_ops", "linear_ops", "linear_plan", "linear_stages", "linear_walk", "ops"),
        "workspace",
    },
    "distill": {
        *("batch", "dispatch", "distill_checks", "distill_ops", "distill_reference", "hidden_states", "linear"),
        *("linear_checks", "linear_distill", "linear_walk", "metrics", "ops", "rows", "validate", "weights"),
    },
    "__init__": {
        *(
            "accumulate",
            "annotators",
            "builders",
            "config",
            "context",
            "distill",
            "dpo",
            "functional",
            "hidden_states",
            "linear",
            "linear_plan",
            "loss_call",
            "losses",
        ),
        *("metric_adapter", "metrics", "objective", "old_logp", "outputs", "policy_objective", "preflight", "presets"),
        *("recipes", "registry", "resolve", "spec", "workspace"),
    },
    "metric_adapter": {"metrics"},
    "objective": {"hidden_states", "metric_adapter"},
    "old_logp": {"hidden_states", "objective"},
    "accumulate": {"metric_adapter", "objective"},
    "annotators": set(),
    "config": set(),
    "preflight": {"config", "presets"},
    "recipes": {"config"},
    "policy_objective": {
        "functional",
        "hidden_states",
        "metric_adapter",
        "metrics",
        "objective",
        "old_logp",
        "outputs",
        "spec",
        "weights",
    },
    "builders": {
        "config",
        "distill",
        "metric_adapter",
        "metrics",
        "objective",
        "old_logp",
        "policy_objective",
        "preflight",
    },
    "dpo": {"builders", "config", "hidden_states", "metric_adapter", "objective", "old_logp", "preflight"},
    "presets": {"knobs", "losses", "metrics", "presets", "spec"},
    "context": {"batch", "validate", "weights"},
    "loss_call": {"hidden_states"},
    "builtin_losses": {"context"},
    "custom": {"context", "hidden_states", "loss_call", "validate"},
    "native_losses": {"context", "functional", "hidden_states", "loss_call", "losses", "outputs", "presets", "spec"},
    "registry": {"context", "native_losses"},
    "resolve": {"builtin_losses", "context", "custom", "hidden_states", "loss_call", "native_losses", "registry"},
    "integrations": {
        *("dispatch", "functional", "hidden_states", "integrations", "linear_ops", "linear_plan", "linear_walk"),
        *("builders", "config", "loss_call", "losses", "metric_adapter", "native_losses", "objective", "outputs"),
        *("presets", "resolve", "spec", "workspace"),
    },
    "certify": {
        *("certify", "functional", "integrations", "losses", "metric_adapter", "metrics", "outputs", "presets", "spec"),
        "weights",
    },
    "evidence": {
        *("axes", "certify", "dispatch", "distill", "evidence", "functional", "gpu", "kernels", "losses"),
    },
    "selftest": {"functional", "spec"},
}

#: packages outside the standard library
OUTSIDE = {
    "spec": set(),
    "losses": set(),
    "gpu": {"torch", "triton"},
    "kernels": {"torch", "triton"},
    "axes": set(),
    "spec_checks": set(),
    "knobs": set(),
    "presets": set(),
    "integrations": {"torch", "trl", "verl"},
    "evidence": {"liger_kernel", "numpy", "torch", "triton"},
    "certify": {
        *("datasets", "liger_kernel", "numpy", "omegaconf", "polgrad", "tensordict", "tokenizers", "torch"),
        *("transformers", "trl", "verl"),
    },
}


def module_name(path: Path) -> str:
    if KERNELS in path.parents:
        return "kernels"
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def package_of(path: Path) -> str:
    """The dotted package that holds a file."""
    if KERNELS in path.parents:
        return "fusedpg.kernels"
    return ".".join(("fusedpg", *path.relative_to(PACKAGE).parts[:-1]))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, as an absolute dotted name."""
    package = package_of(path)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(p for p in (base, node.module) if p)
            if base in ("fusedpg", package):
                names |= {f"{base}.{alias.name}" for alias in node.names}
            else:
                names.add(base)
    return names


FILES = [
    path
    for path in sorted([*PACKAGE.rglob("*.py"), *KERNELS.glob("*.py")])
    if "cli" not in path.relative_to(ROOT).parts and path.name != "__main__.py"
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows(path):
    """An import along a forbidden arrow fails here; a new module states its arrows above."""
    module = module_name(path)
    assert module in ARROWS, f"state in {Path(__file__).name} what {module} may import"
    names = imported(path)
    inside = {name.split(".")[1] for name in names if name.startswith("fusedpg.")}
    assert inside <= ARROWS[module], f"{module} may not import {sorted(inside - ARROWS[module])}"
    outside = {name.split(".")[0] for name in names} - {"fusedpg"} - set(sys.stdlib_module_names)
    assert outside <= OUTSIDE.get(module, {"torch"}), f"{module} may not import {sorted(outside)}"


def test_arrows_have_no_cycle():
    seen: list[str] = []

    def visit(module: str) -> None:
        assert module not in seen, f"cycle: {' -> '.join([*seen, module])}"
        seen.append(module)
        for other in ARROWS.get(module, set()) - {module}:
            visit(other)
        seen.pop()

    for module in ARROWS:
        visit(module)


def test_dispatch_reaches_the_backends_lazily():
    """At module level it imports neither."""
    tree = ast.parse((PACKAGE / "dispatch.py").read_text())
    top = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not any(isinstance(n, ast.ImportFrom) and n.level for n in top)


def test_the_package_imports_no_tests_and_no_benchmarks():
    for path in [*PACKAGE.rglob("*.py"), *KERNELS.glob("*.py")]:
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"tests", "benchmarks", "conftest", "pytest"}, path


def test_core_knows_neither_torch_nor_python():
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cc") and path.name != "bindings.cpp":
            includes = re.findall(r'#include\s+[<"]([^>"]+)', path.read_text())
            assert not [i for i in includes if re.match(r"torch|ATen|c10|pybind11|Python\.h", i)], path


# ------------------------------------------------------------------ in a fresh interpreter


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    """Neither Triton nor the compiled core is loaded until a call runs on it."""
    out = fresh(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fusedpg\n"
        "new = set(sys.modules) - before\n"
        "backends = ('fusedpg._core', 'fusedpg.gpu', 'fusedpg.cpu')\n"
        "print(sorted(m for m in new if m.split('.')[0] == 'triton' or m in backends))\n"
        "print('fusedpg.kernels' in sys.modules, 'fusedpg.cli' in sys.modules)\n"
    )
    assert out.split("\n")[:2] == ["[]", "False False"]


MISSING = (
    "import sys, warnings\n"
    "sys.modules['triton'] = None\n"
    "sys.modules['fusedpg._core'] = None\n"
    "import torch, fusedpg\n"
    "z = torch.zeros(2, 4, requires_grad=True)\n"
    "t = torch.zeros(2, dtype=torch.int64)\n"
    "spec = fusedpg.CATALOGUE['reinforce']\n"
)


def test_works_without_triton_and_core():
    """The reference runs, and one warning names the cause and the fix."""
    out = fresh(
        MISSING + "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        out = fusedpg.policy_loss_from_logits(spec, z, t, advantages=1.0)\n"
        "        out.loss.backward()\n"
        "        fusedpg.token_logprobs(z, t)\n"
        "    fusedpg.policy_loss(spec, out.logp, advantages=1.0)\n"
        "print(out.backend, round(out.loss.item(), 4))\n"
        "ours = [w for w in caught if 'fusedpg' in str(w.message)]\n"
        "print(len(ours), ours[0].category.__name__)\n"
        "print(ours[0].message)\n"
    )
    lines = out.strip().split("\n")
    assert lines[0] == "reference 1.3863"  # ln 4
    assert lines[1] == "1 RuntimeWarning"
    assert "the cpu backend cannot run here, so the PyTorch reference runs instead (slower, more memory)" in lines[2]
    assert "_core" in out, "the cause"
    assert "pip install" in out, "the fix"


@pytest.mark.parametrize(("backend", "cause"), [("cpu", "_core"), ("triton", "triton")])
def test_a_named_backend_never_falls_back(backend, cause):
    out = fresh(
        MISSING + "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "try:\n"
        f"    fusedpg.token_logprobs(z, t, backend={backend!r})\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert f"backend: {backend!r} cannot run here: " in out
    assert cause in out
    assert "pip install" in out
