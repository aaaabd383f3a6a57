"""Device slots: how many workers there are, on which devices, and what each of them gets."""

import pytest

from fedbench.errors import FedbenchError
from fedbench.workers import slots
from fedbench.workers.slots import KEEP_FREED_MEMORY, make_slots


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(slots, "cores", lambda: 8)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def cuda(count):
    """The accelerators of a machine with this many CUDA devices."""
    return [f"cuda:{index}" for index in range(count)]


def names(found):
    return [slot.name for slot in found]


# --- CPU ---


def test_a_machine_without_cuda_has_a_worker_of_one_thread_per_core():
    found = make_slots(present=[])

    assert [(slot.name, slot.device, slot.threads) for slot in found] == [("cpu", "cpu", 1)] * 8


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_the_cores_are_divided_among_the_workers(workers, threads):
    found = make_slots(workers=workers, present=[])

    assert [slot.threads for slot in found] == [threads] * workers


def test_several_workers_per_device_multiply_the_cores():
    assert len(make_slots(per_device=2, present=[])) == 16


def test_the_cpu_can_be_asked_for_on_a_machine_with_cuda():
    assert names(make_slots("cpu", workers=3, present=cuda(4))) == ["cpu"] * 3


def test_a_worker_on_the_cpu_sees_no_cuda_device_and_keeps_to_its_threads():
    (first, _) = make_slots(workers=2, present=[])

    threads = {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "", **threads, **KEEP_FREED_MEMORY}


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(slots.os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)

    assert slots.cores() == 3


# --- CUDA ---


def test_every_cuda_device_has_a_worker():
    found = make_slots(present=cuda(4))

    assert names(found) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [slot.threads for slot in found] == [2] * 4


def test_devices_can_be_chosen():
    assert names(make_slots("cuda:2, cuda:0", present=cuda(4))) == ["cuda:2", "cuda:0"]


def test_a_device_can_have_several_workers():
    assert names(make_slots("cuda:1,cuda:3", per_device=2, present=cuda(4))) == ["cuda:1", "cuda:1", "cuda:3", "cuda:3"]


def test_there_are_no_more_workers_than_asked_for():
    assert names(make_slots(workers=2, present=cuda(4))) == ["cuda:0", "cuda:1"]


def test_a_worker_sees_its_cuda_device_alone():
    found = make_slots("cuda:2", present=cuda(4))

    assert [(slot.device, slot.environment["CUDA_VISIBLE_DEVICES"]) for slot in found] == [("cuda:0", "2")]


def test_a_worker_beside_a_cuda_device_keeps_to_its_threads():
    found = make_slots(present=cuda(4))

    assert {(slot.environment["OMP_NUM_THREADS"], slot.environment["MKL_NUM_THREADS"]) for slot in found} == {
        ("2", "2")
    }


def seen(found):
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in found]


def test_devices_that_a_scheduler_has_given_are_counted_among_those_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")

    assert seen(make_slots(present=cuda(2))) == ["5", "7"]
    assert seen(make_slots("cuda:1", present=cuda(2))) == ["7"]


def test_devices_may_be_given_by_their_uuid(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,MIG-GPU-3f2a/1/0")

    found = make_slots("cuda:1,cuda:0", present=cuda(2))

    assert seen(found) == ["MIG-GPU-3f2a/1/0", "GPU-8932f937"]
    assert not any("/" in slot.lock for slot in found), "it names a file"


def test_workers_share_the_lock_of_their_device_and_no_other(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    found = make_slots(per_device=2, present=cuda(2))

    assert [slot.lock for slot in found] == ["cuda-5", "cuda-5", "cuda-7", "cuda-7"]
    assert [slot.lock for slot in make_slots("cpu", workers=1, present=[])] == [""]


def test_the_accelerators_are_those_that_torch_sees(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)

    assert slots.accelerators() == ["cuda:0", "cuda:1", "cuda:2"]


# --- MPS ---


def test_a_mac_uses_its_gpu_by_default(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)

    (found,) = make_slots()

    assert (found.name, found.device, found.threads, found.lock) == ("mps", "mps", 8, "mps")
    assert found.environment["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"


def test_a_machine_without_mps_has_the_cpu_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)

    assert slots.accelerators() == []


def test_mps_can_have_several_workers():
    assert names(make_slots("mps", per_device=2, present=["mps"])) == ["mps", "mps"]


# --- determinism ---


def test_deterministic_workers_have_the_workspace_that_cublas_needs_for_it():
    (found,) = make_slots("cuda:0", deterministic=True, present=cuda(1))

    assert found.deterministic
    assert found.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_other_workers_have_the_workspace_that_cublas_chooses():
    (found,) = make_slots("cuda:0", present=cuda(1))

    assert not found.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in found.environment


# --- mistakes ---


@pytest.mark.parametrize("device", ["cuda:4", "cuda", "gpu", "cuda:-1", "mps"])
def test_an_unknown_device_is_a_clear_error_that_lists_those_present(device):
    with pytest.raises(FedbenchError, match=f"no device '{device}'") as caught:
        make_slots(f"cuda:0,{device}", present=cuda(2))

    assert caught.value.hint == "Present: cpu, cuda:0, cuda:1."
