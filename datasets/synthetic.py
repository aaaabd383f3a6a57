"""Synthetic images of any shape and number of classes, learnable, made on the spot: for tests, benchmarks, smoke runs.

Every class has a smooth random pattern; an image is a mixture of its class's pattern and another's, mostly with more of
its own, plus noise: whatever its shape, nobody gets all of them right. Named in a grid as
`synthetic` or `synthetic[classes=100,shape=3x32x32,per_class=600]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from fedbench.dataset import Arrays, Dataset
from fedbench.job import Frozen

_COARSE = 4  # side of the grid of random values that a pattern is stretched from


class SyntheticParams(Frozen):
    classes: int = Field(10, ge=2, description="number of classes")
    shape: str = Field("1x28x28", description="channels x height x width")
    per_class: int = Field(300, ge=10, description="images per class, a fifth of them test images")
    groups: int = Field(0, ge=0, description="copies of all images, each a group of its own: halves, corruptions")
    noise: float = Field(0.25, ge=0, description="standard deviation of the noise, on the scale of the pixels")

    @field_validator("shape")
    @classmethod
    def _three_sides(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", value):
            raise ValueError("must be channels x height x width, such as 3x32x32")
        return value


class Synthetic(Dataset):
    title = "Synthetic images"
    shape = (1, 28, 28)
    classes = 10
    embedded = True
    sha256 = None  # made here, from the settings alone
    Params = SyntheticParams
    params: ClassVar[SyntheticParams] = SyntheticParams()
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"small": (10, 50), "medium": (30, 30), "large": (48, 12)}

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        # as much as each owner of a class can have, when ten clients have five labels each
        share = params.per_class // max(5, -(-50 // params.classes))
        sizes = {"small": share // 6, "medium": share // 2, "large": share * 4 // 5}
        return {
            "classes": params.classes,
            "groups": params.groups,
            "shape": tuple(int(side) for side in params.shape.split("x")),
            "sizes": {size: (fit, share - fit) for size, fit in sizes.items()},
        }

    @classmethod
    def read(cls, root: Path) -> Arrays:
        rng = np.random.default_rng(0)
        n_test = cls.params.per_class // 5
        y = np.repeat(np.arange(cls.classes), cls.params.per_class)
        is_test = np.arange(len(y)) % cls.params.per_class < n_test
        order = np.concatenate([rng.permutation(np.flatnonzero(~is_test)), rng.permutation(np.flatnonzero(is_test))])
        y = y[order]
        other = (y + rng.integers(1, cls.classes, size=len(y))) % cls.classes
        share = rng.uniform(0.45, 1.0, size=(len(y), 1, 1, 1)).astype(np.float32)
        noise = rng.standard_normal((len(y), *cls.shape), dtype=np.float32)
        patterns = cls._patterns(rng)
        mixed = share * patterns[y] + (1 - share) * patterns[other]
        x = 0.5 + 0.5 * mixed + np.float32(cls.params.noise) * noise
        arrays = Arrays((x.clip(0, 1) * 255).round().astype(np.uint8), y, int((~is_test).sum()))
        return _copied(arrays, cls.params.groups) if cls.params.groups else arrays

    @classmethod
    def _patterns(cls, rng: np.random.Generator) -> np.ndarray:
        """A smooth pattern with values in [-1, 1] for every class."""
        channels, height, width = cls.shape
        coarse = rng.uniform(-1, 1, size=(cls.classes, channels, _COARSE, _COARSE)).astype(np.float32)
        rows = np.arange(height) * _COARSE // height
        columns = np.arange(width) * _COARSE // width
        return coarse[:, :, rows[:, None], columns[None, :]]


def _copied(arrays: Arrays, groups: int) -> Arrays:
    """All images once in every group: the training parts of all groups, then their test parts."""
    parts = (np.arange(arrays.n_train), np.arange(arrays.n_train, len(arrays.y)))
    order = np.concatenate([np.tile(part, groups) for part in parts])
    group = np.concatenate([np.repeat(np.arange(groups), len(part)) for part in parts])
    return Arrays(arrays.x[order], arrays.y[order], groups * arrays.n_train, group)
