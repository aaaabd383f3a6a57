"""Paired tests and curve measures against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedbench.report.curve_measures import Curve, auc, auc_bytes, first, last, wobble
from fedbench.report.stats import holm, paired, sign_flip_p, verdict


def numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


def curve(rounds: list[int], values: list[float], sent: list[float] | None = None) -> Curve:
    return Curve(np.array(rounds), np.array(sent or rounds, dtype=float), np.array(values, dtype=float))


def counting(n: int) -> Curve:
    """Scores 1, 2, ..., n in as many rounds."""
    return curve(list(range(1, n + 1)), list(range(1, n + 1)))


class TestPaired:
    def test_differences_of_1_2_3_have_the_interval_and_p_of_the_t_table(self) -> None:
        found = paired(numbers(11, 22, 33), numbers(10, 20, 30))

        # mean 2, deviation 1, error 1/sqrt(3); t(0.975, 2) = 4.302653, times the error 2.484138
        assert (found.n, found.difference) == (3, pytest.approx(2))
        assert (found.low, found.high) == (pytest.approx(-0.484138, abs=1e-6), pytest.approx(4.484138, abs=1e-6))
        # t = 2 sqrt(3); with 2 degrees of freedom p = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12/14)
        assert found.p == pytest.approx(1 - (12 / 14) ** 0.5)
        assert found.p_signs == 0.25  # only +++ and --- of 8 are as far from 0

    def test_fewer_than_three_pairs_have_a_difference_and_nothing_else(self) -> None:
        found = paired(numbers(5, 7), numbers(1, 1))

        assert (found.n, found.difference) == (2, 5)
        assert (found.low, found.high, found.p, found.p_signs) == (None, None, None, None)

    def test_equal_runs_are_identical_not_an_error_of_division(self) -> None:
        found = paired(numbers(1, 2, 3), numbers(1, 2, 3))

        assert (found.low, found.high, found.p, found.p_signs) == (0, 0, 1, 1)
        assert verdict(found, found.p, smaller_wins=False) == "identical"

    def test_a_difference_that_is_always_the_same_is_certain(self) -> None:
        found = paired(numbers(4, 5, 6), numbers(2, 3, 4))

        assert (found.low, found.high, found.p) == (2, 2, 0)
        assert verdict(found, found.p, smaller_wins=True) == "B better"

    @pytest.mark.parametrize(("n", "p"), [(12, 2 / 4096), (13, None)])
    def test_signs_are_flipped_for_up_to_twelve_pairs(self, n: int, p: float | None) -> None:
        assert paired(np.arange(1.0, n + 1), np.zeros(n)).p_signs == p


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ((3, -1, 2), 0.5),  # sums are 6, 4, 2, 0, each twice with its negative: 4 of 8 reach the observed 4
        ((1, 1, -1), 1.0),  # 3 and 1: all reach 1
        ((0.1, 0.2, 0.3, 0.4), 2 / 16),  # whatever the order in which 1.0 is added up
    ],
)
def test_the_sign_flip_p_counts_the_signs_that_reach_the_observed_sum(differences: tuple[float, ...], p: float) -> None:
    assert sign_flip_p(numbers(*differences)) == p


class TestHolm:
    def test_the_smallest_is_times_four_and_none_is_below_the_one_before(self) -> None:
        # 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1 is raised to 0.06
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_what_was_not_tested_does_not_count(self) -> None:
        assert holm([None, 0.02, None, 0.5]) == [None, pytest.approx(0.04), None, 0.5]

    def test_none_exceeds_one(self) -> None:
        assert holm([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("a", "p", "smaller_wins", "said"),
    [
        ((2, 3, 5), 0.01, False, "A better"),
        ((2, 3, 5), 0.01, True, "B better"),
        ((-2, -3, -5), 0.01, False, "B better"),
        ((-2, -3, -5), 0.01, True, "A better"),
        ((2, 3, 5), 0.05, False, "no difference shown"),
        ((2, 3, 5), None, False, "cannot tell"),
    ],
)
def test_the_verdict_is_by_the_corrected_p_and_the_better_direction(a, p, smaller_wins, said) -> None:
    assert verdict(paired(numbers(*a), numbers(0, 0, 0)), p, smaller_wins=smaller_wins) == said


class TestCurveMeasures:
    def test_auc_is_the_mean_over_the_rounds_that_both_were_scored_in(self) -> None:
        # common are 2 and 4
        assert auc(curve([1, 2, 4], [10, 20, 60]), curve([2, 4, 5], [30, 50, 99])) == (40, 40)
        assert auc(curve([1, 2, 4], [10, 20, 70]), curve([2, 4, 5], [30, 50, 99])) == (45, 40)
        assert auc(curve([1], [10]), curve([2], [20])) is None

    def test_auc_bytes_is_the_area_under_the_steps_where_both_have_a_score(self) -> None:
        a = curve([1, 2, 3], [10, 20, 60], sent=[1, 2, 4])
        b = curve([1, 2, 3], [30, 50, 90], sent=[1.5, 3, 6])

        # from 1.5 to 4: A has 10 up to 2 and then 20: (5 + 40) / 2.5; B 30 up to 3 and then 50: (45 + 50) / 2.5
        assert auc_bytes(a, b) == (pytest.approx(18), pytest.approx(38))
        assert auc_bytes(b, a) == (pytest.approx(38), pytest.approx(18))

    def test_auc_bytes_counts_the_last_of_several_scores_at_the_same_bytes(self) -> None:
        # from 1 to 3; A reached 40 without a further byte
        found = auc_bytes(curve([1, 2, 3], [10, 40, 80], sent=[1, 1, 3]), curve([1, 2], [20, 30], sent=[1, 3]))

        assert found == (pytest.approx(40), pytest.approx(20))

    def test_one_that_ends_where_the_other_begins_is_compared_there_and_before_that_not_at_all(self) -> None:
        a = curve([1, 2], [10, 20], sent=[1, 2])

        assert auc_bytes(a, curve([1, 2], [30, 40], sent=[2, 4])) == (20, 30)
        assert auc_bytes(a, curve([1, 2], [30, 40], sent=[2.5, 5])) is None

    def test_beginning_and_end_are_half_of_fewer_than_a_hundred_scores_and_else_fifty(self) -> None:
        # of 1..9 the window has 4: 1..4 and 6..9; of 1..120 it has 50: 1..50 and 71..120
        assert first(counting(9), counting(120)) == (2.5, 25.5)
        assert last(counting(9), counting(120)) == (7.5, 95.5)

    def test_wobble_is_the_sample_deviation_of_the_end(self) -> None:
        # of 6, 7, 8, 9: squares 2.25 + 0.25 + 0.25 + 2.25 = 5, / 3; of the constant end 0
        level = curve(list(range(1, 10)), [1, 2, 3, 4, 5, 5, 5, 5, 5])

        assert wobble(counting(9), level) == (pytest.approx((5 / 3) ** 0.5), 0)

    def test_too_few_scores_say_nothing(self) -> None:
        assert first(counting(1), counting(9)) is None
        assert last(counting(9), counting(1)) is None
        assert wobble(counting(3), counting(9)) is None
