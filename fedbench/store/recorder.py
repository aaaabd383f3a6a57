"""Writes what a run measures into the database, a round at a time, whole or not at all."""

from __future__ import annotations

import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, insert, select, update

import fedbench
from fedbench import queue
from fedbench.records import RoundRecord
from fedbench.store.database import writing
from fedbench.store.models import Cost, Evaluation, Histogram, Metric, Run


@dataclass(frozen=True)
class Conditions:
    """What decides the last bits of a run, beyond its job: it goes on under the conditions under which it began."""

    threads: int = 1
    deterministic: bool = False


@dataclass(frozen=True)
class Origin:
    """The machine that a run began on."""

    host: str
    versions: dict[str, str]


class DatabaseRecorder:
    """The records of one claimed job. Every write renews the claim, and fails when another worker has taken it over."""

    def __init__(self, engine: Engine, job_id: int, worker: str) -> None:
        self._engine = writing(engine)
        self._job = job_id
        self._worker = worker
        self.order: queue.Order | None = None
        """What the queue asked for at the last write."""
        self.origin: Origin | None = None
        """Where the job runs; None is here."""
        self._run: int | None = None
        self._last = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()
        self._conditions = Conditions()

    def conditions(self, wanted: Conditions) -> Conditions:
        """The conditions to run under: those of the unfinished run if there is one, else those wanted."""
        with self._engine.begin() as connection:
            versions = connection.execute(
                select(Run.versions)
                .where(Run.job_id == self._job, Run.status.in_(queue.UNFINISHED))
                .order_by(Run.id.desc())
            ).scalar()
        kept = {name: (versions or {}).get(name, value) for name, value in asdict(wanted).items()}
        self._conditions = Conditions(**kept)
        return self._conditions

    def start(self, *, rounds: int, split_hash: str, device: str) -> None:
        """Go on with the job's unfinished run, or begin a new one."""
        origin = self.origin or here()
        with self._transaction() as connection:
            row = connection.execute(
                select(Run.id, Run.last_round, Run.seconds)
                .where(Run.job_id == self._job, Run.status.in_(queue.UNFINISHED))
                .order_by(Run.id.desc())
            ).first()
            if row is not None:
                self._run, self._last, self._seconds_before = row.id, row.last_round, row.seconds or 0.0
                connection.execute(update(Run).where(Run.id == row.id).values(status="running", error=None))
                return
            self._run = connection.execute(
                insert(Run)
                .values(
                    job_id=self._job,
                    status="running",
                    device=device,
                    host=origin.host,
                    commit=_commit(),
                    versions={**origin.versions, **asdict(self._conditions)},
                    split_hash=split_hash,
                    started=queue.now(connection),
                    last_round=0,
                )
                .returning(Run.id)
            ).scalar_one()

    def renew(self) -> None:
        """Keep the job while there is nothing to write."""
        with self._transaction():
            pass

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
        with self._transaction(reached=record.round) as connection:
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

    def set_aside(self, status: str, reason: str | None = None) -> None:
        """Take the job out of the queue, cancelled or failed; a retry goes on with this run from its checkpoint."""
        with self._transaction() as connection:
            values = {"status": "interrupted", "error": reason, "seconds": self._seconds()}
            connection.execute(update(Run).where(Run.id == self._run).values(**values))
            queue.release(connection, self._job, self._worker, status)

    def fail(self, error: str) -> None:
        """Close the run with its traceback; the job is not tried again until someone asks."""
        error = error.replace("\0", "")  # which PostgreSQL does not take
        with self._transaction() as connection:
            if self._run is None:  # it failed before it began: keep the reason all the same
                values = {"job_id": self._job, "status": "failed", "device": "", **asdict(self.origin or here())}
                connection.execute(insert(Run).values(**values, started=queue.now(connection), error=error))
            else:
                connection.execute(update(Run).where(Run.id == self._run).values(status="failed", error=error))
            queue.release(connection, self._job, self._worker, "failed")

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    @contextmanager
    def _transaction(self, reached: int = 0) -> Iterator[Connection]:
        """A write transaction that stands only if the worker still holds the job."""
        with self._engine.begin() as connection:
            order = queue.renew(connection, self._job, self._worker, reached)
            yield connection
        self.order = order


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
def here() -> Origin:
    """This machine."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "numpy")}
    return Origin(
        socket.gethostname(), {"python": platform.python_version(), "fedbench": fedbench.__version__, **versions}
    )
