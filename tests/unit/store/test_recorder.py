"""What a run writes: a round whole or not at all, only by the worker that holds the job, and resumable."""

import platform
import socket
import time

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from fedbench import queue
from fedbench.queue import LeaseLostError
from fedbench.records import Cost, Evaluation, RoundRecord
from fedbench.store.models import Run
from fedbench.store.recorder import Conditions, DatabaseRecorder


@pytest.fixture
def begin(engine, claim):
    """A recorder whose run has begun, on a job that `worker` has just claimed."""

    def start(worker="me", **settings):
        recorder = DatabaseRecorder(engine, claim(worker, **settings).job_id, worker)
        recorder.start(rounds=5, split_hash="abc", device="cpu")
        return recorder

    return start


@pytest.fixture
def lose(sql):
    """Gives every running job to another worker."""
    return lambda: sql("UPDATE job SET worker = 'another'")


@pytest.fixture
def versions(engine):
    """What every run says it ran with."""

    def read():
        with engine.connect() as connection:
            return connection.execute(select(Run.versions)).scalars().all()

    return read


@pytest.fixture
def contents(sql):
    """How many rows the tables of measurements hold, and the last round of every run."""

    def count():
        tables = ("evaluation", "metric", "histogram", "cost")
        rows = {table: sql(f"SELECT count(*) FROM {table}")[0][0] for table in tables}
        return rows | {"last_round": [last for (last,) in sql("SELECT last_round FROM run ORDER BY id")]}

    return count


def scored(round_, stage="train", **others):
    """An evaluation with two metrics and one bin, pooled, and one metric of client 3."""
    return Evaluation(
        round=round_,
        stage=stage,
        view="gm",
        predict="mean",
        metrics={None: {"accuracy": 0.5, "nll": 1.25}, 3: {"accuracy": 0.25}},
        reliability={None: [(7, 4.0, 3.0, 2.0)]},
        **others,
    )


def measured(round_, *evaluations, costs=()):
    costs = costs or [Cost(round_, "client", 0.5, count=10, bytes_down=80, bytes_up=40), Cost(round_, "server", 0.1)]
    return RoundRecord(round_, evaluations or [scored(round_)], costs)


# --- what is kept ---


def test_a_round_is_kept_with_all_its_figures(begin, sql):
    begin().record(measured(1))

    assert sql("SELECT recorded, round, stage, step, view, split, predict FROM evaluation") == [
        (1, 1, "train", 0, "gm", "test", "mean")
    ]
    assert sql("SELECT client, name, value FROM metric ORDER BY id") == [
        (None, "accuracy", 0.5),
        (None, "nll", 1.25),
        (3, "accuracy", 0.25),
    ]
    assert sql("SELECT client, kind, bin, count, confidence, correct FROM histogram") == [
        (None, "reliability", 7, 4.0, 3.0, 2.0)
    ]
    assert sql("SELECT round, client, phase, seconds, count, bytes_down, bytes_up FROM cost ORDER BY id") == [
        (1, None, "client", 0.5, 10, 80, 40),
        (1, None, "server", 0.1, 1, 0, 0),
    ]
    assert sql("SELECT last_round FROM run") == [(1,)]


def test_histograms_of_entropy_are_kept_as_a_kind_of_their_own(begin, sql):
    begin().record(measured(1, scored(1, entropy={None: [(2, 5.0, 0.0, 0.0)]})))

    assert sql("SELECT kind, bin, count FROM histogram ORDER BY id") == [("reliability", 7, 4.0), ("entropy", 2, 5.0)]


def test_bytes_beyond_32_bits_are_kept(begin, sql):
    begin().record(measured(1, costs=[Cost(1, "client", 1.0, bytes_down=2**40, bytes_up=2**41)]))

    assert sql("SELECT bytes_down, bytes_up FROM cost") == [(2**40, 2**41)]


def test_a_round_without_measurements_counts_as_a_round(begin, contents):
    begin().record(RoundRecord(1, [], []))

    assert contents() == {"evaluation": 0, "metric": 0, "histogram": 0, "cost": 0, "last_round": [1]}


def test_a_run_says_where_it_ran_and_with_what(begin, sql, versions):
    begin()

    assert sql("SELECT status, device, host, split_hash FROM run") == [("running", "cpu", socket.gethostname(), "abc")]
    (found,) = versions()
    assert (found["python"], found["threads"], found["deterministic"]) == (platform.python_version(), 1, False)
    assert "torch" in found


# --- whole or nothing ---


def test_a_round_whose_last_part_fails_leaves_nothing(begin, contents):
    recorder = begin()
    recorder.record(measured(1))
    before = contents()

    with pytest.raises(IntegrityError):
        recorder.record(measured(2, costs=[Cost(2, "client", 0.5), Cost(2, "server", seconds=None)]))

    assert contents() == before
    assert recorder.last_round() == 1


def test_a_round_whose_second_evaluation_is_there_already_leaves_nothing(begin, contents):
    recorder = begin()
    recorder.record(measured(1))
    before = contents()

    with pytest.raises(IntegrityError):
        recorder.record(measured(2, scored(2), scored(1)))

    assert contents() == before


def test_the_round_can_be_recorded_again_after_a_failure(begin, contents):
    recorder = begin()
    with pytest.raises(IntegrityError):
        recorder.record(measured(1, costs=[Cost(1, "server", seconds=None)]))

    recorder.record(measured(1))

    assert contents() == {"evaluation": 1, "metric": 3, "histogram": 1, "cost": 2, "last_round": [1]}


# --- the lease ---


@pytest.mark.parametrize(
    "write",
    [
        lambda recorder: recorder.record(measured(2)),
        lambda recorder: recorder.rewind(0),
        lambda recorder: recorder.finish("done"),
        lambda recorder: recorder.fail("Traceback ..."),
        lambda recorder: recorder.start(rounds=5, split_hash="abc", device="cpu"),
    ],
    ids=["record", "rewind", "finish", "fail", "start"],
)
def test_a_worker_that_lost_its_lease_changes_nothing(begin, lose, contents, sql, write):
    recorder = begin()
    recorder.record(measured(1))
    lose()
    everything = "SELECT job.status, worker, run.status, error FROM job JOIN run ON run.job_id = job.id"
    before = (contents(), sql(everything))

    with pytest.raises(LeaseLostError):
        write(recorder)

    assert (contents(), sql(everything)) == before


def test_every_round_renews_the_lease(begin, sql):
    recorder = begin()
    sql("UPDATE job SET lease_until = 1")

    recorder.record(measured(1))

    ((until,),) = sql("SELECT lease_until FROM job")
    assert until - time.time() == pytest.approx(queue.LEASE_SECONDS, abs=5)


def test_every_round_counts_as_progress(begin, sql):
    recorder = begin()
    sql("UPDATE job SET attempts = 2")

    recorder.record(measured(1))

    assert sql("SELECT furthest, attempts FROM job") == [(1, 1)]


def test_a_round_that_an_earlier_attempt_had_recorded_is_no_progress(begin, sql):
    recorder = begin()
    sql("UPDATE job SET attempts = 2, furthest = 1")

    recorder.record(measured(1))

    assert sql("SELECT furthest, attempts FROM job") == [(1, 2)]


@pytest.mark.parametrize("write", [lambda recorder: recorder.record(measured(1)), lambda recorder: recorder.renew()])
def test_a_recorder_learns_what_the_queue_asks_for_with_every_write(engine, begin, write):
    recorder = begin()
    before = recorder.order
    queue.pause(engine)

    write(recorder)

    assert (before, recorder.order) == (None, "pause")


# --- resuming ---


def test_rewinding_forgets_the_later_rounds_only(begin, sql):
    recorder = begin()
    for round_ in (1, 2, 3, 4):
        recorder.record(measured(round_))

    recorder.rewind(2)

    assert recorder.last_round() == 2
    assert sql("SELECT last_round FROM run") == [(2,)]
    assert sql("SELECT round FROM evaluation ORDER BY id") == [(1,), (2,)]
    assert sql("SELECT DISTINCT round FROM cost ORDER BY round") == [(1,), (2,)]


def test_rewinding_forgets_closing_evaluations_of_an_earlier_best_state(begin, sql):
    recorder = begin()
    recorder.record(measured(1))
    recorder.record(measured(2, scored(2), scored(1, "best"), scored(2, "final")))

    recorder.rewind(1)

    assert sql("SELECT round, stage FROM evaluation") == [(1, "train")]


def test_rewinding_leaves_no_orphans(begin, contents):
    recorder = begin()
    recorder.record(measured(1))
    after_one = contents()
    recorder.record(measured(2))

    recorder.rewind(1)

    assert contents() == after_one


def test_rewinding_leaves_other_runs_alone(begin, contents):
    begin("another", seed=1).record(measured(1))
    recorder = begin("me", seed=2)
    recorder.record(measured(1))

    recorder.rewind(0)

    assert contents() == {"evaluation": 1, "metric": 3, "histogram": 1, "cost": 2, "last_round": [1, 0]}


def test_an_interrupted_run_goes_on(begin, sql):
    first = begin()
    first.record(measured(1))
    first.finish("interrupted")

    second = begin("another")

    assert second.last_round() == 1
    assert sql("SELECT status, last_round FROM run") == [("running", 1)]


def test_the_run_of_a_worker_that_died_goes_on(engine, begin, sql):
    begin().record(measured(1))
    sql("UPDATE job SET lease_until = 1")
    queue.reap(engine)

    second = begin("another")

    assert second.last_round() == 1
    assert sql("SELECT status, last_round FROM run") == [("running", 1)]


def test_a_run_that_goes_on_adds_to_its_seconds(begin, sql):
    first = begin()
    first.finish("interrupted")
    sql("UPDATE run SET seconds = 1000")

    begin("another").finish("done")

    ((seconds,),) = sql("SELECT seconds FROM run")
    assert 1000 < seconds < 1060


def test_a_run_that_goes_on_keeps_its_conditions(engine, claim):
    first = DatabaseRecorder(engine, claim().job_id, "me")
    assert first.conditions(Conditions(4, deterministic=True)) == Conditions(4, deterministic=True)
    first.start(rounds=5, split_hash="abc", device="cpu")
    first.finish("interrupted")

    second = DatabaseRecorder(engine, claim("another").job_id, "another")

    assert second.conditions(Conditions(1)) == Conditions(4, deterministic=True)


def test_a_new_run_has_the_conditions_it_is_given(engine, claim):
    first = DatabaseRecorder(engine, claim().job_id, "me")
    first.conditions(Conditions(4, deterministic=True))
    first.start(rounds=5, split_hash="abc", device="cpu")
    first.fail("Traceback ...")
    queue.retry(engine, [])

    second = DatabaseRecorder(engine, claim().job_id, "me")

    assert second.conditions(Conditions(1)) == Conditions(1)


def test_a_run_begun_by_an_older_fedbench_goes_on_with_its_threads(engine, claim, begin, sql):
    begin().finish("interrupted")
    sql("UPDATE run SET versions = '{\"threads\": 3}'")

    second = DatabaseRecorder(engine, claim().job_id, "me")

    assert second.conditions(Conditions(1, deterministic=True)) == Conditions(3, deterministic=True)


def test_a_new_run_begins_after_a_failed_one(engine, begin, sql):
    first = begin()
    first.record(measured(1))
    first.fail("Traceback ...")
    queue.retry(engine, [])

    second = begin()

    assert second.last_round() == 0
    assert sql("SELECT status, last_round FROM run ORDER BY id") == [("failed", 1), ("running", 0)]


# --- the end ---


@pytest.mark.parametrize("outcome", ["done", "diverged"])
def test_a_finished_run_ends_its_job(begin, sql, outcome):
    begin().finish(outcome)

    assert sql("SELECT status, error FROM run") == [(outcome, None)]
    assert sql("SELECT status, worker, lease_until, attempts FROM job") == [(outcome, None, None, 1)]


def test_an_interrupted_job_waits_again_and_keeps_its_attempt(begin, sql):
    begin().finish("interrupted")

    assert sql("SELECT status FROM run") == [("interrupted",)]
    assert sql("SELECT status, worker, lease_until, attempts FROM job") == [("pending", None, None, 0)]


@pytest.mark.parametrize(("status", "reason"), [("cancelled", None), ("failed", "stopped by its timeout")])
def test_a_run_that_is_set_aside_is_out_of_the_queue_until_a_retry_goes_on_with_it(engine, begin, sql, status, reason):
    first = begin()
    first.record(measured(1))
    first.set_aside(status, reason)

    assert sql("SELECT status, worker FROM job") == [(status, None)]
    assert sql("SELECT status, error, last_round FROM run") == [("interrupted", reason, 1)]

    queue.retry(engine, [])
    second = begin("another")

    assert second.last_round() == 1
    assert sql("SELECT status, error, last_round FROM run") == [("running", None, 1)]


def test_a_traceback_may_hold_what_a_database_cannot(begin, sql):
    begin().fail("ValueError: 'a\0b'")

    assert sql("SELECT error FROM run") == [("ValueError: 'ab'",)]


def test_a_failed_run_keeps_its_traceback(begin, sql):
    begin().fail("Traceback (most recent call last):\n  ...\nValueError: no luck\nin update, round 3, client 1")

    ((status, error),) = sql("SELECT status, error FROM run")
    assert status == "failed"
    assert error.endswith("ValueError: no luck\nin update, round 3, client 1")
    assert sql("SELECT status, worker FROM job") == [("failed", None)]


def test_a_job_that_fails_before_its_run_begins_keeps_its_reason(engine, claim, sql):
    recorder = DatabaseRecorder(engine, claim().job_id, "me")

    recorder.fail("MNIST is missing")

    assert sql("SELECT status, error, last_round FROM run") == [("failed", "MNIST is missing", 0)]
    assert [job.error for job in queue.listing(engine, ["failed"])] == ["MNIST is missing"]
