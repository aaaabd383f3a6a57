"""Curves against bytes and seconds: what a run has spent by a round, and seeds whose points differ."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from sqlalchemy import update

from fedbench import queue
from fedbench.report.curves import over_seeds, read_curves
from fedbench.report.plots import curve_figures
from fedbench.store.models import Cost

GRID = {
    "name": "g",
    "methods": ["fedavg", "local"],
    "tasks": [{"dataset": "digits"}],
    "set": {"rounds": 3, "eval_every": 1},
    "axes": {"seed": [0]},
}
ALONE = GRID | {"methods": ["fedavg"]}


def curves(*points: tuple[int, float, float]) -> pd.DataFrame:
    """Curves of (run, x, value)."""
    return pd.DataFrame(points, columns=["run", "x", "value"])


def figure_of(lab: Any, **wanted: Any) -> Figure:
    ((_, figure),) = curve_figures(lab.engine, **wanted)
    return figure


def test_bytes_add_up_over_the_rounds_down_and_up_scored_or_not(lab, story) -> None:
    # 3 + 1 MB a round; round 2 is not scored, yet sent its 4 MB
    lab.play(ALONE, lambda spec: story(gm={1: 0.2, 3: 0.5}, sent=(3_000_000, 1_000_000)))

    found = read_curves(lab.engine, [1], "accuracy", "bytes")

    assert list(zip(found["round"], found["x"], found["value"], strict=True)) == [(1, 4.0, 20.0), (3, 12.0, 50.0)]


def test_seconds_are_those_of_clients_server_and_polls_and_not_of_scoring(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={1: 0.2, 2: 0.5}))
    with queue.writing(lab.engine).begin() as connection:
        run = {"run_id": 1, "count": 1, "bytes_down": 0, "bytes_up": 0}
        connection.execute(
            Cost.__table__.insert(),
            [
                {**run, "round": 1, "phase": "server", "seconds": 0.5},
                {**run, "round": 1, "phase": "poll", "seconds": 1.0},
                {**run, "round": 1, "phase": "predict", "seconds": 64.0},
                {**run, "round": 2, "phase": "personalise", "seconds": 64.0},
            ],
        )

    found = read_curves(lab.engine, [1], "accuracy", "seconds")

    # the fixture's clients take 0.1 s a round: 0.1 + 0.5 + 1.0, then 0.1 more
    assert list(found["x"]) == [pytest.approx(1.6), pytest.approx(1.7)]


def test_seeds_with_other_points_keep_their_last_value(lab) -> None:
    # at 3 run 1 has its 10 of 1, at 4 run 2 its 40 of 3, after its end run 1 its last 30
    found = over_seeds(curves((1, 1, 10), (1, 4, 30), (2, 2, 20), (2, 3, 40), (2, 6, 60)), [1, 2], "bytes")

    assert list(found.index) == [2, 3, 4, 6]
    assert list(found["mean"]) == [15, 25, 35, 45]
    assert found["std"].loc[2] == pytest.approx(50**0.5)  # 10 and 20: (25 + 25) / 1


def test_over_rounds_no_value_is_carried_to_a_round_that_was_not_scored(lab) -> None:
    found = over_seeds(curves((1, 1, 10), (1, 3, 30), (2, 2, 20), (2, 3, 40)), [1, 2], "rounds")

    assert list(found.index) == [3]
    assert list(found["mean"]) == [35]


def test_the_axis_and_the_file_say_bytes(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={1: 0.2, 2: 0.5}, sent=(1_000_000, 1_000_000)))

    ((name, figure),) = curve_figures(lab.engine, x="bytes")

    (panel,) = figure.axes
    assert name == "all-digits-small-accuracy-bytes"
    assert panel.get_xlabel() == "sent down and up, all clients (MB)"
    assert list(panel.lines[0].get_xdata()) == [2.0, 4.0]


@pytest.mark.parametrize(("other", "scale"), [(9, "linear"), (10, "log")])
def test_the_axis_is_logarithmic_when_a_line_is_ten_times_as_long_as_another(lab, story, other, scale) -> None:
    lab.play(
        GRID,
        lambda spec: story(gm={1: 0.2}, sent=(1_000_000 * (other if spec.method == "local" else 1), 0)),
        "rounds=1",
    )

    assert figure_of(lab, x="bytes").axes[0].get_xscale() == scale


def test_a_method_that_sends_nothing_is_a_level_at_its_final_value(lab, story) -> None:
    told = {1: 0.2, 2: 0.5}
    lab.play(GRID, lambda spec: story(gm=told, sent=(0, 0) if spec.method == "local" else (1_000_000, 0)))

    sender, silent = figure_of(lab, x="bytes").axes[0].lines

    assert list(sender.get_xdata()) == [1.0, 2.0]
    assert list(silent.get_xdata()) == [0, 1]  # of the width of the panel
    assert list(silent.get_ydata()) == [50.0, 50.0]


def test_a_round_that_sent_nothing_yet_does_not_stop_a_logarithmic_axis(lab, story) -> None:
    lab.play(
        GRID, lambda spec: story(gm={1: 0.2, 2: 0.5}, sent=(20_000_000 if spec.method == "local" else 1_000_000, 0))
    )
    with queue.writing(lab.engine).begin() as connection:
        connection.execute(update(Cost).where(Cost.run_id == 1, Cost.round == 1).values(bytes_down=0))

    sender, _ = figure_of(lab, x="bytes").axes[0].lines

    assert list(sender.get_xdata()) == [1.0]
