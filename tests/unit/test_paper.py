"""Papers as data: their settings are known to their methods, and their printed numbers find their place."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedbench.algorithm import methods
from fedbench.dataset import datasets
from fedbench.errors import FedbenchError
from fedbench.grid import Grid, MethodEntry, expand, load_grid
from fedbench.job import known_settings
from fedbench.paper import Published, load_paper, load_published, paper_names

PUBLISHED = ["bpfed", "dsvgd", "fedabml", "fedhb", "pfedbayes"]


@pytest.fixture(scope="module")
def table_1() -> list[Published]:
    return [entry for entry in load_published("pfedbayes") if entry.table == "T1"]


# --- settings ---


def test_pfedbayes_ships() -> None:
    assert "pfedbayes" in paper_names()


@pytest.mark.parametrize("name", paper_names())
def test_a_paper_has_the_name_of_its_file(name: str) -> None:
    assert load_paper(name).name == name


@pytest.mark.parametrize("name", paper_names())
def test_a_paper_has_settings_only_for_methods_that_ship(name: str) -> None:
    assert set(load_paper(name).methods) <= set(methods.names())


@pytest.mark.parametrize("name", paper_names())
def test_the_common_settings_of_a_paper_are_known_to_each_of_its_methods(name: str) -> None:
    paper = load_paper(name)

    for method in paper.methods:
        assert set(paper.set) <= known_settings(method, paper.set["partition"]) | {"epoch_budget"}, method


@pytest.mark.parametrize("name", paper_names())
def test_the_settings_of_a_paper_for_a_method_are_known_to_it(name: str) -> None:
    paper = load_paper(name)

    for method, given in paper.methods.items():
        assert set(given) <= known_settings(method, paper.set["partition"]), method


@pytest.mark.parametrize("name", paper_names())
def test_the_overrides_of_a_paper_are_about_known_settings(name: str) -> None:
    paper = load_paper(name)
    known = set().union(*(known_settings(method, paper.set["partition"]) for method in paper.methods))

    for override in paper.overrides:
        assert set(override.match) | set(override.set) <= known | {"epoch_budget"}


@pytest.mark.parametrize("name", paper_names())
def test_every_method_of_a_paper_makes_a_job_on_each_of_its_data_sets(name: str) -> None:
    paper = load_paper(name)
    grid = Grid(
        name="all",
        paper=name,
        methods=[MethodEntry(name=method) for method in paper.methods],
        tasks=[{"dataset": dataset} for dataset in paper.dataset_names.values()],
    )

    found = expand(grid)

    assert len(found) == len(paper.methods) * len(paper.dataset_names)


@pytest.mark.parametrize("name", paper_names())
def test_what_a_paper_sets_for_a_method_arrives_in_its_jobs(name: str) -> None:
    paper = load_paper(name)
    for method, given in paper.methods.items():
        # a data set that no override names
        grid = Grid(name="one", paper=name, methods=[MethodEntry(name=method)], tasks=[{"dataset": "digits"}])

        (job,) = expand(grid)

        assert {key: job.settings[key] for key in given} == given


def test_an_unknown_paper_gets_a_proposal() -> None:
    with pytest.raises(FedbenchError, match="unknown paper 'pfedbays'") as caught:
        load_paper("pfedbays")

    assert caught.value.hint.startswith("Did you mean pfedbayes")


def test_a_file_that_is_not_a_paper_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("name: broken\ntitle: Broken\nset: {}\nmethods: []\nsets: {}\n")
    monkeypatch.setattr("fedbench.paper.resources", SimpleNamespace(files=lambda package: tmp_path))

    with pytest.raises(FedbenchError, match=r"papers/broken\.yaml is not a paper") as caught:
        load_paper.__wrapped__("broken")  # past the cache

    assert "\nmethods: " in str(caught.value)
    assert "\nsets: " in str(caught.value)


# --- pFedBayes, as the specification has it (section 7) ---


def test_the_tuned_values_of_pfedbayes_are_the_papers() -> None:
    paper = load_paper("pfedbayes")

    assert paper.methods["fedprox"]["mu"] == 0.001
    assert (paper.methods["pfedbayes"]["zeta"], paper.methods["pfedbayes"]["rho0"]) == (10, -2.5)
    assert (paper.set["lr"], paper.methods["pfedbayes"]["lr"]) == (0.01, 0.001)
    assert (paper.set["rounds"], paper.set["labels_per_client"]) == (800, 5)


@pytest.mark.parametrize(
    ("dataset", "clients", "f"),
    [("mnist", 10, 1.0), ("fashion_mnist", 10, 1.0), ("cifar10", 20, 0.5)],  # always 10 clients per round
)
def test_ten_clients_take_part_in_a_round_on_every_data_set(dataset: str, clients: int, f: float) -> None:
    grid = Grid(name="g", paper="pfedbayes", methods=[MethodEntry(name="fedavg")], tasks=[{"dataset": dataset}])

    (job,) = expand(grid)

    assert (job.task.clients, job.protocol.f) == (clients, f)


# --- published numbers ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_load(name: str) -> None:
    assert len(load_published(name)) > 0


@pytest.mark.parametrize("name", paper_names())
def test_every_paper_has_published_numbers(name: str) -> None:
    assert name in PUBLISHED


def test_table_1_is_complete(table_1: list[Published]) -> None:
    # 3 data sets * 3 sizes * (5 methods with a PM + 6 with a GM) = 99
    assert len(table_1) == 99
    assert Counter(entry.model for entry in table_1) == {"PM": 45, "GM": 54}


def test_no_cell_of_table_1_is_there_twice(table_1: list[Published]) -> None:
    cells = [(entry.method, entry.dataset, (entry.model_extra or {})["size"], entry.model) for entry in table_1]

    assert len(set(cells)) == len(cells)


def test_fedavg_on_small_mnist_is_as_printed(table_1: list[Published]) -> None:
    (cell,) = [
        entry
        for entry in table_1
        if (entry.method, entry.dataset, (entry.model_extra or {})["size"]) == ("FedAvg", "MNIST", "small")
    ]

    assert (cell.mean, cell.std) == (87.38, 0.27)
    assert (cell.model, cell.metric, cell.unit, cell.uncertain) == ("GM", "acc", "percent", False)


# --- names ---


def test_every_method_of_table_1_has_a_name_of_ours(table_1: list[Published]) -> None:
    assert {entry.method for entry in table_1} <= set(load_paper("pfedbayes").method_names)


def test_every_data_set_of_table_1_has_a_name_of_ours(table_1: list[Published]) -> None:
    assert {entry.dataset for entry in table_1} <= set(load_paper("pfedbayes").dataset_names)


@pytest.mark.parametrize("name", paper_names())
def test_a_printed_data_set_is_one_that_ships(name: str) -> None:
    assert set(load_paper(name).dataset_names.values()) <= set(datasets.names())


@pytest.mark.parametrize("name", paper_names())
def test_no_two_printed_names_mean_the_same(name: str) -> None:
    paper = load_paper(name)

    for names in (paper.method_names, paper.dataset_names):
        assert len(set(names.values())) == len(names)


# --- tables ---


@pytest.mark.parametrize("name", paper_names())
def test_the_grids_of_a_table_run_its_data_sets_under_its_paper(name: str) -> None:
    for table in load_paper(name).tables.values():
        for dataset, grid_name in table.grids.items():
            grid = load_grid(grid_name)

            assert grid.paper == name
            assert {job.task.dataset for job in expand(grid)} == {dataset}


@pytest.mark.parametrize("name", paper_names())
def test_the_columns_of_a_table_are_keys_of_its_published_entries(name: str) -> None:
    for table_name, table in load_paper(name).tables.items():
        entries = [
            entry.model_dump() for entry in load_published(name) if entry.table in (table.entries or [table_name])
        ]

        assert all(column in entry for entry in entries for column in table.columns)
        assert any(entry["metric"] == table.metric for entry in entries)
        assert {entry["model"] for entry in entries} == set(table.views)


@pytest.mark.parametrize("name", paper_names())
def test_the_grids_of_a_figure_run_under_its_paper(name: str) -> None:
    for figure in load_paper(name).figures.values():
        assert {load_grid(panel.grid).paper for panel in figure.panels} == {name}


def test_the_grids_of_table_1_have_its_three_sizes(table_1: list[Published]) -> None:
    printed = {(entry.model_extra or {})["size"] for entry in table_1}

    for grid_name in load_paper("pfedbayes").tables["T1"].grids.values():
        assert {job.partition_params["size"] for job in expand(load_grid(grid_name))} == printed
