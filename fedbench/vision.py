"""The one door to torchvision.

PyPI's torchvision is built for CUDA; beside a CPU-only torch its C++ operators do not load, and importing it fails with
"operator torchvision::nms does not exist". Data sets and transforms need none of these operators: declaring the two
schemas that the import looks for is enough. Where torchvision imports as it is, nothing happens.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

_kept_alive: list[Any] = []  # the schemas vanish with the Library object that declared them


@cache
def torchvision_datasets() -> ModuleType:
    """The module `torchvision.datasets`, imported on first use."""
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    import sys

    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half-imported
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept_alive.append(library)
    return importlib.import_module("torchvision.datasets")
