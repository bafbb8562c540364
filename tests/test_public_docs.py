"""Every public symbol says what it is: its parameters, shapes, dtypes, errors and source."""

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import fusedpg

PACKAGE = Path(__file__).parents[1] / "python" / "fusedpg"

#: documented modules that import without a trainer; those without `__all__` publish what they define
MODULES = ("fusedpg", "fusedpg.presets", "fusedpg.recipes", "fusedpg.annotators", "fusedpg.axes")

#: one per trainer, read as text: importing some of them imports the trainer
INTEGRATIONS = sorted(p for p in (PACKAGE / "integrations").glob("[a-z]*.py"))

#: what takes tensors and returns a loss or log-probabilities
OPS = (
    "token_logprobs",
    "linear_token_logprobs",
    "policy_loss",
    "policy_loss_from_logits",
    "policy_loss_from_hidden",
    "distillation_loss",
    "ResolvedLoss.from_logits",
    "ResolvedLoss.from_hidden",
    "ResolvedLoss.from_logp",
)


def published(module: str) -> dict[str, object]:
    """Dotted name -> object of what a module publishes."""
    space = importlib.import_module(module)
    names = getattr(space, "__all__", None) or [
        name for name, value in vars(space).items() if name[0] != "_" and getattr(value, "__module__", "") == module
    ]
    return {f"{module}.{name}": getattr(space, name) for name in names if name != "__version__"}


PUBLIC = {name: value for module in MODULES for name, value in published(module).items()}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CONSTANTS = {n: v for n, v in PUBLIC.items() if not (inspect.isroutine(v) or inspect.isclass(v) or inspect.ismodule(v))}
DATACLASSES = {name: value for name, value in PUBLIC.items() if dataclasses.is_dataclass(value)}

#: they answer whatever they are asked
NEVER_RAISE = {"fusedpg.presets.trainers_of"}


def op(name: str) -> object:
    """`policy_loss`, or a method of a public class."""
    found = fusedpg
    for part in name.split("."):
        found = getattr(found, part)
    return found


def section(doc: str, title: str) -> str:
    """The indented block under `title:`; empty without one."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", doc + "\n", re.M)
    return found[1] if found else ""


def heads(block: str) -> list[str]:
    """What stands before the colon of each entry."""
    lines = [line for line in block.splitlines() if re.match(r" {4}\S", line)]
    return re.findall(r"\*{0,2}(\w+)", " ".join(line.split(":")[0] for line in lines))


def commented_names(source: str) -> set[str]:
    """Names of assignments with a `#:` comment in the line before."""
    return set(re.findall(r"^ *#:.*\n *(\w+)\b", source, re.M))


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in CONSTANTS])
def test_it_has_a_docstring(name):
    doc = PUBLIC[name].__doc__
    assert doc
    # what Python generates for a dataclass is a signature
    assert not doc.startswith(name.split(".")[-1] + "(")


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_explained_where_it_is_defined(name):
    leaf = name.split(".")[-1]
    folder = PACKAGE / "presets" if ".presets." in name else PACKAGE
    assert any(leaf in commented_names(path.read_text()) for path in folder.glob("*.py")), f"no '#:' above {leaf}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_named_and_errors_stated(name):
    doc = inspect.getdoc(FUNCTIONS[name])
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    open_ended = [p.name for p in parameters if p.kind is p.VAR_KEYWORD]
    assert all(re.search(rf"\b{keyword.rstrip('s')}s?\b", doc, re.I) for keyword in open_ended)
    first = [p.name for p in parameters if p.name not in open_ended]
    if name.startswith("fusedpg.presets."):  # a loss and the trainer's own options, listed in prose
        first = []
    assert not set(first) - set(heads(section(doc, "Args")))
    if parameters:
        assert bool(section(doc, "Raises")) is (name not in NEVER_RAISE)


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_documented_in_full(name):
    function = op(name)
    doc = inspect.getdoc(function)
    named = set(heads(section(doc, "Args")))
    wanted = [p for p in inspect.signature(function).parameters if p not in ("self", "keywords")]
    assert not set(wanted) - named
    assert not named - set(wanted), "documents a parameter that it does not have"
    for what in ("(N,", "(B, T", "differentiable", "dtype|fp32|float"):
        assert re.search(re.escape(what) if what[0] == "(" else what, doc), f"does not say {what}"
    assert section(doc, "Returns")
    assert section(doc, "Raises")
    assert re.search(r"arXiv:\d{4}\.\d{5}", section(doc, "References")), "no source"


@pytest.mark.parametrize("name", [*FUNCTIONS, *OPS])
def test_what_is_raised_is_an_exception(name):
    for error in heads(section(inspect.getdoc(FUNCTIONS.get(name) or op(name)), "Raises")):
        assert issubclass(getattr(builtins, error, object), Exception), error


@pytest.mark.parametrize("name", DATACLASSES)
def test_fields_are_explained(name):
    """In the class's docstring, or by a comment at the field, here or in a base."""
    explained: set[str] = set()
    for cls in DATACLASSES[name].__mro__:
        if dataclasses.is_dataclass(cls):
            doc = inspect.cleandoc(cls.__doc__ or "")
            listed = heads(section(doc, "Attributes") + section(doc, "Args"))
            explained |= {*listed, *re.findall(r"`([\w.]+)`", doc), *commented_names(inspect.getsource(cls))}
    assert not {field.name for field in dataclasses.fields(DATACLASSES[name])} - explained


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda p: p.stem)
def test_an_integration_explains_what_it_publishes(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    nodes = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != "_"]
    assert nodes or path.stem == "__init__"
    assert not [n.name for n in nodes if not ast.get_docstring(n)]
