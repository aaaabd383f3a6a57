"""The queue from outside: several commands on one database, and what stops, delays or ends its jobs."""

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from sqlalchemy import create_engine, text

from fedbench import queue
from fedbench.cli import main
from fedbench.grid import Changes, expand, load_grid
from fedbench.store import database
from fedbench.store.database import database_url, open_database

# Jobs that begin only when two workers have come: so both have one.
MEETING = '''
"""Meeting: FedAvg that waits for a second worker."""

import os
import time
from pathlib import Path

from fedbench.algorithms.fedavg import FedAvg


class Meeting(FedAvg):
    title = "Meeting"

    def update(self, down, memory, data, ctx):
        folder = Path(os.environ["MEETING_FOLDER"])
        (folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < deadline, "nobody else came"
            time.sleep(0.01)
        return super().update(down, memory, data, ctx)
'''
UNLUCKY = '''
"""Unlucky: fails in its second round."""

from fedbench.algorithms.fedavg import FedAvg


class Unlucky(FedAvg):
    title = "Unlucky"

    def update(self, down, memory, data, ctx):
        if ctx.round == 2:
            raise RuntimeError("no luck")
        return super().update(down, memory, data, ctx)
'''
HOLD_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


@pytest.fixture
def plugins(fedbench):
    """Adds a method, and a grid of it with these many seeds."""

    def add(name, code, seeds, methods=None):
        folder = fedbench.folder / "plugins"
        folder.mkdir()
        (folder / f"{name}.py").write_text(code)
        fedbench.environment["FEDBENCH_PLUGINS"] = str(folder)
        grid = f"methods: {methods or [name]}\nset: {{rounds: 3}}\naxes: {{seed: {list(range(seeds))}}}\n"
        return fedbench.write("grid.yaml", f"name: grid\ntasks: [{{dataset: digits, clients: 2}}]\n{grid}")

    return add


def test_two_runs_on_one_database_share_the_work_and_run_no_job_twice(fedbench, plugins):
    grid = plugins("meeting", MEETING, seeds=6)
    meeting = fedbench.folder / "meeting"
    meeting.mkdir()

    both = [fedbench.start("run", "--grid", grid, "--workers", "1", MEETING_FOLDER=str(meeting)) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(list(meeting.iterdir())) == 2
    assert fedbench.sql("SELECT job_id, status, last_round FROM run ORDER BY 1") == [
        (job, "done", 3) for job in range(1, 7)
    ]
    assert all("  done  " in output for output, _ in outputs), "each of them ran something"
    assert fedbench.sql("SELECT DISTINCT attempts FROM job") == [(1,)]


def test_the_first_failure_stops_a_run_that_fails_fast(fedbench, plugins):
    grid = plugins("unlucky", UNLUCKY, seeds=2, methods=["unlucky", "fedavg"])

    ended = fedbench("run", "--grid", grid, "--workers", "1", "--fail-fast")

    assert ended.returncode == 1, ended.stderr
    assert fedbench.sql("SELECT status, attempts FROM job ORDER BY id") == [("failed", 1)] + [("pending", 0)] * 3
    assert "RuntimeError: no luck" in ended.stdout
    assert "3 job(s) still wait" in ended.stdout


@pytest.fixture
def call(fedbench, monkeypatch, capfd):
    """The command in this process."""
    monkeypatch.chdir(fedbench.folder)
    for name, value in fedbench.environment.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedbench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(words, ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def waiting(fedbench):
    """Two jobs of the tiny grid in the queue; their keys."""
    jobs = expand(load_grid(str(fedbench.folder / "tiny.yaml")), Changes())[:2]
    engine = open_database(database_url(str(fedbench.db)), create=True)
    queue.enqueue(engine, "tiny", {}, jobs)
    engine.dispose()
    return [job.key for job in jobs]


def test_a_paused_queue_says_so_until_it_is_resumed(call, waiting):
    paused = call("queue", "pause")
    status = call("status")
    resumed = call("queue", "resume")
    after = call("status")

    assert "To go on: fedbench queue resume" in paused.stdout
    assert "The queue is paused" in status.stdout
    assert (paused.returncode, resumed.returncode, resumed.stdout) == (0, 0, "resumed\n")
    assert "paused" not in after.stdout


def test_a_run_on_a_paused_queue_says_so_and_waits(fedbench, waiting, call):
    call("queue", "pause")
    process = fedbench.start(
        "run", "--grid", "tiny.yaml", "--workers", "1", "--methods", "fedavg", PYTHONUNBUFFERED="1"
    )
    lines = [process.stdout.readline(), process.stdout.readline()]

    call("queue", "resume")
    output, errors = process.communicate(timeout=120)

    assert "the queue is paused; waiting for `fedbench queue resume`" in lines[1], errors
    assert process.returncode == 0, errors
    assert "finished: 1 done" in output


def test_priorities_change_from_the_command_line_also_to_negative_ones(call, waiting, fedbench):
    first, second = waiting

    raised = call("queue", "prioritise", "5", second[:10])
    lowered = call("queue", "prioritise", "-1", first[:10])

    assert (raised.returncode, raised.stdout) == (0, "1 job(s) have priority 5\n")
    assert (lowered.returncode, lowered.stdout) == (0, "1 job(s) have priority -1\n")
    assert dict(fedbench.sql("SELECT key, priority FROM job")) == {first: -1, second: 5}


def test_a_running_job_is_cancelled_by_its_key(call, waiting, fedbench):
    with closing(sqlite3.connect(fedbench.db)) as connection:
        connection.execute("UPDATE job SET status = 'running' WHERE key = ?", (waiting[0],))
        connection.commit()

    ended = call("queue", "cancel", *waiting)

    assert ended.stdout == "1 job(s) cancelled, 1 running one(s) stop after their round\n"
    assert dict(fedbench.sql("SELECT key, stop FROM job")) == {waiting[0]: "cancel", waiting[1]: None}


def test_a_timeout_that_is_no_time_is_one_message(call, fedbench):
    ended = call("run", "--grid", "tiny.yaml", "--timeout", "soon")

    assert ended.returncode == 2
    assert "'soon' is not a length of time" in ended.stderr
    assert not fedbench.db.exists()


# --- a database that another program is writing to ---


@pytest.fixture
def locked(fedbench, waiting):
    """Another process that holds the write lock; a line to it lets go."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(fedbench.db)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


COMMANDS = {
    "run": ("run", "--grid", "tiny.yaml", "--devices", "cpu"),
    "worker": ("worker", "--devices", "cpu"),
    "queue pause": ("queue", "pause"),
    "queue retry": ("queue", "retry"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_database_that_stays_locked_is_one_message(call, locked, monkeypatch, words):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)

    ended = call(*words)

    assert ended.returncode == 2
    assert "database is locked" in ended.stderr
    assert "Another program is writing to it." in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_database_that_is_locked_for_a_while_is_waited_for(fedbench, locked):
    process = fedbench.start("queue", "pause")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)  # starting takes less than one second

    locked.communicate("done\n")
    output, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (0, "")
    assert output.startswith("paused")


# --- PostgreSQL ---


def test_a_grid_runs_on_postgresql_to_the_numbers_of_sqlite_and_its_password_is_not_told(fedbench, finished, postgres):
    url = postgres.new_database()
    where = url.render_as_string(hide_password=False)

    ran = fedbench("run", "--grid", "tiny.yaml", "--workers", "2", FEDBENCH_DB=where)
    table = fedbench("table", FEDBENCH_DB=where)

    assert ran.returncode == 0, ran.stderr
    assert "fedbench:***@127.0.0.1" in ran.stdout
    assert postgres.password not in ran.stdout + ran.stderr + table.stdout + table.stderr
    figures = (
        "SELECT key, stage, round, view, client, name, value FROM metric "
        "JOIN evaluation ON evaluation_id = evaluation.id JOIN run ON run_id = run.id JOIN job ON job_id = job.id"
    )
    engine = create_engine(url)
    with engine.connect() as connection:
        measured = {tuple(row) for row in connection.execute(text(figures))}
    engine.dispose()
    assert measured == set(finished.sql(figures))
    assert (table.returncode, "fedavg" in table.stdout.lower()) == (0, True)
