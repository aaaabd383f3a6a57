"""Covtype: 581,012 patches of forest with 54 numbers each; cover type 2 (class 0) against all others (class 1).

The training part is a fixed random 80 percent. Columns are standardised by its mean and deviation. Use it with
`normalize: none`. Named in a grid as `covtype`, or with settings as `covtype[standardise=false,constant=true]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.job import Frozen

FILES = ("covtype.npz", "covtype.data", "covtype.data.gz", "covtype.data.xz")
"""In `covtype/` under the data root: arrays X and y, or the table of the UCI repository, packed or not."""
TRAIN_FRACTION = 0.8


class CovtypeParams(Frozen):
    standardise: bool = Field(True, description="columns with mean 0 and deviation 1 on the training part")
    constant: bool = Field(False, description="one more column that is always 1, so that a linear model has a bias")


class Covtype(Dataset):
    title = "Covtype (binary)"
    shape = (1, 1, 54)
    classes = 2
    full_scale = 1
    sha256 = "c5fd1f956ebef287e1f97dea22cf52f30c9cae2dc647527f081e7d217cc9df39"
    Params = CovtypeParams
    params: ClassVar[CovtypeParams] = CovtypeParams()
    hashes: ClassVar[dict[tuple[bool, bool], str]] = {
        (True, False): sha256,
        (True, True): "cef3b24878198c563b5e06de1c734b9cac84a6b60792312ee4c8248423c2d4d1",
        (False, False): "16b3a5aadb7043e5b3c92b820398119e2b6903bb9dbe1eb918c1768b1a323b6b",
        (False, True): "4bddcf7a58b7632a25a5974f7aa65c7740dd1de6e446b0f75ada068aa3ca0a85",
    }
    """(standardise, constant) -> SHA-256"""

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        return {
            "shape": (1, 1, 54 + params.constant),
            "sha256": cls.hashes[params.standardise, params.constant],
        }

    @classmethod
    def read(cls, root: Path) -> Arrays:
        table, cover = cls._table(root / "covtype")
        # RandomState's streams are the same in every release of numpy
        order = np.random.RandomState(0).permutation(len(table))
        table, y = table[order], (cover[order] != 2).astype(np.int64)
        n_train = round(TRAIN_FRACTION * len(table))
        x = np.ones((len(table), cls.shape[2]), dtype=np.float32)
        for column in range(table.shape[1]):
            x[:, column] = _standardised(table[:, column], n_train) if cls.params.standardise else table[:, column]
        return Arrays(x[:, None, None, :], y, n_train)

    @classmethod
    def download(cls, root: Path) -> None:
        from sklearn.datasets import fetch_covtype

        table, cover = fetch_covtype(data_home=root, shuffle=False, return_X_y=True)
        (root / "covtype").mkdir(parents=True, exist_ok=True)
        np.savez(root / "covtype" / FILES[0], X=table.astype(np.int16), y=cover.astype(np.int64))

    @classmethod
    def _table(cls, folder: Path) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """All rows in their original order, and their cover types, 1 to 7."""
        path = next((folder / name for name in FILES if (folder / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(folder / FILES[0])
        if path.suffix == ".npz":
            with np.load(path) as content:
                return content["X"], content["y"]
        rows = np.loadtxt(path, delimiter=",", dtype=np.int16)
        return rows[:, :-1], rows[:, -1].astype(np.int64)


def _standardised(column: NDArray[np.int16], n_train: int) -> NDArray[np.float64]:
    """With mean 0 and deviation 1 on the first `n_train` rows; a column that is constant there becomes 0.

    The sums are of integers, and so exact: the result is the same bits on every machine.
    """
    known = column[:n_train].astype(np.int64)
    total, squares = int(known.sum()), int((known * known).sum())
    variance = (n_train * squares - total * total) / n_train**2
    values: NDArray[np.float64] = (column - total / n_train) / (variance**0.5 or 1.0)
    return values
