"""Half of the clients have images of one kind, half of another: a pair of data sets, or reversed copies (cFedBayes)."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.partition import Split
from fedbench.partition.labels import Labels, LabelsParams


class ClustersParams(LabelsParams):
    reverse: Literal["invert", "rot180", "labels"] = Field(
        "invert",
        description="what the second half of the clients sees of a data set that is no pair: pixels v as "
        "full scale - v, images turned by 180 degrees, or labels y as C - 1 - y",
    )


class WithCopies(Arrays):
    """Every image twice: the i-th sample of group 1 is the i-th of group 0, reversed."""


class Clusters(Labels):
    """Labels and sizes as in the partition `labels`. Of an odd number of clients, the first half is the larger one.

    Of a data set with reversed copies no image serves both halves: the first half of the clients takes from the first
    half of every class, the others from the second. Where one of them needs more than half of a class, the border
    moves as far as needed; so there is enough data whenever there is for `labels`. A client of the second half has the
    images that its place in `labels` gives it, also where the labels of these images are reversed.
    """

    Params = ClustersParams
    params: ClustersParams

    def prepare(self, arrays: Arrays, dataset: type[Dataset]) -> Arrays:
        """A pair as it is; any other data with a reversed copy behind each of its two official parts."""
        if arrays.group is not None:
            return arrays
        x, y, n = arrays.x, arrays.y, arrays.n_train
        copies, labels = x, y
        if self.params.reverse == "invert":
            copies = np.subtract(dataset.full_scale, x, dtype=x.dtype)
        elif self.params.reverse == "rot180":
            copies = x[:, :, ::-1, ::-1]
        else:
            labels = dataset.classes - 1 - y
        return WithCopies(
            np.concatenate([x[:n], copies[:n], x[n:], copies[n:]]),
            np.concatenate([y[:n], labels[:n], y[n:], labels[n:]]),
            2 * n,
            np.repeat([0, 1, 0, 1], [n, n, len(y) - n, len(y) - n]),
        )

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        if clients < 2:
            raise FedbenchError("two clusters need at least two clients.", "Use more clients.")
        if arrays.group is None or not np.isin(arrays.group, (0, 1)).all():
            raise FedbenchError(f"{dataset.name()} is no pair of data sets.", "Use another partition.")
        copied = isinstance(arrays, WithCopies)
        classes = [arrays.y, dataset.classes - 1 - arrays.y if copied and self.params.reverse == "labels" else arrays.y]
        pools = [
            {
                label: np.flatnonzero((arrays.group == half) & (classes[half] == label))
                for label in range(dataset.classes)
            }
            for half in (0, 1)
        ]
        sets = self.label_sets(dataset.classes, clients, rng)
        middle = (clients + 1) // 2
        if copied:
            each = sum(dataset.sizes[self.params.size])
            needs = [Counter(label for own in half for label in own) for half in (sets[:middle], sets[middle:])]
            for label in range(dataset.classes):
                border = _border(len(pools[0][label]), each * needs[0][label], each * needs[1][label])
                pools[0][label], pools[1][label] = pools[0][label][:border], pools[1][label][border:]
        return self.deal([pools[client >= middle] for client in range(clients)], sets, dataset, rng)


def _border(n: int, first: int, second: int) -> int:
    """Where a class of `n` images is cut: in the middle, or where both needs are met, if they can be."""
    return max(0, min(max(n // 2, first), n - second))
