"""Watches over a running job: keeps its lease, and knows whether and why it should stop."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Literal

from sqlalchemy.exc import SQLAlchemyError

from fedbench import queue

if TYPE_CHECKING:
    from fedbench.workers.process import JobRecorder, Parent

GRACE_SECONDS = 60.0
"""How long a round may go on after its job was cancelled or its time was up, before the worker gives it up."""


class Watch:
    """One job's lease and its orders, while a worker runs it."""

    def __init__(self, recorder: JobRecorder, claim: queue.Claim, parent: Parent) -> None:
        self._recorder = recorder
        self._claim = claim
        self._parent = parent
        self._started = time.monotonic()
        self._reason: Literal["cancel", "timeout", "pause", "told"] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def should_stop(self) -> bool:
        """Asked between rounds; the first reason counts."""
        if self._reason is None:
            self._reason = self._due() or self._recorder.order or ("told" if self._parent.should_stop() else None)
        return self._reason is not None

    def set_aside(self) -> tuple[str, str]:
        """End the claim of a job that stopped and has its checkpoint. Returns the outcome, with a reason if it failed.

        What was cancelled or timed out goes on from there when it is retried; all else goes back into the queue.
        """
        if self._reason == "cancel":
            self._recorder.set_aside("cancelled")
            return "cancelled", ""
        if self._reason == "timeout":
            reason = f"{self._time_is_up()} after round {self._recorder.last_round()}; a retry goes on from there"
            self._recorder.set_aside("failed", reason)
            return "failed", reason
        self._recorder.finish("interrupted")
        return "interrupted", "the queue is paused" if self._reason == "pause" else ""

    def _due(self) -> Literal["cancel", "timeout"] | None:
        """What does not wait for the end of a round for ever."""
        if self._recorder.order == "cancel":
            return "cancel"
        return "timeout" if self._claim.timeout is not None and self.seconds >= self._claim.timeout else None

    def _time_is_up(self) -> str:
        from fedbench.estimate import in_words

        assert self._claim.timeout is not None
        return f"stopped by its timeout of {in_words(self._claim.timeout)}"

    def _beat(self) -> None:
        """Renews the lease while a round takes longer than it lasts, and gives up a round that does not end."""
        due_since: float | None = None
        while not self._over.wait(min(queue.LEASE_SECONDS, GRACE_SECONDS) / 4):
            try:
                self._recorder.renew()
                if self._due() is not None:
                    due_since = due_since or time.monotonic()
                    if time.monotonic() - due_since >= GRACE_SECONDS:
                        return self._abandon()
            except queue.LeaseLostError:
                return None  # the recorder meets the same at the next round, and says so
            except SQLAlchemyError:
                continue  # the database may be back at the next beat
        return None

    def _abandon(self) -> None:
        """A thread cannot stop the round, so it closes the books and ends the process."""
        from fedbench.workers.process import Ended

        where = f"in round {self._recorder.last_round() + 1}, which did not end"
        outcome, reason = "cancelled", where
        if self._due() == "timeout":
            outcome, reason = "failed", f"{self._time_is_up()} {where}; a retry goes on from its last checkpoint"
        self._recorder.set_aside(outcome, reason)
        self._parent.abandon(Ended(self._claim.key, outcome, self.seconds, reason))
