"""The papers' networks, by name, on one flat parameter buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedbench.errors import FedbenchError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    Shape = tuple[int, int, int]
    Builder = Callable[[Shape, int], nn.Module]

# name -> (module of this package, function that builds it). Imported on use, because torch is slow to import.
_MODELS = {
    "cnn5": ("conv", "cnn5"),
    "dnn100": ("mlp", "dnn100"),
    "logreg": ("mlp", "logreg"),
    "mlp256": ("mlp", "mlp256"),
    "vgg_s": ("conv", "vgg_s"),
}


def model_names() -> list[str]:
    return sorted(_MODELS)


def check_model(name: str) -> None:
    """Raises FedbenchError when no such model ships."""
    if name not in _MODELS:
        raise FedbenchError(f"unknown model {name!r}.", did_you_mean(name, _MODELS))


def build_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """A fresh module for images of this shape; its last child is the head."""
    import importlib

    check_model(name)
    module, function = _MODELS[name]
    builder: Builder = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return builder(shape, classes)
