"""The notes under a paper's table: how to read it, what agrees, what is partial, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedbench.paper import Paper
from fedbench.report.cells import Cell, Column, Row
from fedbench.report.rules import rule_words
from fedbench.report.select import Sorted
from fedbench.report.units import axis_label

SYMBOLS = {"partial": "†", "longer": "†", "diverged": "‡"}
UNCERTAIN = "?"
OUTSIDE = "*"
NOT_IN_PAPER = "§"


def comparison_notes(
    paper: Paper, metric: str, columns: Sequence[Column], rows: Sequence[Row], found: Sorted
) -> list[str]:
    """All notes of a paper's table."""
    cells = [cell for row in rows for cell in row.cells]
    return [
        *_reading(paper, metric),
        *_agreement(cells),
        *_marked(columns, rows),
        *_missing(columns, rows),
        *_others(found),
    ]


def _reading(paper: Paper, metric: str) -> Iterator[str]:
    rule = str(paper.set.get("rule", "final"))
    yield f"fedbench: {axis_label(metric)} {rule_words(rule)}; mean ± sample standard deviation (number of seeds)."
    if rule != "final":
        yield "final: the same at the last round."
    yield "paper: as printed; difference: fedbench - paper. PM, GM: personal and global model."


def _agreement(cells: Sequence[Cell]) -> Iterator[str]:
    compared = [cell for cell in cells if cell.agrees is not None]
    if compared:
        agreeing = sum(cell.agrees is True for cell in compared)
        yield (
            f"{agreeing} of {len(compared)} compared numbers agree; {OUTSIDE} further apart than 1 point and than "
            "twice the joint standard deviation (than 2 points where a deviation is missing)."
        )
    else:
        yield "No number can be compared yet."
    if any(cell.published and cell.published.uncertain for cell in cells):
        yield f"{UNCERTAIN} cannot be read with certainty in the paper: shown, never compared."


def _marked(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    lengths: dict[tuple[int | None, int | None], dict[str, None]] = {}
    for row in rows:
        for column, cell in zip(columns, row.cells, strict=True):
            if {"partial", "longer"} & set(cell.marks):
                where = f"{row.header[0]} {' '.join(column.header[:-1])}"
                lengths.setdefault((cell.rounds, cell.paper_rounds), {})[where] = None
    for (rounds, whole), places in lengths.items():
        which = f": {', '.join(places)}" if len(lengths) > 1 else ""
        yield f"{SYMBOLS['partial']} {rounds} of {whole} rounds, not compared{which}."
    if any("diverged" in cell.marks for row in rows for cell in row.cells):
        yield f"{SYMBOLS['diverged']} mean over the seeds that did not diverge, not compared."
    ours = [row.header[0] for row in rows if not row.in_paper]
    if ours:
        yield f"{NOT_IN_PAPER} not in the paper: {', '.join(ours)}."


def _missing(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    """A line per command that fills cells."""
    commands: dict[str, dict[str, None]] = {}
    for row in rows:
        for column, cell in zip(columns, row.cells, strict=True):
            if cell.fill:
                commands.setdefault(cell.fill, {})[column.header[0]] = None
    for command, places in commands.items():
        yield f"To fill {', '.join(places)}: {command}"


def _others(found: Sorted) -> Iterator[str]:
    if not found.others:
        return
    unlike = dict.fromkeys(f"{method} ({', '.join(keys)})" for method, keys in found.others.values())
    yield f"Left out, because settings differ from the paper's: {len(found.others)} run(s) of {', '.join(unlike)}."
