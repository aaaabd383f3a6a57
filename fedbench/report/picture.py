"""A table as text on paper: numbers written out, and columns cut into blocks that fit. The formats draw from this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from fedbench.report.cells import Cell, Column, Printed, Row, Summary, Table
from fedbench.report.labels import plain
from fedbench.report.notes import NOT_IN_PAPER, OUTSIDE, SYMBOLS, UNCERTAIN

WIDEST = 8
"""Columns that a page can hold; a table with more is cut by its outermost header."""


@dataclass(frozen=True)
class Line:
    """One line of text: row header and cells. `opens`: a new row of the table begins here."""

    header: tuple[str, ...]
    cells: tuple[str, ...]
    opens: bool


@dataclass(frozen=True)
class Block:
    """A part of a table that stands by itself: heading, names of the row headers, column headers, lines."""

    heading: str
    names: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    lines: tuple[Line, ...]


def blocks(table: Table, depth: int) -> list[Block]:
    """The table cut at the outermost `depth` levels of its column headers; one block for 0."""
    names = (*table.row_names, "") if table.compares else table.row_names
    found = []
    for outer, members in groupby(range(len(table.columns)), key=lambda i: table.columns[i].header[:depth]):
        chosen = list(members)
        found.append(
            Block(
                heading=" ".join(outer),
                names=names,
                columns=tuple(table.columns[i].header[depth:] for i in chosen),
                lines=tuple(line for row in table.rows for line in _lines(table, row, chosen) if any(line.cells)),
            )
        )
    return found


def halves(block: Block) -> tuple[Block, Block]:
    """The block cut in the middle; both parts have all row headers."""
    middle = len(block.columns) // 2
    return _columns_of(block, slice(None, middle)), _columns_of(block, slice(middle, None))


def _columns_of(block: Block, part: slice) -> Block:
    lines = tuple(replace(line, cells=line.cells[part]) for line in block.lines)
    return replace(block, columns=block.columns[part], lines=lines)


def without_repeats(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines with the leading row headers left out that are the same as above."""
    above: tuple[str, ...] = ()
    for line in lines:
        same = 0
        while line.opens and same < len(line.header) - 1 and line.header[: same + 1] == above[: same + 1]:
            same += 1
        yield replace(line, header=("",) * same + line.header[same:])
        if line.opens:
            above = line.header


def facts_line(table: Table) -> str:
    """The task that all runs share, in one line; empty if there is none. Rule and headline are in the notes."""
    return ", ".join(f"{name} {plain(value)}" for name, value in table.facts if name not in ("rule", "headline"))


def page_depth(table: Table) -> int:
    """How deep to cut so that no block is wider than a page; the innermost level is never cut."""
    depth = 0
    while depth < len(table.column_names) - 1 and max(len(block.columns) for block in blocks(table, depth)) > WIDEST:
        depth += 1
    return depth


def _lines(table: Table, row: Row, chosen: list[int]) -> Iterator[Line]:
    """A row is one line, or one each for measured, final, published and difference, without the empty ones."""
    header = row.header if row.in_paper else (*row.header[:-1], f"{row.header[-1]} {NOT_IN_PAPER}")
    columns, cells = [table.columns[i] for i in chosen], [row.cells[i] for i in chosen]
    pairs = list(zip(columns, cells, strict=True))
    if not table.compares:
        yield Line(header, tuple(_measured(column, cell) for column, cell in pairs), opens=True)
        return
    yield Line(
        (*header, "fedbench"), tuple(_measured(column, cell, counted=True) for column, cell in pairs), opens=True
    )
    below = {
        "final": [number(column, cell.final) if cell.final else "" for column, cell in pairs],
        "paper": [_published(column, cell.published) if cell.published else "" for column, cell in pairs],
        "difference": [_difference(column, cell) for column, cell in pairs],
    }
    for name, texts in below.items():
        if any(texts):
            yield Line((*("" for _ in header), name), tuple(texts), opens=False)


def number(column: Column, summary: Summary, *, counted: bool = False) -> str:
    """`94.10 ± 0.20 (3)`: mean, deviation if the column prints it, and number of seeds if asked for."""
    text = f"{summary.mean:.{column.digits}f}"
    if column.spread and summary.std is not None:
        text += f" ± {summary.std:.{column.digits}f}"
    return f"{text} ({summary.n})" if counted else text


def _measured(column: Column, cell: Cell, *, counted: bool = False) -> str:
    text = cell.text if cell.measured is None else number(column, cell.measured, counted=counted)
    marks = "".join(dict.fromkeys(SYMBOLS[mark] for mark in cell.marks))
    return f"{text} {marks}" if marks else text


def _published(column: Column, printed: Printed) -> str:
    if printed.mean is None:
        return "not legible"
    text = f"{printed.mean:.{column.digits}f}"
    if printed.std is not None:
        text += f" ± {printed.std:.{column.digits}f}"
    return f"{text} {UNCERTAIN}" if printed.uncertain else text


def _difference(column: Column, cell: Cell) -> str:
    if cell.difference is None:
        return ""
    text = f"{cell.difference:+.{column.digits}f}"
    return text if cell.agrees else f"{text} {OUTSIDE}"
