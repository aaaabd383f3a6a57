"""Convolutional networks. The body is everything but the last linear layer."""

from __future__ import annotations

from torch import nn

from fedbench.errors import FedbenchError

Shape = tuple[int, int, int]


def _needs_32x32(name: str, shape: Shape) -> None:
    if shape[1:] != (32, 32):
        raise FedbenchError(f"{name} is for 32x32 images, not {shape[1]}x{shape[2]}.", "Use dnn100 or mlp256.")


def cnn5(shape: Shape, classes: int) -> nn.Module:
    """FedRep's five layers: two valid 5x5 convolutions and three linear layers."""
    _needs_32x32("cnn5", shape)
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 120),
        nn.ReLU(),
        nn.Linear(120, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def vgg_s(shape: Shape, classes: int) -> nn.Module:
    """pFedMe's VGG scaled to five blocks; BatchNorm on batch statistics, because averages of running ones mislead."""
    _needs_32x32("vgg_s", shape)
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in (16, 32, 64, 128, 128):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.BatchNorm2d(width, track_running_stats=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = width
    layers += [nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, classes))
