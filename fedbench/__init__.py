"""fedbench: benchmarks for personalised and Bayesian federated learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from fedbench.report.access import Results

__version__ = "0.1.0"


def load(where: str | PathLike[str] | None = None) -> Results:
    """Results as tidy DataFrames: of a database (a path or a URL), or of a folder that `fedbench db export` wrote.

    Without an argument it is the database that the commands use: FEDBENCH_DB, else results/fedbench.sqlite.

    >>> import fedbench
    >>> results = fedbench.load("results/fedbench.sqlite")
    >>> results.runs.groupby(["dataset", "method"])["pm_value"].agg(["mean", "std", "count"])
    >>> curves = results.curves.query("metric == 'accuracy' and view == 'pm' and predict == 'mean'")
    >>> curves.pivot_table(index="round", columns="label", values="value").plot()

    The frames: `runs`, `curves`, `scores` (best, last and adapted states), `clients`, `histograms`, `costs`; all begin
    with run, method, label, dataset, size and seed. `help(results)` says what their columns mean.
    """
    from fedbench.report import access

    return access.load(None if where is None else str(where))
