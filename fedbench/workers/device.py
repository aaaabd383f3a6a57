"""A device that workers of this machine share, or that one of them has to itself after it ran out of memory."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.1
_OUT_OF_MEMORY = ("out of memory", "alloc_failed")  # of the device; of cuBLAS and cuDNN


class DeviceLock:
    """Many hold the device together, or one holds it alone, on this machine; a process that dies lets go of it.

    Whoever wants it alone waits for those who hold it, and newcomers wait for him: he takes the turnstile, through
    which everyone comes in, and keeps it until he is done.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"fedbench-{os.getuid()}"
        self._name = name

    @contextmanager
    def shared(self, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Holds the device together with others. Yields whether it does: not when it was told to stop meanwhile."""
        with self._file("use") as use:
            with self._file("turnstile") as turnstile:
                mine = _wait(turnstile, fcntl.LOCK_EX, should_stop) and _wait(use, fcntl.LOCK_SH, should_stop)
            yield mine

    @contextmanager
    def alone(self, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Holds the device alone. Yields whether it does: not when it was told to stop meanwhile."""
        with self._file("turnstile") as turnstile, self._file("use") as use:
            yield _wait(turnstile, fcntl.LOCK_EX, should_stop) and _wait(use, fcntl.LOCK_EX, should_stop)

    @contextmanager
    def _file(self, what: str) -> Iterator[int]:
        """An open file, whose lock ends when it is closed."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder / f"{self._name}.{what}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _wait(descriptor: int, kind: int, should_stop: Callable[[], bool]) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if should_stop():
                return False
            time.sleep(POLL_SECONDS)
        else:
            return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def free_memory() -> None:
    """Give back what torch keeps of the device's memory for later."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
