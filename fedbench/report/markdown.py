"""A table as GitHub Markdown, aligned so that the source can be read too."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench.report.cells import Table
from fedbench.report.picture import Block, blocks, facts_line, page_depth


def to_markdown(table: Table) -> str:
    """The table under its title, with a heading per block and the notes as a list."""
    parts = [f"### {_escape(table.title)}", *([_escape(facts_line(table))] if table.facts else [])]
    for block in blocks(table, page_depth(table)):
        if block.heading:
            parts.append(f"#### {_escape(block.heading)}")
        parts.append(_block(block))
    if table.notes:
        parts.append("\n".join(f"- {_escape(note)}" for note in table.notes))
    return "\n\n".join(parts)


def _block(block: Block) -> str:
    header = [*block.names, *(" ".join(column) for column in block.columns)]
    body = [[*line.header, *line.cells] for line in block.lines]
    rows = [[_escape(text) for text in row] for row in [header, *body]]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(header))]
    stub = len(block.names)
    rule = ["-" * width if i < stub else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(_line(row, widths, stub) for row in [rows[0], rule, *rows[1:]])


def _line(row: Sequence[str], widths: Sequence[int], stub: int) -> str:
    padded = [
        text.ljust(width) if i < stub else text.rjust(width)
        for i, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def _escape(text: str) -> str:
    """Underscores inside words and brackets without an address need no escape."""
    for character in ("\\", "|", "*", "<"):
        text = text.replace(character, f"\\{character}")
    return text
