"""The parent of the workers, as far as it needs no workers: waiting for others, and what workers inherit."""

import os
import signal
from io import StringIO

import pytest
from rich.console import Console
from sqlalchemy import text

from fedbench import queue
from fedbench.store.database import database_url, open_database, writing
from fedbench.workers import local
from fedbench.workers.display import Display
from fedbench.workers.local import run_sweep
from fedbench.workers.slots import make_slots


@pytest.fixture
def engine(tmp_path):
    opened = open_database(database_url(str(tmp_path / "fedbench.sqlite")), create=True)
    yield opened
    opened.dispose()


@pytest.fixture
def wait_for_others(engine, make_job, tmp_path, monkeypatch):
    """Runs a sweep whose only job another machine has; `meanwhile` happens while it waits. Returns (result, output)."""

    def run(meanwhile):
        queue.enqueue(engine, "sweep", {}, [make_job()])
        queue.claim(engine, "elsewhere/1/1")
        monkeypatch.setattr(local.time, "sleep", lambda seconds: meanwhile())
        output = StringIO()
        display = Display(Console(file=output), jobs=1, rounds=1)
        ended = run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display)
        return ended, output.getvalue()

    return run


def test_a_sweep_waits_for_the_jobs_that_another_process_has(engine, wait_for_others):
    def ends_elsewhere():
        with writing(engine).begin() as connection:
            connection.execute(text("UPDATE job SET status = 'done'"))

    assert wait_for_others(ends_elsewhere) == (
        "finished",
        "waiting for 1 job(s) that another fedbench is running ...\n",
    )


def test_ctrl_c_ends_the_waiting(wait_for_others):
    ended, _ = wait_for_others(lambda: os.kill(os.getpid(), signal.SIGINT))

    assert ended == "interrupted"


def test_a_sweep_waits_while_the_queue_is_paused_and_says_so_once(engine, make_job, tmp_path, monkeypatch):
    queue.enqueue(engine, "sweep", {}, [make_job()])
    queue.pause(engine)
    looks = iter(range(3))

    def cancel_after_three_looks(seconds):
        if next(looks) == 2:
            queue.cancel(engine, [])

    monkeypatch.setattr(local.time, "sleep", cancel_after_three_looks)
    monkeypatch.setattr(local, "_Worker", None)  # none may be started
    output = StringIO()
    display = Display(Console(file=output, width=200), jobs=1, rounds=1)

    assert run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display) == "finished"

    assert output.getvalue() == "the queue is paused; waiting for `fedbench queue resume` (Ctrl-C leaves) ...\n"


def test_a_job_that_failed_before_does_not_stop_a_sweep_that_fails_fast(engine, make_job, tmp_path):
    queue.enqueue(engine, "sweep", {}, [make_job()])
    with writing(engine).begin() as connection:
        connection.execute(text("UPDATE job SET status = 'failed'"))
    display = Display(Console(file=StringIO()), jobs=0, rounds=0)

    ended = run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display, fail_fast=True)

    assert ended == "finished"


def test_a_job_that_fails_elsewhere_stops_a_sweep_that_fails_fast(engine, make_job, tmp_path, monkeypatch):
    def fails_elsewhere(seconds):
        with writing(engine).begin() as connection:
            connection.execute(text("UPDATE job SET status = 'failed' WHERE id = 1"))

    queue.enqueue(engine, "sweep", {}, [make_job(seed=0), make_job(seed=1)])
    for _ in range(2):
        queue.claim(engine, "elsewhere/1/1")
    monkeypatch.setattr(local.time, "sleep", fails_elsewhere)
    display = Display(Console(file=StringIO()), jobs=2, rounds=2)

    ended = run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display, fail_fast=True)

    assert ended == "failed"


def test_ctrl_c_means_what_it_meant_before_once_the_sweep_is_over(wait_for_others):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    wait_for_others(lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_sweep_without_work_is_over_at_once(engine, tmp_path):
    display = Display(Console(file=StringIO()), jobs=0, rounds=0)

    assert run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display) == "finished"


def test_the_environment_of_a_worker_is_the_parents_only_while_it_starts(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    with local._environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}):
        inside = os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]

    assert inside == ("1", "")
    assert (os.environ["OMP_NUM_THREADS"], "CUDA_VISIBLE_DEVICES" in os.environ) == ("7", False)
