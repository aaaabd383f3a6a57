"""The command line from outside: what a user types, reads, and finds in the results folder afterwards."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedbench.cli import main

HEAVY = {"torch", "pandas", "matplotlib", "sqlalchemy", "numpy", "sklearn", "torchvision", "alembic"}
COMMAND = Path(sys.executable).with_name("fedbench")
UNLUCKY = '''
"""Unlucky: fails in its second round, at its second client."""

import os
import torch
from fedbench.algorithms.fedavg import FedAvg

class Unlucky(FedAvg):
    title = "Unlucky"

    def update(self, down, memory, data, ctx):
        if (ctx.round, ctx.client) == (2, 1):
            raise RuntimeError(f"no luck with {torch.get_num_threads()} of {os.environ['OMP_NUM_THREADS']} threads")
        return super().update(down, memory, data, ctx)
'''
WITH_UNLUCKY = """
name: unlucky
methods: [unlucky, fedavg]
tasks: [{dataset: digits, clients: 2}]
set: {rounds: 3}
"""


@pytest.fixture
def call(fedbench, monkeypatch, capfd):
    """The command without a process of its own, which saves the time of starting one for every mistake there is."""
    monkeypatch.chdir(fedbench.folder)
    for name, value in fedbench.environment.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedbench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(words, ended.value.code, *capfd.readouterr())

    return run


def jobs(run, *words):
    """The rows of a dry run."""
    shown = run("run", "--grid", "tiny.yaml", "--dry-run", "--json", *words)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


# --- help ---


def test_help_answers_within_half_a_second():
    def seconds():
        started = time.perf_counter()
        subprocess.run([COMMAND, "--help"], check=True, capture_output=True)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.5


def test_help_imports_nothing_heavy():
    shown = subprocess.run([sys.executable, "-X", "importtime", COMMAND, "--help"], capture_output=True, text=True)

    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in shown.stderr.splitlines()}
    assert "typer" in imported
    assert imported & HEAVY == set()


def test_help_names_every_command(fedbench):
    shown = fedbench("--help")

    for command in ("run", "worker", "status", "queue", "table", "plot", "methods", "datasets", "grids", "doctor"):
        assert re.search(rf"^\s*{command}\b", shown.stdout, re.MULTILINE), command


# --- a grid from beginning to end ---


def test_a_grid_runs_to_its_results(finished):
    assert finished.run.returncode == 0, finished.run.stderr
    ended = finished.sql(
        "SELECT job.status, run.status, last_round FROM job JOIN run ON job_id = job.id ORDER BY job.id"
    )
    assert ended[:2] == [("done", "done", 3), ("done", "done", 3)]


def test_a_job_that_diverges_is_a_result_and_no_failure(finished):
    assert finished.run.returncode == 0, finished.run.stderr
    assert finished.sql("SELECT job.status, run.status FROM job JOIN run ON job_id = job.id WHERE job.id = 3") == [
        ("diverged", "diverged")
    ]


def test_a_run_says_what_it_did_and_how_to_see_it(finished):
    lines = finished.run.stdout.splitlines()

    assert lines[0] == "3 jobs: 3 to do (no estimate of time yet: nothing like it has run)"
    ended = [re.sub(r"\d+\.\d+", "#", re.sub(r"^\[\d/3\]", "", line)).strip() for line in lines[1:4]]
    assert sorted(ended) == [
        "diverged  fedprox digits small seed 0  # s",
        "done  fedavg digits small seed 0  GM #  # s",
        "done  local digits small seed 0  PM #  # s",
    ]
    assert lines[4] == "finished: 2 done, 1 diverged in results/fedbench.sqlite. See: fedbench table --grid tiny"
    assert finished.run.stderr == ""


def test_a_run_measures_every_round_and_every_client(finished):
    accuracies = finished.sql(
        "SELECT method, stage, count(DISTINCT round), count(DISTINCT client) FROM "
        "(SELECT evaluation.*, metric.client, json_extract(spec, '$.method') AS method FROM metric "
        "JOIN evaluation ON evaluation_id = evaluation.id JOIN run ON run_id = run.id JOIN job ON job_id = job.id "
        "WHERE metric.name = 'accuracy' AND run.status = 'done') GROUP BY method, stage ORDER BY method, stage"
    )

    assert accuracies == [
        (method, *figures)
        for method in ("fedavg", "local")
        for figures in (("best", 1, 10), ("final", 1, 10), ("train", 3, 0))
    ]


def test_a_finished_run_leaves_nothing_but_the_database(finished):
    left = [path.name for path in (finished.folder / "results").rglob("*") if path.is_file()]

    assert left == ["fedbench.sqlite"]


def test_a_second_run_does_nothing_and_says_so(finished):
    before = finished.sql("SELECT * FROM run")

    again = finished("run", "--grid", "tiny.yaml")

    assert again.returncode == 0
    assert "nothing to do: 2 done, 1 diverged" in again.stdout
    assert finished.sql("SELECT * FROM run") == before


def test_the_status_shows_the_sweep(finished):
    shown = finished("status", "--json")

    expected = {"sweep": "tiny", "pending": 0, "running": 0, "done": 2, "diverged": 1, "failed": 0, "cancelled": 0}
    assert json.loads(shown.stdout) == [expected]


def test_the_queue_lists_and_shows_the_jobs(finished):
    listed = json.loads(finished("queue", "list", "--json").stdout)
    shown = json.loads(finished("queue", "show", listed[0]["key"]).stdout)

    assert [(row["job"], row["status"], row["round"]) for row in listed] == [
        ("fedavg digits small seed 0", "done", "3/3"),
        ("local digits small seed 0", "done", "3/3"),
        ("fedprox digits small seed 0", "diverged", "1/3"),
    ]
    assert (shown["status"], shown["spec"]["method"], shown["spec"]["rounds"], shown["error"]) == (
        "done",
        "fedavg",
        3,
        [],
    )


def test_the_database_can_be_named_in_the_environment(finished, fedbench):
    shown = fedbench("status", "--json", FEDBENCH_DB=str(finished.db))

    assert [row["sweep"] for row in json.loads(shown.stdout)] == ["tiny"]


def test_a_worker_without_work_says_so(finished):
    shown = finished("worker")

    assert (shown.returncode, shown.stdout) == (0, "no job is waiting in results/fedbench.sqlite.\n")


def test_a_reader_that_stops_reading_is_no_error(finished):
    reader = subprocess.run(
        f"'{COMMAND}' papers --json | head -c 1", shell=True, env=finished.environment, capture_output=True, text=True
    )

    assert (reader.stdout, reader.stderr) == ("[", "")


# --- dry runs and changes on the command line ---


def test_a_dry_run_changes_nothing(fedbench):
    before = fedbench.tree()

    shown = fedbench("run", "--grid", "tiny.yaml", "--dry-run")

    assert shown.returncode == 0
    assert "3 jobs: 3 to do (no estimate" in shown.stdout
    assert fedbench.tree() == before


def test_a_dry_run_estimates_the_time_from_history(finished):
    shown = finished("run", "--grid", "tiny.yaml", "--set", "rounds=30", "--workers", "1", "--dry-run")

    assert re.search(r"3 jobs: 3 to do, about \d+ (s|min) on 1 worker\(s\)", shown.stdout)


def test_a_dry_run_shows_what_is_done(finished):
    rows = jobs(finished, "--axis", "seed=0,1")

    assert [row["status"] for row in rows] == ["done", "new", "done", "new", "diverged", "new"]


def test_settings_axes_and_methods_change_the_grid(call):
    rows = jobs(call, "--set", "rounds=7", "--axis", "seed=1,2", "--methods", "fedprox[mu=0.5],fedavg")

    assert [(row["job"], row["rounds"]) for row in rows] == [
        ("fedprox[mu=0.5] digits small seed 1", 7),
        ("fedprox[mu=0.5] digits small seed 2", 7),
        ("fedavg digits small seed 1", 7),
        ("fedavg digits small seed 2", 7),
    ]


# --- jobs that do not end well ---


@pytest.fixture(scope="session")
def unlucky(new_place):
    """A place where a method of the user's own has failed beside one that works; `run` is how that went."""
    place = new_place("unlucky")
    plugins = place.folder / "plugins"
    plugins.mkdir()
    (plugins / "unlucky.py").write_text(UNLUCKY)
    place.environment["FEDBENCH_PLUGINS"] = str(plugins)
    place.write("unlucky.yaml", WITH_UNLUCKY)
    place.run = place("run", "--grid", "unlucky.yaml", "--workers", "1")
    return place


def test_a_failed_job_makes_the_run_exit_with_1_and_does_not_stop_the_others(unlucky):
    assert unlucky.run.returncode == 1
    assert [row["status"] for row in json.loads(unlucky("queue", "list", "--json").stdout)] == ["failed", "done"]


def test_a_failure_is_shown_as_it_happens_and_at_the_end_with_its_reason(unlucky):
    live = [line for line in unlucky.run.stdout.splitlines() if line.startswith("[1/2]  failed")]
    verdict = [line for line in unlucky.run.stdout.splitlines() if line.startswith("failed: ")]

    assert ["RuntimeError: no luck" in line for line in live] == [True]
    assert ["RuntimeError: no luck" in line for line in verdict] == [True]


def test_a_failure_says_how_to_look_and_how_to_retry(unlucky):
    ((key,),) = unlucky.sql("SELECT key FROM job WHERE status = 'failed'")

    assert f"fedbench queue show {key[:10]}" in unlucky.run.stdout
    assert "fedbench queue retry" in unlucky.run.stdout


def test_a_failed_job_shows_its_traceback_with_round_and_client(unlucky):
    ((key,),) = unlucky.sql("SELECT key FROM job WHERE status = 'failed'")

    error = json.loads(unlucky("queue", "show", key[:6]).stdout)["error"]

    assert error[0] == "Traceback (most recent call last):"
    assert "in update, round 2, client 1" in error
    assert any(line.startswith("RuntimeError: no luck") for line in error)


def test_a_worker_has_the_threads_of_its_slot(unlucky):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    assert f"no luck with {cores} of {cores} threads" in unlucky.run.stdout


def test_a_failed_job_is_not_tried_again_until_someone_asks(unlucky):
    again = unlucky("run", "--grid", "unlucky.yaml")

    assert again.returncode == 1
    assert "0 to do" in again.stdout
    assert unlucky.sql("SELECT count(*) FROM run WHERE status = 'failed'") == [(1,)]


def test_a_failed_job_is_put_back_and_taken_out_again(unlucky):
    retried = unlucky("queue", "retry")
    waiting = unlucky.sql("SELECT attempts FROM job WHERE status = 'pending'")
    cancelled = unlucky("queue", "cancel")

    assert (retried.stdout, cancelled.stdout) == ("1 job(s) back in the queue\n", "1 job(s) cancelled\n")
    assert waiting == [(0,)]
    assert unlucky.sql("SELECT status FROM job ORDER BY id") == [("cancelled",), ("done",)]


# --- bad input ---


BAD_GRIDS = {
    "a typo in a key": (TINY_WITH := "name: g\nmethods: [fedavg]\ntasks: [{dataset: digits}]\n") + "axis: {seed: [0]}",
    "a typo in a setting": TINY_WITH + "set: {ronds: 3}",
    "an unknown method": TINY_WITH.replace("fedavg", "fedavgg"),
    "an unknown data set": TINY_WITH.replace("digits", "digit"),
    "an unknown size": TINY_WITH + "set: {size: smal}",
    "a wrong type": TINY_WITH + "set: {rounds: many}",
    "an empty file": "",
    "not YAML": "methods: [fedavg\ntasks: }",
    "no YAML but bytes": "\x00\x01",
    "more clients than the data has": TINY_WITH + "set: {clients: 1000}",
}
NAMED = {
    "a typo in a key": ["bad.yaml", "'axis'", "axes"],
    "a typo in a setting": ["'ronds'", "rounds"],
    "an unknown method": ["'fedavgg'", "fedavg"],
    "an unknown data set": ["'digit'", "digits"],
    "an unknown size": ["smal", "small"],
    "a wrong type": ["rounds", "'many'"],
    "an empty file": ["bad.yaml", "name, methods and tasks"],
    "not YAML": ["bad.yaml is not YAML", "line 2"],
    "no YAML but bytes": ["bad.yaml is not YAML"],
    "more clients than the data has": ["digits", "1000"],
}


def assert_one_clear_message(ended, *words):
    """Exit code 2, one message on stderr that holds these words, nothing else, and no traceback."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error:") == 1
    for word in words:
        assert word in ended.stderr


@pytest.mark.parametrize("mistake", BAD_GRIDS)
def test_a_bad_grid_is_one_message_and_changes_nothing(fedbench, call, mistake):
    grid = fedbench.write("bad.yaml", BAD_GRIDS[mistake])
    before = fedbench.tree()

    ended = call("run", "--grid", grid)

    assert_one_clear_message(ended, *NAMED[mistake])
    assert fedbench.tree() == before


def test_a_mistake_is_the_same_message_from_outside(fedbench, call):
    grid = fedbench.write("bad.yaml", BAD_GRIDS["an unknown method"])
    inside = call("run", "--grid", grid)

    outside = fedbench("run", "--grid", grid)

    assert (outside.returncode, outside.stdout, outside.stderr) == (2, "", inside.stderr)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--grid", "quikstart"], ["'quikstart'", "quickstart"]),
        (["--grid", "tiny.yaml", "--set", "rounds"], ["rounds"]),
        (["--grid", "tiny.yaml", "--devices", "cuda:99"], ["'cuda:99'", "Present: cpu"]),
    ],
    ids=["unknown grid", "no value", "unknown device"],
)
def test_a_mistake_on_the_command_line_is_one_message_and_changes_nothing(fedbench, call, words, named):
    before = fedbench.tree()

    ended = call("run", *words)

    assert_one_clear_message(ended, *named)
    assert fedbench.tree() == before


def make_foreign(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipe (name TEXT)")
    connection.close()


def make_newer(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
    connection.execute("INSERT INTO alembic_version VALUES ('ffff')")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "db", "named"),
    [
        (lambda path: path.write_text("not a database " * 100), "bad.sqlite", ["bad.sqlite", "not a database", "--db"]),
        (make_foreign, "bad.sqlite", ["bad.sqlite", "not fedbench's", "--db"]),
        (make_newer, "bad.sqlite", ["bad.sqlite", "newer fedbench", "ffff", "--db"]),
        (Path.mkdir, "bad.sqlite", ["bad.sqlite", "folder"]),
        (Path.touch, "bad.sqlite/results/db.sqlite", ["bad.sqlite/results", "cannot be made", "--db"]),
        (Path.touch, "postgresql://ada:secret@host:port/db", ["--db"]),
    ],
    ids=["no database", "foreign", "newer", "a folder", "below a file", "malformed URL"],
)
def test_a_bad_database_is_one_message_and_changes_nothing(fedbench, make, db, named):
    make(fedbench.folder / "bad.sqlite")
    before = fedbench.tree()

    ended = fedbench("run", "--grid", "tiny.yaml", "--db", db)

    assert_one_clear_message(ended, *named)
    assert "secret" not in ended.stderr
    assert fedbench.tree() == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which not even root can write")
def test_a_results_folder_that_cannot_be_written_is_one_message(fedbench):
    before = fedbench.tree()

    ended = fedbench("run", "--grid", "tiny.yaml", "--db", "/proc/fedbench.sqlite")

    assert_one_clear_message(ended, "/proc/fedbench.sqlite", "--db")
    assert fedbench.tree() == before


def test_a_report_of_a_database_that_is_not_there_does_not_make_it(fedbench):
    before = fedbench.tree()

    ended = fedbench("status")

    assert_one_clear_message(ended, "results/fedbench.sqlite", "fedbench run")
    assert fedbench.tree() == before


@pytest.fixture
def mnist_grid(fedbench):
    return fedbench.write("mnist.yaml", "name: g\nmethods: [fedavg]\ntasks: [{dataset: mnist}]\nset: {rounds: 1}\n")


def test_missing_data_without_a_network_is_one_message_and_makes_no_database_however_often(fedbench, mnist_grid):
    before = fedbench.tree()

    first = fedbench("run", "--grid", mnist_grid)
    second = fedbench("run", "--grid", mnist_grid)

    assert_one_clear_message(first, "MNIST is not under", "--data", "FEDBENCH_DATA")
    assert second.stderr == first.stderr
    assert fedbench.tree() == before


def test_a_corrupted_data_file_is_one_message_and_makes_no_database(fedbench, mnist_grid, tmp_path):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"garbage")
    before = fedbench.tree()

    ended = fedbench("run", "--grid", mnist_grid)

    assert_one_clear_message(ended, "MNIST", str(tmp_path / "data"), "damaged", "Delete")
    assert fedbench.tree() == before


# --- reports ---

reports = pytest.mark.skipif(
    find_spec("fedbench.report.table") is None or find_spec("fedbench.report.plots") is None,
    reason="this fedbench has no reports",
)


@reports
def test_a_table_of_the_results_names_the_methods(finished):
    shown = finished("table", "--grid", "tiny")

    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert [line[0] for line in lines if line[:1] in (["fedavg"], ["local"])] == ["fedavg", "local"]


@reports
def test_plots_of_the_results_are_pictures(finished):
    shown = finished("plot", "--grid", "tiny")

    pictures = [finished.folder / line for line in shown.stdout.splitlines()]
    assert shown.returncode == 0, shown.stderr
    assert {path.suffix for path in pictures} == {".png", ".svg"}
    assert all(path.stat().st_size > 1000 for path in pictures)


@reports
def test_the_toy_of_fedabml_runs_and_is_drawn(fedbench):
    ran = fedbench("run", "--grid", "fedabml_toy", "--set", "rounds=2", "--axis", "seed=0", "--workers", "1")
    table = fedbench("table", "--grid", "fedabml_toy", "--format", "csv")
    plot = fedbench("plot", "--paper", "fedabml", "--figure", "toy")

    assert ran.returncode == 0, ran.stderr
    assert "GM RMSE" in table.stdout
    assert [Path(line).name for line in plot.stdout.splitlines()] == ["fedabml-toy.png", "fedabml-toy.svg"]


def test_a_figure_without_its_paper_is_refused(fedbench):
    refused = fedbench("plot", "--figure", "toy")

    assert refused.returncode == 2
    assert "Give --paper with it" in refused.stderr
