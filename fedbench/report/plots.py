"""Convergence curves: a figure per task, a panel per view, a line per method with a band over seeds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from sqlalchemy import Engine

from fedbench.errors import FedbenchError
from fedbench.job import JobSpec
from fedbench.paper import Paper, XAxis, load_published
from fedbench.report.comparison import paper_places
from fedbench.report.curves import read_curves
from fedbench.report.draw import Line, Panel, Picture, draw
from fedbench.report.labels import axes, labels, method_title, place_of, plain
from fedbench.report.save import save_figure
from fedbench.report.select import Place, comparable, expected_rounds, expected_settings, newest, sort_runs
from fedbench.report.styles import Style, style_of
from fedbench.store import queries

PANELS = {"pm": "personal models (PM)", "gm": "global model (GM)"}


@dataclass(frozen=True)
class Task:
    """What becomes a picture: the runs on one task, and how it is called."""

    name: str
    title: str
    lines: tuple[Line, ...]

    def picture(self, curves: pd.DataFrame, metric: str, x: XAxis) -> Picture:
        """A panel per view that was scored; none if no run has these curves."""
        runs = {run for line in self.lines for run in line.runs}
        scored = set(curves.loc[curves["run"].isin(runs), "view"])
        panels = tuple(Panel(title, view, self.lines) for view, title in PANELS.items() if view in scored)
        name = f"{self.name}-{metric}" + ("" if x == "rounds" else f"-{x}")
        return Picture(name, self.title, panels, metric, x)


def plot_curves(
    engine: Engine, out: Path, sweep: str | None = None, metric: str = "accuracy", x: XAxis = "rounds"
) -> list[Path]:
    """Draw the curves of a sweep, or of all runs, as PNG and SVG; returns the files.

    Raises FedbenchError when there is nothing to draw, no such metric, or the folder cannot be written.
    """
    figures = curve_figures(engine, sweep, metric, x)
    return [path for name, figure in figures for path in save_figure(figure, out, name)]


def curve_figures(
    engine: Engine, sweep: str | None = None, metric: str = "accuracy", x: XAxis = "rounds"
) -> Iterator[tuple[str, Figure]]:
    """The figures of `plot_curves` with the names of their files, drawn one after the other."""
    tasks = list(_tasks(finished(engine, sweep), sweep or "all"))
    if not tasks:
        raise FedbenchError("there is no finished run to draw.", f"Run: fedbench run --grid {sweep or 'quickstart'}")
    yield from _figures(engine, tasks, metric, x)


def table_figures(
    engine: Engine, paper: Paper, runs: pd.DataFrame, metric: str = "accuracy", x: XAxis = "rounds"
) -> Iterator[tuple[str, Figure]]:
    """The same for the places of the paper's tables; nothing where no run has the paper's settings."""
    if tasks := list(_tasks_of_tables(runs, paper)):
        yield from _figures(engine, tasks, metric, x)


def finished(engine: Engine, sweep: str | None = None) -> pd.DataFrame:
    """The finished runs, of the sweep or of all, in the order of the queue, with their methods' versions."""
    runs = queries.finished_runs(engine, sweep)
    return runs.assign(version=[spec.version for spec in runs["spec"]]).sort_values("job")


def line_of(chosen: pd.DataFrame, label: str, style: Style) -> Line:
    """The line of these runs."""
    done = tuple(int(run) for run in chosen.loc[chosen["status"] == "done", "run"])
    diverged = tuple(int(run) for run in chosen.loc[chosen["status"] != "done", "run"])
    return Line(label, style, done, diverged)


def _figures(engine: Engine, tasks: Sequence[Task], metric: str, x: XAxis) -> Iterator[tuple[str, Figure]]:
    """A task whose runs have no such metric, as regression has no accuracy, has no figure."""
    curves = read_curves(engine, [run for task in tasks for line in task.lines for run in line.runs], metric, x)
    for task in tasks:
        picture = task.picture(curves, metric, x)
        if picture.panels:
            yield picture.name, draw(picture, curves)


def _tasks(runs: pd.DataFrame, name: str) -> Iterator[Task]:
    """A figure per task and number of rounds. What rule picks a headline does not change a curve."""
    specs: list[JobSpec] = list(runs["spec"])
    where = [key for key in axes(specs) if key not in ("rule", "headline")]
    named = labels(specs)
    places = [place_of(spec, where) for spec in specs]
    for place in dict.fromkeys(places):
        members = [i for i in range(len(specs)) if places[i] == place]
        lines: list[Line] = []
        variants: dict[str, int] = {}
        for label in dict.fromkeys(named[i] for i in members):
            chosen = newest(runs.iloc[[i for i in members if named[i] == label]])
            method = chosen["spec"].iloc[0].method
            style = style_of(method, variants.setdefault(method, 0))
            variants[method] += 1
            lines.append(_line(label.replace(method, method_title(method), 1), style, chosen))
        yield _task(name, specs[members[0]], dict(zip(where, place, strict=True)), lines)


def _tasks_of_tables(runs: pd.DataFrame, paper: Paper) -> Iterator[Task]:
    """A figure per place in the paper's tables; of every cell the runs that the table shows."""
    places: dict[Place, None] = {}
    for table, layout in paper.tables.items():
        entries = [entry for entry in load_published(paper.name) if entry.table in (layout.entries or [table])]
        places |= dict.fromkeys(paper_places(paper, layout, entries))
    found = sort_runs(dict(zip(runs["run"], runs["spec"], strict=True)), paper, list(places))
    for place in places:
        chosen = {
            method: comparable(
                runs[runs["run"].isin(members)], expected_rounds(expected_settings(paper, method, dict(place)))
            )
            for (method, where), members in found.cells.items()
            if where == place
        }
        if chosen:
            lines = [
                _line(method_title(method, paper.name), style_of(method), group) for method, group in chosen.items()
            ]
            yield _task(paper.name, next(iter(chosen.values()))["spec"].iloc[0], dict(place), lines)


def _task(name: str, spec: JobSpec, place: Mapping[str, Any], lines: Sequence[Line]) -> Task:
    """The runs at a place: data set and size by their names, other settings as key=value."""
    size = spec.partition_params.get("size")
    parts = [spec.task.dataset, *([str(size)] if size else [])]
    others = [f"{key}={plain(value)}" for key, value in place.items() if key not in ("dataset", "size", "clients")]
    crowd = [f"clients={spec.task.clients}"] if "clients" in place else []
    file_name = "-".join(re.sub(r"[^\w.+]+", "_", part).strip("_") for part in (name, *parts, *crowd, *others))
    return Task(file_name, ", ".join((*parts, f"{spec.task.clients} clients", *others)), tuple(lines))


def _line(label: str, style: Style, runs: pd.DataFrame) -> Line:
    """The line of these runs; its label says how many of them diverged."""
    line = line_of(runs, label, style)
    if not line.diverged:
        return line
    return replace(line, label=f"{label} ({len(line.diverged)} of {len(line.runs)} diverged)")
