"""How long jobs will take, from what finished ones took."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedbench.job import JobSpec

_LIKE = (("method", "dataset", "model", "size"), ("method", "model"))
"""Runs that may stand for a job, the most alike first."""


def estimate_seconds(jobs: Sequence[JobSpec], history: pd.DataFrame) -> float | None:
    """Seconds of work in these jobs; None if there is a job that nothing in the history resembles."""
    estimates = [_one(job, history) for job in jobs]
    return None if any(estimate is None for estimate in estimates) else float(sum(filter(None, estimates)))


def _one(job: JobSpec, history: pd.DataFrame) -> float | None:
    if history.empty:
        return None
    settings = job.settings
    for keys in _LIKE:
        alike = history
        for key in keys:
            if key in settings and key in alike:
                alike = alike[alike[key] == settings[key]]
        alike = alike[(alike["last_round"] > 0) & alike["seconds"].notna()]
        if len(alike):
            return float((alike["seconds"] / alike["last_round"]).median() * job.protocol.rounds)
    return None


def in_words(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`: as precise as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
