"""Convergence curves: the data that is drawn, the words around it, and the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from fedbench.errors import FedbenchError
from fedbench.paper import load_paper
from fedbench.report.draw import marker_positions
from fedbench.report.plots import curve_figures, finished, plot_curves, table_figures
from fedbench.report.styles import COLOURS, LINES, METHODS, style_of

GRID = {
    "name": "g",
    "methods": ["fedavg", "local"],
    "tasks": [{"dataset": "digits"}],
    "set": {"rounds": 2, "eval_every": 1},
    "axes": {"seed": [0, 1, 2]},
}
ALONE = GRID | {"methods": ["fedavg"]}
MNIST = {
    "name": "pfedbayes_mnist",
    "paper": "pfedbayes",
    "methods": ["fedavg", "local"],
    "tasks": [{"dataset": "mnist"}],
    "axes": {"size": ["small", "medium"], "seed": [0]},
}
REGRESSION = {
    "name": "r",
    "methods": ["fedavg"],
    "tasks": [{"dataset": "quadratics", "clients": 2, "partition": "natural", "model": "linear", "normalize": "none"}],
    "set": {"rounds": 2, "headline": "rmse", "min_size": 2, "test_fraction": 0},
}


def figure_of(lab: Any, **wanted: Any) -> Figure:
    ((_, figure),) = curve_figures(lab.engine, **wanted)
    return figure


def drawn(panel: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in panel.lines]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_line_is_the_mean_over_seeds_in_percent(lab, story) -> None:
    # round 1: 0.2, 0.3, 0.4 -> 30; round 2: 0.5, 0.7, 0.9 -> 70
    lab.play(ALONE, lambda spec: story(gm={1: 0.2 + 0.1 * spec.seed, 2: 0.5 + 0.2 * spec.seed}))

    (panel,) = figure_of(lab).axes

    assert drawn(panel) == [([1.0, 2.0], [pytest.approx(30.0), pytest.approx(70.0)])]


def test_a_mean_is_drawn_only_where_all_seeds_were_scored(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.2}), "seed=0", "rule=final")
    lab.play(ALONE, lambda spec: story(gm={1: 0.1, 2: 0.4}), "seed=1", "rule=best_all")

    (panel,) = figure_of(lab).axes

    assert drawn(panel) == [([2.0], [pytest.approx(30.0)])]


def test_the_band_is_one_sample_deviation_wide_on_either_side(lab, story) -> None:
    # deviations 10 and 20 points: 30 ± 10, 70 ± 20
    lab.play(ALONE, lambda spec: story(gm={1: 0.2 + 0.1 * spec.seed, 2: 0.5 + 0.2 * spec.seed}))

    (panel,) = figure_of(lab).axes

    (band,) = [item for item in panel.collections if isinstance(item, PolyCollection)]
    corners = {(round(float(x), 6), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1.0, 20.0), (1.0, 40.0), (2.0, 50.0), (2.0, 90.0)}


def test_one_seed_has_no_band(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={1: 0.2, 2: 0.5}), "seed=0")

    assert len(figure_of(lab).axes[0].collections) == 0


def test_the_panels_are_pm_and_gm_and_a_method_is_in_those_that_it_has(lab, story) -> None:
    lab.play(
        GRID | {"methods": ["fedavg", "local", "pfedbayes"]},
        lambda spec: story(
            pm={} if spec.method == "fedavg" else {2: 0.25}, gm={} if spec.method == "local" else {2: 0.5}
        ),
    )

    figure = figure_of(lab)

    assert [panel.get_title() for panel in figure.axes] == ["personal models (PM)", "global model (GM)"]
    assert [len(panel.lines) for panel in figure.axes] == [2, 2]
    assert legend(figure) == ["FedAvg", "Local", "pFedBayes"]


def test_only_the_panels_that_exist_are_drawn(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}))

    assert [panel.get_title() for panel in figure_of(lab).axes] == ["global model (GM)"]


def test_the_words_say_task_axes_and_unit(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}), "clients=8")

    figure = figure_of(lab)

    assert figure.get_suptitle() == "digits, small, 8 clients"
    assert figure.axes[0].get_xlabel() == "round"
    assert figure.axes[0].get_ylabel() == "accuracy (%)"


def test_a_score_is_drawn_as_it_is(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}))

    figure = figure_of(lab, metric="brier")

    assert drawn(figure.axes[0]) == [([2.0], [pytest.approx(0.3)])]
    assert figure.axes[0].get_ylabel() == "Brier score"


def test_markers_are_spread_evenly_though_the_end_was_scored_more_densely() -> None:
    # rounds 10, 20, ..., 80, then 81, 82, ..., 90; an eighth of 10..90 is 10, so that the marks are 10, 20, ..., 80
    rounds = [*range(10, 81, 10), *range(81, 91)]

    assert [rounds[i] for i in marker_positions(rounds, place=0)] == [10, 20, 30, 40, 50, 60, 70, 80]


def test_markers_of_lines_that_coincide_are_apart() -> None:
    rounds = list(range(1, 81))

    assert not {*marker_positions(rounds, place=0)} & {*marker_positions(rounds, place=1)}


def test_a_line_of_one_round_has_its_marker() -> None:
    assert marker_positions([5], place=3) == [0]


def test_variants_of_a_method_share_its_colour_and_nothing_else(lab, story) -> None:
    variants = [{"fedprox": {"mu": 0.1}}, {"fedprox": {"mu": 1.0}}]
    lab.play(GRID | {"methods": variants}, lambda spec: story(gm={2: 0.5}), "seed=0")

    figure = figure_of(lab)
    one, other = figure.axes[0].lines

    assert legend(figure) == ["FedProx[mu=0.1]", "FedProx[mu=1]"]
    assert one.get_color() == other.get_color()
    assert one.get_linestyle() != other.get_linestyle()
    assert one.get_marker() != other.get_marker()


def test_a_diverged_run_is_a_line_of_its_own_and_no_part_of_the_mean(lab, story) -> None:
    lab.play(
        ALONE,
        lambda spec: story(gm={1: 0.9}, outcome="diverged") if spec.seed == 2 else story(gm={1: 0.2, 2: 0.5}),
    )

    figure = figure_of(lab)

    curve, cross, mean = drawn(figure.axes[0])
    assert curve == cross == ([1.0], [pytest.approx(90.0)])
    assert mean == ([1.0, 2.0], [pytest.approx(20.0), pytest.approx(50.0)])
    assert figure.axes[0].lines[1].get_marker() == "x"
    assert legend(figure) == ["FedAvg (1 of 3 diverged)"]


def test_there_is_a_figure_per_task_with_a_name_that_says_which(lab, story) -> None:
    lab.play(
        ALONE | {"tasks": [{"dataset": "digits", "clients": 5}, {"dataset": "digits"}, {"dataset": "mnist"}]},
        lambda spec: story(gm={2: 0.5}),
    )

    names = [name for name, _ in curve_figures(lab.engine, sweep="g")]

    assert names == [
        "g-digits-small-clients_5-accuracy",
        "g-digits-small-clients_10-accuracy",
        "g-mnist-small-clients_10-accuracy",
    ]


def test_the_figures_of_a_paper_show_the_runs_of_its_cells_only(lab, story) -> None:
    lab.play(MNIST, lambda spec: story(gm={5: 0.25}), "rounds=5")
    lab.play(MNIST, lambda spec: story(gm={4: 0.75}), "rounds=4")  # shorter: the longer runs stand in the cell
    lab.play(MNIST | {"name": "other"}, lambda spec: story(gm={5: 0.99}), "lr=0.5", "rounds=5")
    lab.play(GRID, lambda spec: story(gm={2: 0.5}))

    figures = dict(table_figures(lab.engine, load_paper("pfedbayes"), finished(lab.engine)))

    assert list(figures) == ["pfedbayes-mnist-small-accuracy", "pfedbayes-mnist-medium-accuracy"]
    small = figures["pfedbayes-mnist-small-accuracy"]
    assert legend(small) == ["FedAvg", "Local"]
    assert drawn(small.axes[0]) == [([5.0], [25.0]), ([5.0], [25.0])]


def test_a_task_without_the_metric_has_no_figure(lab, story) -> None:
    lab.play(REGRESSION, lambda spec: story(gm={1: 0.5, 2: 0.1}, rmse=True))
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}))

    assert [name for name, _ in curve_figures(lab.engine)] == ["all-digits-small-accuracy"]
    assert [name for name, _ in curve_figures(lab.engine, metric="rmse")] == ["all-quadratics-rmse"]


def test_long_legends_stay_within_the_figure(lab, story) -> None:
    variants = [{"fedabml": {"theta_grad": choice, "phi": "reset"}} for choice in ("partial", "first_order")]
    lab.play(GRID | {"methods": [*variants, {"fedabml": {"k": 2}}]}, lambda spec: story(gm={2: 0.5}), "seed=0")

    figure = figure_of(lab)

    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_files_are_written_as_png_and_svg(lab, story, tmp_path: Path) -> None:
    lab.play(ALONE | {"name": "quickstart"}, lambda spec: story(gm={2: 0.5}))

    paths = plot_curves(lab.engine, tmp_path / "plots", sweep="quickstart")

    assert [path.name for path in paths] == [
        "quickstart-digits-small-accuracy.png",
        "quickstart-digits-small-accuracy.svg",
    ]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()


def test_the_same_results_give_the_same_bytes(lab, story, tmp_path: Path) -> None:
    lab.play(ALONE, lambda spec: story(gm={1: 0.25, 2: 0.5}))

    once, again = (plot_curves(lab.engine, tmp_path / name) for name in ("once", "again"))

    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_an_unknown_metric_is_refused_with_those_there_are(lab, story) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}))

    with pytest.raises(FedbenchError, match=r"no curve of 'acuracy'(.|\n)*Did you mean accuracy"):
        figure_of(lab, metric="acuracy")


def test_nothing_to_draw_is_said_with_the_way_out(lab, story) -> None:
    with pytest.raises(FedbenchError, match="fedbench run --grid quickstart"):
        figure_of(lab)


def test_a_folder_that_cannot_be_made_is_named(lab, story, tmp_path: Path) -> None:
    lab.play(ALONE, lambda spec: story(gm={2: 0.5}))
    (tmp_path / "file").write_text("")

    with pytest.raises(FedbenchError, match="file cannot be written"):
        plot_curves(lab.engine, tmp_path / "file")


def test_no_two_listed_methods_look_the_same() -> None:
    looks = {(style_of(method).colour, style_of(method).line) for method in METHODS}

    assert len(looks) == len(METHODS) <= len(COLOURS) * len(LINES)


def test_a_method_that_is_not_listed_looks_the_same_everywhere() -> None:
    # sha256("newcomer") begins with 9aaa5843 = 2,594,854,979 = 24 mod 35; colour 24 mod 7 = 3, line (24 + 3) mod 5 = 2
    assert (style_of("newcomer").colour, style_of("newcomer").line) == (COLOURS[3], LINES[2])
