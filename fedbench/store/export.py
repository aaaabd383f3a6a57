"""Exports: a folder with one file per table, Parquet or CSV, and a manifest. It can be read wherever a database can."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from fedbench import __version__, queue
from fedbench.errors import FedbenchError, did_you_mean
from fedbench.store.database import SCHEMA, explained, known_revisions, migrate, newer_schema
from fedbench.store.models import Base, Job, Setting, Sweep, SweepJob

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.json"
BATCH = 20_000
"""Rows that are in memory at a time."""
LEFT_OUT = (Setting.__tablename__, "alembic_version")
"""Tables that are about one database, not about results: whether its queue is paused, and its schema."""
Format = Literal["parquet", "csv"]
Batches = Callable[[Table], Iterator[list[dict[str, Any]]]]
"""The rows of a table, some at a time."""


class _TableFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rows: int = Field(ge=0)
    sha256: str


class Manifest(BaseModel):
    """What an export holds; all that is needed to notice that a part of it is missing or damaged."""

    model_config = ConfigDict(extra="forbid")
    fedbench: str
    revision: str
    """The schema of the database that was exported."""
    format: Format
    tables: dict[str, _TableFile]


def is_export(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def tables() -> list[Table]:
    """The tables that travel, each after those that it refers to."""
    return [table for table in Base.metadata.sorted_tables if table.name not in LEFT_OUT]


# --- writing ---


def export(
    engine: Engine, folder: Path, format_: Format, sweep: str | None = None, statuses: Sequence[str] = ()
) -> Manifest:
    """Write the database, or the jobs of a sweep or with these statuses, with all their runs, into a folder.

    The folder is there as a whole or not at all. One that is there is replaced, if it is an export and nothing else.
    """
    roots = _roots(engine, sweep, statuses)
    _check_place(folder)
    place = folder.resolve()  # `.` has no name, and a link stays a link
    partial = place.parent / f".{place.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        with snapshot(engine) as connection:
            files = {
                table.name: _write(connection, table, _kept(table, roots), partial / f"{table.name}.{format_}")
                for table in tables()
            }
        manifest = Manifest(fedbench=__version__, revision=SCHEMA, format=format_, tables=files)
        _sync_text(partial / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        _put(partial, place)
    except OSError as error:
        raise FedbenchError(f"{folder} cannot be written: {error.strerror}.", "Choose another folder.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """A connection that sees the database as it is now, whatever others write meanwhile."""
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        yield connection


def batches(connection: Connection, table: Table, conditions: Sequence[ColumnElement[bool]] = ()) -> Iterator[Any]:
    """The rows of a table in the order of its keys, some at a time."""
    query = select(table).where(*conditions).order_by(*table.primary_key)
    with connection.execute(query.execution_options(yield_per=BATCH)) as result:
        yield from result.partitions()


def _roots(engine: Engine, sweep: str | None, statuses: Sequence[str]) -> dict[str, ColumnElement[bool]]:
    """Which jobs and sweeps are wanted; the other tables follow."""
    for word in statuses:
        if word not in queue.STATUSES:
            raise FedbenchError(f"unknown status {word!r}.", did_you_mean(word, queue.STATUSES))
    jobs = [Job.status.in_(statuses)] if statuses else []
    roots: dict[str, ColumnElement[bool]] = {}
    if sweep is not None:
        known = queue.sweep_ids(engine)
        if sweep not in known:
            raise FedbenchError(f"this database holds no sweep {sweep!r}.", did_you_mean(sweep, known))
        roots["sweep"] = Sweep.id == known[sweep]
        jobs.append(Job.id.in_(select(SweepJob.job_id).where(SweepJob.sweep_id == known[sweep])))
    if jobs:
        roots["job"] = jobs[0] if len(jobs) == 1 else jobs[0] & jobs[1]
    return roots


def _kept(table: Table, roots: dict[str, ColumnElement[bool]]) -> list[ColumnElement[bool]]:
    """The conditions on a table's rows: its own, and that all that they refer to is kept."""
    above = [(key, _kept(key.column.table, roots)) for key in table.foreign_keys]
    return [
        *([roots[table.name]] if table.name in roots else []),
        *(key.parent.in_(select(key.column).where(*conditions)) for key, conditions in above if conditions),
    ]


def _check_place(folder: Path) -> None:
    """Raises FedbenchError when something is there that is not ours to replace."""
    if folder.exists() and not folder.is_dir():
        raise FedbenchError(f"{folder} is a file.", "Choose a new folder.")
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = {".gitkeep"}  # which says that a folder is empty
    if is_export(folder):
        manifest = read_manifest(folder)
        ours |= {MANIFEST, *(f"{name}.{manifest.format}" for name in manifest.tables)}
    if foreign := sorted(present - ours):
        raise FedbenchError(f"{folder} holds what is no export: {foreign[0]}.", "Choose a new folder, or empty it.")


def _write(connection: Connection, table: Table, conditions: Sequence[ColumnElement[bool]], path: Path) -> _TableFile:
    schema = _arrow_schema(table)
    rows = 0
    with path.open("wb") as file:
        with _writer(file, path.suffix, schema) as writer:
            for part in batches(connection, table, conditions):
                rows += len(part)
                writer.write(_record_batch(table, schema, part))
        file.flush()
        os.fsync(file.fileno())
    return _TableFile(rows=rows, sha256=_sha256(path))


def _writer(file: Any, suffix: str, schema: pa.Schema) -> Any:
    from pyarrow import csv, parquet

    if suffix == ".csv":
        return csv.CSVWriter(file, schema)
    return parquet.ParquetWriter(file, schema, compression="zstd", compression_level=15)


def _record_batch(table: Table, schema: pa.Schema, rows: Sequence[Any]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = []
    for column, field, values in zip(table.columns, schema, zip(*rows, strict=True), strict=True):
        texts = [None if value is None else json.dumps(value) for value in values] if _is_json(column) else values
        columns.append(pa.array(texts, field.type))
    return pa.record_batch(columns, schema)


def _arrow_schema(table: Table) -> pa.Schema:
    import pyarrow as pa

    kinds = ((Float, pa.float64()), (Integer, pa.int64()), (String, pa.string()), (JSON, pa.string()))
    return pa.schema(
        [(column.name, next(arrow for kind, arrow in kinds if isinstance(column.type, kind))) for column in table.c]
    )


def _is_json(column: Any) -> bool:
    return isinstance(column.type, JSON)


def _sync_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _put(partial: Path, folder: Path) -> None:
    """The new folder in the place of the old one, which goes only once the new one stands."""
    old = partial.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


# --- reading ---


def open_export(folder: Path) -> Engine:
    """An export as a database of the current schema: a temporary one, gone with the engine, that nobody may write."""
    manifest = read_manifest(folder)
    _verify(folder, manifest)
    try:
        engine = temporary_copy(manifest.revision, lambda table: _read(folder, manifest, table))
    except SQLAlchemyError as error:
        raise explained(error, str(folder)) from None
    return engine.execution_options(export=str(folder))


def read_manifest(folder: Path) -> Manifest:
    """The manifest; raises FedbenchError when it is damaged or of a newer fedbench."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no manifest of an export"
        raise _damaged(folder, f"{MANIFEST}: {reason}") from None
    if manifest.revision not in known_revisions():
        raise newer_schema(str(folder), manifest.revision)
    return manifest


def temporary_copy(revision: str, rows: Batches) -> Engine:
    """A temporary SQLite database of that schema, filled with these rows, then brought to the current schema."""
    place = tempfile.TemporaryDirectory(prefix="fedbench-")
    engine = create_engine(URL.create("sqlite", database=str(Path(place.name) / "copy.sqlite")))
    weakref.finalize(engine, place.cleanup)
    migrate(engine, revision)
    then = MetaData()
    then.reflect(engine)
    with engine.begin() as connection:
        for table in then.sorted_tables:
            if table.name not in LEFT_OUT:
                for part in rows(table):
                    connection.execute(insert(table), part)
    migrate(engine)
    return engine


def _verify(folder: Path, manifest: Manifest) -> None:
    for name, file in manifest.tables.items():
        path = folder / f"{name}.{manifest.format}"
        if not path.is_file():
            raise _damaged(folder, f"{path.name} is missing")
        if _sha256(path) != file.sha256:
            raise _damaged(folder, f"{path.name} is not what was written")


def _read(folder: Path, manifest: Manifest, table: Table) -> Iterator[list[dict[str, Any]]]:
    """A table's rows, with the types that the table has."""
    if table.name not in manifest.tables:
        raise _damaged(folder, f"{MANIFEST} does not know the table {table.name}")
    from_json = [column.name for column in table.c if _is_json(column)]
    found = 0
    for batch in _arrow_batches(folder / f"{table.name}.{manifest.format}", _arrow_schema(table)):
        rows: list[dict[str, Any]] = batch.to_pylist()
        for row in rows:
            row.update({name: json.loads(row[name]) for name in from_json})
        found += len(rows)
        if rows:
            yield rows
    if found != manifest.tables[table.name].rows:
        raise _damaged(folder, f"{table.name} has {found} rows, not {manifest.tables[table.name].rows}")


def _arrow_batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from pyarrow import csv, parquet

    if path.suffix == ".parquet":
        yield from parquet.ParquetFile(path).iter_batches(BATCH)
        return
    convert = csv.ConvertOptions(  # what is quoted is text, also if it is empty; what is not there is missing
        column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    yield from csv.open_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=convert)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: Path, what: str) -> FedbenchError:
    return FedbenchError(f"the export {folder} is damaged: {what}.", "Make it again: fedbench db export")
