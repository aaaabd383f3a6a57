"""Fully connected networks. The body is everything but the last linear layer."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

from fedbench.models.shape import Shape


def classifier(*widths: int) -> list[nn.Module]:
    """Linear layers of these widths on flattened inputs, with ReLU between them; the last one is the head."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return [*layers, nn.Linear(widths[-2], widths[-1])]


def linear(shape: Shape, classes: int) -> nn.Sequential:
    """w^T x without a bias: its parameters are the minimiser that a least-squares problem asks for."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes, bias=False))


def logreg(shape: Shape, classes: int) -> nn.Sequential:
    return nn.Sequential(*classifier(prod(shape), classes))


def dnn100(shape: Shape, classes: int) -> nn.Sequential:
    return nn.Sequential(*classifier(prod(shape), 100, classes))


def mlp256(shape: Shape, classes: int) -> nn.Sequential:
    return nn.Sequential(*classifier(prod(shape), 256, classes))


def mlp2(shape: Shape, classes: int) -> nn.Sequential:
    """FedABML's network for EMNIST, read as two hidden layers."""
    return nn.Sequential(*classifier(prod(shape), 200, 200, classes))


def mlp_fedrep(shape: Shape, classes: int) -> nn.Sequential:
    """FedRep's network for EMNIST: the other reading of FedABML's."""
    return nn.Sequential(*classifier(prod(shape), 512, 256, 64, classes))
