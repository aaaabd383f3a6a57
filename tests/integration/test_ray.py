"""A sweep on a real Ray cluster: a node is lost in mid-run, a job fails, the user stops; the numbers are the same."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fedbench.workers.slots import cores

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.timeout(300)

RAY = Path(sys.executable).with_name("ray")
# pFedBayes, which keeps moments, posteriors and best states. It waits in round 5 until the test has struck, so that no
# test depends on the clock, and notes where every round is trained. One of its jobs fails instead.
WATCHED = '''
"""Watched: pFedBayes, which says where it is and waits for the test."""

import os
import time
from pathlib import Path

from fedbench.algorithms.pfedbayes import PFedBayes


class Watched(PFedBayes):
    title = "Watched"

    def update(self, down, memory, data, ctx):
        folder = Path(os.environ["WATCHED_FOLDER"])
        with (folder / "turns").open("a") as turns:
            print(ctx.seed, ctx.round, ctx.client, os.environ.get("WATCHED_NODE", "here"), file=turns)
        while ctx.round == 5 and ctx.client == 1 and (folder / "wait").exists():
            time.sleep(0.05)
        if ctx.seed == 13:
            raise ValueError("an unlucky seed")
        return super().update(down, memory, data, ctx)
'''
GRID = """
name: watched
methods: [watched]
tasks: [{dataset: digits, clients: 3}]
set: {rounds: 8, eval_every: 2, mc_every: 4, mc_samples: 3}
axes: {seed: [0, 1, 2]}
"""
BY_JOB = "JOIN run ON run_id = run.id JOIN job ON job_id = job.id"
MEASURED = (
    "SELECT key, recorded, round, stage, step, view, split, predict, client, name, value FROM metric "
    f"JOIN evaluation ON evaluation_id = evaluation.id {BY_JOB} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "SELECT key, recorded, round, stage, view, predict, client, bin, count, confidence, correct FROM histogram "
    f"JOIN evaluation ON evaluation_id = evaluation.id {BY_JOB} ORDER BY 1, 2, 3, 4, 5, 6, 7, 8",
    f"SELECT key, round, phase, count, bytes_down, bytes_up FROM cost {BY_JOB} ORDER BY 1, 2, 3",
)
"""All that a run measures, but for seconds."""


class Nodes:
    """A head without CPUs, and nodes with one CPU each, as processes of this machine."""

    def __init__(self, environment):
        self._temp = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short, because the paths of sockets are limited
        self._environment = environment | {"RAY_USAGE_STATS_ENABLED": "0"}
        self.home = environment["HOME"]
        self._raylets = {}
        head = ["--head", "--port=0", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self._temp}"]
        self._start("head", *head)
        self.address = (self._temp / "ray_current_cluster").read_text().strip()

    def add(self, name):
        if name not in self._raylets:
            self._start(name, f"--address={self.address}", "--num-cpus=1")

    def _start(self, name, *words):
        command = [RAY, "start", *words, "--num-gpus=0", "--object-store-memory=100000000"]
        environment = self._environment | {"WATCHED_NODE": name}
        with (self._temp / f"{name}.log").open("w") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True, timeout=120)
        known = self._raylets.values()
        (self._raylets[name],) = [pid for pid in self._processes("raylet") if pid not in known]

    def kill(self, name):
        """As a power cut does: its workers end with it."""
        os.kill(self._raylets.pop(name), signal.SIGKILL)

    def end(self):
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _processes(self, program=""):
        """Of this cluster: all have its folder among their words."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                words = path.read_text(errors="replace")
                if f"={self._temp}/" in words and words.partition("\0")[0].endswith(program):
                    found.append(int(path.parent.name))
        return found


class WatchedPlace:
    """A place with the watched method and its grid."""

    def __init__(self, place, notes):
        self.place = place
        self._notes = notes
        for path in notes.glob("*"):  # of the test before
            path.unlink()
        self.sql = place.sql
        plugins = place.folder / "plugins"
        plugins.mkdir()
        (plugins / "watched.py").write_text(WATCHED)
        place.write("watched.yaml", GRID)
        place.environment |= {"WATCHED_FOLDER": str(notes), "FEDBENCH_CHECKPOINT_SECONDS": "0"}
        self.on_driver = {"FEDBENCH_PLUGINS": str(plugins)}

    def start(self, *words):
        return self.place.start("run", "--grid", "watched.yaml", *words, **self.on_driver)

    def run(self, *words):
        return self.place("run", "--grid", "watched.yaml", *words, **self.on_driver)

    def wait(self):
        """Let jobs wait in their round 5."""
        (self._notes / "wait").touch()

    def go_on(self):
        (self._notes / "wait").unlink()

    def turns(self):
        """(seed, round, client, node) of every update, in order."""
        file = self._notes / "turns"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(seed), int(round_), int(client), node) for seed, round_, client, node in map(str.split, lines)]

    def await_waiting(self, number):
        """Until so many jobs wait in their round 5; returns the node of each seed."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            waiting = {seed: node for seed, round_, client, node in self.turns() if (round_, client) == (5, 1)}
            if len(waiting) == number:
                return waiting
            time.sleep(0.05)
        raise AssertionError(f"no {number} jobs wait: {self.turns()}")

    def measured(self):
        return [self.sql(query) for query in MEASURED]

    def runs(self):
        return self.sql("SELECT job.status, run.status FROM job LEFT JOIN run ON run.job_id = job.id ORDER BY job.id")


@pytest.fixture(scope="module")
def undisturbed(new_place, tmp_path_factory):
    """What the grid measures on this machine, with one thread per job, as Ray gives them."""
    place = WatchedPlace(new_place("undisturbed"), tmp_path_factory.mktemp("turns"))
    ended = place.run("--devices", "cpu", "--workers", str(cores()))
    assert ended.returncode == 0, ended.stderr
    return place.measured()


@pytest.fixture(scope="module")
def cluster(new_place, tmp_path_factory):
    """A cluster whose nodes do not know the driver's plugins."""
    notes = tmp_path_factory.mktemp("turns")
    started = Nodes(new_place("cluster").environment | {"WATCHED_FOLDER": str(notes)})
    started.notes = notes
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def nodes(cluster):
    """With the nodes `one` and `two`."""
    cluster.add("one")
    cluster.add("two")
    return cluster


@pytest.fixture
def place(fedbench, cluster):
    """In the home of the cluster's nodes, where Ray keeps its token."""
    fedbench.environment["HOME"] = cluster.home
    return WatchedPlace(fedbench, cluster.notes)


def test_a_lost_nodes_job_goes_on_elsewhere_with_the_very_same_numbers(place, nodes, undisturbed):
    on_ray = ("--engine", "ray", "--address", nodes.address)
    place.wait()
    process = place.start(*on_ray)
    try:
        waiting = place.await_waiting(2)
        assert set(waiting.values()) == {"one", "two"}
        lost = next(seed for seed, node in waiting.items() if node == "two")
        nodes.kill("two")
        place.go_on()
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()

    assert (process.returncode, stderr) == (0, "")
    assert "was lost" in stdout
    assert place.runs() == [("done", "done")] * 3
    assert place.measured() == undisturbed
    assert not list((place.place.folder / "results" / "checkpoints").glob("*"))
    again = [(round_, node) for seed, round_, client, node in place.turns() if seed == lost and client == 0]
    # its node had rounds 1 to 4 and a checkpoint of each; the other node begins with round 5
    assert again == [*((n, "two") for n in (1, 2, 3, 4, 5)), *((n, "one") for n in (5, 6, 7, 8))]


def test_ctrl_c_stops_after_the_round_and_a_failure_keeps_its_traceback_from_the_node(place, nodes):
    on_ray = ("--engine", "ray", "--address", nodes.address)
    place.wait()
    process = place.start(*on_ray, "--axis", "seed=0,13")
    try:
        place.await_waiting(1)
        deadline = time.monotonic() + 60
        while place.sql("SELECT count(*) FROM run WHERE status = 'failed'") != [(1,)]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert any("stopping after the current round" in line for line in process.stdout)  # it has heard it
        place.go_on()
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()

    assert (process.returncode, stderr) == (130, "")
    assert place.sql("SELECT status, attempts, worker FROM job ORDER BY status") == [
        ("failed", 1, None),
        ("pending", 0, None),
    ]
    ((error,),) = place.sql("SELECT error FROM run WHERE status = 'failed'")
    assert "ValueError: an unlucky seed" in error
    assert "in update, round 1, client 0" in error
    # the node ran the code that the driver sent: package and plugin
    assert "py_modules_files" in error.partition("simulation.py")[0]
    assert "shipped_plugins/0/watched.py" in error
    # round 5 was recorded, and its checkpoint has come to the driver
    assert place.sql("SELECT status, last_round FROM run WHERE status = 'interrupted'") == [("interrupted", 5)]
    folder = place.place.folder / "results" / "checkpoints"
    assert sorted(path.name for path in folder.glob("*/*.ckpt")) == ["00000004.ckpt", "00000005.ckpt"]
