"""Every client has some of the labels, with exact counts per class (pFedBayes and BPFed: 5 of 10 labels)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import Frozen
from fedbench.partition import Indices, Partition, Split


class LabelsParams(Frozen):
    size: str = Field("small", description="samples per class and client: small, medium or large")
    labels_per_client: int = Field(5, ge=1, description="different labels of a client")
    labels: Literal["block", "shift", "random"] = Field(
        "block", description="labels of client i, j < k = labels_per_client: (k i + j) mod C, (i + j) mod C, or random"
    )
    stratified: bool = Field(True, description="exact counts per class; false: the client's pool is shuffled and cut")


class Labels(Partition):
    Params = LabelsParams

    def __init__(self, params: LabelsParams) -> None:
        self.params = params

    def check(self, dataset: type[Dataset]) -> None:
        size, k = self.params.size, self.params.labels_per_client
        if not dataset.sizes:
            raise FedbenchError(
                f"{dataset.name()} has no sizes, which the partition labels goes by.",
                "Use another partition, such as natural, dirichlet or shards.",
            )
        if size not in dataset.sizes:
            raise FedbenchError(f"{dataset.name()} has no size {size!r}.", did_you_mean(size, dataset.sizes))
        if k > dataset.classes:
            raise FedbenchError(f"labels_per_client is {k}, but {dataset.name()} has only {dataset.classes} classes.")

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        # official training data first, in file order
        pool = {label: np.flatnonzero(arrays.y == label) for label in range(dataset.classes)}
        return self.deal([pool] * clients, self.label_sets(dataset.classes, clients, rng), dataset, rng)

    def deal(
        self, pools: list[dict[int, Indices]], sets: list[list[int]], dataset: type[Dataset], rng: np.random.Generator
    ) -> Split:
        """Give every client its labels' exact counts from the front of its pool, which shrinks; clients may share one.

        Raises FedbenchError when a pool has too few images of a class.
        """
        n_fit, n_test = dataset.sizes[self.params.size]
        train, test = [], []
        for left, own in zip(pools, sets, strict=True):
            fit_parts, test_parts = [], []
            for label in own:
                if len(left[label]) < n_fit + n_test:
                    raise FedbenchError(
                        f"{dataset.name()} has too few images of class {label} for {len(pools)} clients of size "
                        f"{self.params.size} ({n_fit} + {n_test} each).",
                        "Use fewer clients or a smaller size.",
                    )
                taken, left[label] = np.split(left[label], [n_fit + n_test])
                fit_parts.append(taken[:n_fit])
                test_parts.append(taken[n_fit:])
            fit, held = np.concatenate(fit_parts), np.concatenate(test_parts)
            if not self.params.stratified:
                fit, held = np.split(rng.permutation(np.concatenate([fit, held])), [len(fit)])
            train.append(fit)
            test.append(held)
        return Split(train, test)

    def label_sets(self, classes: int, clients: int, rng: np.random.Generator) -> list[list[int]]:
        """The labels of every client."""
        k = self.params.labels_per_client
        if self.params.labels == "random":
            # the labels with the fewest owners so far, at random among equals: no class runs out before the others
            owners, sets = np.zeros(classes, dtype=np.int64), []
            for _ in range(clients):
                own = np.sort(np.lexsort((rng.random(classes), owners))[:k])
                owners[own] += 1
                sets.append(own.tolist())
            return sets
        stride = k if self.params.labels == "block" else 1
        return [[(stride * client + j) % classes for j in range(k)] for client in range(clients)]
