"""Two data sets of the same shape as one, for clients of two kinds: by default MNIST and Fashion-MNIST.

`group` is 0 for the first and 1 for the second. Named in a grid as `pair`, or `pair[first=mnist,second=emnist]`. A data
set beside a reversed copy of itself is the partition `clusters` on the data set alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from fedbench.dataset import Arrays, Dataset, dataset_name, find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.job import Frozen


class PairParams(Frozen):
    first: str = Field("mnist", description="the data set of the first half of the clients")
    second: str = Field("fashion_mnist", description="the data set of the second half")

    @field_validator("first", "second")
    @classmethod
    def _complete(cls, value: str) -> str:
        return dataset_name(value)  # of a user's own files, with the hash of their content


class Pair(Dataset):
    title = "MNIST and Fashion-MNIST"
    shape = (1, 28, 28)
    classes = 10
    sha256 = None  # made of two that are verified
    groups = 2
    group_names = ("mnist", "fashion_mnist")
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"small": (50, 950), "medium": (200, 800), "large": (900, 300)}
    Params = PairParams
    params: ClassVar[PairParams] = PairParams()

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        """Raises FedbenchError when the two do not fit together."""
        first, second = find_dataset(params.first), find_dataset(params.second)
        if first.shape != second.shape or first.full_scale != second.full_scale or first.target_scale is not None:
            raise FedbenchError(
                f"{params.first} and {params.second} make no pair: their images differ in kind.",
                "Choose two data sets of classes with images of one shape.",
            )
        return {
            "title": f"{first.title} and {second.title}",
            "group_names": (params.first, params.second),
            "shape": first.shape,
            "classes": max(first.classes, second.classes),
            "full_scale": first.full_scale,
            "sizes": first.sizes,
        }

    @classmethod
    def read(cls, root: Path) -> Arrays:
        halves = [load_arrays(find_dataset(name), root) for name in (cls.params.first, cls.params.second)]
        x: list[Any] = []
        y, group = [], []
        for part in (lambda half: slice(0, half.n_train), lambda half: slice(half.n_train, None)):
            for number, half in enumerate(halves):
                x.append(half.x[part(half)])
                y.append(half.y[part(half)])
                group.append(np.full(len(y[-1]), number))
        n_train = sum(half.n_train for half in halves)
        return Arrays(np.concatenate(x), np.concatenate(y), n_train, np.concatenate(group))
