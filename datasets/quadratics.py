"""Quadratics: two clients whose least squares are f_i(w) = (w - mu_i)^T Sigma_i^-1 (w - mu_i) / 2; FedABML's toy.

The optima are mu_1 = (-scale, -scale) and mu_2 = (scale, scale). Sigma_1 and Sigma_2 are long in directions at right
angles, so that the minimiser of f_1 + f_2, the exact global mean, is far from the mean of the optima, where averaging
ends when clients train long. The test samples ask a linear model for its distance from that minimiser: it is its RMSE.
Use it with `model: linear, normalize: none, partition: natural, test_fraction: 0, min_size: 2, headline: rmse`. Named
in a grid as `quadratics`, or with settings as `quadratics[condition=100,n=50]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedbench.dataset import Arrays, Dataset
from fedbench.job import Frozen

Floats = NDArray[np.float64]
_ANGLES = (np.pi / 9, np.pi / 9 + np.pi / 2)
"""Of the long directions of Sigma_1 and Sigma_2; along no axis, because mean-field posteriors would be exact there."""


class QuadraticsParams(Frozen):
    scale: float = Field(0.2, gt=0, le=100, description="how far the optima are from the origin, in each coordinate")
    condition: float = Field(10.0, ge=1, le=1e4, description="curvature across the long direction; along it it is 1")
    n: int = Field(4, ge=2, multiple_of=2, description="training samples of a client: the same two, repeated")


class Quadratics(Dataset):
    title = "Two quadratics"
    shape = (1, 1, 2)
    classes = 1
    full_scale = 1
    target_scale = 1 << 24  # steps of 6e-8, as fine as float32 at 1
    embedded = True
    sha256 = None  # made here, from the settings alone
    Params = QuadraticsParams
    params: ClassVar[QuadraticsParams] = QuadraticsParams()

    @classmethod
    def optima(cls) -> Floats:
        """mu_i: [clients, 2]."""
        return cls.params.scale * np.array([[-1.0, -1.0], [1.0, 1.0]])

    @classmethod
    def precisions(cls) -> Floats:
        """Sigma_i^-1: [clients, 2, 2]."""
        rows = np.stack([cls._rows(angle) for angle in _ANGLES])
        found: Floats = rows.transpose(0, 2, 1) @ rows
        return found

    @classmethod
    def global_mean(cls) -> Floats:
        """(Sigma_1^-1 + Sigma_2^-1)^-1 (Sigma_1^-1 mu_1 + Sigma_2^-1 mu_2), where f_1 + f_2 is smallest."""
        precisions = cls.precisions()
        pulls = (precisions @ cls.optima()[:, :, None]).sum(0)
        return np.linalg.solve(precisions.sum(0), pulls)[:, 0]

    @classmethod
    def _rows(cls, angle: float) -> Floats:
        """A with A^T A = Sigma^-1: the unit vectors along and across the long direction, by their curvature's root."""
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-np.sin(angle), np.cos(angle)])
        return np.stack([along, np.sqrt(cls.params.condition) * across])

    @classmethod
    def read(cls, root: Path) -> Arrays:
        # half the mean over two samples: rows longer by sqrt(2) make it half the sum
        train = [np.sqrt(2) * np.tile(cls._rows(angle), (cls.params.n // 2, 1)) for angle in _ANGLES]
        # the mean over two samples of (sqrt(2) (w_j - mean_j))^2 is the squared distance
        test = np.sqrt(2) * np.eye(2)
        targets = [rows @ optimum for rows, optimum in zip(train, cls.optima(), strict=True)]
        y = np.concatenate([*targets, test @ cls.global_mean(), test @ cls.global_mean()])
        x = np.concatenate([*train, test, test]).astype(np.float32)
        group = np.repeat([0, 1, 0, 1], [cls.params.n, cls.params.n, 2, 2])
        whole = np.rint(y * cls.target_scale).astype(np.int64)
        return Arrays(x[:, None, None, :], whole, 2 * cls.params.n, group.astype(np.int64))
