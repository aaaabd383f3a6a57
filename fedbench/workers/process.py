"""One worker: claims jobs, runs them, records them, until none is waiting or it is told to stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from fedbench import checkpoint, queue
from fedbench.errors import FedbenchError
from fedbench.records import Recorder
from fedbench.store.database import clear_errors, open_database, results_folder
from fedbench.store.recorder import Conditions, DatabaseRecorder
from fedbench.workers.device import DeviceLock, free_memory, is_out_of_memory
from fedbench.workers.slots import CUBLAS_WORKSPACE, Slot
from fedbench.workers.watch import Watch

if TYPE_CHECKING:
    from fedbench.simulation import Outcome, Surroundings

ABANDONED = 75
"""Exit code of a worker that gave up a round which did not end; its job is closed, another worker replaces it."""


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
    """The job is no longer this worker's: done, diverged, interrupted, cancelled, failed or lost."""

    key: str
    outcome: str
    seconds: float
    error: str = ""
    """Why it failed, or what else is to say."""


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


class Parent(Protocol):
    """Whoever started a worker, as the worker sees it."""

    def tell(self, event: Event) -> None:
        """Hears what happens."""

    def should_stop(self) -> bool:
        """Whether the worker should stop after its round."""

    def abandon(self, last: Ended) -> None:
        """Hears the last event of a worker whose round does not end, and ends its process."""


class JobRecorder(Recorder, Protocol):
    """The records of one claimed job, and its claim: in the database, or on the way to it from another machine."""

    @property
    def order(self) -> queue.Order | None:
        """What the queue asked for at the last write."""

    def conditions(self, wanted: Conditions) -> Conditions:
        """The conditions to run under."""

    def renew(self) -> None:
        """Keeps the claim."""

    def finish(self, outcome: str) -> None:
        """Closes the run."""

    def set_aside(self, status: str, reason: str | None = None) -> None:
        """Takes the job out of the queue; its run can go on later."""

    def fail(self, error: str) -> None:
        """Closes the run with its traceback."""


class Orders:
    """The worker's end of its pipe: events go up, and anything that comes down, even its end, means stop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stop = False
        self._one_at_a_time = threading.Lock()

    def tell(self, event: Event) -> None:
        try:
            with self._one_at_a_time:
                self._connection.send(event)
        except OSError:  # whoever started this worker is gone
            self._stop = True

    def abandon(self, last: Ended) -> NoReturn:
        self.tell(last)
        os._exit(ABANDONED)

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
    except (FedbenchError, OSError) as error:
        orders.tell(trouble(error))


def trouble(error: FedbenchError | OSError) -> Trouble:
    """What stops a worker, as its parent hears it."""
    if isinstance(error, FedbenchError):
        return Trouble(error.message, error.hint)
    return Trouble(f"{error.strerror or error}: {error.filename or ''}", "Mend it and run the same command.")


def work(engine: Engine, url: URL, sweep: int | None, slot: Slot, data_root: Path, orders: Parent) -> None:
    """Run jobs until none is waiting."""
    name = queue.worker_name()
    while not orders.should_stop():
        queue.reap(engine)
        claim = queue.claim(engine, name, sweep)
        if claim is None:
            return
        orders.tell(Claimed(claim.key, claim.spec.label, claim.spec.protocol.rounds))
        recorder = DatabaseRecorder(engine, claim.job_id, name)
        run_claimed(recorder, claim, slot, data_root, results_folder(url) / "checkpoints" / claim.key, orders)


def run_claimed(
    recorder: JobRecorder,
    claim: queue.Claim,
    slot: Slot,
    data_root: Path,
    checkpoints: Path,
    orders: Parent,
    saved: Callable[[], None] = lambda: None,
) -> None:
    """Run one job that this worker holds. A failure of the job is recorded, a failure of the database is raised."""
    import torch

    from fedbench.simulation import Surroundings

    _set_up_torch(recorder.conditions(Conditions(slot.threads, slot.deterministic)))
    with Watch(recorder, claim, orders) as watch:
        place = Surroundings(
            checkpoints=checkpoints,
            device=torch.device(slot.device),
            data_root=data_root,
            checkpoint_seconds=checkpoint_seconds(),
            memory_budget=memory_budget(),
            should_stop=watch.should_stop,
            saved=saved,
            progress=lambda round_, accuracy: orders.tell(RoundDone(claim.key, round_, accuracy)),
        )
        try:
            outcome, remark = _ended(claim, recorder, place, slot, watch)
        except queue.LeaseLostError:  # also while a failure is recorded
            outcome, remark = "lost", "another worker has taken it over"
    if outcome in queue.FINISHED:
        checkpoint.remove(checkpoints)
    orders.tell(Ended(claim.key, outcome, watch.seconds, remark))


def _ended(claim: queue.Claim, recorder: JobRecorder, place: Surroundings, slot: Slot, watch: Watch) -> tuple[str, str]:
    """Runs the job and closes its run; returns the outcome and what is to say about it, such as why it failed."""
    try:
        outcome, remark = _simulated(claim, recorder, place, slot)
    except (SQLAlchemyError, OSError, queue.LeaseLostError):
        raise
    except FedbenchError as problem:
        recorder.fail(str(problem))
        return "failed", str(problem)
    except _OutOfMemoryTwiceError as problem:
        recorder.fail(f"{problem}\n{traceback.format_exc()}")
        return "failed", str(problem)
    except Exception as problem:
        recorder.fail(traceback.format_exc())
        return "failed", f"{type(problem).__name__}: {problem}"
    if outcome == "interrupted":
        return watch.set_aside()
    recorder.finish(outcome)
    return outcome, remark


class _OutOfMemoryTwiceError(Exception):
    """The device's memory does not suffice for this job."""


def _simulated(claim: queue.Claim, recorder: JobRecorder, place: Surroundings, slot: Slot) -> tuple[Outcome, str]:
    """Runs the job beside others; once more, alone on its device, if that had no memory left."""
    from fedbench.simulation import simulate

    if not slot.lock:
        return simulate(claim.spec, recorder, place), ""
    lock = DeviceLock(slot.lock)
    with lock.shared(place.should_stop) as mine:
        try:
            return (simulate(claim.spec, recorder, place) if mine else "interrupted"), ""
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
    free_memory()  # here, because the traceback above held on to it
    with lock.alone(place.should_stop) as mine:
        try:
            outcome = simulate(claim.spec, recorder, place) if mine else "interrupted"
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            text = f"{slot.name} ran out of memory twice, the second time with the device to itself"
            raise _OutOfMemoryTwiceError(text) from problem
    return outcome, f"{slot.name} had run out of memory: tried again with the device to itself"


def _set_up_torch(conditions: Conditions) -> None:
    """A worker runs jobs under different conditions one after the other."""
    import torch

    torch.set_num_threads(conditions.threads)
    if conditions.deterministic:
        os.environ.update(CUBLAS_WORKSPACE)  # there from the start, unless only the run's first worker was asked for it
    if conditions.deterministic != torch.are_deterministic_algorithms_enabled():  # the call itself takes a second
        torch.use_deterministic_algorithms(conditions.deterministic)
    torch.backends.cudnn.benchmark = False  # which chooses kernels by their speed at the moment
