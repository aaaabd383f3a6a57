"""Shows a sweep while it runs: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedbench.workers.process import Claimed, Ended, Event, RoundDone
from fedbench.workers.slots import Slot

_STYLES = {"done": "green", "failed": "red"} | dict.fromkeys(("diverged", "interrupted", "cancelled", "lost"), "yellow")


class Display:
    """Progress of a sweep of `jobs` jobs that still have `rounds` rounds to go."""

    def __init__(self, console: Console, jobs: int, rounds: int) -> None:
        self._console = console
        self._jobs = jobs
        self._ended = 0
        self._labels: dict[str, str] = {}
        self._accuracy: dict[str, dict[str, float]] = {}
        self._round: dict[str, int] = {}
        self._lines: dict[int, TaskID] = {}
        self._said_waiting = self._said_paused = self._said_no_node = False
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[accuracy]}"),
                console=console,
            )
            self._overall = self._progress.add_task(f"all {jobs} jobs, rounds", total=rounds, accuracy="")

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, pid: int, slot: Slot, event: Event) -> None:
        """React to what a worker says."""
        if isinstance(event, Claimed):
            self._labels[event.key] = event.label
            if self._progress:
                if pid in self._lines:
                    self._progress.remove_task(self._lines[pid])
                self._lines[pid] = self._progress.add_task(
                    f"{slot.name}  {event.label}", total=event.rounds, accuracy=""
                )
        elif isinstance(event, RoundDone):
            self._accuracy.setdefault(event.key, {}).update(event.accuracy)
            if self._progress and pid in self._lines:
                line = self._lines[pid]
                self._progress.update(line, completed=event.round, accuracy=_percent(self._accuracy[event.key]))
                self._progress.advance(self._overall, event.round - self._round.get(event.key, event.round - 1))
            self._round[event.key] = event.round
        elif isinstance(event, Ended):
            self._end(event)
            if self._progress and pid in self._lines:
                self._progress.remove_task(self._lines.pop(pid))

    def refresh(self) -> None:
        if self._progress:
            self._progress.refresh()

    def stopping(self) -> None:
        self._say("stopping after the current round (Ctrl-C again stops at once) ...")

    def waiting(self, running: int) -> None:
        """Said once: the remaining jobs belong to another process."""
        if not self._said_waiting:
            self._said_waiting = True
            self._say(f"waiting for {running} job(s) that another fedbench is running ...")

    def paused(self) -> None:
        """Said once per pause."""
        if not self._said_paused:
            self._said_paused = True
            self._say("the queue is paused; waiting for `fedbench queue resume` (Ctrl-C leaves) ...", "yellow")

    def no_node(self) -> None:
        """Said once, until there is one."""
        if not self._said_no_node:
            self._said_no_node = True
            self._say("no node of the cluster has a place for a job; waiting for one (Ctrl-C leaves) ...", "yellow")

    def working(self) -> None:
        self._said_paused = self._said_no_node = False

    def died(self, slot: Slot, exitcode: int) -> None:
        how = f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
        self._say(f"a worker on {slot.name} died ({how}); its job goes on from its last checkpoint", "yellow")

    def lost(self, place: str, reason: str) -> None:
        self._say(f"{place} was lost ({reason}); its job goes on from its last checkpoint", "yellow")

    def _end(self, event: Ended) -> None:
        if event.outcome not in ("interrupted", "lost"):
            self._ended += 1
        place = f"[{self._ended}/{self._jobs}]"
        label = self._labels.get(event.key, event.key)
        accuracy = _percent(self._accuracy.get(event.key, {}))
        parts = (
            place,
            event.outcome,
            label,
            accuracy,
            f"{event.seconds:.1f} s",
            event.error.strip().partition("\n")[0],
        )
        self._say("  ".join(part for part in parts if part), _STYLES.get(event.outcome, ""))

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style or None)


def _percent(accuracy: dict[str, float]) -> str:
    return "  ".join(f"{view.upper()} {100 * value:.2f}" for view, value in sorted(accuracy.items(), reverse=True))
