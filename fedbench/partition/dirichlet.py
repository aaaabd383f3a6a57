"""Every class is spread over the clients with proportions from a Dirichlet distribution (FedHB's EMNIST, as FedEM)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Indices, Partition, Split
from fedbench.partition._dealing import hold_out, stratified


class DirichletParams(Frozen):
    alpha: float = Field(0.4, gt=0, le=1e6, description="concentration: the smaller, the fewer clients share a class")
    fraction: float = Field(0.1, gt=0, le=1, description="part of the data that is used, with the same mix of classes")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="part of every client's samples that it is tested on")
    min_size: int = Field(20, ge=2, description="samples of the smallest client; smaller ones take from the largest")


class Dirichlet(Partition):
    """Official training and test data are pooled; every client's share is split with its own mix of classes."""

    Params = DirichletParams

    def __init__(self, params: DirichletParams) -> None:
        self.params = params

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        everything = np.arange(len(arrays.y))
        used, _ = stratified(arrays.y, everything, round(self.params.fraction * len(everything)), rng)
        if len(used) < clients * self.params.min_size:
            raise FedbenchError(
                f"{len(used)} samples of {dataset.name()} are too few for {clients} clients with at least "
                f"{self.params.min_size} each.",
                "Use fewer clients, a smaller min_size or a larger fraction.",
            )
        shares = self._spread(arrays.y, used, clients, rng)
        _top_up(shares, self.params.min_size)
        parts = [hold_out(arrays.y, np.array(share), self.params.test_fraction, rng) for share in shares]
        return Split([train for train, _ in parts], [test for _, test in parts])

    def _spread(self, labels: Indices, used: Indices, clients: int, rng: np.random.Generator) -> list[list[int]]:
        """Every client's samples, in random order."""
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for label in np.unique(labels[used]):
            own = rng.permutation(used[labels[used] == label])
            borders = np.cumsum(rng.dirichlet(np.full(clients, self.params.alpha)))[:-1] * len(own)
            for client, piece in enumerate(np.split(own, borders.astype(np.int64))):
                pieces[client].append(piece)
        return [rng.permutation(np.concatenate(own)).tolist() for own in pieces]


def _top_up(shares: list[list[int]], min_size: int) -> None:
    """Move samples one by one from whoever is largest to those that are too small.

    While a client is below a `min_size` that the mean reaches, another is above it: every step helps, and no client
    falls below it that was not.
    """
    sizes = np.array([len(share) for share in shares])
    for client in np.flatnonzero(sizes < min_size):
        for _ in range(min_size - sizes[client]):
            largest = int(sizes.argmax())
            shares[client].append(shares[largest].pop())
            sizes[largest] -= 1
            sizes[client] += 1
