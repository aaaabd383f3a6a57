"""From a grid to finished jobs: expand, check, enqueue, work, and say how it ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pandas as pd
from rich.console import Console
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.estimate import estimate_seconds, in_words
from fedbench.grid import Changes, Grid, expand, load_grid
from fedbench.job import JobSpec
from fedbench.store import queries
from fedbench.store.database import EmptyDatabaseError, open_database, shown
from fedbench.workers.slots import Slot

if TYPE_CHECKING:
    from fedbench.workers.display import Display

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


@dataclass(frozen=True)
class Plan:
    """What a grid asks for, and how far the database already has it."""

    grid: Grid
    jobs: list[JobSpec]
    status: dict[str, str]
    history: pd.DataFrame

    @property
    def todo(self) -> list[JobSpec]:
        return [job for job in self.jobs if self.status.get(job.key, "pending") in ("pending", "running")]

    def rows(self) -> list[dict[str, Any]]:
        """A line per job: what it is, how it differs from the defaults beyond what all jobs share, and its status."""
        shared = set.intersection(*({(key, str(value)) for key, value in job.changed.items()} for job in self.jobs))
        return [
            {
                "key": job.key[:10],
                "job": job.label,
                "rounds": job.protocol.rounds,
                "settings": " ".join(
                    f"{key}={value}"
                    for key, value in job.changed.items()
                    if (key, str(value)) not in shared and key not in (*job.params, "rounds", "size")
                ),
                "status": self.status.get(job.key, "new"),
            }
            for job in self.jobs
        ]

    def summary(self, workers: int) -> str:
        """`12 jobs: 3 done, 9 to do, about 2 min`."""
        known = [self.status.get(job.key) for job in self.jobs]
        ended = [f"{known.count(status)} {status}" for status in queue.STATUSES[2:] if status in known]
        parts = [*ended, f"{len(self.todo)} to do"]
        text = f"{len(self.jobs)} jobs: {', '.join(parts)}"
        seconds = estimate_seconds(self.todo, self.history)
        if not self.todo:
            return text
        if seconds is None:
            return f"{text} (no estimate of time yet: nothing like it has run)"
        return f"{text}, about {in_words(seconds / workers)} on {workers} worker(s)"


def plan(where: str, changes: Changes, url: URL) -> Plan:
    """Expand a grid and look up its jobs. Changes nothing, and makes no database."""
    grid = load_grid(where)
    jobs = expand(grid, changes)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        return Plan(grid, jobs, {}, pd.DataFrame())
    try:
        engine = open_database(url, create=False)
    except EmptyDatabaseError:
        return Plan(grid, jobs, {}, pd.DataFrame())
    status = {job.key: job.status for job in queue.listing(engine)}
    return Plan(grid, jobs, status, queries.finished_runs(engine))


@dataclass(frozen=True)
class Wishes:
    """How to run a plan: jobs of which priority, for how many seconds each, and whether the first failure ends it."""

    priority: int = 0
    timeout: float | None = None
    fail_fast: bool = False


def seconds_in(duration: str) -> float:
    """`90`, `90s`, `30m`, `2h`, `1h30m` or `1d` as seconds; raises FedbenchError for anything else, and for none."""
    number = r"(\d+(?:\.\d+)?)"
    parts = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", duration.strip().lower())
    amounts = [float(amount or 0) for amount in parts.groups()] if parts else [0.0] * 4
    seconds = sum(amount * unit for amount, unit in zip(amounts, (86400, 3600, 60, 1), strict=True))
    if not seconds:
        raise FedbenchError(f"{duration!r} is not a length of time.", "Write it like 90s, 30m, 2h or 1h30m.")
    return seconds


class Crew(Protocol):
    """Who runs the jobs: this machine's workers, or a cluster."""

    @property
    def size(self) -> int:
        """How many jobs run at the same time."""

    def check(self, jobs: list[JobSpec]) -> None:
        """Raises FedbenchError for a job that cannot run."""

    def run_sweep(
        self, engine: Engine, url: URL, sweep: int | None, display: Display, *, fail_fast: bool
    ) -> Literal["finished", "interrupted", "failed"]:
        """Works until every job of the sweep has ended, or it is stopped."""


@dataclass(frozen=True)
class ThisMachine:
    """A worker process per slot."""

    slots: list[Slot]
    data_root: Path

    @property
    def size(self) -> int:
        return len(self.slots)

    def check(self, jobs: list[JobSpec]) -> None:
        from fedbench.simulation import check_jobs

        check_jobs(jobs, self.data_root)

    def run_sweep(
        self, engine: Engine, url: URL, sweep: int | None, display: Display, *, fail_fast: bool = False
    ) -> Literal["finished", "interrupted", "failed"]:
        from fedbench.workers.local import run_sweep

        return run_sweep(engine, url, sweep, self.slots, self.data_root, display, fail_fast=fail_fast)


def run(planned: Plan, url: URL, crew: Crew, console: Console, wishes: Wishes = Wishes()) -> int:
    """Work through a plan. Returns the exit code: 0 all done, 1 a job failed, 130 stopped by the user."""
    from fedbench.workers.display import Display

    crew.check(planned.todo)
    engine = open_database(url, create=True)
    name = planned.grid.name
    sweep = queue.enqueue(
        engine, name, planned.grid.model_dump(mode="json"), planned.jobs, wishes.priority, wishes.timeout
    )
    console.print(planned.summary(crew.size))
    if planned.todo:
        waiting = queue.listing(engine, ("pending", "running"), sweep)
        rounds = sum(job.spec.protocol.rounds - job.last_round for job in waiting)
        with Display(console, len(planned.todo), rounds) as display:
            ended = crew.run_sweep(engine, url, sweep, display, fail_fast=wishes.fail_fast)
        if ended == "interrupted":
            console.print("stopped; nothing is lost. Run the same command to go on.")
            return INTERRUPTED
    return _verdict(engine, url, name, sweep, console, worked=bool(planned.todo))


def _verdict(engine: Engine, url: URL, name: str, sweep: int, console: Console, *, worked: bool) -> int:
    counts = queue.counts(engine, sweep)
    failed = queue.listing(engine, ("failed",), sweep)
    for job in failed:
        console.print(f"failed: {job.key[:10]} {job.spec.label}: {_reason(job.error)}", style="red")
    if failed:
        console.print(f"Why: fedbench queue show {failed[0].key[:10]}")
        console.print("Again: fedbench queue retry, then the same command.")
        if counts.get("pending"):
            console.print(f"{counts['pending']} job(s) still wait: the same command goes on with them.")
        return 1
    ended = ", ".join(f"{n} {status}" for status, n in counts.items())
    word = "finished" if worked else "nothing to do"
    console.print(f"{word}: {ended} in {shown(url)}. See: fedbench table --grid {name}")
    if counts.get("cancelled"):
        console.print("Cancelled jobs stay out until `fedbench queue retry`.")
    return 0


def _reason(error: str) -> str:
    """The line of a message, or of a traceback with notes, that says what happened."""
    lines = error.strip().splitlines() or ["no reason recorded"]
    indented = [number for number, line in enumerate(lines) if line.startswith(" ")]
    return lines[indented[-1] + 1] if lines[0].startswith("Traceback") and indented else lines[0]


def work(url: URL, slots: list[Slot], data_root: Path, console: Console) -> int:
    """Join the queue of a database: run whatever waits there. Returns the exit code."""
    from fedbench.workers.display import Display

    engine = open_database(url, create=False)
    queue.reap(engine)
    waiting = queue.listing(engine, ("pending",))
    if not waiting:
        console.print(f"no job is waiting in {shown(url)}.")
        return 0
    before = queue.counts(engine).get("failed", 0)
    with Display(console, len(waiting), sum(job.spec.protocol.rounds - job.last_round for job in waiting)) as display:
        ended = ThisMachine(slots, data_root).run_sweep(engine, url, None, display)
    if ended == "interrupted":
        return INTERRUPTED
    return 1 if queue.counts(engine).get("failed", 0) > before else 0


def read_results(url: URL) -> Engine:
    """The database for a report; raises FedbenchError when it holds no finished run."""
    engine = open_database(url, create=False)
    if not any(queue.counts(engine).get(status) for status in queue.FINISHED):
        raise FedbenchError(f"{shown(url)} holds no finished run yet.", "Run a grid: fedbench run --grid quickstart")
    return engine
