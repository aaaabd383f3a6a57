"""Damaged files: cut short or with flipped bits, they give what was written, or are refused; never something else.

Checkpoints, exports and a user's own files are guarded by hashes, so every flipped bit is noticed. SQLite has no
checksums: a bit inside a stored number is a different number, and nobody can tell. What is promised for a database is
one clear message or an answer, never a traceback.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench import checkpoint, cli
from fedbench.dataset import DataError, dataset_name, find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.store.database import database_url, open_database, upgrade
from fedbench.store.export import export, open_export, tables

OLD_RESULTS = Path(__file__).parents[1] / "fixtures" / "schema_0001.sqlite"
FUZZ = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PLACE = st.floats(0, 1, exclude_max=True)
DAMAGE = st.tuples(st.just("cut"), PLACE, st.just(0)) | st.tuples(st.just("flip"), PLACE, st.integers(0, 7))


def damaged(data, how):
    """The bytes without their end, or with one bit flipped; always others than they were."""
    kind, place, bit = how
    at = int(place * len(data))
    return data[:at] if kind == "cut" else data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def check_message(error):
    assert len(str(error).splitlines()) <= 5


# --- checkpoints ---


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for round_ in (3, 4):
        checkpoint.save(folder, round_, {"round": round_, "server": {"w": torch.arange(20.0) * round_}})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@FUZZ
@given(older=st.none() | DAMAGE, newer=DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_an_older_one_or_to_none(checkpoints, tmp_path, older, newer):
    good = checkpoints["00000003.ckpt"]
    (tmp_path / "00000003.ckpt").write_bytes(good if older is None else damaged(good, older))
    (tmp_path / "00000004.ckpt").write_bytes(damaged(checkpoints["00000004.ckpt"], newer))

    found = checkpoint.load_newest(tmp_path, not_after=9)

    if older is not None:
        assert found is None
    else:
        assert found["round"] == 3
        assert torch.equal(found["server"]["w"], torch.arange(20.0) * 3)


# --- databases ---


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A database of the current schema with a finished job, a failed one and a waiting one."""
    path = tmp_path_factory.mktemp("results") / "fedbench.sqlite"
    shutil.copy(OLD_RESULTS, path)
    upgrade(database_url(str(path)))
    engine = open_database(database_url(str(path)), create=False)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return Content(path.read_bytes())


class Content(bytes):
    """Bytes that nobody wants to see in a test's report."""

    def __repr__(self):
        return f"{len(self)} bytes"


@pytest.fixture
def fedbench(monkeypatch, capsys, tmp_path):
    """Runs a command as the shell would, in this process; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


READERS = [
    ("status", "--json"),
    ("queue", "list", "--json"),
    ("table", "--format", "json"),
    ("db", "export", "exported", "--format", "csv"),
]


@settings(FUZZ, max_examples=50)
@given(how=DAMAGE, command=st.sampled_from(READERS))
def test_a_damaged_database_gives_an_answer_or_one_message(results, tmp_path, fedbench, how, command):
    for leftover in tmp_path.glob("damaged.sqlite*"):
        leftover.unlink()
    (tmp_path / "damaged.sqlite").write_bytes(damaged(results, how))
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)

    code, out, err = fedbench(*command, "--db", "damaged.sqlite")

    assert code in (0, 2)
    if code == 2:
        assert err.startswith("error: ")
        assert len(err.splitlines()) <= 20
        assert "Traceback" not in err
    elif command[0] != "db":
        json.loads(out)


@settings(FUZZ, max_examples=20)
@given(place=PLACE, command=st.sampled_from(READERS[:3]))
def test_a_database_that_is_cut_short_never_gives_other_numbers(results, tmp_path, fedbench, place, command):
    (tmp_path / "whole.sqlite").write_bytes(results)
    for leftover in tmp_path.glob("cut.sqlite*"):
        leftover.unlink()
    (tmp_path / "cut.sqlite").write_bytes(results[: int(place * len(results))])

    whole = fedbench(*command, "--db", "whole.sqlite")
    code, out, _ = fedbench(*command, "--db", "cut.sqlite")

    assert whole[0] == 0
    assert code == 2 or (code, out) == whole[:2]


# --- exports ---


@pytest.fixture(scope="module", params=["parquet", "csv"])
def exported(request, results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    (folder / "results.sqlite").write_bytes(results)
    engine = open_database(database_url(str(folder / "results.sqlite")), create=False)
    export(engine, folder / "export", request.param)
    engine.dispose()
    return folder / "export"


def contents(engine):
    with engine.connect() as connection:
        return {table.name: connection.execute(table.select()).fetchall() for table in tables()}


@FUZZ
@given(how=DAMAGE, data=st.data())
def test_every_damage_to_a_table_of_an_export_is_noticed(exported, tmp_path, how, data):
    files = sorted(path for path in exported.iterdir() if path.suffix != ".json" and path.stat().st_size)
    chosen = data.draw(st.sampled_from(files))
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(exported, tmp_path / "copy")
    (tmp_path / "copy" / chosen.name).write_bytes(damaged(chosen.read_bytes(), how))

    with pytest.raises(FedbenchError, match=f"damaged: {chosen.name}"):
        open_export(tmp_path / "copy")


@settings(FUZZ, max_examples=25)
@given(how=DAMAGE)
def test_a_damaged_manifest_is_noticed_or_changes_nothing(exported, tmp_path, how):
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(exported, tmp_path / "copy")
    manifest = tmp_path / "copy" / "manifest.json"
    manifest.write_bytes(damaged(manifest.read_bytes(), how))

    try:
        opened = open_export(tmp_path / "copy")
    except FedbenchError as error:
        check_message(error)
    else:
        assert contents(opened) == contents(open_export(exported))


# --- a user's own files ---


def own_file(kind, path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), np.arange(12) % 3
    if kind == "npz":
        np.savez_compressed(path, x=x, y=y)
    else:
        rows = "".join(f"{','.join(map(str, row))},{label}\n" for row, label in zip(x, y, strict=True))
        path.write_text("a,b,c,label\n" + rows)


@pytest.mark.parametrize("kind", ["npz", "csv"])
@FUZZ
@given(how=DAMAGE)
def test_a_damaged_file_of_ones_own_never_passes_under_the_old_name(kind, tmp_path, how):
    path = tmp_path / f"mine.{kind}"
    own_file(kind, path)
    name = dataset_name(f"{kind}[path={path}]")
    path.write_bytes(damaged(path.read_bytes(), how))

    with pytest.raises(DataError, match="has changed"):
        load_arrays(find_dataset(name), tmp_path / "data")


@pytest.mark.parametrize("kind", ["npz", "csv"])
@FUZZ
@given(how=DAMAGE)
def test_a_damaged_file_of_ones_own_is_read_as_finite_numbers_or_refused(kind, tmp_path, how):
    path = tmp_path / f"mine.{kind}"
    own_file(kind, path)
    path.write_bytes(damaged(path.read_bytes(), how))

    try:
        arrays = load_arrays(find_dataset(f"{kind}[path={path}]"), tmp_path / "data")
    except FedbenchError as error:
        check_message(error)
    else:
        assert len(arrays.x) == len(arrays.y) > 0
        assert np.isfinite(arrays.x).all()
