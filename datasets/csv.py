"""A table of your own: `csv[path=data/mine.csv]`, with columns of numbers, `label`, and perhaps `client` and `split`.

The first line names the columns; they are separated by commas. Labels are whole numbers or text, and are numbered in
sorted order. With a column that says whose row it is, the partition `natural` makes every owner a client. A column
`split` with train and test gives the official parts; without it, all rows are training data. All other columns are
features, standardised by the training rows: `csv[path=mine.csv,label=species,client=hospital,standardise=false]`.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from fedbench.dataset import Arrays, DataError
from fedbench.own_data import OwnData, OwnParams, Text, numbered, numbered_classes, table

SPLIT = "split"
PARTS = ("train", "test")


class CsvParams(OwnParams):
    label: Text = Field("label", description="the column with the classes")
    client: Text | None = Field(None, description="the column that says whose row it is [client, if there is one]")
    standardise: bool = Field(True, description="features with mean 0 and deviation 1 on the training part")


class Csv(OwnData):
    title = "Your own table (CSV)"
    Params = CsvParams
    params: ClassVar[CsvParams]

    @classmethod
    def decode(cls) -> Arrays:
        path = Path(cls.params.path)
        try:
            return cls._arrays(path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not text in UTF-8: {error.reason}.", "Save it as UTF-8.") from None

    @classmethod
    def _arrays(cls, path: Path) -> Arrays:
        lines = _records(path)
        _, header = next(lines, (1, []))
        special = cls._special(header, path)
        features = [column for column in range(len(header)) if column not in special.values()]
        if not features:
            raise DataError(f"{path} has no features: its columns are {_listed(header)}.")
        texts: dict[str, list[str]] = {name: [] for name in special}
        values = array("d")
        for line, row in lines:
            for name, column in special.items():
                texts[name].append(_text(row[column], f"{path}, line {line}, column {header[column]}"))
            try:
                values.extend(_numbers([row[column] for column in features]))
            except ValueError:
                raise _bad_number(path, line, header, row, features) from None
        if not texts["label"]:
            raise DataError(f"{path} has no rows below its header.")
        rows = np.frombuffer(values, dtype=np.float64).reshape(-1, len(features))
        y = numbered_classes(texts["label"], f"column {cls.params.label} of {path}")
        group = numbered(texts["client"]) if "client" in texts else None
        is_test = _is_test(texts["split"], path) if "split" in texts else np.zeros(len(y), dtype=bool)
        order, n_train = np.argsort(is_test, kind="stable"), int((~is_test).sum())
        x = table(rows[order], n_train, standardise=cls.params.standardise, where=str(path))
        return Arrays(x, y[order], n_train, None if group is None else group[order])

    @classmethod
    def _special(cls, header: list[str], path: Path) -> dict[str, int]:
        """The places of the columns that are no features. Raises DataError when one is missing, or stands twice."""
        if not any(header):
            raise DataError(f"{path} is empty.", "Its first line must name the columns.")
        for place, name in enumerate(header):
            if not name:
                hint = "Is it an index? pandas leaves it out with to_csv(..., index=False)."
                raise DataError(f"column {place + 1} of {path} has no name.", hint)
            if name in header[:place]:
                raise DataError(f"{path} has two columns called {name}.", "Rename or delete one.")
        wanted = {"label": cls.params.label, "client": cls.params.client or "client", "split": SPLIT}
        for key, name in wanted.items():
            needed = key == "label" or (key == "client" and cls.params.client is not None)
            if needed and name not in header:
                raise DataError(
                    f"{path} has no column {name}; it has {_listed(header)}.",
                    f"Name it as a setting: csv[path=...,{key}=NAME]. Columns are separated by commas.",
                )
        return {key: header.index(name) for key, name in wanted.items() if name in header}


def _records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every line that is not blank. Raises DataError when one has too many or too few."""
    width = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, skipinitialspace=True, strict=True)
        try:
            for fields in filter(None, reader):
                width = width or len(fields)
                if len(fields) != width:
                    what = f"{len(fields)} field(s), and the header has {width}"
                    raise DataError(f"{path}, line {reader.line_num}: {what}.", "A field with a comma must be quoted.")
                yield reader.line_num, [field.strip() for field in fields]
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}.", "Look at its quotes.") from None


def _text(field: str, where: str) -> str:
    if not field:
        raise DataError(f"{where}: nothing there.", "Every row needs a value.")
    return field


def _numbers(fields: list[str]) -> list[float]:
    """Raises ValueError when one is no finite number, or written as only Python would (1_000)."""
    numbers = list(map(float, fields))
    # a sum is not finite when a term is not; when only the sum is too large, the terms decide
    if "_" in "".join(fields) or not (math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))):
        raise ValueError
    return numbers


def _bad_number(path: Path, line: int, header: list[str], row: list[str], features: list[int]) -> DataError:
    """Names the first feature of a row that is not a number."""
    for column in features:
        try:
            _numbers([row[column]])
        except ValueError:
            what = f"{row[column]!r} is not a finite number" if row[column] else "nothing there"
            hint = (
                "Features are numbers: mend the row, or leave out the column; a column with the label or the client is "
            )
            hint += "named by label=NAME, client=NAME."
            return DataError(f"{path}, line {line}, column {header[column]}: {what}.", hint)
    raise AssertionError("every feature is a number")


def _is_test(parts: list[str], path: Path) -> np.ndarray:
    for part in parts:
        if part not in PARTS:
            raise DataError(f"column {SPLIT} of {path} holds {part!r}.", "It must say train or test in every row.")
    if "train" not in parts:
        raise DataError(
            f"column {SPLIT} of {path} says train nowhere.", "Without training rows there is nothing to do."
        )
    return np.array([part == "test" for part in parts])


def _listed(names: list[str]) -> str:
    """All names, or the first dozen of many."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
