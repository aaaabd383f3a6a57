"""The lock of a device: many together or one alone, between processes, first come first served."""

import subprocess
import sys
import time

import pytest
import torch

from fedbench.workers import device
from fedbench.workers.device import DeviceLock, is_out_of_memory

HOLD = """
import sys
from pathlib import Path
from fedbench.workers.device import DeviceLock
with getattr(DeviceLock("cuda-0", Path(sys.argv[1])), sys.argv[2])(lambda: False):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "POLL_SECONDS", 0.01)
    return DeviceLock("cuda-0", tmp_path)


@pytest.fixture
def hold(tmp_path):
    """Another process that asks for the device; `said()` waits until it has it."""
    processes = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def soon():
    """Told to stop after a short while."""
    end = time.monotonic() + 0.1
    return lambda: time.monotonic() > end


def got(context):
    with context as mine:
        return mine


def test_many_processes_share_a_device(lock, hold):
    other = hold("shared")
    assert other.stdout.readline() == "mine\n"

    assert got(lock.shared(soon()))


@pytest.mark.parametrize(("theirs", "ours"), [("shared", "alone"), ("alone", "shared"), ("alone", "alone")])
def test_who_has_it_alone_has_it_alone(lock, hold, theirs, ours):
    other = hold(theirs)
    assert other.stdout.readline() == "mine\n"

    assert not got(getattr(lock, ours)(soon()))

    other.communicate("done\n")
    assert got(getattr(lock, ours)(soon()))


def test_a_process_that_dies_lets_go_of_it(lock, hold):
    other = hold("alone")
    assert other.stdout.readline() == "mine\n"

    other.kill()
    other.wait()

    assert got(lock.alone(soon()))


def test_newcomers_wait_for_who_waits_to_have_it_alone(lock, hold):
    with lock.shared(soon()):
        waiting = hold("alone")
        deadline = time.monotonic() + 20
        while got(lock.shared(soon())):  # until the other process has begun to wait
            assert time.monotonic() < deadline

    assert waiting.stdout.readline() == "mine\n"


def test_devices_do_not_share_a_lock(lock, tmp_path):
    with lock.alone(soon()):
        assert got(DeviceLock("cuda-1", tmp_path).alone(soon()))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_error_for_want_of_memory_is_known_by_its_kind_or_its_words(error, expected):
    assert is_out_of_memory(error) == expected
