"""What there is to choose from, as rows and as the command line prints them."""

import json

import pytest
from typer.testing import CliRunner

from fedbench.algorithm import Algorithm, Params, methods
from fedbench.catalogue import dataset_rows, grid_rows, method_details, method_rows, paper_rows
from fedbench.cli import app
from fedbench.dataset import datasets
from fedbench.errors import FedbenchError
from fedbench.grid import grid_names
from fedbench.paper import paper_names
from fedbench.store.database import database_url, open_database


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Calls the command line inside this process, with an empty database; returns what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDBENCH_DB", str(tmp_path / "fedbench.sqlite"))
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path / "data"))
    open_database(database_url(), create=True).dispose()

    def run(*words):
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


# --- rows ---


def test_every_method_has_a_row_with_its_title_and_what_its_file_says_of_it():
    rows = method_rows()

    assert [row["method"] for row in rows] == methods.names()
    assert all(row["title"] and row["summary"] for row in rows)
    assert {"method": "fedavg", "title": "FedAvg", "version": methods.get("fedavg").version} == {
        key: value for key, value in rows[methods.names().index("fedavg")].items() if key != "summary"
    }


def test_the_summary_of_a_method_is_one_line():
    assert all("\n" not in row["summary"] for row in method_rows())


@pytest.mark.parametrize("name", methods.names())
def test_the_details_of_a_method_name_every_parameter_with_its_meaning(name):
    _, rows = method_details(name)

    assert [row["parameter"] for row in rows] == list(methods.get(name).Params.model_fields)
    assert [row["parameter"] for row in rows if not (row["meaning"] and row["type"])] == []


def test_the_details_of_a_method_name_the_protocol_that_it_wants(add_method):
    class Wishful(Algorithm):
        title = "Wishful"
        defaults = {"optimizer": "adam", "lr": 0.5}  # noqa: RUF012

    add_method("wishful", Wishful)

    text, _ = method_details("wishful")

    assert "optimizer=adam, lr=0.5" in text


def test_choices_and_defaults_are_shown():
    _, rows = method_details("local")

    assert [(row["type"], row["default"]) for row in rows] == [("expected | full | one_round", "expected")]


def test_a_parameter_without_a_default_shows_none(add_method):
    class StrictParams(Params):
        needed: int

    class Strict(Algorithm):
        title = "Strict"
        Params = StrictParams

    add_method("strict", Strict)

    _, (row,) = method_details("strict")

    assert (row["parameter"], row["type"], row["default"]) == ("needed", "int", "")


def test_details_of_an_unknown_method_propose_the_nearest():
    with pytest.raises(FedbenchError, match="unknown method 'fedavrg'") as caught:
        method_details("fedavrg")

    assert "fedavg" in caught.value.hint


def test_every_data_set_has_a_row_that_says_whether_it_is_there(tmp_path):
    rows = {row["dataset"]: row for row in dataset_rows(tmp_path)}

    assert sorted(rows) == datasets.names()
    assert rows["digits"] == {
        "dataset": "digits",
        "title": "Digits (UCI, 8x8)",
        "shape": "1x8x8",
        "classes": 10,
        "sizes": "small 5/25, medium 15/15, large 24/10",
        "state": "embedded",
    }
    known = {name: datasets.get(name) for name in rows}
    expected = {name: "embedded" if d.embedded else "by path" if d.by_path else "missing" for name, d in known.items()}
    assert {name: row["state"] for name, row in rows.items()} == expected


def test_looking_for_data_sets_writes_nothing(tmp_path):
    dataset_rows(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_every_grid_that_ships_has_a_row():
    rows = {row["grid"]: row for row in grid_rows()}

    assert sorted(rows) == grid_names()
    assert rows["quickstart"]["methods"] == "local, fedavg, fedprox, pfedbayes"
    assert all(row["title"] for row in rows.values())


def test_every_paper_has_a_row_with_its_published_numbers_and_tables():
    rows = {row["paper"]: row for row in paper_rows()}

    assert sorted(rows) == paper_names()
    assert rows["pfedbayes"]["published numbers"] > 0
    assert "T1" in rows["pfedbayes"]["tables"]


# --- as the command line prints them ---


@pytest.mark.parametrize("command", ["methods", "datasets", "grids", "papers", "status", "queue list", "doctor"])
def test_every_listing_comes_as_json(invoke, command):
    rows = json.loads(invoke(*command.split(), "--json"))

    assert isinstance(rows, list)
    assert all(isinstance(row, dict) for row in rows)


@pytest.mark.parametrize(("command", "column"), [("methods", "method"), ("datasets", "dataset"), ("grids", "grid")])
def test_a_table_and_its_json_name_the_same_things(invoke, command, column):
    names = [row[column] for row in json.loads(invoke(command, "--json"))]

    first_words = [line.split()[0] for line in invoke(command).splitlines() if line and not line.startswith(" ")]

    assert names
    assert set(names) <= set(first_words)


def test_the_details_of_a_method_come_as_json(invoke):
    shown = json.loads(invoke("methods", "show", "pfedbayes", "--json"))

    assert shown["method"] == "pfedbayes"
    assert [row["parameter"] for row in shown["parameters"]] == list(methods.get("pfedbayes").Params.model_fields)


def test_the_details_of_a_method_are_shown_with_every_parameter_and_its_meaning(invoke):
    shown = " ".join(invoke("methods", "show", "pfedbayes").split())

    for name, field in methods.get("pfedbayes").Params.model_fields.items():
        assert name in shown
        assert field.description.split()[0] in shown


def test_an_empty_listing_says_so(invoke):
    assert invoke("queue", "list") == "nothing\n"
