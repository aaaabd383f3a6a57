"""SVHN: 99,289 house numbers, digits in colour, 32x32; the papers score its test images as out of distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbench.dataset import Arrays, Dataset
from fedbench.sources import Archive, check_md5
from fedbench.vision import torchvision_datasets

FILES = ("train_32x32.mat", "test_32x32.mat")


class Svhn(Dataset):
    title = "SVHN"
    shape = (3, 32, 32)
    classes = 10
    sha256 = None  # not known; both files are held against torchvision's MD5

    @classmethod
    def read(cls, root: Path) -> Arrays:
        from scipy.io import loadmat

        for name in FILES:
            if not (root / name).is_file():
                raise FileNotFoundError(root / name)
        for archive in cls.archives():
            check_md5(root / archive.path, archive.md5, archive.path)
        parts = [loadmat(root / name) for name in FILES]
        x = np.concatenate([part["X"].transpose(3, 2, 0, 1) for part in parts])  # from [height, width, channel, n]
        y = np.concatenate([part["y"].ravel() for part in parts])
        # the file calls the digit 0 class 10
        return Arrays(np.ascontiguousarray(x), y.astype(np.int64) % 10, parts[0]["y"].size)

    @classmethod
    def archives(cls) -> list[Archive]:
        known = torchvision_datasets().SVHN.split_list
        return [Archive(name, (url,), md5) for url, name, md5 in (known["train"], known["test"])]
