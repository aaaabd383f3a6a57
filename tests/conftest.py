"""Fixtures of all tests: an in-memory recorder, jobs on digits, plugins for one test, a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import URL, create_engine, text

from fedbench.algorithm import Algorithm, Ctx, State, methods
from fedbench.dataset import Arrays, Dataset, datasets
from fedbench.job import JobSpec, build_job
from fedbench.memory import ClientStore
from fedbench.records import Evaluation, RoundRecord
from fedbench.simulation import Progress
from fedbench.task import Task

torch.set_num_threads(1)

CPU = torch.device("cpu")


@dataclass
class MemoryRecorder:
    """Keeps a run's records in a dictionary, as a database would in tables."""

    kept: dict[int, RoundRecord] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)

    def start(self, *, rounds: int, split_hash: str, device: str) -> None:
        self.starts.append({"rounds": rounds, "split_hash": split_hash, "device": device})

    def last_round(self) -> int:
        return max(self.kept, default=0)

    def rewind(self, round_: int) -> None:
        self.rewinds.append(round_)
        self.kept = {number: record for number, record in self.kept.items() if number <= round_}

    def record(self, record: RoundRecord) -> None:
        assert record.round == self.last_round() + 1, "rounds are recorded in order, and each of them once"
        self.kept[record.round] = record

    def evaluations(self, **wanted: Any) -> list[Evaluation]:
        """All evaluations in the order of recording that have these values: `evaluations(stage="train", view="gm")`."""
        found = [evaluation for record in self.kept.values() for evaluation in record.evaluations]
        return [e for e in found if all(getattr(e, name) == value for name, value in wanted.items())]

    def curve(self, view: str, metric: str = "accuracy") -> dict[int, float]:
        """Round -> the pooled metric of the mean prediction during training."""
        scheduled = self.evaluations(stage="train", view=view, predict="mean")
        return {evaluation.round: evaluation.metrics[None][metric] for evaluation in scheduled}

    def traffic(self) -> list[tuple[int, int]]:
        """Bytes down and up of every round."""
        return [
            (sum(cost.bytes_down for cost in record.costs), sum(cost.bytes_up for cost in record.costs))
            for record in self.kept.values()
        ]


@pytest.fixture
def new_recorder() -> type[MemoryRecorder]:
    return MemoryRecorder


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def make_job() -> Callable[..., JobSpec]:
    """A job on digits with two clients, unless the settings say otherwise."""

    def make(method: str = "fedavg", **settings: Any) -> JobSpec:
        return build_job({"dataset": "digits", "clients": 2, **settings, "method": method})

    return make


@pytest.fixture
def make_ctx(make_job) -> Callable[..., Ctx]:
    """The context of round 1 of such a job, with a fresh task."""

    def make(method: str = "fedavg", *, round_: int = 1, client: int | None = None, **settings: Any) -> Ctx:
        job = make_job(method, **settings)
        return Ctx(Task(job, device=CPU), job.protocol, job.seed, round_, client)

    return make


@pytest.fixture
def make_algorithm() -> Callable[..., Algorithm]:
    """A method with these hyperparameters, the others at their defaults."""

    def make(method: str, **params: Any) -> Algorithm:
        cls = methods.get(method)
        return cls(cls.Params.model_validate(params))

    return make


@pytest.fixture
def begin_training() -> Callable[..., Progress]:
    """The state of a method before its first round; the server's by default as the method begins."""

    def begin(algorithm: Algorithm, ctx: Ctx, server: State | None = None) -> Progress:
        first = algorithm.init_server(ctx) if server is None else server
        return Progress(0, first, ClientStore(lambda client: algorithm.init_client(ctx.at(client))))

    return begin


@pytest.fixture
def add_method(monkeypatch) -> Callable[[str, type[Algorithm]], None]:
    """Registers a method for the length of a test."""

    def add(name: str, cls: type[Algorithm]) -> None:
        known = methods.get
        monkeypatch.setattr(methods, "get", lambda asked: cls if asked == name else known(asked))

    return add


@pytest.fixture
def add_dataset(monkeypatch) -> Callable[..., None]:
    """Registers made-up images for the length of a test: pixels [n, channels, height, width], labels, counts."""

    def add(name: str, x: Any, y: Any, *, per_class: tuple[int, int], full_scale: int = 255) -> None:
        pixels, labels = np.asarray(x, dtype=np.uint8), np.asarray(y, dtype=np.int64)
        arrays = Arrays(pixels, labels, len(labels))
        content = {
            "title": name,
            "shape": pixels.shape[1:],
            "classes": int(labels.max()) + 1,
            "full_scale": full_scale,
            "sizes": {"small": per_class},
            "embedded": True,
            "sha256": arrays.sha256(),
            "read": classmethod(lambda cls, root: arrays),
        }
        made_up, known = type("MadeUp", (Dataset,), content), datasets.get
        monkeypatch.setattr(datasets, "get", lambda asked: made_up if asked == name else known(asked))

    return add


@pytest.fixture
def pictures(add_dataset) -> str:
    """Colour noise of 32x32 pixels for convolutional networks, for up to four clients with 5 of 10 labels."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(10), 8)
    add_dataset("pictures", rng.integers(0, 256, (80, 3, 32, 32)), labels, per_class=(2, 2))
    return "pictures"


@pytest.fixture
def numbers(add_dataset) -> str:
    """Images of one pixel whose value is the label (with normalize=none): a method can know the right answer."""
    labels = np.tile(np.arange(10), 16)
    add_dataset("numbers", labels.reshape(-1, 1, 1, 1), labels, per_class=(2, 2), full_scale=1)
    return "numbers"


@pytest.fixture
def regression() -> dict[str, Any]:
    """Settings of a job on two quadratic clients, all samples in every batch."""
    task = {"dataset": "quadratics", "clients": 2, "partition": "natural", "test_fraction": 0, "min_size": 2}
    return task | {"model": "linear", "normalize": "none", "headline": "rmse", "eval_every": 1}


class PostgresServer:
    """Makes databases on a PostgreSQL server that listens on this port, as the user `fedbench`."""

    password = "open-sesame-4711"

    def __init__(self, port: int) -> None:
        self._names = (f"test_{number}" for number in count())
        self.admin = URL.create("postgresql+psycopg", "fedbench", self.password, "127.0.0.1", port, "postgres")

    def new_database(self) -> URL:
        """An empty database."""
        name = next(self._names)
        engine = create_engine(self.admin, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self.admin.set(database=name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of the tests' own; where there is none to start, the tests that need it are skipped."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    programs = _postgres_programs()
    user = _user_for_postgres()
    folder = Path(tempfile.mkdtemp(prefix="fedbench-postgres-"))  # not pytest's, into which only this user may look
    rights: dict[str, Any] = {"cwd": folder}
    if user is not None:
        shutil.chown(folder, user)
        rights |= {"user": user, "extra_groups": []}
    try:
        password, log, data = folder / "password", folder / "log", folder / "data"
        password.write_text(PostgresServer.password)
        password.chmod(0o644)
        make = [programs / "initdb", "-D", data, "-U", "fedbench", "--auth=scram-sha-256", f"--pwfile={password}"]
        subprocess.run([*make, "-E", "UTF8", "--no-locale", "--no-sync"], check=True, capture_output=True, **rights)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        with log.open("wb") as output:
            server = subprocess.Popen([programs / "postgres", "-D", data, *options], stderr=output, **rights)
        try:
            deadline = time.monotonic() + 60
            while "ready to accept connections" not in log.read_text():
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield PostgresServer(port)
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: nobody will read its files again
            server.wait()
    finally:
        shutil.rmtree(folder)


def _postgres_programs() -> Path:
    """Where `initdb` and `postgres` are: on the path, or where Debian keeps them."""
    on_path = [Path(folder) for folder in os.get_exec_path()]
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin")), *on_path[::-1]]
    present = [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]
    if not present:
        pytest.skip("there is no PostgreSQL server on this machine")
    return present[-1]


def _user_for_postgres() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    users = [user for user in ("postgres", "nobody") if user in known]
    if not users:
        pytest.skip("PostgreSQL does not run as root, and there is no other user")
    return users[0]
