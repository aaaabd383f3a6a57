"""One worker with one claimed job: what is left in the database, on the disk and in the pipe, however the job ends."""

import multiprocessing as mp
import subprocess
import sys
import time

import pytest
import torch
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from fedbench import queue
from fedbench.algorithm import methods
from fedbench.errors import FedbenchError
from fedbench.store.database import database_url
from fedbench.store.models import Run
from fedbench.store.recorder import DatabaseRecorder
from fedbench.workers import process, watch
from fedbench.workers.device import DeviceLock
from fedbench.workers.process import (
    ABANDONED,
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
        self.abandoned = None
        self._stop_after = stop_after

    def tell(self, event):
        self.events.append(event)

    def abandon(self, last):
        self.abandoned = last

    def should_stop(self):
        done = [event.round for event in self.events if isinstance(event, RoundDone)]
        return self._stop_after is not None and max(done, default=0) >= self._stop_after

    @property
    def outcome(self):
        return self.events[-1].outcome


@pytest.fixture
def run(engine, make_job, add_method, tmp_path):
    """Claims a job of FedAvg with this `update`, runs it, and returns what the worker told."""

    def run_one(update=None, *, stop_after=None, worker="me", timeout=None, slot=CPU, **settings):
        hooks = {"update": update} if update else {}
        add_method("toy", type("Toy", (FedAvg,), hooks))
        job = make_job("toy", **{"rounds": 4, "eval_every": 2, **settings})
        queue.enqueue(engine, "sweep", {}, [job], timeout=timeout)
        claim = queue.claim(engine, worker)
        orders = FakeOrders(stop_after)
        recorder = DatabaseRecorder(engine, claim.job_id, worker)
        run_claimed(recorder, claim, slot, tmp_path / "data", tmp_path / "checkpoints" / claim.key, orders)
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


def test_a_heartbeat_goes_on_after_the_database_did_not_answer_once(run, sql, monkeypatch):
    monkeypatch.setattr(queue, "LEASE_SECONDS", 0.2)
    beats = []

    def renew(self, renew=DatabaseRecorder.renew):
        beats.append(1)
        if len(beats) == 1:
            raise OperationalError("UPDATE ...", {}, Exception("database is locked"))
        renew(self)

    monkeypatch.setattr(DatabaseRecorder, "renew", renew)

    def update(self, down, memory, data, ctx):
        wait_until(lambda: len(beats) > 1)
        return FedAvg.update(self, down, memory, data, ctx)

    assert run(update).outcome == "done"


# --- orders to stop ---


def wait_until(happened):
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_round(number, act):
    """An update that acts once, in this round."""

    def update(self, down, memory, data, ctx):
        if (ctx.round, ctx.client) == (number, 0):
            act()
        return FedAvg.update(self, down, memory, data, ctx)

    return update


def rounds_told(orders):
    return [event.round for event in orders.events if isinstance(event, RoundDone)]


def test_a_running_job_that_is_cancelled_stops_after_its_round_and_a_retry_goes_on(engine, run, sql, tmp_path):
    orders = run(in_round(2, lambda: queue.cancel(engine, [queue.listing(engine)[0].key])))

    assert orders.outcome == "cancelled"
    assert sql("SELECT job.status, stop, run.status FROM job JOIN run ON job_id = job.id") == [
        ("cancelled", None, "interrupted")
    ]
    assert checkpoints(tmp_path) == ["00000002.ckpt"]
    assert queue.claim(engine, "me") is None

    queue.retry(engine, [])

    assert rounds_told(run()) == [3, 4]
    assert sql("SELECT status, last_round FROM run") == [("done", 4)]


def test_a_running_job_goes_back_into_a_paused_queue_and_on_when_it_is_resumed(engine, run, sql, tmp_path):
    orders = run(in_round(2, lambda: queue.pause(engine)))

    assert (orders.outcome, orders.events[-1].error) == ("interrupted", "the queue is paused")
    assert sql("SELECT status, attempts FROM job") == [("pending", 0)]
    assert checkpoints(tmp_path) == ["00000002.ckpt"]

    queue.resume(engine)

    assert rounds_told(run()) == [3, 4]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the job has taken."""
    taken = [0.0]
    monkeypatch.setattr(watch.Watch, "seconds", property(lambda self: taken[0]))
    return lambda seconds: taken.__setitem__(0, seconds)


def test_a_job_that_takes_too_long_fails_with_its_checkpoint_and_a_retry_goes_on(engine, run, sql, tmp_path, clock):
    orders = run(in_round(2, lambda: clock(7200)), timeout=7200.0)

    reason = "stopped by its timeout of 2.0 h after round 2; a retry goes on from there"
    assert (orders.outcome, orders.events[-1].error) == ("failed", reason)
    assert sql("SELECT status FROM job") == [("failed",)]
    assert sql("SELECT status, error FROM run") == [("interrupted", reason)]
    assert checkpoints(tmp_path) == ["00000002.ckpt"]

    queue.retry(engine, [])

    clock(0)
    assert rounds_told(run(timeout=7200.0)) == [3, 4]
    assert sql("SELECT status, error FROM run") == [("done", None)]


def test_a_job_that_ends_in_time_is_done(run, clock):
    assert run(in_round(2, lambda: clock(7199)), timeout=7200.0).outcome == "done"


def test_a_round_that_does_not_end_is_given_up_when_the_time_is_up(run, sql, monkeypatch, clock):
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.1)
    ended = []

    def hangs():
        clock(7200)
        wait_until(lambda: sql("SELECT status FROM job") == [("failed",)])
        ended.append(True)

    orders = run(in_round(2, hangs), timeout=7200.0)

    assert ended
    assert (orders.abandoned.outcome, orders.outcome) == ("failed", "lost")
    ((status, error),) = sql("SELECT status, error FROM run")
    assert status == "interrupted"
    assert error.endswith("in round 2, which did not end; a retry goes on from its last checkpoint")


def test_a_round_that_does_not_end_is_given_up_when_its_job_is_cancelled(engine, run, sql, monkeypatch):
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.1)

    def hangs():
        queue.cancel(engine, [queue.listing(engine)[0].key])
        wait_until(lambda: sql("SELECT status FROM job") == [("cancelled",)])

    assert run(in_round(2, hangs)).abandoned.outcome == "cancelled"


def test_a_worker_that_gives_up_says_so_and_ends_its_process():
    script = """
import multiprocessing as mp, os
from fedbench.workers.process import Ended, Orders
parent, child = mp.Pipe()
if os.fork() == 0:
    Orders(child).abandon(Ended("key", "failed", 1.0, "no end"))
print(parent.recv().error, os.waitstatus_to_exitcode(os.wait()[1]))
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert told.stdout == f"no end {ABANDONED}\n", told.stderr


# --- out of memory ---

SHARED = Slot("cuda:7", "cpu", 1, lock="test")


@pytest.fixture
def device(tmp_path, monkeypatch):
    """The lock of a device that only this test knows."""
    folder = tmp_path / "locks"
    monkeypatch.setattr(process, "DeviceLock", lambda name: DeviceLock(name, folder))
    return DeviceLock("test", folder)


def out_of_memory(times, kind=torch.cuda.OutOfMemoryError):
    """An act that runs out of memory this often."""
    left = [kind("CUDA out of memory. Tried to allocate 2.00 GiB")] * times
    return lambda: left and (_ for _ in ()).throw(left.pop())


@pytest.mark.parametrize("kind", [torch.cuda.OutOfMemoryError, RuntimeError])
def test_a_job_that_runs_out_of_memory_is_tried_again_with_the_device_to_itself(run, sql, device, monkeypatch, kind):
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "0")
    asked = []
    for how in ("shared", "alone"):
        original = getattr(DeviceLock, how)
        monkeypatch.setattr(
            DeviceLock, how, lambda self, stop, how=how, original=original: (asked.append(how), original(self, stop))[1]
        )

    orders = run(in_round(3, out_of_memory(1, kind)), slot=SHARED)

    assert asked == ["shared", "alone"]
    assert rounds_told(orders) == [1, 2, 3, 4], "it went on from its checkpoint"
    assert orders.outcome == "done"
    assert orders.events[-1].error == "cuda:7 had run out of memory: tried again with the device to itself"
    assert sql("SELECT status, last_round, error FROM run") == [("done", 4, None)]


def test_a_job_for_which_the_memory_does_not_suffice_fails_and_says_so(run, sql, device):
    orders = run(in_round(3, out_of_memory(9)), slot=SHARED)

    reason = "cuda:7 ran out of memory twice, the second time with the device to itself"
    assert (orders.outcome, orders.events[-1].error) == ("failed", reason)
    ((status, error),) = sql("SELECT status, error FROM run")
    assert status == "failed"
    assert error.startswith(f"{reason}\nTraceback")
    assert "Tried to allocate 2.00 GiB\nin update, round 3, client 0" in error


def test_another_error_on_a_device_is_not_tried_again(run, device):
    def breaks():
        raise RuntimeError("shapes do not match")

    orders = run(in_round(2, breaks), slot=SHARED)

    assert orders.events[-1].error == "RuntimeError: shapes do not match"


def test_whoever_ran_out_of_memory_waits_until_the_others_are_idle(run, device, monkeypatch):
    monkeypatch.setattr("fedbench.workers.device.POLL_SECONDS", 0.01)
    other = device.shared(lambda: False)
    assert other.__enter__()
    seen = []

    asked = []

    def should_stop(self):
        asked.append(True)
        if len(asked) == 3:  # once before the first round, then while it waits
            seen.append("the other worker ends")
            other.__exit__(None, None, None)
        return False

    monkeypatch.setattr(watch.Watch, "should_stop", should_stop)
    update = in_round(1, out_of_memory(1))

    def noting(self, down, memory, data, ctx):
        seen.append(f"round {ctx.round}")
        return update(self, down, memory, data, ctx)

    orders = run(noting, slot=SHARED, rounds=1)

    assert orders.outcome == "done"
    assert seen[:3] == ["round 1", "the other worker ends", "round 1"]


def test_a_worker_that_is_told_to_stop_while_it_waits_for_its_device_puts_the_job_back(run, sql, device):
    with device.alone(lambda: False):
        orders = run(slot=SHARED, stop_after=0)

    assert orders.outcome == "interrupted"
    assert sql("SELECT status, attempts FROM job") == [("pending", 0)]


# --- determinism ---


@pytest.fixture
def deterministic_seen(run):
    """Runs a job in this slot; returns whether torch was deterministic while it ran."""

    def look(deterministic, **others):
        seen = set()
        slot = Slot("cpu", "cpu", 1, deterministic=deterministic)
        run(in_round(1, lambda: seen.add(torch.are_deterministic_algorithms_enabled())), slot=slot, **others)
        return seen

    yield look
    torch.use_deterministic_algorithms(False)


def test_a_deterministic_worker_is_so_for_its_jobs_and_their_runs_say_it(engine, deterministic_seen, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    assert deterministic_seen(True, seed=0) == {True}
    assert deterministic_seen(False, seed=1) == {False}

    with engine.connect() as connection:
        versions = connection.execute(select(Run.versions).order_by(Run.id)).scalars().all()
    assert [found["deterministic"] for found in versions] == [True, False]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


# --- workers ---


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
