"""A database that the first schema wrote opens for ever.

`tests/fixtures/schema_0001.sqlite` was made once, and must never be made again:

    engine = create_engine("sqlite:///schema_0001.sqlite")
    migrate(engine, "0001")
    sqlite3.connect("schema_0001.sqlite").executescript(Path("schema_0001.sql").read_text())

`schema_0001.sql` beside it holds the rows: a finished job, one that failed, and one that waits. Its journal is WAL.
"""

import shutil
from pathlib import Path

import pytest

import fedbench
from fedbench import queue
from fedbench.report.table import results_table
from fedbench.store.database import OlderSchemaError, database_url, open_database, upgrade

FIXTURE = Path(__file__).parents[2] / "fixtures" / "schema_0001.sqlite"


@pytest.fixture
def old(tmp_path):
    """A copy: opening changes the file."""
    shutil.copy(FIXTURE, tmp_path / "old.sqlite")
    return database_url(str(tmp_path / "old.sqlite"))


@pytest.fixture
def upgraded(old):
    upgrade(old)
    engine = open_database(old, create=False)
    yield engine
    engine.dispose()


def test_it_is_of_the_first_schema(old):
    with pytest.raises(OlderSchemaError, match="has the older schema 0001"):
        open_database(old, create=False)


def test_its_queue_is_as_it_was(upgraded):
    found = [(job.spec.method, job.status, job.last_round, job.error) for job in queue.listing(upgraded)]

    assert found == [
        ("fedavg", "done", 2, ""),
        ("fedprox", "failed", 0, "ValueError: no luck"),
        ("local", "pending", 0, ""),
    ]
    assert queue.sweep_ids(upgraded) == {"first": 1}


def test_its_waiting_job_can_be_run_and_its_failed_one_retried(upgraded):
    assert queue.claim(upgraded, "me").spec.method == "local"
    assert queue.retry(upgraded, []) == 1
    assert queue.claim(upgraded, "me").spec.method == "fedprox"


def test_its_table_has_the_known_numbers(upgraded):
    """At round 2, the last: PM 0.75, GM 0.5, ECE of the PM 0.125; 1.5 MB in each of two rounds; 12.5 s."""
    table = results_table(upgraded, "first")

    found = {
        column.header[0]: cell.measured.mean for column, cell in zip(table.columns, table.rows[0].cells, strict=True)
    }
    assert found == {
        "seeds": 1,
        "PM acc": 75,
        "GM acc": 50,
        "ECE": 12.5,
        "Brier": 0.375,
        "NLL": 0.625,
        "MB sent": 3,
        "seconds": 12.5,
    }


def test_it_loads_with_the_known_numbers(upgraded):
    results = fedbench.load(upgraded.url.database)

    row = results.runs.iloc[0]
    assert len(results.runs) == 1
    assert (row["method"], row["pm_value"], row["gm_value"], row["pm_ece"], row["host"]) == (
        *("fedavg", 0.75, 0.5, 0.125, "ada"),
    )
    pm = results.curves.query("view == 'pm' and metric == 'accuracy'")
    assert pm[["round", "value"]].values.tolist() == [[1, 0.875], [2, 0.75]]
    clients = results.clients.query("stage == 'final' and view == 'gm'")
    assert clients[["client", "metric", "value"]].values.tolist() == [[0, "accuracy", 0.375], [1, "accuracy", 0.625]]
    bins = results.histograms[["view", "kind", "bin", "count", "confidence", "correct"]]
    assert bins.values.tolist() == [
        ["gm", "reliability", 9, 16.0, 15.0, 8.0],
        ["pm", "reliability", 9, 16.0, 15.0, 12.0],
    ]
    assert results.costs["bytes_down"].sum() == 2_000_000
