"""Fully connected networks. The body is everything but the last linear layer."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

Shape = tuple[int, int, int]


def _mlp(shape: Shape, hidden: tuple[int, ...], classes: int) -> nn.Module:
    widths = (prod(shape), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def logreg(shape: Shape, classes: int) -> nn.Module:
    return _mlp(shape, (), classes)


def dnn100(shape: Shape, classes: int) -> nn.Module:
    return _mlp(shape, (100,), classes)


def mlp256(shape: Shape, classes: int) -> nn.Module:
    return _mlp(shape, (256,), classes)
