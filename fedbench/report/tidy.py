"""A table as data: one record per cell with all it holds, for programs rather than for eyes."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from fedbench.report.cells import Cell, Column, Table


def records(table: Table) -> list[dict[str, Any]]:
    """A flat record per cell: its place by name, then every field; None where there is nothing."""
    return [
        {
            **dict(table.facts),
            **dict(zip(table.row_names, row.header, strict=True)),
            **dict(zip(table.column_names, column.header, strict=True)),
            "in_paper": row.in_paper if table.compares else None,
            **_fields(column, cell),
        }
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    ]


def to_json(table: Table) -> str:
    """An object with title, notes and cells."""
    content = {"title": table.title, "notes": list(table.notes), "cells": records(table)}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def to_csv(table: Table) -> str:
    """A header line and a line per cell; empty where there is nothing."""
    out = io.StringIO()
    rows = records(table)
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "marks": " ".join(row["marks"])} for row in rows)
    return out.getvalue().rstrip("\n")


def _fields(column: Column, cell: Cell) -> dict[str, Any]:
    measured, final, published = cell.measured, cell.final, cell.published
    return {
        "unit": column.unit,
        "mean": measured.mean if measured else None,
        "std": measured.std if measured else None,
        "n": measured.n if measured else 0,
        "diverged": cell.diverged,
        "final_mean": final.mean if final else None,
        "final_std": final.std if final else None,
        "rounds": cell.rounds,
        "paper_rounds": cell.paper_rounds,
        "published_mean": published.mean if published else None,
        "published_std": published.std if published else None,
        "uncertain": published.uncertain if published else None,
        "published_note": published.note if published else None,
        "difference": cell.difference,
        "agrees": cell.agrees,
        "marks": list(cell.marks),
        "text": cell.text,
        "fill": cell.fill,
    }
