"""Exports: what is written, that nothing is overwritten or half there, and that damage is noticed."""

import gc
import json
import sqlite3
from pathlib import Path

import pandas as pd
import pytest
from sqlalchemy import select, text

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.records import Cost, Evaluation, RoundRecord
from fedbench.store import export as export_module
from fedbench.store.database import database_url, open_database
from fedbench.store.export import LEFT_OUT, export, read_manifest, tables
from fedbench.store.models import Base
from fedbench.store.recorder import DatabaseRecorder

FILES = ["cost", "evaluation", "histogram", "job", "metric", "run", "sweep", "sweep_job"]


@pytest.fixture
def backend():
    """One test is about the server; the others are about files."""
    return "sqlite"


def record(accuracy):
    metrics = {None: {"accuracy": accuracy}, 0: {"accuracy": accuracy / 3}}
    found = Evaluation(1, "train", "gm", "mean", metrics, {None: [(9, 10.0, 9.1, 10 * accuracy)]})
    return RoundRecord(1, [found], [Cost(1, "client", 0.1, 10, 2**40, 40)])


def fill(engine, make_job):
    """A finished job of two sweeps, a failed one whose traceback is hard to write as CSV, and a waiting one."""
    done, failed, waiting = (make_job(seed=seed) for seed in range(3))
    queue.enqueue(engine, "small", {"name": "small"}, [done])
    queue.enqueue(engine, "large", {"name": "large"}, [done, failed, waiting])
    for outcome in ("done", "failed"):
        claimed = queue.claim(engine, "me")
        recorder = DatabaseRecorder(engine, claimed.job_id, "me")
        if outcome == "done":
            recorder.start(rounds=1, split_hash="abc", device="cpu")
            recorder.record(record(0.1))
            recorder.finish("done")
        else:
            recorder.fail('Traceback:\n  "a", 1\nValueError: ü,,""')  # before it began: its device is ""
    return done.key, failed.key, waiting.key


def contents(engine):
    """Every table that travels, as rows."""
    with engine.connect() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
            for table in tables()
        }


def opened(folder):
    return open_database(database_url(str(folder)), create=False)


@pytest.fixture
def filled(engine, make_job):
    fill(engine, make_job)
    return engine


# --- what is written ---


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_a_folder_has_a_file_per_table_and_a_manifest(filled, tmp_path, format_):
    export(filled, tmp_path / "out", format_)

    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*(f"{name}.{format_}" for name in FILES), "manifest.json"]
    )


def test_the_manifest_tells_schema_and_rows(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet")

    told = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (told["fedbench"], told["revision"], told["format"]) == ("0.1.0", "0002", "parquet")
    rows = {name: table["rows"] for name, table in told["tables"].items()}
    # a finished run and a failed one; pooled and client 0; 1 link of the small sweep and 3 of the large one
    counts = {"sweep": 2, "job": 3, "run": 2, "evaluation": 1, "metric": 2, "histogram": 1, "cost": 1, "sweep_job": 4}
    assert rows == counts


def test_every_table_travels_or_is_left_out_on_purpose():
    assert {table.name for table in tables()} | {*LEFT_OUT} == {*Base.metadata.tables, "alembic_version"}


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_others_can_read_the_files(filled, tmp_path, format_):
    export(filled, tmp_path / "out", format_)

    read = pd.read_parquet if format_ == "parquet" else pd.read_csv
    metric = read(tmp_path / "out" / f"metric.{format_}")
    assert metric["value"].tolist() == [0.1, 0.1 / 3]
    assert metric["client"].isna().tolist() == [True, False]


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_an_export_opens_as_a_database_with_the_same_content(filled, tmp_path, format_):
    export(filled, tmp_path / "out", format_)

    copy = opened(tmp_path / "out")

    assert contents(copy) == contents(filled)
    assert [row[7] for row in contents(copy)["run"]] == ["abc", None]  # a missing split hash is not an empty one
    assert contents(copy)["run"][1][3] == ""  # and an empty device is not a missing one


def test_a_table_of_many_batches_is_whole(filled, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "BATCH", 1)

    export(filled, tmp_path / "out", "parquet")

    assert contents(opened(tmp_path / "out")) == contents(filled)


def test_the_same_database_gives_the_same_bytes(filled, tmp_path):
    first, second = (export(filled, tmp_path / name, "parquet") for name in ("a", "b"))

    assert first == second


def test_a_paused_queue_is_not_part_of_the_results(filled, tmp_path):
    queue.pause(filled)
    export(filled, tmp_path / "out", "parquet")

    assert not queue.is_paused(opened(tmp_path / "out"))


# --- a part of it ---


def test_a_sweep_comes_with_its_jobs_and_their_runs_only(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet", sweep="small")

    found, everything = contents(opened(tmp_path / "out")), contents(filled)
    assert [row[1] for row in found["sweep"]] == ["small"]
    assert (found["job"], found["run"]) == (everything["job"][:1], everything["run"][:1])
    assert (found["sweep_job"], found["metric"]) == ([(1, 1)], everything["metric"])


def test_a_status_narrows_the_jobs_of_all_sweeps(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet", statuses=["failed", "pending"])

    found = contents(opened(tmp_path / "out"))
    assert [row[3] for row in found["job"]] == ["failed", "pending"]
    assert (found["metric"], found["cost"], found["evaluation"]) == ([], [], [])
    assert [row[1] for row in found["sweep"]] == ["small", "large"]


def test_sweep_and_status_narrow_together(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet", sweep="small", statuses=["failed"])

    assert contents(opened(tmp_path / "out"))["job"] == []


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"sweep": "smal"}, "no sweep 'smal'.\nDid you mean small"), ({"statuses": ["don"]}, "'don'.\nDid you mean done")],
)
def test_an_unknown_sweep_or_status_is_a_clear_error_and_leaves_nothing(filled, tmp_path, wanted, message):
    with pytest.raises(FedbenchError) as caught:
        export(filled, tmp_path / "out", "parquet", **wanted)

    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


# --- where it is written ---


def test_an_export_is_replaced_by_a_newer_one_of_another_format(filled, tmp_path):
    export(filled, tmp_path / "out", "csv")
    export(filled, tmp_path / "out", "parquet", statuses=["done"])

    assert [row[3] for row in contents(opened(tmp_path / "out"))["job"]] == ["done"]
    assert list((tmp_path / "out").glob("*.csv")) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_empty_folder_is_used(filled, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".gitkeep").touch()

    export(filled, tmp_path / "out", "parquet")

    assert len(contents(opened(tmp_path / "out"))["job"]) == 3


@pytest.mark.parametrize("before", [False, True])
def test_a_folder_with_anything_else_in_it_is_refused_and_kept(filled, tmp_path, before):
    if before:
        export(filled, tmp_path / "out", "parquet")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "thesis.tex").write_text("precious")

    with pytest.raises(FedbenchError, match=r"thesis\.tex"):
        export(filled, tmp_path / "out", "parquet")

    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


def test_a_file_in_the_way_is_refused_and_kept(filled, tmp_path):
    (tmp_path / "out").write_text("precious")

    with pytest.raises(FedbenchError, match="is a file"):
        export(filled, tmp_path / "out", "parquet")

    assert (tmp_path / "out").read_text() == "precious"


def test_an_export_that_fails_half_way_leaves_the_old_one_and_no_rubbish(filled, tmp_path, monkeypatch):
    export(filled, tmp_path / "out", "parquet")
    before = contents(opened(tmp_path / "out"))
    queue.retry(filled, [])
    write = export_module._write

    def full(connection, table, conditions, path):
        if table.name == "metric":
            raise OSError(28, "No space left on device")
        return write(connection, table, conditions, path)

    monkeypatch.setattr(export_module, "_write", full)
    with pytest.raises(FedbenchError, match="No space left on device"):
        export(filled, tmp_path / "out", "parquet")

    assert contents(opened(tmp_path / "out")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "results"]


def test_an_old_export_comes_back_when_the_new_one_cannot_take_its_place(filled, tmp_path, monkeypatch):
    export(filled, tmp_path / "out", "parquet")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    rename = Path.rename

    def refuse_the_new(self, target):
        if target.name == "out" and self.suffix != ".old":
            raise OSError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(FedbenchError, match="Permission denied"):
        export(filled, tmp_path / "out", "csv")

    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "results"]


def test_a_link_to_a_folder_stays_a_link(filled, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    export(filled, tmp_path / "link", "parquet")

    assert (tmp_path / "link").is_symlink()
    assert len(contents(opened(tmp_path / "real"))["job"]) == 3


# --- what is read ---


def test_an_export_is_never_written(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet")
    url = database_url(str(tmp_path / "out"))

    with pytest.raises(FedbenchError, match="only read") as caught:
        queue.retry(open_database(url, create=False), [])
    with pytest.raises(FedbenchError, match="only read"):
        open_database(url, create=True)

    assert caught.value.hint == f"Make a database of it first: fedbench db merge {tmp_path / 'out'}"


def test_the_copy_of_an_export_is_gone_with_its_reader(filled, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    export(filled, tmp_path / "out", "parquet")

    copy = opened(tmp_path / "out")
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    del copy
    gc.collect()

    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_folder_without_a_manifest_is_no_database(tmp_path):
    with pytest.raises(FedbenchError, match="is a folder, not a database"):
        opened(tmp_path)


def test_damage_to_any_file_is_noticed(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet")
    for name in FILES:
        path = tmp_path / "out" / f"{name}.parquet"
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (None, content[:middle], flipped, b""):
            path.unlink() if damaged is None else path.write_bytes(damaged)

            with pytest.raises(FedbenchError, match=rf"is damaged: {name}\.parquet"):
                opened(tmp_path / "out")

        path.write_bytes(content)
    assert contents(opened(tmp_path / "out")) == contents(filled)


def test_a_manifest_that_does_not_fit_is_refused(filled, tmp_path):
    export(filled, tmp_path / "out", "parquet")
    path = tmp_path / "out" / "manifest.json"
    content = path.read_text()
    for change, message in (
        (lambda told: told["tables"].pop("metric"), "does not know the table metric"),
        (lambda told: told["tables"]["metric"].update(rows=1), "metric has 2 rows, not 1"),
        (lambda told: told.pop("format"), "it is no manifest of an export"),
        (lambda told: told.update(format="csv"), r"job\.csv is missing"),
        (lambda told: told.update(revision="9999"), r"newer fedbench \(schema 9999, this one knows 0002\)"),
    ):
        told = json.loads(content)
        change(told)
        path.write_text(json.dumps(told))

        with pytest.raises(FedbenchError, match=message):
            opened(tmp_path / "out")


def test_a_manifest_that_is_no_manifest_is_refused(tmp_path):
    for content in (b"", b"{", b"[]", b"\xff"):
        (tmp_path / "manifest.json").write_bytes(content)

        with pytest.raises(FedbenchError, match="is damaged"):
            opened(tmp_path)


def test_an_export_of_an_older_schema_is_upgraded_as_it_is_read(filled, tmp_path):
    """As the first schema wrote it: without the columns and the table that came with 0002."""
    export(filled, tmp_path / "out", "csv")
    path = tmp_path / "out" / "job.csv"
    jobs = pd.read_csv(path, dtype=object, keep_default_na=False).drop(columns=["furthest", "timeout", "stop"])
    jobs.to_csv(path, index=False)
    told = read_manifest(tmp_path / "out")
    told.revision, told.tables["job"].sha256 = "0001", export_module._sha256(path)
    (tmp_path / "out" / "manifest.json").write_text(told.model_dump_json())

    found = opened(tmp_path / "out")

    assert [job.status for job in queue.listing(found)] == ["done", "failed", "pending"]
    with found.connect() as connection:
        added = connection.execute(text("SELECT furthest, timeout, stop FROM job")).all()
    assert [tuple(row) for row in added] == [(0, None, None)] * 3
    assert contents(found)["metric"] == contents(filled)["metric"]


def test_rows_that_lost_their_parents_do_not_stop_an_export(filled, url, tmp_path):
    with sqlite3.connect(url.database) as connection:  # which does not enforce foreign keys
        connection.execute("DELETE FROM run WHERE status = 'done'")

    export(filled, tmp_path / "out", "parquet")

    assert len(contents(opened(tmp_path / "out"))["metric"]) == 2


def test_a_server_is_exported_like_a_file(postgres, make_job, tmp_path):
    server = open_database(postgres.new_database(), create=True)
    fill(server, make_job)

    export(server, tmp_path / "out", "parquet")

    assert contents(opened(tmp_path / "out")) == contents(server)
    server.dispose()
