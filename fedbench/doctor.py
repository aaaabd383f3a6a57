"""`fedbench doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sqlalchemy.engine import URL

from fedbench.errors import FedbenchError

_FREE_GB = 2.0


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is empty when all is well."""

    what: str
    state: str
    advice: str = ""
    broken: bool = False
    """True: fedbench cannot work like this; False: something optional is missing."""


def examine(url: URL, root: Path) -> list[Finding]:
    """All findings, in the order of the report."""
    return [*_versions(), *_devices(), *_database(url), *_datasets(root), _disk(url)]


def _versions() -> Iterator[Finding]:
    yield Finding("fedbench", metadata.version("fedbench"))
    yield Finding("python", platform.python_version())
    for name in ("torch", "torchvision", "sqlalchemy", "pandas", "numpy"):
        yield Finding(name, metadata.version(name))
    for name, extra in (("ray", "ray"), ("psycopg", "postgres")):
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed (optional)", f"pip install 'fedbench[{extra}]'")
    try:
        from fedbench.vision import torchvision_datasets

        torchvision_datasets()
    except Exception as error:
        yield Finding("torchvision import", f"fails: {error}", "Reinstall torch and torchvision together.", broken=True)


def _devices() -> Iterator[Finding]:
    from fedbench.workers.slots import cores, cuda_devices, make_slots

    gpus = cuda_devices()
    yield Finding("cores", str(cores()))
    yield Finding("CUDA devices", str(gpus), "" if gpus else "Jobs run on the CPU, one per core.")
    slots = make_slots()
    yield Finding("workers by default", f"{len(slots)} ({slots[0].threads} thread(s) each)")


def _database(url: URL) -> Iterator[Finding]:
    from fedbench import queue
    from fedbench.store.database import EmptyDatabaseError, open_database, shown

    if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).exists():
        yield Finding("database", f"{shown(url)} does not exist yet", "It is made by the first `fedbench run`.")
        return
    try:
        counts = queue.counts(open_database(url, create=False))
    except EmptyDatabaseError:
        counts = {}
    except FedbenchError as error:
        yield Finding("database", error.message, error.hint, broken=True)
        return
    yield Finding(
        "database", f"{shown(url)}: " + (", ".join(f"{n} {status}" for status, n in counts.items()) or "empty")
    )
    if counts.get("failed"):
        yield Finding("failed jobs", str(counts["failed"]), "fedbench queue list --status failed; fedbench queue retry")


def _datasets(root: Path) -> Iterator[Finding]:
    from fedbench.dataset import datasets, load_arrays, presence

    yield Finding("data root", str(root))
    for name in datasets.names():
        dataset = datasets.get(name)
        state = presence(dataset, root)
        if state == "by path":
            yield Finding(f"data set {name}", state)
            continue
        if state == "missing":
            advice = f"Put its files under {root} in torchvision's layout, or set FEDBENCH_DATA; else it is downloaded."
            yield Finding(f"data set {name}", "missing", advice)
            continue
        try:
            load_arrays(dataset, root)
        except FedbenchError as error:
            yield Finding(f"data set {name}", error.message, error.hint, broken=True)
        else:
            yield Finding(f"data set {name}", "verified")


def _disk(url: URL) -> Finding:
    from fedbench.store.database import results_folder

    folder = results_folder(url).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    return Finding("free disk", f"{free:.1f} GB", "" if free > _FREE_GB else "Make room: checkpoints may not fit.")
