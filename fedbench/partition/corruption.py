"""Groups of clients with a corruption each, and newcomers with corruptions of their own (FedHB's CIFAR-C-100).

The data set has the same images in the same order under every corruption; `group` says which corruption it is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.partition import Indices, Partition, Split
from fedbench.partition._dealing import deal, hold_out
from fedbench.partition.shards import shard_rows


class CorruptionParams(Frozen):
    s: int = Field(50, ge=1, description="shards per client; s * clients of a group: a multiple of the classes")
    train_types: int = Field(10, ge=1, description="corruptions to train on; newcomers have the others")
    image_split: Literal["independent", "by_image"] = Field(
        "independent",
        description="test images are drawn for every corruption anew, or are the same under all corruptions",
    )
    test_fraction: float = Field(0.1, gt=0, lt=1, description="part of every class of a corruption held out")


class Corruption(Partition):
    """A group per corruption to train on with clients / train_types clients; newcomers' groups are as large.

    The corruptions to train on are the first of `numpy.random.default_rng(0).permutation`, whatever the seed. Clients
    of one group come one after the other, newcomers last. With independent splits an image may be trained on under
    one corruption and tested on under another.
    """

    Params = CorruptionParams

    def __init__(self, params: CorruptionParams) -> None:
        self.params = params

    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        types = self._types(arrays, dataset)
        groups = self.params.train_types
        if clients % groups:
            raise FedbenchError(
                f"{clients} clients cannot be {groups} groups of equal size.", f"Use a multiple of {groups} clients."
            )
        train: list[Indices] = []
        test: list[Indices] = []
        labels = arrays.y[types[0]]  # of the images, whatever the corruption
        for (fit, held), samples in zip(self._image_splits(labels, len(types), rng), types, strict=True):
            rows = shard_rows(dataset, clients // groups, self.params.s, True, rng)
            train += [samples[part] for part in deal(labels, fit, rows, rng, f"training samples of {dataset.name()}")]
            test += [samples[part] for part in deal(labels, held, rows, rng, f"test samples of {dataset.name()}")]
        return Split(train, test, newcomers=tuple(range(clients, len(train))))

    def _image_splits(self, labels: Indices, types: int, rng: np.random.Generator) -> list[tuple[Indices, Indices]]:
        """For every corruption, which images are for training and which for testing."""
        draws = types if self.params.image_split == "independent" else 1
        drawn = [hold_out(labels, np.arange(len(labels)), self.params.test_fraction, rng) for _ in range(draws)]
        return drawn * (types // draws)

    def _types(self, arrays: Arrays, dataset: type[Dataset]) -> list[Indices]:
        """The samples of every corruption, those to train on first. Raises FedbenchError when they are not copies."""
        if arrays.group is None:
            raise FedbenchError(f"{dataset.name()} has no corruptions.", "Use another partition.")
        types = [np.flatnonzero(arrays.group == kind) for kind in np.unique(arrays.group)]
        if len(types) < self.params.train_types:
            raise FedbenchError(
                f"{dataset.name()} has {len(types)} corruptions, not {self.params.train_types}.",
                f"Use at most train_types={len(types)}.",
            )
        if any(not np.array_equal(arrays.y[samples], arrays.y[types[0]]) for samples in types):
            raise FedbenchError(
                f"the groups of {dataset.name()} are not the same images under several corruptions.",
                "Use another partition.",
            )
        return [types[place] for place in np.random.default_rng(0).permutation(len(types))]
