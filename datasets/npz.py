"""Arrays of your own as NumPy's .npz: `npz[path=data/mine.npz]`, with `x` and `y`, perhaps `x_test` and `y_test`.

`x` is images as bytes (uint8), (n, h, w), (n, h, w, c) or (n, c, h, w) with up to four channels, or a table of numbers,
(n, d), whose columns are standardised by the training rows unless `standardise=false` says otherwise. `y` holds whole
numbers or text, numbered in sorted order. With `client` (and `client_test`), the partition `natural` makes every
owner of samples a client. Arrays of Python objects are never loaded: a pickle can run programs.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedbench.dataset import Arrays, DataError
from fedbench.own_data import OwnData, OwnParams, numbered, numbered_classes, table

KNOWN = ("x", "y", "x_test", "y_test", "client", "client_test")
MOST_CHANNELS = 4
Content = dict[str, NDArray[Any]]


class NpzParams(OwnParams):
    standardise: bool = Field(True, description="columns of a table with mean 0 and deviation 1 on the training part")


class Npz(OwnData):
    title = "Your own arrays (.npz)"
    Params = NpzParams
    params: ClassVar[NpzParams]

    @classmethod
    def decode(cls) -> Arrays:
        where = cls.params.path
        content = _load(Path(where))
        _check_lengths(content, where)
        n_train = len(content["y"])
        x = _joined(content, "x", where)
        y = numbered_classes(_names(_joined(content, "y", where), "y", where), f"y of {where}")
        group = numbered(_names(_joined(content, "client", where), "client", where)) if "client" in content else None
        if x.ndim == 2:
            rows = _finite(x, where)
            return Arrays(table(rows, n_train, standardise=cls.params.standardise, where=where), y, n_train, group)
        return Arrays(_images(x, where), y, n_train, group)


def _load(path: Path) -> Content:
    """The arrays that have a meaning. Raises DataError when it is no such file, or x or y are missing."""
    try:
        opened = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile):
        opened = None
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise DataError(f"{path} is not an .npz file.", "Make one: numpy.savez_compressed(path, x=images, y=labels).")
    with opened:
        if missing := [name for name in ("x", "y") if name not in opened.files]:
            raise DataError(
                f"{path} has no array {missing[0]}; it has {', '.join(opened.files) or 'none'}.",
                "Make it with numpy.savez_compressed(path, x=images, y=labels).",
            )
        return {name: _array(opened, name, path) for name in KNOWN if name in opened.files}


def _array(opened: Any, name: str, path: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = opened[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{name} of {path} holds Python objects, which are never loaded.",
            "Save it as an array of numbers, or of text (astype(str)).",
        ) from None
    if not isinstance(found, np.ndarray):
        raise DataError(f"{name} of {path} is not an array.")
    return found


def _check_lengths(content: Content, where: str) -> None:
    """Raises DataError when arrays that belong together are not all there, or differ in length."""
    pairs = [("x_test", "y_test")]
    if "client" in content or "client_test" in content:
        pairs.append(("client", "client_test" if "x_test" in content else "client"))
    for one, other in pairs:
        if (one in content) != (other in content):
            there, missing = (one, other) if one in content else (other, one)
            raise DataError(f"{where} has {there}, but no {missing}.", "Give both or neither.")
    for name, array in content.items():
        samples = "x_test" if name.endswith("_test") else "x"
        if array.ndim == 0 or content[samples].ndim == 0 or len(array) != len(content[samples]):
            lengths = f"{name} has shape {array.shape}, and {samples} {content[samples].shape}"
            raise DataError(f"{where}: {lengths}.", "Every sample needs one of each.")
    if not len(content["x"]):
        raise DataError(f"{where} has no samples.")


def _joined(content: Content, name: str, where: str) -> NDArray[Any]:
    """The training part and the test part, if there is one. Raises DataError when they differ in kind."""
    parts = [content[key] for key in (name, f"{name}_test") if key in content]
    if any(part.shape[1:] != parts[0].shape[1:] or _kind(part) != _kind(parts[0]) for part in parts):
        kinds = " and ".join(f"{part.shape} {part.dtype}" for part in parts)
        raise DataError(f"{where}: {name} and {name}_test differ in kind: {kinds}.")
    return np.concatenate(parts)


def _kind(array: NDArray[Any]) -> str:
    return array.dtype.kind.replace("u", "i")  # with a sign or without, these are whole numbers


def _names(array: NDArray[Any], name: str, where: str) -> list[str]:
    """Labels or clients as text. Raises DataError for anything but one whole number or text for each sample."""
    if array.ndim != 1:
        raise DataError(
            f"{name} of {where} has shape {array.shape}.",
            "It must have one entry for each sample; of one-hot rows, y.argmax(axis=1).",
        )
    if array.dtype.kind not in "iubU":
        raise DataError(
            f"{name} of {where} is {array.dtype}.",
            "It must hold whole numbers or text: y.astype(int), if these are classes; there is no regression here.",
        )
    return [str(entry) for entry in (array.astype(np.int64) if array.dtype.kind == "b" else array).tolist()]


def _finite(x: NDArray[Any], where: str) -> NDArray[np.float64]:
    if x.dtype.kind not in "fiub" or not x.shape[1]:
        raise DataError(f"x of {where} has shape {x.shape} and type {x.dtype}.", "A table holds numbers, (n, d).")
    rows = x.astype(np.float64)
    bad = np.argwhere(~np.isfinite(rows))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(f"{where}: row {row} of x, column {column}, is {rows[row, column]}.", "Numbers must be finite.")
    return rows


def _images(x: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """[n, channels, height, width]; raises DataError when these are no images."""
    if x.ndim not in (3, 4) or 0 in x.shape:
        hint = "Images are (n, h, w), (n, h, w, c) or (n, c, h, w); a table is (n, d)."
        raise DataError(f"x of {where} has shape {x.shape}.", hint)
    if x.dtype != np.uint8:
        hint = "Images are bytes: (255 * x).round().astype('uint8'), if they are between 0 and 1."
        raise DataError(f"x of {where} holds images as {x.dtype}.", hint)
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    first, last = x.shape[1] <= MOST_CHANNELS, x.shape[3] <= MOST_CHANNELS
    if first == last:
        hint = f"One of the two, and not both, must be at most {MOST_CHANNELS}: it is the channels."
        raise DataError(
            f"x of {where} has shape {x.shape}: neither its second nor its last side is clearly the channels.", hint
        )
    return np.ascontiguousarray(x if first else x.transpose(0, 3, 1, 2))
