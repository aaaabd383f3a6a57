"""Runs a sweep on this machine: a process per slot, replaced when one dies, stopped cleanly by Ctrl-C."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.workers.display import Display
from fedbench.workers.process import ABANDONED, Claimed, Ended, Trouble, checkpoint_seconds, memory_budget, worker_main
from fedbench.workers.slots import Slot

POLL_SECONDS = 0.2
WAIT_SECONDS = 1.0
"""Between two looks at a queue that is paused, or whose last jobs another process has."""

MAX_STILLBORN = 3
"""Workers in a row that die before they begin a job: one may be killed by chance, so many show that none can begin."""


class _Worker:
    """A worker process as its parent sees it."""

    def __init__(self, slot: Slot, url: URL, sweep: int | None, data_root: Path) -> None:
        self.slot = slot
        self.began = False
        """Whether it ever claimed a job."""
        self.connection, other = mp.get_context("spawn").Pipe()
        self.process = mp.get_context("spawn").Process(
            target=worker_main, args=(other, url, sweep, slot, data_root), daemon=True
        )
        with _environment(slot.environment), _no_interrupts():
            self.process.start()
        other.close()

    def stop(self) -> None:
        with suppress(OSError):  # it may be gone already
            self.connection.send("stop")


def run_sweep(
    engine: Engine,
    url: URL,
    sweep: int | None,
    slots: list[Slot],
    data_root: Path,
    display: Display,
    *,
    fail_fast: bool = False,
) -> Literal["finished", "interrupted", "failed"]:
    """Work until every job of the sweep (None: of the database) has ended, or it is stopped.

    With `fail_fast` the first job that fails stops the others after their round. While the queue is paused it waits.
    Raises FedbenchError when the workers cannot go on.
    """
    checkpoint_seconds(), memory_budget()  # a wrong environment shows here, not in every worker
    failed_before = queue.counts(engine, sweep).get("failed", 0)

    def must_stop() -> bool:
        return fail_fast and queue.counts(engine, sweep).get("failed", 0) > failed_before

    with interrupts_noted() as interrupts:
        queue.reap(engine)
        while not interrupts:
            counts = queue.counts(engine, sweep)
            if must_stop():
                return "failed"
            if counts.get("pending") and queue.is_paused(engine):
                display.paused()
            elif counts.get("pending"):
                display.working()
                generation = slots[: counts["pending"]]
                _run_workers(engine, url, sweep, generation, data_root, display, interrupts, must_stop)
                continue
            elif counts.get("running"):  # another `fedbench run` has them: wait for it, or for its death
                display.waiting(counts["running"])
            else:
                return "finished"
            time.sleep(WAIT_SECONDS)
            queue.reap(engine)
    return "interrupted"


def _run_workers(
    engine: Engine,
    url: URL,
    sweep: int | None,
    slots: list[Slot],
    data_root: Path,
    display: Display,
    interrupts: list[int],
    must_stop: Callable[[], bool],
) -> None:
    """One generation of workers: until none of them has work, all were stopped, one met trouble, or one failed fast."""
    workers: dict[Connection, _Worker] = {}
    trouble: Trouble | None = None
    enough = stopped = False
    stillborn = 0

    def start(slot: Slot) -> None:
        worker = _Worker(slot, url, sweep, data_root)
        workers[worker.connection] = worker

    for slot in slots:
        start(slot)
    try:
        while workers:
            if (interrupts or trouble or enough) and not stopped:
                stopped = True
                for worker in workers.values():
                    worker.stop()
                if interrupts:
                    display.stopping()
            if len(interrupts) > 1:  # asked twice: do not wait for the round
                return
            for connection in wait(list(workers), timeout=POLL_SECONDS):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                try:
                    event = connection.recv()
                except (EOFError, OSError):
                    del workers[connection]
                    worker.process.join()
                    if worker.process.exitcode and not stopped:
                        stillborn += not worker.began
                        if stillborn == MAX_STILLBORN:
                            trouble = Trouble(
                                "workers die before they begin.", "See the messages above; fedbench doctor"
                            )
                            continue
                        if worker.process.exitcode != ABANDONED:
                            display.died(worker.slot, worker.process.exitcode)
                        queue.reap(engine)
                        enough = must_stop()
                        if not enough and queue.counts(engine, sweep).get("pending"):
                            start(worker.slot)
                    continue
                if isinstance(event, Claimed):
                    worker.began, stillborn = True, 0
                if isinstance(event, Trouble):
                    trouble = event
                else:
                    enough = enough or (isinstance(event, Ended) and event.outcome == "failed" and must_stop())
                    display.show(worker.process.pid or 0, worker.slot, event)
            display.refresh()
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.join()
        queue.reap(engine)
    if trouble is not None:
        raise FedbenchError(trouble.message, trouble.hint)


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process started meanwhile inherits the block, until it ignores Ctrl-C; the parent's own Ctrl-C waits."""
    resource_tracker.ensure_running()  # whose own start would lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The environment that a process started meanwhile inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
