"""Merging: jobs by key, runs of all machines, whole or not at all, and twice is once."""

import hashlib
import shutil
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, select, text

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.records import Cost, Evaluation, RoundRecord
from fedbench.store import merge as merge_module
from fedbench.store import queries
from fedbench.store.database import database_url, migrate, open_database, writing
from fedbench.store.export import export, tables
from fedbench.store.merge import Merged, merge, open_source
from fedbench.store.models import Base
from fedbench.store.recorder import DatabaseRecorder

FIRST_SCHEMA = Path(__file__).parents[2] / "fixtures" / "schema_0001.sqlite"


@pytest.fixture
def backend():
    """Two tests are about the server; the others are about files."""
    return "sqlite"


class Machine:
    """A database on a machine of its own, whose jobs differ by their seeds."""

    def __init__(self, engine, make_job, host):
        self.engine, self.host, self._make_job = engine, host, make_job

    def ask(self, sweep, *seeds):
        queue.enqueue(self.engine, sweep, {"name": sweep}, [self._make_job(seed=seed) for seed in seeds])

    def begin(self, accuracy=0.5):
        """Takes the next job and records a round of it."""
        claimed = queue.claim(self.engine, self.host)
        recorder = DatabaseRecorder(self.engine, claimed.job_id, self.host)
        recorder.start(rounds=2, split_hash="abc", device="cpu")
        metrics = {None: {"accuracy": accuracy}, 0: {"accuracy": accuracy / 2}}
        found = Evaluation(1, "train", "gm", "mean", metrics, {None: [(9, 10.0, 9.0, 10 * accuracy)]})
        recorder.record(RoundRecord(1, [found], [Cost(1, "client", 0.1, 10, 80, 40)]))
        self.sql("UPDATE run SET host = :host WHERE id = (SELECT max(id) FROM run)", host=self.host)
        return recorder

    def work(self, outcome="done", accuracy=0.5):
        recorder = self.begin(accuracy)
        recorder.fail("no luck") if outcome == "failed" else recorder.finish(outcome)

    def sql(self, statement, **values):
        with writing(self.engine).begin() as connection:
            result = connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else []

    def jobs(self):
        """Seed -> status."""
        return {job.spec.seed: job.status for job in queue.listing(self.engine)}

    def sweeps(self):
        """Name -> seeds."""
        return {
            name: sorted(job.spec.seed for job in queue.listing(self.engine, sweep=sweep))
            for name, sweep in queue.sweep_ids(self.engine).items()
        }

    def scores(self):
        """Every pooled accuracy: seed, host, status of the run, value; of all runs."""
        rows = self.sql(
            "SELECT job.key, run.host, run.status, metric.value FROM metric"
            " JOIN evaluation ON evaluation.id = evaluation_id JOIN run ON run.id = run_id JOIN job ON job.id = job_id"
            " WHERE client IS NULL"
        )
        seeds = {job.key: job.spec.seed for job in queue.listing(self.engine)}
        return sorted((seeds[key], *rest) for key, *rest in rows)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A new database to copy, which is quicker than to make one."""
    path = tmp_path_factory.mktemp("empty") / "empty.sqlite"
    open_database(database_url(str(path)), create=True).dispose()
    return path


@pytest.fixture
def machine(tmp_path, make_job, empty_database):
    made, numbers = [], count()

    def make(host, server=None):
        path = tmp_path / f"{host}-{next(numbers)}.sqlite"
        if server is None:
            shutil.copy(empty_database, path)
        made.append(open_database(server or database_url(str(path)), create=True))
        return Machine(made[-1], make_job, host)

    yield make
    for engine in made:
        engine.dispose()


def contents(engine):
    """Every row of every table."""
    with engine.connect() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
        }


# --- two machines ---


@pytest.fixture
def two(machine):
    """Ada has run seeds 0 and 1; Bob has run 1, failed at 2, and 3 waits; they share a sweep."""
    ada, bob = machine("ada"), machine("bob")
    ada.ask("both", 0, 1)
    ada.work(accuracy=0.25)
    ada.work(accuracy=0.5)
    bob.ask("both", 1)
    bob.ask("own", 2, 3)
    bob.work(accuracy=0.75)
    bob.work("failed", accuracy=0.125)
    return ada, bob


def test_jobs_of_both_are_there_once_and_all_their_runs(two):
    ada, bob = two

    merged = merge(ada.engine, [bob.engine])

    assert merged == Merged(jobs=2, finished=0, runs=2)
    assert ada.jobs() == {0: "done", 1: "done", 2: "failed", 3: "pending"}
    assert ada.scores() == [
        (0, "ada", "done", 0.25),
        (1, "ada", "done", 0.5),
        (1, "bob", "done", 0.75),
        (2, "bob", "failed", 0.125),
    ]


def test_all_that_belongs_to_a_run_comes_along(two):
    ada, bob = two
    merge(ada.engine, [bob.engine])

    found = {name: len(rows) for name, rows in contents(ada.engine).items()}

    # four runs of one evaluation, with two metrics, one bin, and one cost each
    assert (found["run"], found["evaluation"], found["metric"], found["histogram"], found["cost"]) == (4, 4, 8, 4, 4)
    costs = "SELECT host, bytes_down, bytes_up FROM cost JOIN run ON run.id = run_id WHERE host = 'bob'"
    assert ada.sql(costs) == [("bob", 80, 40)] * 2


def test_sweeps_are_united_by_name(two):
    ada, bob = two
    merge(ada.engine, [bob.engine])

    assert ada.sweeps() == {"both": [0, 1], "own": [2, 3]}


def test_merging_twice_changes_nothing(two):
    ada, bob = two
    merge(ada.engine, [bob.engine])
    before = contents(ada.engine)

    assert merge(ada.engine, [bob.engine, bob.engine]) == Merged(0, 0, 0)
    assert contents(ada.engine) == before


def test_a_merge_of_itself_changes_nothing(two):
    ada, _ = two
    before = contents(ada.engine)

    merge(ada.engine, [ada.engine])

    assert contents(ada.engine) == before


def test_the_source_is_not_changed(two):
    ada, bob = two
    before = contents(bob.engine)

    merge(ada.engine, [bob.engine])

    assert contents(bob.engine) == before


def test_after_merging_both_ways_both_hold_the_same_results(two):
    ada, bob = two
    merge(ada.engine, [bob.engine])
    merge(bob.engine, [ada.engine])

    assert (ada.scores(), ada.jobs(), ada.sweeps()) == (bob.scores(), bob.jobs(), bob.sweeps())


def test_of_two_runs_the_one_that_began_later_counts_wherever_it_was_merged(two):
    ada, bob = two
    ada.sql("UPDATE run SET started = 2000")
    bob.sql("UPDATE run SET started = 1000")
    merge(ada.engine, [bob.engine])

    runs = queries.finished_runs(ada.engine)

    assert runs.set_index("seed")["host"].to_dict() == {0: "ada", 1: "ada"}


# --- statuses ---


@pytest.mark.parametrize("here", ["pending", "failed", "cancelled"])
def test_a_job_that_another_machine_finished_is_finished(machine, here):
    ada, bob = machine("ada"), machine("bob")
    ada.ask("s", 0)
    if here == "failed":
        ada.work("failed")
    elif here == "cancelled":
        queue.cancel(ada.engine, [])
    bob.ask("s", 0)
    bob.work("diverged")

    assert merge(ada.engine, [bob.engine]) == Merged(jobs=0, finished=1, runs=1)
    assert ada.jobs() == {0: "diverged"}


def test_a_finished_job_stays_finished_whatever_became_of_it_elsewhere(machine):
    ada, bob = machine("ada"), machine("bob")
    ada.ask("s", 0)
    ada.work()
    bob.ask("s", 0)
    bob.work("failed")

    merge(ada.engine, [bob.engine])

    assert ada.jobs() == {0: "done"}


def test_a_job_that_runs_here_is_left_to_its_worker(machine):
    ada, bob = machine("ada"), machine("bob")
    ada.ask("s", 0)
    recorder = ada.begin()
    bob.ask("s", 0)
    bob.work()

    merge(ada.engine, [bob.engine])

    assert ada.jobs() == {0: "running"}
    recorder.finish("done")  # it still holds the job
    assert [row[1:3] for row in ada.scores()] == [("ada", "done"), ("bob", "done")]


def test_a_job_that_runs_elsewhere_arrives_as_waiting_and_is_held_by_nobody(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    bob.begin()

    merge(ada.engine, [bob.engine])

    found = ada.sql("SELECT status, worker, lease_until, attempts, furthest FROM job")
    assert found == [("pending", None, None, 0, 0)]
    assert queue.claim(ada.engine, "ada") is not None


def test_a_job_that_was_to_stop_elsewhere_arrives_as_cancelled(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    bob.begin()
    bob.sql("UPDATE job SET stop = 'cancel'")

    merge(ada.engine, [bob.engine])

    assert ada.sql("SELECT status, stop FROM job") == [("cancelled", None)]


def test_nobody_goes_on_with_a_run_whose_checkpoint_is_elsewhere(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    bob.begin()
    merge(ada.engine, [bob.engine])

    assert ada.sql("SELECT host, status, error FROM run") == [
        ("bob", "failed", "had not ended on bob when it was merged")
    ]
    ada.work()

    assert [row[1:3] for row in ada.scores()] == [("ada", "done"), ("bob", "failed")]


def test_a_run_that_has_ended_meanwhile_takes_the_place_of_its_beginning(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    recorder = bob.begin()
    merge(ada.engine, [bob.engine])
    recorder.finish("done")

    assert merge(ada.engine, [bob.engine]) == Merged(jobs=0, finished=1, runs=1)
    assert ada.scores() == [(0, "bob", "done", 0.5)]
    assert merge(bob.engine, [ada.engine]) == Merged(0, 0, 0)


def test_a_second_run_on_the_same_machine_is_another_run(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    bob.work("failed", accuracy=0.125)
    bob.sql("UPDATE run SET started = started - 60")
    merge(ada.engine, [bob.engine])
    queue.retry(bob.engine, [])
    bob.work(accuracy=0.5)

    assert merge(ada.engine, [bob.engine]) == Merged(jobs=0, finished=1, runs=1)
    assert ada.scores() == [(0, "bob", "done", 0.5), (0, "bob", "failed", 0.125)]


def test_its_beginning_does_not_take_the_place_of_a_run_that_goes_on(machine):
    ada, bob = machine("ada"), machine("bob")
    bob.ask("s", 0)
    recorder = bob.begin()
    merge(ada.engine, [bob.engine])

    assert merge(bob.engine, [ada.engine]) == Merged(0, 0, 0)
    recorder.finish("done")
    assert bob.scores() == [(0, "bob", "done", 0.5)]


def test_priority_and_timeout_come_along(machine):
    ada, bob = machine("ada"), machine("bob")
    queue.enqueue(bob.engine, "s", {}, [bob._make_job(seed=0)], priority=3, timeout=60.0)

    merge(ada.engine, [bob.engine])

    assert ada.sql("SELECT priority, timeout FROM job") == [(3, 60.0)]


def test_a_paused_source_does_not_pause_the_target(machine):
    ada, bob = machine("ada"), machine("bob")
    queue.pause(bob.engine)

    merge(ada.engine, [bob.engine])

    assert not queue.is_paused(ada.engine)


# --- whole or not at all ---


def test_a_merge_that_fails_at_the_second_source_leaves_the_target_as_it_was(two, machine, monkeypatch):
    ada, bob = two
    eve = machine("eve")
    eve.ask("s", 9)
    eve.work()
    before, sources, copy_below = contents(ada.engine), [], merge_module._copy_below

    def fail_at_the_last_table_of_the_second(reading, connection, table, ids):
        sources.append(reading.engine.url.database) if reading.engine.url.database not in sources else None
        if len(sources) == 2 and table.name == "metric":
            raise RuntimeError("the machine broke")
        return copy_below(reading, connection, table, ids)

    monkeypatch.setattr(merge_module, "_copy_below", fail_at_the_last_table_of_the_second)
    with pytest.raises(RuntimeError):
        merge(ada.engine, [bob.engine, eve.engine])

    assert contents(ada.engine) == before


def test_an_export_is_no_target(two, tmp_path):
    ada, bob = two
    export(ada.engine, tmp_path / "out", "parquet")

    with pytest.raises(FedbenchError, match="only read"):
        merge(open_source(database_url(str(tmp_path / "out"))), [bob.engine])


# --- sources of other kinds ---


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_a_database_survives_export_and_merge(two, machine, tmp_path, format_):
    _, bob = two
    bob.work(accuracy=0.1 + 0.2)
    export(bob.engine, tmp_path / "first", format_)
    new = machine("new")

    merge(new.engine, [open_source(database_url(str(tmp_path / "first")))])

    assert contents(new.engine) == contents(bob.engine)
    again = export(new.engine, tmp_path / "second", format_)
    assert again == export(bob.engine, tmp_path / "third", format_)


def test_a_source_of_the_first_schema_is_upgraded_in_a_copy(machine, tmp_path):
    source = tmp_path / "old.sqlite"
    shutil.copy(FIRST_SCHEMA, source)
    before = hashlib.sha256(source.read_bytes()).hexdigest()
    ada = machine("ada")

    merged = merge(ada.engine, [open_source(database_url(str(source)))])

    assert merged == Merged(jobs=3, finished=0, runs=2)
    assert ada.sql("SELECT status, furthest, timeout FROM job") == [
        ("done", 0, None),
        ("failed", 0, None),
        ("pending", 0, None),
    ]
    assert hashlib.sha256(source.read_bytes()).hexdigest() == before


def test_a_source_of_a_newer_schema_is_refused(machine):
    bob = machine("bob")
    bob.sql("UPDATE alembic_version SET version_num = '9999'")

    with pytest.raises(FedbenchError, match=r"newer fedbench \(schema 9999, this one knows 0002\)"):
        open_source(bob.engine.url)


def test_rows_that_lost_their_parents_are_left_behind(two):
    ada, bob = two
    engine = create_engine(bob.engine.url)  # which does not enforce foreign keys
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM run WHERE status = 'done'"))
        connection.execute(text("DELETE FROM sweep WHERE name = 'own'"))
    engine.dispose()

    assert merge(ada.engine, [bob.engine]).runs == 1
    assert ada.sweeps() == {"both": [0, 1]}


# --- whatever the machines did ---

STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ask", "done", "failed", "begin", "merge"])), max_size=8)


@given(steps=st.tuples(STEPS, STEPS))
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_two_machines_did_a_merge_loses_no_result_and_twice_is_once(steps, machine):
    ada, bob = machine("ada"), machine("bob")
    for one, other, plan in ((ada, bob, steps[0]), (bob, ada, steps[1])):
        for seed, step in plan:
            if step == "merge":
                merge(one.engine, [other.engine])
            elif step == "ask" or not queue.listing(one.engine, ["pending"]):
                one.ask(f"sweep {seed % 2}", seed)
            elif step == "begin":
                one.begin(accuracy=seed / 8)
            else:
                one.work(step, accuracy=seed / 8)
    results = {row for each in (ada, bob) for row in each.scores() if row[2] in queue.FINISHED}

    merge(ada.engine, [bob.engine])

    assert {row for row in ada.scores() if row[2] in queue.FINISHED} == results
    assert {*bob.jobs()} <= {*ada.jobs()}
    assert all(ada.jobs()[seed] in ("done", "running") for seed, _, status, _ in results if status == "done")
    before = contents(ada.engine)
    assert merge(ada.engine, [bob.engine]) == Merged(0, 0, 0)
    assert contents(ada.engine) == before


# --- a server ---


def test_a_file_is_merged_into_a_server_and_back(two, machine, postgres):
    ada, bob = two
    server = machine("server", postgres.new_database())

    merge(server.engine, [ada.engine, bob.engine])
    server.ask("more", 7)  # its own numbering goes on after the merge
    back = machine("back")
    merge(back.engine, [server.engine])

    assert server.jobs() == {0: "done", 1: "done", 2: "failed", 3: "pending", 7: "pending"}
    assert server.scores() == back.scores()
    assert len(server.scores()) == 4
    assert merge(server.engine, [back.engine]) == Merged(0, 0, 0)


def test_a_server_of_the_first_schema_is_upgraded_in_a_copy(machine, postgres):
    url = postgres.new_database()
    engine = create_engine(url)
    migrate(engine, "0001")
    with engine.begin() as connection:
        values = {"key": "k" * 20, "spec": '{"method": "fedavg"}'}
        connection.execute(
            text("INSERT INTO job (key, spec, status, priority, attempts) VALUES (:key, :spec, 'done', 2, 1)"), values
        )
    ada = machine("ada")

    merge(ada.engine, [open_source(url)])

    assert ada.sql("SELECT key, spec, status, priority, attempts, furthest FROM job") == [
        ("k" * 20, '{"method": "fedavg"}', "done", 2, 1, 0)
    ]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"
    engine.dispose()


def test_all_tables_are_merged():
    """A new table must be one of these, or lead to a run by its foreign keys."""
    by_name = {"job", "sweep", "sweep_job", "run"}
    below = {"run"}
    for table in tables():
        parents = {key.column.table.name for key in table.foreign_keys}
        if table.name not in by_name and parents and parents <= below:
            below.add(table.name)

    assert {table.name for table in tables()} == by_name | below
