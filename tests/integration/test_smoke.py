"""Every shipped grid's smoke twin, from the grid to its table: all that a grid names works together.

The workers' loop runs in this process, because starting Python and torch anew for every grid
would take most of the time.
"""

import pytest
from typer.testing import CliRunner

from fedbench import queue
from fedbench.cli import app
from fedbench.grid import Changes, grid_names
from fedbench.simulation import check_jobs
from fedbench.store.database import database_url, open_database
from fedbench.sweep import plan
from fedbench.workers.process import work
from fedbench.workers.slots import make_slots


class Alone:
    """Nobody who listens, and nobody who tells the worker to stop."""

    def tell(self, event):
        pass

    def should_stop(self):
        return False

    def abandon(self, ended):
        raise AssertionError(ended)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", grid_names())
def test_the_twin_of_a_grid_runs_without_data_and_makes_a_table(name, tmp_path):
    url = database_url(str(tmp_path / "fedbench.sqlite"))
    planned = plan(f"{name}_smoke", Changes(), url)

    check_jobs(planned.jobs, tmp_path / "no data")
    engine = open_database(url, create=True)
    sweep = queue.enqueue(engine, planned.grid.name, planned.grid.model_dump(mode="json"), planned.jobs)
    work(engine, url, sweep, make_slots("cpu", 1)[0], tmp_path / "no data", Alone())

    counts = queue.counts(engine, sweep)
    assert set(counts) <= {"done", "diverged"}, [job.error for job in queue.listing(engine, ("failed",))]
    assert sum(counts.values()) == len(planned.jobs)
    engine.dispose()
    shown = CliRunner().invoke(app, ["table", "--grid", f"{name}_smoke", "--db", str(tmp_path / "fedbench.sqlite")])
    assert shown.exit_code == 0, shown.output
    assert "synthetic" in shown.output or {job.task.dataset for job in planned.jobs} <= {"digits", "quadratics"}
