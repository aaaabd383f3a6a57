"""The queue, on the database: enqueue, claim, lease, retry, cancel, pause.

A worker holds a job by a lease that it renews; whoever finds a lease run out, or its holder dead on this machine, puts
the job back. Whoever renews a lease learns whether the job should stop: it was cancelled, or the queue is paused. All
times are the database's, so that machines need not agree on the time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, Float, case, cast, delete, func, insert, literal_column, select, update
from sqlalchemy.sql.elements import ColumnElement

from fedbench.errors import FedbenchError
from fedbench.job import JobSpec, stored_job
from fedbench.store.database import one_at_a_time, writing
from fedbench.store.models import Job, Run, Setting, Sweep, SweepJob

LEASE_SECONDS = 60.0
MAX_ATTEMPTS = 3
"""A job whose worker died this often, and that got no further meanwhile, is failed instead of tried again."""
FINISHED = ("done", "diverged")
UNFINISHED = ("running", "interrupted")
"""Of a run that the next worker goes on with."""
STATUSES = ("pending", "running", "done", "diverged", "failed", "cancelled")
Order = Literal["cancel", "pause"]
"""Why a running job should stop after its round."""
_PAUSED = select(Setting.name).where(Setting.name == "paused").exists()
_CHUNK = 500  # SQLite allows some thousand variables in a statement


class LeaseLostError(Exception):
    """The job was given to another worker; what this one still does must not be recorded."""


@dataclass(frozen=True)
class Claim:
    """A job that a worker holds."""

    job_id: int
    key: str
    spec: JobSpec
    timeout: float | None = None


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue lists it, with its newest run's last round and error."""

    key: str
    status: str
    priority: int
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


def enqueue(
    engine: Engine,
    name: str,
    grid: dict[str, Any],
    jobs: Sequence[JobSpec],
    priority: int = 0,
    timeout: float | None = None,
) -> int:
    """Add the jobs that the database does not hold, and make them the sweep `name`. Returns the sweep's id.

    Of the jobs that it holds, those that wait get the higher of both priorities, and the unfinished ones the timeout.
    """
    upsert = _upsert(engine)
    with writing(engine).begin() as connection:
        one_at_a_time(connection)
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
            present = update(Job).where(Job.key.in_(part))
            connection.execute(present.where(Job.status.not_in(FINISHED)).values(timeout=timeout))
            lower = Job.status == "pending", Job.priority < priority
            connection.execute(present.where(*lower).values(priority=priority))
            ids = connection.execute(select(Job.id).where(Job.key.in_(part))).scalars()
            connection.execute(upsert(SweepJob), [{"sweep_id": sweep, "job_id": job} for job in ids])
        return int(sweep)


def reap(engine: Engine) -> int:
    """Put back the jobs of dead workers: lease run out, or gone from this machine. Returns how many."""
    expired = (Job.lease_until < now(engine)).label("expired")
    running = select(Job.id, Job.worker, Job.attempts, Job.furthest, Job.stop, expired).where(Job.status == "running")
    with writing(engine).begin() as connection:
        # Locked, so that a job which another process puts back, and a third one claims, is not put back again.
        held = connection.execute(running.with_for_update(skip_locked=True)).all()
        dead = [row for row in held if row.expired or _is_dead(row.worker)]
        for row in dead:
            status = "cancelled" if row.stop else "failed" if row.attempts >= MAX_ATTEMPTS else "pending"
            values = {"status": status, "stop": None, "worker": None, "lease_until": None}
            connection.execute(update(Job).where(Job.id == row.id).values(**values))
            if status == "failed":
                _close(connection, row.id, _obituary(row.attempts, row.furthest))
        return len(dead)


def expire(engine: Engine, job_id: int, worker: str) -> None:
    """Let a lease run out at once, because whoever ran the job for this worker is dead; `reap` puts the job back."""
    held = Job.id == job_id, Job.worker == worker, Job.status == "running"
    with writing(engine).begin() as connection:
        connection.execute(update(Job).where(*held).values(lease_until=0.0))


def _obituary(attempts: int, furthest: int) -> str:
    place = f"each time after round {furthest}" if furthest else "each time before its first round ended"
    return f"the worker died {attempts} times while it ran this job, {place} (out of memory?)"


def _close(connection: Connection, job_id: int, reason: str) -> None:
    """End a job's unfinished run as failed; a job that never began gets a run that keeps the reason."""
    unfinished = Run.job_id == job_id, Run.status.in_(UNFINISHED)
    closed = connection.execute(update(Run).where(*unfinished).values(status="failed", error=reason))
    if not closed.rowcount:
        place = {"device": "", "host": "", "versions": {}}
        started = {"started": now(connection), "error": reason}
        connection.execute(insert(Run).values(job_id=job_id, status="failed", **started, **place))


def claim(engine: Engine, worker: str, sweep: int | None = None) -> Claim | None:
    """Take the next job, of this sweep or of any; None when none is waiting or the queue is paused.

    Two workers never get the same.
    """
    waiting = select(Job.id).where(Job.status == "pending", ~_PAUSED)
    if sweep is not None:
        # not `id IN`, for which SQLite lists all jobs of the sweep at every claim
        asked = select(SweepJob.job_id).where(SweepJob.sweep_id == sweep, SweepJob.job_id == Job.id)
        waiting = waiting.where(asked.exists())
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
            .returning(Job.id, Job.key, Job.spec, Job.timeout)
        ).one_or_none()
    return None if row is None else Claim(row.id, row.key, stored_job(row.spec), row.timeout)


def renew(connection: Connection, job_id: int, worker: str, reached: int = 0) -> Order | None:
    """Prolong the lease, and note the round that was reached. Returns the order to stop, if there is one.

    Raises LeaseLostError when the job is no longer this worker's.
    """
    further = Job.furthest < reached
    row = connection.execute(
        update(Job)
        .where(Job.id == job_id, Job.worker == worker, Job.status == "running")
        .values(
            lease_until=now(connection) + LEASE_SECONDS,
            attempts=case((further, 1), else_=Job.attempts),
            furthest=case((further, reached), else_=Job.furthest),
        )
        .returning(Job.stop, _PAUSED.label("paused"))
    ).one_or_none()
    if row is None:
        raise LeaseLostError
    return "cancel" if row.stop else "pause" if row.paused else None


def release(connection: Connection, job_id: int, worker: str, status: str) -> None:
    """End a claim with the job's new status. A worker that stopped on request has not used up an attempt."""
    values: dict[str, Any] = {"status": status, "stop": None, "worker": None, "lease_until": None}
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
    columns = Job.key, Job.status, Job.priority, Job.attempts, Job.worker, Job.spec, Run.last_round, Run.error
    query = select(*columns).join(Run, Run.id == newest, isouter=True)
    if statuses:
        query = query.where(Job.status.in_(statuses))
    if sweep is not None:
        query = query.join(SweepJob, SweepJob.job_id == Job.id).where(SweepJob.sweep_id == sweep)
    with engine.connect() as connection:
        return [
            QueuedJob(
                key=row.key,
                status=row.status,
                priority=row.priority,
                attempts=row.attempts,
                worker=row.worker or "",
                spec=stored_job(row.spec),
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
    return len(_move(engine, ("failed", "cancelled"), {"status": "pending", "attempts": 0, "furthest": 0}, keys))


def prioritise(engine: Engine, priority: int, keys: Sequence[str]) -> int:
    """Give waiting jobs this priority: these, or all. Returns how many."""
    return len(_move(engine, ("pending",), {"priority": priority}, keys))


def cancel(engine: Engine, keys: Sequence[str]) -> tuple[int, int]:
    """Take these jobs out of the queue, or all that wait.

    Returns how many waited, and how many of the named ones are running: they stop after their round, with a checkpoint.
    """
    is_waiting = Job.status == "pending"
    values = {
        "status": case((is_waiting, "cancelled"), else_=Job.status),
        "stop": case((is_waiting, None), else_="cancel"),
    }
    moved = _move(engine, ("pending", "running") if keys else ("pending",), values, keys)
    return moved.count("cancelled"), moved.count("running")


def _move(engine: Engine, states: tuple[str, ...], values: dict[str, Any], prefixes: Sequence[str]) -> list[str]:
    """Change the jobs that are in these states: these, or all. Returns the status that each of them has now."""
    query = update(Job).where(Job.status.in_(states)).values(**values).returning(Job.status)
    if prefixes:
        query = query.where(Job.key.in_([find_key(engine, prefix) for prefix in prefixes]))
    with writing(engine).begin() as connection:
        return list(connection.execute(query).scalars())


def pause(engine: Engine) -> None:
    """Let no worker on any machine begin a job, and let running ones go back after their round, with a checkpoint."""
    with writing(engine).begin() as connection:
        connection.execute(_upsert(engine)(Setting).values(name="paused", value="yes").on_conflict_do_nothing())


def resume(engine: Engine) -> None:
    """Let the workers go on."""
    with writing(engine).begin() as connection:
        connection.execute(delete(Setting).where(Setting.name == "paused"))


def is_paused(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.execute(select(_PAUSED)).scalar())


def _upsert(engine: Engine) -> Any:
    """The dialect's INSERT, which can pass over what is there."""
    return import_module(f"sqlalchemy.dialects.{engine.dialect.name}").insert


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
