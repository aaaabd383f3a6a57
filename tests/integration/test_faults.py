"""Kills at random moments, and a full disk, in the middle of a sweep: it ends with the very numbers of a quiet one.

`make faults` runs the same tests on more jobs with more kills; FEDBENCH_FAULTS_SEED chooses other moments.
"""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from fedbench.queue import MAX_ATTEMPTS
from fedbench.store.database import database_url, open_database

JOBS = int(os.environ.get("FEDBENCH_FAULTS_JOBS", "12"))
WORKER_KILLS = int(os.environ.get("FEDBENCH_FAULTS_WORKER_KILLS", "3"))
RUN_KILLS = int(os.environ.get("FEDBENCH_FAULTS_RUN_KILLS", "2"))
SEED = int(os.environ.get("FEDBENCH_FAULTS_SEED", "0"))
PATIENCE = 60 + 10 * (JOBS + WORKER_KILLS + RUN_KILLS)
"""Seconds after which a sweep counts as stuck, on however busy a machine."""

METHODS = ("fedavg", "local", "pfedbayes")
ROUNDS = 4
GRID = f"""
name: faults
methods: [{", ".join(METHODS)}]
tasks: [{{dataset: digits, clients: 3}}]
set: {{rounds: {ROUNDS}, eval_every: 1, mc_every: 2, mc_samples: 3}}
axes: {{seed: {list(range(-(-JOBS // len(METHODS))))}}}
"""
RUN = ("run", "--grid", "faults.yaml", "--workers", "2")
ALL = -(-JOBS // len(METHODS)) * len(METHODS)

JOINED = "JOIN run ON run_id = run.id JOIN job ON job_id = job.id"
MEASURED = {
    "metric": "SELECT key, recorded, round, stage, step, view, split, predict, client, name, value FROM metric "
    f"JOIN evaluation ON evaluation_id = evaluation.id {JOINED}",
    "histogram": "SELECT key, recorded, round, stage, step, view, split, predict, client, kind, bin, count, "
    f"confidence, correct FROM histogram JOIN evaluation ON evaluation_id = evaluation.id {JOINED}",
    "cost": f"SELECT key, round, client, phase, count, bytes_down, bytes_up FROM cost {JOINED}",
}
"""All that runs measure, but for seconds: curves, best and final states."""
# Notes every claim of a job, because its `attempts` begin anew whenever it gets further.
NOTE_CLAIMS = """
CREATE TABLE claimed (job_id INTEGER);
CREATE TRIGGER note_claim AFTER UPDATE OF status ON job WHEN NEW.status = 'running' AND OLD.status <> 'running'
BEGIN INSERT INTO claimed VALUES (NEW.id); END;
"""


class Sweep:
    """A place with the grid, an empty database that notes claims, and a checkpoint after every round."""

    def __init__(self, place):
        self.place = place
        self.sql = place.sql
        place.write("faults.yaml", GRID)
        place.environment["FEDBENCH_CHECKPOINT_SECONDS"] = "0"
        self.moments = random.Random(SEED)
        self.started = []

    def prepare(self):
        engine = open_database(database_url(str(self.place.db)), create=True)
        direct = engine.raw_connection()
        direct.executescript(NOTE_CLAIMS)
        direct.close()
        engine.dispose()

    def start(self):
        self.started.append(self.place.start(*RUN))

    def is_over(self, seconds):
        """Whether the newest run has ended after this time. Takes its output meanwhile, which else fills the pipe."""
        try:
            self.output, self.errors = self.started[-1].communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for(self, look):
        """The first answer of `look` that says something, while the run goes on."""
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            assert not self.is_over(0.005), f"the sweep ended too soon: {self.output}{self.errors}"
            assert time.monotonic() < deadline, "the sweep is stuck"
        return found

    def wait_until_done(self, jobs):
        self.wait_for(lambda: self.sql("SELECT count(*) FROM job WHERE status = 'done'")[0][0] >= jobs)

    def let_pass(self, at_most):
        """A random time, during which the run goes on."""
        assert not self.is_over(self.moments.uniform(0, at_most)), f"the sweep ended too soon: {self.output}"

    def end(self):
        """Waits for the end of all runs, the killed ones' orphans among them. Returns the last one's exit code."""
        assert self.is_over(PATIENCE), "the sweep is stuck"
        for killed in self.started[:-1]:
            killed.communicate(timeout=PATIENCE)
        return self.started[-1].returncode

    def measured(self):
        return {table: sorted(self.sql(query), key=repr) for table, query in MEASURED.items()}

    def report(self, kills, quiet):
        claims = self.sql("SELECT count(*) FROM claimed")[0][0]
        rows = {table: len(found) for table, found in self.measured().items()}
        differences = sum(len(set(quiet.measured()[table]) ^ set(found)) for table, found in self.measured().items())
        again = "SELECT count(*) FROM (SELECT job_id FROM run GROUP BY job_id HAVING count(*) > 1)"
        print(
            f"\n{kills}, {ALL} jobs, {claims} claims, {self.sql(again)[0][0]} jobs with more than one run, "
            f"rows compared: {rows}, differences: {differences}"
        )


@pytest.fixture(scope="module")
def quiet(new_place):
    """A sweep that nothing happens to."""
    sweep = Sweep(new_place("quiet"))
    sweep.prepare()
    sweep.start()
    assert sweep.end() == 0, sweep.errors
    return sweep


@pytest.fixture
def sweep(fedbench):
    sweep = Sweep(fedbench)
    yield sweep
    for process in sweep.started:
        if process.returncode is None:  # a test that failed: nothing of it may go on
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def assert_whole_and_equal(sweep, quiet):
    """One finished run per job, with the very numbers of the quiet sweep, in a sound database."""
    assert sweep.sql("SELECT job_id, status, last_round, error FROM run ORDER BY 1") == [
        (job, "done", ROUNDS, None) for job in range(1, ALL + 1)
    ]
    assert sweep.sql("SELECT DISTINCT status, worker, lease_until FROM job") == [("done", None, None)]
    for table, rows in sweep.measured().items():
        assert rows == quiet.measured()[table], table
    assert sweep.sql("PRAGMA integrity_check") == [("ok",)]
    assert sweep.sql("PRAGMA foreign_key_check") == []
    assert_no_checkpoints_but_of_the_last_moment(sweep)


def assert_no_checkpoints_but_of_the_last_moment(sweep):
    """A worker killed between its job's last record and the removal of its checkpoints leaves them to `db vacuum`."""
    folder = sweep.place.db.parent / "checkpoints"
    if list(folder.glob("*")):
        assert sweep.place("db", "vacuum").returncode == 0
    assert list(folder.glob("*")) == []


def test_the_quiet_sweep_measures_something_and_claims_every_job_once(quiet):
    measured = quiet.measured()
    stages = {row[3] for row in measured["metric"]}

    assert {"train", "best", "final"} <= stages
    assert {row[0] for row in measured["metric"]} == {key for (key,) in quiet.sql("SELECT key FROM job")}
    # training costs of every round, and predictions in every round because eval_every is 1
    assert len(measured["cost"]) >= ALL * ROUNDS * 3
    assert quiet.sql("SELECT count(*), count(DISTINCT job_id) FROM claimed") == [(ALL, ALL)]


@pytest.mark.timeout(2 * PATIENCE)
def test_workers_killed_at_random_moments_change_no_number(sweep, quiet):
    sweep.prepare()
    sweep.start()
    killed, in_mid_run = set(), 0

    for kill in range(WORKER_KILLS):
        sweep.wait_until_done(spread(kill, WORKER_KILLS))
        sweep.let_pass(at_most=0.2)  # a job takes that long; the sweep must outlast the last kill
        victim, rounds = sweep.moments.choice(sweep.wait_for(lambda: busy_workers(sweep, killed)))
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
        in_mid_run += rounds > 0
    code = sweep.end()

    sweep.report(f"{WORKER_KILLS} workers killed ({in_mid_run} of them after a round of their job)", quiet)
    assert code == 0, sweep.errors
    assert sweep.output.count("died (signal 9)") == WORKER_KILLS
    # one more claim for every kill, but for a worker whose job ended at that very moment
    assert ALL < sweep.sql("SELECT count(*) FROM claimed")[0][0] <= ALL + WORKER_KILLS
    assert_whole_and_equal(sweep, quiet)


def busy_workers(sweep, dead):
    """Pids of the workers that have a job, and its rounds so far; not of one whose next death makes its job poison."""
    held = f"SELECT worker, furthest FROM job WHERE status = 'running' AND attempts < {MAX_ATTEMPTS} ORDER BY id"
    busy = [(int(worker.rpartition("/")[2]), furthest) for worker, furthest in sweep.sql(held)]
    return [(pid, furthest) for pid, furthest in busy if pid not in dead]  # whose jobs are not put back yet


@pytest.mark.timeout(2 * PATIENCE)
def test_a_run_killed_at_random_moments_and_started_again_beside_its_orphans_changes_no_number(sweep, quiet):
    sweep.prepare()

    for kill in range(RUN_KILLS):
        sweep.start()
        if kill % 2:  # while it starts, beside the orphans of the one before
            sweep.let_pass(at_most=1.0)
        else:
            sweep.wait_until_done(spread(kill, RUN_KILLS) + 1)
            sweep.let_pass(at_most=0.2)
        sweep.started[-1].kill()
    sweep.start()
    code = sweep.end()

    sweep.report(f"{RUN_KILLS} runs killed", quiet)
    assert code == 0, sweep.errors
    assert [process.returncode for process in sweep.started] == [-signal.SIGKILL] * RUN_KILLS + [0]
    assert_whole_and_equal(sweep, quiet)


def spread(kill, kills):
    """How many jobs are to be done before a kill: spread over the first half, so that the sweep outlasts the last."""
    return kill * ALL // (2 * kills)


@pytest.fixture
def small_disk(sweep):
    """The results folder on a disk of 16 MB."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounts a small disk, which needs root")
    folder = sweep.place.db.parent
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_is_one_message_and_the_same_command_goes_on_when_there_is_room(sweep, quiet, small_disk):
    sweep.prepare()
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        # leaves room for the jobs themselves, but not for what they measure
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - 400_000)

    sweep.start()
    full = sweep.end()
    message = sweep.errors
    ballast.unlink()
    sound = sweep.sql("PRAGMA integrity_check")
    done = sweep.sql("SELECT count(*) FROM job WHERE status = 'done'")[0][0]
    sweep.start()
    code = sweep.end()

    assert full == 2
    assert "disk is full" in message or "No space left on device" in message
    assert "run the same command" in message
    assert "Traceback" not in message
    assert (sound, done < ALL) == ([("ok",)], True)
    assert code == 0, sweep.errors
    assert_whole_and_equal(sweep, quiet)
