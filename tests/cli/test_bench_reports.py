"""What is made of a finished run: the promises, the comparison with an older report, the plots."""

import copy
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusedpg.cli import plots, regressions, results, summary
from fusedpg.cli.app import app
from fusedpg.cli.report import Section, Target, promise

REPORTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
MACHINE = {
    "cpu": "a",
    "device": "cpu",
    "threads": 2,
    "isa": "v4",
    "fusedpg": "0",
    "backend": "cpu",
    "torch": "2",
    "python": "3",
}


def row(name, seconds, ours=False, peak=0, **more):
    errors = {} if name == "copy into a buffer" else {"loss": 1e-8, "grad": 1e-6}
    timed = {} if seconds is None else {"median_s": seconds, "min_s": seconds * 0.9, "spread": 0.1}
    base = {"name": name, "ours": ours, "work": 1.0, "errors_vs_fp64": errors, "wrong": None, "samples_s": []}
    return {**base, **timed, "peak_extra_bytes": peak, **more}


def logits_section(ours=1.0, copied=1.0, eager=10.0, peak=0):
    rows = [row("fusedpg", ours, True, peak), row("torch eager", eager), row("copy into a buffer", copied)]
    target = {
        "what": "against eager",
        "value": eager / ours,
        "bound": 9.0,
        "at_least": True,
        "unit": "x",
        "met": eager / ours >= 9,
    }
    gauge = {"unit": "GB/s", "amount": 1e9, "scale": 1e9, "ceiling": "copy into a buffer"}
    return {"suite": "P1", "tokens": 4, "vocab": 8, "dtype": "fp32", "rows": rows, "targets": [target], "gauge": gauge}


def run(*sections, **machine):
    return {"machine": {**MACHINE, **machine}, "sections": list(sections)}


def changes(old, new, threshold=1.15):
    compared = regressions.compare(old, new, threshold)
    return compared, {change.name: change for change in compared.changes}


# ------------------------------------------------------------------ promises


def test_a_target_belongs_to_its_own_promise_else_to_its_sections():
    assert promise({"what": "P3: backward"}, {"suite": "P2"}) == "P3"
    assert promise({"what": "against eager"}, {"suite": "P1"}) == "P1"
    assert promise({"what": "against eager"}, {"suite": "distill"}) is None


def test_any_sections_targets_reach_the_summary():
    static = Section("Triton", ["what"], [], [Target("P5: forward", 2.0, 2.0, at_least=False, unit=" B")])
    missed = Section(
        "Tokens", ["what"], [], [Target("against eager", None, 5.0, at_least=True)], record={"suite": "P4"}
    )
    sections = [static.to_json(), logits_section(), missed.to_json()]
    outcome = summary.verdicts(sections)
    assert outcome["P5"] == outcome["P1"] == "met"
    assert outcome["P4"] == "not measured (1 of 1)"
    assert outcome["P2"] == outcome["P7"] == "not measured"
    page = summary.markdown(sections)
    assert "| P5 | forward | at most 2 B | 2 B | met |" in page
    assert "| P1 | against eager | at least 9x | 10x (fp32) | met |" in page
    assert "| P4 | against eager | at least 5x | not measured | not measured |" in page


def test_one_missed_table_misses_the_promise():
    sections = [logits_section(), {**logits_section(ours=2.0), "dtype": "bf16"}]
    assert summary.verdicts(sections)["P1"] == "MISSED (1 of 2)"
    (line,) = summary.lines(sections)
    assert line.figures == ["10x (fp32)", "5x MISSED (bf16)"]
    assert line.verdict == "MISSED"


def test_what_one_table_did_not_measure_is_not_met():
    sections = [logits_section(), {**logits_section(), "dtype": "bf16"}]
    sections[1]["targets"] = [{**target, "value": None, "met": False} for target in sections[1]["targets"]]
    assert summary.verdicts(sections)["P1"] == "not measured (1 of 2)"
    (line,) = summary.lines(sections)
    assert (line.figures, line.verdict) == (["10x (fp32)", "not measured (bf16)"], "not measured")


# ------------------------------------------------------------------ comparison


def test_a_slower_machine_is_no_regression():
    """Twice the time of everything: the copy takes twice as long too."""
    compared, by_name = changes(run(logits_section()), run(logits_section(2.0, 2.0, 20.0)))
    assert by_name["fusedpg"].ratio == pytest.approx(2)
    assert by_name["fusedpg"].relative == pytest.approx(1)
    assert by_name["fusedpg"].yardstick == "copy into a buffer"
    assert not compared.failed


def test_a_slower_row_is_one():
    compared, by_name = changes(run(logits_section()), run(logits_section(1.2)))
    assert [change.name for change in compared.regressions] == ["fusedpg"]
    assert compared.failed
    assert by_name["fusedpg"].verdict(1.15) == "SLOWER"
    assert not changes(run(logits_section()), run(logits_section(1.2)), threshold=1.25)[0].failed


def test_a_rivals_regression_is_not_ours():
    compared, by_name = changes(run(logits_section()), run(logits_section(eager=20.0)))
    assert by_name["torch eager"].relative == pytest.approx(2)
    assert not compared.failed


def test_a_noisy_median_alone_is_no_regression():
    new = run(logits_section(1.5))
    new["sections"][0]["rows"][0]["min_s"] = 0.9
    assert not changes(run(logits_section()), new)[0].failed


def test_more_memory_is_a_regression():
    compared, by_name = changes(run(logits_section(peak=int(1e8))), run(logits_section(peak=int(2e8))))
    assert by_name["fusedpg"].verdict(1.15) == "MORE MEMORY"
    assert compared.failed
    slack = changes(run(logits_section(peak=int(1e6))), run(logits_section(peak=int(9e6))))[0]
    assert not slack.failed


def test_a_row_that_became_wrong_fails():
    new = run(logits_section())
    new["sections"][0]["rows"][0] = row("fusedpg", None, True, wrong="grad error")
    compared = changes(run(logits_section()), new)[0]
    assert compared.failed
    assert compared.wrong == ["P1 fp32 N=4 V=8: fusedpg: grad error"]


def test_machines_and_what_is_not_in_both_are_said():
    new = run({**logits_section(), "tokens": 16}, logits_section(), cpu="b", packages={"trl": "2"})
    del new["sections"][1]["rows"][1]
    compared = changes(run(logits_section(), packages={"trl": "1"}), new)[0]
    assert compared.differences == ["cpu: a before, b now", "trl: 1 before, 2 now"]
    assert compared.unmatched == [
        "only in the old run: P1 fp32 N=4 V=8: torch eager",
        "only in the new run: P1 fp32 N=16 V=8",
    ]


def test_points_of_a_sweep_are_compared_each_with_its_own_yardstick():
    def sweep(*seconds):
        rows = []
        for tokens, (ours, product) in zip((8, 16), seconds, strict=True):
            sizes = {"tokens": tokens, "vocab": 4, "width": 2}
            rows += [row("fusedpg", ours, True, **sizes), row("three bare products", product, **sizes)]
        return run({"suite": "scaling", "source": "hidden", "axis": "N", "dtype": "fp32", "rows": rows})

    compared = regressions.compare(sweep((1.0, 1.0), (2.0, 2.0)), sweep((2.0, 2.0), (4.0, 2.0)))
    assert [(c.where, round(c.relative, 3)) for c in compared.changes if c.ours] == [
        ("scaling hidden N fp32 N=8 V=4 D=2", 1.0),
        ("scaling hidden N fp32 N=16 V=4 D=2", 2.0),
    ]


def test_nothing_in_common_fails():
    compared = regressions.compare(run(logits_section()), run({**logits_section(), "vocab": 9}))
    assert compared.failed
    assert "no row is in both runs: nothing was compared" in regressions.markdown(compared)


def test_the_table_names_each_regression():
    console = Console(file=io.StringIO(), width=160, record=True)
    regressions.show(console, regressions.compare(run(logits_section()), run(logits_section(1.2), threads=4)))
    text = console.export_text()
    for part in (
        "differs: threads: 2 before, 4 now",
        "P1 fp32 N=4 V=8",
        "1.20x",
        "SLOWER",
        "1 of 1 own rows regressed",
    ):
        assert part in text


# ------------------------------------------------------------------ stored reports


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_kept_reports_are_read_compared_and_drawn(path, tmp_path):
    text = invoke("bench", "--from", path, "--compare", path, "--plots", tmp_path)
    assert "0 of " in text
    assert "own rows regressed" in text
    drawn = {file.name for file in tmp_path.iterdir()}
    assert {"ceiling-logits.png", "accuracy-logits.png"} <= drawn
    # each row is itself
    own = results.read(path)
    compared = regressions.compare(own, own)
    assert len(compared.changes) == sum("median_s" in r for _, r in results.rows(own))
    assert all(change.relative == change.ratio == 1 for change in compared.changes)
    assert not compared.unmatched


def test_compare_exits_with_3_on_a_regression(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results.write(old, run(logits_section()))
    results.write(new, run(logits_section(1.5)))
    assert "SLOWER" in invoke("bench", "--from", new, "--compare", old, code=3)
    assert "SLOWER" not in invoke("bench", "--from", new, "--compare", old, "--threshold", "2")
    broken = run({**logits_section(), "broken": True})
    results.write(new, broken)
    invoke("bench", "--from", new, code=1)


def test_compare_with_the_run_just_made(tmp_path):
    shape = ["bench", "--suite", "loss", "--loss-tokens", "256", "--rounds", "1", "--no-compile"]
    old = tmp_path / "old.json"
    invoke(*shape, "--json", old)
    report = json.loads(old.read_text())
    fast = copy.deepcopy(report)
    for _, timed in results.rows(fast):
        # a report whose time ours can never reach again, beside rivals that took forever
        factor = 1e-6 if timed["ours"] else 1e6
        timed.update({name: timed[name] * factor for name in ("median_s", "min_s")})
    results.write(old, fast)
    assert "SLOWER" in invoke(*shape, "--compare", old, "--markdown", code=3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "cannot be read"), ("{", "it is no JSON"), ("[]", "with `machine` and `sections`")],
)
def test_no_report_is_refused(tmp_path, content, complaint):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    for arguments in (["bench", "--from", path], ["bench", "--compare", path], ["plot", path]):
        assert complaint in invoke(*arguments, code=2)


# ------------------------------------------------------------------ plots


def scaling(axis, source="hidden"):
    rows = []
    for power in range(3):
        sizes = {"tokens": 8, "vocab": 8, "width": 8, {"N": "tokens", "V": "vocab", "D": "width"}[axis]: 8 << power}
        rows += [row("fusedpg", 1e-3 * 2**power, True, 10**6, **sizes), row("copy into a buffer", 1e-3, **sizes)]
    return {"suite": "scaling", "source": source, "axis": axis, "dtype": "fp32", "rows": rows, "targets": []}


def test_every_plot_is_drawn(tmp_path):
    hidden = {**logits_section(), "suite": "P2", "width": 2}
    scoring = {**logits_section(), "suite": "scoring", "source": "logits"}
    everything = run(logits_section(), hidden, scoring, *map(scaling, "NVD"), scaling("N", "logits"))
    paths = plots.draw(everything, tmp_path / "deep")
    names = ["time-and-memory", "vocabulary-and-width"]
    names += [f"{kind}-{suite}" for kind in ("ceiling", "accuracy") for suite in ("logits", "hidden", "scoring")]
    assert [path.stem for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_shares_of_the_ceiling_count_useful_work():
    section = logits_section(ours=2.0, copied=1.0)
    section["rows"][0]["work"] = 0.5
    shares = {r["name"]: share for r, share in plots._shares(section)}
    assert shares == {"fusedpg": 25.0, "torch eager": 10.0, "copy into a buffer": 100.0}


def test_half_batches_are_no_points_of_accuracy():
    half = row("fusedpg, half", 0.1, True, work=0.5)
    assert plots._is_whole(row("fusedpg", 1.0))
    assert not plots._is_whole(half)
    assert not plots._is_whole(row("copy into a buffer", 1.0))
    assert not plots._is_whole(row("fusedpg", None))


def test_a_report_without_tables_draws_nothing(tmp_path):
    path = tmp_path / "empty.json"
    results.write(path, run())
    assert "has no table that a plot is made of" in invoke("plot", path, "--out", tmp_path / "plots", code=1)
