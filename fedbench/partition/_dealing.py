"""What several partitions do: find the test data, take a part with the same mix of classes, deal shards by label."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedbench.dataset import Arrays
from fedbench.errors import FedbenchError
from fedbench.partition import Indices

LabelRows = NDArray[np.int64]
"""[clients, labels per client]"""


def official_parts(arrays: Arrays, test_fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """The official training and test samples; without official test samples, a fraction of every class is held out."""
    everything = np.arange(len(arrays.y))
    if arrays.n_train < len(everything):
        return everything[: arrays.n_train], everything[arrays.n_train :]
    return hold_out(arrays.y, everything, test_fraction, rng)


def hold_out(
    labels: Indices, index: Indices, test_fraction: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Two samples or more as training and test samples with the same mix of classes, neither of them empty."""
    n_test = min(max(round(test_fraction * len(index)), 1), len(index) - 1)
    test, train = stratified(labels, index, n_test, rng)
    return train, test


def stratified(labels: Indices, index: Indices, n: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """`n` random ones of these samples with their mix of classes, and the others; both in ascending order.

    A class gives its share rounded down, and those with the largest remainders one more. (scikit-learn's stratified
    splits refuse classes with a single sample, which small clients have.)
    """
    order = rng.permutation(index)
    found, which, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    share, remainder = np.divmod(counts * n, len(index))
    share[np.lexsort((rng.random(len(found)), -remainder))[: n - share.sum()]] += 1
    place = np.empty(len(order), dtype=np.int64)  # of a sample among those of its class
    place[np.argsort(which, kind="stable")] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = place < share[which]
    return np.sort(order[taken]), np.sort(order[~taken])


def distinct_rows(classes: int, clients: int, width: int, rng: np.random.Generator) -> LabelRows:
    """Different labels for every client, from shuffled lists of all classes, one list after the other.

    No class is used more than once more often than another. `width` is at most `classes`.
    """
    rows, left = [], np.empty(0, dtype=np.int64)
    for _ in range(clients):
        row, left = left[:width], left[width:]
        if len(row) < width:
            fresh = rng.permutation(classes)
            added = fresh[~np.isin(fresh, row)][: width - len(row)]
            row, left = np.concatenate([row, added]), fresh[~np.isin(fresh, added)]
        rows.append(row)
    return np.stack(rows)


def deal(labels: Indices, index: Indices, rows: LabelRows, rng: np.random.Generator, what: str) -> list[Indices]:
    """Cut every class of these samples into as many shards as the rows name it, and give each row its own.

    Shards are contiguous and equal, left-over samples go one each to the first ones; which shard of a label a row
    gets is random. Raises FedbenchError when a class has fewer samples than shards; `what` names the samples there.
    """
    shards: dict[int, list[Indices]] = {}
    for label, number in zip(*np.unique(rows, return_counts=True), strict=True):
        own = index[labels[index] == label]
        if len(own) < number:
            raise FedbenchError(
                f"{what}: class {label} has {len(own)}, too few for the {number} shards that clients get of it.",
                "Use fewer clients, or fewer labels per client.",
            )
        parts = np.array_split(own, number)
        shards[int(label)] = [parts[place] for place in rng.permutation(number)]
    return [np.concatenate([shards[label].pop() for label in row]) for row in rows.tolist()]
