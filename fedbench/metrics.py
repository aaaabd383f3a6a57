"""Accuracy, NLL, Brier, ECE and MCE from sums that merge: per client and pooled figures come from the same record.

Regression has the root mean squared error, from the same kind of record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 10
ENTROPY_BINS = 50
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """Sums over samples, a row per client.

    `bins` is [clients, BINS, (count, confidence, correct)], `entropies` counts in [clients, ENTROPY_BINS].
    """

    nll: Floats
    brier: Floats
    entropy: Floats
    bins: Floats
    entropies: Floats

    @classmethod
    def zeros(cls, clients: int) -> Tally:
        nll, brier, entropy = np.zeros((3, clients))
        return cls(nll, brier, entropy, np.zeros((clients, BINS, 3)), np.zeros((clients, ENTROPY_BINS)))

    def add(self, probabilities: Tensor, y: Tensor, client: Tensor) -> None:
        """Count samples: their class probabilities, labels, and which row they belong to."""
        clients = len(self.nll)
        confidence, guess = probabilities.max(-1)
        of_label = probabilities.gather(-1, y[:, None]).squeeze(-1)
        nll = -of_label.clamp_min(1e-12).log()
        # sum_c (p_c - 1[y=c])^2 = sum_c p_c^2 - 2 p_y + 1
        brier = probabilities.square().sum(-1) - 2 * of_label + 1
        entropy = predictive_entropy(probabilities)
        cell = client * BINS + confidence_bin(confidence)
        for row, value in ((self.nll, nll), (self.brier, brier), (self.entropy, entropy)):
            row += _sums(client, value, clients)
        share = entropy / math.log(probabilities.shape[-1])
        entropy_cell = client * ENTROPY_BINS + (share * ENTROPY_BINS).long().clamp(0, ENTROPY_BINS - 1)
        ones = torch.ones_like(nll)
        self.entropies[:] += _sums(entropy_cell, ones, clients * ENTROPY_BINS).reshape(clients, ENTROPY_BINS)
        for column, value in enumerate((ones, confidence, (guess == y).double())):
            self.bins[:, :, column] += _sums(cell, value, clients * BINS).reshape(clients, BINS)

    def pooled(self) -> Tally:
        """All clients as one row."""
        return Tally(*(value.sum(0, keepdims=True) for value in vars(self).values()))

    def rows(self) -> list[dict[str, float]]:
        """The metrics of every row, as fractions; a row without samples has none."""
        return [self._row(row) for row in range(len(self.nll))]

    def _row(self, row: int) -> dict[str, float]:
        count, confidence, correct = self.bins[row].T
        n = count.sum()
        if n == 0:
            return {}
        filled = count > 0
        gaps = np.abs(correct[filled] - confidence[filled]) / count[filled]
        return {
            "accuracy": float(correct.sum() / n),
            "nll": float(self.nll[row] / n),
            "brier": float(self.brier[row] / n),
            "entropy": float(self.entropy[row] / n),
            "ece": float((gaps * count[filled]).sum() / n),
            "mce": float(gaps.max()),
        }


@dataclass(frozen=True)
class Errors:
    """What a tally is for classes, for predicted numbers: sums over samples, a row per client."""

    squares: Floats
    count: Floats

    @classmethod
    def zeros(cls, clients: int) -> Errors:
        return cls(np.zeros(clients), np.zeros(clients))

    def add(self, predictions: Tensor, y: Tensor, client: Tensor) -> None:
        """Count samples: the predicted numbers, the true ones, and which row they belong to."""
        squares = (predictions.double() - y.double()).square()
        for row, value in ((self.squares, squares), (self.count, torch.ones_like(squares))):
            row += _sums(client, value, len(row))

    def pooled(self) -> Errors:
        """All clients as one row."""
        return Errors(self.squares.sum(keepdims=True), self.count.sum(keepdims=True))

    def rows(self) -> list[dict[str, float]]:
        """The metrics of every row; a row without samples has none."""
        pairs = zip(self.squares, self.count, strict=True)
        return [{"rmse": math.sqrt(squares / n)} if n else {} for squares, n in pairs]


def copy_row(tally: Tally | Errors, row: int, to: int) -> None:
    """Give a row the sums of another one."""
    for sums in vars(tally).values():
        sums[to] = sums[row]


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """H = -sum_y p(y) log p(y), in nats; 0 log 0 is 0."""
    entropies: Tensor = torch.special.entr(probabilities.double()).sum(-1)
    return entropies


def confidence_bin(confidence: Tensor) -> Tensor:
    """The bin b with b/10 < confidence <= (b+1)/10. Closed above, because float32 softmax does reach 1.0."""
    edges = torch.arange(1, BINS, device=confidence.device, dtype=torch.float64) / BINS
    return torch.bucketize(confidence.double(), edges)


def _sums(index: Tensor, values: Tensor, length: int) -> Floats:
    return torch.bincount(index, weights=values.double(), minlength=length).cpu().numpy()
