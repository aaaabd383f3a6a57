"""Whether two methods differ, from runs with the same seeds: paired differences, their interval, tests, correction.

Runs with the same seed share the split and the cohorts, so their difference is freer of chance than two means are.

The verdict is by the paired t test, which assumes that the differences are about normal. The exact sign-flip test
assumes only that, were there no difference, either sign would be as likely; but its p cannot be less than 2 / 2^n: 0.25
for 3 seeds, 0.06 for 5. With the few seeds of a benchmark it would never show anything, so it is a check beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FEWEST = 3
"""Pairs below which nothing is said: two differences say next to nothing about their own spread."""
MOST_FLIPPED = 12
"""Pairs up to which all 2^n signs are tried."""
LEVEL = 0.05

Verdict = Literal["A better", "B better", "no difference shown", "identical", "cannot tell"]


@dataclass(frozen=True)
class Paired:
    """The difference a - b over n pairs; what cannot be told from so few is None."""

    n: int
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """of the paired t test, two-sided"""
    p_signs: float | None = None
    """of the exact sign-flip test, two-sided"""


def paired(a: NDArray[np.float64], b: NDArray[np.float64]) -> Paired:
    """The mean difference with its 95 % t interval and both tests."""
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    n, mean = len(differences), float(np.mean(differences))
    if n < FEWEST:
        return Paired(n, mean)
    error = float(np.std(differences, ddof=1)) / n**0.5
    if error > 0:
        half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
        p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    else:  # always the same difference, as of bytes that do not depend on chance
        half, p = 0.0, 0.0 if mean else 1.0
    return Paired(n, mean, mean - half, mean + half, p, sign_flip_p(differences) if n <= MOST_FLIPPED else None)


def sign_flip_p(differences: NDArray[np.float64]) -> float:
    """The share of all choices of signs whose sum is at least as far from zero as the observed one."""
    n = len(differences)
    signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= abs(differences.sum()) * (1 - 1e-9)))  # sums in another order round differently


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p values: the chance of even one false find among all of them stays below the level.

    Comparisons without a p were not tested, and do not count.
    """
    tested = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    above = 0.0
    for rank, (p, i) in enumerate(tested):
        above = max(above, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = above
    return adjusted


def verdict(found: Paired, p: float | None, *, smaller_wins: bool) -> Verdict:
    """What may be said, given the p that is corrected for all comparisons made."""
    if p is None:
        return "cannot tell"
    if found.low == found.high == 0:
        return "identical"
    if p >= LEVEL:
        return "no difference shown"
    return "A better" if (found.difference > 0) != smaller_wins else "B better"
