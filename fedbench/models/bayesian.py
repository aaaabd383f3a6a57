"""Networks for particles: next to the weights, a log precision that the prior or the likelihood has.

The log precision is the first coordinate of the flat vector, and so of the body; the forward pass does not use it.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedbench.errors import FedbenchError
from fedbench.models.mlp import classifier
from fedbench.models.shape import Shape


class WithPrecision(nn.Sequential):
    """Layers, and one parameter more."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.log_precision = nn.Parameter(torch.zeros(1))


class Odds(nn.Linear):
    """Logits (0, w^T x): softmax then gives class 1 the probability sigmoid(w^T x)."""

    def __init__(self, features: int) -> None:
        super().__init__(features, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return pad(super().forward(x), (1, 0))


def blr(shape: Shape, classes: int) -> nn.Sequential:
    """Bayesian logistic regression without bias; log_precision is log xi of the prior w ~ N(0, 1/xi)."""
    if classes != 2:
        raise FedbenchError(f"blr is for 2 classes, not {classes}.", "Use logreg.")
    return WithPrecision(nn.Flatten(), Odds(prod(shape)))


def bnn100(shape: Shape, classes: int) -> nn.Sequential:
    """One hidden layer and linear outputs; log_precision is log gamma of the noise y - f(x) ~ N(0, 1/gamma)."""
    return WithPrecision(*classifier(prod(shape), 100, classes))
