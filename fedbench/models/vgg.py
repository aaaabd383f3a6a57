"""pFedMe's VGG scaled to five blocks, with the three classifiers that the paper's words allow."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedbench.models.mlp import classifier
from fedbench.models.norm import Norm, norm_layer
from fedbench.models.shape import Shape, require_side


def vgg_s(shape: Shape, classes: int, norm: Norm) -> nn.Sequential:
    require_side("vgg_s", shape, 32)
    return nn.Sequential(*_features(shape[0], norm), *classifier(128, 128, 128, classes))


def vgg_s_single(shape: Shape, classes: int, norm: Norm) -> nn.Sequential:
    require_side("vgg_s_single", shape, 32)
    return nn.Sequential(*_features(shape[0], norm), *classifier(128, classes))


def vgg_s_512(shape: Shape, classes: int, norm: Norm) -> nn.Sequential:
    require_side("vgg_s_512", shape, 32)
    return nn.Sequential(*_features(shape[0], norm), *classifier(128, 512, 512, classes))


def _features(channels: int, norm: Norm) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 16, 32, 64, 128, 128)):
        convolution = nn.Conv2d(before, after, 3, padding=1)
        layers += [convolution, norm_layer(norm, after), nn.ReLU(), nn.MaxPool2d(2)]
    return layers
