"""Made-up labels of any shape, cut by any partition. Partitions look at labels and groups, so images are one pixel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.dataset import Arrays, Dataset
from fedbench.partition import Indices, Split, get_partition
from fedbench.rng import numpy_rng


@pytest.fixture(scope="session")
def made_up() -> Callable[..., type[Dataset]]:
    """A data set of which a partition sees the number of classes, the sizes and the full scale."""

    def make(classes: int, sizes: dict[str, tuple[int, int]] | None = None, full_scale: int = 255) -> type[Dataset]:
        class MadeUp(Dataset):
            @classmethod
            def read(cls, root: Path) -> Arrays:
                raise AssertionError("a partition reads no data")

        MadeUp.classes = classes
        MadeUp.sizes = sizes or {}
        MadeUp.full_scale = full_scale
        return MadeUp

    return make


@pytest.fixture(scope="session")
def official() -> Callable[..., Arrays]:
    """Shuffled data with so many training and test samples of every class; training samples first."""

    def make(train: Sequence[int], test: Sequence[int] = (), seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        parts = [rng.permutation(np.repeat(np.arange(len(counts)), counts)) for counts in (train, test) if counts]
        labels = np.concatenate(parts).astype(np.int64)
        return Arrays(np.zeros((len(labels), 1, 1, 1), dtype=np.uint8), labels, sum(train))

    return make


@pytest.fixture(scope="session")
def cut(made_up: Callable[..., type[Dataset]]) -> Callable[..., Split]:
    """The data cut by a partition with these parameters, as a job of this seed would see it."""

    def make(name: str, arrays: Arrays, clients: int, *, classes: int = 0, seed: int = 0, **params: Any) -> Split:
        partition = get_partition(name)
        dataset = made_up(classes or int(arrays.y.max()) + 1)
        made = partition(partition.Params.model_validate(params))
        return made.split(made.prepare(arrays, dataset), dataset, clients, numpy_rng(seed, "partition"))

    return make


@pytest.fixture(scope="session")
def counts() -> Callable[[Arrays, Indices], dict[int, int]]:
    """Class -> how often it occurs in a part."""

    def count(arrays: Arrays, part: Indices) -> dict[int, int]:
        return dict(Counter(arrays.y[part].tolist()))

    return count


@pytest.fixture(scope="session")
def assert_disjoint() -> Callable[..., None]:
    """No sample is in two parts, or twice in one."""

    def check(*parts: Indices) -> None:
        used = np.concatenate(parts)
        assert len(np.unique(used)) == len(used)

    return check
