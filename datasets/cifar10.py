"""CIFAR-10: 60,000 colour images, 32x32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedbench.dataset import Arrays, Dataset
from fedbench.vision import torchvision_datasets


class Cifar10(Dataset):
    title = "CIFAR-10"
    shape = (3, 32, 32)
    classes = 10
    sha256 = "640d82e6201b18473dd8860787c8042889bcfdf18af6959ac4adee5a26142026"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {
        "small": (25, 475),
        "medium": (100, 400),
        "large": (450, 150),
    }

    @classmethod
    def read(cls, root: Path) -> Arrays:
        if not (root / "cifar-10-batches-py").is_dir():
            raise FileNotFoundError(root / "cifar-10-batches-py")
        parts = [cls._part(root, train=train, download=False) for train in (True, False)]
        x = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
        y = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
        return Arrays(np.ascontiguousarray(x), y, len(parts[0].data))

    @classmethod
    def download(cls, root: Path) -> None:
        cls._part(root, train=True, download=True)

    @classmethod
    def _part(cls, root: Path, *, train: bool, download: bool) -> Any:
        return torchvision_datasets().CIFAR10(root, train=train, download=download)
