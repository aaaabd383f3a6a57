"""Random command lines: every one ends with an exit code that the documentation names, and never in a traceback."""

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench import cli
from fedbench.store.database import database_url, upgrade

OLD_RESULTS = Path(__file__).parents[1] / "fixtures" / "schema_0001.sqlite"
EXIT_CODES = (0, 1, 2, 3, 130)
FUZZ = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
COMMANDS = {
    "run --dry-run": "--grid --set --axis --methods --workers --devices --per-device --priority --timeout --engine "
    "--json --db",
    "status": "--json --db",
    "queue list": "--status --json --db",
    "queue show": "--db",
    "queue retry": "--db",
    "queue cancel": "--db",
    "queue prioritise": "--db",
    "queue pause": "--db",
    "queue resume": "--db",
    "table": "--paper --table --grid --format --out --db",
    "compare": "--metric --view --grid --other-db --format --out --db",
    "plot": "--paper --grid --figure --metric --x --db",
    "methods": "--json",
    "methods show": "--json",
    "datasets verify": "--json",
    "datasets show": "--partition --clients --seed --size --json",
    "datasets sheet": "--partition",
    "grids": "--json",
    "papers": "--json",
    "db upgrade": "--db",
    "db export": "--format --grid --status --db",
    "db merge": "--db",
    "db vacuum": "--superseded --db",
}
"""All but `worker`, which would train, `datasets fetch`, which would use the network, and `doctor`, which is slow."""
WORDS = {
    "--grid": ["quickstart", "first", "quickstart_smoke", "bad.yaml", "."],
    "--set": ["rounds=2", "rounds=0", "lr=nan", "seed=!!bool x", "partition=shards[s=2]", "dataset=csv[path=bad.yaml]"],
    "--axis": ["seed=0,1", "seed=", "seed", "=1", "partition=[[,]]", "lr=0x" + "f" * 4000],
    "--methods": ["fedavg", "fedprox[mu=0.1],fedavg", "fedprox[mu=]", "[", ","],
    "--db": ["results.sqlite", "nowhere.sqlite", "bad.yaml", ".", "sqlite://", "x://y", "postgresql://h:p/x"],
    "--paper": ["pfedbayes", "dsvgd", "fedhb"],
    "--table": ["T1", "T9"],
    "--format": ["json", "csv", "md", "latex", "parquet"],
    "--out": ["made", ".", "bad.yaml/x"],
    "--timeout": ["2h", "0", "nan", "1" * 400],
    "--devices": ["cpu", "cuda:9", ","],
    "--partition": ["labels", "shards[s=2]", "dirichlet", "natural"],
    "--status": ["done", "dnoe", "done,failed"],
    "--metric": ["ece", "auc", "accuracy"],
    "--engine": ["local"],
    "--figure": ["fig2"],
}
FLAGS = ("--json", "--superseded")
COMMON = ["", "fedavg", "digits", "small", "done", "first", "0", "-1", "3", "1e400", "9" * 30, "é🦊", "--", "--help"]
ANY = st.sampled_from(COMMON) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
"""What a shell can pass: no NUL, and no halves of characters."""


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from([*COMMANDS]))
    line = command.split()
    for option in draw(st.lists(st.sampled_from(COMMANDS[command].split()), max_size=4)):
        known = st.sampled_from(WORDS.get(option, COMMON))
        line += [option] if option in FLAGS else [option, draw(known | known | known | ANY)]
    return line + draw(st.lists(ANY, max_size=2) if draw(st.booleans()) else st.just([]))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with finished results, a file that is neither a grid nor a database, and no data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("FEDBENCH_DB", "results.sqlite")
    shutil.copy(OLD_RESULTS, "results.sqlite")
    upgrade(database_url("results.sqlite"))
    Path("bad.yaml").write_text("name: [")
    return tmp_path


@FUZZ
@given(line=command_lines())
def test_a_random_command_line_ends_with_a_known_exit_code(place, monkeypatch, capsys, line):
    monkeypatch.setattr(sys, "argv", ["fedbench", *line])
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        cli.main()

    out, err = capsys.readouterr()
    assert (ended.value.code or 0) in EXIT_CODES
    assert "Traceback" not in out + err
