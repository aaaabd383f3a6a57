"""A table for the terminal: cut into as many blocks as the width asks for."""

from __future__ import annotations

import io
from collections.abc import Callable

import rich.table
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.text import Text

from fedbench.report.cells import Table
from fedbench.report.picture import Block, blocks, facts_line, halves, without_repeats

TEXT_WIDTH = 120
"""Columns of the plain text that goes into a file."""


class TerminalTable:
    """Prints itself with rich: title, the widest cut that fits the terminal, notes."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.table.title, style="bold")
        if self.table.facts:
            yield Text(facts_line(self.table), style="dim")
        for block, drawn in self._fitting(console, options):
            yield Text(f"\n{block.heading}" if block.heading else "", style="bold")
            yield drawn
        yield Text()
        for note in self.table.notes:
            yield Padding(Text(note, style="dim"), (0, 0, 0, 1))

    def _fitting(self, console: Console, options: ConsoleOptions) -> list[tuple[Block, rich.table.Table]]:
        """The first way to draw that fits: in one piece, cut by headers, deviations under means, cut anywhere."""
        unlimited = options.update(width=10_000)

        def fits(block: Block, *, stacked: bool = False) -> bool:
            drawn = _draw(block, stacked=stacked)
            return Measurement.get(console, unlimited, drawn).maximum <= options.max_width

        for depth in range(len(self.table.column_names)):
            cut = blocks(self.table, depth)
            if all(map(fits, cut)):
                return [(block, _draw(block)) for block in cut]
        if all(fits(block, stacked=True) for block in cut):
            return [(block, _draw(block, stacked=True)) for block in cut]
        return [(part, _draw(part)) for block in cut for part in _narrowed(block, fits)]


def _narrowed(block: Block, fits: Callable[[Block], bool]) -> list[Block]:
    """The block in as many parts as it takes; a single column is left as it is."""
    if len(block.columns) == 1 or fits(block):
        return [block]
    return [part for half in halves(block) for part in _narrowed(half, fits)]


def to_text(table: Table) -> str:
    """The same without colour, for a file."""
    out = io.StringIO()
    Console(file=out, width=TEXT_WIDTH, color_system=None, force_terminal=False).print(TerminalTable(table))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _draw(block: Block, *, stacked: bool = False) -> rich.table.Table:
    # Text, not strings: the brackets of `fedprox[mu=0.01]` are not markup.
    drawn = rich.table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name in block.names:
        drawn.add_column(Text(name), no_wrap=True)
    for column in block.columns:
        drawn.add_column(Text("\n".join(" ".join(column).split())), justify="right", overflow="fold")
    tall = any(not line.opens for line in block.lines)
    for index, line in enumerate(without_repeats(block.lines)):
        if line.opens and tall and index:
            drawn.add_section()
        cells = [cell.replace(" ±", "\n±") for cell in line.cells] if stacked else line.cells
        drawn.add_row(*(Text(text) for text in (*line.header, *cells)), style="" if line.opens else "dim")
    return drawn
