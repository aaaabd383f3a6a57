"""What reports read, as DataFrames. One row per run, per round, or per figure; nothing here writes."""

from __future__ import annotations

from typing import Any

import pandas as pd
from sqlalchemy import Engine, select

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import stored_job
from fedbench.queue import FINISHED, sweep_ids
from fedbench.store.models import Cost, Evaluation, Histogram, Job, Metric, Run, SweepJob


def finished_runs(engine: Engine, sweep: str | None = None) -> pd.DataFrame:
    """The newest finished run of every job: run facts, the job's key and spec, and all its settings as columns.

    `sweep` narrows it to the jobs that `fedbench run` last asked for under that grid name.
    """
    query = (
        select(
            Run.id.label("run"),
            Job.id.label("job"),
            Job.key,
            Job.spec,
            Run.status,
            Run.seconds,
            Run.last_round,
            Run.device,
            Run.host,
            Run.commit,
            Run.versions,
            Run.split_hash,
        )
        .join(Job, Job.id == Run.job_id)
        .where(Run.status.in_(FINISHED), Job.status.in_(FINISHED))
        .order_by(Run.started, Run.id)  # a merged run has a new id, but may be the older one
    )
    if sweep is not None:
        query = query.join(SweepJob, SweepJob.job_id == Job.id).where(SweepJob.sweep_id == _sweep_id(engine, sweep))
    frame = _read(engine, query).drop_duplicates("key", keep="last").reset_index(drop=True)
    specs = [stored_job(spec) for spec in frame["spec"]]
    settings = pd.DataFrame([spec.settings for spec in specs], index=frame.index)
    return pd.concat([frame.assign(spec=specs), settings], axis=1)


def curves(engine: Engine, runs: list[int]) -> pd.DataFrame:
    """Pooled metrics over the rounds of training: run, round, view, predict, name, value."""
    frame = figures(engine, runs, stages=("train",))
    return frame[frame["split"] == "test"].drop(columns=["stage", "step", "split", "client"])


def figures(
    engine: Engine, runs: list[int], stages: tuple[str, ...] = ("best", "final"), *, per_client: bool = False
) -> pd.DataFrame:
    """Metrics of these runs and stages: run, stage, round, step, view, split, predict, client, name, value."""
    query = (
        select(
            Evaluation.run_id.label("run"),
            Evaluation.stage,
            Evaluation.round,
            Evaluation.step,
            Evaluation.view,
            Evaluation.split,
            Evaluation.predict,
            Metric.client,
            Metric.name,
            Metric.value,
        )
        .join(Metric, Metric.evaluation_id == Evaluation.id)
        .where(Evaluation.stage.in_(stages))
        .order_by(Evaluation.id, Metric.id)
    )
    return _read(engine, query if per_client else query.where(Metric.client.is_(None)), Evaluation.run_id, runs)


def reliability(engine: Engine, runs: list[int]) -> pd.DataFrame:
    """Pooled reliability bins at the best and the final round."""
    query = (
        select(
            Evaluation.run_id.label("run"),
            Evaluation.stage,
            Evaluation.view,
            Evaluation.predict,
            Histogram.bin,
            Histogram.count,
            Histogram.confidence,
            Histogram.correct,
        )
        .join(Histogram, Histogram.evaluation_id == Evaluation.id)
        .where(Histogram.kind == "reliability", Histogram.client.is_(None), Evaluation.stage.in_(("best", "final")))
    )
    return _read(engine, query, Evaluation.run_id, runs)


def histograms(engine: Engine, runs: list[int]) -> pd.DataFrame:
    """All bins of these runs: run, stage, round, step, view, split, predict, client, kind, bin and its sums."""
    query = (
        select(
            Evaluation.run_id.label("run"),
            Evaluation.stage,
            Evaluation.round,
            Evaluation.step,
            Evaluation.view,
            Evaluation.split,
            Evaluation.predict,
            Histogram.client,
            Histogram.kind,
            Histogram.bin,
            Histogram.count,
            Histogram.confidence,
            Histogram.correct,
        )
        .join(Histogram, Histogram.evaluation_id == Evaluation.id)
        .order_by(Evaluation.id, Histogram.id)
    )
    return _read(engine, query, Evaluation.run_id, runs)


def costs(engine: Engine, runs: list[int]) -> pd.DataFrame:
    """Seconds and bytes: run, round, phase, seconds, count, bytes_down, bytes_up."""
    query = select(
        Cost.run_id.label("run"), Cost.round, Cost.phase, Cost.seconds, Cost.count, Cost.bytes_down, Cost.bytes_up
    ).where(Cost.client.is_(None))
    return _read(engine, query.order_by(Cost.id), Cost.run_id, runs)


def _sweep_id(engine: Engine, name: str) -> int:
    sweeps = sweep_ids(engine)
    if name not in sweeps:
        raise FedbenchError(f"this database holds no sweep {name!r}.", did_you_mean(name, sweeps))
    return sweeps[name]


def _read(engine: Engine, query: Any, column: Any = None, among: list[int] | None = None) -> pd.DataFrame:
    """The query's rows; with `column`, only those whose value is among the given ones, however many they are."""
    parts = (
        [query] if among is None else [query.where(column.in_(among[i : i + 500])) for i in range(0, len(among), 500)]
    )
    with engine.connect() as connection:
        results = [connection.execute(part) for part in parts or [query.where(column.in_([]))]]
        names = list(results[0].keys())
        return pd.DataFrame([tuple(row) for result in results for row in result], columns=names)
