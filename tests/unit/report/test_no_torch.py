"""Reports start fast: they import no torch, nor pyplot with its global state."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from fedbench.report.figures import plot_paper
from fedbench.report.plots import plot_curves
from fedbench.report.render import FORMATS, render
from fedbench.report.table import paper_table, results_table
from fedbench.store.database import database_url, open_database

engine = open_database(database_url(sys.argv[1]), create=False)
for table in (results_table(engine, "g"), paper_table(engine, "pfedbayes", "T1")):
    for format_ in FORMATS:
        assert render(table, format_)
assert plot_curves(engine, Path(sys.argv[2]), sweep="g")
assert plot_paper(engine, Path(sys.argv[2]), "dsvgd", "fig5", x="bytes").paths
print(sorted({"torch", "matplotlib.pyplot"} & set(sys.modules)))
"""


def test_tables_and_plots_import_neither_torch_nor_pyplot(lab, story, tmp_path) -> None:
    grid = {"name": "g", "methods": ["fedavg"], "tasks": [{"dataset": "mnist"}], "set": {"rounds": 1}}
    lab.play(grid, lambda spec: story(gm={1: 0.5}))
    lab.play(
        {"name": "b", "paper": "dsvgd", "methods": [{"dsvgd": {"selection": "hip"}}], "tasks": [{"dataset": "mnist"}]},
        lambda spec: story(gm={1: 0.5}),
    )

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, lab.engine.url.database, tmp_path / "plots"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
