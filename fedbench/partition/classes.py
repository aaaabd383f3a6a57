"""Every client has S different classes, whose samples are split evenly among their clients (FedABML's EMNIST)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Partition, Split
from fedbench.partition._dealing import deal, distinct_rows, official_parts, stratified


class ClassesParams(Frozen):
    classes_per_client: int = Field(3, ge=1, description="different classes of a client")
    fraction: float = Field(1.0, gt=0, le=1, description="part of the data that is used, with the same mix of classes")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="part of every class held out where the data set has no official test part"
    )


class Classes(Partition):
    """No class has more than one client more than another, so the product S N need not be a multiple of the classes."""

    Params = ClassesParams

    def __init__(self, params: ClassesParams) -> None:
        self.params = params

    def check(self, dataset: type[Dataset]) -> None:
        if self.params.classes_per_client > dataset.classes:
            raise FedbenchError(
                f"classes_per_client is {self.params.classes_per_client}, but {dataset.name()} has only "
                f"{dataset.classes} classes."
            )

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        fit, held = (
            stratified(arrays.y, part, round(self.params.fraction * len(part)), rng)[0]
            for part in official_parts(arrays, self.params.test_fraction, rng)
        )
        rows = distinct_rows(dataset.classes, clients, self.params.classes_per_client, rng)
        return Split(
            deal(arrays.y, fit, rows, rng, f"training samples of {dataset.name()}"),
            deal(arrays.y, held, rows, rng, f"test samples of {dataset.name()}"),
        )
