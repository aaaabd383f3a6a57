"""A grid file to a list of jobs: union of tasks, product of axes, paper defaults, overrides, clear errors.

Settings are laid over each other, later wins: the method's defaults, the paper's common settings, the paper's settings
for the method, the paper's overrides, the grid's `set`, the task, the point on the axes, the method's own settings in
the grid, the grid's overrides, the command line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedbench.errors import FedbenchError, did_you_mean, explain
from fedbench.job import JobSpec, build_job, default_settings, known_settings
from fedbench.paper import Override, load_paper
from fedbench.selector import parse_assignment, parse_selector, parse_value, read_yaml, split_list
from fedbench.smoke import SUFFIX, smoke_axes, smoke_settings

Settings = dict[str, Any]


class MethodEntry(BaseModel):
    """A method of a grid, with the settings the grid gives it."""

    name: str
    settings: Settings = {}


class Grid(BaseModel):
    """A grid file as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str = ""
    paper: str | None = None
    methods: list[MethodEntry] = Field(min_length=1)
    tasks: list[Settings] = Field(min_length=1, description="a union: each is a task of its own")
    set: Settings = {}
    axes: dict[str, list[Any]] = Field({}, description="a product: every combination is run")
    overrides: list[Override] = []
    exclude: list[Settings] = []
    smoke: bool = Field(False, description="few rounds on synthetic data of the same shape: shows that all of it works")
    smoke_set: Settings = Field({}, description="what a smoke test sets besides: less of what takes long")

    @field_validator("methods", mode="before")
    @classmethod
    def _read_methods(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list such as [fedavg, {fedprox: {mu: 0.01}}]")
        return [_read_method(entry) for entry in value]

    @field_validator("axes")
    @classmethod
    def _no_empty_axis(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in value.items():
            if not values:
                raise ValueError(f"axis {key!r} has no values, so the grid has no jobs")
        return value

    @field_validator("tasks")
    @classmethod
    def _no_list_in_a_task(cls, value: list[Settings]) -> list[Settings]:
        for task in value:
            for key, setting in task.items():
                if isinstance(setting, (list, dict)):
                    raise ValueError(f"{key} has several values; put them under `axes: {{{key}: [...]}}`")
        return value


def _read_method(entry: Any) -> MethodEntry:
    if isinstance(entry, MethodEntry):
        return entry
    if isinstance(entry, str):
        name, settings = parse_selector(entry)
        return MethodEntry(name=name, settings=settings)
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, settings),) = entry.items()
        if isinstance(settings, dict) or settings is None:
            return MethodEntry(name=str(name), settings=settings or {})
    raise ValueError("a method is a name or {name: {setting: value}}")


@dataclass(frozen=True)
class Changes:
    """What the command line changes in a grid."""

    set: Sequence[str] = ()
    axes: Sequence[str] = ()
    methods: str = ""


def grid_names() -> list[str]:
    """The grids that ship."""
    return sorted(
        item.name.removesuffix(".yaml")
        for item in resources.files("fedbench.grids").iterdir()
        if item.name.endswith(".yaml")
    )


def load_grid(where: str) -> Grid:
    """The grid at this path, or else the shipped grid of this name; raises FedbenchError for a bad one.

    Every shipped grid has a twin with `_smoke` behind its name.
    """
    path = Path(where)
    base = path.name.removesuffix(".yaml").removesuffix(SUFFIX)
    if not path.is_file() and base in grid_names() and path.name.removesuffix(".yaml") == base + SUFFIX:
        grid = load_grid(base)
        title = f"Smoke test on synthetic data: {grid.title or base}"
        return grid.model_copy(update={"name": base + SUFFIX, "title": title, "smoke": True})
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FedbenchError(f"{where} cannot be read: {error}") from None
    elif (name := path.name.removesuffix(".yaml")) in grid_names() and path.parent == Path():
        text = resources.files("fedbench.grids").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise FedbenchError(
            f"no grid file {where!r}, and no shipped grid of that name.", did_you_mean(where, grid_names())
        )
    return parse_grid(text, where)


def parse_grid(text: str, where: str) -> Grid:
    """A grid from YAML text; `where` names it in errors."""
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        raise FedbenchError(f"{where} is not YAML: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise FedbenchError(f"{where} is not a grid: it must have name, methods and tasks.", "See `fedbench grids`.")
    for key in content:
        if key not in Grid.model_fields:
            raise FedbenchError(f"{where}: unknown key {key!r}.", did_you_mean(str(key), Grid.model_fields))
    try:
        return Grid.model_validate(content)
    except ValidationError as error:
        raise FedbenchError(f"{where} is not a grid:\n{explain(error)}") from None
    except FedbenchError as error:
        raise FedbenchError(f"{where}: {error.message}", error.hint) from None


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def change_grid(grid: Grid, changes: Changes) -> tuple[Grid, Settings]:
    """The grid with the command line's methods and axes, and the settings that it sets for all jobs."""
    settings = dict(parse_assignment(text) for text in changes.set)
    axes = {key: values for key, values in grid.axes.items() if key not in settings}
    for text in changes.axes:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise FedbenchError(f"--axis {text!r} is not of the form key=value,value.")
        axes[key.strip()] = [parse_value(value) for value in split_list(values)]
        if not axes[key.strip()]:
            raise FedbenchError(f"--axis {text!r} has no values.")
    if both := sorted(settings.keys() & {text.partition("=")[0].strip() for text in changes.axes}):
        raise FedbenchError(f"--set and --axis both name {both[0]}.", "Give it once.")
    methods = grid.methods
    if changes.methods:
        methods = [_read_method(text) for text in split_list(changes.methods)]
    return grid.model_copy(update={"axes": axes, "methods": methods}), settings


def expand(grid: Grid, changes: Changes | None = None) -> list[JobSpec]:
    """All jobs of the grid, each once, in the grid's order; raises FedbenchError for any that is not valid."""
    changed, command_line = change_grid(grid, changes or Changes())
    _check_keys(grid, changed, command_line)
    jobs: dict[str, JobSpec] = {}
    if grid.smoke:
        changed = changed.model_copy(update={"tasks": changed.tasks[:1], "axes": smoke_axes(changed.axes)})
    for settings in _points(changed, command_line):
        if grid.smoke:
            short = merge_layers(smoke_settings(settings), grid.smoke_set, command_line)
            settings = _without_foreign(short, settings["method"], explicit=set())
        job = build_job(settings)
        jobs.setdefault(job.key, job)
    if not jobs:
        raise FedbenchError(f"grid {grid.name} has no jobs: everything is excluded.")
    return list(jobs.values())


def _points(grid: Grid, command_line: Settings) -> Iterator[Settings]:
    paper = load_paper(grid.paper) if grid.paper else None
    for task, method, *values in itertools.product(grid.tasks, grid.methods, *grid.axes.values()):
        point = dict(zip(grid.axes, values, strict=True))
        of_paper = merge_layers(paper.set, paper.methods.get(method.name, {})) if paper else {}
        of_grid = merge_layers(grid.set, task, point, {"method": method.name, **method.settings})
        written = merge_layers(of_paper, of_grid, command_line)
        defaults = default_settings(method.name, written.get("partition"))
        if paper:
            of_paper = merge_layers(of_paper, _overridden(paper.overrides, {**defaults, **written}))
        seen = {**defaults, **merge_layers(of_paper, of_grid, command_line)}
        settings = merge_layers(of_paper, of_grid, _overridden(grid.overrides, seen), command_line)
        if any(matches(excluded, {**defaults, **settings}) for excluded in grid.exclude):
            continue
        resolved = _with_rounds(settings, defaults)
        yield _without_foreign(resolved, method.name, explicit={*method.settings})


def merge_layers(*layers: Mapping[str, Any]) -> Settings:
    """The layers over each other, the last on top. Rounds and an epoch budget say the same: the upper one wins."""
    merged: Settings = {}
    for layer in layers:
        for one, other in (("rounds", "epoch_budget"), ("epoch_budget", "rounds")):
            if one in layer and other not in layer:
                merged.pop(other, None)
        merged |= _spelled_out(layer)
    return merged


def _spelled_out(layer: Mapping[str, Any]) -> Settings:
    """`partition: shards[s=5]` as a partition and its settings, in the layer that says so."""
    if isinstance(partition := layer.get("partition"), (list, dict, set)):
        raise FedbenchError(f"partition must be one name (got {partition!r}).", "Put several under `axes`.")
    if not isinstance(partition, str):
        return dict(layer)
    name, inner = parse_selector(partition)
    return {**inner, **layer, "partition": name}


def _with_rounds(settings: Settings, defaults: Settings) -> Settings:
    """Rounds from an epoch budget, where nobody names rounds."""
    resolved = dict(settings)
    budget = resolved.pop("epoch_budget", None)
    if budget is None or resolved.get("rounds") is not None:
        return resolved
    counts = {"epoch_budget": budget, "tau": resolved.get("tau", defaults["tau"])}
    for key, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise FedbenchError(f"{key} must be a whole number of at least 1 (got {value!r}).")
    return {**resolved, "rounds": max(1, counts["epoch_budget"] // counts["tau"])}


def _without_foreign(settings: Settings, method: str, explicit: set[str]) -> Settings:
    """Drop the settings of other methods that a common layer gives to all (`--set mu=0.1` concerns FedProx only)."""
    known = known_settings(method, settings.get("partition"))
    return {key: value for key, value in settings.items() if key in known or key in explicit}


def _check_keys(written: Grid, changed: Grid, command_line: Settings) -> None:
    """A key that no method, partition or protocol of the grid has is a typo."""
    axes = [{key: value} for key, values in changed.axes.items() for value in values]
    places: list[tuple[str, Mapping[str, Any]]] = [
        ("--set", command_line),
        *(("axes", point) for point in axes),
        ("set", written.set),
        *(("tasks", task) for task in written.tasks),
        *(("overrides", override.set) for override in written.overrides),
        ("smoke_set", written.smoke_set),
    ]
    layers = [(place, _spelled_out(layer)) for place, layer in places]
    for place, layer in layers:
        if "method" in layer:
            raise FedbenchError(f"grid {written.name}, {place}: method is not a setting.", "Use `methods`.")
    partitions = {layer.get("partition") for _, layer in layers} | {None}
    if written.paper:
        partitions.add(_spelled_out(load_paper(written.paper).set).get("partition"))
    layers += [("overrides", override.match) for override in written.overrides]
    layers += [("exclude", dict(excluded)) for excluded in written.exclude]
    known = {"epoch_budget"}.union(
        *(
            known_settings(method.name, partition)
            for method in (*written.methods, *changed.methods)
            for partition in partitions
        )
    )
    for place, layer in layers:
        for key in layer:
            if key not in known:
                raise FedbenchError(
                    f"grid {written.name}, {place}: unknown setting {key!r}.", did_you_mean(str(key), known)
                )


def _overridden(overrides: Sequence[Override], settings: Settings) -> Settings:
    return {k: v for override in overrides if matches(override.match, settings) for k, v in override.set.items()}


def matches(pattern: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether every setting of the pattern is the given one, or one of a list."""
    return all(
        settings.get(key) in wanted if isinstance(wanted, list) else settings.get(key) == wanted
        for key, wanted in pattern.items()
    )
