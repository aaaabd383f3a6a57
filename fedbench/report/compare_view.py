"""A comparison for people, as a table, and for programs, as a record per setting."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from typing import Any

from fedbench.report.cells import Cell, Column, Row, Table
from fedbench.report.compare import METRICS, Comparison, Versus
from fedbench.report.render import render
from fedbench.report.stats import FEWEST

DIGITS = {"brier": 4, "nll": 4, "rmse": 4, "mb": 1, "seconds": 1}
"""Digits behind the point; 2 for all others."""


def render_comparison(found: Comparison, format_: str) -> str:
    """The comparison in one of the formats of `fedbench table`."""
    if format_ == "json":
        content = {
            "a": found.a,
            "b": found.b,
            "metric": found.metric,
            "notes": notes(found),
            "settings": records(found),
        }
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    if format_ == "csv":
        out = io.StringIO()
        rows = [{**row, "seeds": " ".join(map(str, row["seeds"]))} for row in records(found)]
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().rstrip("\n")
    return render(comparison_table(found), format_)


def records(found: Comparison) -> list[dict[str, Any]]:
    """A flat record per setting; None where there is nothing."""
    return [
        {
            **dict(zip(found.where, row.place, strict=True)),
            "metric": found.metric,
            "a": found.a,
            "b": found.b,
            "seeds": list(row.seeds),
            "n": row.test.n,
            "mean_a": row.a.mean,
            "std_a": row.a.std,
            "mean_b": row.b.mean,
            "std_b": row.b.std,
            "difference": row.test.difference,
            "low": row.test.low,
            "high": row.test.high,
            "p": row.test.p,
            "p_holm": row.p_holm,
            "p_signs": row.test.p_signs,
            "smaller_wins": row.smaller_wins,
            "verdict": row.verdict,
        }
        for row in found.rows
    ]


def comparison_table(found: Comparison) -> Table:
    """A row per setting."""
    digits = DIGITS.get(found.metric, 2)
    headers = ("seeds", "A", "B", "A-B", "interval", "p", "p signs", "verdict")
    return Table(
        title=f"{found.metric}: A {found.a} against B {found.b}",
        row_names=found.where,
        column_names=("figure",),
        columns=tuple(Column((name,), "number", digits) for name in headers),
        rows=tuple(Row(row.place, _cells(row, digits)) for row in found.rows),
        notes=tuple(notes(found)),
    )


def notes(found: Comparison) -> list[str]:
    """How to read it, the score, and what is not in it."""
    smaller = {row.smaller_wins for row in found.rows}
    better = {True: "smaller is better", False: "larger is better"}
    model = {"pm": "personal model (PM)", "gm": "global model (GM)"}
    tested = sum(row.p_holm is not None for row in found.rows)
    a, b = (model[view] for view in found.views)
    views = f"Of the {a}" if a == b else f"A: of the {a}; B: of the {b}"
    return [
        f"{found.metric}: {METRICS[found.metric]}; {' or '.join(better[one] for one in sorted(smaller))}.",
        f"{views}; mean ± sample standard deviation over the seeds that both have.",
        "interval: 95 %, of the mean paired difference, by Student's t, of each setting by itself.",
        f"p: paired t test, two-sided, with Holm's correction for {tested} setting(s); it makes the verdict at "
        "0.05. p signs: exact sign-flip test, uncorrected; it cannot be less than 2 / 2^seeds.",
        f"cannot tell: fewer than {FEWEST} common seeds. No difference shown is not the same as equal.",
        _score(found),
        *([f"A and B also differ in {', '.join(found.unlike)}."] if found.unlike else []),
        *found.unpaired,
    ]


def _score(found: Comparison) -> str:
    """Wins, ties and losses of A by verdict, and how often its mean is the better one."""
    counts = Counter(row.verdict for row in found.rows)
    ties = counts["no difference shown"] + counts["identical"]
    ahead = sum((row.test.difference < 0) == row.smaller_wins for row in found.rows if row.test.difference)
    return (
        f"A wins {counts['A better']}, ties {ties}, loses {counts['B better']}, cannot tell {counts['cannot tell']}; "
        f"its mean is the better one in {ahead} of {len(found.rows)} setting(s)."
    )


def _cells(row: Versus, digits: int) -> tuple[Cell, ...]:
    test = row.test
    interval = "-" if test.low is None else f"{test.low:+.{digits}f} to {test.high:+.{digits}f}"
    texts = (f"{test.difference:+.{digits}f}", interval, _p(row.p_holm), _p(test.p_signs), row.verdict)
    return (Cell(text=str(test.n)), Cell(measured=row.a), Cell(measured=row.b), *(Cell(text=text) for text in texts))


def _p(p: float | None) -> str:
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"
