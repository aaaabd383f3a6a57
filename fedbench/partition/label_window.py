"""Client k has the labels k, k + 1, ..., counted round the kept classes; one test set for all (SEL's MNIST 0-8)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Partition, Split
from fedbench.partition._dealing import deal, official_parts


class LabelWindowParams(Frozen):
    keep_classes: int = Field(9, ge=1, description="how many classes are kept, from the first on; others are dropped")
    window: int = Field(3, ge=1, description="labels of client k: (k + j) mod keep_classes for j < window")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="part of every class held out where the data set has no official test part"
    )


class LabelWindow(Partition):
    """A class's training images are split evenly over its clients; test data are all test images of kept classes."""

    Params = LabelWindowParams

    def __init__(self, params: LabelWindowParams) -> None:
        self.params = params

    def check(self, dataset: type[Dataset]) -> None:
        if self.params.keep_classes > dataset.classes:
            raise FedbenchError(
                f"keep_classes is {self.params.keep_classes}, but {dataset.name()} has only {dataset.classes} classes."
            )
        if self.params.window > self.params.keep_classes:
            raise FedbenchError(
                f"window is {self.params.window}, but only {self.params.keep_classes} classes are kept.",
                "Use a smaller window or a larger keep_classes.",
            )

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        fit, held = official_parts(arrays, self.params.test_fraction, rng)
        rows = (np.arange(clients)[:, None] + np.arange(self.params.window)) % self.params.keep_classes
        test = held[arrays.y[held] < self.params.keep_classes]
        train = deal(arrays.y, fit, rows, rng, f"training samples of {dataset.name()}")
        return Split(train, [test] * clients, classes=self.params.keep_classes)
