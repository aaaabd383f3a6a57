"""The papers' networks, by name, on one flat parameter buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbench.errors import FedbenchError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from fedbench.models.norm import Norm
    from fedbench.models.shape import Shape

# name -> (module of this package, function that builds it). Imported on use, because torch is slow to import.
_MODELS = {
    "blr": ("bayesian", "blr"),
    "bnn100": ("bayesian", "bnn100"),
    "cnn5": ("conv", "cnn5"),
    "cnn5_100": ("conv", "cnn5_100"),
    "convnet_emnist": ("conv", "convnet_emnist"),
    "dnn100": ("mlp", "dnn100"),
    "lenet": ("conv", "lenet"),
    "lenet_nopool2": ("conv", "lenet_nopool2"),
    "linear": ("mlp", "linear"),
    "logreg": ("mlp", "logreg"),
    "mlp2": ("mlp", "mlp2"),
    "mlp256": ("mlp", "mlp256"),
    "mlp3072": ("mlp", "dnn100"),  # BNFed's network for CIFAR-10: the same layers on 3072 inputs
    "mlp_fedrep": ("mlp", "mlp_fedrep"),
    "mobilenet_cifar": ("mobilenet", "mobilenet_cifar"),
    "resnet18_cifar": ("resnet", "resnet18_cifar"),
    "vgg_s": ("vgg", "vgg_s"),
    "vgg_s_512": ("vgg", "vgg_s_512"),
    "vgg_s_single": ("vgg", "vgg_s_single"),
}
_NORMALISED = {"mobilenet", "resnet", "vgg"}
"""Modules of this package whose networks have normalisation layers: their builders are told which."""


def model_names() -> list[str]:
    return sorted(_MODELS)


def check_model(name: str) -> None:
    """Raises FedbenchError when no such model ships."""
    if name not in _MODELS:
        raise FedbenchError(f"unknown model {name!r}.", did_you_mean(name, _MODELS))


def build_model(name: str, shape: Shape, classes: int, norm: Norm = "bn_nostats") -> nn.Sequential:
    """A fresh module for images of this shape; its last child is the head. Raises FedbenchError if they do not fit."""
    import importlib

    import torch

    check_model(name)
    module, function = _MODELS[name]
    builder = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    choices = (norm,) if module in _NORMALISED else ()
    with torch.random.fork_rng(devices=[]):  # layers fill themselves from the global generator when they are made
        built: nn.Sequential = builder(shape, classes, *choices)
    return built
