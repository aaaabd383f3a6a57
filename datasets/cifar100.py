"""CIFAR-100: 60,000 colour images of 100 classes, 32x32, with their fine labels."""

from __future__ import annotations

from typing import ClassVar

from fedbench.sources import Package

from .cifar10 import Cifar10


class Cifar100(Cifar10):
    title = "CIFAR-100"
    classes = 100
    sha256 = None  # not known; every original file is held against torchvision's MD5
    sizes: ClassVar[dict[str, tuple[int, int]]] = {}
    packages: ClassVar[tuple[Package, ...]] = ()
    reader = "CIFAR100"
    folder = "cifar-100-python"
    archive = "cifar-100-python.tar.gz"
    label_key = "fine_labels"
