"""A job that runs on another machine: its records, events and checkpoints go to the driver, which answers every call.

The driver alone writes, into the database and the checkpoints' folder. So the job goes on anywhere when its machine is
lost, and a machine that was only thought lost is told so at its next call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fedbench import checkpoint, queue
from fedbench.records import RoundRecord
from fedbench.store.recorder import Conditions, DatabaseRecorder, Origin
from fedbench.workers.process import ABANDONED, Ended, Event

_RECORDING = ("conditions", "rewind", "record", "renew", "finish", "set_aside", "fail")


@dataclass(frozen=True)
class Reply:
    """What the driver answers: the value of the call, and all that the job should know."""

    value: Any = None
    last_round: int = 0
    order: queue.Order | None = None
    stop: bool = False
    """The driver itself is told to stop."""
    lost: bool = False
    """The job is no longer this task's."""


Send = Callable[[str, tuple[Any, ...]], Reply]
"""Calls the driver by the name of a method, with its arguments."""


class Line:
    """The job's line to the driver, and what was said last on it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._one_at_a_time = threading.Lock()  # the watch calls too, and no older reply may overtake the last
        self.last = Reply()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Raises LeaseLostError when the job is no longer this task's."""
        with self._one_at_a_time:
            self.last = reply = self._send(name, arguments)
        if reply.lost:
            raise queue.LeaseLostError
        return reply.value


class RemoteRecorder:
    """The recorder of a job, away from the database. With the run's start come its checkpoints."""

    def __init__(self, line: Line, checkpoints: Path) -> None:
        self._line = line
        self._folder = checkpoints
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def order(self) -> queue.Order | None:
        return self._line.last.order

    def conditions(self, wanted: Conditions) -> Conditions:
        kept: Conditions = self._line("conditions", wanted)
        return kept

    def start(self, *, rounds: int, split_hash: str, device: str) -> None:
        names: list[str] = self._line("start", rounds, split_hash, device)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = self._folder / name
            if not path.exists():  # it does when the job begins again on this machine
                path.write_bytes(self._line("read", name))
                self._sent[name] = _stamp(path)

    def last_round(self) -> int:
        return self._line.last.last_round

    def rewind(self, round_: int) -> None:
        self._line("rewind", round_)

    def record(self, record: RoundRecord) -> None:
        self._line("record", record)

    def renew(self) -> None:
        self._line("renew")

    def finish(self, outcome: str) -> None:
        self._line("finish", outcome)

    def set_aside(self, status: str, reason: str | None = None) -> None:
        self._line("set_aside", status, reason)

    def fail(self, error: str) -> None:
        self._line("fail", error)

    def send_checkpoints(self) -> None:
        """Give the driver the files that it does not have; what belongs to a checkpoint goes before it."""
        found = [path for path in self._folder.iterdir() if path.suffix != ".partial"]
        for path in sorted(found, key=lambda path: (path.suffix == ".ckpt", path.name)):
            if self._sent.get(path.name) != _stamp(path):
                self._line("write", path.name, path.read_bytes())
                self._sent[path.name] = _stamp(path)
        self._line("keep", [path.name for path in found])


class RemoteParent:
    """The driver, as the job sees it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def tell(self, event: Event) -> None:
        with suppress(queue.LeaseLostError):  # then the driver knows better
            self._line("tell", event)

    def should_stop(self) -> bool:
        return self._line.last.stop or self._line.last.lost

    def abandon(self, last: Ended) -> NoReturn:
        self.tell(last)
        os._exit(ABANDONED)


class Books:
    """The driver's side of one job that runs elsewhere: writes what it is called to write."""

    def __init__(self, recorder: DatabaseRecorder, checkpoints: Path, hear: Callable[[Event], None]) -> None:
        self.recorder = recorder
        self._folder = checkpoints
        self._hear = hear
        self.place = ""
        """The machine and the device of the job, once it has begun there."""

    def answer(self, name: str, arguments: tuple[Any, ...], *, stop: bool) -> Reply:
        """Raises LeaseLostError, or whatever the database or the disk has to say."""
        method = getattr(self.recorder if name in _RECORDING else self, name)
        value = method(*arguments)
        return Reply(value, self.recorder.last_round(), self.recorder.order, stop)

    def arrive(self, origin: Origin, place: str) -> None:
        """The job begins on this machine."""
        self.recorder.origin, self.place = origin, place

    def start(self, rounds: int, split_hash: str, device: str) -> list[str]:
        """Returns the names of the files with which the run goes on."""
        self.recorder.start(rounds=rounds, split_hash=split_hash, device=device)
        if not self.recorder.last_round():
            checkpoint.remove(self._folder)  # of an earlier run of this job, which failed
        return sorted(path.name for path in self._folder.glob("*") if path.suffix != ".partial")

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write(self._path(name), content)

    def keep(self, names: list[str]) -> None:
        """Delete the other files."""
        for path in self._folder.glob("*"):
            if path.name not in names:
                path.unlink()

    def tell(self, event: Event) -> None:
        if isinstance(event, Ended) and event.outcome in queue.FINISHED:
            checkpoint.remove(self._folder)
        self._hear(event)

    def _path(self, name: str) -> Path:
        return self._folder / Path(name).name


def _stamp(path: Path) -> tuple[int, int]:
    """Differs when a file was written again."""
    status = path.stat()
    return status.st_mtime_ns, status.st_ino
