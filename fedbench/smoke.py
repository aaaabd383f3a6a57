"""A grid's smoke twin: the same methods and settings for a moment, on made-up data of the same shape.

It shows that everything a grid names works together, not how well. The name of the data set, `synthetic[...]`, says so
wherever the results appear, and no published number is compared with them.
"""

from __future__ import annotations

from typing import Any

from fedbench.dataset import find_dataset

SUFFIX = "_smoke"

FEW_CLASSES = 20
"""Up to here a stand-in has the images that ten clients need; of more classes it has only a few of each."""
SHORT = {"rounds": 2, "local_unit": "batch", "tau": 1, "eval_every": 1, "mc_samples": 2}


def smoke_axes(axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """One point on the axes: the first value of each."""
    return {key: values[:1] for key, values in axes.items()}


def smoke_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a job, shortened, with stand-ins for its data sets. Data that comes with fedbench stays."""
    short = {**settings, **SHORT}
    for key in ("dataset", "clean", "ood"):
        if settings.get(key):
            short[key] = stand_in(str(settings[key]))
    if "clients" in settings:
        few = find_dataset(str(settings["dataset"])).classes <= FEW_CLASSES
        short["clients"] = min(int(settings["clients"]), 10 if few else 4)
    if settings.get("adapt_epochs"):
        short["adapt_epochs"] = settings["adapt_epochs"][:1] if settings["adapt_epochs"][0] == 0 else [1]
    return short


def stand_in(name: str) -> str:
    """Made-up data with the shape, the classes and the groups of a data set."""
    dataset = find_dataset(name)
    if dataset.embedded:
        return name
    per_class = 60 if dataset.classes <= FEW_CLASSES else 20
    if dataset.shape[:2] == (1, 1):  # rows of a table cost nothing, and ten clients of `class_ratio` want many
        per_class = 8000
    settings = {
        "classes": dataset.classes,
        "shape": "x".join(str(side) for side in dataset.shape),
        "per_class": per_class,
        "groups": dataset.groups,
    }
    return f"synthetic[{','.join(f'{key}={value}' for key, value in settings.items())}]"
