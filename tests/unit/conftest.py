"""Fixtures of all unit tests that need a database: a fresh one, and plain SQL to look at it."""

import pytest
from sqlalchemy import text

from fedbench.store.database import database_url, open_database, writing


@pytest.fixture
def url(tmp_path):
    """Where a database may be made."""
    return database_url(str(tmp_path / "results" / "fedbench.sqlite"))


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
