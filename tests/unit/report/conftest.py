"""A results database with made-up curves, written through the real queue and recorder, without any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Engine, update

from fedbench import queue
from fedbench.grid import Changes, Grid, expand
from fedbench.job import JobSpec
from fedbench.records import Cost, Evaluation, RoundRecord
from fedbench.store.database import database_url, open_database
from fedbench.store.models import Run
from fedbench.store.recorder import DatabaseRecorder

NUMBERS = {"ece": 0.05, "mce": 0.2, "brier": 0.3, "nll": 0.4}
"""Calibration of every state for which a story tells nothing else."""


@dataclass(frozen=True)
class Story:
    """What one run measures: accuracy per round and view, and closing figures per (view, stage, predict)."""

    pm: Mapping[int, float] = field(default_factory=dict)
    gm: Mapping[int, float] = field(default_factory=dict)
    macro: float = 0.0
    """how much the mean over clients is above the pooled accuracy"""
    outcome: Literal["done", "diverged"] = "done"
    rounds: int = 0
    """rounds that were run, if more than the curves tell"""
    closing: Mapping[tuple[str, str, str], Mapping[str, float]] = field(default_factory=dict)
    sent: tuple[int, int] = (0, 0)
    """bytes down and up of every round"""
    seconds: float = 1.0
    rmse: bool = False
    """what the curves tell are errors of regression, and there is nothing else"""


class Lab:
    """Plays stories into a database."""

    def __init__(self, folder: Path) -> None:
        self.engine: Engine = open_database(database_url(str(folder / "results.sqlite")), create=True)

    def enqueue(self, grid: Mapping[str, Any], *settings: str) -> int:
        """Queue a grid without running it; returns the sweep."""
        jobs = expand(Grid.model_validate(grid), Changes(set=settings))
        return queue.enqueue(self.engine, grid["name"], dict(grid), jobs)

    def play(self, grid: Mapping[str, Any], tell: Callable[[JobSpec], Story], *settings: str) -> None:
        """Queue a grid and let every job of it measure what its story says."""
        sweep = self.enqueue(grid, *settings)
        while (claim := queue.claim(self.engine, "tester", sweep)) is not None:
            self._run(claim, tell(claim.spec))

    def _run(self, claim: queue.Claim, story: Story) -> None:
        recorder = DatabaseRecorder(self.engine, claim.job_id, "tester")
        recorder.start(rounds=claim.spec.protocol.rounds, split_hash="", device="cpu")
        last = max([story.rounds, *story.pm, *story.gm])
        told = {*story.pm, *story.gm, last}
        for round_ in range(1, last + 1) if any(story.sent) else sorted(told):  # rounds without a word save time
            scored = list(_scheduled(story, round_))
            if round_ == last and story.outcome == "done":
                scored += _closing(story)
            down, up = story.sent
            recorder.record(RoundRecord(round_, scored, [Cost(round_, "client", 0.1, bytes_down=down, bytes_up=up)]))
        recorder.finish(story.outcome)
        with queue.writing(self.engine).begin() as connection:  # the clock of the recorder is the real one
            connection.execute(update(Run).where(Run.job_id == claim.job_id).values(seconds=story.seconds))


def _scheduled(story: Story, round_: int) -> Iterator[Evaluation]:
    for view, curve in (("pm", story.pm), ("gm", story.gm)):
        if round_ in curve:
            metrics = {"accuracy": curve[round_], "macro": curve[round_] + story.macro, **NUMBERS}
            if story.rmse:
                metrics = {"rmse": curve[round_]}
            yield Evaluation(round_, "train", view, "mean", {None: metrics})  # type: ignore[arg-type]


def _closing(story: Story) -> Iterator[Evaluation]:
    for view, curve in (("pm", story.pm), ("gm", story.gm)):
        if not curve:
            continue
        told = {key: numbers for key, numbers in story.closing.items() if key[0] == view}
        told = {(view, stage, "mean"): NUMBERS for stage in ("best", "final")} | told
        rounds = {"best": max(curve, key=lambda round_: curve[round_]), "final": max(curve)}
        for (_, stage, predict), numbers in told.items():
            value = curve[rounds[stage]]
            metrics = {None: {"rmse": value} if story.rmse else {"accuracy": value, **numbers}}
            yield Evaluation(rounds[stage], stage, view, predict, metrics)  # type: ignore[arg-type]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def story() -> type[Story]:
    return Story
