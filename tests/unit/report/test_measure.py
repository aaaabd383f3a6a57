"""One row per run: headline by the job's rule, final value, calibration, bytes and seconds."""

from __future__ import annotations

import math

import pytest

from fedbench.report.measure import COLUMNS, measure
from fedbench.store import queries

GRID = {"name": "g", "methods": ["pfedbayes"], "tasks": [{"dataset": "digits"}], "set": {"rounds": 4, "eval_every": 1}}


def measured(lab):
    return measure(lab.engine, queries.finished_runs(lab.engine))


def only(lab):
    frame = measured(lab)
    assert len(frame) == 1
    return frame.iloc[0]


def test_a_row_says_what_was_run(lab, story) -> None:
    lab.play(GRID, lambda spec: story(gm={4: 0.5}), "seed=7", "size=medium")

    row = only(lab)

    assert (row["method"], row["label"], row["dataset"], row["size"], row["seed"]) == (
        *("pfedbayes", "pfedbayes"),
        *("digits", "medium", 7),
    )
    assert (row["rounds"], row["status"], row["rule"], row["headline"], row["last_round"]) == (
        *(4, "done", "final", "accuracy"),
        4,
    )
    assert row["key"] == row["spec"].key


def test_the_headline_follows_the_jobs_rule_and_the_final_value_stands_beside_it(lab, story) -> None:
    pm, gm = {1: 0.6, 2: 0.9, 3: 0.8, 4: 0.7}, {1: 0.5, 2: 0.4, 3: 0.6, 4: 0.6}
    lab.play(GRID, lambda spec: story(pm=pm, gm=gm), "rule=best_all")

    row = only(lab)

    assert (row["pm_value"], row["pm_rounds"], row["pm_final"]) == (0.9, (2,), 0.7)
    assert (row["gm_value"], row["gm_rounds"], row["gm_final"]) == (0.6, (3,), 0.6)


def test_the_headline_is_of_the_jobs_metric(lab, story) -> None:
    # the mean over clients is 0.05 above the pooled accuracy
    lab.play(GRID, lambda spec: story(gm={4: 0.5}, macro=0.05), "headline=macro")

    assert only(lab)["gm_value"] == pytest.approx(0.55)
    assert only(lab)["gm_final"] == pytest.approx(0.55)


def test_calibration_is_that_of_mc_prediction_where_the_run_has_it_else_of_the_mean(lab, story) -> None:
    closing = {
        ("pm", "best", "mean"): {"ece": 0.11, "mce": 0.12, "brier": 0.13, "nll": 0.14},
        ("pm", "best", "mc"): {"ece": 0.21, "mce": 0.22, "brier": 0.23, "nll": 0.24},
        ("pm", "final", "mc"): {"ece": 0.31, "mce": 0.32, "brier": 0.33, "nll": 0.34},
        ("gm", "best", "mean"): {"ece": 0.41, "mce": 0.42, "brier": 0.43, "nll": 0.44},
    }
    lab.play(GRID, lambda spec: story(pm={2: 0.9, 4: 0.8}, gm={2: 0.9, 4: 0.8}, closing=closing))

    row = only(lab)

    assert [row[f"pm_{name}"] for name in ("ece", "mce", "brier", "nll")] == [0.21, 0.22, 0.23, 0.24]
    assert [row[f"pm_final_{name}"] for name in ("ece", "mce", "brier", "nll")] == [0.31, 0.32, 0.33, 0.34]
    assert [row[f"gm_{name}"] for name in ("ece", "mce", "brier", "nll")] == [0.41, 0.42, 0.43, 0.44]


def test_bytes_of_all_rounds_both_ways_are_megabytes_of_a_million(lab, story) -> None:
    # 4 rounds of 1,500,000 down and 250,000 up: 4 x 1.75 MB
    lab.play(GRID, lambda spec: story(gm={4: 0.5}, sent=(1_500_000, 250_000), seconds=12.5))

    assert only(lab)["mb"] == 7.0
    assert only(lab)["seconds"] == 12.5


def test_a_view_that_the_method_does_not_have_is_empty(lab, story) -> None:
    lab.play(GRID, lambda spec: story(gm={4: 0.5}))

    row = only(lab)

    assert row["gm_has"]
    assert not row["pm_has"]
    assert math.isnan(row["pm_value"])
    assert math.isnan(row["pm_ece"])


def test_a_diverged_run_has_a_row_and_its_cost_but_no_result(lab, story) -> None:
    lab.play(GRID, lambda spec: story(pm={1: 0.6, 2: 0.9}, outcome="diverged", sent=(1_000_000, 0)), "rule=best_all")

    row = only(lab)

    assert (row["status"], row["last_round"], row["mb"]) == ("diverged", 2, 2.0)
    assert row["pm_has"]
    assert math.isnan(row["pm_value"])
    assert math.isnan(row["pm_final"])


def test_no_finished_run_is_dropped_and_rows_stand_in_the_order_of_the_queue(lab, story) -> None:
    outcomes = {0: "done", 1: "diverged", 2: "done"}
    lab.play(
        GRID | {"methods": ["pfedbayes", "fedavg"], "axes": {"seed": [0, 1, 2]}},
        lambda spec: story(gm={4: 0.5}, outcome=outcomes[spec.seed]),
    )

    frame = measured(lab)

    assert list(frame["method"]) == ["pfedbayes"] * 3 + ["fedavg"] * 3
    assert list(frame["seed"]) == [0, 1, 2, 0, 1, 2]
    assert list(frame["status"]) == ["done", "diverged", "done"] * 2


def test_an_empty_database_gives_an_empty_frame_with_all_columns(lab) -> None:
    frame = measured(lab)

    assert len(frame) == 0
    assert tuple(frame.columns) == COLUMNS
