"""Fixtures of the integration tests: the installed command in a clean place, without network, and its database."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("fedbench")
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""A proxy that does not answer."""
# two jobs that end well, and one that diverges
TINY = """
name: tiny
methods: [fedavg, local, {fedprox: {lr: 1.0e+30}}]
tasks: [{dataset: digits}]
set: {rounds: 3, eval_every: 1}
axes: {seed: [0]}
"""


class Place:
    """A folder in which commands are called; the home folder and the data root are empty folders beside it."""

    def __init__(self, home, **environment):
        self.folder = home / "here"
        self.folder.mkdir()
        self.db = self.folder / "results" / "fedbench.sqlite"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FEDBENCH_")}
        (home / "data").mkdir()
        here = {"HOME": str(home), "FEDBENCH_DATA": str(home / "data"), "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
        here["OMP_WAIT_POLICY"] = "passive"  # threads that wait must not spin on a busy machine
        self.environment = {**clean, **NO_NETWORK, **here, **environment}

    def write(self, name, text):
        """A file in the folder; returns its name, as a user would give it."""
        (self.folder / name).write_text(text)
        return name

    def start(self, *words, **environment):
        """Starts the command in a process group of its own."""
        return subprocess.Popen(
            [str(COMMAND), *map(str, words)],
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *words, **environment):
        """Runs the command to its end."""
        process = self.start(*words, **environment)
        stdout, stderr = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def sql(self, statement):
        """Rows of the database."""
        with closing(sqlite3.connect(self.db)) as connection:
            return connection.execute(statement).fetchall()

    def tree(self):
        """Every path of the folder with its content."""
        return {path: path.read_bytes() if path.is_file() else None for path in self.folder.rglob("*")}


@pytest.fixture
def fedbench(tmp_path):
    """The command, in a place that holds the grid tiny.yaml and nothing else."""
    place = Place(tmp_path)
    place.write("tiny.yaml", TINY)
    return place


@pytest.fixture(scope="session")
def new_place(tmp_path_factory):
    """Makes a place that lives as long as the session."""
    return lambda name, **environment: Place(tmp_path_factory.mktemp(name), **environment)


@pytest.fixture(scope="session")
def finished(new_place):
    """A place where the tiny grid has been run, for tests that only look; `run` is how that went."""
    place = new_place("finished")
    place.write("tiny.yaml", TINY)
    place.run = place("run", "--grid", "tiny.yaml", "--workers", "2")
    return place
