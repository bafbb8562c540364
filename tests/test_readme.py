"""The README's Python snippets run as written, in order, in one namespace; its table and plot are those of the report."""

import importlib.util
import json
import re

from pages import ROOT, blocks, run

README = ROOT / "README.md"


def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_snippets_run_in_order(capsys):
    assert len(list(blocks(README, "python"))) == 3
    namespace = run(README)
    assert "cpu" in capsys.readouterr().out
    assert namespace["logits"].grad.any()
    assert namespace["hidden"].grad.any()
    assert namespace["head"].grad.any()
    assert namespace["result"].path == "custom"


def test_the_table_is_the_reports():
    drawing = figures()
    assert drawing.table(json.loads(drawing.REPORT.read_text())) in README.read_text()


def test_the_plot_is_the_reports(tmp_path):
    drawing = figures()
    report = json.loads(drawing.REPORT.read_text())
    drawing.draw(report, tmp_path / "plot.svg")
    for svg in (drawing.PLOT, tmp_path / "plot.svg"):
        text = svg.read_text()
        assert not [mark for mark in drawing.marks(report) if f">{mark}<" not in text]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert len(targets) > 10
    assert not [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
