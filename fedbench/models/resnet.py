"""ResNet-18 for 32x32 images: a stem of stride 1 without pooling, eight basic blocks, global average pooling."""

from __future__ import annotations

from torch import Tensor, nn

from fedbench.models.norm import Norm, norm_layer
from fedbench.models.shape import Shape, require_side


class BasicBlock(nn.Module):
    """relu(residual(x) + shortcut(x)); the shortcut is a 1x1 projection where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(before, after, 3, stride, norm),
            nn.ReLU(inplace=True),
            *_convolution(after, after, 3, 1, norm),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(before, after, 1, stride, norm))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x) + self.shortcut(x)
        return out.relu_()


def resnet18_cifar(shape: Shape, classes: int, norm: Norm) -> nn.Sequential:
    require_side("resnet18_cifar", shape, 32)
    layers = [*_convolution(shape[0], 64, 3, 1, norm), nn.ReLU(inplace=True)]
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [BasicBlock(before, after, stride, norm), BasicBlock(after, after, 1, norm)]
        before = after
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, classes))


def _convolution(before: int, after: int, side: int, stride: int, norm: Norm) -> list[nn.Module]:
    return [nn.Conv2d(before, after, side, stride, side // 2, bias=False), norm_layer(norm, after)]
