"""Vacuuming: what goes, what stays, and how much room that makes."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert

from fedbench import queue
from fedbench.records import Evaluation, RoundRecord
from fedbench.store.database import writing
from fedbench.store.models import Run
from fedbench.store.recorder import DatabaseRecorder
from fedbench.store.vacuum import Vacuumed, vacuum

ELSEWHERE = {"device": "cpu", "host": "here", "versions": {}, "last_round": 1}


@pytest.fixture
def runs(engine):
    """Adds a run of a job with this status and start."""

    def add(job, status, started):
        with writing(engine).begin() as connection:
            connection.execute(insert(Run).values(job_id=job, status=status, started=started, **ELSEWHERE))

    return add


@pytest.fixture
def job(engine, make_job, sql):
    """Adds a job with this status, of its own seed; returns its id."""

    def add(seed, status):
        made = make_job(seed=seed)
        queue.enqueue(engine, f"sweep {seed}", {}, [made])
        sql("UPDATE job SET status = :status WHERE key = :key", status=status, key=made.key)
        return sql("SELECT id FROM job WHERE key = :key", key=made.key)[0][0]

    return add


def size(url):
    """Bytes of the file and of what is not yet in it."""
    files = Path(url.database), Path(f"{url.database}-wal")
    return sum(file.stat().st_size for file in files if file.exists())


def started(sql):
    return sorted(start for (start,) in sql("SELECT started FROM run"))


def test_a_clean_database_loses_nothing(engine, url, job, runs, sql):
    runs(job(0, "done"), "done", 1.0)

    found = vacuum(engine, url)

    assert (found.orphans, found.superseded, found.checkpoints) == (0, 0, 0)
    assert (started(sql), queue.counts(engine)) == ([1.0], {"done": 1})


def test_failed_and_replaced_runs_stay_unless_asked(engine, url, job, runs, sql):
    made = job(0, "done")
    for status, start in (("failed", 1.0), ("done", 2.0), ("done", 3.0)):
        runs(made, status, start)

    assert vacuum(engine, url).superseded == 0
    assert started(sql) == [1.0, 2.0, 3.0]


def test_of_a_finished_job_the_run_that_reports_read_stays(engine, url, job, runs, sql):
    """The one that began last, which after a merge need not be the one with the largest id."""
    made = job(0, "done")
    for status, start in (("failed", 1.0), ("done", 3.0), ("done", 2.0), ("interrupted", 4.0)):
        runs(made, status, start)

    assert vacuum(engine, url, superseded=True).superseded == 3
    assert started(sql) == [3.0]


def test_of_a_failed_job_the_last_error_stays(engine, url, job, runs, sql):
    made = job(0, "failed")
    runs(made, "failed", 1.0)
    runs(made, "failed", 2.0)

    assert vacuum(engine, url, superseded=True).superseded == 1
    assert started(sql) == [2.0]


def test_a_run_that_someone_can_go_on_with_stays(engine, url, job, runs, sql):
    for seed, status in enumerate(("pending", "running", "cancelled", "failed")):
        made = job(seed, status)
        runs(made, "interrupted", seed + 0.25)
        runs(made, "failed", seed + 0.5)

    assert vacuum(engine, url, superseded=True).superseded == 0
    assert len(started(sql)) == 8


def test_checkpoints_of_finished_jobs_go_and_those_of_others_stay(engine, url, job, sql, tmp_path):
    folder = tmp_path / "results" / "checkpoints"
    keys = {}
    for seed, status in enumerate(("done", "diverged", "pending", "running", "failed", "cancelled")):
        made = job(seed, status)
        keys[status] = sql("SELECT key FROM job WHERE id = :id", id=made)[0][0]
    for key in (*keys.values(), "of-another-database"):
        (folder / key).mkdir(parents=True)
        (folder / key / "00000001.ckpt").write_bytes(b"x" * 1000)

    found = vacuum(engine, url)

    kept = {keys[status] for status in ("pending", "running", "failed", "cancelled")} | {"of-another-database"}
    assert {path.name for path in folder.iterdir()} == kept
    assert found.checkpoints == 2
    assert found.freed >= (2000 if engine.dialect.name == "sqlite" else 0)


@pytest.mark.parametrize("backend", ["sqlite"])
def test_rows_without_parents_go_with_all_below_them_and_their_room_is_given_back(engine, url, claim, sql):
    recorder = DatabaseRecorder(engine, claim().job_id, "me")
    recorder.start(rounds=1, split_hash="abc", device="cpu")
    metrics = {client: {"accuracy": 0.5} for client in (None, *range(2000))}
    recorder.record(RoundRecord(1, [Evaluation(1, "train", "gm", "mean", metrics)], []))
    recorder.finish("done")
    with closing(sqlite3.connect(url.database)) as connection, connection:  # which does not enforce foreign keys
        connection.execute("DELETE FROM job")
    before = size(url)

    found = vacuum(engine, url)

    # the link to the sweep and the run go for themselves; the evaluation and its 2,001 metrics with the run
    assert found.orphans == 2
    assert sql("SELECT (SELECT count(*) FROM run) + (SELECT count(*) FROM metric)") == [(0,)]
    assert found.freed == before - size(url) > 20_000
    assert sql("PRAGMA freelist_count") == [(0,)]


def test_an_empty_database_can_be_vacuumed(engine, url):
    found = vacuum(engine, url, superseded=True)

    assert found == Vacuumed(0, 0, 0, found.freed)
