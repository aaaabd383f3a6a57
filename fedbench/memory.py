"""What clients keep between rounds: in RAM up to a budget, then on disk; a checkpoint writes only what changed.

A memory is replaced as a whole and never changed in place. So each has a version (the round that made it), a version's
file never changes, and keeping the state of a good round costs references only. Files are mapped, not read: what a
method does not touch stays on disk.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedbench.algorithm import State

RAM_BUDGET = 2 << 30
"""Bytes of client memories in RAM before the least recently used go to disk."""

Listing = dict[int, tuple[int, str]]
"""client -> version and SHA-256 of its file: what a checkpoint says of the memories."""


@dataclass(eq=False)
class _Entry:
    """One version of one client's memory: in RAM, in a file, or both."""

    client: int
    version: int
    state: State | None
    size: int = 0
    sha256: str = ""
    """of its file; empty as long as there is none"""

    @property
    def file_name(self) -> str:
        return f"client-{self.client}-{self.version}.pt"


class ClientStore:
    """The memories of all clients, now and at the rounds that are kept by name."""

    def __init__(
        self,
        first: Callable[[int], State],
        folder: Path | None = None,
        *,
        budget: int = RAM_BUDGET,
        device: torch.device | None = None,
    ) -> None:
        self._first = first
        self._folder = folder
        self._budget = budget
        self._device = device or torch.device("cpu")
        self._now: dict[int, _Entry] = {}
        self._kept: dict[str, dict[int, _Entry]] = {}
        self._in_ram: OrderedDict[_Entry, None] = OrderedDict()  # least recently used first
        self.ram_bytes = 0

    def __getitem__(self, client: int) -> State:
        """The client's memory; a new one for a client that has none, which is not stored."""
        entry = self._now.get(client)
        return self._first(client) if entry is None else self._state(entry)

    def __len__(self) -> int:
        """How many clients have a memory."""
        return len(self._now)

    def put(self, client: int, memory: State, version: int) -> None:
        """Replace a client's memory; `version` is the round that made it."""
        if not memory and client not in self._now:  # clients without memory cost nothing
            return
        replaced = self._now.get(client)
        entry = _Entry(client, version, memory, sum(v.numel() * v.element_size() for v in memory.values()))
        self._now[client] = entry
        if replaced is not None:
            self._forget_unless_used(replaced)
        self._in_ram[entry] = None
        self.ram_bytes += entry.size
        while self.ram_bytes > self._budget and self._folder is not None and len(self._in_ram) > 1:
            self._spill(next(iter(self._in_ram)), self._folder)

    def keep(self, name: str) -> None:
        """Remember all memories as they are now under a name, instead of what the name kept before."""
        before = self._kept.get(name, {})
        self._kept[name] = dict(self._now)
        for entry in before.values():
            self._forget_unless_used(entry)

    def kept(self, name: str) -> ClientStore:
        """The memories kept under this name, for reading."""
        view = ClientStore(self._first, self._folder, device=self._device)
        view._now = self._kept[name]
        return view

    def save(self) -> dict[str, Listing]:
        """Write what is not on disk yet; returns what there is: now, under "", and under every kept name."""
        assert self._folder is not None
        listings: dict[str, Listing] = {}
        for name, entries in {"": self._now, **self._kept}.items():
            for entry in entries.values():
                _write(entry, self._folder)
            listings[name] = {client: (entry.version, entry.sha256) for client, entry in entries.items()}
        return listings

    def restore(self, listings: dict[str, Listing]) -> None:
        """Go back to what `save` returned; the files stay where they are until they are asked for."""
        entries: dict[tuple[int, int], _Entry] = {}
        stores: dict[str, dict[int, _Entry]] = {}
        for name, listing in listings.items():
            stores[name] = {}
            for client, (version, sha256) in listing.items():
                entry = entries.setdefault((client, version), _Entry(client, version, None, sha256=sha256))
                stores[name][client] = entry
        self._now = stores.pop("")
        self._kept = stores
        self._in_ram.clear()
        self.ram_bytes = 0

    def _state(self, entry: _Entry) -> State:
        if entry.state is not None:
            if entry in self._in_ram:
                self._in_ram.move_to_end(entry)
            return entry.state
        assert self._folder is not None
        path = self._folder / entry.file_name
        state: State = torch.load(path, mmap=True, weights_only=True, map_location=self._device)
        return state

    def _spill(self, entry: _Entry, folder: Path) -> None:
        _write(entry, folder)
        self._leave_ram(entry)
        entry.state = None

    def _forget_unless_used(self, entry: _Entry) -> None:
        if all(entries.get(entry.client) is not entry for entries in (self._now, *self._kept.values())):
            self._leave_ram(entry)

    def _leave_ram(self, entry: _Entry) -> None:
        if entry in self._in_ram:
            del self._in_ram[entry]
            self.ram_bytes -= entry.size


def is_whole(folder: Path, listings: dict[str, Listing]) -> bool:
    """Whether every file that a checkpoint names is there and unchanged."""
    files = {_Entry(c, version, None).file_name: sha for one in listings.values() for c, (version, sha) in one.items()}
    return all(_sha256(folder / name) == sha256 for name, sha256 in files.items())


def remove_unlisted(folder: Path, checkpoints: list[dict[str, Listing]]) -> None:
    """Delete the files that none of these checkpoints names."""
    needed = {
        _Entry(client, version, None).file_name
        for listings in checkpoints
        for listing in listings.values()
        for client, (version, _) in listing.items()
    }
    for path in folder.glob("client-*"):
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _write(entry: _Entry, folder: Path) -> None:
    """Write a version's file, once, whole or not at all."""
    if entry.sha256:
        return
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(entry.state, buffer)
    partial = folder / f"{entry.file_name}.partial"
    with partial.open("wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / entry.file_name)
    entry.sha256 = hashlib.sha256(buffer.getbuffer()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
