"""The two sides of a comparison: which runs a selector finds, and which of them stand in the same setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from sqlalchemy import Engine

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import JobSpec, Protocol, canonical_json
from fedbench.report.labels import axes, place_of, plain, task_settings
from fedbench.report.measure import measure
from fedbench.report.select import newest
from fedbench.selector import parse_selector
from fedbench.store import queries

Place = tuple[str, ...]
"""The values of the settings that tell the rows of a comparison apart."""
Groups = dict[Place, pd.DataFrame]
"""The measured runs in every setting, one per seed."""


@dataclass(frozen=True)
class Side:
    """The runs of A or of B, as measured, and which of their models is compared."""

    name: str
    engine: Engine
    runs: pd.DataFrame
    named: frozenset[str]
    """the settings that the selector names"""
    view: str

    @property
    def specs(self) -> list[JobSpec]:
        return list(self.runs["spec"])


def find_side(engine: Engine, selector: str | None, name: str, view: str | None, sweep: str | None) -> Side:
    """The finished runs that the selector finds, or all; `view` None: the PM if the runs have one, else the GM."""
    runs = queries.finished_runs(engine, sweep)
    if runs.empty:
        raise FedbenchError(f"{f'sweep {sweep}' if sweep else 'the database'} has no finished run yet.")
    named: dict[str, Any] = {}
    if selector is not None:
        method, named = parse_selector(selector)
        runs = _selected(runs, method, named)
    measured = measure(engine, runs)
    done = measured[measured["status"] == "done"]
    return Side(name, engine, measured, frozenset(named), view or ("pm" if done["pm_has"].all() else "gm"))


def _selected(runs: pd.DataFrame, method: str, named: dict[str, Any]) -> pd.DataFrame:
    """The runs of the method with these settings; raises FedbenchError that says what there is instead."""
    specs: list[JobSpec] = list(runs["spec"])
    if not any(spec.method == method for spec in specs):
        raise FedbenchError(f"there is no finished run of {method!r}.", did_you_mean(method, {s.method for s in specs}))
    found = runs[[spec.method == method for spec in specs]]
    for key, value in named.items():
        settings = [spec.settings for spec in found["spec"]]
        known = {name for one in settings for name in one} - {"method"}
        if key not in known:
            raise FedbenchError(f"{method} has no setting {key!r}.", did_you_mean(key, known))
        values = [plain(one[key]) if key in one else None for one in settings]
        if plain(value) not in values:
            there = ", ".join(sorted({text for text in values if text is not None}))
            raise FedbenchError(f"no such run of {method} has {key}={plain(value)}.", f"There are: {there}.")
        found = found[[text == plain(value) for text in values]]
    return found


def settings_apart(one: Side, two: Side) -> tuple[str, ...]:
    """The settings that make a row: what tells tasks apart, and the protocol that varies for a method on one task.

    What a selector names is not among them: that is what is compared.
    """
    varied = [key for side in (one, two) for key in _varied_protocol(side.specs)]
    found = dict.fromkeys([*axes([*one.specs, *two.specs]), *varied])
    return tuple(key for key in found if key not in one.named | two.named) or ("dataset",)


def _varied_protocol(specs: Sequence[JobSpec]) -> list[str]:
    tasks: dict[str, list[dict[str, Any]]] = {}
    for spec in specs:
        tasks.setdefault(canonical_json(task_settings(spec)), []).append(spec.settings)
    return [
        key
        for key in Protocol.model_fields
        if any(len({plain(settings[key]) for settings in members}) > 1 for members in tasks.values())
    ]


def places(side: Side, where: Sequence[str]) -> list[Place]:
    """Where every run stands."""
    return [place_of(spec, where) for spec in side.specs]


def group(side: Side, at: Sequence[Place]) -> Groups:
    """The newest runs in every setting; raises FedbenchError if they are not one method with one set of settings."""
    found = {}
    for place in dict.fromkeys(at):
        runs = side.runs[[other == place for other in at]]
        _check_alike(side.name, [spec.settings for spec in runs.loc[runs["version"] == runs["version"].max(), "spec"]])
        found[place] = newest(runs)
    return found


def _check_alike(name: str, settings: Sequence[dict[str, Any]]) -> None:
    """Runs with different settings must not become one mean."""
    for key in dict.fromkeys(key for one in settings for key in one if key != "seed"):
        values = list(dict.fromkeys(plain(one[key]) if key in one else "-" for one in settings))
        if len(values) > 1:
            raise FedbenchError(
                f"{name} finds runs with {key} {' and '.join(values)} in the same setting.",
                f"Name one: {settings[0]['method']}[{key}={values[0]}].",
            )


def left_out(of_a: Groups, of_b: Groups, pairs: int) -> list[str]:
    """What is not among the so many pairs that were compared, a sentence each."""
    said = []
    for letter, mine, theirs in (("A", of_a, of_b), ("B", of_b, of_a)):
        if diverged := sum(int((runs["status"] == "diverged").sum()) for runs in mine.values()):
            said.append(f"{diverged} run(s) of {letter} diverged: they are left out, which flatters {letter}.")
        if only := sum(place not in theirs for place in mine):
            said.append(f"{only} setting(s) that only {letter} has are left out.")
    seeds = [(set(of_a[place]["seed"]), set(of_b[place]["seed"])) for place in of_a if place in of_b]
    if alone := sum(len(a ^ b) for a, b in seeds):
        said.append(f"{alone} run(s) whose seed the other side does not have are left out.")
    done = [(_finished_seeds(of_a[place]), _finished_seeds(of_b[place])) for place in of_a if place in of_b]
    if without := sum(len(a & b) for a, b in done) - pairs:
        said.append(f"{without} pair(s) of finished runs have no such number, and are left out.")
    return said


def _finished_seeds(runs: pd.DataFrame) -> set[int]:
    return set(runs.loc[runs["status"] == "done", "seed"])


def unlike(one: Side, two: Side, of_a: Groups, of_b: Groups) -> tuple[str, ...]:
    """`lr (0.1 against 0.01)`: settings that both have, that nobody named, and that differ in some compared setting."""
    found = set()
    for place in (place for place in of_a if place in of_b):
        mine, theirs = (groups[place]["spec"].iloc[0].settings for groups in (of_a, of_b))
        for key in mine.keys() & theirs.keys() - {"method", "seed"} - one.named - two.named:
            if mine[key] != theirs[key]:
                found.add(f"{key} ({plain(mine[key])} against {plain(theirs[key])})")
    return tuple(sorted(found))
