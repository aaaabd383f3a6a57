"""What there is to choose from: methods, data sets, grids and papers, as rows for a table or for JSON."""

from __future__ import annotations

import inspect
import shlex
import sys
import typing
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

Row = dict[str, Any]


def method_rows() -> list[Row]:
    from fedbench.algorithm import methods

    rows = []
    for name in methods.names():
        method = methods.get(name)
        summary = _description(method).partition("\n")[0]
        rows.append({"method": name, "title": method.title, "version": method.version, "summary": summary})
    return rows


def method_details(name: str) -> tuple[str, list[Row]]:
    """The method's description, and a row per hyperparameter."""
    from fedbench.algorithm import methods

    method = methods.get(name)
    text = _description(method)
    if method.defaults:
        text += "\n\nProtocol where neither paper nor grid says otherwise: " + ", ".join(
            f"{key}={value}" for key, value in method.defaults.items()
        )
    rows = [
        {
            "parameter": key,
            "type": _type_name(field.annotation),
            "default": "" if field.default is PydanticUndefined else field.default,
            "meaning": field.description or "",
        }
        for key, field in method.Params.model_fields.items()
    ]
    return text, rows


def dataset_rows(root: Path) -> list[Row]:
    """Every data set, and those with settings that have been made: their names and titles say what they are."""
    from fedbench.dataset import datasets, find_dataset, kept_with_settings, presence

    rows = []
    for name in sorted({*datasets.names(), *kept_with_settings(root)}):
        dataset = datasets.get(name) if name in datasets.names() else find_dataset(name)
        rows.append(
            {
                "dataset": name,
                "title": dataset.title,
                "shape": "x".join(str(side) for side in dataset.shape),
                "classes": (dataset.classes or "") if dataset.target_scale is None else "regression",
                "sizes": ", ".join(f"{size} {fit}/{test}" for size, (fit, test) in dataset.sizes.items()),
                "state": presence(dataset, root),
            }
        )
    return rows


def verified_rows(names: list[str], root: Path) -> list[Row]:
    """What became of checking these data sets, or else all that are there, and what to do about each problem."""
    from fedbench.dataset import DataError, find_dataset, present, verify

    rows = []
    for name in names or present(root):
        dataset = find_dataset(name)
        row = {"dataset": dataset.name(), "state": "verified", "against": "", "advice": ""}
        try:
            row["against"] = verify(dataset, root)
        except FileNotFoundError:
            row |= {"state": "missing", "advice": f"fedbench datasets fetch {shlex.quote(name)}"}
        except DataError as error:
            row |= {"state": "damaged", "advice": str(error)}
        rows.append(row)
    return rows


def grid_rows() -> list[Row]:
    from fedbench.grid import grid_names, load_grid

    rows = []
    for name in grid_names():
        grid = load_grid(name)
        rows.append(
            {
                "grid": name,
                "title": grid.title,
                "paper": grid.paper or "",
                "methods": ", ".join(method.name for method in grid.methods),
            }
        )
    return rows


def paper_rows() -> list[Row]:
    from fedbench.paper import load_paper, load_published, paper_names

    rows = []
    for name in paper_names():
        paper = load_paper(name)
        rows.append(
            {
                "paper": name,
                "title": paper.title,
                "published numbers": len(load_published(name)),
                "tables": ", ".join(f"{key} ({layout.title})" for key, layout in paper.tables.items()),
            }
        )
    return rows


def _description(plugin: type) -> str:
    """What the plugin's file says of itself."""
    return inspect.cleandoc(sys.modules[plugin.__module__].__doc__ or "")


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    return getattr(annotation, "__name__", str(annotation).replace("typing.", ""))
