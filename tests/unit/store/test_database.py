"""Opening the database: what is made on first use, what is refused, and what the messages say."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError

from fedbench.errors import FedbenchError
from fedbench.store import database
from fedbench.store.database import (
    BUSY_SECONDS,
    DEFAULT_DB,
    SCHEMA,
    OlderSchemaError,
    clear_errors,
    database_url,
    known_revisions,
    migrate,
    open_database,
    results_folder,
    shown,
    upgrade,
    writing,
)
from fedbench.store.models import Base

CREATE = """
import sys
from alembic import command  # imported before the start, so that all begin to create at the same moment
from fedbench.store.database import database_url, open_database
print("ready", flush=True)
sys.stdin.readline()
open_database(database_url(sys.argv[1]), create=True).dispose()
"""


@pytest.fixture
def backend():
    """These are about SQLite's files; test_postgresql.py is about the server."""
    return "sqlite"


@pytest.fixture
def foreign(tmp_path):
    """The database of another program."""
    path = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipe (name TEXT)")
    connection.close()
    return path


@pytest.fixture
def of_schema(url):
    """Makes a database of an older schema that holds the rows of these statements."""

    def make(revision, *statements):
        Path(url.database).parent.mkdir()
        engine = database._engine(url)
        with writing(engine).begin() as connection:
            config = database._alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
            for statement in statements:
                connection.exec_driver_sql(statement)
        engine.dispose()

    return make


def files_under(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


# --- which database ---


def test_the_database_given_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("FEDBENCH_DB", "from_environment.sqlite")

    assert database_url("given.sqlite").database == "given.sqlite"


def test_the_environment_wins_over_the_default(monkeypatch):
    monkeypatch.setenv("FEDBENCH_DB", "from_environment.sqlite")

    assert database_url().database == "from_environment.sqlite"


def test_the_default_is_a_file_in_results(monkeypatch):
    monkeypatch.delenv("FEDBENCH_DB", raising=False)

    assert (database_url().get_backend_name(), database_url().database) == ("sqlite", DEFAULT_DB)


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")

    assert database_url("~/db.sqlite").database == "/home/ada/db.sqlite"


def test_a_url_is_taken_as_it_is():
    url = database_url("postgresql+psycopg://ada@host/results")

    assert (url.get_backend_name(), url.host, url.database) == ("postgresql", "host", "results")


@pytest.mark.parametrize("bad", ["://", "postgresql://ada:secret@host:port/results"])
def test_a_malformed_url_is_a_clear_error_without_its_password(bad):
    with pytest.raises(FedbenchError) as caught:
        database_url(bad)

    assert "--db" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_results_folder_is_beside_a_sqlite_file(tmp_path):
    assert results_folder(database_url(str(tmp_path / "db.sqlite"))) == tmp_path


def test_the_results_folder_of_a_server_is_results():
    assert results_folder(make_url("postgresql://host/name")) == Path("results")


# --- creation ---


def test_a_database_is_made_on_first_use_with_its_folder(url):
    engine = open_database(url, create=True)

    assert Path(url.database).is_file()
    assert set(inspect(engine).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    engine.dispose()


def test_the_migrations_make_what_the_models_describe(engine):
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})

        assert compare_metadata(context, Base.metadata) == []


def test_the_schema_constant_is_the_newest_revision(engine, sql):
    assert known_revisions()[0] == SCHEMA
    assert sql("SELECT version_num FROM alembic_version") == [(SCHEMA,)]


def test_an_existing_database_is_opened_with_its_content(url, engine, sql):
    sql("INSERT INTO sweep (name, grid) VALUES ('kept', '{}')")

    again = open_database(url, create=True)

    with again.connect() as connection:
        assert connection.exec_driver_sql("SELECT name FROM sweep").scalars().all() == ["kept"]
    again.dispose()


def test_a_migration_that_fails_leaves_nothing(url, monkeypatch):
    def breaks_at_the_end(config, revision, upgrade=command.upgrade):
        upgrade(config, revision)
        raise RuntimeError("power cut")

    monkeypatch.setattr(command, "upgrade", breaks_at_the_end)

    with pytest.raises(RuntimeError, match="power cut"):
        open_database(url, create=True)

    connection = sqlite3.connect(url.database)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()


def test_processes_that_create_it_at_once_all_succeed(url):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, url.database],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()

    errors = [process.communicate(timeout=60)[1] for process in processes]

    assert [(process.returncode, error) for process, error in zip(processes, errors, strict=True)] == [(0, "")] * 3


def test_a_database_that_another_process_makes_meanwhile_is_not_foreign(url, monkeypatch):
    def too_early(engine, look=database._revision):
        """Looks just before another process has made the tables."""
        found = look(engine)
        if found is None:
            migrate(engine)
        return found

    monkeypatch.setattr(database, "_revision", too_early)

    engine = open_database(url, create=True)

    assert "job" in inspect(engine).get_table_names()


# --- the connection ---


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("journal_mode", "wal"), ("foreign_keys", 1), ("busy_timeout", 1000 * BUSY_SECONDS), ("synchronous", 1)],
)
def test_every_connection_is_set_up(engine, pragma, value):
    with engine.connect() as first, engine.connect() as second:
        assert first.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value
        assert second.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_foreign_keys_are_enforced(sql):
    with pytest.raises(IntegrityError, match="FOREIGN KEY"):
        sql("INSERT INTO sweep_job (sweep_id, job_id) VALUES (1, 1)")


def test_a_writing_transaction_locks_when_it_begins(engine, url):
    other = sqlite3.connect(url.database, timeout=0, isolation_level=None)

    with writing(engine).begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")

    other.execute("BEGIN IMMEDIATE")  # free again
    other.close()


def test_readers_do_not_wait_for_a_writer(engine, url):
    other = sqlite3.connect(url.database, timeout=0)

    with writing(engine).begin() as connection:
        connection.exec_driver_sql("INSERT INTO sweep (name, grid) VALUES ('half done', '{}')")
        seen = other.execute("SELECT count(*) FROM sweep").fetchone()

    assert seen == (0,)
    other.close()


# --- what is refused ---


def test_a_database_of_a_newer_version_is_refused(url, engine, sql):
    sql("UPDATE alembic_version SET version_num = 'ffff'")

    with pytest.raises(FedbenchError, match=r"newer fedbench.*ffff") as caught:
        open_database(url, create=True)

    assert "Upgrade fedbench" in caught.value.hint


def test_a_database_of_an_older_version_names_the_command_that_upgrades_it(url, of_schema):
    of_schema("0001")

    with pytest.raises(OlderSchemaError, match="older schema 0001") as caught:
        open_database(url, create=True)

    assert "fedbench db upgrade" in caught.value.hint


def test_an_upgrade_of_a_newer_database_is_refused(url, engine, sql):
    sql("UPDATE alembic_version SET version_num = 'ffff'")

    with pytest.raises(FedbenchError, match="newer"):
        upgrade(url)

    assert sql("SELECT version_num FROM alembic_version") == [("ffff",)]


FIRST_RELEASED = (
    "INSERT INTO job (key, spec, status, priority, attempts) VALUES ('abc', '{}', 'done', 2, 1)",
    "INSERT INTO run (job_id, status, device, host, versions, started, last_round) "
    "VALUES (1, 'done', 'cpu', 'here', '{}', 0, 5)",
    "INSERT INTO evaluation (run_id, recorded, round, stage, step, view, split, predict) "
    "VALUES (1, 5, 5, 'final', 0, 'gm', 'test', 'mean')",
    "INSERT INTO metric (evaluation_id, name, value) VALUES (1, 'accuracy', 0.5)",
)


def test_an_upgrade_of_the_first_schema_keeps_all_that_is_in_it(url, of_schema):
    of_schema("0001", *FIRST_RELEASED)

    upgrade(url)

    engine = open_database(url, create=False)
    with engine.connect() as connection:
        job = connection.exec_driver_sql("SELECT key, status, priority, attempts, furthest, timeout, stop FROM job")
        assert job.all() == [("abc", "done", 2, 1, 0, None, None)]
        assert connection.exec_driver_sql("SELECT run_id, value FROM metric, evaluation").all() == [(1, 0.5)]
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_a_foreign_database_is_refused(foreign):
    with pytest.raises(FedbenchError, match=r"foreign\.sqlite is a database, but not fedbench's"):
        open_database(database_url(str(foreign)), create=True)


def test_a_foreign_database_is_not_touched(foreign):
    before = foreign.read_bytes()

    with pytest.raises(FedbenchError):
        open_database(database_url(str(foreign)), create=True)

    assert foreign.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("not a database, but long enough to be looked at " * 10)

    with pytest.raises(FedbenchError, match=r"notes\.txt: file is not a database") as caught:
        open_database(database_url(str(notes)), create=True)

    assert "--db" in caught.value.hint
    assert notes.read_text().startswith("not a database")
    assert files_under(tmp_path) == [Path("notes.txt")]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(FedbenchError, match="is a folder, not a database"):
        open_database(database_url(str(tmp_path)), create=True)


def test_a_missing_database_is_not_made_to_be_read(tmp_path):
    with pytest.raises(FedbenchError, match="there is no database") as caught:
        open_database(database_url(str(tmp_path / "deep" / "db.sqlite")), create=False)

    assert "fedbench run" in caught.value.hint
    assert files_under(tmp_path) == []


def test_an_empty_file_holds_no_results(tmp_path):
    (tmp_path / "empty.sqlite").touch()

    with pytest.raises(FedbenchError, match="holds no results yet"):
        open_database(database_url(str(tmp_path / "empty.sqlite")), create=False)


def test_a_results_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(FedbenchError, match=r"results folder .*file cannot be made"):
        open_database(database_url(str(tmp_path / "file" / "db.sqlite")), create=True)


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(FedbenchError):
        open_database(database_url(str(tmp_path / ("x" * 300))), create=True)


def test_a_folder_that_cannot_be_written_is_refused_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(database.os, "access", lambda path, mode: mode != os.W_OK)

    with pytest.raises(FedbenchError, match="cannot be written") as caught:
        open_database(database_url(str(tmp_path / "db.sqlite")), create=True)

    assert "--db" in caught.value.hint
    assert files_under(tmp_path) == []


def test_a_database_opened_read_only_is_refused_by_what_writes(url, engine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = files_under(tmp_path)

    with pytest.raises(FedbenchError):
        open_database(make_url(f"sqlite:///file:{url.database}?mode=ro&uri=true"), create=True)

    assert files_under(tmp_path) == before


@pytest.mark.parametrize("where", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(where):
    with pytest.raises(FedbenchError, match="in memory"):
        open_database(make_url(where), create=True)


# --- messages ---


@pytest.mark.parametrize(
    "where",
    [
        "nosuch://ada:secret@host/results",
        "postgresql+nosuch://ada:secret@host/results",
        "mysql+pymysql://ada:secret@host/results",
    ],
)
def test_a_missing_driver_is_a_clear_error_without_the_password(where):
    with pytest.raises(FedbenchError) as caught:
        open_database(make_url(where), create=True)

    assert "driver" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://ada:secret@host/results",
        "postgresql://host/results?password=secret",
        "postgresql://host/results?sslmode=require&sslpassword=secret",
    ],
)
def test_a_password_is_never_shown(where):
    assert "host/results" in shown(make_url(where))
    assert "secret" not in shown(make_url(where))


@pytest.mark.parametrize(
    ("problem", "way_out"),
    [
        ("database is locked", "Another program is writing"),
        ("database disk image is malformed", "damaged"),
        ("attempt to write a readonly database", "writable"),
        ("database or disk is full", "Make room"),
        ('password authentication failed for user "ada"', "Check user and password"),
        ('database "results" does not exist', "createdb"),
    ],
)
def test_trouble_with_the_database_comes_with_the_way_out(url, problem, way_out):
    with pytest.raises(FedbenchError, match=problem) as caught, clear_errors(url):
        raise DBAPIError("INSERT ...", {}, sqlite3.OperationalError(problem))

    assert way_out in caught.value.hint
