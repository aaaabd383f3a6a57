"""A user's own files as data sets, named by path: `csv[path=~/mine.csv]`, `npz[path=mine.npz]`, `folder[path=photos]`.

When a grid is read, such a name is completed: the path is made absolute (from the folder in which the command runs),
and the first digits of the content's SHA-256 are added, as in `csv[path=/home/me/mine.csv,sha256=0123456789abcdef]`.
The job and its key hold this name. So a changed file makes new jobs, beside the results of the old content and never
under their name; a job never runs on other content than it was made for; and the same file in another place makes new
jobs too. Whoever writes `sha256` into a grid gets that content or an error.

Shape and classes are looked up in the files when somebody asks for them: the name of an old result needs no file. The
decoded content is cached like any other data set's, under a hash of the complete name, and so is never out of date.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, field_validator

from fedbench.dataset import Arrays, DataError, Dataset
from fedbench.errors import FedbenchError
from fedbench.job import Frozen

DIGITS = 16
"""Of the SHA-256 in a name: nobody meets two files that share so many by chance."""

_WHOLE = re.compile(r"[-+]?[0-9]+")


def _must_be_text(value: Any) -> Any:
    if value is not None and not isinstance(value, str):
        raise ValueError("is read as a number or a date; put it in quotes")
    return value


Text = Annotated[str, BeforeValidator(_must_be_text)]
"""Of a setting in brackets, where `2024` without quotes is a number."""


class OwnParams(Frozen):
    path: Text = Field(min_length=1, description="where it lies; relative paths begin where the command runs")
    sha256: Text | None = Field(
        None, pattern=rf"^[0-9a-f]{{{DIGITS}}}$", description="how the SHA-256 of its content begins [filled in]"
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        try:
            return os.path.abspath(Path(value).expanduser())
        except RuntimeError as error:  # ~nobody
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Facts:
    """What is known of a data set once its files are seen."""

    shape: tuple[int, int, int]
    classes: int
    groups: int
    full_scale: int


class _Fact:
    """A class attribute that is looked up in the files; the kind of data itself, without a path, has only a default."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: None, owner: type[OwnData]) -> Any:
        return getattr(owner.facts(), self._name) if owner.label else self._default


def _fact(default: Any) -> Any:
    return _Fact(default)


class OwnData(Dataset):
    """One kind of a user's own files."""

    sha256 = None  # the name holds it
    by_path = True
    shape: ClassVar[tuple[int, int, int]] = _fact(())
    classes: ClassVar[int] = _fact(0)
    groups: ClassVar[int] = _fact(0)
    full_scale: ClassVar[int] = _fact(255)
    Params: ClassVar[type[OwnParams]] = OwnParams
    params: ClassVar[Any]
    _known: ClassVar[dict[str, Facts]] = {}
    """By name, which stands for the content."""

    @classmethod
    @abstractmethod
    def decode(cls) -> Arrays:
        """The content of the files. Raises DataError that says what is wrong with them, and where."""

    @classmethod
    def files(cls, path: Path) -> list[Path]:
        """All files at this path that count, in a fixed order; raises DataError when there are none."""
        if not path.is_file():
            raise DataError(f"{path} is not a file.", "A folder of pictures is named by folder[path=...].")
        return [path]

    @classmethod
    def look(cls) -> Facts:
        """The facts as the files have them now."""
        return _facts_of(cls._decoded())

    @classmethod
    def complete(cls, params: Any) -> Any:
        if params.sha256 is not None:
            return params
        return params.model_copy(update={"sha256": cls._fingerprint(Path(params.path))})

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        return {"title": Path(params.path).name}

    @classmethod
    def facts(cls) -> Facts:
        """Learnt when the content is loaded; looked up by whoever asks before that, once in a process for a name."""
        if cls.name() not in cls._known:
            cls._check_unchanged()
            cls._known[cls.name()] = cls.look()
        return cls._known[cls.name()]

    @classmethod
    def learn(cls, arrays: Arrays) -> None:
        cls._known[cls.name()] = _facts_of(arrays)

    @classmethod
    def read(cls, root: Path) -> Arrays:
        cls._check_unchanged()
        return cls._decoded()

    @classmethod
    def _decoded(cls) -> Arrays:
        try:
            return cls.decode()
        except FedbenchError:
            raise
        except Exception as error:  # decoders raise whatever they meet
            raise DataError(f"{cls.params.path} cannot be read: {type(error).__name__}: {error}") from None

    @classmethod
    def _check_unchanged(cls) -> None:
        found = cls._fingerprint(Path(cls.params.path))
        if found != cls.params.sha256:
            raise DataError(
                f"{cls.params.path} has changed: its SHA-256 begins with {found}, not with {cls.params.sha256}.",
                "Run the grid again, which makes jobs for the new content; or put the old content back.",
            )

    @classmethod
    def _fingerprint(cls, path: Path) -> str:
        """How the SHA-256 of a file begins; of several files, that of their names, sizes and contents."""
        try:
            if not path.exists():
                raise DataError(f"there is no {path}.", "Relative paths begin in the folder where the command runs.")
            files = cls.files(path)
            stats = [file.stat() for file in files]
            return _digest(path, tuple((f, s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)))
        except OSError as error:
            raise DataError(f"{error.filename or path} cannot be read: {error.strerror}.") from None


@cache
def _digest(path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> str:
    """Of files with these sizes and times of change: every job of a grid asks for it again."""
    digest = hashlib.sha256()
    for file, size, _ in stamps:
        if file != path:
            digest.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode("utf-8", "surrogateescape"))
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:DIGITS]


def _facts_of(arrays: Arrays) -> Facts:
    _, channels, height, width = arrays.x.shape
    groups = 0 if arrays.group is None else int(arrays.group.max()) + 1
    full_scale = 255 if arrays.x.dtype == np.uint8 else 1
    return Facts((channels, height, width), int(arrays.y.max()) + 1, groups, full_scale)


def numbered(names: Sequence[str]) -> NDArray[np.int64]:
    """The number of every name among all different ones in sorted order; whole numbers are sorted as numbers."""
    different = set(names)
    whole = all(map(_WHOLE.fullmatch, different))
    ordered = sorted(different, key=lambda name: (int(name) if whole else 0, name))
    places = {name: place for place, name in enumerate(ordered)}
    return np.array([places[name] for name in names], dtype=np.int64)


def numbered_classes(names: Sequence[str], where: str) -> NDArray[np.int64]:
    """The same for labels. Raises DataError when they are no classes: fractions, or the same for all."""
    different = set(names)
    fractions = sorted(name for name in different if not _WHOLE.fullmatch(name))
    if fractions and all(map(_is_number, different)):
        hint = "Labels are classes, whole numbers or text: there is no regression on files of your own."
        raise DataError(f"{where} holds {fractions[0]}, which is no class.", hint)
    if len(different) < 2:
        raise DataError(f"{where} holds nothing but {names[0]}.", "At least two classes are needed.")
    return numbered(names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # 1_000 is a number to Python only


def table(rows: NDArray[np.float64], n_train: int, *, standardise: bool, where: str) -> NDArray[np.float32]:
    """Rows of finite numbers as images of height 1. Raises DataError when float32 cannot hold them.

    Standardised columns have mean 0 and deviation 1 on the first `n_train` rows; one that is constant there becomes 0.
    """
    if standardise:
        # scaled first, so that squares of large numbers do not overflow
        scaled = rows / np.maximum(np.abs(rows).max(axis=0), np.finfo(np.float64).tiny)
        known = scaled[:n_train]
        constant = (known == known[0]).all(axis=0)
        rows = (scaled - known.mean(axis=0)) / np.where(constant, 1.0, known.std(axis=0))
        rows[:, constant] = 0.0
    with np.errstate(over="ignore"):
        x = rows.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{where} holds numbers that are too large for float32.", "Leave standardise on.")
    return x[:, None, None, :]
