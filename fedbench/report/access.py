"""Results as tidy DataFrames, for those who analyse them in Python; the way in is `fedbench.load`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pandas as pd
from sqlalchemy import Engine

from fedbench.job import canonical_json
from fedbench.report.measure import CALIBRATION, VIEWS, measure
from fedbench.report.rules import looks_for_best
from fedbench.store import queries
from fedbench.store.database import database_url, open_database

WHO = ("run", "method", "label", "dataset", "size", "seed")
"""What every frame begins with."""
MEASURED = (
    *("status", "headline", "rule", "rounds", "last_round"),
    *(f"{view}_{name}" for view in VIEWS for name in ("value", "final", *CALIBRATION)),
    *("mb", "seconds"),
)
PLACE = ("key", "device", "host", "commit", "split_hash")


class Results:
    """What a database holds, as DataFrames. Each is read when it is first asked for, and kept.

    All are about the newest finished run of every job, as tables and plots are, and begin with run, method, label (the
    method as tables print it), dataset, size and seed. Figures are fractions: an accuracy of 0.97, not 97.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: its settings, as far as they vary, what it measured, and where it ran.

        Per view (`pm_` personal models, `gm_` global model): `value` is the headline metric (see the column `headline`)
        by the job's rule, `final` the same at the last round; `ece`, `mce`, `brier`, `nll` are of the best round where
        the rule looks for a best, else of the last, by MC prediction where the method samples. `mb` counts megabytes,
        down and up. A diverged run has no values, only its cost.
        """
        found = queries.finished_runs(self._engine)
        measured = _as_tables_show(measure(self._engine, found)).set_index("run", drop=False)
        places = found.set_index("run")[list(PLACE)].drop(columns="key")
        settings = pd.DataFrame([spec.settings for spec in measured["spec"]], index=measured.index)
        known = {*WHO, *MEASURED, *PLACE}
        varying = [name for name in settings if name not in known and _varies(settings[name])]
        order = [*WHO, *varying, *MEASURED, *PLACE]
        return measured.join(settings[varying]).join(places)[order].reset_index(drop=True)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Pooled metrics over the rounds of training: round, view, split, predict, metric, value."""
        return self._figures(("train",)).drop(columns=["stage", "step", "client"])

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Pooled metrics of the best and the last state, and after adaptation: stage, round, step, ..., metric, value.

        Beside `test` the splits may be others, such as that of data which is out of distribution.
        """
        return self._figures(("best", "final", "adapt")).drop(columns="client")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Metrics of single clients, in all stages: stage, round, step, view, split, predict, client, metric, value."""
        found = self._figures(("train", "best", "final", "adapt"), per_client=True)
        return found[found["client"].notna()].astype({"client": int}).reset_index(drop=True)

    @cached_property
    def histograms(self) -> pd.DataFrame:
        """Bins of reliability diagrams and of entropies: kind, bin, count, confidence, correct; client <NA> is all."""
        return self._with_names(queries.histograms(self._engine, self._ids)).astype({"client": "Int64"})

    @cached_property
    def costs(self) -> pd.DataFrame:
        """Seconds and bytes of every round and phase, all clients together; `count` operations took the seconds."""
        return self._with_names(queries.costs(self._engine, self._ids))

    @property
    def _ids(self) -> list[int]:
        return [int(run) for run in self.runs["run"]]

    def _figures(self, stages: tuple[str, ...], *, per_client: bool = False) -> pd.DataFrame:
        found = queries.figures(self._engine, self._ids, stages, per_client=per_client)
        return self._with_names(found.rename(columns={"name": "metric"}))

    def _with_names(self, frame: pd.DataFrame) -> pd.DataFrame:
        return self.runs[list(WHO)].merge(frame, on="run")


def load(where: str | None) -> Results:
    """See `fedbench.load`."""
    return Results(open_database(database_url(where), create=False))


def _as_tables_show(measured: pd.DataFrame) -> pd.DataFrame:
    """Calibration of the state that the headline is of: the best one only where the rule looks for a best."""
    at_the_end = ~measured["rule"].map(looks_for_best).astype(bool)
    names = [f"{view}_{name}" for view in VIEWS for name in CALIBRATION]
    last = {name: measured[name.replace("_", "_final_", 1)] for name in names}
    return measured.assign(**{name: measured[name].mask(at_the_end, last[name]) for name in names})


def _varies(values: Any) -> bool:
    """Whether runs differ in a setting; one that some of them do not have differs."""
    return len({canonical_json(None if _is_missing(value) else value) for value in values}) > 1


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and value != value
