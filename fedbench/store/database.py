"""Opens the results database: creates it, checks its version, and turns its troubles into clear messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError, SQLAlchemyError

from fedbench.errors import FedbenchError

SCHEMA = "0002"
"""The revision that this fedbench reads and writes: the newest in `migrations/versions`."""
DEFAULT_DB = "results/fedbench.sqlite"
BUSY_SECONDS = 60


class OlderSchemaError(FedbenchError):
    """The database must be upgraded before this fedbench can use it."""


class EmptyDatabaseError(FedbenchError):
    """There is a database, but no fedbench has used it yet."""


def database_url(given: str | None = None) -> URL:
    """`--db`, else FEDBENCH_DB, else `results/fedbench.sqlite`; a plain path means a SQLite file."""
    where = given or os.environ.get("FEDBENCH_DB") or DEFAULT_DB
    if "://" not in where:
        return URL.create("sqlite", database=str(Path(where).expanduser()))
    try:
        return make_url(where)
    except (ArgumentError, ValueError):  # the latter for a port that is no number
        raise FedbenchError(
            "--db is neither a path nor a database URL.", "Write postgresql+psycopg://user@host/name, or a path."
        ) from None


def results_folder(url: URL) -> Path:
    """Where files that belong to the database lie: beside a SQLite file, else in `results/`."""
    return Path(url.database).parent if url.get_backend_name() == "sqlite" and url.database else Path("results")


def open_database(url: URL, *, create: bool) -> Engine:
    """An engine on a database of the current schema. Raises FedbenchError when there is none or it is another's.

    A folder that `fedbench db export` wrote is as good as a database, to read it.
    """
    if url.get_backend_name() == "sqlite":
        if os.path.isdir(url.database or ""):
            from fedbench.store import export

            if export.is_export(Path(url.database or "")):
                if create:
                    raise _only_read(str(url.database))
                return export.open_export(Path(url.database or ""))
        _prepare_file(url, create)
    with clear_errors(url):
        engine = _engine(url)
        found = _revision(engine)
        if found is None:
            # One look: a database that another process makes at this moment has all of its tables, or none.
            tables = inspect(engine).get_table_names()
            if tables and "alembic_version" not in tables:
                raise FedbenchError(f"{shown(url)} is a database, but not fedbench's.", "Choose another with --db.")
            if not create:
                hint = "Run a grid: fedbench run --grid quickstart"
                raise EmptyDatabaseError(f"{shown(url)} holds no results yet.", hint)
            _use_wal(engine)
            migrate(engine)
        elif found == SCHEMA:
            _use_wal(engine)
        elif found not in known_revisions():
            raise newer_schema(shown(url), found)
        else:
            raise OlderSchemaError(f"{shown(url)} has the older schema {found}.", "Run: fedbench db upgrade")
    return engine


def writing(engine: Engine) -> Engine:
    """The same database, with transactions that take the write lock when they begin.

    Whoever changes a database comes here: an export is refused.
    """
    if (folder := engine.get_execution_options().get("export")) is not None:
        raise _only_read(folder)
    return engine.execution_options(write=True)


def one_at_a_time(connection: Connection) -> None:
    """Of the processes that come here in a writing transaction, all but one wait until it ends.

    SQLite lets only one write anyway; on a server two that touch the same rows in another order would block.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(7236021)"))


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring a database to the current schema, from nothing or from an older one; whole or not at all.

    Another revision than the current one is for a copy of what an older fedbench wrote.
    """
    from alembic import command  # slow to import, and only needed here

    with writing(engine).begin() as connection:
        one_at_a_time(connection)
        config = _alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def upgrade(url: URL) -> None:
    """Bring an existing database to the current schema; raises FedbenchError when it is not fedbench's, or newer."""
    try:
        open_database(url, create=False)
    except OlderSchemaError:
        with clear_errors(url):
            migrate(_engine(url))


def known_revisions() -> list[str]:
    """All schema revisions of this fedbench, newest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory.from_config(_alembic_config()).walk_revisions()]


def newer_schema(where: str, found: str) -> FedbenchError:
    """Why a database or an export cannot be read."""
    return FedbenchError(
        f"{where} was written by a newer fedbench (schema {found}, this one knows {SCHEMA}).",
        "Upgrade fedbench, or choose another database with --db.",
    )


def shown(url: URL) -> str:
    """The database's name for messages; never its password."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    secret = [name for name in url.query if "pass" in name]  # password, sslpassword
    return url.difference_update_query(secret).render_as_string(hide_password=True)


@contextmanager
def clear_errors(url: URL) -> Iterator[None]:
    """Database troubles as one message that says which database and what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise FedbenchError(
            f"the driver {error.name} for {shown(url)} is not installed.", "Run: pip install 'fedbench[postgres]'"
        ) from None
    except UnicodeDecodeError:  # sqlite3 cannot read its own complaint about a damaged schema
        raise FedbenchError(f"{shown(url)} is damaged.", "Choose another with --db, or restore a backup.") from None
    except SQLAlchemyError as error:
        raise explained(error, shown(url)) from None


def explained(error: SQLAlchemyError, where: str) -> FedbenchError:
    """The trouble as a message, with the way out. Statements and their values are left out: they may hold anything."""
    if isinstance(error, NoSuchModuleError):
        return FedbenchError(f"no driver for {where}.", "Install one: pip install 'fedbench[postgres]'")
    if isinstance(error, DBAPIError):
        return FedbenchError(f"{where}: {' '.join(str(error.orig).split())}.", _hint(error))
    return FedbenchError(f"{where}: {error}")


def _hint(error: DBAPIError) -> str:
    problem = str(error.orig)
    if "password" in problem or "authentication" in problem:
        return "Check user and password in --db or FEDBENCH_DB."
    if 'database "' in problem and "does not exist" in problem:
        return "Create it on the server (createdb), or choose another with --db."
    if "locked" in problem:
        return "Another program is writing to it. Wait for it to end, then run the same command again."
    if "not a database" in problem or "malformed" in problem:
        return "The file is damaged or not a database. Choose another with --db, or restore a backup."
    if "readonly" in problem or "unable to open" in problem:
        return "Make the folder writable, or choose another with --db."
    if "full" in problem:
        return "Make room on the disk, then run the same command again: it goes on where it stopped."
    return "Check that the database is reachable." if isinstance(error, OperationalError) else ""


def _only_read(folder: str) -> FedbenchError:
    return FedbenchError(
        f"{folder} is an export, which is only read.", f"Make a database of it first: fedbench db merge {folder}"
    )


def _prepare_file(url: URL, create: bool) -> None:
    if not url.database or url.database == ":memory:":
        raise FedbenchError("a database in memory is gone with the process.", "Give --db a path.")
    if url.database.startswith("file:"):
        raise FedbenchError("--db does not take SQLite's file: URIs.", "Give it a path.")
    path = Path(url.database)
    try:
        exists = path.exists()
    except OSError as error:
        raise FedbenchError(f"{path} cannot be a database: {error.strerror}.", "Give --db another path.") from None
    if not exists and not create:
        raise FedbenchError(f"there is no database {path}.", "Run a grid first: fedbench run --grid quickstart")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedbenchError(
            f"the results folder {path.parent} cannot be made: {error.strerror}.", "Choose another place with --db."
        ) from None
    if path.is_dir():
        raise FedbenchError(f"{path} is a folder, not a database.", "Give --db a file.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise FedbenchError(f"{path} cannot be written.", "Make it writable, or choose another with --db.")


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS}, json_deserializer=_from_json)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # BEGIN is ours: pysqlite would start transactions too late to lock
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # Take the write lock at once: a transaction that reads and then writes would else fail when another writes.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("write") else "BEGIN")

    return engine


def _from_json(text: str) -> Any:
    """Raises FedbenchError for what is none: SQLite has no checksums, and hands out what a damaged file holds."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        raise FedbenchError(
            "the database holds settings that cannot be read: it is damaged.",
            "Choose another with --db, or restore a backup.",
        ) from None


def _use_wal(engine: Engine) -> None:
    """Kept in the file, so it must be known to be fedbench's first; not possible inside a transaction."""
    if engine.dialect.name == "sqlite":
        connection = engine.raw_connection()
        connection.cursor().execute("PRAGMA journal_mode=WAL")
        connection.close()


def _revision(engine: Engine) -> str | None:
    if not inspect(engine).has_table("alembic_version"):
        return None
    with engine.connect() as connection:
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _alembic_config() -> Any:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
