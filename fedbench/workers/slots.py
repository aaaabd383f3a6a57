"""Device slots: where jobs can run at the same time on this machine, and the environment each worker gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedbench.errors import FedbenchError


@dataclass(frozen=True)
class Slot:
    """One worker's place: the device it shows in listings, the device torch sees, its threads and environment."""

    name: str
    device: str
    threads: int
    environment: dict[str, str] = field(default_factory=dict)
    lock: str = ""
    """Names the device among this machine's, for those who share it; empty for the CPU."""
    deterministic: bool = False


# glibc gives large blocks back to the system at once, and every batch faults its pages in again: keeping them makes
# evaluation of convolutional networks on a CPU 1.8 times faster. Other C libraries do not read these.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
# Without it cuBLAS may add in another order every time. It is read when CUDA is first used.
CUBLAS_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# What Apple's GPU cannot do yet, the CPU does instead. Read when torch is imported.
MPS_FALLBACK = {"PYTORCH_ENABLE_MPS_FALLBACK": "1"}


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """How many CUDA devices this process may use."""
    import torch

    return torch.cuda.device_count()


def accelerators() -> list[str]:
    """The devices to prefer to the CPU: `cuda:0`, `cuda:1` ..., or `mps` on a Mac that has it."""
    import torch

    return [f"cuda:{index}" for index in range(cuda_devices())] or ["mps"] * torch.backends.mps.is_available()


def make_slots(
    devices: str = "",
    workers: int | None = None,
    per_device: int = 1,
    *,
    deterministic: bool = False,
    present: Sequence[str] | None = None,
) -> list[Slot]:
    """The slots for `--devices`, `--workers` and `--per-device`: every accelerator `per_device` times, else the cores.

    `present` are the accelerators; None asks torch. Raises FedbenchError for a device that is not there.
    """
    available = accelerators() if present is None else present
    names = [name.strip() for name in devices.split(",") if name.strip()] or list(available) or ["cpu"]
    for name in names:
        if name not in ("cpu", *available):
            raise FedbenchError(f"there is no device {name!r}.", f"Present: {', '.join(['cpu', *available])}.")
    if names == ["cpu"]:
        names = ["cpu"] * (workers or cores() * per_device)
    else:
        names = [name for name in names for _ in range(per_device)][: workers or None]
    threads = max(1, cores() // len(names))
    return [_slot(name, threads, deterministic) for name in names]


def _slot(name: str, threads: int, deterministic: bool) -> Slot:
    # Read when torch is imported: more threads than cores make workers several times slower, not faster.
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **KEEP_FREED_MEMORY}
    if name == "cpu":
        device, lock, more = "cpu", "", {"CUDA_VISIBLE_DEVICES": ""}
    elif name == "mps":
        device, lock, more = "mps", "mps", MPS_FALLBACK
    else:  # the worker sees its device alone, as cuda:0
        visible = _visible(int(name.partition(":")[2]))
        device, lock, more = "cuda:0", f"cuda-{visible.replace('/', '-')}", {"CUDA_VISIBLE_DEVICES": visible}
        more |= CUBLAS_WORKSPACE if deterministic else {}
    return Slot(name, device, threads, environment | more, lock, deterministic)


def _visible(index: int) -> str:
    """A CUDA device's name outside: a scheduler may have given this process only some, by number or by UUID."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if given is None else given.split(",")[index].strip()
