"""Writes what a run measures into the database, a round at a time, whole or not at all."""

from __future__ import annotations

import platform
import socket
import subprocess
import time
from functools import cache
from importlib import metadata
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, insert, select, update

from fedbench import queue
from fedbench.records import RoundRecord
from fedbench.store.database import writing
from fedbench.store.models import Cost, Evaluation, Histogram, Metric, Run


class DatabaseRecorder:
    """The records of one claimed job. Every write renews the claim, and fails when another worker has taken it over."""

    def __init__(self, engine: Engine, job_id: int, worker: str) -> None:
        self._engine = writing(engine)
        self._job = job_id
        self._worker = worker
        self._run: int | None = None
        self._last = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()
        self._threads = 1

    def threads(self, wanted: int) -> int:
        """The number of threads to use: that of the unfinished run if there is one: it decides the last bits."""
        with self._engine.begin() as connection:
            versions = connection.execute(
                select(Run.versions)
                .where(Run.job_id == self._job, Run.status.in_(queue.UNFINISHED))
                .order_by(Run.id.desc())
            ).scalar()
        self._threads = int(versions.get("threads", wanted)) if versions else wanted
        return self._threads

    def start(self, *, rounds: int, split_hash: str, device: str) -> None:
        """Go on with the job's unfinished run, or begin a new one."""
        with self._transaction() as connection:
            row = connection.execute(
                select(Run.id, Run.last_round, Run.seconds)
                .where(Run.job_id == self._job, Run.status.in_(queue.UNFINISHED))
                .order_by(Run.id.desc())
            ).first()
            if row is not None:
                self._run, self._last, self._seconds_before = row.id, row.last_round, row.seconds or 0.0
                connection.execute(update(Run).where(Run.id == row.id).values(status="running"))
                return
            self._run = connection.execute(
                insert(Run)
                .values(
                    job_id=self._job,
                    status="running",
                    device=device,
                    host=socket.gethostname(),
                    commit=_commit(),
                    versions={**_versions(), "threads": self._threads},
                    split_hash=split_hash,
                    started=queue.now(connection),
                    last_round=0,
                )
                .returning(Run.id)
            ).scalar_one()

    def last_round(self) -> int:
        return self._last

    def rewind(self, round_: int) -> None:
        """Forget what is later than this round."""
        with self._transaction() as connection:
            connection.execute(delete(Evaluation).where(Evaluation.run_id == self._run, Evaluation.recorded > round_))
            connection.execute(delete(Cost).where(Cost.run_id == self._run, Cost.round > round_))
            connection.execute(update(Run).where(Run.id == self._run).values(last_round=round_))
        self._last = round_

    def record(self, record: RoundRecord) -> None:
        with self._transaction() as connection:
            for item in record.evaluations:
                evaluation = connection.execute(
                    insert(Evaluation)
                    .values(
                        run_id=self._run,
                        recorded=record.round,
                        round=item.round,
                        stage=item.stage,
                        step=item.step,
                        view=item.view,
                        split=item.split,
                        predict=item.predict,
                    )
                    .returning(Evaluation.id)
                ).scalar_one()
                metrics = [
                    {"evaluation_id": evaluation, "client": client, "name": name, "value": value}
                    for client, values in item.metrics.items()
                    for name, value in values.items()
                ]
                bins = [
                    {
                        "evaluation_id": evaluation,
                        "client": client,
                        "kind": kind,
                        "bin": index,
                        "count": count,
                        "confidence": confidence,
                        "correct": correct,
                    }
                    for kind, histograms in (("reliability", item.reliability), ("entropy", item.entropy))
                    for client, rows in histograms.items()
                    for index, count, confidence, correct in rows
                ]
                connection.execute(insert(Metric), metrics)
                if bins:
                    connection.execute(insert(Histogram), bins)
            if record.costs:
                connection.execute(insert(Cost), [{"run_id": self._run, **vars(cost)} for cost in record.costs])
            connection.execute(
                update(Run).where(Run.id == self._run).values(last_round=record.round, seconds=self._seconds())
            )
        self._last = record.round

    def finish(self, outcome: str) -> None:
        """Close the run; an interrupted job goes back into the queue."""
        with self._transaction() as connection:
            connection.execute(update(Run).where(Run.id == self._run).values(status=outcome, seconds=self._seconds()))
            queue.release(connection, self._job, self._worker, "pending" if outcome == "interrupted" else outcome)

    def fail(self, error: str) -> None:
        """Close the run with its traceback; the job is not tried again until someone asks."""
        with self._transaction() as connection:
            if self._run is None:  # it failed before it began: keep the reason all the same
                values = {"job_id": self._job, "status": "failed", "device": "", "host": socket.gethostname()}
                connection.execute(
                    insert(Run).values(**values, versions=_versions(), started=queue.now(connection), error=error)
                )
            else:
                connection.execute(update(Run).where(Run.id == self._run).values(status="failed", error=error))
            queue.release(connection, self._job, self._worker, "failed")

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _transaction(self) -> _Owned:
        return _Owned(self._engine, self._job, self._worker)


class _Owned:
    """A write transaction that stands only if the worker still holds the job."""

    def __init__(self, engine: Engine, job_id: int, worker: str) -> None:
        self._begin = engine.begin()
        self._job = job_id
        self._worker = worker

    def __enter__(self) -> Connection:
        connection = self._begin.__enter__()
        try:
            queue.renew(connection, self._job, self._worker)
        except BaseException as error:
            self._begin.__exit__(type(error), error, error.__traceback__)
            raise
        return connection

    def __exit__(self, *error: object) -> None:
        self._begin.__exit__(*error)  # type: ignore[arg-type]


@cache
def _commit() -> str | None:
    """The commit that fedbench runs from, `+` if it has changes; None outside a checkout."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


@cache
def _versions() -> dict[str, str]:
    names = ("fedbench", "torch", "torchvision", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
