"""`fedbench db vacuum`: removes what nothing refers to, and gives the space back."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, select, text
from sqlalchemy.engine import URL

from fedbench import queue
from fedbench.store import queries
from fedbench.store.database import results_folder, writing
from fedbench.store.models import Base, Job, Run


@dataclass(frozen=True)
class Vacuumed:
    """What was removed, and how many bytes that gave back."""

    orphans: int
    superseded: int
    checkpoints: int
    freed: int


def vacuum(engine: Engine, url: URL, *, superseded: bool = False) -> Vacuumed:
    """Remove orphaned rows and checkpoints of finished jobs; with `superseded`, runs that no report reads."""
    before = _size(engine, url)
    with writing(engine).begin() as connection:
        orphans = _remove_orphans(connection)
    removed = _remove_superseded(engine) if superseded else 0
    checkpoints, bytes_of_checkpoints = _remove_checkpoints(engine, results_folder(url) / "checkpoints")
    _compact(engine)
    freed = before - _size(engine, url) + bytes_of_checkpoints
    return Vacuumed(orphans, removed, checkpoints, max(0, freed))


def _remove_orphans(connection: Connection) -> int:
    """Rows whose job, run or evaluation is gone: programs that do not enforce foreign keys leave them."""
    removed = 0
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            orphaned = key.parent.not_in(select(key.column))
            removed += connection.execute(delete(table).where(orphaned)).rowcount
    return removed


def _remove_superseded(engine: Engine) -> int:
    """Of a finished job, all runs but the one that reports read; of another, failed ones that it has tried again."""
    with writing(engine).begin() as connection:
        reported = queries.finished_runs(engine).set_index("job")["run"].to_dict()
        runs = connection.execute(select(Run.id, Run.job_id, Run.status).order_by(Run.id)).all()
        newest = {run.job_id: run.id for run in runs}
        superseded = [
            run.id
            for run in runs
            if run.id != reported.get(run.job_id, newest[run.job_id])
            and (run.job_id in reported or run.status not in queue.UNFINISHED)  # which a retry goes on with
        ]
        for run in superseded:
            connection.execute(delete(Run).where(Run.id == run))
    return len(superseded)


def _remove_checkpoints(engine: Engine, folder: Path) -> tuple[int, int]:
    """The folders of finished jobs, which a worker that was killed at the very end leaves: how many, how many bytes."""
    with engine.connect() as connection:
        finished = connection.execute(select(Job.key).where(Job.status.in_(queue.FINISHED))).scalars().all()
    left = [folder / key for key in finished if (folder / key).is_dir()]
    size = sum(path.stat().st_size for place in left for path in place.rglob("*") if path.is_file())
    for place in left:
        shutil.rmtree(place)
    return len(left), size


def _compact(engine: Engine) -> None:
    """VACUUM does not work inside a transaction."""
    if engine.dialect.name == "sqlite":
        direct = engine.raw_connection()
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            direct.cursor().execute(statement)
        direct.close()
        return
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("VACUUM ANALYZE"))


def _size(engine: Engine, url: URL) -> int:
    if engine.dialect.name != "sqlite":
        with engine.connect() as connection:
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    files = [Path(f"{url.database}{suffix}") for suffix in ("", "-wal")]
    return sum(file.stat().st_size for file in files if file.exists())
