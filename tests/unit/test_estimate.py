"""Estimates of time: from the median round of the runs that are most alike."""

import pandas as pd
import pytest

from fedbench.estimate import estimate_seconds, in_words

ALIKE = {"method": "fedavg", "dataset": "digits", "model": "dnn100", "size": "small"}


def history(*runs):
    """Finished runs from (seconds, rounds, what differs from ALIKE)."""
    return pd.DataFrame([{**ALIKE, "seconds": s, "last_round": n, **differs} for s, n, differs in runs])


def test_an_estimate_is_the_median_round_of_alike_runs_times_the_rounds(make_job):
    # 1, 2 and 9 seconds per round: the median is 2, and 30 rounds take 60 seconds
    past = history((10, 10, {}), (20, 10, {}), (90, 10, {}))

    assert estimate_seconds([make_job(rounds=30)], past) == pytest.approx(60)


def test_the_jobs_add_up(make_job):
    past = history((10, 10, {}), (40, 10, {"method": "fedprox"}))

    # 5 rounds of 1 s and 2 rounds of 4 s
    assert estimate_seconds([make_job(rounds=5), make_job("fedprox", rounds=2)], past) == pytest.approx(13)


def test_runs_of_the_same_data_and_size_are_preferred(make_job):
    past = history((10, 10, {}), (990, 10, {"size": "large"}), (990, 10, {"dataset": "mnist"}))

    assert estimate_seconds([make_job(rounds=1)], past) == pytest.approx(1)


def test_a_run_of_the_same_method_and_model_may_stand_in(make_job):
    past = history((30, 10, {"dataset": "mnist", "size": "large"}), (990, 10, {"method": "fedprox"}))

    assert estimate_seconds([make_job(rounds=2)], past) == pytest.approx(6)


def test_there_is_no_estimate_without_history(make_job):
    assert estimate_seconds([make_job()], pd.DataFrame()) is None


def test_there_is_no_estimate_if_one_job_resembles_nothing(make_job):
    assert estimate_seconds([make_job(), make_job("local")], history((10, 10, {}))) is None


@pytest.mark.parametrize("unfit", [(10, 0, {}), (None, 10, {}), (10, 10, {"model": "logreg"})])
def test_runs_that_tell_nothing_are_passed_over(make_job, unfit):
    assert estimate_seconds([make_job()], history(unfit)) is None


def test_no_jobs_take_no_time():
    assert estimate_seconds([], pd.DataFrame()) == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (45.2, "45 s"), (89, "89 s"), (90, "2 min"), (720, "12 min"), (5399, "90 min"), (12600, "3.5 h")],
)
def test_a_time_is_as_precise_as_an_estimate_deserves(seconds, words):
    assert in_words(seconds) == words
