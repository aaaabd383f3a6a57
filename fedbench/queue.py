"""The queue, on the database: enqueue, claim, lease, retry, cancel.

A worker holds a job by a lease that it renews; whoever finds a lease run out, or its holder dead on this machine, puts
the job back. All times are the database's, so that machines need not agree on the time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Float, cast, delete, func, insert, literal_column, select, update
from sqlalchemy.sql.elements import ColumnElement

from fedbench.errors import FedbenchError
from fedbench.job import JobSpec
from fedbench.store.database import writing
from fedbench.store.models import Job, Run, Sweep, SweepJob

LEASE_SECONDS = 60.0
MAX_ATTEMPTS = 3
"""A job whose worker died this often is failed instead of tried again."""
FINISHED = ("done", "diverged")
UNFINISHED = ("running", "interrupted")
"""Of a run that the next worker goes on with."""
STATUSES = ("pending", "running", "done", "diverged", "failed", "cancelled")
_CHUNK = 500  # SQLite allows some thousand variables in a statement


class LeaseLostError(Exception):
    """The job was given to another worker; what this one still does must not be recorded."""


@dataclass(frozen=True)
class Claim:
    """A job that a worker holds."""

    job_id: int
    key: str
    spec: JobSpec


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue lists it, with its newest run's last round and error."""

    key: str
    status: str
    attempts: int
    worker: str
    spec: JobSpec
    last_round: int
    error: str


def now(connection: Connection | Engine) -> ColumnElement[float]:
    """Seconds since 1970 by the database's clock."""
    if connection.dialect.name == "sqlite":
        return literal_column("(julianday('now') - 2440587.5) * 86400.0", Float)
    return cast(func.extract("epoch", func.clock_timestamp()), Float)


def worker_name(pid: int | None = None) -> str:
    """Names a process across machines: host, pid namespace, pid."""
    return f"{socket.gethostname()}/{_pid_namespace()}/{pid or os.getpid()}"


def enqueue(engine: Engine, name: str, grid: dict[str, Any], jobs: Sequence[JobSpec], priority: int = 0) -> int:
    """Add the jobs that the database does not hold, and make them the sweep `name`. Returns the sweep's id."""
    with writing(engine).begin() as connection:
        upsert = import_module(f"sqlalchemy.dialects.{engine.dialect.name}").insert
        connection.execute(upsert(Sweep).values(name=name, grid=grid).on_conflict_do_nothing())
        sweep = connection.execute(select(Sweep.id).where(Sweep.name == name)).scalar_one()
        connection.execute(update(Sweep).where(Sweep.id == sweep).values(grid=grid))
        connection.execute(delete(SweepJob).where(SweepJob.sweep_id == sweep))
        for start in range(0, len(jobs), _CHUNK):
            part = {job.key: job for job in jobs[start : start + _CHUNK]}
            rows = [
                {
                    "key": key,
                    "spec": job.model_dump(mode="json"),
                    "status": "pending",
                    "priority": priority,
                    "attempts": 0,
                }
                for key, job in part.items()
            ]
            connection.execute(upsert(Job).on_conflict_do_nothing(), rows)
            ids = connection.execute(select(Job.id).where(Job.key.in_(part))).scalars()
            connection.execute(upsert(SweepJob), [{"sweep_id": sweep, "job_id": job} for job in ids])
        return int(sweep)


def reap(engine: Engine) -> int:
    """Put back the jobs of dead workers: lease run out, or gone from this machine. Returns how many."""
    with writing(engine).begin() as connection:
        running = connection.execute(
            select(Job.id, Job.worker, Job.attempts, (Job.lease_until < now(connection)).label("expired")).where(
                Job.status == "running"
            )
        ).all()
        dead = [row for row in running if row.expired or _is_dead(row.worker)]
        for row in dead:
            give_up = row.attempts >= MAX_ATTEMPTS
            values = {"status": "failed" if give_up else "pending", "worker": None, "lease_until": None}
            connection.execute(update(Job).where(Job.id == row.id).values(**values))
            if give_up:
                note = f"the worker died {row.attempts} times while it ran this job (out of memory?)"
                unfinished = Run.job_id == row.id, Run.status.in_(UNFINISHED)
                closed = connection.execute(update(Run).where(*unfinished).values(status="failed", error=note))
                if not closed.rowcount:  # it died before it began: keep the reason all the same
                    place = {"device": "", "host": "", "versions": {}}
                    made = insert(Run).values(
                        job_id=row.id, status="failed", started=now(connection), error=note, **place
                    )
                    connection.execute(made)
        return len(dead)


def claim(engine: Engine, worker: str, sweep: int | None = None) -> Claim | None:
    """Take the next job, of this sweep or of any; None when none is waiting. Two workers never get the same."""
    waiting = select(Job.id).where(Job.status == "pending")
    if sweep is not None:
        waiting = waiting.where(Job.id.in_(select(SweepJob.job_id).where(SweepJob.sweep_id == sweep)))
    waiting = waiting.order_by(Job.priority.desc(), Job.id).limit(1).with_for_update(skip_locked=True)
    with writing(engine).begin() as connection:
        row = connection.execute(
            update(Job)
            .where(Job.id == waiting.scalar_subquery())
            .values(
                status="running",
                worker=worker,
                lease_until=now(connection) + LEASE_SECONDS,
                attempts=Job.attempts + 1,
            )
            .returning(Job.id, Job.key, Job.spec)
        ).one_or_none()
    return None if row is None else Claim(row.id, row.key, JobSpec.model_validate(row.spec))


def renew(connection: Connection, job_id: int, worker: str) -> None:
    """Prolong the lease; raises LeaseLostError when the job is no longer this worker's."""
    renewed = connection.execute(
        update(Job)
        .where(Job.id == job_id, Job.worker == worker, Job.status == "running")
        .values(lease_until=now(connection) + LEASE_SECONDS)
    )
    if renewed.rowcount != 1:
        raise LeaseLostError


def release(connection: Connection, job_id: int, worker: str, status: str) -> None:
    """End a claim with the job's new status. A worker that stopped on request has not used up an attempt."""
    values: dict[str, Any] = {"status": status, "worker": None, "lease_until": None}
    if status == "pending":
        values["attempts"] = Job.attempts - 1
    released = connection.execute(update(Job).where(Job.id == job_id, Job.worker == worker).values(**values))
    if released.rowcount != 1:
        raise LeaseLostError


def counts(engine: Engine, sweep: int | None = None) -> dict[str, int]:
    """Number of jobs per status, of this sweep or of all."""
    query = select(Job.status, func.count()).group_by(Job.status)
    if sweep is not None:
        query = query.join(SweepJob, SweepJob.job_id == Job.id).where(SweepJob.sweep_id == sweep)
    with engine.connect() as connection:
        found = {status: int(n) for status, n in connection.execute(query)}
    return {status: found[status] for status in STATUSES if status in found}


def sweep_ids(engine: Engine) -> dict[str, int]:
    """Every sweep of the database: its grid's name and its id."""
    with engine.connect() as connection:
        return {row.name: row.id for row in connection.execute(select(Sweep.name, Sweep.id).order_by(Sweep.name))}


def listing(engine: Engine, statuses: Sequence[str] = (), sweep: int | None = None) -> list[QueuedJob]:
    """The jobs with these statuses, or all, of this sweep or of any, in the order of the queue."""
    newest = select(func.max(Run.id)).where(Run.job_id == Job.id).correlate(Job).scalar_subquery()
    query = select(Job.key, Job.status, Job.attempts, Job.worker, Job.spec, Run.last_round, Run.error).join(
        Run, Run.id == newest, isouter=True
    )
    if statuses:
        query = query.where(Job.status.in_(statuses))
    if sweep is not None:
        query = query.join(SweepJob, SweepJob.job_id == Job.id).where(SweepJob.sweep_id == sweep)
    with engine.connect() as connection:
        return [
            QueuedJob(
                key=row.key,
                status=row.status,
                attempts=row.attempts,
                worker=row.worker or "",
                spec=JobSpec.model_validate(row.spec),
                last_round=row.last_round or 0,
                error=row.error or "",
            )
            for row in connection.execute(query.order_by(Job.priority.desc(), Job.id))
        ]


def find_key(engine: Engine, prefix: str) -> str:
    """The one key that begins so; raises FedbenchError for none or several."""
    with engine.connect() as connection:
        keys = connection.execute(select(Job.key).where(Job.key.startswith(prefix, autoescape=True)).limit(2)).all()
    if not keys:
        raise FedbenchError(f"no job has a key that begins with {prefix!r}.", "See: fedbench queue list")
    if len(keys) > 1:
        raise FedbenchError(f"several jobs have keys that begin with {prefix!r}.", "Give more of the key.")
    return str(keys[0].key)


def retry(engine: Engine, keys: Sequence[str]) -> int:
    """Put failed and cancelled jobs back into the queue: these, or all. Returns how many."""
    return _move(engine, ("failed", "cancelled"), {"status": "pending", "attempts": 0}, keys)


def cancel(engine: Engine, keys: Sequence[str]) -> int:
    """Take waiting jobs out of the queue: these, or all. Returns how many. Running ones are left alone."""
    return _move(engine, ("pending",), {"status": "cancelled"}, keys)


def _move(engine: Engine, states: tuple[str, ...], values: dict[str, Any], prefixes: Sequence[str]) -> int:
    query = update(Job).where(Job.status.in_(states)).values(**values)
    if prefixes:
        query = query.where(Job.key.in_([find_key(engine, prefix) for prefix in prefixes]))
    with writing(engine).begin() as connection:
        return int(connection.execute(query).rowcount)


def _pid_namespace() -> int:
    """Processes of two containers may share a host name and a pid, but not this."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _is_dead(worker: str | None) -> bool:
    """Whether the process is one of this machine's and no longer lives."""
    here, _, pid = (worker or "").rpartition("/")
    if here != worker_name().rpartition("/")[0] or not pid.isdigit():
        return False
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # killed, and not waited for: for ever so in a container without an init process
    except OSError:
        pass
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
