"""`fedbench doctor`: what it finds, and that every problem comes with advice."""

import sqlite3
from collections import namedtuple
from importlib import metadata

import numpy as np
import pytest
from sqlalchemy import text

from fedbench import doctor, queue
from fedbench.dataset import datasets
from fedbench.doctor import examine
from fedbench.store.database import database_url, writing


@pytest.fixture
def findings(url, tmp_path):
    """The report by what each line is about; the data root is empty."""
    return lambda where=url: {finding.what: finding for finding in examine(where, tmp_path / "data")}


def damage(root):
    """Files in MNIST's place that are not MNIST's."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"garbage")


def test_a_machine_without_problems_is_not_broken(findings):
    assert [finding for finding in findings().values() if finding.broken] == []


def test_the_versions_of_what_matters_are_named(findings):
    found = findings()

    for name in ("fedbench", "torch", "sqlalchemy", "pandas"):
        assert found[name].state == metadata.version(name)


def test_a_missing_optional_package_is_no_breakage_and_says_how_to_install_it(findings, monkeypatch):
    def version(name, known=metadata.version):
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(doctor.metadata, "version", version)

    found = findings()["ray"]

    assert (found.advice, found.broken) == ("pip install 'fedbench[ray]'", False)


def test_a_torchvision_that_does_not_import_is_broken(findings, monkeypatch):
    def fails():
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("fedbench.vision.torchvision_datasets", fails)

    found = findings()["torchvision import"]

    assert found.broken
    assert "Reinstall" in found.advice


def test_the_workers_of_a_machine_without_cuda_are_explained(findings, monkeypatch):
    monkeypatch.setattr("fedbench.workers.slots.cuda_devices", lambda: 0)
    monkeypatch.setattr("fedbench.workers.slots.cores", lambda: 6)

    found = findings()

    assert found["cores"].state == "6"
    assert (found["CUDA devices"].state, bool(found["CUDA devices"].advice)) == ("0", True)
    assert found["workers by default"].state == "6 (1 thread(s) each)"


def test_the_workers_of_a_machine_with_cuda_are_its_devices(findings, monkeypatch):
    monkeypatch.setattr("fedbench.workers.slots.cuda_devices", lambda: 2)
    monkeypatch.setattr("fedbench.workers.slots.cores", lambda: 6)

    found = findings()

    assert (found["CUDA devices"].state, found["CUDA devices"].advice) == ("2", "")
    assert found["workers by default"].state == "2 (3 thread(s) each)"


# --- the database ---


def test_a_database_that_is_not_there_yet_is_no_breakage_and_not_made(findings, tmp_path):
    found = findings()["database"]

    assert "does not exist yet" in found.state
    assert "fedbench run" in found.advice
    assert not found.broken
    assert not (tmp_path / "results").exists()


def test_a_database_is_shown_with_its_jobs(engine, findings, make_job):
    queue.enqueue(engine, "sweep", {}, [make_job(seed=0), make_job(seed=1)])

    assert findings()["database"].state.endswith("fedbench.sqlite: 2 pending")


def test_failed_jobs_come_with_the_way_to_retry_them(engine, findings, make_job):
    queue.enqueue(engine, "sweep", {}, [make_job()])
    with writing(engine).begin() as connection:
        connection.execute(text("UPDATE job SET status = 'failed'"))

    found = findings()["failed jobs"]

    assert (found.state, found.broken) == ("1", False)
    assert "fedbench queue retry" in found.advice


def test_a_database_that_cannot_be_used_is_broken(findings, tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE recipe (name TEXT)")
    connection.close()

    found = findings(database_url(str(foreign)))["database"]

    assert found.broken
    assert "--db" in found.advice


# --- data and disk ---


def test_the_embedded_data_set_is_verified(findings):
    assert findings()["data set digits"].state == "verified"


def test_a_missing_data_set_is_no_breakage_and_says_where_to_put_it(findings, tmp_path):
    found = findings()["data set mnist"]

    assert (found.state, found.broken) == ("missing", False)
    assert str(tmp_path / "data") in found.advice


def test_a_damaged_data_set_is_broken(findings, tmp_path):
    damage(tmp_path / "data")

    found = findings()["data set mnist"]

    assert found.broken
    assert "damaged" in found.state
    assert "Delete" in found.advice


def test_a_cache_whose_content_changed_is_broken(findings, tmp_path):
    cache = tmp_path / "data" / "fedbench" / "mnist"
    cache.mkdir(parents=True)
    for name, array in (("x", np.zeros((2, 1, 28, 28), np.uint8)), ("y", np.zeros(2, np.int64)), ("n_train", 1)):
        np.save(cache / f"{name}.npy", array)

    found = findings()["data set mnist"]

    assert found.broken
    assert "SHA-256" in found.state


def test_every_data_set_is_looked_at(findings):
    assert {f"data set {name}" for name in datasets.names()} <= set(findings())


@pytest.mark.parametrize(("free", "advises"), [(1.0e9, True), (50.0e9, False)])
def test_a_disk_that_is_nearly_full_comes_with_advice(findings, monkeypatch, free, advises):
    usage = namedtuple("usage", "free")(free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)

    assert bool(findings()["free disk"].advice) == advises


def test_all_broken_things_come_with_advice(findings, tmp_path):
    damage(tmp_path / "data")
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be looked at " * 10)

    broken = [finding for finding in findings(database_url(str(tmp_path / "notes.txt"))).values() if finding.broken]

    assert [finding.what for finding in broken] == ["database", "data set mnist", "data set pair"]
    assert all(finding.advice for finding in broken)
