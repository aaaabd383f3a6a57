"""A user's own files from outside: named in a grid by path, run, shown, changed, taken away, and wrong."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from fedbench.cli import main

GRID = """
name: own
methods: [fedavg]
tasks: [{dataset: "csv[path=data/my table.csv,label=species]", partition: natural, clients: 3}]
set: {rounds: 2, eval_every: 1, batch_size: 10}
"""


def rows(clients=3, each=20):
    """Two features that say which of two species it is, for every client as many of both."""
    rng = np.random.default_rng(0)
    lines = ["a,b,species,client"]
    for client in range(clients):
        for number in range(each):
            a, b = rng.normal(5 * (number % 2), 1, 2)
            lines.append(f"{a:.3f},{b:.3f},{('cat', 'dog')[number % 2]},clinic {client}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def own(fedbench):
    """The command beside a grid and the table that it names."""
    (fedbench.folder / "data").mkdir()
    fedbench.table = fedbench.folder / "data" / "my table.csv"
    fedbench.table.write_text(rows())
    fedbench.write("own.yaml", GRID)
    return fedbench


@pytest.fixture
def call(own, monkeypatch, capfd):
    """The command without a process of its own, which saves the time of starting one."""
    monkeypatch.chdir(own.folder)
    for name, value in own.environment.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fedbench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(words, ended.value.code, *capfd.readouterr())

    return run


def assert_one_clear_message(ended, *words):
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error:") == 1
    for word in words:
        assert word in ended.stderr


def test_a_table_with_clients_is_run_printed_changed_and_taken_away(own, call):
    ran = own("run", "--grid", "own.yaml", "--workers", "1")
    again = call("run", "--grid", "own.yaml", "--dry-run", "--json")
    printed = call("table", "--grid", "own")
    ((spec, split_hash),) = own.sql("SELECT spec, split_hash FROM job JOIN run ON run.job_id = job.id")

    assert ran.returncode == 0, ran.stderr
    assert "finished: 1 done" in ran.stdout
    assert [row["status"] for row in json.loads(again.stdout)] == ["done"]
    name = json.loads(spec)["task"]["dataset"]
    assert re.fullmatch(rf"csv\[label=species,path={re.escape(str(own.table))},sha256='?[0-9a-f]{{16}}'?\]", name)
    assert len(split_hash) == 64
    assert printed.returncode == 0
    assert "fedavg" in printed.stdout
    assert name in "".join(printed.stdout.split("\n")[:4])
    ((scored,),) = own.sql("SELECT count(DISTINCT client) FROM metric WHERE client IS NOT NULL")
    assert scored == 3

    own.table.write_text(rows(each=25))
    changed = call("run", "--grid", "own.yaml", "--dry-run", "--json")

    assert [(row["status"], name in row["job"]) for row in json.loads(changed.stdout)] == [("new", False)]

    own.table.unlink()
    old = call("table", "--grid", "own")
    listed = call("queue", "list", "--json")
    gone = call("run", "--grid", "own.yaml")

    assert (old.returncode, old.stdout) == (0, printed.stdout)
    assert [row["job"] for row in json.loads(listed.stdout)] == [f"fedavg {name} seed 0"]
    assert_one_clear_message(gone, f"there is no {own.table}")


def test_two_files_are_an_axis(own, call):
    own.write("other.csv", rows(each=30))

    shown = call(
        "run", "--grid", "own.yaml", "--dry-run", "--json", "--axis",
        "dataset=csv[path='data/my table.csv',label=species],csv[path=other.csv,label=species]", "--axis", "seed=0,1",
    )  # fmt: skip

    jobs = [row["job"] for row in json.loads(shown.stdout)]
    assert [("my table.csv" in job, "other.csv" in job) for job in jobs] == [(True, False)] * 2 + [(False, True)] * 2


def test_the_split_of_a_table_is_shown(call):
    shown = call("datasets", "show", "csv[path=data/my table.csv,label=species]", "--partition", "natural",
                "--clients", "3", "--json")  # fmt: skip

    # 20 rows of every client, 10 of each species; a fifth of them is test data
    content = json.loads(shown.stdout)
    assert [(client["train"], client["test"]) for client in content["clients"]] == [
        ({"0": 8, "1": 8}, {"0": 2, "1": 2})
    ] * 3


def test_the_kinds_of_own_files_are_listed_and_no_cause_for_alarm(call):
    listed = call("datasets", "--json")
    verified = call("datasets", "verify", "--json")
    named = call("datasets", "verify", "csv[path=data/my table.csv,label=species]", "--json")

    states = {row["dataset"]: (row["shape"], row["classes"], row["state"]) for row in json.loads(listed.stdout)}
    assert {states[kind] for kind in ("csv", "npz", "folder")} == {("", "", "by path")}
    assert (verified.returncode, named.returncode) == (0, 0)
    assert json.loads(named.stdout)[0]["against"] == "the hash in its name"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["there is no", "my table.csv"]),
        ("", ["my table.csv is empty"]),
        ("a,b,client\n1,2,c\n", ["has no column species; it has a, b, client"]),
        ("a,species\n1,x\nred,y\n", ["line 3, column a", "'red' is not a finite number"]),
        ("a,species\n1,0.5\n2,1.5\n", ["holds 0.5, which is no class", "regression"]),
    ],
    ids=["missing", "empty", "no label", "text", "regression"],
)
def test_a_bad_table_is_one_message_before_anything_is_queued(own, call, content, words):
    own.table.unlink()
    if content is not None:
        own.table.write_text(content)
    before = own.tree()

    ended = call("run", "--grid", "own.yaml")

    assert_one_clear_message(ended, *words)
    assert own.tree() == before
