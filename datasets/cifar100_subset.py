"""A fifth of CIFAR-100: 100 random training images of every class and all 10,000 test images, in shuffled order.

Numbers on it are not comparable with numbers on CIFAR-100, which is why it has a name of its own. It is read from
`cifar-100-subset/cifar100_subset.npz` in the data root: `x_train`, `y_train`, `x_test`, `y_test`, images as
[n, 32, 32, 3] bytes, fine labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbench.dataset import Arrays, Dataset


class Cifar100Subset(Dataset):
    title = "CIFAR-100 subset (100 of 500 training images per class)"
    shape = (3, 32, 32)
    classes = 100
    sha256 = "a89feb88a8dbccbec205428d4bed3da780ebf1892d074c2ffa92a5e734e9282d"

    @classmethod
    def read(cls, root: Path) -> Arrays:
        with np.load(root / "cifar-100-subset" / "cifar100_subset.npz") as content:
            x = np.concatenate([content["x_train"], content["x_test"]]).transpose(0, 3, 1, 2)
            y = np.concatenate([content["y_train"], content["y_test"]])
            return Arrays(np.ascontiguousarray(x), y.astype(np.int64), len(content["y_train"]))
