"""The figures that a paper declares: which runs belong to a panel, and what must be said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.grid import Grid, load_grid, matches, merge_layers
from fedbench.job import JobSpec
from fedbench.paper import FigureLayout, PanelLayout, Paper, XAxis, load_paper
from fedbench.report.curves import MissingMetricError, read_curves
from fedbench.report.draw import Line, Panel, Picture, draw
from fedbench.report.labels import method_title, plain
from fedbench.report.plots import finished, line_of, table_figures
from fedbench.report.save import save_figure
from fedbench.report.select import comparable, differences, expected_rounds, expected_settings
from fedbench.report.styles import Style, style_at, style_of


@dataclass(frozen=True)
class Drawn:
    """The files that were written, and what is missing in them with the way to fill it."""

    paths: list[Path]
    missing: list[str]


@dataclass(frozen=True)
class LineLayout:
    """A line that a figure wants: its name, its look, and the settings of its runs."""

    label: str
    style: Style
    pattern: Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """A line with its runs, and the rounds that they have and should have."""

    line: Line
    rounds: int
    expected: int | None


def plot_paper(
    engine: Engine,
    out: Path,
    paper: str,
    figure: str | None = None,
    sweep: str | None = None,
    metric: str | None = None,
    x: XAxis | None = None,
) -> Drawn:
    """Draw the figures that the paper declares and the curves of its tables, or one declared figure, as PNG and SVG.

    `metric` and `x` replace what the figures declare. Raises FedbenchError when there is no such figure, nothing to
    draw, or the folder cannot be written.
    """
    known = load_paper(paper)
    if figure is not None and figure not in known.figures:
        raise FedbenchError(f"{paper} has no figure {figure!r}.", did_you_mean(figure, known.figures))
    runs = finished(engine, sweep)
    pictures = {
        name: declared_picture(known, name, runs, metric, x) for name in ([figure] if figure else known.figures)
    }
    drawn = Drawn([], [gap for name, picture in pictures.items() for gap in _gaps(known, name, picture)])
    sources = {name: _figure(engine, picture) for name, picture in pictures.items()}
    if figure is None:
        sources["tables"] = table_figures(engine, known, runs, metric or "accuracy", x or "rounds")
    lacking: list[MissingMetricError] = []
    for name, figures in sources.items():
        try:
            drawn.paths.extend(path for file, made in figures for path in save_figure(made, out, file))
        except MissingMetricError as error:  # another figure may have it
            lacking.append(error)
            drawn.missing.append(f"{name}: {error.message}")
    if not drawn.paths:
        raise lacking[0] if lacking else _nothing_to_draw(known, figure)
    return drawn


def declared_picture(
    paper: Paper, name: str, runs: pd.DataFrame, metric: str | None = None, x: XAxis | None = None
) -> Picture:
    """The figure with the runs that have its settings; other metrics and axes than its own are in the file's name."""
    layout = paper.figures[name]
    other_metric, other_x = metric not in (None, layout.metric), x not in (None, layout.x)
    return Picture(
        "-".join([paper.name, name, *([str(metric)] if other_metric else []), *([str(x)] if other_x else [])]),
        layout.title,
        tuple(_panel(paper, layout, panel, runs) for panel in layout.panels),
        metric or layout.metric,
        x or layout.x,
        "" if other_metric else layout.y_label,
        layout.log and not other_metric,
    )


def settings_of(spec: JobSpec, paper: Paper, grid: Grid, pattern: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the paper and its grid give to a line, if the run has these settings, whoever asked for it; else None.

    It may have another number of rounds. A smoke test has other data, so that it never belongs to a line.
    """
    settings = spec.settings
    if not matches(pattern, settings):
        return None
    own = {key: settings[key] for key in pattern}
    overrides = [override.set for override in grid.overrides if matches(override.match, settings)]
    for task in grid.tasks:
        expected = expected_settings(paper, spec.method, merge_layers(grid.set, task, own, *overrides))
        if not differences(spec, expected):
            return expected
    return None


def _panel(paper: Paper, layout: FigureLayout, panel: PanelLayout, runs: pd.DataFrame) -> Panel:
    grid = load_grid(panel.grid)
    wanted = _lines(paper, layout, grid)
    found = {line.label: _shown(paper, grid, panel, line, runs) for line in wanted}
    shown = [line for line in found.values() if line]
    missing = [label for label, line in found.items() if not line]
    note = "; ".join(_facts(shown, missing)) if shown else f"not run yet: fedbench run --grid {panel.grid}"
    return Panel(panel.title, panel.view.lower(), tuple(line.line for line in shown), note)


def _lines(paper: Paper, layout: FigureLayout, grid: Grid) -> list[LineLayout]:
    """The lines that the figure names, or one per method of the grid."""
    places = list(paper.lines)
    if layout.lines:
        return [LineLayout(name, style_at(places.index(name)), paper.lines[name]) for name in layout.lines]
    found, variants = [], dict.fromkeys((entry.name for entry in grid.methods), 0)
    for entry in grid.methods:
        inner = ",".join(f"{key}={plain(value)}" for key, value in entry.settings.items())
        label = method_title(entry.name, paper.name) + (f"[{inner}]" if inner else "")
        pattern = {"method": entry.name, **entry.settings}
        found.append(LineLayout(label, style_of(entry.name, variants[entry.name]), pattern))
        variants[entry.name] += 1
    return found


def _shown(paper: Paper, grid: Grid, panel: PanelLayout, line: LineLayout, runs: pd.DataFrame) -> Shown | None:
    """The newest runs of the line: of the paper's rounds if there are such, else the longest."""
    pattern = {**panel.match, **line.pattern}
    given = {run: settings_of(spec, paper, grid, pattern) for run, spec in zip(runs["run"], runs["spec"], strict=True)}
    expected = {run: settings for run, settings in given.items() if settings is not None}
    if not expected:
        return None
    rounds = expected_rounds(next(iter(expected.values())))
    chosen = comparable(runs[runs["run"].isin(expected)], rounds)
    return Shown(line_of(chosen, line.label, line.style), int(chosen["rounds"].iloc[0]), rounds)


def _facts(shown: Sequence[Shown], missing: Sequence[str]) -> Iterator[str]:
    """What a reader must know of a panel's runs: seeds, rounds if not the paper's, what diverged, what is not there."""
    seeds = sorted({len(one.line.runs) for one in shown})
    yield f"{' to '.join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))} seed{'s' if seeds[-1] > 1 else ''}"
    lengths: dict[tuple[int, int | None], list[str]] = {}
    for one in shown:
        lengths.setdefault((one.rounds, one.expected), []).append(one.line.label)
    for (rounds, expected), labels in lengths.items():
        if expected not in (None, rounds):
            who = f"{', '.join(labels)}: " if len(lengths) > 1 else ""
            yield f"{who}{rounds} of {expected} rounds"
    for one in shown:
        if one.line.diverged:
            yield f"{one.line.label}: {len(one.line.diverged)} of {len(one.line.runs)} diverged"
    if missing:
        yield f"no runs of {', '.join(missing)}"


def _gaps(paper: Paper, name: str, picture: Picture) -> Iterator[str]:
    """A line per panel that lacks runs, with the command that fills it."""
    layout = paper.figures[name]
    for declared, panel in zip(layout.panels, picture.panels, strict=True):
        wanted = len(layout.lines) or len(load_grid(declared.grid).methods)
        if len(panel.lines) < wanted:
            what = f"runs of {len(panel.lines)} of {wanted} lines" if panel.lines else "no runs"
            yield f"{name}, {declared.title}: {what}. To fill it: fedbench run --grid {declared.grid}"


def _figure(engine: Engine, picture: Picture) -> Iterator[tuple[str, Figure]]:
    """The figure with the name of its file; nothing if there are no runs for it."""
    if picture.runs:
        curves = read_curves(engine, sorted(picture.runs), picture.metric, picture.x)
        if not curves["view"].isin([panel.view for panel in picture.panels]).any():
            raise MissingMetricError(f"no curve of {picture.metric!r} is stored for the views of this figure.")
        yield picture.name, draw(picture, curves)


def _nothing_to_draw(paper: Paper, figure: str | None) -> FedbenchError:
    figures = [paper.figures[figure]] if figure else list(paper.figures.values())
    of_figures = [panel.grid for layout in figures for panel in layout.panels]
    of_tables = [] if figure else [grid for layout in paper.tables.values() for grid in layout.grids.values()]
    commands = " or ".join(f"fedbench run --grid {grid}" for grid in dict.fromkeys([*of_tables, *of_figures]))
    what = f"figure {figure} of {paper.name}" if figure else paper.name
    return FedbenchError(f"no finished run has the settings of {what}.", f"Run: {commands}" if commands else "")
