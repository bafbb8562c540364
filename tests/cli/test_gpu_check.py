"""The program behind `make gpu-check`: time limits, missing tools, partial results, and one report of it all."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusedpg.cli import bench
from gpu_check import __main__ as program
from gpu_check import build, measure, plan, report
from gpu_check.outcomes import Counts, Failure, bench_outcome, pytest_outcome
from gpu_check.running import FAILED, NOT_RUN, NOTHING_TO_DO, PASSED, SKIPPED, TIMED_OUT, Result, Step, run_all

ROOT = Path(__file__).parents[2]


def python(name: str, code: str, limit: float = 60, **more) -> Step:
    return Step(name, [sys.executable, "-c", code], limit, **more)


def run(*steps: Step, budget: float = 100) -> list[Result]:
    return run_all(steps, budget, ROOT, lambda text: None)


def pytest_step(folder: Path, body: str, limit: float = 60, **more) -> Step:
    path = folder / "test_made_up.py"
    path.write_text(body)
    tally = folder / "tally.jsonl"
    options = ["-q", "-c", "/dev/null", "--rootdir", str(folder), "-p", "gpu_check.tally", "--tally", str(tally)]
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    return Step("tests", command, limit, tally=tally, environment=quick, **more)


def test_steps_pass_fail_and_say_what_they_printed():
    good, bad, nothing = run(
        python("good", "import os; print(os.environ['WORD'])", environment={"WORD": "hello"}),
        python("bad", "import sys; print('about to fail'); sys.exit(3)"),
        python("nothing", f"import sys; print('no such suite'); sys.exit({NOTHING_TO_DO})"),
    )
    assert (good.status, good.output) == (PASSED, "hello\n")
    assert (bad.status, bad.why) == (FAILED, "exit status 3")
    assert "about to fail" in bad.output
    assert (nothing.status, nothing.why) == (SKIPPED, "no such suite")


def test_a_step_that_hangs_is_stopped_with_what_it_started(tmp_path):
    """Its child too, which would go on writing."""
    trace = tmp_path / "trace"
    child = f"import time\nwhile True:\n  open({str(trace)!r}, 'a').write('x'); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    begin = time.monotonic()
    (result,) = run(python("hang", code, limit=2))
    assert result.status == TIMED_OUT
    assert time.monotonic() - begin < 30
    size = trace.stat().st_size
    assert size > 0
    time.sleep(0.3)
    assert trace.stat().st_size == size


def test_a_stopped_pytest_still_counts_what_it_had_done(tmp_path):
    body = "import time\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): time.sleep(600)\n"
    (result,) = run(pytest_step(tmp_path, body, limit=5))
    assert result.status == TIMED_OUT
    assert result.counts == Counts(1, 2, 0)
    wrong, running = result.failures
    assert (wrong.test, running.test) == ("test_made_up.py::test_b", "test_made_up.py::test_c")
    assert "assert 1 == 2" in wrong.text
    assert running.text == "was running when the step ended"


def test_a_test_that_kills_its_process_is_named(tmp_path):
    """As an illegal address does."""
    body = "import os\ndef test_a(): pass\ndef test_b(): os._exit(139)\ndef test_c(): pass\n"
    (result,) = run(pytest_step(tmp_path, body))
    assert (result.status, result.counts) == (FAILED, Counts(1, 1, 0))
    assert result.failures == [Failure("test_made_up.py::test_b", "was running when the step ended")]


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path):
    (result,) = run(pytest_step(tmp_path, "import no_such_module\n"))
    assert (result.status, result.counts) == (FAILED, Counts(0, 1, 0))
    assert "no_such_module" in result.failures[0].text


def test_workers_are_counted_once(tmp_path):
    pytest.importorskip("xdist")
    step = pytest_step(tmp_path, "def test_a(): pass\ndef test_b(): pass\n")
    more = {**step.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [*step.command, "-p", "xdist", "-n", "2"]
    (result,) = run(Step("tests", command, 60, tally=step.tally, environment=more))
    assert (result.status, result.counts) == (PASSED, Counts(2, 0, 0))


def test_interrupts_arrive_even_where_the_shell_ignores_them(tmp_path):
    """As in `make gpu-check &`."""
    body = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n"
    step = pytest_step(tmp_path, body, limit=5)
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.path.insert(0, 'scripts')\n"
        "from pathlib import Path\n"
        "from gpu_check.running import *\n"
        f"step = Step('tests', {list(step.command)!r}, 5, tally=Path({str(step.tally)!r}), environment={step.environment!r})\n"
        "print(run_all([step], 60, Path('.'), lambda text: None)[0].output)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "1 passed" in done.stdout  # pytest's own summary, which it prints when it is interrupted
    assert "KeyboardInterrupt" in done.stdout


def test_failing_tests_are_named_with_a_short_traceback(tmp_path):
    lines = "\n".join(f"    x{i} = {i}" for i in range(40))
    body = (
        "import pytest\n"
        f"def test_long():\n{lines}\n    assert x39 == 40\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError('no device')\n"
        "def test_setup(broken): pass\n"
        "def test_right(): pass\n"
    )
    (result,) = run(pytest_step(tmp_path, body))
    assert (result.status, result.counts) == (FAILED, Counts(1, 2, 1))
    assert result.counts.total == 4
    long, setup = result.failures
    assert "assert 39 == 40" in long.text
    assert len(long.text.splitlines()) <= 12
    assert setup.test.endswith("test_setup")
    assert "no device" in setup.text


def test_no_test_that_passed_is_a_failure(tmp_path):
    body = "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"
    (result,) = run(pytest_step(tmp_path, body))
    assert (result.status, result.why) == (FAILED, "no test passed")
    (result,) = run(pytest_step(tmp_path, body, optional=True))
    assert (result.status, result.why) == (SKIPPED, "no test passed")


def test_an_old_result_is_not_taken_for_a_new_one(tmp_path):
    path = tmp_path / "tally.jsonl"
    path.write_text('{"test": "old", "outcome": "passed", "text": ""}\n')
    assert pytest_outcome(path)[0] == Counts(1, 0, 0)
    (result,) = run(python("dies", "import os; os._exit(9)", tally=path))
    assert (result.status, result.counts) == (FAILED, None)


def test_missing_modules_and_no_time_left_are_named():
    done, missing, optional, late = run(
        python("first", "import time; time.sleep(1.5)"),
        python("tests", "", needs=("sys", "no_such_module")),
        python("extra", "", needs=("no_such_module",), optional=True),
        python("late", "print('never')"),
        budget=2.2,
    )
    assert done.status == PASSED
    assert (missing.status, missing.why) == (NOT_RUN, "no_such_module not installed")
    assert optional.status == SKIPPED
    assert (late.status, late.why, late.output) == (NOT_RUN, "no time left", "")


def test_the_report_holds_everything(tmp_path):
    results = [
        Result("build", SKIPPED, why="cmake, pybind11 missing"),
        Result("parity", FAILED, 12.3, "exit status 1", Counts(10, 1, 2), [Failure("a::test_b", "E  assert 0")]),
        Result("bench hidden", PASSED, tables=["**P2**\n\n| a | b |"], targets=["P2: fusedpg / products: 1.05x: met"]),
        Result("bench loss", TIMED_OUT, 20, "stopped after 20 s", output="x" * 9000 + "the end", command="python -m x"),
    ]
    facts = {"versions": {"torch": "2.11"}, "gpu": {"cuda:0": "H100"}, "environment": {}, "ok": True}
    facts["backends"] = [{"name": "triton on a GPU", "works": True, "says": "tensors of cuda"}]
    path = tmp_path / "deep" / "gpu-h100.md"
    report.write(path, "GPU check: H100", ["a note"], facts, results)
    text = path.read_text()
    for part in (
        "**FAILED: parity; bench loss**",
        "- a note",
        "- versions: torch 2.11",
        "- gpu: cuda:0 H100",
        "- backend triton on a GPU: works: tensors of cuda",
        "| build | skipped | 0 |  |  |  | cmake, pybind11 missing |",
        "| parity | failed | 12 | 10 | 1 | 2 | exit status 1 |",
        "### a::test_b\n\n```\nE  assert 0",
        "- P2: fusedpg / products: 1.05x: met",
        "| a | b |",
        "the end",
    ):
        assert part in text
    assert len(text) < 6000
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["results"][1]["counts"] == {"passed": 10, "failed": 1, "skipped": 2}
    assert report.verdict(results[:1] + results[2:3]) == "all steps passed"


# ------------------------------------------------------------------ the real steps


def test_every_file_with_marked_tests_belongs_to_a_step():
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.gpu\b", path.read_text()) and path.name not in ("conftest.py", Path(__file__).name)
    }
    listed = [ROOT / file for files, _ in plan.GPU_TESTS.values() for file in files]
    assert {path for path in marked if not any((ROOT / path).is_relative_to(file) for file in listed)} == set()
    assert all(path.exists() for path in (*listed, *(ROOT / file for file in plan.SUITES_ON_DEVICE)))
    # what waits for the GPU through a fixture is marked by its parameter
    assert all(
        "mark.gpu" in path.read_text() or "device" in path.read_text() for path in (ROOT / "tests/gpu").glob("test_*")
    )


def test_every_suite_is_measured_or_named_here():
    needs_no_gpu = {"trl", "static"}
    assert set(bench.SUITES) - set(plan.SUITES) <= needs_no_gpu


def test_all_steps_fit_in_ten_minutes_on_a_good_day():
    """Limits may add up to more than the budget; the tests' and the build's alone may not."""
    steps = [build.step(Path("site"), plan.BUILD_LIMIT), plan.doctor(Path("w"), {}), *plan.tests("cuda", Path("w"), {})]
    assert sum(step.limit for step in steps) <= plan.BUDGET < 600


@pytest.mark.parametrize("suite", ["accuracy", "no such suite"])
def test_a_suite_without_the_command_lines_packages(suite, tmp_path):
    """In a fresh interpreter that finds no rich."""
    path = tmp_path / "bench.json"
    code = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from gpu_check import measure\n"
        "measure.find_spec = lambda name: None\n"
        "for name in ('typer', 'matplotlib'): sys.modules[name] = None\n"
        f"sys.exit(measure.main({suite!r}, 'cpu', {str(path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "rich is not installed" in done.stdout
    if suite != "accuracy":
        assert done.returncode == NOTHING_TO_DO
        assert "the benchmark has no suite 'no such suite'" in done.stdout
        return
    assert done.returncode == 0, done.stderr
    tables, targets = bench_outcome(path)
    assert len(tables) == 1
    assert "| dtype | offset |" in tables[0]
    assert any("logp error" in line and line.endswith("met") for line in targets)


def test_shapes_fit_the_gpu(monkeypatch):
    import torch

    for gib, tokens in ((140, 8192), (40, 4096), (23, 2048), (8, 512)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (gib << 30, 0))
        chosen = measure.options(bench, "hidden", "cuda")
        assert (chosen.tokens, chosen.vocab, chosen.width, chosen.device) == (tokens, 151_936, 4096, "cuda")


def test_missing_build_tools_are_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == "pybind11" else object())
    missing = build.missing_tools()
    assert [name for name in ("pybind11", "cmake", "ninja", "a C++ compiler") if name in missing] == missing[:4]


def test_without_a_core_the_tree_itself_runs(tmp_path):
    build.copy_tree(ROOT, tmp_path / "site")
    code = "import fusedpg, fusedpg.kernels as k; print(fusedpg.__file__); print(k.__file__)"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert all(line.startswith(str(tmp_path / "site" / "fusedpg")) for line in done.stdout.split())


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(program, "gpu_name", lambda: "")
    assert program.main([]) == 2
    assert "sees no GPU; `--device cpu` rehearses" in capsys.readouterr().err


def test_the_whole_program(monkeypatch, tmp_path, capsys):
    """With another list of steps: one that reports facts, one that fails."""
    found = {"ok": True, "versions": {"torch": "2.11"}}
    doctor = python("doctor", f"print('a warning {{}}'); print({json.dumps(found, indent=1)!r})")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(build, "missing_tools", lambda: ["cmake", "ninja"])
    monkeypatch.setattr(build, "copy_tree", lambda root, site: None)
    monkeypatch.setattr(program, "gpu_name", lambda: "NVIDIA H200 NVL")
    monkeypatch.setattr(plan, "doctor", lambda *a: doctor)
    monkeypatch.setattr(plan, "tests", lambda *a: [python("parity", "import sys; sys.exit(1)")])
    monkeypatch.setattr(plan, "benchmarks", lambda *a: [])
    assert program.main([]) == 1
    (path,) = (tmp_path / "benchmarks" / "results").glob("gpu-h200-nvl-*.md")
    text = path.read_text()
    assert text.startswith("# GPU check: NVIDIA H200 NVL\n\n**FAILED: parity**")
    assert "The compiled CPU core is not built (cmake, ninja missing): the package is used from the tree" in text
    assert "- versions: torch 2.11" in text
    assert "[2/2] parity (at most" in capsys.readouterr().out
    monkeypatch.setattr(plan, "tests", lambda *a: [])
    assert program.main(["--device", "cpu", "--out", str(tmp_path / "here")]) == 0
    (path,) = (tmp_path / "here").glob("rehearsal-*.md")
    assert "WITHOUT a GPU" in path.read_text()
