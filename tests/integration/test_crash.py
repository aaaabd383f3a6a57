"""Kills, power cuts and Ctrl-C in the middle of a round: the run goes on, and ends with the very same numbers."""

import os
import signal
import time
from pathlib import Path

import pytest

# A method that meets a blow at a fixed place, so that no test depends on the clock: before the second client of
# round 5 of the first seed, once. It also notes every client's turn, which shows from where a run went on.
FRAGILE = '''
"""Fragile: pFedBayes, which keeps moments, posteriors and best states, under blows."""

import os
import signal
import time
from pathlib import Path

from fedbench.algorithms.pfedbayes import PFedBayes


class Fragile(PFedBayes):
    title = "Fragile"

    def update(self, down, memory, data, ctx):
        folder = Path(os.environ["FRAGILE_FOLDER"])
        with (folder / "turns").open("a") as turns:
            print(ctx.seed, ctx.round, ctx.client, os.getpid(), file=turns)
        blow, struck = os.environ.get("FRAGILE_BLOW"), folder / "struck"
        if blow and (ctx.seed, ctx.round, ctx.client) == (0, 5, 1) and not struck.exists():
            struck.touch()
            strike(blow)
        return super().update(down, memory, data, ctx)


def strike(blow):
    if blow == "kill worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif blow == "kill all":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    elif blow == "Ctrl-C":
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(1)  # a round long enough for the word to arrive
    elif blow == "Ctrl-C twice":
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(300)
'''
GRID = """
name: fragile
methods: [fragile]
tasks: [{dataset: digits, clients: 3}]
set: {rounds: 8, eval_every: 2, mc_every: 4, mc_samples: 3}
axes: {seed: [0, 1]}
"""
ROUNDS = 8
RUN = ("run", "--grid", "fragile.yaml", "--workers", "1")
BY_JOB = "JOIN run ON run_id = run.id JOIN job ON job_id = job.id"
MEASURED = (
    "SELECT key, recorded, round, stage, step, view, split, predict, client, name, value FROM metric "
    f"JOIN evaluation ON evaluation_id = evaluation.id {BY_JOB} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "SELECT key, recorded, round, stage, view, predict, client, bin, count, confidence, correct FROM histogram "
    f"JOIN evaluation ON evaluation_id = evaluation.id {BY_JOB} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8",
    f"SELECT key, round, phase, count, bytes_down, bytes_up FROM cost {BY_JOB} ORDER BY 1, 2, 3",
)
"""All that a run measures, but for seconds."""


class FragilePlace:
    """A place with the fragile method and its grid."""

    def __init__(self, place):
        self.place = place
        self.run, self.start, self.sql = place, place.start, place.sql
        plugins = place.folder / "plugins"
        plugins.mkdir()
        (plugins / "fragile.py").write_text(FRAGILE)
        place.write("fragile.yaml", GRID)
        place.environment |= {"FEDBENCH_PLUGINS": str(plugins), "FRAGILE_FOLDER": str(place.folder)}

    def measured(self):
        return [self.sql(query) for query in MEASURED]

    def turns(self, seed):
        """(round, client) of every update of the job with this seed, in order, per process."""
        by_process = {}
        for line in (self.place.folder / "turns").read_text().splitlines():
            of_seed, round_, client, pid = map(int, line.split())
            if of_seed == seed:
                by_process.setdefault(pid, []).append((round_, client))
        return list(by_process.values())


@pytest.fixture(scope="module")
def undisturbed(new_place):
    """A run that nothing happened to."""
    there = FragilePlace(new_place("undisturbed"))
    ended = there.run(*RUN)
    assert ended.returncode == 0, ended.stderr
    return there


@pytest.fixture
def here(fedbench):
    return FragilePlace(fedbench)


def assert_whole_and_equal(here, undisturbed):
    """One finished run per job, with the very numbers of the undisturbed run, in a sound database, and no leftovers."""
    assert here.measured() == undisturbed.measured()
    assert here.sql("SELECT status, last_round, error FROM run") == [("done", ROUNDS, None)] * 2
    assert here.sql("SELECT status, worker, lease_until FROM job") == [("done", None, None)] * 2
    assert here.sql("PRAGMA integrity_check") == [("ok",)]
    assert here.sql("PRAGMA foreign_key_check") == []
    assert list(here.place.db.parent.glob("checkpoints/*")) == []


def test_the_undisturbed_run_measures_something(undisturbed):
    metrics, bins, costs = undisturbed.measured()

    assert len(metrics) > 100
    assert len(bins) > 100
    assert len(costs) > 2 * 2 * ROUNDS
    assert undisturbed.turns(0) == [[(round_, client) for round_ in range(1, ROUNDS + 1) for client in range(3)]]


def test_a_worker_killed_before_its_first_checkpoint_is_replaced_and_its_job_ends_with_the_same_numbers(
    here, undisturbed
):
    ended = here.run(*RUN, FRAGILE_BLOW="kill worker", FEDBENCH_CHECKPOINT_SECONDS="1000")

    assert ended.returncode == 0, ended.stderr
    assert "a worker on cpu died (signal 9)" in ended.stdout
    killed, second = here.turns(0)
    assert (killed[-1], second[0]) == ((5, 1), (1, 0))
    assert_whole_and_equal(here, undisturbed)


def test_when_all_processes_are_killed_the_same_command_resumes_from_the_checkpoint_to_the_same_numbers(
    here, undisturbed
):
    killed = here.run(*RUN, FRAGILE_BLOW="kill all", FEDBENCH_CHECKPOINT_SECONDS="0")
    left = here.sql("SELECT status, last_round FROM run")

    ended = here.run(*RUN)

    assert (killed.returncode, left) == (-signal.SIGKILL, [("running", 4)])
    assert ended.returncode == 0, ended.stderr
    first, second = here.turns(0)
    assert (first[-1], second[0]) == ((5, 1), (5, 0))
    assert_whole_and_equal(here, undisturbed)


def test_ctrl_c_stops_after_the_round_and_the_same_command_goes_on_to_the_same_numbers(here, undisturbed):
    stopped = here.run(*RUN, FRAGILE_BLOW="Ctrl-C")
    left = here.sql("SELECT status, attempts FROM job")

    ended = here.run(*RUN)

    assert stopped.returncode == 130
    assert "stopping after the current round" in stopped.stdout
    assert "Run the same command to go on" in stopped.stdout
    assert stopped.stderr == ""
    assert left == [("pending", 0)] * 2
    assert ended.returncode == 0, ended.stderr
    first, second = here.turns(0)
    assert (first[-1], second[0]) == ((5, 2), (6, 0))
    assert_whole_and_equal(here, undisturbed)


def test_ctrl_c_twice_does_not_wait_for_the_round(here):
    started = time.monotonic()

    stopped = here.run(*RUN, FRAGILE_BLOW="Ctrl-C twice")

    assert stopped.returncode == 130
    assert time.monotonic() - started < 60, "the round would take five minutes"
    assert "Traceback" not in stopped.stderr
    assert here.sql("SELECT status, worker FROM job") == [("pending", None)] * 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the workers in /proc")
def test_ctrl_c_while_workers_start_is_as_quiet(here):
    process = here.start(*RUN)
    wait_for_worker(process.pid)
    time.sleep(0.15)  # into its imports

    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "died" not in stdout
    assert stderr == ""


def wait_for_worker(parent):
    """Returns when the parent has started a worker process."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if any(b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children):
            return
        time.sleep(0.01)
    raise AssertionError("no worker was started")
