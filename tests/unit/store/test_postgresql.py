"""A real PostgreSQL server: what is made there, several processes at once, and what messages never hold."""

import subprocess
import sys
import threading
import time

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from fedbench import queue
from fedbench.cli import main
from fedbench.errors import FedbenchError
from fedbench.store.database import clear_errors, open_database, writing
from fedbench.store.models import Base

CREATE = """
import sys
from alembic import command
from fedbench.store.database import database_url, open_database
print("ready", flush=True)
sys.stdin.readline()
open_database(database_url(sys.argv[1]), create=True).dispose()
"""
REAP_AND_CLAIM = """
import sys
from fedbench import queue
from fedbench.store.database import database_url, open_database
engine = open_database(database_url(sys.argv[1]), create=False)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    queue.reap(engine)
    claim = queue.claim(engine, f"elsewhere/1/{sys.argv[2]}")
    if claim is not None:
        print(claim.key)
"""


@pytest.fixture
def backend():
    return "postgresql"


def with_password(url, password=None):
    return (url if password is None else url.set(password=password)).render_as_string(hide_password=False)


def at_once(script, *arguments):
    """Starts a process per set of arguments; lets them go when all are ready. Returns what each printed, and errors."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in arguments
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate(timeout=60) for process in processes]


def test_the_migrations_make_what_the_models_describe(engine):
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})

        assert compare_metadata(context, Base.metadata) == []


def test_processes_that_create_it_at_once_all_succeed(postgres):
    url = with_password(postgres.new_database())

    assert at_once(CREATE, [url], [url], [url]) == [("", "")] * 3


def test_jobs_that_many_put_back_and_claim_at_once_are_claimed_once(engine, make_job, sql):
    jobs = [make_job(seed=seed) for seed in range(25)]
    queue.enqueue(engine, "sweep", {}, jobs)
    for _ in jobs:
        queue.claim(engine, "elsewhere/1/dead")
    sql("UPDATE job SET lease_until = 1")  # all of them are to be put back, by whoever comes first
    url = with_password(engine.url)

    shares = at_once(REAP_AND_CLAIM, *([url, str(number)] for number in range(4)))

    assert [error for _, error in shares] == [""] * 4
    claimed = [key for told, _ in shares for key in told.split()]
    assert sorted(claimed) == sorted(job.key for job in jobs)


def test_a_job_that_another_process_puts_back_at_this_moment_is_left_to_it(engine, make_job, sql):
    queue.enqueue(engine, "sweep", {}, [make_job()])
    queue.claim(engine, "elsewhere/1/dead")
    sql("UPDATE job SET lease_until = 1")

    with engine.begin() as other:  # puts it back, gives it to a third, and commits after this process has looked
        other.execute(text("UPDATE job SET worker = 'third', lease_until = 4e9"))
        assert queue.reap(engine) == 0

    assert sql("SELECT status, worker FROM job") == [("running", "third")]


def test_sweeps_that_are_enqueued_at_once_in_opposite_orders_do_not_block_each_other(engine, make_job):
    job = make_job()
    batches = [[job.model_copy(update={"seed": 500 * batch + seed}) for seed in range(500)] for batch in range(4)]
    together = threading.Barrier(2)
    errors = []

    def enqueue(name, step):
        try:
            for batch in batches:
                together.wait(timeout=30)
                queue.enqueue(engine, name, {}, batch[::step])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=enqueue, args=order) for order in (("there", 1), ("back", -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert queue.counts(engine) == {"pending": 2000}


def test_a_claim_does_not_wait_for_a_job_that_another_is_claiming(engine, make_job):
    first, second = (make_job(seed=seed) for seed in (0, 1))
    queue.enqueue(engine, "sweep", {}, [first, second])

    with engine.begin() as other:
        other.execute(text("SELECT id FROM job WHERE key = :key FOR UPDATE"), {"key": first.key})
        started = time.monotonic()
        claim = queue.claim(engine, "me")

    assert claim.key == second.key
    assert time.monotonic() - started < 10


# --- passwords ---


@pytest.fixture
def call(monkeypatch, capfd):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedbench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code, *capfd.readouterr())

    return run


COMMANDS = {
    "run": ("run", "--grid", "quickstart", "--devices", "cpu"),
    "worker": ("worker", "--devices", "cpu"),
    "status": ("status",),
    "queue list": ("queue", "list"),
    "queue pause": ("queue", "pause"),
    "table": ("table",),
    "db upgrade": ("db", "upgrade"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_wrong_password_is_one_message_that_does_not_hold_it(engine, call, words):
    code, out, err = call(*words, "--db", with_password(engine.url, "wrong-secret"))

    assert code == 2
    assert 'password authentication failed for user "fedbench"' in err
    assert "Check user and password" in err
    assert "Traceback" not in err
    assert "wrong-secret" not in out + err


def test_the_doctor_does_not_tell_a_wrong_password(engine, call):
    code, out, err = call("doctor", "--db", with_password(engine.url, "wrong-secret"))

    assert code == 2
    assert "password" in out
    assert "wrong-secret" not in out + err


def test_a_server_that_does_not_answer_is_one_message_without_the_password(engine, call):
    where = engine.url.set(port=1, password="wrong-secret")

    code, out, err = call("status", "--db", with_password(where))

    assert code == 2
    assert "reachable" in err
    assert "wrong-secret" not in out + err


def test_the_right_password_is_not_told_either(engine, call, postgres):
    where = with_password(engine.url)

    shown = [call(*words, "--db", where) for words in (("status",), ("doctor",), ("worker", "--devices", "cpu"))]

    assert [code for code, _, _ in shown if code == 1] == []
    assert "no job is waiting" in shown[2][1]
    assert postgres.password not in "".join(out + err for _, out, err in shown)


def test_a_failed_statement_is_one_message_without_its_values(engine):
    with (
        pytest.raises(FedbenchError) as caught,
        clear_errors(engine.url),
        writing(engine).begin() as connection,
    ):
        connection.execute(text("SELECT * FROM nowhere WHERE password = :given"), {"given": "wrong-secret"})

    assert 'relation "nowhere" does not exist' in caught.value.message
    assert "wrong-secret" not in str(caught.value)


def test_a_database_that_nobody_has_used_is_where_a_first_run_begins(postgres, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    url = postgres.new_database()

    shown = call("run", "--grid", "quickstart", "--dry-run", "--devices", "cpu", "--db", with_password(url))

    assert shown[0] == 0, shown[2]
    assert "to do" in shown[1]
    with pytest.raises(FedbenchError, match="holds no results yet"):
        open_database(url, create=False)
