"""From the measured runs of one cell to the cell: mean and deviation over seeds, and what became of the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import pandas as pd

from fedbench.report.cells import Cell, Summary
from fedbench.report.measure import VIEWS

NO_VIEW = "-"


def summarise(values: Iterable[float]) -> Summary | None:
    """Mean and sample standard deviation of the values that are there; None if none is."""
    there = [float(value) for value in values if not math.isnan(value)]
    if not there:
        return None
    return Summary(statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None, len(there))


def has_view(runs: pd.DataFrame, view: str) -> bool:
    """Whether the method has this model. Runs that diverged before anything was scored cannot say: then it may."""
    return bool(runs[f"{view}_has"].any()) or not any(runs[f"{other}_has"].any() for other in VIEWS)


def figure(runs: pd.DataFrame, view: str, name: str, factor: float) -> Cell:
    """The cell of one figure of one view: over the seeds that finished; a text if there is nothing to average."""
    if not has_view(runs, view):
        return Cell(text=NO_VIEW)
    diverged = int((runs["status"] == "diverged").sum())
    measured = summarise(runs[f"{view}_{name}"] * factor)
    if measured is None:
        return Cell(text="diverged" if diverged else "not measured", diverged=diverged)
    return Cell(measured=measured, diverged=diverged, marks=("diverged",) if diverged else ())


def cost(runs: pd.DataFrame, name: str) -> Cell:
    """The cell of a cost: over the seeds that finished; of those that diverged only if none did."""
    finished = runs[runs["status"] == "done"]
    if len(finished):
        return Cell(measured=summarise(finished[name]))
    return Cell(measured=summarise(runs[name]), marks=("diverged",), diverged=len(runs))
