"""Renders a table in the format that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.report.cells import Table
from fedbench.report.latex import to_latex
from fedbench.report.markdown import to_markdown
from fedbench.report.terminal import TerminalTable, to_text
from fedbench.report.tidy import to_csv, to_json

FORMATS: dict[str, Callable[[Table], str]] = {
    "rich": to_text,
    "md": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
    "json": to_json,
}


def render(table: Table, format_: str) -> str:
    """The table as text, without a newline at the end. Raises FedbenchError for an unknown format."""
    if format_ not in FORMATS:
        raise FedbenchError(f"unknown format {format_!r}.", did_you_mean(format_, FORMATS))
    return FORMATS[format_](table)


def render_to_terminal(table: Table, console: Console) -> None:
    """Print the table, with colour if the console has it."""
    console.print(TerminalTable(table))
