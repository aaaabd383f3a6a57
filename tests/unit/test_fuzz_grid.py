"""Mutated grids: whatever a file holds, it becomes jobs, the same every time, or one clear message."""

import copy
import datetime
import json
import re

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedbench.errors import FedbenchError
from fedbench.grid import Grid, expand, grid_names, load_grid, parse_grid
from fedbench.job import JobSpec

FUZZ = settings(
    derandomize=True, deadline=None, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
MOST_POINTS = 16
"""Of a grid that is expanded here: larger ones show nothing new, and take long."""
SMALL = {
    "name": "small",
    "methods": ["fedavg", {"fedprox": {"mu": 0.01}}],
    "tasks": [{"dataset": "digits", "clients": 4, "partition": "labels"}],
    "set": {"rounds": 3, "lr": 0.1},
    "axes": {"seed": [0, 1], "size": ["small"]},
    "overrides": [{"match": {"method": "fedavg", "seed": [0]}, "set": {"lr": 0.2}}],
    "exclude": [{"method": "fedprox", "seed": 1}],
}
SHIPPED = {name: load_grid(name).model_dump(mode="json", exclude_defaults=True) for name in grid_names()}
for written in SHIPPED.values():
    written["methods"] = [{method["name"]: method.get("settings")} for method in written["methods"][:2]]
    written["tasks"] = written["tasks"][:1]
    written["axes"] = {key: values[:1] for key, values in written.get("axes", {}).items()}

WORDS = ["fedavg", "digits", "labels", "shards[s=2]", "natural", "small", "seed", "lr", "partition", "method", "rounds"]


def _hashable(value):
    return value.__hash__ is not None


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), float("-inf"), 0.5]),
    st.floats(),
    st.sampled_from(
        [*WORDS, "", " ", "[", "a[", "a[b]", "a[b=]", "on", "~", "=", "é🦊", "\x00", "\ud800", "a,b", "../x"]
    ),
    st.text(max_size=8),
    st.sampled_from([datetime.date(2024, 2, 29), datetime.datetime(1, 1, 1), b"bytes", {1, 2}]),
)
KEYS = st.sampled_from(WORDS) | ODD_VALUES.filter(_hashable)
ODD = st.recursive(
    ODD_VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)


def _places(content, above=()):
    """The way to every value of nested lists and dictionaries."""
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in children:
        yield (*above, key)
        yield from _places(value, (*above, key))


@st.composite
def mutated_grids(draw):
    """A good grid in which some values are replaced, removed, renamed, wrapped in a list, or added."""
    grid = copy.deepcopy(draw(st.sampled_from([SMALL, *SHIPPED.values()])))
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from([*_places(grid)] or [("name",)]))
        parent = grid
        for key in above:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "rename", "wrap", "add"]))
        if how == "replace" or (last not in [*parent] and isinstance(parent, dict)):
            parent[last] = draw(ODD)
        elif how == "remove":
            del parent[last]
        elif how == "wrap":
            parent[last] = [parent[last]]
        elif isinstance(parent, list):
            parent.append(draw(ODD))
        else:
            key = draw(KEYS | st.sampled_from([*Grid.model_fields]))
            parent[key] = parent.pop(last) if how == "rename" else draw(ODD)
    return grid


def _points(grid):
    count = len(grid.tasks) * len(grid.methods)
    for values in grid.axes.values():
        count *= len(values)
    return count


def _check_message(error):
    assert error.message.strip()
    assert len(error.message.splitlines()) <= 40
    assert "Traceback" not in str(error)
    str(error).encode()  # what cannot be printed is no message


def _jobs_or_message(text):
    """The jobs of a grid; None if it is refused, which it must be in a message that one can read."""
    try:
        grid = parse_grid(text, "my.yaml")
        return expand(grid) if _points(grid) <= MOST_POINTS else None
    except FedbenchError as error:
        _check_message(error)
        return None


def _check(text):
    jobs = _jobs_or_message(text)
    if jobs is None:
        return
    assert jobs == _jobs_or_message(text)
    assert jobs
    assert len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        stored = json.loads(json.dumps(job.model_dump(mode="json"), allow_nan=False))
        again = JobSpec.model_validate(stored)
        assert (again, again.key, again.settings) == (job, job.key, job.settings)


@FUZZ
@given(mutated_grids())
def test_a_mutated_grid_gives_jobs_or_one_message(grid):
    try:
        text = yaml.safe_dump(grid, allow_unicode=True)
    except (yaml.YAMLError, ValueError, UnicodeError):
        assume(False)
    _check(text)


ODD_YAML = [
    *(
        "on",
        "~",
        "2024-02-30",
        "2024-02-29",
        "2024-01-01T00:00:00Z",
        "1:60",
        "0x" + "f" * 4000,
        "9" * 5000,
        "1e-3",
        ".nan",
        "-.inf",
    ),
    *(
        "!!int ''",
        "!!float x",
        "!!bool x",
        "!!timestamp x",
        "!!binary x",
        "!!binary YWJj",
        "!!set {a, b}",
        "!!omap [a: 1]",
    ),
    *(
        "!!python/object:os.system x",
        "&a [*a]",
        "&a {b: *a}",
        "*a",
        "<<",
        "{<<: 1}",
        "? [a]",
        "{[a]: b}",
        "{{a: b}: c}",
    ),
    *(
        "=",
        "|",
        ">",
        "'",
        '"',
        "[",
        "{",
        "\t",
        "@",
        "`",
        "%",
        "---",
        "...",
        "#",
        ": ",
        "- ",
        "[" * 500,
        "é🦊",
        "\x00",
        "\ufeff",
    ),
    *("fedprox[mu=!!int '']", "fedprox[mu=&a]", "shards[s=[1]]", "fedavg[lr='", "csv[path=x]", "npz[path=/dev/null]"),
]
TEXTS = [yaml.safe_dump(grid, sort_keys=False) for grid in (SMALL, SHIPPED["quickstart"], SHIPPED["fedhb_table1"])]


@st.composite
def mutated_texts(draw):
    """The text of a good grid in which pieces are replaced by, or get, what YAML reads in a way of its own."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 2))):
        pieces = re.split(r"([ \n:,]+)", text)
        place = draw(st.integers(0, len(pieces) - 1))
        odd = draw(st.sampled_from(ODD_YAML) | st.text(max_size=5))
        pieces[place] = odd if draw(st.booleans()) else pieces[place] + odd
        text = "".join(pieces)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 4)) == 0 else text


@FUZZ
@given(mutated_texts())
def test_a_mutated_text_gives_jobs_or_one_message(text):
    _check(text)


@FUZZ
@given(st.text(max_size=40) | st.lists(st.sampled_from(ODD_YAML), max_size=4).map(" ".join))
def test_any_text_gives_jobs_or_one_message(text):
    _check(text)


@pytest.mark.parametrize("value", ODD_YAML, ids=range(len(ODD_YAML)))
@pytest.mark.parametrize(
    "place", ["name: %s", "set: {lr: %s}", "axes: {partition: [%s]}", "overrides: [%s]", "methods: [%s]"]
)
def test_an_odd_value_in_any_place_gives_jobs_or_one_message(place, value):
    key = place.partition(":")[0]
    rest = yaml.safe_dump({name: part for name, part in SMALL.items() if name != key})
    _check(rest + place % value)
