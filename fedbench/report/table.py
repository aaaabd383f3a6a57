"""The tables that fedbench renders: what a database holds, and a paper's tables beside it."""

from __future__ import annotations

from fedbench.report.cells import Cell, Column, Printed, Row, Summary, Table
from fedbench.report.comparison import paper_table
from fedbench.report.results import results_table

__all__ = ["Cell", "Column", "Printed", "Row", "Summary", "Table", "paper_table", "results_table"]
