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
        finished = run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display)
        return finished, output.getvalue()

    return run


def test_a_sweep_waits_for_the_jobs_that_another_process_has(engine, wait_for_others):
    def ends_elsewhere():
        with writing(engine).begin() as connection:
            connection.execute(text("UPDATE job SET status = 'done'"))

    assert wait_for_others(ends_elsewhere) == (True, "waiting for 1 job(s) that another fedbench is running ...\n")


def test_ctrl_c_ends_the_waiting(wait_for_others):
    finished, _ = wait_for_others(lambda: os.kill(os.getpid(), signal.SIGINT))

    assert not finished


def test_ctrl_c_means_what_it_meant_before_once_the_sweep_is_over(wait_for_others):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    wait_for_others(lambda: os.kill(os.getpid(), signal.SIGTERM))

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_sweep_without_work_is_over_at_once(engine, tmp_path):
    display = Display(Console(file=StringIO()), jobs=0, rounds=0)

    assert run_sweep(engine, engine.url, None, make_slots("cpu", 1), tmp_path, display)


def test_the_environment_of_a_worker_is_the_parents_only_while_it_starts(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    with local._environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}):
        inside = os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]

    assert inside == ("1", "")
    assert (os.environ["OMP_NUM_THREADS"], "CUDA_VISIBLE_DEVICES" in os.environ) == ("7", False)
