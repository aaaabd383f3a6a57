"""Digits: 1,797 real 8x8 images inside scikit-learn; the embedded default, which needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fedbench.dataset import Arrays, Dataset


class Digits(Dataset):
    title = "Digits (UCI, 8x8)"
    shape = (1, 8, 8)
    classes = 10
    full_scale = 16
    embedded = True
    sha256 = "739b96cdf103ee6d3b0b394b996aa12739a1cf3543c3f80c3ebbd64cb2052567"
    # The smallest class has 174 images, and with 10 clients every class has 5 owners: at most 34 images each.
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"small": (5, 25), "medium": (15, 15), "large": (24, 10)}

    @classmethod
    def read(cls, root: Path) -> Arrays:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        # No official test part: partitions that need one would say so; `labels` pools both anyway.
        return Arrays(bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64), len(bunch.target))
