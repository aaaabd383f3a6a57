"""Curves as data: what was scored, against rounds, bytes sent or seconds, with mean and deviation over seeds."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.paper import XAxis
from fedbench.report.units import BYTES_PER_MB, scale
from fedbench.store import queries

TRAINING = ("poll", "client", "server")
"""The phases whose seconds a method needs; scoring its models is the benchmark's own work."""


class MissingMetricError(FedbenchError):
    """None of the runs has such a curve."""


def read_curves(engine: Engine, runs: Sequence[int], metric: str, x: XAxis = "rounds") -> pd.DataFrame:
    """What these runs scored by mean prediction: run, view, round, x, value; values as they are printed.

    Raises MissingMetricError when none of them has such a metric.
    """
    curves = queries.curves(engine, list(runs))
    curves = curves[curves["predict"] == "mean"]
    if metric not in set(curves["name"]):
        raise MissingMetricError(f"no curve of {metric!r} is stored.", did_you_mean(metric, set(curves["name"])))
    curves = curves[curves["name"] == metric].sort_values(["run", "round"])
    curves = curves.assign(value=curves["value"] * scale(metric))
    if x == "rounds":
        curves = curves.assign(x=curves["round"])
    else:
        curves = curves.merge(_spent(engine, runs, x), on=["run", "round"], how="left", validate="many_to_one")
    return curves[["run", "view", "round", "x", "value"]]


def _spent(engine: Engine, runs: Sequence[int], x: XAxis) -> pd.DataFrame:
    """What a run has sent (MB, down and up, polls too) or computed (s) by the end of a round: run, round, x."""
    costs = queries.costs(engine, list(runs))
    if x == "bytes":
        costs = costs.assign(x=(costs["bytes_down"] + costs["bytes_up"]))
    else:
        costs = costs[costs["phase"].isin(TRAINING)].assign(x=costs["seconds"])
    of_round = costs.groupby(["run", "round"])["x"].sum()
    spent = of_round.groupby(level="run").cumsum()  # groups are sorted: round after round
    return (spent / BYTES_PER_MB if x == "bytes" else spent).reset_index()


def over_seeds(curves: pd.DataFrame, runs: Sequence[int], x: XAxis = "rounds") -> pd.DataFrame:
    """Mean and sample standard deviation of the runs' values of one view, by x.

    Over rounds: where all of them were scored. Over bytes or seconds their points differ: at each point of one of them
    the others have the last value that they had scored before, and after its last round a run keeps its final model.
    """
    own = curves[curves["run"].isin(runs)].drop_duplicates(["run", "x"], keep="last")  # by round: the last one counts
    wide = own.pivot(index="x", columns="run", values="value").sort_index()
    wide = (wide if x == "rounds" else wide.ffill()).dropna()
    return pd.DataFrame({"mean": wide.mean(axis=1), "std": wide.std(axis=1, ddof=1)})
