"""Fashion-MNIST: 70,000 articles of clothing in MNIST's format."""

from __future__ import annotations

from typing import ClassVar

from fedbench.sources import Package

from .mnist import Mnist


class FashionMnist(Mnist):
    title = "Fashion-MNIST"
    sha256 = "e392978bb1a965632d9dc4af68a0cb381c7de556075ce742567f0d50ba6e2bc3"
    packages: ClassVar[tuple[Package, ...]] = (Package("apt", "dataset-fashion-mnist", size=30_900_652),)
    reader = "FashionMNIST"
