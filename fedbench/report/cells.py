"""A table, whatever the format: headers, cells that keep what they are made of, and notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Mark = Literal["partial", "longer", "diverged"]


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over n seeds; one seed has no deviation."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Printed:
    """What the paper prints; mean None is not legible, uncertain is shown and never compared."""

    mean: float | None
    std: float | None = None
    uncertain: bool = False
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """Measured and published figures of one place in a table, in the column's unit; or a text why there is none."""

    measured: Summary | None = None
    final: Summary | None = None
    """the last round's figure, where the measured one is of another round"""
    published: Printed | None = None
    difference: float | None = None
    """measured - published, where the two may be compared"""
    agrees: bool | None = None
    """whether the difference is within the tolerance"""
    rounds: int | None = None
    paper_rounds: int | None = None
    diverged: int = 0
    """how many seeds diverged; they are not in the mean"""
    marks: tuple[Mark, ...] = ()
    text: str = ""
    fill: str = ""
    """the command that fills the cell"""


@dataclass(frozen=True)
class Column:
    """A column: its header, outermost first, and how its numbers are printed."""

    header: tuple[str, ...]
    unit: str
    digits: int = 2
    spread: bool = True
    """whether the standard deviation is printed; it is always in the data"""


@dataclass(frozen=True)
class Row:
    """A row: its header and a cell per column."""

    header: tuple[str, ...]
    cells: tuple[Cell, ...]
    in_paper: bool = True


@dataclass(frozen=True)
class Table:
    """Rows and columns with their names, and notes. `compares`: published numbers stand beside the measured ones."""

    title: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    facts: tuple[tuple[str, Any], ...] = ()
    """settings that all its runs share"""
    notes: tuple[str, ...] = ()
    compares: bool = False
