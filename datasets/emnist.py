"""EMNIST: handwritten characters in MNIST's format; `emnist[split=letters]` names another of its divisions.

By default `byclass`: 814,255 digits, capital and small letters in 62 classes. How much of it is used is a setting of
the partitions (`fraction`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.job import Frozen
from fedbench.sources import Archive, check_md5, plain, zip_files
from fedbench.vision import torchvision_datasets

from .mnist import decode_idx

CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10}
ARCHIVE = "EMNIST/raw/gzip.zip"


class EmnistParams(Frozen):
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits"] = Field(
        "byclass", description="which of its divisions, as the archive names them"
    )


class Emnist(Dataset):
    title = "EMNIST byclass"
    shape = (1, 28, 28)
    classes = CLASSES["byclass"]
    sha256 = None  # not known; the archive is held against torchvision's MD5
    Params = EmnistParams
    params: ClassVar[EmnistParams] = EmnistParams()

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        return {"title": f"EMNIST {params.split}", "classes": CLASSES[params.split]}

    @classmethod
    def read(cls, root: Path) -> Arrays:
        """From the archive, which torchvision leaves in its layout: nobody knows a checksum of what it unpacks."""
        path = root / ARCHIVE
        if not path.is_file():
            raise FileNotFoundError(path)
        (archive,) = cls.archives()
        check_md5(path, archive.md5, ARCHIVE)
        files = zip_files(path)
        names = [f"emnist-{cls.params.split}-{part}" for part in ("train", "test")]
        y = [decode_idx(plain(files, f"{name}-labels-idx1-ubyte")) for name in names]
        # columns come before rows in these files (torchvision shows them so: lying and mirrored)
        x = [decode_idx(plain(files, f"{name}-images-idx3-ubyte")).transpose(0, 2, 1) for name in names]
        first = 1 if cls.params.split == "letters" else 0  # letters are counted from 1
        images = np.ascontiguousarray(np.concatenate(x))[:, None]
        return Arrays(images, np.concatenate(y).astype(np.int64) - first, len(y[0]))

    @classmethod
    def archives(cls) -> list[Archive]:
        known = torchvision_datasets().EMNIST
        return [Archive(ARCHIVE, (known.url,), known.md5)]
