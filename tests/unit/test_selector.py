"""The grammar of values, assignments and selectors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError
from fedbench.selector import parse_assignment, parse_selector, parse_value, split_list, write_selector


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


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("csv[path='a, b.csv',label=y]", "a, b.csv"),
        ("csv[path='[old] a=b.csv',label=y]", "[old] a=b.csv"),
        ('csv[path = "a],[b" , label=y]', "a],[b"),
        ("csv[path='it''s.csv',label=y]", "it's.csv"),
        ("csv[path=o'hara's data.csv,label=y]", "o'hara's data.csv"),  # a quote inside a word is a letter
        ("csv[path=~/a=b.csv,label=y]", "~/a=b.csv"),
        ("csv[path='2024',label=y]", "2024"),
    ],
)
def test_a_value_in_quotes_may_hold_what_else_has_a_meaning(text: str, path: str) -> None:
    assert parse_selector(text) == ("csv", {"path": path, "label": "y"})
    assert split_list(f"a,{text},b") == ["a", text, "b"]


@pytest.mark.parametrize("text", ["csv[path='a]", "csv[path='a,b]", "csv[path='a'b,c]"])
def test_quotes_that_are_not_closed_at_the_end_of_a_value_are_refused(text: str) -> None:
    with pytest.raises(FedbenchError, match=r"is not (a plain value|of the form)"):
        parse_selector(text)


def test_settings_are_written_sorted_and_without_needless_quotes() -> None:
    settings = {"size": 3, "path": "/a b/c=d.csv", "on": True, "n": "3"}

    assert write_selector("csv", settings) == "csv[n='3',on=True,path=/a b/c=d.csv,size=3]"
    assert write_selector("csv", {}) == "csv"


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=12), st.integers())
@example("a'], [b", 1)
@example("1e5", 1)
@example(" a ", 1)
@example("\xa0", 1)
@example("a #b: c", 1)
@example("", 0)
def test_what_is_written_is_read_back(text: str, number: int) -> None:
    settings = {"path": text, "size": number}

    written = write_selector("csv", settings)

    assert parse_selector(written) == ("csv", settings)
    assert split_list(f"{written},{written}") == [written, written]


@pytest.mark.parametrize("text", ["a\nb", "a\x07b", "a\udcffb"])
def test_what_no_line_can_hold_is_not_written(text: str) -> None:
    with pytest.raises(FedbenchError, match="cannot be written in a grid"):
        write_selector("csv", {"path": text})


_words = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_selectors = st.builds(
    lambda name, settings: f"{name}[{','.join(f'{k}={v}' for k, v in settings.items())}]" if settings else name,
    _words,
    st.dictionaries(_words, st.integers(0, 99), max_size=3),
)


@given(st.lists(_selectors, max_size=4))
def test_joining_selectors_with_commas_and_splitting_them_gives_them_back(selectors: list[str]) -> None:
    assert split_list(",".join(selectors)) == selectors
