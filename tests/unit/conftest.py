"""Fixtures of all unit tests that need a database: a fresh one, and plain SQL to look at it."""

import pytest
from sqlalchemy import create_engine, text

from fedbench.store.database import database_url, open_database, writing
from fedbench.store.models import Base


@pytest.fixture
def backend():
    """The kind of database; a folder or file of tests that run on both gives this fixture parameters."""
    return "sqlite"


@pytest.fixture(scope="session")
def on_postgres(postgres):
    """A database on the server with fedbench's tables; emptying them is quicker than making them for every test."""
    url = postgres.new_database()
    open_database(url, create=True).dispose()
    return url


@pytest.fixture
def url(backend, tmp_path, request, monkeypatch):
    """Where a database may be made; on a server it is there, and empty."""
    if backend == "sqlite":
        return database_url(str(tmp_path / "results" / "fedbench.sqlite"))
    monkeypatch.chdir(tmp_path)  # where files that belong to the database go
    url = request.getfixturevalue("on_postgres")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(Base.metadata.tables)} RESTART IDENTITY"))
    engine.dispose()
    return url


@pytest.fixture
def engine(url):
    """A new database."""
    opened = open_database(url, create=True)
    yield opened
    opened.dispose()


@pytest.fixture
def sql(engine):
    """Runs a statement and returns its rows as tuples; none for a change."""

    def execute(statement, **values):
        with writing(engine).begin() as connection:
            result = connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else []

    return execute
