"""Selection rules: which rounds of a curve make the headline number."""

from __future__ import annotations

from typing import get_args

import pytest

from fedbench.errors import FedbenchError
from fedbench.job import Protocol
from fedbench.report.rules import Selected, apply_rule, looks_for_best, rule_words

RULES = ("final", "best_all", "best_last100", "mean_last10", "best_ckpt")


def test_final_takes_the_last_round_though_an_earlier_one_was_better() -> None:
    assert apply_rule("final", {10: 0.9, 20: 0.8}, rounds=20) == Selected(0.8, (20,))


def test_final_has_no_number_when_the_last_round_was_not_reached() -> None:
    assert apply_rule("final", {10: 0.9}, rounds=20) is None


def test_best_all_takes_the_first_of_equal_rounds() -> None:
    assert apply_rule("best_all", {5: 0.7, 10: 0.9, 15: 0.9, 20: 0.8}, rounds=20) == Selected(0.9, (10,))


def test_best_last100_looks_at_rounds_after_t_minus_100_only() -> None:
    # T = 150: round 50 = T - 100 is outside the window, round 51 is its first
    curve = {50: 0.99, 51: 0.7, 100: 0.8, 150: 0.6}

    assert apply_rule("best_last100", curve, rounds=150) == Selected(0.8, (100,))
    assert apply_rule("best_last100", {50: 0.99, 51: 0.7}, rounds=150) == Selected(0.7, (51,))


def test_best_last100_of_a_short_run_looks_at_all_of_it() -> None:
    assert apply_rule("best_last100", {1: 0.9, 20: 0.8}, rounds=20) == Selected(0.9, (1,))


def test_mean_last10_is_the_mean_over_rounds_after_t_minus_10() -> None:
    # T = 20: round 10 is outside; 11..20 hold 0.61, 0.62, ..., 0.70, whose mean is (0.61 + 0.70) / 2 = 0.655
    curve = {10: 0.0, **{round_: 0.5 + round_ / 100 for round_ in range(11, 21)}}

    selected = apply_rule("mean_last10", curve, rounds=20)

    assert selected is not None
    assert selected.value == pytest.approx(0.655)
    assert selected.rounds == (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)


def test_the_order_in_which_a_curve_was_stored_does_not_matter() -> None:
    assert apply_rule("best_all", {15: 0.9, 10: 0.9}, rounds=20) == Selected(0.9, (10,))


def test_best_ckpt_takes_the_best_of_the_rounds_that_were_scored() -> None:
    assert apply_rule("best_ckpt", {10: 0.7, 20: 0.9, 30: 0.8}, rounds=30) == Selected(0.9, (20,))


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_curve_has_no_number(rule: str) -> None:
    assert apply_rule(rule, {}, rounds=10) is None


def test_an_unknown_rule_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(FedbenchError, match=r"unknown selection rule 'best_al'(.|\n)*Did you mean best_all"):
        apply_rule("best_al", {1: 0.5}, rounds=1)


def test_every_rule_that_a_job_may_have_is_known_here() -> None:
    assert set(get_args(Protocol.model_fields["rule"].annotation)) <= set(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_looks_for_a_best_round_is_called_optimistic(rule: str) -> None:
    best = rule in ("best_all", "best_last100", "best_ckpt")

    assert looks_for_best(rule) is best
    assert ("optimistic" in rule_words(rule)) is best


def test_the_best_error_is_the_smallest_and_of_equals_the_first() -> None:
    curve = {5: 0.7, 10: 0.2, 15: 0.2, 20: 0.9}

    assert apply_rule("best_all", curve, rounds=20, smaller_wins=True) == Selected(0.2, (10,))
    assert apply_rule("final", curve, rounds=20, smaller_wins=True) == Selected(0.9, (20,))
    assert rule_words("best_all", "error").endswith("(chosen by test error: optimistic)")
