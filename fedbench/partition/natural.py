"""Every client is one of the data's own: a writer, a device, whatever the data set's client column says."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Indices, Partition, Split
from fedbench.partition._dealing import hold_out


class NaturalParams(Frozen):
    test_fraction: float = Field(
        0.2, ge=0, lt=1, description="part of every client's samples that it is tested on; 0: its official test samples"
    )
    min_size: int = Field(10, ge=2, description="a client with fewer samples is never chosen")


class Natural(Partition):
    """All clients with at least `min_size` samples, or as many of them as asked for, at random, in their own order.

    Smaller ones are left out rather than merged: a client of several people would not be natural. Official training
    and test data are pooled, and every client is split with its own mix of classes; with `test_fraction` 0 every client
    keeps the official parts of its own samples.
    """

    Params = NaturalParams
    regression = True

    def __init__(self, params: NaturalParams) -> None:
        self.params = params

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        if arrays.group is None:
            raise FedbenchError(f"{dataset.name()} has no clients of its own.", "Use another partition.")
        names, sizes = np.unique(arrays.group, return_counts=True)
        eligible = names[sizes >= self.params.min_size]
        if len(eligible) < clients:
            raise FedbenchError(
                f"{dataset.name()} has {len(eligible)} clients with at least {self.params.min_size} samples "
                f"({len(names)} in all), not {clients}.",
                "Use fewer clients or a smaller min_size.",
            )
        chosen = np.sort(rng.choice(eligible, clients, replace=False))
        order = np.argsort(arrays.group, kind="stable")
        starts = np.searchsorted(arrays.group[order], chosen)
        ends = np.searchsorted(arrays.group[order], chosen, side="right")
        owned = [order[start:end] for start, end in zip(starts, ends, strict=True)]
        if self.params.test_fraction == 0:
            return _official(arrays, dataset, owned)
        parts = [hold_out(arrays.y, own, self.params.test_fraction, rng) for own in owned]
        return Split([train for train, _ in parts], [test for _, test in parts])


def _official(arrays: Arrays, dataset: type[Dataset], owned: list[Indices]) -> Split:
    """Every client's official training and test samples. Raises FedbenchError when one has none of either."""
    split = Split([own[own < arrays.n_train] for own in owned], [own[own >= arrays.n_train] for own in owned])
    if any(len(part) == 0 for part in (*split.train, *split.test)):
        raise FedbenchError(
            f"a client of {dataset.name()} has no official training or no official test samples.",
            "Use a test_fraction above 0.",
        )
    return split
