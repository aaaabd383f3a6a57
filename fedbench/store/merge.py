"""Merges databases from several machines: the same jobs are recognised by their keys, and all their runs are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, Table, create_engine, delete, insert, select, text, update
from sqlalchemy.engine import URL

from fedbench import queue
from fedbench.job import canonical_json
from fedbench.store.database import OlderSchemaError, clear_errors, one_at_a_time, open_database, writing
from fedbench.store.export import batches, snapshot, tables, temporary_copy
from fedbench.store.models import Base, Job, Run, Sweep, SweepJob

FREE = {"worker": None, "lease_until": None, "stop": None}
"""A job that nobody holds."""
NEW_IDS = dict[int, int]
"""A row's id in the source -> its id in the target."""


@dataclass
class Merged:
    """What a merge changed."""

    jobs: int = 0
    """that the target did not have"""
    finished: int = 0
    """that the target had, and that a source had finished"""
    runs: int = 0


def open_source(url: URL) -> Engine:
    """A database or an export to read from; of an older schema, an upgraded copy. The source is never changed."""
    try:
        return open_database(url, create=False)
    except OlderSchemaError:
        with clear_errors(url):
            return _upgraded_copy(url)


def merge(target: Engine, sources: Sequence[Engine]) -> Merged:
    """Add what the sources hold and the target does not; whole or not at all. Merging twice changes nothing."""
    merged = Merged()
    with writing(target).begin() as connection:
        one_at_a_time(connection)
        for source in sources:
            with snapshot(source) as reading:
                _merge_one(reading, connection, merged)
    return merged


def _upgraded_copy(url: URL) -> Engine:
    source = create_engine(url)
    with snapshot(source) as reading:
        revision = reading.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        copy = temporary_copy(revision, lambda table: (list(map(_values, part)) for part in batches(reading, table)))
    source.dispose()
    return copy


def _merge_one(reading: Connection, connection: Connection, merged: Merged) -> None:
    ids = {
        "job": _merge_jobs(reading, connection, merged),
        "sweep": _merge_sweeps(reading, connection),
    }
    _merge_links(reading, connection, ids)
    ids["run"] = _merge_runs(reading, connection, ids["job"])
    merged.runs += len(ids["run"])
    for table in tables():
        if table.name not in (*ids, SweepJob.__tablename__):
            ids[table.name] = _copy_below(reading, connection, table, ids)


def _merge_jobs(reading: Connection, connection: Connection, merged: Merged) -> NEW_IDS:
    """Add the jobs that are missing; those that only the source has finished are finished."""
    ours = {row.key: row for row in connection.execute(select(Job.id, Job.key, Job.status))}
    ids: NEW_IDS = {}
    for theirs in _rows(reading, Job.__table__):
        if theirs.key not in ours:
            ids[theirs.id] = _insert(connection, Job.__table__, [_arriving(theirs)])[0]
            merged.jobs += 1
            continue
        ids[theirs.id] = ours[theirs.key].id
        if theirs.status in queue.FINISHED:
            waiting = Job.id == ids[theirs.id], Job.status.not_in((*queue.FINISHED, "running"))
            finished = connection.execute(update(Job).where(*waiting).values(status=theirs.status, **FREE))
            merged.finished += finished.rowcount
    return ids


def _arriving(row: Row[Any]) -> dict[str, Any]:
    """A job of the source as it begins here: nobody holds it, and what it reached was reached elsewhere."""
    job = _values(row) | FREE
    if row.status == "running":
        job["status"] = "cancelled" if row.stop else "pending"
    if job["status"] == "pending":
        job |= {"attempts": 0, "furthest": 0}
    return job


def _merge_sweeps(reading: Connection, connection: Connection) -> NEW_IDS:
    """Add the sweeps that are missing, by their names."""
    ours = {row.name: row.id for row in connection.execute(select(Sweep.name, Sweep.id))}
    return {
        row.id: ours[row.name] if row.name in ours else _insert(connection, Sweep.__table__, [_values(row)])[0]
        for row in _rows(reading, Sweep.__table__)
    }


def _merge_links(reading: Connection, connection: Connection, ids: dict[str, NEW_IDS]) -> None:
    """A sweep of both has the jobs of both."""
    ours = {tuple(row) for row in connection.execute(select(SweepJob.sweep_id, SweepJob.job_id))}
    theirs = {
        (ids["sweep"][row.sweep_id], ids["job"][row.job_id])
        for row in reading.execute(select(SweepJob.sweep_id, SweepJob.job_id))
        if row.sweep_id in ids["sweep"] and row.job_id in ids["job"]
    }
    if missing := [{"sweep_id": sweep, "job_id": job} for sweep, job in sorted(theirs - ours)]:
        connection.execute(insert(SweepJob), missing)


def _merge_runs(reading: Connection, connection: Connection, jobs: NEW_IDS) -> NEW_IDS:
    """Add the runs that are missing. One that had not ended when it was merged gives way to what became of it."""
    ours = {_identity(row, row.job_id): row for row in _rows(connection, Run.__table__)}
    ids: NEW_IDS = {}
    for theirs in _rows(reading, Run.__table__):
        if theirs.job_id not in jobs:
            continue
        same = ours.get(_identity(theirs, jobs[theirs.job_id]))
        if same is not None:
            if same.status in queue.FINISHED or theirs.status not in queue.FINISHED:
                continue
            connection.execute(delete(Run).where(Run.id == same.id))
        run = _values(theirs) | {"job_id": jobs[theirs.job_id]}
        if theirs.status in queue.UNFINISHED:  # its checkpoint is not here: nobody could go on with it
            run |= {"status": "failed", "error": theirs.error or f"had not ended on {theirs.host} when it was merged"}
        ids[theirs.id] = _insert(connection, Run.__table__, [run])[0]
    return ids


def _identity(run: Row[Any], job: int) -> tuple[Any, ...]:
    """What two copies of a run share, and no two runs do: a job is run by one worker at a time."""
    return job, run.started, run.host, canonical_json(run.versions)


def _copy_below(reading: Connection, connection: Connection, table: Table, ids: dict[str, NEW_IDS]) -> NEW_IDS:
    """Copy the rows that belong to copied ones, such as the evaluations of the runs that were added."""
    parents = [(key.parent.name, ids[key.column.table.name]) for key in table.foreign_keys]
    new: NEW_IDS = {}
    if not all(known for _, known in parents):
        return new
    for part in batches(reading, table):
        rows = [row for row in part if all(getattr(row, column) in known for column, known in parents)]
        moved = [_values(row) | {column: known[getattr(row, column)] for column, known in parents} for row in rows]
        if moved and _is_leaf(table):
            connection.execute(insert(table), [_without_id(row) for row in moved])
        elif moved:
            new.update(zip((row.id for row in rows), _insert(connection, table, moved), strict=True))
    return new


def _is_leaf(table: Table) -> bool:
    """Whether nothing refers to it, so that nobody asks for its new ids."""
    return all(key.column.table is not table for other in Base.metadata.sorted_tables for key in other.foreign_keys)


def _insert(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> list[int]:
    """Add rows under new ids, which are returned in their order."""
    statement = insert(table).returning(table.c.id, sort_by_parameter_order=True)
    return list(connection.execute(statement, [_without_id(row) for row in rows]).scalars())


def _rows(connection: Connection, table: Any) -> Iterator[Row[Any]]:
    for part in batches(connection, table):
        yield from part


def _values(row: Row[Any]) -> dict[str, Any]:
    return dict(row._mapping)


def _without_id(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "id"}
