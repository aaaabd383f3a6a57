"""One method against another, or one database against another: paired over seeds, setting by setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import JobSpec
from fedbench.report.cells import Summary
from fedbench.report.curve_measures import MEASURES, Curve
from fedbench.report.curves import MissingMetricError, read_curves
from fedbench.report.labels import axes, labels
from fedbench.report.measure import CALIBRATION
from fedbench.report.rules import looks_for_best
from fedbench.report.sides import Groups, Place, Side, find_side, group, left_out, places, settings_apart, unlike
from fedbench.report.stats import Paired, Verdict, holm, paired, verdict
from fedbench.report.summary import summarise
from fedbench.report.units import scale

METRICS = {
    "headline": "the headline number of fedbench table, by the job's rule",
    "accuracy": "accuracy (%) by the job's rule, where it is the headline",
    "macro": "accuracy (%) as the mean over clients by the job's rule, where it is the headline",
    "rmse": "root mean squared error by the job's rule, where it is the headline",
    "final": "the headline metric at the last round",
    "ece": "ECE (%) of the state that the headline is of",
    "mce": "MCE (%) of the state that the headline is of",
    "brier": "Brier score of the state that the headline is of",
    "nll": "NLL of the state that the headline is of",
    "auc": "mean of the headline metric over the rounds that both were scored in (area under the curve / rounds)",
    "auc_bytes": "mean of the headline metric over the MB sent, polls too, from where both have a score to where the "
    "first of them ends (area under the steps / MB)",
    "first": "mean of the headline metric over the first 50 scored rounds, or the first half of fewer than 100",
    "last": "mean of the headline metric over the last 50 scored rounds, or the last half of fewer than 100",
    "wobble": "standard deviation of the headline metric over the last 50 scored rounds of a run, or the last half of "
    "fewer than 100: how unsteady it is, trend included",
    "mb": "MB sent, down and up, all clients and rounds",
    "seconds": "seconds of the run",
}
"""What can be compared, in words."""
SMALLER_WINS = frozenset({*CALIBRATION, "wobble", "mb", "seconds"})
"""Always; the others only where the headline is an error."""

Value = Callable[[Any, Any], tuple[float, float] | None]
"""The numbers of a pair of measured runs; None if one has none."""


@dataclass(frozen=True)
class Versus:
    """A against B in one setting."""

    place: Place
    seeds: tuple[int, ...]
    a: Summary
    b: Summary
    test: Paired
    p_holm: float | None
    smaller_wins: bool
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All settings that both have, with what a reader must know."""

    a: str
    b: str
    metric: str
    where: tuple[str, ...]
    """the settings that tell the rows apart"""
    rows: tuple[Versus, ...]
    views: tuple[str, str]
    unpaired: tuple[str, ...]
    """what was left out, a sentence each"""
    unlike: tuple[str, ...]
    """settings beyond the named ones in which A and B differ"""


def compare_methods(
    engine: Engine,
    a: str,
    b: str,
    metric: str = "headline",
    *,
    view: str | None = None,
    sweep: str | None = None,
    other: Engine | None = None,
) -> Comparison:
    """The runs that selector `a` finds against those of `b`, which may be of another database.

    Raises FedbenchError when a selector finds nothing or several methods, or when no pair has the metric.
    """
    one, two = find_side(engine, a, a, view, sweep), find_side(other or engine, b, b, view, sweep)
    if other is None and set(one.runs["run"]) & set(two.runs["run"]):
        raise FedbenchError(
            f"{a} and {b} find the same runs.", "Name a setting that tells them apart: dsvgd[selection=ksd]."
        )
    where = settings_apart(one, two)
    return _compare(one, two, where, (places(one, where), places(two, where)), metric)


def compare_databases(
    engine: Engine,
    other: Engine,
    names: tuple[str, str],
    method: str | None = None,
    metric: str = "headline",
    *,
    view: str | None = None,
    sweep: str | None = None,
) -> Comparison:
    """The same jobs, by their keys, in two databases; `names` are those of the databases."""
    one, two = (find_side(at, method, name, view, sweep) for at, name in zip((engine, other), names, strict=True))
    common = set(one.runs["key"]) & set(two.runs["key"])
    if not common:
        raise FedbenchError("the two databases have no finished job in common.", "Run the same grid in both.")
    one, two = (replace(side, runs=side.runs[side.runs["key"].isin(common)]) for side in (one, two))
    where = axes(one.specs)
    at_one, at_two = (
        [(*place, label) for place, label in zip(places(side, where), labels(side.specs), strict=True)]
        for side in (one, two)
    )
    return _compare(one, two, (*where, "method"), (at_one, at_two), metric)


def _compare(
    one: Side, two: Side, where: tuple[str, ...], at: tuple[list[Place], list[Place]], metric: str
) -> Comparison:
    of_one, of_two = group(one, at[0]), group(two, at[1])
    shared = [place for place in of_one if place in of_two]
    if not shared:
        raise FedbenchError(
            f"{one.name} and {two.name} have no setting in common: {_apart(where, of_one, of_two)}.",
            "A setting that is named in brackets may differ: fedavg[rounds=100].",
        )
    value = _reader(one, two, metric)
    drafts = []
    for place in shared:
        pairs = _pairs(of_one[place], of_two[place], value)
        if pairs:
            drafts.append((place, pairs, _smaller_wins(of_one[place]["spec"].iloc[0], metric)))
    if not drafts:
        raise FedbenchError(f"no two runs with the same seed have a {metric} to compare.", "See fedbench table.")
    return Comparison(
        one.name,
        two.name,
        metric,
        where,
        _judged(drafts),
        (one.view, two.view),
        tuple(left_out(of_one, of_two, sum(len(pairs) for _, pairs, _ in drafts))),
        unlike(one, two, of_one, of_two),
    )


def _apart(where: Sequence[str], *groups: Groups) -> str:
    """`rounds 100 against 50`: the first setting that keeps all rows apart."""
    for i, key in enumerate(where):
        values = [list(dict.fromkeys(place[i] for place in group)) for group in groups]
        if not set(values[0]) & set(values[1]):
            return f"{key} {', '.join(values[0])} against {', '.join(values[1])}"
    return f"they differ in {', '.join(where)}"


def _pairs(a: pd.DataFrame, b: pd.DataFrame, value: Value) -> dict[int, tuple[float, float]]:
    """seed -> the numbers of A and B."""
    of_b = {run.seed: run for run in b.itertuples() if run.status == "done"}
    found = {}
    for run in a.itertuples():
        if run.status == "done" and run.seed in of_b and (numbers := value(run, of_b[run.seed])) is not None:
            found[int(run.seed)] = numbers
    return found


def _reader(one: Side, two: Side, metric: str) -> Value:
    """What reads the metric of a pair of runs."""
    if metric not in METRICS:
        raise FedbenchError(f"unknown metric {metric!r}.", did_you_mean(metric, METRICS))
    if metric in MEASURES:
        of_one, of_two = _curves(one), _curves(two)

        def from_curves(a: Any, b: Any) -> tuple[float, float] | None:
            return MEASURES[metric](of_one[a.run], of_two[b.run]) if a.run in of_one and b.run in of_two else None

        return from_curves

    def from_figures(a: Any, b: Any) -> tuple[float, float] | None:
        numbers = _figure(a, one.view, metric), _figure(b, two.view, metric)
        return None if any(map(math.isnan, numbers)) else numbers

    return from_figures


def _figure(run: Any, view: str, metric: str) -> float:
    if metric in ("mb", "seconds"):
        return float(getattr(run, metric))
    if metric in CALIBRATION:
        stage = "" if looks_for_best(run.rule) else "final_"
        return float(getattr(run, f"{view}_{stage}{metric}")) * scale(metric)
    if metric not in ("headline", "final", run.headline):
        return math.nan
    return float(getattr(run, f"{view}_{'final' if metric == 'final' else 'value'}")) * scale(run.headline)


def _curves(side: Side) -> dict[int, Curve]:
    """Every run's curve of its own headline metric."""
    found = {}
    for headline, runs in side.runs.groupby("headline"):
        try:
            points = read_curves(side.engine, [int(run) for run in runs["run"]], str(headline), "bytes")
        except MissingMetricError:
            continue
        for run, own in points[points["view"] == side.view].groupby("run"):
            found[int(run)] = Curve(own["round"].to_numpy(), own["x"].to_numpy(float), own["value"].to_numpy(float))
    return found


def _smaller_wins(spec: JobSpec, metric: str) -> bool:
    return metric in SMALLER_WINS or spec.protocol.smaller_wins


def _judged(drafts: Sequence[tuple[Place, dict[int, tuple[float, float]], bool]]) -> tuple[Versus, ...]:
    """Every setting's test, corrected for all of them, and verdict."""
    columns = [np.array([pairs[seed] for seed in sorted(pairs)]).T for _, pairs, _ in drafts]
    tests = [paired(a, b) for a, b in columns]
    corrected = holm([test.p for test in tests])
    return tuple(
        Versus(
            place,
            tuple(sorted(pairs)),
            _summary(a),
            _summary(b),
            test,
            p,
            smaller,
            verdict(test, p, smaller_wins=smaller),
        )
        for (place, pairs, smaller), (a, b), test, p in zip(drafts, columns, tests, corrected, strict=True)
    )


def _summary(values: Any) -> Summary:
    found = summarise(values)
    assert found is not None  # a setting without pairs is not judged
    return found
