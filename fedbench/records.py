"""What a run measures, as plain data: the simulation makes records, a Recorder keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Stage = Literal["train", "best", "final", "adapt", "novel"]
View = Literal["gm", "pm"]
Phase = Literal["poll", "client", "server", "predict", "personalise"]

HistogramRow = tuple[int, float, float, float]
"""bin, count, sum of confidence, sum of correct"""


@dataclass(frozen=True)
class Evaluation:
    """One model, or one per client, scored on a split. Client None is all clients pooled."""

    round: int
    stage: Stage
    view: View
    predict: Literal["mean", "mc"]
    metrics: dict[int | None, dict[str, float]]
    reliability: dict[int | None, list[HistogramRow]] = field(default_factory=dict)
    entropy: dict[int | None, list[HistogramRow]] = field(default_factory=dict)
    """Counts of predictive entropies in equal bins from 0 to log C; the two other sums are 0."""
    step: int = 0
    split: str = "test"


@dataclass(frozen=True)
class Cost:
    """Seconds and bytes of one phase of one round; `count` operations took the seconds."""

    round: int
    phase: Phase
    seconds: float
    count: int = 1
    bytes_down: int = 0
    bytes_up: int = 0
    client: int | None = None


@dataclass(frozen=True)
class RoundRecord:
    """All that one round adds; kept whole or not at all."""

    round: int
    evaluations: Sequence[Evaluation]
    costs: Sequence[Cost]


class Recorder(Protocol):
    """Where a run's records go: a database, or back to a driver."""

    def start(self, *, rounds: int, split_hash: str, device: str) -> None:
        """The run begins, or goes on."""

    def last_round(self) -> int:
        """The last round that is kept; 0 for a new run."""

    def rewind(self, round_: int) -> None:
        """Forget everything after this round: the run resumes from there."""

    def record(self, record: RoundRecord) -> None:
        """Keep a round, whole or not at all."""
