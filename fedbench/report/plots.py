"""Convergence curves: a figure per task, a panel per view, a line per method with a band over seeds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import JobSpec
from fedbench.paper import load_paper, load_published
from fedbench.queue import sweep_ids
from fedbench.report.comparison import paper_places
from fedbench.report.labels import axes, labels, method_title, place_of, plain
from fedbench.report.save import save_figure
from fedbench.report.select import Place, comparable, expected_rounds, expected_settings, newest, sort_runs
from fedbench.report.styles import style_of
from fedbench.report.units import axis_label, scale
from fedbench.store import queries

PANELS = {"pm": "personal models (PM)", "gm": "global model (GM)"}
MARKERS_PER_LINE = 8
LEGEND_HANDLE, LEGEND_LETTER = 0.65, 0.075
"""Inches that an entry of a legend takes for its line, and for each letter of its text."""


@dataclass(frozen=True)
class Line:
    """The runs of one line: a method, one run per seed."""

    label: str
    method: str
    variant: int
    done: tuple[int, ...]
    diverged: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """One figure: what its file is called, what its title says, and its lines."""

    name: str
    title: str
    lines: tuple[Line, ...]


def plot_curves(
    engine: Engine, out: Path, sweep: str | None = None, paper: str | None = None, metric: str = "accuracy"
) -> list[Path]:
    """Draw the curves of a sweep, of the runs with a paper's settings, or of all, as PNG and SVG; returns the files.

    Raises FedbenchError when there is nothing to draw, no such metric, or the folder cannot be written.
    """
    figures = curve_figures(engine, sweep, paper, metric)
    return [path for name, figure in figures for path in save_figure(figure, out, name)]


def plot_figure(engine: Engine, out: Path, paper: str, name: str) -> list[Path]:
    """Draw a figure that the paper declares, as PNG and SVG; returns the files. Raises FedbenchError as above."""
    figures = load_paper(paper).figures
    if name not in figures:
        raise FedbenchError(f"{paper} has no figure {name!r}.", did_you_mean(name, figures))
    layout = figures[name]
    if layout.grid not in sweep_ids(engine):
        raise FedbenchError(f"{layout.grid} has not been run.", f"Run: fedbench run --grid {layout.grid}")
    views = [view.lower() for view in layout.views]
    drawn = list(curve_figures(engine, layout.grid, metric=layout.metric, views=views))
    for _, figure in drawn:
        figure.suptitle(layout.title if len(drawn) == 1 else f"{layout.title}: {figure.get_suptitle()}")
        figure.axes[0].set_ylabel(layout.y_label or axis_label(layout.metric))
        if layout.log:
            figure.axes[0].set_yscale("log")
    names = [f"{paper}-{name}" if len(drawn) == 1 else f"{paper}-{name}-{inner}" for inner, _ in drawn]
    return [path for inner, (_, figure) in zip(names, drawn, strict=True) for path in save_figure(figure, out, inner)]


def curve_figures(
    engine: Engine,
    sweep: str | None = None,
    paper: str | None = None,
    metric: str = "accuracy",
    views: Sequence[str] = tuple(PANELS),
) -> Iterator[tuple[str, Figure]]:
    """The figures of `plot_curves` with the names of their files, drawn one after the other.

    A task whose runs have no such metric, as regression has no accuracy, has no figure.
    """
    runs = queries.finished_runs(engine, sweep)
    runs = runs.assign(version=[spec.version for spec in runs["spec"]]).sort_values("job")
    pictures = list(_paper_pictures(runs, paper) if paper else _pictures(runs, sweep or "all"))
    if not pictures:
        raise _nothing_to_draw(sweep, paper)
    curves = queries.curves(engine, [run for p in pictures for line in p.lines for run in (*line.done, *line.diverged)])
    curves = curves[curves["predict"] == "mean"]
    if metric not in set(curves["name"]):
        raise FedbenchError(f"no curve of {metric!r} is stored.", did_you_mean(metric, set(curves["name"])))
    chosen = curves[(curves["name"] == metric) & curves["view"].isin(views)]
    without = set(curves["run"]) - set(chosen["run"])
    curves = chosen.assign(value=lambda frame: frame["value"] * scale(metric))
    for picture in pictures:
        if not without.issuperset(run for line in picture.lines for run in (*line.done, *line.diverged)):
            yield f"{picture.name}-{metric}", draw(picture, curves, metric)


def _nothing_to_draw(sweep: str | None, paper: str | None) -> FedbenchError:
    if paper is None:
        return FedbenchError("there is no finished run to draw.", f"Run: fedbench run --grid {sweep or 'quickstart'}")
    grids = dict.fromkeys(grid for layout in load_paper(paper).tables.values() for grid in layout.grids.values())
    commands = " or ".join(f"fedbench run --grid {grid}" for grid in grids)
    return FedbenchError(f"no finished run has the settings of {paper}.", f"Run: {commands}" if commands else "")


def draw(picture: Picture, curves: pd.DataFrame, metric: str) -> Figure:
    """The figure: panels PM and GM if they exist, mean over seeds, band of one standard deviation.

    A diverged run is no part of the mean: it is a thin line that ends with a cross.
    """
    runs = {run for line in picture.lines for run in (*line.done, *line.diverged)}
    views = [view for view in PANELS if ((curves["view"] == view) & curves["run"].isin(runs)).any()]
    figure = Figure(figsize=(1.2 + 4.2 * max(1, len(views)), 4.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(views)), sharey=True, squeeze=False)[0]
    for view, panel in zip(views, panels, strict=False):
        of_view = curves[curves["view"] == view]
        for line in picture.lines:
            _draw_line(panel, line, of_view)
        panel.set_title(PANELS[view], fontsize="medium")
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
        panel.grid(visible=True, alpha=0.3, linewidth=0.5)
    panels[0].set_ylabel(axis_label(metric))
    figure.suptitle(picture.title)
    _legend(figure, picture.lines)
    return figure


def _pictures(runs: pd.DataFrame, name: str) -> Iterator[Picture]:
    """A figure per task and number of rounds. What rule picks a headline does not change a curve."""
    specs: list[JobSpec] = list(runs["spec"])
    where = [key for key in axes(specs) if key not in ("rule", "headline")]
    named = labels(specs)
    places = [place_of(spec, where) for spec in specs]
    for place in dict.fromkeys(places):
        members = [i for i in range(len(specs)) if places[i] == place]
        lines: list[Line] = []
        for label in dict.fromkeys(named[i] for i in members):
            chosen = newest(runs.iloc[[i for i in members if named[i] == label]])
            method = chosen["spec"].iloc[0].method
            variant = sum(line.method == method for line in lines)
            lines.append(_line(label.replace(method, method_title(method), 1), method, variant, chosen))
        yield _picture(name, specs[members[0]], dict(zip(where, place, strict=True)), lines)


def _paper_pictures(runs: pd.DataFrame, name: str) -> Iterator[Picture]:
    """A figure per place in the paper's tables; of every cell the runs that the table shows."""
    paper = load_paper(name)
    places: dict[Place, None] = {}
    for table, layout in paper.tables.items():
        entries = [entry for entry in load_published(name) if entry.table in (layout.entries or [table])]
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
            lines = [_line(method_title(method, name), method, 0, group) for method, group in chosen.items()]
            yield _picture(name, next(iter(chosen.values()))["spec"].iloc[0], dict(place), lines)


def _picture(name: str, spec: JobSpec, place: Mapping[str, Any], lines: Sequence[Line]) -> Picture:
    """The figure of a place: data set and size by their names, other settings as key=value."""
    size = spec.partition_params.get("size")
    parts = [spec.task.dataset, *([str(size)] if size else [])]
    others = [f"{key}={plain(value)}" for key, value in place.items() if key not in ("dataset", "size", "clients")]
    crowd = [f"clients={spec.task.clients}"] if "clients" in place else []
    file_name = "-".join(re.sub(r"[^\w.+]+", "_", part).strip("_") for part in (name, *parts, *crowd, *others))
    return Picture(file_name, ", ".join((*parts, f"{spec.task.clients} clients", *others)), tuple(lines))


def _line(label: str, method: str, variant: int, runs: pd.DataFrame) -> Line:
    done = tuple(int(run) for run in runs.loc[runs["status"] == "done", "run"])
    diverged = tuple(int(run) for run in runs.loc[runs["status"] != "done", "run"])
    return Line(label, method, variant, done, diverged)


def _draw_line(panel: Axes, line: Line, curves: pd.DataFrame) -> None:
    style = style_of(line.method, line.variant)
    for run in line.diverged:
        own = curves[curves["run"] == run].sort_values("round")
        if len(own):
            panel.plot(own["round"], own["value"], color=style.colour, linestyle=style.line, linewidth=0.7)
            panel.plot(own["round"].iloc[-1:], own["value"].iloc[-1:], color=style.colour, marker="x", linestyle="none")
    over_seeds = _over_seeds(curves, line.done)
    if over_seeds.empty:
        return
    rounds, mean, deviation = over_seeds.index.to_numpy(), over_seeds["mean"], over_seeds["std"]
    panel.plot(
        rounds,
        mean,
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markersize=5,
        markevery=marker_positions(list(rounds), style.place),
    )
    if len(line.done) > 1:
        panel.fill_between(rounds, mean - deviation, mean + deviation, color=style.colour, alpha=0.15, linewidth=0)


def marker_positions(rounds: Sequence[int], place: int) -> list[int]:
    """Which points carry a marker: evenly spread over the rounds, however densely these were scored.

    Lines of different places have their markers apart, so that both are seen where they coincide.
    """
    step = (rounds[-1] - rounds[0]) / MARKERS_PER_LINE
    wanted = [rounds[0] + (k + place % 4 / 4) * step for k in range(MARKERS_PER_LINE)]
    return sorted({min(range(len(rounds)), key=lambda i: abs(rounds[i] - round_)) for round_ in wanted})


def _over_seeds(curves: pd.DataFrame, runs: tuple[int, ...]) -> pd.DataFrame:
    """Mean and sample standard deviation at the rounds that all the seeds have scored."""
    wide = curves[curves["run"].isin(runs)].pivot(index="round", columns="run", values="value").dropna().sort_index()
    return pd.DataFrame({"mean": wide.mean(axis=1), "std": wide.std(axis=1, ddof=1)})


def _legend(figure: Figure, lines: Sequence[Line]) -> None:
    """One legend for all panels, below them: a method may be in one panel only."""
    handles = []
    for line in lines:
        style = style_of(line.method, line.variant)
        handles.append(Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5))
    texts = [_legend_text(line) for line in lines]
    longest = max(map(len, texts))
    room = int(figure.get_figwidth() / (LEGEND_HANDLE + LEGEND_LETTER * longest))
    columns = max(1, min(4 if longest <= 16 else 2, len(lines), room))
    figure.legend(handles, texts, loc="outside lower center", ncols=columns, handlelength=4, frameon=False)
    rows = -(-len(lines) // columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, rows - 2))  # the panels keep their height


def _legend_text(line: Line) -> str:
    if not line.diverged:
        return line.label
    return f"{line.label} ({len(line.diverged)} of {len(line.done) + len(line.diverged)} diverged)"
