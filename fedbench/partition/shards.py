"""Every client has s shards of one label each, the same labels for training and testing (FedRep, FedBABU, FedHB)."""

from __future__ import annotations

from math import gcd

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Partition, Split
from fedbench.partition._dealing import LabelRows, deal, distinct_rows, official_parts


class ShardsParams(Frozen):
    s: int = Field(5, ge=1, description="shards per client; s * clients must be a multiple of the number of classes")
    repeat: bool = Field(True, description="a client may get several shards of a label; false: s different labels")
    test_fraction: float = Field(
        0.2, gt=0, lt=1, description="part of every class held out where the data set has no official test part"
    )


class Shards(Partition):
    Params = ShardsParams

    def __init__(self, params: ShardsParams) -> None:
        self.params = params

    def check(self, dataset: type[Dataset]) -> None:
        if not self.params.repeat and self.params.s > dataset.classes:
            raise FedbenchError(
                f"s is {self.params.s}, but {dataset.name()} has only {dataset.classes} different labels.",
                "Use a smaller s, or repeat=true.",
            )

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        self.check(dataset)
        fit, held = official_parts(arrays, self.params.test_fraction, rng)
        rows = shard_rows(dataset, clients, self.params.s, self.params.repeat, rng)
        return Split(
            deal(arrays.y, fit, rows, rng, f"training samples of {dataset.name()}"),
            deal(arrays.y, held, rows, rng, f"test samples of {dataset.name()}"),
        )


def shard_rows(dataset: type[Dataset], clients: int, s: int, repeat: bool, rng: np.random.Generator) -> LabelRows:
    """The labels of every client's shards, each label equally often. Raises FedbenchError when that cannot be."""
    classes = dataset.classes
    if s * clients % classes:
        raise FedbenchError(
            f"{clients} clients with s={s} have {s * clients} shards, not a multiple of the {classes} classes of "
            f"{dataset.name()}.",
            f"Use a multiple of {classes // gcd(s, classes)} clients, a multiple of {classes // gcd(clients, classes)} "
            "for s, or the partition classes, where shares need not be equal.",
        )
    if not repeat:
        return distinct_rows(classes, clients, s, rng)
    return rng.permutation(np.repeat(np.arange(classes), s * clients // classes)).reshape(clients, s)
