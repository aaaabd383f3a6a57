"""Two classes, one of them rare in every client: equal clients with a ratio of 1:9 (SEL's Covtype)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Partition, Split
from fedbench.partition._dealing import official_parts


class ClassRatioParams(Frozen):
    n_client: int = Field(1000, ge=0, description="training samples of every client; 0: as many as the data allows")
    majority: float = Field(0.9, ge=0.5, lt=1, description="part of a client's samples that is of its frequent class")
    order: Literal["alternate", "block"] = Field(
        "alternate", description="class 1 is frequent in clients 0, 2, 4, ..., or in the first half of them"
    )
    n_test: int = Field(10_000, ge=1, description="test samples, the same for all clients; all if there are fewer")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="part of the data held out where the data set has no official test part"
    )


class ClassRatio(Partition):
    """Which samples are for testing does not depend on the seed; which of the others a client has does."""

    Params = ClassRatioParams

    def __init__(self, params: ClassRatioParams) -> None:
        self.params = params

    def check(self, dataset: type[Dataset]) -> None:
        if dataset.classes != 2:
            raise FedbenchError(
                f"the partition class_ratio is for two classes; {dataset.name()} has {dataset.classes}.",
                "Use another partition.",
            )

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        fixed = np.random.default_rng(0)
        fit, held = official_parts(arrays, self.params.test_fraction, fixed)
        test = np.sort(fixed.permutation(held)[: self.params.n_test])

        frequent = self._frequent_classes(clients)
        pools = [rng.permutation(fit[arrays.y[fit] == label]) for label in (0, 1)]
        largest = self._largest_size(frequent, [len(pool) for pool in pools])
        size = self.params.n_client or largest
        if size > largest or size == 0:
            raise FedbenchError(
                f"{dataset.name()} has too few training samples for {clients} clients with {size or 1} each.",
                f"Use at most n_client={largest}, or fewer clients." if largest else "Use fewer clients.",
            )
        train = []
        for client in range(clients):
            parts = []
            for label in (0, 1):
                taken, pools[label] = np.split(pools[label], [self._count(size, label == frequent[client])])
                parts.append(taken)
            train.append(np.concatenate(parts))
        return Split(train, [test] * clients)

    def _frequent_classes(self, clients: int) -> list[int]:
        if self.params.order == "block":
            return [int(client < (clients + 1) // 2) for client in range(clients)]
        return [1 - client % 2 for client in range(clients)]

    def _count(self, size: int, is_frequent: bool) -> int:
        """Samples of a class in a client of this size."""
        frequent = round(self.params.majority * size)
        return frequent if is_frequent else size - frequent

    def _largest_size(self, frequent: list[int], available: list[int]) -> int:
        def fits(size: int) -> bool:
            return all(sum(self._count(size, label == own) for own in frequent) <= available[label] for label in (0, 1))

        return next((size for size in range(sum(available) // len(frequent), 0, -1) if fits(size)), 0)
