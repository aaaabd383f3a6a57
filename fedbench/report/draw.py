"""Draws pictures of curves: panels, a line per method or variant with a band over seeds, one legend for all."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedbench.paper import XAxis
from fedbench.report.curves import over_seeds
from fedbench.report.styles import Style
from fedbench.report.units import axis_label

X_LABELS: dict[XAxis, str] = {
    "rounds": "round",
    "bytes": "sent down and up, all clients (MB)",
    "seconds": "computing time of clients and server (s)",
}
COLUMNS = 2
STRETCH = 10
"""Lines of a panel whose ends are so many times apart in bytes or seconds need a logarithmic axis."""
MARKERS_PER_LINE = 8
DENSE = 150
"""Points from which on a line is thinner: swings from round to round would fill the panel."""
NOTE_WIDTH = 62
"""Letters in a line of a panel's note."""
LEGEND_HANDLE, LEGEND_LETTER = 0.65, 0.075
"""Inches that an entry of a legend takes for its line, and for each letter of its text."""


@dataclass(frozen=True)
class Line:
    """The runs of one line, one per seed."""

    label: str
    style: Style
    done: tuple[int, ...]
    diverged: tuple[int, ...]

    @property
    def runs(self) -> tuple[int, ...]:
        return (*self.done, *self.diverged)


@dataclass(frozen=True)
class Panel:
    """Lines under one view (pm or gm), with what must be known of their runs; without lines: `note` alone."""

    title: str
    view: str
    lines: tuple[Line, ...]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """One figure: what its file is called, what its title and axes say, and its panels."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    metric: str = "accuracy"
    x: XAxis = "rounds"
    y_label: str = ""
    log: bool = False

    @property
    def runs(self) -> set[int]:
        return {run for panel in self.panels for line in panel.lines for run in line.runs}


def draw(picture: Picture, curves: pd.DataFrame) -> Figure:
    """The figure: mean over seeds, band of one standard deviation; the panels of a row share their y axis.

    A diverged run is no part of the mean: it is a thin line that ends with a cross.
    """
    columns = min(COLUMNS, len(picture.panels))
    rows = math.ceil(len(picture.panels) / columns)
    figure = Figure(figsize=(1.2 + 4.2 * columns, 0.6 + 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, sharey="row", squeeze=False).flat)
    stretched = picture.x != "rounds" and any(_ends_far_apart(panel, curves) for panel in picture.panels)
    for position, (panel, field) in enumerate(zip(picture.panels, axes, strict=False)):
        if stretched:
            field.set_xscale("log")
        if picture.log:
            field.set_yscale("log")
        _draw_panel(field, panel, curves[curves["view"] == panel.view], picture.x)
        if position % columns == 0:
            field.set_ylabel(picture.y_label or axis_label(picture.metric))
    for field in axes[len(picture.panels) :]:
        field.remove()
    figure.suptitle(picture.title)
    _legend(figure, picture, curves)
    return figure


def _ends_far_apart(panel: Panel, curves: pd.DataFrame) -> bool:
    """Whether the longest line would press the shortest against the y axis; one that never moves does not count."""
    runs = [run for line in panel.lines for run in line.done]
    ends = curves[curves["run"].isin(runs)].groupby("run")["x"].max()
    moving = ends[ends > 0]
    return len(moving) > 0 and bool(moving.max() >= STRETCH * moving.min())


def _draw_panel(field: Axes, panel: Panel, curves: pd.DataFrame, x: XAxis) -> None:
    note = textwrap.fill(panel.note, NOTE_WIDTH)
    if not panel.lines:
        field.set_title(panel.title, fontsize="medium")
        field.text(0.5, 0.5, note, transform=field.transAxes, ha="center", va="center", fontsize="small")
        field.set_axis_off()
        return
    for line in panel.lines:
        _draw_line(field, line, curves, x)
    field.set_title(panel.title, fontsize="medium", pad=6 + 11 * len(note.splitlines()))
    if note:
        field.annotate(
            note, (0.5, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", ha="center", fontsize="small"
        )
    field.set_xlabel(X_LABELS[x])
    if x == "rounds":
        field.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    field.grid(visible=True, alpha=0.3, linewidth=0.5)


def _draw_line(field: Axes, line: Line, curves: pd.DataFrame, x: XAxis) -> None:
    style = line.style
    for run in line.diverged:
        own = curves[curves["run"] == run]
        if len(own):
            field.plot(own["x"], own["value"], color=style.colour, linestyle=style.line, linewidth=0.7)
            field.plot(own["x"].iloc[-1:], own["value"].iloc[-1:], color=style.colour, marker="x", linestyle="none")
    found = over_seeds(curves, line.done, x)
    if x == "bytes" and list(found.index) == [0]:
        _draw_level(field, style, float(found["mean"].iloc[0]), float(found["std"].iloc[0]))
        return
    stretched = field.get_xscale() == "log"
    found = found[found.index > 0] if stretched else found
    if found.empty:
        return
    where, mean, deviation = list(found.index), found["mean"], found["std"]
    field.plot(
        where,
        mean,
        color=style.colour,
        linestyle=style.line,
        linewidth=1.5 if len(where) <= DENSE else 0.9,
        marker=style.marker,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        markevery=marker_positions([math.log(at) for at in where] if stretched else where, style.place),
    )
    if len(line.done) > 1:
        field.fill_between(where, mean - deviation, mean + deviation, color=style.colour, alpha=0.15, linewidth=0)


def _draw_level(field: Axes, style: Style, mean: float, deviation: float) -> None:
    """A method that sends nothing: it has its final value whatever the others send. One seed has no deviation."""
    field.axhline(mean, color=style.colour, linestyle=style.line)
    if not math.isnan(deviation):
        field.axhspan(mean - deviation, mean + deviation, color=style.colour, alpha=0.15, linewidth=0)


def marker_positions(where: Sequence[float], place: int) -> list[int]:
    """Which points carry a marker: evenly spread over the axis, however densely these were scored.

    Lines of different places have their markers apart, so that both are seen where they coincide.
    """
    step = (where[-1] - where[0]) / MARKERS_PER_LINE
    wanted = [where[0] + (k + place % 4 / 4) * step for k in range(MARKERS_PER_LINE)]
    return sorted({min(range(len(where)), key=lambda i: abs(where[i] - x)) for x in wanted})


def _legend(figure: Figure, picture: Picture, curves: pd.DataFrame) -> None:
    """One legend for all panels, below them: a line may be in one panel only."""
    scored = {view: {*of_view["run"]} for view, of_view in curves.groupby("view")}
    lines = [(panel.view, line) for panel in picture.panels for line in panel.lines]
    seen = {line.label for view, line in lines if scored.get(view, set()) & {*line.runs}}
    drawn = {line.label: line.style for _, line in lines if line.label in seen}
    handles = [
        Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5)
        for style in drawn.values()
    ]
    longest = max(map(len, drawn))
    room = int(figure.get_figwidth() / (LEGEND_HANDLE + LEGEND_LETTER * longest))
    columns = max(1, min(4 if longest <= 16 else 2, len(drawn), room))
    figure.legend(handles, list(drawn), loc="outside lower center", ncols=columns, handlelength=4, frameon=False)
    rows = -(-len(drawn) // columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, rows - 2))  # the panels keep their height
