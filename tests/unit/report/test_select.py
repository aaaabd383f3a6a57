"""Which runs belong to a cell of a paper's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedbench.grid import expand, load_grid
from fedbench.job import JobSpec, build_job
from fedbench.paper import Paper, load_paper
from fedbench.report.select import (
    comparable,
    differences,
    expected_rounds,
    expected_settings,
    is_implemented,
    newest,
    sort_runs,
)

SMALL = (("dataset", "mnist"), ("size", "small"))
MEDIUM = (("dataset", "mnist"), ("size", "medium"))


def a_paper(**changes: Any) -> Paper:
    content = {
        "name": "p",
        "title": "P",
        "set": {"rounds": 100, "lr": 0.05, "batch_size": 20, "zeta": 7},
        "methods": {"fedavg": {}, "fedprox": {"mu": 0.1}},
        "overrides": [{"match": {"dataset": "cifar10", "method": ["fedavg", "fedprox"]}, "set": {"clients": 20}}],
        "method_names": {},
        "dataset_names": {},
    }
    return Paper.model_validate(content | changes)


def a_job(method: str = "fedavg", **settings: Any) -> JobSpec:
    return build_job({"method": method, "dataset": "mnist", "rounds": 100, "lr": 0.05, "batch_size": 20, **settings})


def unlike(job: JobSpec, **place: Any) -> tuple[str, ...]:
    return differences(job, expected_settings(a_paper(), job.method, {"dataset": "mnist", "size": "small", **place}))


def test_a_run_with_the_papers_settings_belongs_though_the_paper_has_settings_of_other_methods() -> None:
    assert unlike(a_job()) == ()  # zeta is none of FedAvg's


def test_a_value_other_than_the_papers_keeps_a_run_out() -> None:
    assert unlike(a_job(lr=0.01)) == ("lr",)
    assert unlike(a_job("fedprox", mu=0.2, batch_size=50)) == ("batch_size", "mu")


def test_a_setting_that_the_paper_does_not_mention_must_be_at_its_default() -> None:
    assert unlike(a_job(momentum=0.9)) == ("momentum",)


def test_rounds_and_the_evaluation_schedule_are_free() -> None:
    assert unlike(a_job(rounds=5, eval_every=1, mc_every=2, mc_samples=3)) == ()


def test_a_run_of_another_size_belongs_to_another_cell() -> None:
    assert unlike(a_job(size="medium")) == ("size",)
    assert unlike(a_job(size="medium"), size="medium") == ()


def test_an_override_counts_where_it_matches() -> None:
    assert unlike(a_job(dataset="cifar10", clients=20), dataset="cifar10") == ()
    assert unlike(a_job(dataset="cifar10"), dataset="cifar10") == ("clients",)
    assert unlike(a_job("local", dataset="cifar10"), dataset="cifar10") == ()  # the override is of two other methods


def test_a_partition_is_read_in_its_short_form() -> None:
    paper = a_paper(set={"partition": "labels[labels_per_client=2]"})
    expected = expected_settings(paper, "fedavg", {"dataset": "mnist"})

    assert differences(build_job({"method": "fedavg", "dataset": "mnist", "labels_per_client": 2}), expected) == ()
    assert differences(build_job({"method": "fedavg", "dataset": "mnist"}), expected) == ("labels_per_client",)


def test_a_list_may_be_written_as_its_only_item() -> None:
    # whichever setting of a job is a list: here a method's own
    job = a_job().model_copy(update={"params": {"steps": [5]}, "changed": {"steps": [5]}})

    assert differences(job, {"steps": 5}) == ()
    assert differences(job, {"steps": [5]}) == ()
    assert differences(job, {"steps": [5, 6]}) == ("steps",)


def test_of_rounds_and_a_budget_of_epochs_the_more_special_one_counts() -> None:
    paper = a_paper(set={"rounds": 100, "tau": 4}, methods={"fedavg": {"epoch_budget": 80}})

    assert expected_rounds(expected_settings(paper, "fedavg", {"dataset": "mnist"})) == 20
    assert expected_rounds(expected_settings(paper, "fedprox", {"dataset": "mnist"})) == 100


def test_an_override_may_match_what_the_paper_leaves_at_the_engines_default() -> None:
    paper = a_paper(set={}, overrides=[{"match": {"model": "dnn100"}, "set": {"lr": 0.5}}])

    assert expected_settings(paper, "fedavg", {"dataset": "mnist"})["lr"] == 0.5


def test_the_papers_rounds_come_from_a_number_or_from_a_budget_of_epochs() -> None:
    assert expected_rounds({"rounds": 800}) == 800
    assert expected_rounds({"epoch_budget": 320, "tau": 10}) == 32
    assert expected_rounds({}) is None


def test_every_job_of_the_grids_that_fill_a_table_belongs_to_exactly_its_cell() -> None:
    paper = load_paper("pfedbayes")
    grids = paper.tables["T1"].grids
    jobs = [job for grid in grids.values() for job in expand(load_grid(grid))]
    places = [(("dataset", dataset), ("size", size)) for dataset in grids for size in ("small", "medium", "large")]

    found = sort_runs(dict(enumerate(jobs)), paper, places)

    assert found.others == {}
    for (method, place), members in found.cells.items():
        specs = [jobs[i] for i in members]
        assert {spec.method for spec in specs} == {method}
        assert {(spec.task.dataset, spec.partition_params["size"]) for spec in specs} == {tuple(dict(place).values())}
        assert sorted(spec.seed for spec in specs) == [0, 1, 2]
    assert sum(len(members) for members in found.cells.values()) == len(jobs) == 3 * 7 * 3 * 3


def test_runs_are_sorted_into_cells_and_the_others_say_why_they_are_not() -> None:
    jobs = {
        11: a_job(),
        12: a_job(size="medium"),
        13: a_job("fedprox", mu=0.5),
        14: a_job(dataset="digits"),  # not on the table at all
    }

    found = sort_runs(jobs, a_paper(), [SMALL, MEDIUM])

    assert found.cells == {("fedavg", SMALL): [11], ("fedavg", MEDIUM): [12]}
    assert found.others == {13: ("fedprox", ("mu",))}


def test_a_run_without_the_setting_that_a_column_is_about_is_in_no_cell() -> None:
    place = (("dataset", "mnist"), ("s", 10))

    found = sort_runs({1: a_job()}, a_paper(), [place])

    assert found.cells == {}
    assert found.others == {}


def runs(*rows: tuple[int, int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["run", "seed", "version", "rounds"])


def test_of_a_seed_that_was_run_twice_the_newest_run_counts() -> None:
    assert list(newest(runs((1, 0, 1, 9), (3, 0, 1, 9), (2, 1, 1, 9)))["run"]) == [3, 2]


def test_runs_of_an_earlier_version_do_not_fill_up_the_seeds_of_a_newer_one() -> None:
    assert list(newest(runs((1, 0, 1, 9), (2, 1, 1, 9), (3, 0, 2, 9)))["run"]) == [3]


def test_full_runs_are_taken_before_partial_and_before_longer_ones() -> None:
    mixed = runs((1, 0, 1, 100), (2, 1, 1, 50), (3, 2, 1, 200), (4, 1, 1, 100))

    assert list(comparable(mixed, rounds=100)["run"]) == [1, 4]


def test_without_full_runs_the_longest_are_taken_and_lengths_are_not_mixed() -> None:
    assert list(comparable(runs((1, 0, 1, 20), (2, 1, 1, 50), (3, 2, 1, 50)), rounds=100)["run"]) == [2, 3]


def test_a_method_is_implemented_if_there_is_a_file_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('must not be imported')")

    assert is_implemented("fedavg")
    assert not is_implemented("mine")
    monkeypatch.setenv("FEDBENCH_PLUGINS", str(tmp_path))
    assert is_implemented("mine")
