"""CIFAR-100-C: CIFAR-100's 10,000 test images under 19 corruptions, each at severity 5, the strongest.

`cifar100c` is the published arrays (Hendrycks and Dietterich, 2019), read from `CIFAR-100-C/*.npy` in the data root.
`cifar100c[source=generated]` is made here, from CIFAR-100's test images, by the authors' steps and constants
(`fedbench/corruptions.py`): always the same images, but not the published ones, and `frost` has other ice. The name
says which of the two a result comes from. `cifar100c[base=cifar100_subset]` is generated from the test images of
another data set; it appears as `cifar100c[base=cifar100_subset,source=generated]` everywhere.

`group` is the corruption, for the partition `corruption`; all groups have the same images in the same order. None of
them is official training data of anything, so that the whole counts as one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedbench.corruptions import CORRUPTIONS, SMALLEST, corrupt
from fedbench.dataset import Arrays, Dataset, find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.job import Frozen
from fedbench.rng import numpy_rng

FOLDER = "CIFAR-100-C"
PUBLISHED_SHAPE = (10_000, 32, 32, 3)
"""Of a corruption's images at one severity."""
SEVERITIES = 5
"""Blocks of a published file, the strongest last."""
CHUNK = 500
"""Images that are corrupted at once. Part of what is generated: random numbers are drawn for a chunk."""


class Cifar100CParams(Frozen):
    source: Literal["published", "generated"] = Field(
        "published", description="the published arrays, or corruptions that are made here"
    )
    base: str = Field("cifar100", description="the data set whose test images are corrupted; says source=generated")

    @model_validator(mode="before")
    @classmethod
    def _a_base_is_for_generating(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "base" in values and values.get("source", "generated") != "generated":
            raise ValueError("base is for source=generated: what is published was made of CIFAR-100")
        return {"source": "generated", **values} if "base" in values else values


class Cifar100C(Dataset):
    title = "CIFAR-100-C (published arrays, severity 5)"
    shape = (3, 32, 32)
    classes = 100
    sha256 = None
    groups = len(CORRUPTIONS)
    group_names = tuple(CORRUPTIONS)
    advice = f"They go into {FOLDER}/; or use cifar100c[source=generated], which is made here and says so."
    Params = Cifar100CParams
    params: ClassVar[Cifar100CParams] = Cifar100CParams()

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        """Raises FedbenchError when the base has no colour images."""
        if params.source == "published":
            return {}
        base = find_dataset(params.base)
        if base.shape[0] != 3 or min(base.shape[1:]) < SMALLEST or base.full_scale != 255:
            raise FedbenchError(
                f"{params.base} cannot be corrupted: it has no colour images of at least {SMALLEST}x{SMALLEST} pixels.",
                "Choose a base such as cifar100 or cifar100_subset.",
            )
        return {
            "title": f"CIFAR-100-C (generated here from {base.title}, severity 5)",
            "shape": base.shape,
            "classes": base.classes,
            "generated": True,
            "advice": "",
        }

    @classmethod
    def read(cls, root: Path) -> Arrays:
        return _generated(cls.params.base, root) if cls.generated else _published(root / FOLDER)


def _published(folder: Path) -> Arrays:
    """The last block of every file. Raises ValueError when a file is not what it should be."""
    n = PUBLISHED_SHAPE[0]
    labels = np.load(folder / "labels.npy", mmap_mode="r")
    if labels.shape != (SEVERITIES * n,) or labels.dtype.kind not in "iu":
        raise ValueError(f"labels.npy has {labels.dtype} {labels.shape}, not {SEVERITIES * n} whole numbers")
    if (labels.reshape(SEVERITIES, n) != labels[-n:]).any():
        raise ValueError("labels.npy does not repeat the labels of the test images for every severity")

    def blocks() -> Iterator[NDArray[np.uint8]]:
        for name in CORRUPTIONS:
            images, wanted = np.load(folder / f"{name}.npy", mmap_mode="r"), (SEVERITIES * n, *PUBLISHED_SHAPE[1:])
            if images.shape != wanted or images.dtype != np.uint8:
                raise ValueError(f"{name}.npy has {images.dtype} {images.shape}, not uint8 {wanted}")
            yield images[-n:]

    return _one_after_the_other(blocks(), PUBLISHED_SHAPE[1:3], labels[-n:])


def _generated(base: str, root: Path) -> Arrays:
    """Every corruption of the base's test images. Raises FedbenchError when it has none."""
    arrays = load_arrays(find_dataset(base), root)
    images = np.asarray(arrays.x[arrays.n_train :], dtype=np.uint8).transpose(0, 2, 3, 1)
    if not len(images):
        raise FedbenchError(f"{base} has no test images to corrupt.", "Choose a base such as cifar100.")

    def blocks() -> Iterator[NDArray[np.uint8]]:
        for name in CORRUPTIONS:
            for start in range(0, len(images), CHUNK):
                yield corrupt(name, images[start : start + CHUNK], numpy_rng(0, f"corruption {name} {start}"))

    return _one_after_the_other(blocks(), images.shape[1:3], arrays.y[arrays.n_train :])


def _one_after_the_other(blocks: Iterable[NDArray[np.uint8]], sides: tuple[int, ...], labels: NDArray[Any]) -> Arrays:
    """All images in one array that is filled block by block: of 600 MB there should be no second copy."""
    x = np.empty((len(labels) * len(CORRUPTIONS), 3, *sides), dtype=np.uint8)
    done = 0
    for block in blocks:
        x[done : done + len(block)] = block.transpose(0, 3, 1, 2)
        done += len(block)
    group = np.repeat(np.arange(len(CORRUPTIONS)), len(labels))
    return Arrays(x, np.tile(labels.astype(np.int64), len(CORRUPTIONS)), len(x), group)
