"""Papers as data: protocol, per-method settings, table layouts, aliases and published numbers, one YAML each."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbench.errors import FedbenchError, did_you_mean, explain

XAxis = Literal["rounds", "bytes", "seconds"]
"""What curves are drawn against."""


class Override(BaseModel):
    """Settings for the jobs that match: every key equal, or one of a list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: dict[str, Any] = Field(min_length=1)
    set: dict[str, Any] = Field(min_length=1)


class TableLayout(BaseModel):
    """How a paper's table is laid out, and which grids fill it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    entries: list[str] = Field([], description="how the published numbers name the table; default: its own key")
    columns: list[str] = Field(description="published keys that make the columns, outermost first")
    metric: str = Field("acc", description="the published metric")
    views: list[Literal["PM", "GM"]] = ["PM", "GM"]
    grids: dict[str, str] = Field(description="our data set -> the grid that fills its cells")


class PanelLayout(BaseModel):
    """A panel of a figure: which runs of a grid it shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    grid: str = Field(description="the grid that fills it")
    match: dict[str, Any] = Field({}, description="which of its runs: every key equal, or one of a list")
    view: Literal["PM", "GM"] = "GM"


class FigureLayout(BaseModel):
    """A figure of a paper: curves, mean and band over seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    panels: list[PanelLayout] = Field(min_length=1)
    lines: list[str] = Field([], description="of the paper's `lines`; default: a line per method of a panel's grid")
    metric: str = "accuracy"
    x: XAxis = Field("rounds", description="against what: rounds, bytes sent, or seconds of computation")
    y_label: str = Field("", description="what the metric means here; default: its name")
    log: bool = Field(False, description="logarithmic y axis")


class Paper(BaseModel):
    """Everything fedbench knows of a paper but its numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    set: dict[str, Any] = Field(description="task and protocol of all jobs")
    methods: dict[str, dict[str, Any]] = Field(description="settings per method")
    overrides: list[Override] = []
    method_names: dict[str, str] = Field(description="printed method name -> our method")
    dataset_names: dict[str, str] = Field(description="printed data set name -> our data set")
    tables: dict[str, TableLayout] = {}
    lines: dict[str, dict[str, Any]] = Field(
        {}, description="line of a figure as printed -> its settings; their order gives them a look of their own"
    )
    figures: dict[str, FigureLayout] = {}

    @model_validator(mode="after")
    def _figures_have_known_lines(self) -> Self:
        for name, figure in self.figures.items():
            if unknown := [line for line in figure.lines if line not in self.lines]:
                raise ValueError(f"figure {name} has the line {unknown[0]!r}, which is not under `lines`")
        return self


class Published(BaseModel):
    """One number that a paper prints."""

    model_config = ConfigDict(extra="allow", frozen=True)

    table: str
    method: str
    dataset: str
    metric: str
    model: str
    unit: str
    mean: float | str | None
    std: float | None = None
    uncertain: bool = False
    note: str = ""


def paper_names() -> list[str]:
    """The papers whose settings ship."""
    return sorted(
        item.name.removesuffix(".yaml")
        for item in resources.files("fedbench.papers").iterdir()
        if item.name.endswith(".yaml")
    )


@cache
def load_paper(name: str) -> Paper:
    """The paper of that name; raises FedbenchError when it does not ship."""
    if name not in paper_names():
        raise FedbenchError(f"unknown paper {name!r}.", did_you_mean(name, paper_names()))
    text = resources.files("fedbench.papers").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return Paper.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        raise FedbenchError(f"papers/{name}.yaml is not a paper:\n{explain(error)}") from None


@cache
def load_published(name: str) -> tuple[Published, ...]:
    """Every number that the paper prints."""
    text = resources.files("fedbench.papers").joinpath("published", f"{name}.yaml").read_text(encoding="utf-8")
    return tuple(Published.model_validate(entry) for entry in yaml.safe_load(text)["entries"])
