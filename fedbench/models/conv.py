"""Plain convolutional networks: valid 5x5 convolutions, no normalisation. The body is all but the last linear layer."""

from __future__ import annotations

from torch import nn

from fedbench.models.dropout import Dropout
from fedbench.models.mlp import classifier
from fedbench.models.shape import Shape, require_side


def _stage(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]


def cnn5(shape: Shape, classes: int) -> nn.Sequential:
    """FedRep's five layers for CIFAR-10."""
    require_side("cnn5", shape, 32)
    return nn.Sequential(*_stage(shape[0], 64), *_stage(64, 64), *classifier(1600, 120, 64, classes))


def cnn5_100(shape: Shape, classes: int) -> nn.Sequential:
    """FedRep's five layers for CIFAR-100, with dropout before the head."""
    require_side("cnn5_100", shape, 32)
    *hidden, head = classifier(3200, 256, 128, classes)
    return nn.Sequential(*_stage(shape[0], 64), *_stage(64, 128), *hidden, Dropout(0.6), head)


def lenet(shape: Shape, classes: int) -> nn.Sequential:
    """The network of BPFed's repository for CIFAR-10."""
    require_side("lenet", shape, 32)
    return nn.Sequential(*_stage(shape[0], 6), *_stage(6, 16), *classifier(400, 120, 84, classes))


def lenet_nopool2(shape: Shape, classes: int) -> nn.Sequential:
    """LeNet as that repository has it for its Bayesian methods: without the second pooling."""
    require_side("lenet_nopool2", shape, 32)
    return nn.Sequential(*_stage(shape[0], 6), nn.Conv2d(6, 16, 5), nn.ReLU(), *classifier(1600, 120, 84, classes))


def convnet_emnist(shape: Shape, classes: int) -> nn.Sequential:
    """FedEM's network for EMNIST, read as FedHB's "standard ConvNet with two hidden layers"."""
    require_side("convnet_emnist", shape, 28)
    return nn.Sequential(*_stage(shape[0], 32), *_stage(32, 64), *classifier(1024, 2048, classes))
