"""MNIST: 70,000 handwritten digits, 28x28."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbench.dataset import Arrays, Dataset
from fedbench.vision import torchvision_datasets


class Mnist(Dataset):
    title = "MNIST"
    shape = (1, 28, 28)
    classes = 10
    sha256 = "33f94faee85f4bc947a65812c8c840b7c6ec49f4f2c798bf5e9773b5f6d319cc"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {
        "small": (50, 950),
        "medium": (200, 800),
        "large": (900, 300),
    }
    reader: ClassVar[str] = "MNIST"
    """torchvision's class, which is also the folder in its layout"""

    @classmethod
    def read(cls, root: Path) -> Arrays:
        for part in ("train", "t10k"):
            for file in ("images-idx3-ubyte", "labels-idx1-ubyte"):
                if not (path := root / cls.reader / "raw" / f"{part}-{file}").is_file():
                    raise FileNotFoundError(path)
        parts = [cls._part(root, train=train, download=False) for train in (True, False)]
        x = np.concatenate([part.data.numpy() for part in parts])[:, None]
        y = np.concatenate([part.targets.numpy() for part in parts]).astype(np.int64)
        return Arrays(x, y, len(parts[0].data))

    @classmethod
    def download(cls, root: Path) -> None:
        for train in (True, False):
            cls._part(root, train=train, download=True)

    @classmethod
    def _part(cls, root: Path, *, train: bool, download: bool) -> Any:
        return getattr(torchvision_datasets(), cls.reader)(root, train=train, download=download)
