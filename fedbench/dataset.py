"""The contract of a data set, and where its bytes lie.

A data set is arrays: all images (official training part first, then the test part) as bytes, and their labels.
Whatever the source, the decoded content must match the SHA-256 that the data set's file pins. Decoded arrays are
kept as `.npy` files under `<data root>/fedbench/`, so that workers share them through memory maps.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from fedbench.errors import FedbenchError, did_you_mean, explain
from fedbench.registry import Registry
from fedbench.selector import parse_selector


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
    sha256: ClassVar[str | None]
    """of the decoded arrays (Arrays.sha256); None for what is made from settings alone"""
    sizes: ClassVar[dict[str, tuple[int, int]]] = {}
    """size -> (training, test) samples per class and client, for the partition `labels`"""
    embedded: ClassVar[bool] = False
    """True: comes with an installed library, needs no data root"""

    Params: ClassVar[type[BaseModel] | None] = None
    """What can be set in brackets: `synthetic[classes=5]`."""
    label: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        """As grids write it, with its settings."""
        return cls.label or cls.__module__.rpartition(".")[2]

    @classmethod
    def attributes(cls, params: Any) -> dict[str, Any]:
        """How settings change the attributes above."""
        return {}

    @classmethod
    @abstractmethod
    def read(cls, root: Path) -> Arrays:
        """Decode the files under the data root; raises FileNotFoundError when they are not there."""

    @classmethod
    def download(cls, root: Path) -> None:
        """Fetch the files into the data root; raises OSError when the network does not answer."""
        raise OSError(f"{cls.name()} has no download")


datasets: Registry[Dataset] = Registry("fedbench.datasets", "data set", Dataset)  # type: ignore[type-abstract]


def find_dataset(text: str) -> type[Dataset]:
    """`mnist` or `synthetic[classes=5]` as a data set; raises FedbenchError for an unknown one or wrong settings."""
    name, settings = parse_selector(text)
    dataset = datasets.get(name)
    if not settings:
        return dataset
    if dataset.Params is None:
        raise FedbenchError(f"data set {name} has no settings.", f"Write {name} alone.")
    for key in settings:
        if key not in dataset.Params.model_fields:
            raise FedbenchError(
                f"data set {name} has no setting {key!r}.", did_you_mean(key, dataset.Params.model_fields)
            )
    try:
        params = dataset.Params.model_validate(settings)
    except ValidationError as error:
        raise FedbenchError(f"wrong setting for data set {name}:\n{explain(error)}") from None
    changed = params.model_dump(exclude_defaults=True)
    written = ",".join(f"{key}={changed[key]}" for key in sorted(changed))
    attributes = {"params": params, "label": f"{name}[{written}]" if written else name, **dataset.attributes(params)}
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
    folder = root / "fedbench" / dataset.name()
    if (cached := _open_cache(folder)) is not None:
        return _verified(dataset, cached, str(folder))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (cached := _open_cache(folder)) is not None:  # another process made it while this one waited
                return _verified(dataset, cached, str(folder))
            _write_cache(folder, _verified(dataset, _read_or_download(dataset, root), str(root)))
    except OSError as error:
        raise DataError(f"the data root {root} cannot be written: {error}", "Choose another with --data.") from None
    made = _open_cache(folder)
    if made is None:
        raise DataError(f"the cache {folder} vanished while it was made.", "Run the command again.")
    return made


def presence(dataset: type[Dataset], root: Path) -> Literal["embedded", "present", "missing", "damaged"]:
    """Whether the data set can be used without a download. Its content is not verified here."""
    if dataset.embedded:
        return "embedded"
    try:
        if _open_cache(root / "fedbench" / dataset.name()) is None:
            _read(dataset, root)
    except FileNotFoundError:
        return "missing"
    except DataError:
        return "damaged"
    return "present"


def _read_or_download(dataset: type[Dataset], root: Path) -> Arrays:
    try:
        return _read(dataset, root)
    except FileNotFoundError:
        pass
    try:
        dataset.download(root)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{dataset.title} is not under {root}, and its download failed: {error}",
            f"Put its files there in torchvision's layout, or name another folder with --data or FEDBENCH_DATA; "
            f"`fedbench datasets` shows what is there ({dataset.name()} is missing).",
        ) from None
    try:
        return _read(dataset, root)
    except FileNotFoundError as error:
        raise DataError(f"the download of {dataset.title} left no {error.filename or error}.", "Try again.") from None


def _read(dataset: type[Dataset], root: Path) -> Arrays:
    try:
        return dataset.read(root)
    except FileNotFoundError:
        raise
    except Exception as error:  # decoders raise whatever the damage makes them meet
        raise DataError(
            f"the files of {dataset.title} under {root} are damaged: {type(error).__name__}: {error}",
            "Delete them and fetch them again.",
        ) from None


def _verified(dataset: type[Dataset], arrays: Arrays, where: str) -> Arrays:
    if dataset.sha256 is not None and (found := arrays.sha256()) != dataset.sha256:
        raise DataError(
            f"{dataset.title} in {where} is not the data set it should be: its content has SHA-256 {found[:16]}..., "
            f"expected {dataset.sha256[:16]}...",
            "The files are damaged or changed. Delete them and fetch them again.",
        )
    return arrays


def _open_cache(folder: Path) -> Arrays | None:
    if not folder.is_dir():
        return None
    try:
        # copy-on-write maps: torch wants writable memory, and pages stay shared as long as nobody writes
        x = np.load(folder / "x.npy", mmap_mode="c")
        y = np.load(folder / "y.npy")
        n_train = int(np.load(folder / "n_train.npy"))
        group = np.load(folder / "group.npy") if (folder / "group.npy").exists() else None
    except Exception as error:  # numpy's readers raise whatever the damage makes them meet
        raise DataError(f"the cache {folder} is damaged: {error}", f"Delete the folder {folder}.") from None
    if x.dtype not in (np.uint8, np.float32) or y.dtype != np.int64:
        raise DataError(
            f"the cache {folder} is damaged: it holds {x.dtype} and {y.dtype}", f"Delete the folder {folder}."
        )
    return Arrays(x, y, n_train, group)


def _write_cache(folder: Path, arrays: Arrays) -> None:
    """Whole or not at all: written beside its place and renamed."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    for name, array in vars(arrays).items():
        if array is not None:
            np.save(partial / f"{name}.npy", array)
    partial.rename(folder)
