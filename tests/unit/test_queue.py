"""The queue: idempotent, atomic between processes, and never losing the job of a worker that died."""

import os
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest
from sqlalchemy import select

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.queue import LEASE_SECONDS, MAX_ATTEMPTS, LeaseLostError, worker_name
from fedbench.store.database import writing
from fedbench.store.models import Sweep
from fedbench.store.recorder import DatabaseRecorder

CLAIM_ALL = """
import sys
from fedbench import queue
from fedbench.store.database import database_url, open_database
engine = open_database(database_url(sys.argv[1]), create=False)
print("ready", flush=True)
sys.stdin.readline()
while (claim := queue.claim(engine, queue.worker_name())) is not None:
    print(claim.key)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request):
    return request.param


@pytest.fixture
def add(engine, make_job):
    """Enqueues a job per seed as a sweep; returns their keys in order."""

    def enqueue(*seeds, sweep="sweep", **others):
        jobs = [make_job(seed=seed) for seed in seeds]
        queue.enqueue(engine, sweep, {"name": sweep}, jobs, **others)
        return [job.key for job in jobs]

    return enqueue


@pytest.fixture
def expire(sql):
    """Lets every lease run out."""
    return lambda: sql("UPDATE job SET lease_until = lease_until - :more", more=LEASE_SECONDS + 1)


@pytest.fixture
def dead_pid():
    """The number of a process that no longer lives."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def keys(engine, *statuses):
    return [job.key for job in queue.listing(engine, statuses)]


# --- enqueue ---


def test_enqueueing_twice_adds_each_job_once(engine, add):
    first = add(0, 1)

    second = add(0, 1)

    assert first == second == keys(engine)


def test_enqueueing_again_leaves_what_is_done(engine, add, sql):
    add(0, 1)
    sql("UPDATE job SET status = 'done', attempts = 1 WHERE id = 1")

    add(0, 1)

    assert sql("SELECT status, attempts FROM job ORDER BY id") == [("done", 1), ("pending", 0)]


def test_sweeps_share_jobs(engine, add):
    add(0, 1, sweep="first")
    add(1, 2, sweep="second")

    sweeps = queue.sweep_ids(engine)

    assert len(keys(engine)) == 3
    assert [queue.counts(engine, sweeps[name]) for name in ("first", "second")] == [{"pending": 2}, {"pending": 2}]


def test_a_sweep_is_what_was_last_asked_for_under_its_name(engine, add):
    add(0, 1, sweep="quickstart")
    newest = add(2, sweep="quickstart")

    sweep = queue.sweep_ids(engine)["quickstart"]

    assert [job.key for job in queue.listing(engine, sweep=sweep)] == newest
    assert len(keys(engine)) == 3, "the jobs themselves stay"


def test_a_sweep_keeps_its_grid(engine, add):
    add(0, sweep="quickstart")

    with engine.connect() as connection:
        kept = connection.execute(select(Sweep.name, Sweep.grid)).all()
    assert kept == [("quickstart", {"name": "quickstart"})]


def test_a_job_that_waits_is_raised_to_a_higher_priority_and_never_lowered(engine, add):
    add(0, priority=3)

    add(0, sweep="again", priority=5)
    add(0, sweep="once more", priority=1)

    assert [job.priority for job in queue.listing(engine)] == [5]


def test_a_job_that_is_done_keeps_its_priority(engine, add, sql):
    add(0)
    sql("UPDATE job SET status = 'done'")

    add(0, priority=5)

    assert [job.priority for job in queue.listing(engine)] == [0]


def test_a_timeout_is_what_was_last_asked_for_and_no_part_of_the_job(engine, add, make_job):
    (key,) = add(0, timeout=60.0)
    (again,) = add(0, timeout=7200.0)

    claim = queue.claim(engine, "me")

    assert key == again == make_job(seed=0).key
    assert claim.timeout == 7200.0


def test_without_a_timeout_an_earlier_one_no_longer_holds(engine, add):
    add(0, timeout=60.0)
    add(0)

    assert queue.claim(engine, "me").timeout is None


def test_more_jobs_than_a_statement_takes_are_enqueued_whole(engine, make_job):
    job = make_job()
    many = [job.model_copy(update={"seed": seed}) for seed in range(1201)]

    sweep = queue.enqueue(engine, "large", {}, many)

    assert queue.counts(engine, sweep) == {"pending": 1201}


# --- claim ---


def test_jobs_are_claimed_by_priority_and_then_in_order(engine, add):
    ordinary = add(0, 1)
    urgent = add(2, 3, sweep="urgent", priority=5)

    claimed = [queue.claim(engine, "me").key for _ in range(4)]

    assert claimed == [*urgent, *ordinary]


def test_a_listing_is_in_the_order_of_the_queue(engine, add):
    ordinary = add(0)
    urgent = add(1, sweep="urgent", priority=5)

    assert keys(engine) == [*urgent, *ordinary]


def test_a_claimed_job_is_running_under_a_lease_of_its_worker(engine, add, sql):
    add(0)

    queue.claim(engine, "me")

    ((status, worker, attempts, until),) = sql("SELECT status, worker, attempts, lease_until FROM job")
    assert (status, worker, attempts) == ("running", "me", 1)
    assert until - time.time() == pytest.approx(LEASE_SECONDS, abs=5)


def test_a_claim_holds_the_job_as_it_was_enqueued(engine, add, make_job):
    add(7)

    assert queue.claim(engine, "me").spec == make_job(seed=7)


def test_nothing_is_claimed_when_nothing_waits(engine, add):
    add(0)
    queue.claim(engine, "me")

    assert queue.claim(engine, "another") is None


@pytest.mark.parametrize("status", ["running", "done", "diverged", "failed", "cancelled"])
def test_only_waiting_jobs_are_claimed(engine, add, sql, status):
    add(0)
    sql("UPDATE job SET status = :status", status=status)

    assert queue.claim(engine, "me") is None


def test_a_worker_of_a_sweep_claims_that_sweeps_jobs_only(engine, add):
    add(0, sweep="first")
    (wanted,) = add(1, sweep="second")
    second = queue.sweep_ids(engine)["second"]

    assert queue.claim(engine, "me", second).key == wanted
    assert queue.claim(engine, "me", second) is None


def test_processes_that_claim_at_once_get_each_job_exactly_once(engine, add):
    every = add(*range(40))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM_ALL, engine.url.render_as_string(hide_password=False)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()

    shares = [process.communicate(timeout=60)[0].split() for process in processes]
    claimed = [key for share in shares for key in share]

    assert Counter(claimed) == Counter(every)
    assert sum(bool(told) for told in shares) > 1, "one process had them all, so that this test shows nothing"
    assert [process.returncode for process in processes] == [0] * 4


# --- leases ---


def test_the_database_tells_the_time(engine):
    with engine.connect() as connection:
        found = connection.execute(select(queue.now(connection))).scalar_one()

    assert found == pytest.approx(time.time(), abs=2)


def test_a_job_whose_lease_ran_out_waits_again(engine, add, expire, sql):
    add(0)
    queue.claim(engine, "elsewhere/1/1")
    expire()

    assert queue.reap(engine) == 1

    assert sql("SELECT status, worker, lease_until, attempts FROM job") == [("pending", None, None, 1)]


def test_a_job_with_a_lease_on_another_machine_is_left_alone(engine, add, dead_pid, sql):
    add(0)
    queue.claim(engine, f"elsewhere/1/{dead_pid}")

    assert queue.reap(engine) == 0

    assert sql("SELECT status FROM job") == [("running",)]


def test_a_job_with_a_lease_in_another_container_is_left_alone(engine, add, dead_pid):
    add(0)
    queue.claim(engine, f"{socket.gethostname()}/1/{dead_pid}")

    assert queue.reap(engine) == 0


def test_the_job_of_a_process_that_died_here_waits_again_at_once(engine, add, dead_pid, sql):
    add(0)
    queue.claim(engine, worker_name(dead_pid))

    assert queue.reap(engine) == 1

    assert sql("SELECT status, worker FROM job") == [("pending", None)]


def test_the_job_of_a_killed_process_that_nobody_has_waited_for_waits_again_at_once(engine, add):
    # In a container without an init process the killed workers of a killed parent stay zombies for ever.
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    add(0)
    queue.claim(engine, worker_name(zombie.pid))

    reaped = queue.reap(engine)
    zombie.wait()

    assert reaped == 1


def test_the_job_of_a_live_process_here_is_left_alone(engine, add):
    add(0)
    queue.claim(engine, worker_name())

    assert queue.reap(engine) == 0


def test_a_job_is_reaped_once(engine, add, expire):
    add(0)
    queue.claim(engine, "elsewhere/1/1")
    expire()
    queue.reap(engine)

    assert queue.reap(engine) == 0


@pytest.fixture
def die(engine, expire):
    """A worker claims the job, begins its run if it gets so far, and is never heard of again."""

    def claim_and_vanish(*, begins):
        claim = queue.claim(engine, "elsewhere/1/1")
        if begins:
            DatabaseRecorder(engine, claim.job_id, "elsewhere/1/1").start(rounds=5, split_hash="", device="cpu")
        expire()
        queue.reap(engine)

    return claim_and_vanish


def test_a_job_whose_worker_died_before_is_tried_again(engine, add, die, sql):
    add(0)

    for _ in range(MAX_ATTEMPTS - 1):
        die(begins=True)

    assert sql("SELECT status, attempts FROM job") == [("pending", MAX_ATTEMPTS - 1)]


@pytest.mark.parametrize("begins", [True, False], ids=["in its run", "before its run began"])
def test_a_job_whose_workers_keep_dying_fails_with_a_reason(engine, add, die, begins):
    add(0)

    for _ in range(MAX_ATTEMPTS):
        die(begins=begins)

    (job,) = queue.listing(engine)
    assert job.status == "failed"
    assert "died 3 times" in job.error


def test_a_job_that_gets_further_with_every_attempt_is_never_given_up(engine, add, expire, sql):
    add(0)

    for round_ in range(1, 3 * MAX_ATTEMPTS):
        claim = queue.claim(engine, "elsewhere/1/1")
        with writing(engine).begin() as connection:
            queue.renew(connection, claim.job_id, "elsewhere/1/1", reached=round_)
        expire()
        queue.reap(engine)

    assert sql("SELECT status, attempts, furthest FROM job") == [("pending", 1, 3 * MAX_ATTEMPTS - 1)]


def test_a_job_that_dies_again_and_again_at_one_place_is_given_up_however_far_it_is(engine, add, expire):
    add(0)

    for round_ in (1, 2, 7, 7, 5):  # got to 7 first, and no further in the two attempts that followed
        claim = queue.claim(engine, "elsewhere/1/1")
        with writing(engine).begin() as connection:
            queue.renew(connection, claim.job_id, "elsewhere/1/1", reached=round_)
        expire()
        queue.reap(engine)

    (job,) = queue.listing(engine)
    assert job.status == "failed"
    assert job.error == "the worker died 3 times while it ran this job, each time after round 7 (out of memory?)"


def test_a_job_that_failed_so_can_be_retried_as_often_again(engine, add, die, sql):
    add(0)
    for _ in range(MAX_ATTEMPTS):
        die(begins=True)

    queue.retry(engine, [])
    die(begins=True)

    assert sql("SELECT status, attempts FROM job") == [("pending", 1)]


def test_renewing_prolongs_the_lease(engine, add, expire, sql):
    add(0)
    claim = queue.claim(engine, "me")
    expire()

    with writing(engine).begin() as connection:
        queue.renew(connection, claim.job_id, "me")

    assert queue.reap(engine) == 0


def test_a_worker_that_lost_its_job_cannot_renew_the_lease(engine, add, expire):
    add(0)
    claim = queue.claim(engine, "elsewhere/1/1")
    expire()
    queue.reap(engine)
    queue.claim(engine, "elsewhere/1/2")

    with pytest.raises(LeaseLostError), writing(engine).begin() as connection:
        queue.renew(connection, claim.job_id, "elsewhere/1/1")


def test_the_lease_of_a_job_that_ended_cannot_be_renewed(engine, add):
    add(0)
    claim = queue.claim(engine, "me")
    with writing(engine).begin() as connection:
        queue.release(connection, claim.job_id, "me", "done")

    with pytest.raises(LeaseLostError), writing(engine).begin() as connection:
        queue.renew(connection, claim.job_id, "me")


def test_a_worker_that_lost_its_job_cannot_end_it(engine, add, sql):
    add(0)
    claim = queue.claim(engine, "me")

    with pytest.raises(LeaseLostError), writing(engine).begin() as connection:
        queue.release(connection, claim.job_id, "another", "done")

    assert sql("SELECT status, worker FROM job") == [("running", "me")]


def test_a_worker_that_stops_on_request_gives_the_attempt_back(engine, add, sql):
    add(0)
    claim = queue.claim(engine, "me")

    with writing(engine).begin() as connection:
        queue.release(connection, claim.job_id, "me", "pending")

    assert sql("SELECT status, worker, lease_until, attempts FROM job") == [("pending", None, None, 0)]


# --- looking and changing ---


@pytest.fixture
def every_status(engine, add, sql):
    """One job in every status; returns the key of each."""
    found = dict(zip(queue.STATUSES, add(*range(len(queue.STATUSES))), strict=True))
    for status, key in found.items():
        sql("UPDATE job SET status = :status, attempts = 2 WHERE key = :key", status=status, key=key)
    return found


def test_jobs_are_counted_per_status_in_the_order_of_their_lives(engine, every_status):
    assert list(queue.counts(engine).items()) == [(status, 1) for status in queue.STATUSES]


def test_a_status_that_no_job_has_is_not_counted(engine, add):
    add(0, 1)

    assert queue.counts(engine) == {"pending": 2}


def test_a_listing_shows_the_statuses_asked_for(engine, every_status):
    assert keys(engine, "failed", "done") == [every_status["done"], every_status["failed"]]


def test_a_listing_shows_the_newest_runs_round_and_error(engine, add):
    add(0)
    for error in ("first", "second"):
        recorder = DatabaseRecorder(engine, queue.claim(engine, "me").job_id, "me")
        recorder.fail(error)
        queue.retry(engine, [])

    assert [(job.error, job.last_round) for job in queue.listing(engine)] == [("second", 0)]


def test_all_failed_and_cancelled_jobs_are_retried(engine, every_status, sql):
    assert queue.retry(engine, []) == 2

    back = sql("SELECT key, attempts FROM job WHERE status = 'pending' AND attempts = 0 ORDER BY id")
    assert back == [(every_status["failed"], 0), (every_status["cancelled"], 0)]


def test_one_job_is_retried_by_how_its_key_begins(engine, every_status):
    assert queue.retry(engine, [every_status["failed"][:12]]) == 1

    assert keys(engine, "failed") == []
    assert keys(engine, "cancelled") == [every_status["cancelled"]]


@pytest.mark.parametrize("status", ["pending", "running", "done", "diverged"])
def test_a_job_that_did_not_fail_is_not_retried(engine, every_status, status):
    assert queue.retry(engine, [every_status[status]]) == 0

    assert keys(engine, status) == [every_status[status]]


def test_all_waiting_jobs_are_cancelled_and_no_others(engine, every_status, sql):
    assert queue.cancel(engine, []) == (1, 0)

    assert queue.counts(engine) == {"running": 1, "done": 1, "diverged": 1, "failed": 1, "cancelled": 2}
    assert sql("SELECT DISTINCT stop FROM job") == [(None,)]


def test_a_running_job_that_is_cancelled_by_name_is_asked_to_stop(engine, add, sql):
    (key,) = add(0)
    claim = queue.claim(engine, "me")

    assert queue.cancel(engine, [key]) == (0, 1)

    with writing(engine).begin() as connection:
        assert queue.renew(connection, claim.job_id, "me") == "cancel"
        queue.release(connection, claim.job_id, "me", "cancelled")
    assert sql("SELECT status, stop FROM job") == [("cancelled", None)]


def test_a_job_that_was_to_be_cancelled_when_its_worker_died_is_cancelled(engine, add, expire, sql):
    (key,) = add(0)
    queue.claim(engine, "elsewhere/1/1")
    queue.cancel(engine, [key])
    expire()

    queue.reap(engine)

    assert sql("SELECT status, stop, worker FROM job") == [("cancelled", None, None)]


@pytest.mark.parametrize("status", ["done", "diverged", "failed", "cancelled"])
def test_a_job_that_has_ended_is_not_cancelled(engine, every_status, status):
    assert queue.cancel(engine, [every_status[status]]) == (0, 0)

    assert keys(engine, status) == [every_status[status]]


# --- priorities and pauses ---


def test_a_job_that_is_given_a_higher_priority_comes_first(engine, add):
    _, second = add(0, 1)

    assert queue.prioritise(engine, 5, [second[:12]]) == 1

    assert queue.claim(engine, "me").key == second


def test_a_job_that_is_given_a_lower_priority_comes_last(engine, add):
    first, second = add(0, 1)

    queue.prioritise(engine, -1, [first])

    assert queue.claim(engine, "me").key == second


def test_only_waiting_jobs_are_given_a_priority(engine, every_status, sql):
    assert queue.prioritise(engine, 5, []) == 1

    assert sql("SELECT status FROM job WHERE priority = 5") == [("pending",)]


def test_nothing_is_claimed_while_the_queue_is_paused(engine, add):
    (key,) = add(0)
    queue.pause(engine)
    queue.pause(engine)  # twice is as once

    assert queue.is_paused(engine)
    assert queue.claim(engine, "me") is None

    queue.resume(engine)

    assert not queue.is_paused(engine)
    assert queue.claim(engine, "me").key == key


def test_a_worker_learns_of_a_pause_when_it_renews_its_lease(engine, add):
    add(0)
    claim = queue.claim(engine, "me")

    with writing(engine).begin() as connection:
        assert queue.renew(connection, claim.job_id, "me") is None
    queue.pause(engine)
    with writing(engine).begin() as connection:
        assert queue.renew(connection, claim.job_id, "me") == "pause"


def test_a_key_is_found_by_how_it_begins(engine, add):
    first, second = add(0, 1)

    assert (queue.find_key(engine, first[:10]), queue.find_key(engine, second)) == (first, second)


@pytest.mark.parametrize("unknown", ["zzz", "%", "_"])
def test_an_unknown_key_is_a_clear_error(engine, add, unknown):
    add(0)

    with pytest.raises(FedbenchError, match="no job has a key that begins with"):
        queue.find_key(engine, unknown)


def test_an_ambiguous_key_is_a_clear_error(engine, add):
    every = add(*range(17))  # one more than there are digits, so that two keys begin alike
    ((shared, _),) = Counter(key[0] for key in every).most_common(1)

    with pytest.raises(FedbenchError, match=f"several jobs have keys that begin with '{shared}'"):
        queue.find_key(engine, shared)


def test_one_unknown_key_among_others_changes_nothing(engine, every_status):
    with pytest.raises(FedbenchError):
        queue.cancel(engine, [every_status["pending"], "zzz"])

    assert keys(engine, "pending") == [every_status["pending"]]
