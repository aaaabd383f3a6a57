"""Names of runs: what tells them apart, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from fedbench.job import JobSpec, build_job
from fedbench.report.labels import axes, facts, labels, method_title, plain


def job(method: str = "fedavg", **settings: Any) -> JobSpec:
    return build_job({"method": method, "dataset": "digits", **settings})


def test_a_method_that_was_run_one_way_is_called_by_its_name() -> None:
    # batch sizes differ between the methods, but not within one
    assert labels([job("fedavg", batch_size=20), job("fedprox", batch_size=30)]) == ["fedavg", "fedprox"]


def test_settings_that_differ_within_a_method_stand_in_its_label() -> None:
    runs = [job("fedprox", mu=0.01), job("fedprox", mu=1.0), job("fedavg")]

    assert labels(runs) == ["fedprox[mu=0.01]", "fedprox[mu=1]", "fedavg"]


def test_a_label_is_what_the_command_line_reads() -> None:
    from fedbench.selector import parse_selector

    runs = [job("pfedbayes", lr_global=None, train_all=True), job("pfedbayes", lr_global=0.01, train_all=False)]

    assert [parse_selector(label) for label in labels(runs)] == [
        ("pfedbayes", {"lr_global": None, "train_all": True}),
        ("pfedbayes", {"lr_global": 0.01, "train_all": False}),
    ]


def test_a_seed_tells_no_runs_apart() -> None:
    assert labels([job(seed=0), job(seed=1)]) == ["fedavg", "fedavg"]
    assert axes([job(seed=0), job(seed=1)]) == ()


def test_a_setting_that_goes_with_the_task_is_no_part_of_the_label() -> None:
    runs = [job(f=1.0), job(dataset="mnist", f=0.5)]

    assert labels(runs) == ["fedavg", "fedavg"]
    assert axes(runs) == ("dataset",)


def test_the_axes_leave_out_what_follows_from_data_set_and_size() -> None:
    runs = [job(clients=10), job(dataset="mnist", clients=20, size="medium")]

    assert axes(runs) == ("dataset", "size")


def test_the_axes_name_whatever_else_tells_two_tasks_apart() -> None:
    runs = [job(clients=10), job(clients=20), job(dataset="mnist")]

    assert axes(runs) == ("dataset", "clients")


def test_rounds_rule_and_headline_are_axes_whenever_they_vary() -> None:
    runs = [job(rounds=5, rule="best_all"), job(dataset="mnist", rounds=9, headline="macro")]

    assert axes(runs) == ("dataset", "rounds", "rule", "headline")
    assert labels(runs) == ["fedavg", "fedavg"]


def test_the_facts_are_what_all_runs_share() -> None:
    runs = [job(clients=10), job("local", clients=20)]

    assert dict(facts(runs)) == {
        "dataset": "digits",
        "size": "small",
        "partition": "labels",
        "model": "dnn100",
        "rounds": 100,
        "rule": "final",
        "headline": "accuracy",
    }


def test_a_method_is_titled_as_the_paper_prints_it() -> None:
    assert method_title("perfedavg", "pfedbayes") == "Per-FedAvg"
    assert method_title("fedavg") == "FedAvg"
    assert method_title("local", "pfedbayes") == "Local"
    assert method_title("my_own") == "my_own"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (0.001, "0.001"),
        (5, "5"),
        ("block", "block"),
        ((0, 5), "0/5"),
        (1.0, "1"),
        (0.12345678, "0.12345678"),
    ],
)
def test_a_setting_is_written_as_yaml_writes_it(value: Any, text: str) -> None:
    assert plain(value) == text
