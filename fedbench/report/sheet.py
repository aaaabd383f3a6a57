"""Contact sheets: the first images of a data set with their labels, to see with one's own eyes what is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedbench.dataset import Arrays, Dataset, data_root, find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.partition.clusters import Clusters, WithCopies
from fedbench.report.save import save_figure
from fedbench.selector import parse_selector
from fedbench.split import make_partition

COLUMNS = 10
FEW_CLASSES = 20
"""Up to here a class has a row of its own; of more classes each has one image, ten in a row."""
FEW_GROUPS = 3
"""Up to here a group has a panel of its own; of more groups each has a row, under ten classes."""
CELL = 0.5
"""Inches of an image's side."""
LETTER = 0.08
"""Inches of a letter of a row's name."""
GAP = 0.06
"""White between images, in sides of an image."""

Pixels = NDArray[np.float64]
"""[height, width, 3] in [0, 1]"""


@dataclass(frozen=True)
class Panel:
    """Images in rows: for every place the sample that is shown there, -1 for none."""

    title: str
    samples: NDArray[np.int64]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str
    column_name: str = ""


def draw_sheet(name: str, partition: str | None, folder: Path, root: Path | None = None) -> list[Path]:
    """Draw the data set, or what clients see of it under a partition such as `clusters[reverse=rot180]`; the files.

    Raises FedbenchError when it has no images.
    """
    dataset = find_dataset(name)
    _check_images(dataset)
    arrays, groups = load_arrays(dataset, root or data_root()), dataset.group_names
    parts = [dataset.name()]
    if partition is not None:
        cut = make_partition(*parse_selector(partition))
        arrays = cut.prepare(arrays, dataset)
        parts.append(partition)
        if isinstance(cut, Clusters) and isinstance(arrays, WithCopies):
            groups = ("as it is", f"reversed ({cut.params.reverse})")
    figure = draw(arrays, panels(arrays, dataset.classes, groups), dataset.full_scale, ", ".join(parts))
    return save_figure(
        figure, folder, "-".join(re.sub(r"[^\w.+=]+", "_", part).strip("_") for part in ("sheet", *parts))
    )


def draw(arrays: Arrays, shown: list[Panel], full_scale: int, title: str) -> Figure:
    """A montage for every panel, side by side."""
    height, width = arrays.x.shape[2:]
    cell = CELL / min(height, width)
    rows, columns = (max(panel.samples.shape[axis] for panel in shown) for axis in (0, 1))
    beside = 1.0 + LETTER * max(len(name) for panel in shown for name in panel.rows)
    size = (len(shown) * ((1 + GAP) * columns * width * cell + beside), (1 + GAP) * rows * height * cell + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        picture = montage(arrays, panel, full_scale)
        axes.imshow(picture, interpolation="nearest")
        for set_ticks, length, names in (
            (axes.set_yticks, picture.shape[0], panel.rows),
            (axes.set_xticks, picture.shape[1], panel.columns),
        ):
            set_ticks((np.arange(len(names)) + 0.5) * length / len(names) - 0.5, names)
        axes.set_ylabel(panel.row_name)
        axes.set_xlabel(panel.column_name)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(panel.title)
    figure.suptitle(title)
    return figure


def panels(arrays: Arrays, classes: int, group_names: tuple[str, ...] = ()) -> list[Panel]:
    """Which images are shown where: the first ones of every class, or of every group and class."""
    if arrays.group is None:
        return [_panel("", np.arange(len(arrays.y)), arrays, classes)]
    present = np.unique(arrays.group)
    names = [group_names[group] if group < len(group_names) else f"group {group}" for group in present]
    groups = [np.flatnonzero(arrays.group == group) for group in present]
    if len(groups) <= FEW_GROUPS:
        return [_panel(name, own, arrays, classes) for name, own in zip(names, groups, strict=True)]
    labels = np.unique(np.linspace(0, classes - 1, COLUMNS).round().astype(int))
    samples = np.stack([np.concatenate([_first(arrays, own, label, 1) for label in labels]) for own in groups])
    return [Panel("", samples, tuple(names), tuple(map(str, labels)), "group", "class")]


def _panel(title: str, members: NDArray[np.int64], arrays: Arrays, classes: int) -> Panel:
    """Ten images of every class; of many classes one, so that row and column add up to its number."""
    if classes <= FEW_CLASSES:
        samples = np.stack([_first(arrays, members, label, COLUMNS) for label in range(classes)])
        return Panel(title, samples, tuple(map(str, range(classes))), ("",) * COLUMNS, "class")
    rows = -(-classes // COLUMNS)
    samples = np.concatenate([_first(arrays, members, label, 1) for label in range(rows * COLUMNS)])
    starts = tuple(str(row * COLUMNS) for row in range(rows))
    return Panel(title, samples.reshape(rows, COLUMNS), starts, tuple(f"+{place}" for place in range(COLUMNS)), "class")


def _first(arrays: Arrays, members: NDArray[np.int64], label: int, n: int) -> NDArray[np.int64]:
    """The first `n` members of a class; -1 for those that are not there."""
    found = members[arrays.y[members] == label][:n]
    return np.concatenate([found, np.full(n - len(found), -1)])


def montage(arrays: Arrays, panel: Panel, full_scale: int) -> Pixels:
    """The panel's images as one picture; white where there is none, and between them."""
    (rows, columns), (height, width) = panel.samples.shape, arrays.x.shape[2:]
    gap = max(1, round(GAP * max(height, width)))
    picture = np.ones((rows * (height + gap), columns * (width + gap), 3))
    for (row, column), sample in np.ndenumerate(panel.samples):
        if sample >= 0:
            top, left = row * (height + gap) + gap // 2, column * (width + gap) + gap // 2
            image = arrays.x[sample].transpose(1, 2, 0) / full_scale
            picture[top : top + height, left : left + width] = image  # one channel is grey
    return picture.clip(0, 1)


def _check_images(dataset: type[Dataset]) -> None:
    channels, height, width = dataset.shape
    if channels not in (1, 3) or min(height, width) < 2 or dataset.target_scale is not None:
        raise FedbenchError(
            f"{dataset.name()} has no images to draw: its samples are {channels}x{height}x{width}.",
            "A contact sheet needs grey or colour images.",
        )
