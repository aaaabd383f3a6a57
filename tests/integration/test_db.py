"""`fedbench db`: results travel between machines, as databases and as folders."""

import json
import shutil
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[1] / "fixtures" / "schema_0001.sqlite"


@pytest.fixture
def old(fedbench):
    """A place with a database of the first schema: a finished job, a failed one, a waiting one."""
    fedbench.db.parent.mkdir()
    shutil.copy(FIXTURE, fedbench.db)
    return fedbench


@pytest.fixture
def filled(old):
    assert old("db", "upgrade").stdout == "schema 0002\n"
    return old


def accuracy(place, *options):
    """PM and GM accuracy, in percent, as `fedbench table` prints them."""
    done = place("table", "--format", "json", *options)
    assert done.returncode == 0, done.stderr
    cells = {cell["figure"]: cell["mean"] for cell in json.loads(done.stdout)["cells"]}
    return cells["PM acc"], cells["GM acc"]


def test_an_old_database_is_upgraded_and_its_numbers_stay(filled):
    assert accuracy(filled) == (75.0, 50.0)


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_an_export_renders_like_its_database_and_makes_one(filled, format_):
    done = filled("db", "export", "reference", "--format", format_)
    assert (done.returncode, done.stdout) == (0, "reference: 3 job(s), 2 run(s)\n")

    assert accuracy(filled, "--db", "reference") == (75.0, 50.0)

    merged = filled("db", "merge", "reference", "--db", "new.sqlite")
    assert (merged.returncode, merged.stdout) == (
        *(0, "new.sqlite: 3 new job(s), 0 finished elsewhere, 2 new run(s)\n"),
    )
    assert accuracy(filled, "--db", "new.sqlite") == (75.0, 50.0)


def test_a_part_is_exported_by_grid_and_status(filled):
    done = filled("db", "export", "reference", "--grid", "first", "--status", "done,failed")

    assert done.stdout == "reference: 2 job(s), 2 run(s)\n"
    wrong = filled("db", "export", "other", "--status", "dnoe")
    assert (wrong.returncode, wrong.stderr) == (2, "error: unknown status 'dnoe'.\nDid you mean done?\n")


def test_what_writes_refuses_an_export_and_names_the_way_out(filled):
    filled("db", "export", "reference")
    before = filled.tree()
    refusal = (
        "error: reference is an export, which is only read.\nMake a database of it first: fedbench db merge reference\n"
    )

    for command in (
        ("run", "--grid", "tiny.yaml"),
        ("worker",),
        ("queue", "retry"),
        ("queue", "pause"),
        ("db", "vacuum"),
        ("db", "merge", "results/fedbench.sqlite"),
    ):
        done = filled(*command, "--db", "reference")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", refusal), command

    assert {path: content for path, content in before.items() if "reference" in path.parts} == {
        path: content for path, content in filled.tree().items() if "reference" in path.parts
    }


def test_a_damaged_export_is_refused_and_the_target_stays(filled):
    filled("db", "export", "reference")
    (filled.folder / "reference" / "run.parquet").write_bytes(b"PAR1")
    before = filled.sql("SELECT * FROM job")

    done = filled("db", "merge", "reference")

    assert (done.returncode, done.stderr) == (
        2,
        "error: the export reference is damaged: run.parquet is not what was written.\n"
        "Make it again: fedbench db export\n",
    )
    assert filled.sql("SELECT * FROM job") == before


def test_an_old_database_is_merged_as_it_is(old):
    before = old.db.read_bytes()

    done = old("db", "merge", "results/fedbench.sqlite", "--db", "new.sqlite")

    assert done.stdout == "new.sqlite: 3 new job(s), 0 finished elsewhere, 2 new run(s)\n"
    assert old.db.read_bytes() == before


def test_a_missing_source_is_a_clear_error_and_makes_no_target(fedbench):
    done = fedbench("db", "merge", "missing.sqlite")

    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: there is no database missing.sqlite.")
    assert not fedbench.db.exists()


def test_vacuum_says_what_went(filled):
    (key,) = filled.sql("SELECT key FROM job WHERE status = 'done'")[0]
    left = filled.folder / "results" / "checkpoints" / key
    left.mkdir(parents=True)
    (left / "00000002.ckpt").write_bytes(b"x" * 5000)

    done = filled("db", "vacuum", "--superseded")

    words, freed = done.stdout.rstrip("\n").split("; ")
    assert words == "results/fedbench.sqlite: removed 0 orphaned row(s), 0 run(s), 1 checkpoint(s)"
    assert freed.endswith(" bytes freed")
    assert int(freed.split()[0].replace(",", "")) >= 5000
    assert not left.exists()


def test_a_sweep_that_was_run_elsewhere_has_nothing_left_to_do_here(finished, fedbench):
    """The results of a real run: exported there, merged here, and the grid is done."""
    folder = fedbench.folder / "from_there"
    assert finished("db", "export", folder).returncode == 0

    assert fedbench("db", "merge", "from_there").returncode == 0

    done = fedbench("run", "--grid", "tiny.yaml")
    assert done.returncode == 0
    assert "3 jobs: 2 done, 1 diverged, 0 to do" in done.stdout
    assert fedbench("table", "--grid", "tiny").stdout == finished("table", "--grid", "tiny").stdout
