"""A paper's table with the published numbers beside the measured ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.grid import load_grid
from fedbench.paper import Paper, Published, TableLayout, load_paper, load_published
from fedbench.report.cells import Cell, Column, Mark, Printed, Row, Summary, Table
from fedbench.report.measure import measure
from fedbench.report.notes import comparison_notes
from fedbench.report.select import (
    Place,
    Sorted,
    comparable,
    expected_rounds,
    expected_settings,
    is_implemented,
    sort_runs,
)
from fedbench.report.summary import NO_VIEW, figure
from fedbench.report.units import scale
from fedbench.store import queries

FIGURES = {"acc": ("value", "accuracy"), "ece": ("ece", "ece")}
"""Published metric -> which measured figure it is, and our metric, which says how it is printed."""


@dataclass(frozen=True)
class Spot:
    """A column: where it stands in the paper, in the paper's words and in ours."""

    words: tuple[str, ...]
    place: Place
    view: str


@dataclass(frozen=True)
class Source:
    """All that the cells of a table are made from."""

    paper: Paper
    layout: TableLayout
    published: dict[tuple[str, Spot], Published]
    measured: dict[tuple[str, Place], pd.DataFrame]


def paper_table(engine: Engine, paper: str, table: str) -> Table:
    """The paper's table, measured beside published. Raises FedbenchError for an unknown paper or table."""
    known = load_paper(paper)
    layout = _layout(known, table)
    entries = [
        entry
        for entry in load_published(paper)
        if entry.table in (layout.entries or [table]) and entry.metric == layout.metric and entry.model in layout.views
    ]
    spots = _spots(known, layout, entries)
    runs = queries.finished_runs(engine)
    specs = dict(zip(runs["run"], runs["spec"], strict=True))
    sorted_runs = sort_runs(specs, known, list(dict.fromkeys(spot.place for spot in spots)))
    source = Source(known, layout, _published(known, layout, entries), _measured(engine, runs, sorted_runs))
    rows = _rows(source, spots, entries)
    header = tuple(Column((*spot.words, spot.view), "percent") for spot in spots)
    return Table(
        title=f"{layout.title} ({paper} {table})",
        row_names=("method",),
        column_names=(*layout.columns, "view"),
        columns=header,
        rows=rows,
        notes=tuple(comparison_notes(known, FIGURES[layout.metric][1], header, rows, sorted_runs)),
        compares=True,
    )


def paper_places(paper: Paper, layout: TableLayout, entries: Sequence[Published]) -> dict[Place, tuple[str, ...]]:
    """The places of a table in the order of print, as settings, with the paper's words for each."""
    found: dict[Place, tuple[str, ...]] = {}
    for entry in entries:
        printed = entry.model_dump()
        words = tuple(_words(key, printed[key]) for key in layout.columns)
        found.setdefault(tuple((key, _setting(paper, key, printed[key])) for key in layout.columns), words)
    return found


def _layout(paper: Paper, table: str) -> TableLayout:
    if table not in paper.tables:
        raise FedbenchError(f"paper {paper.name} has no table {table!r}.", did_you_mean(table, paper.tables))
    layout = paper.tables[table]
    if layout.metric not in FIGURES:
        raise FedbenchError(f"table {table} of {paper.name} shows {layout.metric!r}, which is not measured.")
    return layout


def _words(key: str, printed: Any) -> str:
    """A heading: a name speaks for itself, a number needs its own."""
    return printed if isinstance(printed, str) else f"{key}={printed}"


def _setting(paper: Paper, key: str, printed: Any) -> Any:
    return paper.dataset_names[printed] if key == "dataset" else printed


def _spots(paper: Paper, layout: TableLayout, entries: Sequence[Published]) -> list[Spot]:
    places = paper_places(paper, layout, entries)
    return [Spot(words, place, view) for place, words in places.items() for view in layout.views]


def _published(paper: Paper, layout: TableLayout, entries: Sequence[Published]) -> dict[tuple[str, Spot], Published]:
    """(our method, spot) -> what is printed there."""
    found = {}
    for entry in entries:
        ((place, words),) = paper_places(paper, layout, [entry]).items()
        found[paper.method_names[entry.method], Spot(words, place, entry.model)] = entry
    return found


def _measured(engine: Engine, runs: pd.DataFrame, found: Sorted) -> dict[tuple[str, Place], pd.DataFrame]:
    """(method, place) -> the measured runs with the paper's settings."""
    wanted = {run for members in found.cells.values() for run in members}
    frame = measure(engine, runs[runs["run"].isin(wanted)])
    return {cell: frame[frame["run"].isin(members)] for cell, members in found.cells.items()}


def _rows(source: Source, spots: Sequence[Spot], entries: Sequence[Published]) -> tuple[Row, ...]:
    """The paper's methods in its order, then ours that were measured at its settings."""
    printed = {source.paper.method_names[entry.method]: entry.method for entry in entries}
    ours = sorted({method for method, _ in source.measured if method not in printed})
    titles = {method: name for name, method in source.paper.method_names.items()}
    return tuple(
        Row(
            (printed.get(method) or titles.get(method, method),),
            tuple(_cell(source, method, spot) for spot in spots),
            in_paper=method in printed,
        )
        for method in (*printed, *ours)
    )


def _cell(source: Source, method: str, spot: Spot) -> Cell:
    entry = source.published.get((method, spot))
    printed = None if entry is None else _printed(entry)
    runs = source.measured.get((method, spot.place))
    if runs is None:
        return _unmeasured(source, method, spot.place, printed)
    rounds = expected_rounds(expected_settings(source.paper, method, dict(spot.place)))
    cell = replace(_figures(comparable(runs, rounds), spot.view.lower(), source.layout.metric), published=printed)
    if cell.text == NO_VIEW:
        return cell if printed is None else replace(cell, text=f"no {spot.view}")
    if rounds is not None and cell.rounds is not None and cell.rounds != rounds:
        mark: Mark = "partial" if cell.rounds < rounds else "longer"
        fill = _command(source.layout, method, spot.place)
        cell = replace(cell, marks=(*cell.marks, mark), fill=fill)
    return _compared(replace(cell, paper_rounds=rounds))


def _unmeasured(source: Source, method: str, place: Place, printed: Printed | None) -> Cell:
    """Why there is no number, and how to get one if the paper has one."""
    if printed is None:  # the paper has no such number; of a method that is not in its table we cannot say
        return Cell(text=NO_VIEW if method in {named for named, _ in source.published} else "")
    if not is_implemented(method):
        return Cell(published=printed, text="not implemented")
    return Cell(published=printed, text="missing", fill=_command(source.layout, method, place))


def _figures(runs: pd.DataFrame, view: str, metric: str) -> Cell:
    """The measured cell, with the last round's figure beside one of another round."""
    name, ours = FIGURES[metric]
    cell = figure(runs, view, name, scale(ours))
    if cell.text == NO_VIEW:
        return cell
    last = "final" if name == "value" else f"final_{name}"
    final = figure(runs, view, last, scale(ours)).measured if (runs["rule"] != "final").any() else None
    return replace(cell, final=final, rounds=int(runs["rounds"].iloc[0]))


def _printed(entry: Published) -> Printed:
    mean = entry.mean if isinstance(entry.mean, float) else None
    return Printed(mean, entry.std, entry.uncertain, entry.note)


def _compared(cell: Cell) -> Cell:
    """With the difference, where both numbers are whole: all rounds, all seeds finished, legible beyond doubt."""
    ours, theirs = cell.measured, cell.published
    if ours is None or theirs is None or theirs.mean is None or theirs.uncertain or cell.marks:
        return cell
    difference = ours.mean - theirs.mean
    return replace(cell, difference=difference, agrees=abs(difference) <= tolerance(ours, theirs))


def tolerance(ours: Summary, theirs: Printed) -> float:
    """How far two numbers may be apart, in points: two standard deviations and at least 1, or 2 without deviations."""
    if ours.std is None or theirs.std is None:
        return 2.0
    return max(2 * math.hypot(ours.std, theirs.std), 1.0)


def _command(layout: TableLayout, method: str, place: Place) -> str:
    """The call that fills a cell; a method that the grid does not name is asked for."""
    grid = layout.grids.get(dict(place)["dataset"]) if "dataset" in dict(place) else None
    if grid is None:
        return ""
    named = {entry.name for entry in load_grid(grid).methods}
    return f"fedbench run --grid {grid}" + ("" if method in named else f" --methods {method}")
