"""What a whole curve says in one number, for two runs that are compared: a pair of numbers, or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 50
"""How many scored rounds are the beginning of a run, or its end; half of them if there are fewer than 100."""


@dataclass(frozen=True)
class Curve:
    """What a run scored: rounds, MB sent by their ends (polls too), values; by round."""

    rounds: NDArray[np.int64]
    sent: NDArray[np.float64]
    values: NDArray[np.float64]


Measure = Callable[[Curve, Curve], tuple[float, float] | None]


def auc(a: Curve, b: Curve) -> tuple[float, float] | None:
    """The mean over the rounds in which both were scored."""
    common = np.intersect1d(a.rounds, b.rounds)
    if not len(common):
        return None
    of_a, of_b = (float(curve.values[np.isin(curve.rounds, common)].mean()) for curve in (a, b))
    return of_a, of_b


def auc_bytes(a: Curve, b: Curve) -> tuple[float, float] | None:
    """The mean over bytes sent, from where both have a first score to where the first of them ends.

    Between two scores a run has its last one. None if one had ended before the other had a score.
    """
    low, high = max(a.sent[0], b.sent[0]), min(a.sent[-1], b.sent[-1])
    return (_step_mean(a, low, high), _step_mean(b, low, high)) if low <= high else None


def first(a: Curve, b: Curve) -> tuple[float, float] | None:
    """The mean over the beginning."""
    lengths = _window(a), _window(b)
    return (float(a.values[: lengths[0]].mean()), float(b.values[: lengths[1]].mean())) if all(lengths) else None


def last(a: Curve, b: Curve) -> tuple[float, float] | None:
    """The mean over the end."""
    lengths = _window(a), _window(b)
    return (float(a.values[-lengths[0] :].mean()), float(b.values[-lengths[1] :].mean())) if all(lengths) else None


def wobble(a: Curve, b: Curve) -> tuple[float, float] | None:
    """The sample standard deviation over the rounds of the end."""
    lengths = _window(a), _window(b)
    if min(lengths) < 2:
        return None
    return float(a.values[-lengths[0] :].std(ddof=1)), float(b.values[-lengths[1] :].std(ddof=1))


MEASURES: dict[str, Measure] = {"auc": auc, "auc_bytes": auc_bytes, "first": first, "last": last, "wobble": wobble}


def _window(curve: Curve) -> int:
    return min(WINDOW, len(curve.values) // 2)


def _step_mean(curve: Curve, low: float, high: float) -> float:
    """The mean of the step function over [low, high]; its value where both are the same."""
    inside = curve.sent[(curve.sent > low) & (curve.sent < high)]
    starts = np.array([low, *inside])
    values = curve.values[np.searchsorted(curve.sent, starts, side="right") - 1]
    widths = np.diff([*starts, high])
    return float(values @ widths / (high - low)) if high > low else float(values[0])
