"""One worker: claims jobs, runs them, records them, until none is waiting or it is told to stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from fedbench import checkpoint, queue
from fedbench.errors import FedbenchError
from fedbench.store.database import clear_errors, open_database, results_folder, writing
from fedbench.store.recorder import DatabaseRecorder
from fedbench.workers.slots import Slot

if TYPE_CHECKING:
    from fedbench.simulation import Surroundings


@dataclass(frozen=True)
class Claimed:
    """The worker begins a job."""

    key: str
    label: str
    rounds: int


@dataclass(frozen=True)
class RoundDone:
    """A round is recorded; the accuracies are those of its evaluations, if any."""

    key: str
    round: int
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Ended:
    """The job is no longer this worker's: done, diverged, interrupted, failed or lost."""

    key: str
    outcome: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Trouble:
    """The worker cannot go on: the database does not answer, the disk is full."""

    message: str
    hint: str


Event = Claimed | RoundDone | Ended | Trouble


def checkpoint_seconds() -> float:
    """Time between checkpoints; raises FedbenchError when the environment holds no number."""
    return _from_environment("FEDBENCH_CHECKPOINT_SECONDS", 30.0)


def memory_budget() -> int:
    """Bytes of client memories in RAM; raises FedbenchError when the environment holds no number."""
    return int(_from_environment("FEDBENCH_MEMORY_GB", 2.0) * 2**30)


def _from_environment(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise FedbenchError(
            f"{name} is {text!r}, which is not a number of at least 0.", f"Unset it, or say {default:g}."
        )
    return value


class Orders:
    """The worker's end of its pipe: events go up, and anything that comes down, even its end, means stop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stop = False

    def tell(self, event: Event) -> None:
        try:
            self._connection.send(event)
        except OSError:  # whoever started this worker is gone
            self._stop = True

    def stop(self) -> None:
        self._stop = True

    def should_stop(self) -> bool:
        try:
            self._stop = self._stop or self._connection.poll()
        except OSError:
            self._stop = True
        return self._stop


def worker_main(connection: Connection, url: URL, sweep: int | None, slot: Slot, data_root: Path) -> None:
    """The whole life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    orders = Orders(connection)
    try:
        with clear_errors(url):
            work(open_database(url, create=False), url, sweep, slot, data_root, orders)
    except FedbenchError as error:
        orders.tell(Trouble(error.message, error.hint))
    except OSError as error:
        orders.tell(Trouble(f"{error.strerror or error}: {error.filename or ''}", "Mend it and run the same command."))


def work(engine: Engine, url: URL, sweep: int | None, slot: Slot, data_root: Path, orders: Orders) -> None:
    """Run jobs until none is waiting."""
    name = queue.worker_name()
    while not orders.should_stop():
        queue.reap(engine)
        claim = queue.claim(engine, name, sweep)
        if claim is None:
            return
        orders.tell(Claimed(claim.key, claim.spec.label, claim.spec.protocol.rounds))
        run_claimed(engine, claim, name, slot, data_root, results_folder(url) / "checkpoints" / claim.key, orders)


def run_claimed(
    engine: Engine, claim: queue.Claim, name: str, slot: Slot, data_root: Path, checkpoints: Path, orders: Orders
) -> None:
    """Run one job that this worker holds. A failure of the job is recorded, a failure of the database is raised."""
    import torch

    from fedbench.simulation import Surroundings

    recorder = DatabaseRecorder(engine, claim.job_id, name)
    torch.set_num_threads(recorder.threads(slot.threads))
    place = Surroundings(
        checkpoints=checkpoints,
        device=torch.device(slot.device),
        data_root=data_root,
        checkpoint_seconds=checkpoint_seconds(),
        memory_budget=memory_budget(),
        should_stop=orders.should_stop,
        progress=lambda round_, accuracy: orders.tell(RoundDone(claim.key, round_, accuracy)),
    )
    started = time.monotonic()
    with _Heartbeat(engine, claim.job_id, name):
        try:
            outcome, error = _simulated(claim, recorder, place)
        except queue.LeaseLostError:  # also while a failure is recorded
            outcome, error = "lost", "another worker has taken it over"
    if outcome in queue.FINISHED:
        checkpoint.remove(checkpoints)
    orders.tell(Ended(claim.key, outcome, time.monotonic() - started, error))


def _simulated(claim: queue.Claim, recorder: DatabaseRecorder, place: Surroundings) -> tuple[str, str]:
    """Runs the job and closes its run; returns the outcome and, for a failure, its reason."""
    from fedbench.simulation import simulate

    try:
        outcome = simulate(claim.spec, recorder, place)
    except (SQLAlchemyError, OSError, queue.LeaseLostError):
        raise
    except FedbenchError as problem:
        recorder.fail(str(problem))
        return "failed", str(problem)
    except Exception as problem:
        recorder.fail(traceback.format_exc())
        return "failed", f"{type(problem).__name__}: {problem}"
    recorder.finish(outcome)
    return outcome, ""


class _Heartbeat:
    """Renews the lease while a round takes longer than it lasts."""

    def __init__(self, engine: Engine, job_id: int, worker: str) -> None:
        self._engine = writing(engine)
        self._job = job_id
        self._worker = worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._over.wait(queue.LEASE_SECONDS / 4):
            try:
                with self._engine.begin() as connection:
                    queue.renew(connection, self._job, self._worker)
            except (queue.LeaseLostError, SQLAlchemyError):
                return  # the recorder meets the same trouble at the next round, and says so

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
