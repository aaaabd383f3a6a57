"""What every run measured, in one row: headline and final figure, calibration, bytes and seconds, as fractions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from sqlalchemy import Engine

from fedbench.job import JobSpec
from fedbench.report.labels import labels
from fedbench.report.rules import apply_rule
from fedbench.report.units import BYTES_PER_MB
from fedbench.store import queries

VIEWS = ("pm", "gm")
CALIBRATION = ("ece", "mce", "brier", "nll")
FACTS = (
    *("run", "job", "key", "spec", "method", "version", "label", "dataset", "size", "seed", "rounds"),
    *("rule", "headline", "status", "last_round"),
)
PER_VIEW = ("has", "value", "rounds", "final", *CALIBRATION, *(f"final_{name}" for name in CALIBRATION))
COLUMNS = (*FACTS, *(f"{view}_{name}" for view in VIEWS for name in PER_VIEW), "mb", "seconds")

Curves = Mapping[tuple[int, str, str], Mapping[int, float]]
"""(run, view, metric) -> round -> value"""
Figures = Mapping[tuple[int, str, str, str], Mapping[str, float]]
"""(run, view, stage, predict) -> metric -> value"""


def measure(engine: Engine, runs: pd.DataFrame) -> pd.DataFrame:
    """One row per run of `queries.finished_runs`, in the order of the queue; columns are COLUMNS.

    Per view: has (it was ever scored), value (the job's rule on the job's headline metric), rounds (where from), final
    (the same metric at the last round), and ECE, MCE, Brier, NLL at the best round and, as final_ece and so on, at the
    last; by MC prediction where the run has it. Personal models that clients adapt after training (`adapt_epochs`) are
    the PM of a run that has them. A diverged run has a cost but no value; what is missing is NaN.
    """
    ids = [int(run) for run in runs["run"]]
    headlines = {spec.protocol.headline for spec in runs["spec"]}
    curves, figures, sent = _curves(engine, ids, headlines), _figures(engine, ids), _megabytes(engine, ids)
    rows = []
    for run, label in zip(runs.to_dict("records"), labels(list(runs["spec"])), strict=True):
        spec: JobSpec = run["spec"]
        row = {
            **{key: run[key] for key in ("run", "job", "key", "status", "last_round", "seconds", "spec")},
            "method": spec.method,
            "version": spec.version,
            "label": label,
            "dataset": spec.task.dataset,
            "size": spec.partition_params.get("size"),
            "seed": spec.seed,
            "rounds": spec.protocol.rounds,
            "rule": spec.protocol.rule,
            "headline": spec.protocol.headline,
            "mb": sent.get(run["run"], 0.0),
        }
        for view in VIEWS:
            of_view = _of_view(run["run"], run["status"], spec, view, curves, figures)
            row |= {f"{view}_{name}": value for name, value in of_view.items()}
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("job", kind="stable").reset_index(drop=True)


def _of_view(run: int, status: str, spec: JobSpec, view: str, curves: Curves, figures: Figures) -> dict[str, Any]:
    curve = curves.get((run, view, spec.protocol.headline), {})
    rounds = spec.protocol.rounds
    adapted = figures.get((run, view, "adapt", "mean"), {})
    found: dict[str, Any] = {"has": bool(curve) or bool(adapted), "rounds": ()}
    if status != "done":  # what a diverged run reached before is a curve, not a result
        return found
    better = spec.protocol.smaller_wins
    if (headline := apply_rule(spec.protocol.rule, curve, rounds, smaller_wins=better)) is not None:
        found |= {"value": headline.value, "rounds": headline.rounds}
    if (final := apply_rule("final", curve, rounds)) is not None:
        found["final"] = final.value
    for stage, prefix in (("best", ""), ("final", "final_")):
        closing = figures.get((run, view, stage, "mc")) or figures.get((run, view, stage, "mean"), {})
        found |= {prefix + name: closing[name] for name in CALIBRATION if name in closing}
    if adapted:  # personal models that were made after training: one number, no curve
        closing = figures.get((run, view, "adapt", "mc"), adapted)
        found |= {"value": adapted[spec.protocol.headline], "rounds": (), "final": math.nan}
        calibration = {name: closing[name] for name in CALIBRATION if name in closing}
        found |= {prefix + name: value for prefix in ("", "final_") for name, value in calibration.items()}
    return found


def _curves(engine: Engine, runs: list[int], names: set[str]) -> Curves:
    frame = queries.curves(engine, runs)
    frame = frame[(frame["predict"] == "mean") & frame["name"].isin(names)]
    found: dict[tuple[int, str, str], dict[int, float]] = {}
    columns = (frame[name] for name in ("run", "view", "name", "round", "value"))
    for run, view, name, round_, value in zip(*columns, strict=True):
        found.setdefault((run, view, name), {})[int(round_)] = float(value)
    return found


def _figures(engine: Engine, runs: list[int]) -> Figures:
    frame = queries.figures(engine, runs, ("best", "final", "adapt"))  # of adaptation the last, longest rung stays
    frame = frame[frame["split"] == "test"]
    found: dict[tuple[int, str, str, str], dict[str, float]] = {}
    columns = (frame[name] for name in ("run", "view", "stage", "predict", "name", "value"))
    for run, view, stage, predict, name, value in zip(*columns, strict=True):
        found.setdefault((run, view, stage, predict), {})[str(name)] = float(value)
    return found


def _megabytes(engine: Engine, runs: list[int]) -> dict[int, float]:
    """Down and up, all clients and rounds."""
    frame = queries.costs(engine, runs)
    sent = (frame["bytes_down"] + frame["bytes_up"]).groupby(frame["run"]).sum()
    return {int(run): float(total) / BYTES_PER_MB for run, total in sent.items()}
