"""Which runs belong to a cell of a paper's table: those whose settings are the paper's, whoever asked for them."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pandas as pd

from fedbench.grid import matches, merge_layers
from fedbench.job import JobSpec, Protocol, TaskSpec
from fedbench.paper import Paper

FREE = frozenset({"rounds", "eval_every", "mc_every", "mc_samples"})
"""Settings in which a run may differ from its paper: fewer rounds make it partial, the others only say what is scored.
"""

ENGINE_DEFAULTS = {
    name: field.default for section in (TaskSpec, Protocol) for name, field in section.model_fields.items()
}
"""What an override may match although the paper does not state it. A method's own defaults would need its code."""

Place = tuple[tuple[str, Any], ...]
"""Where a cell stands in the table, as settings: (("dataset", "mnist"), ("size", "small"))."""


@dataclass(frozen=True)
class Sorted:
    """The runs of a database as a paper's table sees them."""

    cells: dict[tuple[str, Place], list[int]] = field(default_factory=dict)
    """(method, place) -> runs with the paper's settings"""
    others: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """run on one of the table's places -> its method, and the settings in which it differs from the paper"""


def expected_settings(paper: Paper, method: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """What the paper says of a method at a place: its common settings, the method's, its overrides, the place's own."""
    stated = merge_layers(paper.set, paper.methods.get(method, {}))
    seen = {**ENGINE_DEFAULTS, **stated, **place, "method": method}
    overrides = [override.set for override in paper.overrides if matches(override.match, seen)]
    return merge_layers(stated, *overrides, place, {"method": method})


def expected_rounds(settings: Mapping[str, Any]) -> int | None:
    """The rounds that the paper trains, also where it gives a budget of epochs; None if it does not say."""
    if (rounds := settings.get("rounds")) is not None:
        return int(rounds)
    budget = settings.get("epoch_budget")
    return None if budget is None else max(1, int(budget) // int(settings.get("tau", ENGINE_DEFAULTS["tau"])))


def differences(spec: JobSpec, expected: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that keep a run out of a cell, sorted; none if it belongs."""
    settings = spec.settings
    unequal = {key for key, value in expected.items() if key in settings and not _equal(settings[key], value)}
    unexpected = {key for key in spec.changed if key not in expected}
    return tuple(sorted((unequal | unexpected) - FREE))


def sort_runs(specs: Mapping[int, JobSpec], paper: Paper, places: list[Place]) -> Sorted:
    """Put every run into the cells that it belongs to."""
    found = Sorted()
    for run, spec in specs.items():
        settings = spec.settings
        here = [place for place in places if all(key in settings and settings[key] == value for key, value in place)]
        for place in here:
            unlike = differences(spec, expected_settings(paper, spec.method, dict(place)))
            if unlike:
                found.others[run] = spec.method, unlike
            else:
                found.cells.setdefault((spec.method, place), []).append(run)
    return found


def newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Of measured runs of one method with the same settings: those of its newest version, one per seed."""
    latest = runs[runs["version"] == runs["version"].max()]
    return latest.sort_values("run").drop_duplicates("seed", keep="last").sort_values("seed")


def comparable(runs: pd.DataFrame, rounds: int | None) -> pd.DataFrame:
    """Of measured runs of a cell: the newest of equal length, that of the paper if there are such, else the longest."""
    latest = runs[runs["version"] == runs["version"].max()]
    lengths = set(latest["rounds"])
    length = rounds if rounds in lengths else max(lengths)
    return newest(latest[latest["rounds"] == length])


def is_implemented(method: str) -> bool:
    """Whether there is a file or an entry point for the method. It is not imported: that would import torch."""
    package = "fedbench.algorithms"
    folders = [*import_module(package).__path__, *os.environ.get("FEDBENCH_PLUGINS", "").split(os.pathsep)]
    files = {module.name for module in pkgutil.iter_modules([folder for folder in folders if folder])}
    return method in files or method in importlib.metadata.entry_points(group=package).names


def _equal(value: Any, written: Any) -> bool:
    """Whether a job's value is what a paper writes; a list may be written as its only item."""
    if not isinstance(value, list | tuple):
        return bool(value == written)
    return list(value) == (list(written) if isinstance(written, list | tuple) else [written])
