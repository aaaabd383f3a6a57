"""Device slots: where jobs can run at the same time on this machine, and the environment each worker gets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from fedbench.errors import FedbenchError


@dataclass(frozen=True)
class Slot:
    """One worker's place: the device it shows in listings, the device torch sees, its threads and environment."""

    name: str
    device: str
    threads: int
    environment: dict[str, str] = field(default_factory=dict)


# glibc gives large blocks back to the system at once, and every batch faults its pages in again: keeping them makes
# evaluation of convolutional networks on a CPU 1.8 times faster. Other C libraries do not read these.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """How many CUDA devices there are."""
    import torch

    return torch.cuda.device_count()


def make_slots(
    devices: str = "", workers: int | None = None, per_device: int = 1, *, cuda: int | None = None
) -> list[Slot]:
    """The slots for `--devices`, `--workers` and `--per-device`: every CUDA device `per_device` times, else the cores.

    `cuda` is the number of CUDA devices; None asks torch. Raises FedbenchError for a device that is not there.
    """
    available = cuda_devices() if cuda is None else cuda
    names = [name.strip() for name in devices.split(",") if name.strip()]
    names = names or [f"cuda:{index}" for index in range(available)] or ["cpu"]
    for name in names:
        if name != "cpu" and name not in {f"cuda:{index}" for index in range(available)}:
            present = ", ".join(["cpu", *(f"cuda:{index}" for index in range(available))])
            raise FedbenchError(f"there is no device {name!r}.", f"Present: {present}.")
    if names == ["cpu"]:
        names = ["cpu"] * (workers or cores() * per_device)
    else:
        names = [name for name in names for _ in range(per_device)][: workers or None]
    threads = max(1, cores() // len(names))
    return [_slot(name, threads) for name in names]


def _slot(name: str, threads: int) -> Slot:
    # Read when torch is imported: more threads than cores make workers several times slower, not faster.
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **KEEP_FREED_MEMORY}
    if name == "cpu":
        return Slot(name, "cpu", threads, {**environment, "CUDA_VISIBLE_DEVICES": ""})
    # The worker sees its device alone, as cuda:0.
    return Slot(name, "cuda:0", threads, {**environment, "CUDA_VISIBLE_DEVICES": name.partition(":")[2]})
