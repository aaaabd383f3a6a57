"""How a partition cuts a data set: every client's labels as a table, a summary, and a bubble plot. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedbench.errors import FedbenchError
from fedbench.partition import Indices, get_partition
from fedbench.report.save import save_figure
from fedbench.report.styles import COLOURS
from fedbench.selector import parse_selector
from fedbench.split import cut_with, make_partition

Counts = NDArray[np.int64]
"""[clients, classes]"""

MOST_ENTRIES = 12
"""Entries of a histogram that a line of the table can hold."""
LARGEST_CELL, LARGEST_PANEL, SMALLEST_PANEL = 0.35, (16.0, 10.0), (4.0, 2.5)
"""Inches of the plot: side of the cell for a client and a class; width and height of all cells."""
TICKS_PER_INCH = (3, 5)
POINTS_PER_INCH = 72


@dataclass(frozen=True)
class SplitView:
    """The numbers of one split; what is drawn and printed comes from here."""

    dataset: str
    partition: str
    """with its settings as given: shards[s=5]"""
    settings: dict[str, Any]
    """all of them, those at their defaults too"""
    seed: int
    train: Counts
    test: Counts
    n_test: int
    """different test samples; clients may share them"""
    newcomers: tuple[int, ...]
    sha256: str

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.partition}, {len(self.train) - len(self.newcomers)} clients, seed {self.seed}"

    @property
    def file_name(self) -> str:
        return "-".join(re.sub(r"[^\w.+=]+", "_", part).strip("_") for part in ("split", *self.title.split(", ")))

    def rows(self) -> list[dict[str, Any]]:
        """A line per client: how many samples of how many classes, and which, as label:training/test."""
        return [
            {
                "client": f"{client} (new)" if client in self.newcomers else str(client),
                "train": int(train.sum()),
                "test": int(test.sum()),
                "classes": int((train > 0).sum()),
                "label:train/test": _histogram(train, test),
            }
            for client, (train, test) in enumerate(zip(self.train, self.test, strict=True))
        ]

    def summary(self) -> dict[str, Any]:
        """The whole split in a few numbers; sizes are those of training data."""
        sizes = self.train.sum(axis=1)
        return {
            "clients": len(self.train) - len(self.newcomers),
            "newcomers": len(self.newcomers),
            "train": int(sizes.sum()),
            "test": self.n_test,
            "single_class": int(((self.train > 0).sum(axis=1) == 1).sum()),
            "smallest": {"client": int(sizes.argmin()), "train": int(sizes.min())},
            "largest": {"client": int(sizes.argmax()), "train": int(sizes.max())},
            "split": self.sha256,
        }

    def summary_text(self) -> str:
        """The summary in one line, and the settings in another."""
        s = self.summary()
        newcomers = f" and {s['newcomers']} newcomers" if s["newcomers"] else ""
        return (
            f"{s['clients']} clients{newcomers}, {s['train']} training and {s['test']} test samples; "
            f"{s['single_class']} with a single class; smallest {s['smallest']['train']} (client "
            f"{s['smallest']['client']}), largest {s['largest']['train']} (client {s['largest']['client']}); "
            f"split {self.sha256[:16]}\n"
            f"{self.title}: {', '.join(f'{key}={value}' for key, value in self.settings.items())}"
        )

    def content(self) -> dict[str, Any]:
        """All of it for JSON: counts by label, without the zeros."""
        return {
            "dataset": self.dataset,
            "partition": self.partition,
            "settings": self.settings,
            "seed": self.seed,
            "summary": self.summary(),
            "clients": [
                {
                    "client": client,
                    "newcomer": client in self.newcomers,
                    "train": _by_label(fit),
                    "test": _by_label(held),
                }
                for client, (fit, held) in enumerate(zip(self.train, self.test, strict=True))
            ],
        }


def view_split(
    dataset: str, partition: str, clients: int, seed: int = 0, size: str | None = None, root: Path | None = None
) -> SplitView:
    """Cut a data set with a partition such as `shards[s=5]`; raises FedbenchError when that cannot be."""
    name, settings = parse_selector(partition)
    if size is not None:
        settings["size"] = size
    cut = make_partition(name, settings)
    found, arrays, split = cut_with(cut, dataset, clients, seed, root)
    if found.target_scale is not None:
        raise FedbenchError(f"{dataset} is regression: it has no labels to show.")
    given = ",".join(f"{key}={value}" for key, value in settings.items())
    return SplitView(
        dataset=dataset,
        partition=f"{name}[{given}]" if given else name,
        settings=get_partition(name).Params.model_validate(settings).model_dump(mode="json"),
        seed=seed,
        train=_counts(split.train, arrays.y, found.classes),
        test=_counts(split.test, arrays.y, found.classes),
        n_test=len(np.unique(np.concatenate(split.test))),
        newcomers=split.newcomers,
        sha256=split.sha256(),
    )


def plot_split(view: SplitView, folder: Path) -> list[Path]:
    """Draw the bubble plot; returns the files."""
    return save_figure(draw(view), folder, view.file_name)


def draw(view: SplitView) -> Figure:
    """A bubble per client and class; its area is the number of training samples. Newcomers have another colour."""
    clients, classes = view.train.shape
    cell = min(LARGEST_CELL, LARGEST_PANEL[0] / clients, LARGEST_PANEL[1] / classes)
    panel_size = (max(SMALLEST_PANEL[0], cell * clients), max(SMALLEST_PANEL[1], cell * classes))
    figure = Figure(figsize=(panel_size[0] + 1.8, panel_size[1] + 1.2), layout="constrained")
    panel = figure.subplots()
    widest = 0.95 * cell * POINTS_PER_INCH
    area = widest**2 / view.train.max()
    owner, label = np.nonzero(view.train)
    drawn = view.train[owner, label]
    colours = np.where(np.isin(owner, view.newcomers), COLOURS[1], COLOURS[0])
    bubbles = panel.scatter(owner, label, s=area * drawn, c=colours, linewidths=0)
    panel.set_xlim(-0.7, clients - 0.3)
    panel.set_ylim(-0.7, classes - 0.3)
    for axis, inches, ticks in zip((panel.xaxis, panel.yaxis), panel_size, TICKS_PER_INCH, strict=True):
        axis.set_major_locator(MaxNLocator(nbins=int(ticks * inches), steps=[1, 2, 5, 10], integer=True))
    panel.set_xlabel("client (newcomers in the second colour)" if view.newcomers else "client")
    panel.set_ylabel("class")
    panel.set_axisbelow(True)
    panel.grid(visible=True, alpha=0.3, linewidth=0.5)
    known = sorted({int(drawn.min()), int(drawn.min() + drawn.max()) // 2, int(drawn.max())})
    handles, texts = bubbles.legend_elements("sizes", num=known, color=COLOURS[0], func=lambda size: size / area)
    # room between the entries of a legend is in units of its letters
    spacing = 0.5 + widest / FontProperties(size="medium").get_size_in_points()
    figure.legend(
        handles, texts, title="training\nsamples", loc="outside right center", labelspacing=spacing, frameon=False
    )
    figure.suptitle(view.title)
    return figure


def _counts(parts: list[Indices], labels: Indices, classes: int) -> Counts:
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _by_label(counts: Counts) -> dict[str, int]:
    return {str(label): int(counts[label]) for label in np.flatnonzero(counts)}


def _histogram(train: Counts, test: Counts) -> str:
    """`0-4:50/950 7:10/2`: neighbours with the same counts share an entry; too many entries become their range."""
    present = np.flatnonzero(train + test)
    # labels that follow each other without a gap have the same distance to their place
    runs = groupby(enumerate(present), key=lambda item: (item[1] - item[0], train[item[1]], test[item[1]]))
    entries = []
    for (_, fit, held), members in runs:
        labels = [int(label) for _, label in members]
        name = f"{labels[0]}-{labels[-1]}" if len(labels) > 1 else f"{labels[0]}"
        entries.append(f"{name}:{fit}/{held}")
    if len(entries) <= MOST_ENTRIES:
        return " ".join(entries)
    ranges = "/".join(f"{counts[present].min()}-{counts[present].max()}" for counts in (train, test))
    return f"{len(present)} labels with {ranges} each"
