"""The grammar of values, assignments and selectors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError
from fedbench.selector import parse_assignment, parse_selector, parse_value, split_list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20", 20),
        ("-3", -3),
        ("0.01", 0.01),
        ("1e-3", 0.001),  # YAML 1.1 alone reads this as text
        ("1E5", 100_000.0),
        ("-2.5e2", -250.0),
        ("true", True),
        ("false", False),
        ("null", None),
        ("", None),
        ("block", "block"),
        ("best_last100", "best_last100"),
    ],
)
def test_a_value_is_read_as_the_scalar_it_looks_like(text: str, expected: Any) -> None:
    value = parse_value(text)

    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["[1, 2]", "{a: 1}", "a: 1", "[1", "{", "'open", "- a", "\x00", "@x", "*nobody"])
def test_what_is_not_a_plain_value_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(FedbenchError, match="is not a plain value") as caught:
        parse_value(text)

    assert repr(text) in str(caught.value)


@given(st.text())
@example("2024-13-45")
@example("0x_")
@example("!!int foo")
@example("!!set {a}")
def test_any_text_gives_a_plain_value_or_a_clear_error(text: str) -> None:
    try:
        value = parse_value(text)
    except FedbenchError:
        return

    assert not isinstance(value, (dict, list, set, tuple))


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_every_integer_is_read_back_from_its_text(number: int) -> None:
    value = parse_value(str(number))

    assert value == number
    assert isinstance(value, int)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back_from_its_text(number: float) -> None:
    value = parse_value(repr(number))

    assert value == number
    assert isinstance(value, float)


def test_an_assignment_is_a_key_and_a_value() -> None:
    assert parse_assignment("rounds=20") == ("rounds", 20)


def test_spaces_around_an_assignment_do_not_matter() -> None:
    assert parse_assignment("  rounds =  20 ") == ("rounds", 20)


def test_only_the_first_equals_sign_of_an_assignment_separates() -> None:
    assert parse_assignment("title=a=b") == ("title", "a=b")


@pytest.mark.parametrize("text", ["rounds", "", "=20", "  =20"])
def test_an_assignment_without_a_key_or_an_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(FedbenchError, match="is not of the form key=value"):
        parse_assignment(text)


def test_a_selector_without_brackets_has_no_settings() -> None:
    assert parse_selector("fedavg") == ("fedavg", {})


def test_empty_brackets_mean_no_settings() -> None:
    assert parse_selector("fedavg[]") == ("fedavg", {})


def test_a_selector_with_brackets_has_typed_settings() -> None:
    name, settings = parse_selector("pfedbayes[zeta=1e-3,personal_steps=5,agg=moment]")

    assert name == "pfedbayes"
    assert settings == {"zeta": 0.001, "personal_steps": 5, "agg": "moment"}


def test_spaces_in_a_selector_do_not_matter() -> None:
    assert parse_selector("  fedprox [ mu = 0.01 , lr = 0.1 ] ") == ("fedprox", {"mu": 0.01, "lr": 0.1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "[mu=1]",
        "fedprox[mu=1",
        "fedprox mu=1]",
        "fedprox]mu=1[",
        "fedprox[mu=1]x",
        "fedprox[mu=[1]]",
        "fedprox[mu=1][lr=2]",
        "fedprox[mu]",
        "fedprox[mu=1,]",
        "fedprox[,mu=1]",
        "fedprox[=1]",
        "fed prox",
        "fedprox=1",
        "fedavg,fedprox",
    ],
)
def test_a_malformed_selector_is_refused(text: str) -> None:
    with pytest.raises(FedbenchError, match="is not of the form"):
        parse_selector(text)


def test_a_list_is_split_at_its_commas() -> None:
    assert split_list("0,1,2") == ["0", "1", "2"]


def test_a_comma_inside_brackets_does_not_separate() -> None:
    assert split_list("a[x=1,y=2],b,c[z=3]") == ["a[x=1,y=2]", "b", "c[z=3]"]


def test_spaces_and_empty_parts_of_a_list_are_dropped() -> None:
    assert split_list(" a , ,b,") == ["a", "b"]


_words = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_selectors = st.builds(
    lambda name, settings: f"{name}[{','.join(f'{k}={v}' for k, v in settings.items())}]" if settings else name,
    _words,
    st.dictionaries(_words, st.integers(0, 99), max_size=3),
)


@given(st.lists(_selectors, max_size=4))
def test_joining_selectors_with_commas_and_splitting_them_gives_them_back(selectors: list[str]) -> None:
    assert split_list(",".join(selectors)) == selectors
