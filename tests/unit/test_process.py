"""One worker with one claimed job: what is left in the database, on the disk and in the pipe, however the job ends."""

import multiprocessing as mp
import time

import pytest
import torch
from sqlalchemy.exc import OperationalError

from fedbench import queue
from fedbench.algorithm import methods
from fedbench.errors import FedbenchError
from fedbench.store.database import database_url
from fedbench.workers.process import (
    Claimed,
    Ended,
    Orders,
    RoundDone,
    Trouble,
    checkpoint_seconds,
    memory_budget,
    run_claimed,
    work,
    worker_main,
)
from fedbench.workers.slots import Slot

CPU = Slot("cpu", "cpu", 1)
FedAvg = methods.get("fedavg")


class FakeOrders:
    """Collects what a worker tells, and tells it to stop before the round after `stop_after`."""

    def __init__(self, stop_after=None):
        self.events = []
        self._stop_after = stop_after

    def tell(self, event):
        self.events.append(event)

    def should_stop(self):
        done = [event.round for event in self.events if isinstance(event, RoundDone)]
        return self._stop_after is not None and max(done, default=0) >= self._stop_after

    @property
    def outcome(self):
        return self.events[-1].outcome


@pytest.fixture
def run(engine, make_job, add_method, tmp_path):
    """Claims a job of FedAvg with this `update`, runs it, and returns what the worker told."""

    def run_one(update=None, *, stop_after=None, worker="me", **settings):
        hooks = {"update": update} if update else {}
        add_method("toy", type("Toy", (FedAvg,), hooks))
        queue.enqueue(engine, "sweep", {}, [make_job("toy", **{"rounds": 4, "eval_every": 2, **settings})])
        claim = queue.claim(engine, worker)
        orders = FakeOrders(stop_after)
        run_claimed(engine, claim, worker, CPU, tmp_path / "data", tmp_path / "checkpoints" / claim.key, orders)
        return orders

    return run_one


def checkpoints(tmp_path):
    return sorted(path.name for path in tmp_path.glob("checkpoints/*/*"))


def test_a_job_that_ends_well_is_done_and_told_round_by_round(run, sql):
    orders = run()

    assert sql("SELECT job.status, run.status, last_round FROM job JOIN run ON job_id = job.id") == [
        ("done", "done", 4)
    ]
    rounds = [(event.round, sorted(event.accuracy)) for event in orders.events if isinstance(event, RoundDone)]
    assert rounds == [(1, []), (2, ["gm"]), (3, []), (4, ["gm"])]
    assert isinstance(orders.events[-1], Ended)
    assert orders.outcome == "done"


def test_a_job_that_raises_is_failed_with_its_traceback_round_and_client(run, sql):
    def update(self, down, memory, data, ctx):
        if (ctx.round, ctx.client) == (3, 1):
            raise ValueError("no luck")
        return FedAvg.update(self, down, memory, data, ctx)

    orders = run(update)

    ((job, status, last_round, error),) = sql(
        "SELECT job.status, run.status, last_round, error FROM job JOIN run ON job_id = job.id"
    )
    assert (job, status, last_round) == ("failed", "failed", 2)
    assert error.startswith("Traceback (most recent call last)")
    assert "ValueError: no luck\nin update, round 3, client 1" in error
    assert (orders.outcome, orders.events[-1].error) == ("failed", "ValueError: no luck")


def test_a_mistake_of_the_user_is_a_failure_without_a_traceback(run, sql):
    def update(self, down, memory, data, ctx):
        raise FedbenchError("the model does not fit.", "Choose another.")

    orders = run(update)

    assert sql("SELECT status, error FROM run") == [("failed", "the model does not fit.\nChoose another.")]
    assert orders.outcome == "failed"


def test_a_job_that_diverges_has_a_result(run, sql):
    def update(self, down, memory, data, ctx):
        return {"w": down["w"] * (torch.nan if ctx.round == 3 else 1)}, {}

    orders = run(update)

    assert sql("SELECT job.status, run.status, last_round FROM job JOIN run ON job_id = job.id") == [
        ("diverged", "diverged", 3)
    ]
    assert sql("SELECT DISTINCT round FROM evaluation") == [(2,)]
    assert orders.outcome == "diverged"


def test_a_job_whose_finite_weights_predict_no_numbers_diverges_too(run, sql):
    def update(self, down, memory, data, ctx):
        return {"w": down["w"] * 1e30}, {}

    orders = run(update, rounds=1)

    assert orders.outcome == "diverged"
    assert sql("SELECT status FROM job") == [("diverged",)]


def test_a_job_told_to_stop_waits_again_with_a_checkpoint_of_its_round(run, sql, tmp_path):
    orders = run(stop_after=2)

    assert sql("SELECT status, attempts FROM job") == [("pending", 0)]
    assert sql("SELECT status, last_round FROM run") == [("interrupted", 2)]
    assert checkpoints(tmp_path) == ["00000002.ckpt"]
    assert orders.outcome == "interrupted"


def test_a_stopped_job_goes_on_where_it_stopped(run, sql):
    run(stop_after=2)

    orders = run()

    assert [event.round for event in orders.events if isinstance(event, RoundDone)] == [3, 4]
    assert sql("SELECT status, last_round FROM run") == [("done", 4)]


def test_a_finished_job_leaves_no_checkpoints(run, tmp_path):
    run(stop_after=2)
    run()

    assert checkpoints(tmp_path) == []


def test_a_failed_job_that_is_retried_keeps_the_checkpoints_of_its_new_run(engine, run, monkeypatch):
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "0")

    def breaks(self, down, memory, data, ctx):
        if ctx.round == 8:
            raise ValueError("no luck")
        return FedAvg.update(self, down, memory, data, ctx)

    run(breaks, rounds=9)
    queue.retry(engine, [])

    run(rounds=9, stop_after=3)
    orders = run(rounds=9, stop_after=4)

    assert [event.round for event in orders.events if isinstance(event, RoundDone)] == [4]


def test_a_failed_job_that_is_retried_never_resumes_from_the_failed_run(engine, run, sql, monkeypatch):
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "0")

    def wrong_and_breaks(self, down, memory, data, ctx):
        if ctx.round == 4:
            raise ValueError("no luck")
        return {"w": down["w"] + 7}, {}

    run(wrong_and_breaks, rounds=5)  # leaves checkpoints of rounds 2 and 3
    queue.retry(engine, [])
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "1000")

    def right_and_breaks_off(self, down, memory, data, ctx):
        if ctx.round == 5:
            raise OperationalError("INSERT ...", {}, Exception("the database is gone"))
        return {"w": down["w"] + 1}, {}

    with pytest.raises(OperationalError):
        run(right_and_breaks_off, rounds=5)  # the mended method; no checkpoint of its own yet
    sql("UPDATE job SET status = 'pending', worker = NULL")
    seen = []

    def right(self, down, memory, data, ctx):
        seen.append((ctx.round, ctx.client))
        return {"w": down["w"] + 1}, {}

    run(right, rounds=5)

    assert seen[0] == (1, 0)


def test_a_job_that_another_worker_took_over_is_lost_and_left_to_it(run, sql):
    def update(self, down, memory, data, ctx):
        if ctx.round == 2:
            sql("UPDATE job SET worker = 'another'")
        return FedAvg.update(self, down, memory, data, ctx)

    orders = run(update)

    assert orders.outcome == "lost"
    assert sql("SELECT status, worker FROM job") == [("running", "another")]
    assert sql("SELECT status, last_round FROM run") == [("running", 1)]


def test_a_failure_after_another_worker_took_over_is_lost_too(run, sql):
    def update(self, down, memory, data, ctx):
        sql("UPDATE job SET worker = 'another'")
        raise ValueError("no luck")

    orders = run(update)

    assert orders.outcome == "lost"
    assert sql("SELECT status, worker FROM job") == [("running", "another")]


def test_trouble_with_the_database_is_not_the_jobs_failure(run, sql):
    def update(self, down, memory, data, ctx):
        raise OperationalError("INSERT ...", {}, Exception("database or disk is full"))

    with pytest.raises(OperationalError):
        run(update)

    assert sql("SELECT status, error FROM run") == [("running", None)]


def test_a_long_round_keeps_its_lease(run, sql, monkeypatch):
    monkeypatch.setattr(queue, "LEASE_SECONDS", 0.2)

    def update(self, down, memory, data, ctx):
        if (ctx.round, ctx.client) == (1, 0):
            sql("UPDATE job SET lease_until = 1")
            deadline = time.monotonic() + 20
            while sql("SELECT lease_until FROM job") == [(1.0,)]:
                assert time.monotonic() < deadline, "nobody renews the lease"
                time.sleep(0.01)
        return FedAvg.update(self, down, memory, data, ctx)

    assert run(update).outcome == "done"


def test_a_worker_runs_all_that_waits_and_then_ends(engine, make_job, tmp_path, sql):
    queue.enqueue(engine, "sweep", {}, [make_job(rounds=1, seed=seed) for seed in (0, 1)])
    orders = FakeOrders()

    work(engine, engine.url, None, CPU, tmp_path / "data", orders)

    told = [type(event) for event in orders.events]
    assert told == [Claimed, RoundDone, Ended] * 2
    assert queue.counts(engine) == {"done": 2}


def test_a_worker_that_is_told_to_stop_claims_nothing_more(engine, make_job, tmp_path):
    queue.enqueue(engine, "sweep", {}, [make_job(rounds=1, seed=seed) for seed in (0, 1)])

    work(engine, engine.url, None, CPU, tmp_path / "data", FakeOrders(stop_after=1))

    assert queue.counts(engine) == {"pending": 1, "done": 1}


def test_a_worker_takes_over_the_job_of_a_dead_one(engine, make_job, tmp_path, sql):
    queue.enqueue(engine, "sweep", {}, [make_job(rounds=1)])
    queue.claim(engine, "elsewhere/1/1")
    sql("UPDATE job SET lease_until = 1")

    work(engine, engine.url, None, CPU, tmp_path / "data", FakeOrders())

    assert queue.counts(engine) == {"done": 1}


# --- the pipe to the parent ---


@pytest.fixture
def pipe():
    """The parent's end, and what the worker makes of its own."""
    parent, child = mp.Pipe()
    yield parent, Orders(child)
    parent.close()
    child.close()


def test_a_worker_goes_on_while_its_parent_says_nothing(pipe):
    _, orders = pipe

    assert not orders.should_stop()


def test_a_word_of_the_parent_means_stop(pipe):
    parent, orders = pipe

    parent.send("stop")

    assert orders.should_stop()


def test_the_end_of_the_parent_means_stop(pipe):
    parent, orders = pipe

    parent.close()

    assert orders.should_stop()


def test_telling_a_parent_that_is_gone_means_stop_and_is_no_error(pipe):
    parent, orders = pipe
    parent.close()

    orders.tell(RoundDone("key", 1, {}))

    assert orders.should_stop()


@pytest.fixture
def told_by_worker(tmp_path, monkeypatch):
    """The life of a worker on this database, in this process; returns what it told its parent."""
    monkeypatch.setattr("signal.signal", lambda number, handler: None)

    def live(url):
        parent, child = mp.Pipe()
        worker_main(child, url, None, CPU, tmp_path / "data")
        child.close()
        events = []
        while parent.poll():
            try:
                events.append(parent.recv())
            except EOFError:
                break
        parent.close()
        return events

    return live


def test_a_worker_without_its_database_tells_the_trouble(told_by_worker, tmp_path):
    (event,) = told_by_worker(database_url(str(tmp_path / "gone.sqlite")))

    assert isinstance(event, Trouble)
    assert "there is no database" in event.message


def test_a_worker_whose_disk_is_full_tells_the_trouble(told_by_worker, engine, make_job, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device", "/results/checkpoints")

    queue.enqueue(engine, "sweep", {}, [make_job(rounds=2)])
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "0")
    monkeypatch.setattr("fedbench.checkpoint.save", full)

    *_, event = told_by_worker(engine.url)

    assert event == Trouble("No space left on device: /results/checkpoints", "Mend it and run the same command.")


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_number_in_the_environment_is_one_clear_message(monkeypatch, value):
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", value)

    with pytest.raises(FedbenchError, match="FEDBENCH_CHECKPOINT_SECONDS"):
        checkpoint_seconds()


def test_the_environment_sets_the_memory_budget_in_gigabytes(monkeypatch):
    monkeypatch.setenv("FEDBENCH_MEMORY_GB", "0.5")

    assert memory_budget() == 2**29
