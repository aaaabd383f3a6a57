"""Formats: the same table as text, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedbench.errors import FedbenchError
from fedbench.report.cells import Cell, Column, Printed, Row, Summary, Table
from fedbench.report.latex import escape
from fedbench.report.render import FORMATS, render, render_to_terminal

GOLDEN = Path(__file__).parent / "golden"

RESULTS = Table(
    title="Results of demo",
    row_names=("dataset", "method"),
    column_names=("figure",),
    columns=(
        Column(("seeds",), "count", digits=0),
        Column(("PM acc",), "percent"),
        Column(("GM acc",), "percent"),
        Column(("NLL",), "fraction", digits=3, spread=False),
    ),
    rows=(
        Row(
            ("fashion_mnist", "fedavg"),
            (
                Cell(measured=Summary(3.0, None, 3)),
                Cell(text="-"),
                Cell(measured=Summary(91.456, 0.5, 3), rounds=60),
                Cell(measured=Summary(0.38461, 0.01, 3)),
            ),
        ),
        Row(
            ("fashion_mnist", "fedprox[mu=0.01]"),
            (
                Cell(measured=Summary(2.0, None, 2)),
                Cell(text="-"),
                Cell(measured=Summary(90.0, None, 1), diverged=1, marks=("diverged",)),
                Cell(measured=Summary(0.4, None, 1)),
            ),
        ),
        Row(
            ("mnist", "local"),
            (
                Cell(measured=Summary(1.0, None, 1)),
                Cell(text="diverged", diverged=1),
                Cell(text="-"),
                Cell(text="diverged", diverged=1),
            ),
        ),
    ),
    facts=(("clients", 10), ("rule", "final")),
    notes=("‡ some seeds diverged.", "See: fedbench run --grid demo_grid | 100% <of> them * #1"),
)

COMPARISON = Table(
    title="Personalisation (demo T1)",
    row_names=("method",),
    column_names=("dataset", "size", "view"),
    columns=tuple(
        Column((dataset, size, view), "percent")
        for dataset in ("MNIST", "CIFAR-10")
        for size in ("small", "large")
        for view in ("PM", "GM")
    ),
    rows=(
        Row(
            ("FedAvg",),
            (
                Cell(text="-"),
                Cell(
                    measured=Summary(87.5, 0.25, 3),
                    final=Summary(87.0, 0.5, 3),
                    published=Printed(87.38, 0.27),
                    difference=0.12,
                    agrees=True,
                    rounds=800,
                ),
                Cell(text="-"),
                Cell(
                    measured=Summary(80.0, None, 1),
                    final=Summary(79.0, None, 1),
                    published=Printed(90.0, None),
                    difference=-10.0,
                    agrees=False,
                    rounds=800,
                ),
                Cell(published=Printed(None, uncertain=True, note="lost"), text="missing", fill="fedbench run"),
                Cell(
                    measured=Summary(44.0, 1.0, 2),
                    final=Summary(43.0, 1.0, 2),
                    published=Printed(45.0, 2.0, uncertain=True),
                    rounds=5,
                    paper_rounds=800,
                    marks=("partial",),
                ),
                Cell(text="-"),
                Cell(published=Printed(79.05, 0.44), text="missing", fill="fedbench run --grid x"),
            ),
        ),
        Row(
            ("local",),
            (Cell(measured=Summary(85.0, 0.1, 3), rounds=800), Cell(text="-"), *[Cell()] * 6),
            in_paper=False,
        ),
    ),
    notes=("§ not in the paper: local.",),
    compares=True,
)


@pytest.mark.parametrize("format_", sorted(FORMATS))
@pytest.mark.parametrize(("name", "table"), [("results", RESULTS), ("comparison", COMPARISON)])
def test_a_table_is_rendered_as_it_was_looked_over(name: str, table: Table, format_: str) -> None:
    """The golden files were read line by line; replace one only after reading the new text."""
    golden = (GOLDEN / f"{name}.{format_}").read_text(encoding="utf-8")

    assert render(table, format_) + "\n" == golden


def test_a_wide_table_is_cut_by_its_outermost_header_in_markdown() -> None:
    sizes = ("small", "medium", "large")
    columns = tuple(Column((d, s, v), "percent") for d in ("A", "B") for s in sizes for v in ("PM", "GM"))
    wide = replace(COMPARISON, columns=columns, rows=(Row(("m",), (Cell(text="x"),) * 12),))

    text = render(wide, "md")

    assert "#### A" in text
    assert "#### B" in text
    assert text.count("| method |") == 2
    assert "small PM | small GM | medium PM | medium GM | large PM | large GM |" in text


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    render_to_terminal(table, Console(file=out, width=width, color_system=None))
    return out.getvalue().splitlines()


def test_the_terminal_shows_a_table_in_one_piece_if_it_fits() -> None:
    lines = printed(COMPARISON, 200)

    assert sum(line.startswith("FedAvg") for line in lines) == 1


def test_the_terminal_cuts_a_table_that_does_not_fit() -> None:
    lines = printed(COMPARISON, 90)

    assert {"MNIST", "CIFAR-10"} <= {line.strip() for line in lines}
    assert sum(line.startswith("FedAvg") for line in lines) == 2
    assert max(map(len, lines)) <= 90


def test_the_terminal_cuts_once_more_if_that_is_still_too_wide() -> None:
    lines = printed(COMPARISON, 60)

    assert {"MNIST small", "MNIST large", "CIFAR-10 small", "CIFAR-10 large"} <= {line.strip() for line in lines}
    assert max(map(len, lines)) <= 60


def test_where_cutting_does_not_help_the_deviation_stands_under_the_mean() -> None:
    lines = printed(RESULTS, 68)

    at = next(i for i, line in enumerate(lines) if "91.46" in line)
    assert "±" not in lines[at]
    assert lines[at + 1].strip() == "± 0.50"


def test_in_the_narrowest_terminal_columns_are_spread_over_blocks_and_no_number_is_broken() -> None:
    lines = printed(RESULTS, 58)

    assert sum(line.startswith("fashion_mnist") for line in lines) == 2
    assert any("91.46 ± 0.50" in line for line in lines)
    assert max(map(len, lines)) <= 58


def test_brackets_in_a_label_are_no_markup() -> None:
    assert any("fedprox[mu=0.01]" in line for line in printed(RESULTS, 120))


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50% of a_b & c", r"50\% of a\_b \& c"),
        ("90.00 ± 0.10", r"90.00 $\pm$ 0.10"),
        ("-0.03", r"$-$0.03"),
        ("+1.20 *", r"$+$1.20 $^*$"),
        ("run --grid x", r"run -{}-grid x"),  # two hyphens would be printed as a dash
        ("a\\b{c}~^", r"a\textbackslash{}b\{c\}\textasciitilde{}\textasciicircum{}"),
        ("-", "-"),
    ],
)
def test_latex_prints_text_as_it_is(text: str, latex: str) -> None:
    assert escape(text) == latex


@pytest.mark.parametrize("table", [RESULTS, COMPARISON])
def test_latex_is_balanced_and_every_line_has_all_columns(table: Table) -> None:
    text = render(table, "latex")

    assert text.isascii()
    unescaped = re.sub(r"\\[{}]", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert re.findall(r"\\begin{(\w+)}", text).count("tabular") == re.findall(r"\\end{(\w+)}", text).count("tabular")
    for body in re.findall(r"\\begin{tabular}{([lr]+)}(.*?)\\end{tabular}", text, re.DOTALL):
        spec, lines = body[0], [line for line in body[1].splitlines() if line.endswith(r"\\")]
        for line in lines:
            spans = [int(n) - 1 for n in re.findall(r"\\multicolumn{(\d+)}", line)]
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans) == len(spec)


def test_csv_is_a_line_per_cell_with_every_field() -> None:
    rows = list(csv.DictReader(io.StringIO(render(COMPARISON, "csv"))))

    assert len(rows) == 2 * 8
    found = next(row for row in rows if (row["dataset"], row["size"], row["view"]) == ("MNIST", "small", "GM"))
    assert (found["method"], found["mean"], found["std"], found["n"]) == ("FedAvg", "87.5", "0.25", "3")
    assert (found["published_mean"], found["published_std"], found["difference"]) == ("87.38", "0.27", "0.12")
    assert (found["unit"], found["final_mean"], found["rounds"]) == ("percent", "87.0", "800")
    assert (found["agrees"], found["uncertain"]) == ("True", "False")


def test_json_keeps_full_precision_and_the_facts_of_the_table() -> None:
    content = json.loads(render(RESULTS, "json"))

    assert content["title"] == "Results of demo"
    assert len(content["cells"]) == 3 * 4
    found = content["cells"][2]
    assert (found["figure"], found["mean"], found["clients"]) == ("GM acc", 91.456, 10)
    assert content["cells"][6]["marks"] == ["diverged"]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(FedbenchError, match=r"unknown format 'latx'(.|\n)*latex"):
        render(RESULTS, "latx")
