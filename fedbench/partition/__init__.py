"""How the data is cut into clients: one small class per file behind one base."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from fedbench.dataset import Arrays, Dataset
from fedbench.errors import FedbenchError, did_you_mean

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """For every client, which samples of the pooled data it trains on and is tested on."""

    train: list[Indices]
    test: list[Indices]
    newcomers: tuple[int, ...] = ()
    """Clients that never take part in training: they meet the trained model afterwards."""
    classes: int | None = None
    """How many classes are left where some are dropped: the first so many."""
    server: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Samples that the server holds, without labels, and no client."""

    def sha256(self) -> str:
        """Names the split: two runs with the same hash saw the same clients."""
        digest = hashlib.sha256()
        for part in (*self.train, *self.test, *([self.server] if len(self.server) else [])):
            digest.update(np.int64(len(part)).tobytes())
            digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        return digest.hexdigest()


class Partition(ABC):
    """One way of cutting: a pure function of labels, parameters and a random stream."""

    Params: ClassVar[type[BaseModel]]
    regression: ClassVar[bool] = False
    """True: also cuts data without classes."""

    @abstractmethod
    def __init__(self, params: Any) -> None:
        """`params` is an instance of this class's Params."""

    def check(self, dataset: type[Dataset]) -> None:
        """Raises FedbenchError when the parameters cannot fit the data set; called before any data is read."""
        return

    def prepare(self, arrays: Arrays, dataset: type[Dataset]) -> Arrays:
        """The data as the clients see it: a partition that changes images (reversed copies) returns new arrays."""
        return arrays

    @abstractmethod
    def split(self, arrays: Arrays, dataset: type[Dataset], clients: int, rng: np.random.Generator) -> Split:
        """Cut prepared data into clients. Raises FedbenchError when there is not enough of it."""


def partition_names() -> list[str]:
    """Every partition, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get_partition(name: str) -> type[Partition]:
    """The partition of that name; raises FedbenchError when there is none."""
    if name not in partition_names():
        raise FedbenchError(f"unknown partition {name!r}.", did_you_mean(name, partition_names()))
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Partition) and value.__module__ == module.__name__
    )
