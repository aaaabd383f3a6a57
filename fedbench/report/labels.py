"""Names for people: what tells the shown runs apart, and how papers print a method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedbench.job import JobSpec, canonical_json
from fedbench.paper import load_paper, paper_names

NUMBERS_DEPEND_ON = ("rounds", "rule", "headline")
"""Protocol settings without which a number cannot be read: shown for themselves whenever they vary, not in a label."""


def task_settings(spec: JobSpec) -> dict[str, Any]:
    """The settings that make the task: data set and size first, then the others.

    Not what is trained of the network: that is how a method works on the task (FedBABU trains the body).
    """
    settings = {**spec.task.model_dump(exclude={"train_part"}), **spec.partition_params}
    first = {key: settings.pop(key) for key in ("dataset", "size") if key in settings}
    return first | settings


def axes(specs: Sequence[JobSpec]) -> tuple[str, ...]:
    """The settings that tell the tasks of these runs apart, and those that their numbers depend on, if they vary.

    Beyond data set and size, a setting that follows from those before it (20 clients on CIFAR-10 only) is not listed.
    """
    tasks = [task_settings(spec) for spec in specs]
    kept = [key for key in ("dataset", "size") if _distinct(tasks, [key]) > 1]
    for key in dict.fromkeys(key for task in tasks for key in task):
        if _distinct(tasks, [*kept, key]) > _distinct(tasks, kept):
            kept.append(key)
    protocols = [spec.protocol.model_dump() for spec in specs]
    return (*kept, *(key for key in NUMBERS_DEPEND_ON if _distinct(protocols, [key]) > 1))


def facts(specs: Sequence[JobSpec]) -> tuple[tuple[str, Any], ...]:
    """The settings that a reader wants to know and that all these runs share, with their values."""
    wanted = ("dataset", "size", "clients", "partition", "model", *NUMBERS_DEPEND_ON)
    settings = [spec.settings for spec in specs]
    return tuple((key, settings[0][key]) for key in wanted if key in settings[0] and _distinct(settings, [key]) == 1)


def labels(specs: Sequence[JobSpec]) -> list[str]:
    """For every run its method with the settings that differ between runs of the method on the same task.

    Written as grids and `--methods` read it: `fedprox[mu=0.01]`.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for spec in specs:
        groups.setdefault((spec.method, canonical_json(task_settings(spec))), []).append(_own_settings(spec))
    varying: dict[str, list[str]] = {}
    for (method, _), settings in groups.items():
        keys = dict.fromkeys(key for one in settings for key in one)
        varying.setdefault(method, []).extend(key for key in keys if _distinct(settings, [key]) > 1)
    return [_label(spec, list(dict.fromkeys(varying[spec.method]))) for spec in specs]


def method_title(method: str, paper: str | None = None) -> str:
    """The method's name as the paper prints it, or else any paper that ships; its own name if none does."""
    for name in dict.fromkeys([*([paper] if paper else []), *paper_names()]):
        for printed, ours in load_paper(name).method_names.items():
            if ours == method:
                return printed
    return method


def place_of(spec: JobSpec, where: Sequence[str]) -> tuple[str, ...]:
    """The run's values of these settings as text; a dash for one that its partition or method does not have."""
    settings = spec.settings
    return tuple(plain(settings[key]) if key in settings else "-" for key in where)


def plain(value: Any) -> str:
    """A setting as grids and the command line read it."""
    if isinstance(value, list | tuple):
        return "/".join(plain(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    short = f"{value:g}" if isinstance(value, float) else str(value)
    # two settings that differ must not look the same: their runs would share a row
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def _own_settings(spec: JobSpec) -> dict[str, Any]:
    """What may tell two runs of a method on the same task apart."""
    elsewhere = {"method", "seed", *NUMBERS_DEPEND_ON}
    return {key: value for key, value in spec.settings.items() if key not in elsewhere}


def _label(spec: JobSpec, keys: Iterable[str]) -> str:
    settings = spec.settings
    inner = ",".join(f"{key}={plain(settings[key])}" for key in keys if key in settings)
    return f"{spec.method}[{inner}]" if inner else spec.method


def _distinct(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> int:
    return len({canonical_json([row.get(key) for key in keys]) for row in rows})
