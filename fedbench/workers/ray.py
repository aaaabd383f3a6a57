"""Runs a sweep on a Ray cluster: Ray finds a place for every job, and this process, the driver, keeps the books.

The driver claims jobs in its own name and hands each to Ray as one task, with this very code. The task calls the driver
through a mailbox, an actor beside the driver, and waits for the answer. The job of a task that Ray loses goes back into
the queue, as that of a local worker that dies.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine
from sqlalchemy.engine import URL

import fedbench
from fedbench import queue
from fedbench.dataset import data_root
from fedbench.errors import FedbenchError
from fedbench.job import JobSpec
from fedbench.store.database import clear_errors, results_folder
from fedbench.store.recorder import DatabaseRecorder, here
from fedbench.workers.display import Display
from fedbench.workers.local import WAIT_SECONDS, interrupts_noted
from fedbench.workers.process import (
    Claimed,
    Ended,
    Event,
    Trouble,
    checkpoint_seconds,
    memory_budget,
    run_claimed,
    trouble,
)
from fedbench.workers.remote import Books, Line, RemoteParent, RemoteRecorder, Reply
from fedbench.workers.slots import CUBLAS_WORKSPACE, KEEP_FREED_MEMORY, Slot

POLL_SECONDS = 0.2
_PLUGINS = "shipped_plugins"
_OF_THE_DRIVER = ("FEDBENCH_CHECKPOINT_SECONDS", "FEDBENCH_MEMORY_GB")
"""Settings that a job takes from the driver's environment; all others are its machine's own."""


@dataclass(frozen=True)
class Needs:
    """What one job takes of the cluster. `gpus` is a part of one GPU, or one; None is one where there are any."""

    cpus: int = 1
    gpus: float | None = None
    deterministic: bool = False

    def on(self, nodes: Iterable[Mapping[str, float]]) -> Needs:
        """With the number of GPUs decided, by the resources of the cluster's nodes."""
        gpus = float(any(node.get("GPU", 0) >= 1 for node in nodes)) if self.gpus is None else self.gpus
        return Needs(self.cpus, gpus, self.deterministic)

    def fit(self, node: Mapping[str, float]) -> int:
        """How many jobs a node with these resources takes at the same time; a job's part is of one GPU."""
        by_cpu = int(node.get("CPU", 0) // self.cpus)
        return min(by_cpu, int(node.get("GPU", 0)) * int(1 / self.gpus)) if self.gpus else by_cpu

    @property
    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.cpus), "MKL_NUM_THREADS": str(self.cpus)}
        own = {name: os.environ[name] for name in _OF_THE_DRIVER if name in os.environ}
        return threads | KEEP_FREED_MEMORY | own | (CUBLAS_WORKSPACE if self.deterministic else {})


@contextmanager
def connected(address: str, needs: Needs, data: Path | None, limit: int | None) -> Iterator[Cluster]:
    """A connection to the cluster at this address; without one to the cluster that Ray finds, else to a new local one.

    Raises FedbenchError when there is none, or none that takes a job.
    """
    ray = _ray()
    if address.startswith("ray://"):
        raise FedbenchError(
            "the driver must run on a machine of the cluster, not over Ray Client.", "There: --address auto"
        )
    _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that starts here: nobody was asked
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a job without a GPU sees none
    with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
        code = {"py_modules": [str(pack(Path(folder)))], "env_vars": needs.environment}
        try:
            ray.init(
                address or None,
                runtime_env=code,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if address else {"include_dashboard": False}),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_cluster(address, str(error).strip().partition("\n")[0]) from None
    try:
        cluster = Cluster(needs.on(_nodes()), data, limit)
        if not cluster.size:
            asked = f"{cluster.needs.cpus} CPU(s)" + (f" and {cluster.needs.gpus:g} GPU" if cluster.needs.gpus else "")
            raise FedbenchError(
                f"no node of the Ray cluster has {asked} for a job.",
                "Ask for less: --cpus-per-job, --gpus-per-job. What there is: ray status",
            )
        yield cluster
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries for more than a minute, and fills the screen, before it says that nobody is there."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> FedbenchError:
    where = f" at {address}" if address else ""
    return FedbenchError(
        f"no connection to a Ray cluster{where}: {reason}", "Start one: ray start --head. See docs/cluster.md."
    )


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise FedbenchError("Ray is not installed.", "Run: pip install 'fedbench[ray]'") from None
    return ray


def _nodes() -> list[dict[str, float]]:
    """The resources of the nodes that are alive."""
    return [node["Resources"] for node in _ray().nodes() if node["Alive"]]


def pack(folder: Path) -> Path:
    """The package as it runs here, and the user's plugins, in one folder that Ray ships.

    A wheel would do too, but Ray lets pip install it on every node, with torch and all else that it depends on.
    """
    made = folder / "fedbench"
    own = shutil.ignore_patterns("__pycache__")
    shutil.copytree(fedbench.__path__[0], made, ignore=own)
    for part in ("algorithms", "datasets", "grids"):  # beside the package in a checkout, inside where it is installed
        source = importlib.import_module(f"fedbench.{part}").__path__[0]
        shutil.copytree(source, made / part, ignore=own, dirs_exist_ok=True)
    folders = [part for part in os.environ.get("FEDBENCH_PLUGINS", "").split(os.pathsep) if part]
    for number, plugins in enumerate(folders):
        shutil.copytree(plugins, made / _PLUGINS / str(number), ignore=own)
    return made


def _use_shipped_plugins() -> None:
    """On a node: the plugins that came with the package, instead of the node's own."""
    folders = sorted((Path(fedbench.__path__[0]) / _PLUGINS).glob("*"), key=lambda folder: int(folder.name))
    os.environ["FEDBENCH_PLUGINS"] = os.pathsep.join(map(str, folders))


class Mailbox:
    """An actor between tasks and driver: tasks ask and wait, the driver collects and answers."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[int, Call]] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = count()

    async def ask(self, call: Call) -> Reply:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._asked.put((number, call))
        return await self._waiting[number]

    async def collect(self, seconds: float) -> list[tuple[int, Call]]:
        """What was asked since; waits so long for the first."""
        try:
            found = [await asyncio.wait_for(self._asked.get(), seconds)]
        except TimeoutError:
            return []
        while not self._asked.empty():
            found.append(self._asked.get_nowait())
        return found

    async def answer(self, replies: dict[int, Reply]) -> None:
        for number, reply in replies.items():
            self._waiting.pop(number).set_result(reply)


@dataclass(frozen=True)
class Call:
    """A call of the driver by the task that holds this ticket."""

    ticket: int
    name: str
    arguments: tuple[Any, ...]


def run_on_node(mailbox: Any, ticket: int, claim: queue.Claim, needs: Needs, data: Path | None) -> Trouble | None:
    """The task: one job, on whatever node it is. Returns what keeps this node from running any."""
    import ray

    _use_shipped_plugins()
    line = Line(lambda name, arguments: ray.get(mailbox.ask.remote(Call(ticket, name, arguments))))
    slot = _slot(needs)
    parent = RemoteParent(line)
    try:
        with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
            line("arrive", here(), f"{here().host} {slot.name}")
            parent.tell(Claimed(claim.key, claim.spec.label, claim.spec.protocol.rounds))
            where = Path(folder) / claim.key
            recorder = RemoteRecorder(line, where)
            run_claimed(recorder, claim, slot, data_root(data), where, parent, recorder.send_checkpoints)
    except queue.LeaseLostError:  # before it began
        pass
    except (FedbenchError, OSError) as error:
        return trouble(error)
    return None


def _slot(needs: Needs) -> Slot:
    """The task's place, as Ray has given it: of the GPUs it sees its own alone."""
    import ray

    if not needs.gpus:
        return Slot("cpu", "cpu", needs.cpus, deterministic=needs.deterministic)
    gpu = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
    return Slot(f"cuda:{gpu}", "cuda:0", needs.cpus, lock=f"cuda-{gpu}", deterministic=needs.deterministic)


def check_on_node(jobs: list[JobSpec], data: Path | None) -> FedbenchError | None:
    """The task that checks jobs where their data is."""
    from fedbench.simulation import check_jobs

    _use_shipped_plugins()
    try:
        check_jobs(jobs, data_root(data))
    except FedbenchError as error:
        return error
    return None


@dataclass
class _Flight:
    """A job that the driver holds and Ray has."""

    ticket: int
    claim: queue.Claim
    books: Books
    task: Any
    renewed: float
    ended: bool = False


class Cluster:
    """Who runs jobs on the cluster that this process is connected to."""

    def __init__(self, needs: Needs, data: Path | None, limit: int | None) -> None:
        self.needs = needs
        self._data = data
        self._limit = limit

    @property
    def size(self) -> int:
        """How many jobs run at the same time, on the nodes that are there now."""
        fit = sum(self.needs.fit(node) for node in _nodes())
        return min(fit, self._limit or fit)

    def check(self, jobs: list[JobSpec]) -> None:
        """On a node, because the driver's machine may have no data. Raises FedbenchError."""
        ray = _ray()
        try:
            problem = ray.get(ray.remote(**self._resources(), max_retries=3)(check_on_node).remote(jobs, self._data))
        except ray.exceptions.RayError as error:
            raise _unusable(error) from None
        if problem is not None:
            raise problem

    def run_sweep(
        self, engine: Engine, url: URL, sweep: int | None, display: Display, *, fail_fast: bool
    ) -> Literal["finished", "interrupted", "failed"]:
        """Work until every job of the sweep has ended, or it is stopped; as `workers.local.run_sweep`."""
        checkpoint_seconds(), memory_budget()
        ray = _ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=beside)
        # A GPU's memory is free only when the process that used it is gone.
        once = {"max_calls": 1} if self.needs.gpus else {}
        task = ray.remote(**self._resources(), **once, max_retries=0)(run_on_node)
        driver = _Driver(engine, url, sweep, display, mailbox.remote(), task, self)
        with interrupts_noted() as interrupts, clear_errors(url):
            try:
                return driver.run(interrupts, fail_fast)
            except OSError as error:
                met = trouble(error)
                raise FedbenchError(met.message, met.hint) from None
            except ray.exceptions.RayError as error:
                raise _unusable(error) from None
            finally:
                driver.abandon()

    def _resources(self) -> dict[str, Any]:
        return {"num_cpus": self.needs.cpus, "num_gpus": self.needs.gpus}

    def arguments(self, claim: queue.Claim) -> tuple[queue.Claim, Needs, Path | None]:
        """What a task needs to run this job."""
        return claim, self.needs, self._data


class _Driver:
    """The driver of one sweep."""

    def __init__(
        self, engine: Engine, url: URL, sweep: int | None, display: Display, mailbox: Any, task: Any, cluster: Cluster
    ) -> None:
        self._ray = _ray()
        self._engine = engine
        self._checkpoints = results_folder(url) / "checkpoints"
        self._sweep = sweep
        self._display = display
        self._mailbox = mailbox
        self._task = task
        self._cluster = cluster
        self._name = queue.worker_name()
        self._tickets = count(1)
        self._flights: dict[int, _Flight] = {}
        self._stopping = False

    def run(self, interrupts: list[int], fail_fast: bool) -> Literal["finished", "interrupted", "failed"]:
        failed_before = queue.counts(self._engine, self._sweep).get("failed", 0)
        queue.reap(self._engine)
        looked = 0.0
        failed = False
        while len(interrupts) < 2:  # asked twice: do not wait for the rounds
            if time.monotonic() - looked >= WAIT_SECONDS:  # for what others have done
                looked = time.monotonic()
                queue.reap(self._engine)
                counts = queue.counts(self._engine, self._sweep)
                failed = fail_fast and counts.get("failed", 0) > failed_before
                if not self._flights and not self._wait(counts, bool(interrupts), failed):
                    return "interrupted" if interrupts else "failed" if failed else "finished"
                if (interrupts or failed) and not self._stopping:
                    if interrupts:
                        self._display.stopping()
                    self._stop()
                if not self._stopping:
                    self._claim()
                    self._keep_leases()
            self._serve()
            if self._land():
                looked = 0.0
            self._display.refresh()
        return "interrupted"

    def _wait(self, counts: dict[str, int], interrupted: bool, failed: bool) -> bool:
        """Whether there is something to wait for, now that Ray has no job of this driver."""
        if interrupted or failed:
            return False
        if counts.get("pending") and queue.is_paused(self._engine):
            self._display.paused()
        elif counts.get("pending") and not self._cluster.size:
            self._display.no_node()
        elif counts.get("pending"):
            self._display.working()
        elif counts.get("running"):
            self._display.waiting(counts["running"])
        else:
            return False
        return True

    def _claim(self) -> None:
        """Take as many jobs as the cluster has places for."""
        while len(self._flights) < self._cluster.size:
            claim = queue.claim(self._engine, self._name, self._sweep)
            if claim is None:
                return
            ticket = next(self._tickets)
            recorder = DatabaseRecorder(self._engine, claim.job_id, self._name)
            books = Books(recorder, self._checkpoints / claim.key, self._listener(ticket))
            task = self._task.remote(self._mailbox, ticket, *self._cluster.arguments(claim))
            self._flights[ticket] = _Flight(ticket, claim, books, task, time.monotonic())

    def _listener(self, ticket: int) -> Callable[[Event], None]:
        return lambda event: self._show(self._flights[ticket], event)

    def _show(self, flight: _Flight, event: Event) -> None:
        flight.ended = flight.ended or isinstance(event, Ended)
        self._display.show(flight.ticket, Slot(flight.books.place, "", 1), event)

    def _serve(self) -> None:
        """Answer what the tasks ask for."""
        replies = {}
        for number, call in self._ray.get(self._mailbox.collect.remote(POLL_SECONDS)):
            replies[number] = self._reply(call)
        if replies:
            self._mailbox.answer.remote(replies)

    def _reply(self, call: Call) -> Reply:
        flight = self._flights.get(call.ticket)
        if flight is None or flight.ended:  # put back, and perhaps claimed again: this task must not go on
            return Reply(lost=True)
        try:
            return flight.books.answer(call.name, call.arguments, stop=self._stopping)
        except queue.LeaseLostError:
            self._show(flight, Ended(flight.claim.key, "lost", 0.0, "another worker has taken it over"))
            return Reply(lost=True)

    def _land(self) -> bool:
        """See whether tasks are over, and put back the jobs of those that were lost."""
        tasks = {flight.task: flight for flight in self._flights.values()}
        if not tasks:
            return False
        over, _ = self._ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
        for task in over:
            flight = tasks[task]
            try:
                met = self._ray.get(task)
            except (self._ray.exceptions.RuntimeEnvSetupError, self._ray.exceptions.RayTaskError) as error:
                raise _unusable(error) from None
            except self._ray.exceptions.RayError as error:
                if not flight.ended:
                    self._put_back(flight, error)
            else:
                if met is not None:
                    raise FedbenchError(f"{flight.books.place}: {met.message}", met.hint)
            del self._flights[flight.ticket]
        return bool(over)

    def _put_back(self, flight: _Flight, error: Exception) -> None:
        flight.ended = True
        self._display.lost(flight.books.place or "a node", type(error).__name__)
        queue.expire(self._engine, flight.claim.job_id, self._name)
        queue.reap(self._engine)

    def _keep_leases(self) -> None:
        """Of jobs that wait for a place; the others' watches do it. They may also be cancelled or paused meanwhile."""
        for flight in list(self._flights.values()):
            waits = not (flight.books.place or flight.ended)
            if not waits or time.monotonic() - flight.renewed < queue.LEASE_SECONDS / 4:
                continue
            flight.renewed = time.monotonic()
            try:
                flight.books.recorder.renew()
            except queue.LeaseLostError:
                self._withdraw(flight)
                continue
            if flight.books.recorder.order == "cancel":
                flight.books.recorder.set_aside("cancelled")
                self._withdraw(flight)
                self._show(flight, Ended(flight.claim.key, "cancelled", 0.0))
            elif flight.books.recorder.order == "pause":
                flight.books.recorder.finish("interrupted")
                self._withdraw(flight)

    def _stop(self) -> None:
        """Tasks that run are told at their next call; those that wait for a place need not begin."""
        self._stopping = True
        for flight in list(self._flights.values()):
            if not flight.books.place and not flight.ended:
                flight.books.recorder.finish("interrupted")
                self._withdraw(flight)

    def _withdraw(self, flight: _Flight, *, force: bool = False) -> None:
        """Take a task back from Ray. Should it begin all the same, it is told that its job is lost."""
        del self._flights[flight.ticket]
        self._ray.cancel(flight.task, force=force)

    def abandon(self) -> None:
        """Leave nothing behind: the jobs that Ray still has go back into the queue, as those of killed workers."""
        for flight in list(self._flights.values()):
            self._withdraw(flight, force=True)
            if not flight.ended:
                queue.expire(self._engine, flight.claim.job_id, self._name)
        queue.reap(self._engine)


def _unusable(error: Exception) -> FedbenchError:
    """What is wrong with the cluster, by the last line of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return FedbenchError(
        f"the Ray cluster cannot run jobs: {type(error).__name__}: {lines[-1] if lines else ''}",
        "Every node needs Ray and Python of the driver's versions, and what fedbench depends on; see docs/cluster.md.",
    )
