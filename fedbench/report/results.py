"""The plain table of what a database holds: a row per method and task, accuracy, calibration, bytes and seconds.

Regression has its RMSE in place of accuracy and calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from sqlalchemy import Engine

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.report.cells import Cell, Column, Row, Summary, Table
from fedbench.report.labels import axes, facts, labels, place_of, plain
from fedbench.report.measure import measure
from fedbench.report.notes import SYMBOLS
from fedbench.report.rules import looks_for_best, rule_words
from fedbench.report.select import newest
from fedbench.report.summary import NO_VIEW, cost, figure, has_view
from fedbench.report.units import scale
from fedbench.store import queries

KINDS = {"accuracy": "acc", "macro": "acc", "rmse": "RMSE"}
"""headline -> the kind of number"""
COLUMNS = {
    "acc": (Column(("acc",), "percent"), Column(("final",), "percent")),
    "RMSE": (Column(("RMSE",), "number", digits=4), Column(("final RMSE",), "number", digits=4)),
}
"""kind -> the columns of a view: by the rule, and at the last round"""
Group = tuple[tuple[str, ...], str]
"""The values of the axes, and the method's label: what makes a row."""


def results_table(engine: Engine, sweep: str | None = None) -> Table:
    """All finished runs, of this sweep or of the database. Raises FedbenchError when there are none."""
    runs = queries.finished_runs(engine, sweep)
    if runs.empty:
        raise FedbenchError(
            f"sweep {sweep} has no finished run yet." if sweep else "this database holds no finished run yet.",
            f"Run it: fedbench run --grid {sweep or 'quickstart'}",
        )
    frame = measure(engine, runs)
    where = axes(list(frame["spec"]))
    groups = {key: newest(group) for key, group in _groups(frame, where).items()}
    with_final = any(rule != "final" for rule in frame["rule"])
    kinds = tuple(kind for kind in COLUMNS if kind in {KINDS[headline] for headline in frame["headline"]})
    rows = [Row((*place, label), _cells(group, kinds, with_final)) for (place, label), group in groups.items()]
    shown = pd.concat(list(groups.values()))
    return Table(
        title=f"Results of {sweep}" if sweep else "All results",
        row_names=(*where, "method"),
        column_names=("figure",),
        columns=_columns(kinds, with_final),
        rows=tuple(rows),
        facts=facts(list(shown["spec"])),
        notes=(*_notes(shown), *_diverged_note(rows), *_missing_notes(engine, sweep, len(frame) - len(shown))),
    )


def _groups(frame: pd.DataFrame, where: tuple[str, ...]) -> dict[Group, pd.DataFrame]:
    """The runs of every row; tasks and methods in the order in which they were first queued."""
    specs = list(frame["spec"])
    places = [place_of(spec, where) for spec in specs]
    members: dict[Group, list[int]] = {}
    for position, group in enumerate(zip(places, labels(specs), strict=True)):
        members.setdefault(group, []).append(position)
    task_order, label_order = list(dict.fromkeys(places)), list(dict.fromkeys(label for _, label in members))
    ordered = sorted(members, key=lambda group: (task_order.index(group[0]), label_order.index(group[1])))
    return {group: frame.iloc[members[group]] for group in ordered}


def _columns(kinds: Sequence[str], with_final: bool) -> tuple[Column, ...]:
    headlines = [
        replace(column, header=(f"{view} {column.header[0]}",))
        for kind in kinds
        for view in ("PM", "GM")
        for column in COLUMNS[kind][: 1 + with_final]
    ]
    calibration = (
        Column(("ECE",), "percent", spread=False),
        Column(("Brier",), "fraction", digits=3, spread=False),
        Column(("NLL",), "fraction", digits=3, spread=False),
    )
    return (
        Column(("seeds",), "count", digits=0),
        *headlines,
        *(calibration if "acc" in kinds else ()),
        Column(("MB sent",), "MB", digits=1, spread=False),
        Column(("seconds",), "s", digits=1, spread=False),
    )


def _cells(runs: pd.DataFrame, kinds: Sequence[str], with_final: bool) -> tuple[Cell, ...]:
    headline = str(runs["headline"].iloc[0])
    headlines = [
        figure(runs, view, which, scale(headline)) if kind == KINDS[headline] else Cell(text=NO_VIEW)
        for kind in kinds
        for view in ("pm", "gm")
        for which in ("value", "final")[: 1 + with_final]
    ]
    view = "pm" if has_view(runs, "pm") else "gm"
    # Calibration of the state that the accuracy is of: the best one only where the rule looks for a best.
    stage = "" if looks_for_best(str(runs["rule"].iloc[0])) else "final_"
    calibration = [
        figure(runs, view, stage + name, scale(name)) if KINDS[headline] == "acc" else Cell(text=NO_VIEW)
        for name in (("ece", "brier", "nll") if "acc" in kinds else ())
    ]
    seeds = Cell(measured=Summary(float(len(runs)), None, len(runs)))
    cells = (seeds, *headlines, *calibration, cost(runs, "mb"), cost(runs, "seconds"))
    return tuple(replace(cell, rounds=int(runs["rounds"].iloc[0])) for cell in cells)


def _notes(runs: pd.DataFrame) -> list[str]:
    """What one must know to read the numbers."""
    rules = list(dict.fromkeys(str(rule) for rule in runs["rule"]))
    notes = ["PM, GM: personal and global model, mean ± sample standard deviation over seeds."]
    kinds = runs["headline"].map(KINDS)
    for kind, words in (("acc", "accuracy"), ("RMSE", "error")):
        notes += _headline_notes(kind, runs[kinds == kind], words, several=len(rules) > 1)
    adapted = {
        spec.method: plain(spec.protocol.adapt_epochs[-1:]) for spec in runs["spec"] if spec.protocol.adapt_epochs
    }
    if adapted:
        after = ", ".join(f"{method} {epochs}" for method, epochs in adapted.items())
        notes.append(f"PM after so many epochs of adaptation on the client's own data: {after}.")
    if rules != ["final"]:
        notes.append("final: the same at the last round.")
    at = {True: "the best round", False: "the last round"}
    rounds = " or ".join(dict.fromkeys(at[looks_for_best(rule)] for rule in rules))
    if (kinds == "acc").any():
        notes.append(
            f"ECE (%), Brier, NLL: of the PM, or of the GM where there is none; at {rounds}, as acc; "
            "by MC prediction where the method samples."
        )
    notes.append("MB sent: down and up, all clients and rounds; 1 MB = 1,000,000 bytes.")
    return notes


def _headline_notes(kind: str, runs: pd.DataFrame, words: str, *, several: bool) -> list[str]:
    """What the headline number of these runs is, a line per rule; `several`: the table's runs have different ones."""
    means = {"macro": "as the mean over clients"}
    pooled = " or ".join(
        means.get(headline, "pooled over the clients' test samples") for headline in dict.fromkeys(runs["headline"])
    )
    full = {"acc": "accuracy (%)", "RMSE": "root mean squared error"}[kind]
    return [
        f"{f'{kind}, rule {rule}' if several else kind}: {full} {rule_words(rule, words)}, {pooled}."
        for rule in dict.fromkeys(str(rule) for rule in runs["rule"])
    ]


def _missing_notes(engine: Engine, sweep: str | None, superseded: int) -> list[str]:
    """What the database holds and the table does not show."""
    notes = []
    if superseded:
        notes.append(f"Left out: {superseded} run(s) of earlier versions.")
    counts = queue.counts(engine, queue.sweep_ids(engine)[sweep] if sweep else None)
    unfinished = [f"{n} {status}" for status, n in counts.items() if status not in queue.FINISHED]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)} job(s); see fedbench queue list.")
    return notes


def _diverged_note(rows: Sequence[Row]) -> list[str]:
    """One line that explains the mark of diverged runs, if there are any."""
    if any("diverged" in cell.marks for row in rows for cell in row.cells):
        return [f"{SYMBOLS['diverged']} some seeds diverged: mean over the others, or cost until then if all did."]
    return []
