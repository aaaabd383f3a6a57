"""Checkpoints: atomic (written, synced, renamed), verified on load, the newest two kept."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KEPT = 2
_NAMES = "[0-9]" * 8 + ".ckpt"
Accept = Callable[[dict[str, Any]], bool]


def save(folder: Path, round_: int, content: dict[str, Any]) -> None:
    """Write the state after `round_`; once it is safe, older checkpoints but one are removed, and later ones.

    Later ones are of a run whose records were lost and which began again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    write(folder / f"{round_:08d}.ckpt", hashlib.sha256(payload).digest(), payload)
    found = sorted(folder.glob(_NAMES))
    upto = [path for path in found if int(path.stem) <= round_]
    for path in {*found} - {*upto[-KEPT:]}:
        path.unlink()


def write(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file whole or not at all. It is safe when this returns."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync(path.parent)  # the new name must be safe before older files go


def load_newest(folder: Path, not_after: int, accept: Accept = lambda content: True) -> dict[str, Any] | None:
    """The newest whole checkpoint of at most that round that is accepted, or None. A damaged one is passed over."""
    for path in sorted(folder.glob(_NAMES), reverse=True):
        if int(path.stem) <= not_after and (content := _load(path)) is not None and accept(content):
            return content
    return None


def load_all(folder: Path) -> list[dict[str, Any]]:
    """All whole checkpoints that are kept, oldest first."""
    found = [_load(path) for path in sorted(folder.glob(_NAMES))]
    return [content for content in found if content is not None]


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _load(path: Path) -> dict[str, Any] | None:
    data = path.read_bytes()
    digest, payload = data[:32], data[32:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    content: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    return content


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
