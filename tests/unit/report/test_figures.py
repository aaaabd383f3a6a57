"""The figures that papers declare: whose runs they show, what they say of them, and against what they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import ValidationError

from fedbench.errors import FedbenchError
from fedbench.grid import expand, load_grid
from fedbench.paper import Paper, load_paper, paper_names
from fedbench.report import figures
from fedbench.report.figures import Drawn, declared_picture, plot_paper
from fedbench.report.styles import COLOURS


def shipped(name: str) -> dict[str, Any]:
    """A grid that ships, as its file would say it."""
    grid = load_grid(name)
    return grid.model_dump(mode="json") | {"methods": [{entry.name: entry.settings} for entry in grid.methods]}


BLR = shipped("dsvgd_blr") | {"axes": {"clients": [30, 120], "seed": [0, 1]}}
BNN = shipped("dsvgd_bnn") | {"axes": {"clients": [27], "seed": [0]}}
SCHEMES = {"round_robin": 0.1, "random": 0.2, "ksd": 0.3, "hip": 0.4, "parallel": 0.5}


def scheme(spec: Any) -> str:
    return str(spec.params["selection"])


def level(story: Any, rounds: int = 2) -> Any:
    """Every scheme stays at its own level: round-robin at 10 %, random at 20 %, ..."""
    return lambda spec: story(gm=dict.fromkeys(range(1, rounds + 1), SCHEMES[scheme(spec)]))


def drawings(lab: Any, monkeypatch: pytest.MonkeyPatch, *wanted: Any, **how: Any) -> tuple[dict[str, Figure], Drawn]:
    """The figures by the names of their files, and what `plot_paper` says."""
    saved: dict[str, Figure] = {}

    def keep(figure: Figure, folder: Path, name: str) -> list[Path]:
        saved[name] = figure
        return [folder / name]

    monkeypatch.setattr(figures, "save_figure", keep)
    return saved, plot_paper(lab.engine, Path("out"), *wanted, **how)


def only(lab: Any, monkeypatch: pytest.MonkeyPatch, *wanted: Any, **how: Any) -> Figure:
    saved, _ = drawings(lab, monkeypatch, *wanted, **how)
    (figure,) = saved.values()
    return figure


def drawn(panel: Axes) -> list[tuple[list[float], list[float]]]:
    return [
        (list(map(float, line.get_xdata())), [round(float(y), 6) for y in line.get_ydata()]) for line in panel.lines
    ]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def note(panel: Axes) -> str:
    (text,) = panel.texts
    return str(text.get_text()).replace("\n", " ")


# --- whose runs ---


@pytest.mark.parametrize("name", paper_names())
def test_every_line_of_a_shipped_figure_is_one_job_of_its_grid_and_its_seeds(name: str) -> None:
    paper = load_paper(name)
    for figure_name, layout in paper.figures.items():
        for panel in layout.panels:
            grid = load_grid(panel.grid)
            jobs = expand(grid)
            for line in figures._lines(paper, layout, grid):
                pattern = {**panel.match, **line.pattern}
                found = [job for job in jobs if figures.settings_of(job, paper, grid, pattern) is not None]

                where = (figure_name, panel.title, line.label)
                assert len(found) == len(grid.axes["seed"]), where
                assert len({str(job.changed) for job in found}) == 1, where


def test_a_panel_shows_the_lines_of_its_figure_at_its_settings(lab, story, monkeypatch) -> None:
    # 30 clients at the schemes' levels, 120 clients half a point above
    lab.play(
        BLR,
        lambda spec: story(gm={1: SCHEMES[scheme(spec)] + (0.005 if spec.task.clients == 120 else 0)}),
        "order=block",
    )

    figure = only(lab, monkeypatch, "dsvgd", "fig2")

    few, many, *_ = figure.axes
    assert drawn(few) == [([1.0], [10.0]), ([1.0], [20.0]), ([1.0], [30.0])]
    assert drawn(many) == [([1.0], [10.5]), ([1.0], [20.5]), ([1.0], [30.5])]
    assert legend(figure) == ["Round-robin", "Random", "KSD"]
    assert figure.get_suptitle() == "KSD selection against the baselines"
    assert few.get_title() == "(a) logistic regression, Covtype, 30 clients"


def test_runs_with_other_settings_than_the_papers_are_not_shown(lab, story, monkeypatch) -> None:
    lab.play(BLR, level(story), "order=block")
    lab.play(BLR, lambda spec: story(gm={1: 0.9}), "order=alternate")
    lab.play(BLR, lambda spec: story(gm={1: 0.9}), "order=block", "lr=0.5")

    figure = only(lab, monkeypatch, "dsvgd", "fig4")

    assert drawn(figure.axes[0]) == [([1.0, 2.0], [30.0, 30.0]), ([1.0, 2.0], [40.0, 40.0])]
    assert note(figure.axes[0]) == "2 seeds"


def test_a_run_belongs_whichever_grid_asked_for_it(lab, story, monkeypatch) -> None:
    lab.play(BNN | {"name": "mine"}, level(story))

    assert drawn(only(lab, monkeypatch, "dsvgd", "fig5").axes[0]) == [([1, 2], [40, 40]), ([1, 2], [50, 50])]


def test_a_smoke_test_is_in_no_figure_of_a_paper(lab, story, tmp_path: Path) -> None:
    lab.play(shipped("dsvgd_bnn_smoke"), level(story))

    with pytest.raises(FedbenchError, match="no finished run has the settings of dsvgd"):
        plot_paper(lab.engine, tmp_path, "dsvgd")


def test_without_named_lines_there_is_one_per_method_of_the_grid(lab, story, monkeypatch) -> None:
    grid = shipped("fedabml_toy")
    lab.play(grid, lambda spec: story(gm={1: 0.5, 2: 0.1}, pm={2: 0.7}, rmse=True), "seed=0")

    saved, said = drawings(lab, monkeypatch, "fedabml", "toy")

    (panel,) = saved["fedabml-toy"].axes
    assert drawn(panel) == [([1.0, 2.0], [0.5, 0.1])] * 5
    assert (panel.get_ylabel(), panel.get_yscale()) == ("distance from the exact global mean", "log")
    assert legend(saved["fedabml-toy"]) == [
        "FedAvg",
        "FedABML",
        "FedABML[theta_grad=partial]",
        "FedABML[lr_theta=0.00316]",
        "FedAvg[lr=0.00316]",
    ]
    assert said.missing == []


# --- how they look ---


def test_a_scheme_has_one_colour_of_its_own_in_all_figures(lab, story, monkeypatch) -> None:
    lab.play(BLR, level(story), "order=block")
    lab.play(BNN, level(story))

    saved, _ = drawings(lab, monkeypatch, "dsvgd")

    looks: dict[str, set[Any]] = {}
    for figure in saved.values():
        for text, line in zip(figure.legends[0].get_texts(), figure.legends[0].get_lines(), strict=True):
            looks.setdefault(text.get_text(), set()).add((line.get_color(), line.get_linestyle(), line.get_marker()))
    assert {name: [colour for colour, _, _ in found] for name, found in looks.items()} == {
        "Round-robin": [COLOURS[0]],
        "Random": [COLOURS[1]],
        "KSD": [COLOURS[2]],
        "HIP": [COLOURS[3]],
        "Parallel": [COLOURS[4]],
    }
    assert all(len(found) == 1 for found in looks.values())


def test_the_panels_of_a_row_share_their_y_axis_and_nobody_elses(lab, story, monkeypatch) -> None:
    lab.play(BLR, level(story), "order=block")
    lab.play(BNN, lambda spec: story(gm={1: 0.9}))

    few, many, network, _ = only(lab, monkeypatch, "dsvgd", "fig2").axes

    assert few.get_ylim() == many.get_ylim() != network.get_ylim()


def test_tasks_that_send_unlike_amounts_need_no_logarithmic_axis(lab, story, monkeypatch) -> None:
    lab.play(BLR, lambda spec: story(gm={1: 0.5}, sent=(1_000, 0)), "order=block")
    lab.play(BNN, lambda spec: story(gm={1: 0.5}, sent=(1_000_000, 0)))

    figure = only(lab, monkeypatch, "dsvgd", "fig4", x="bytes")

    assert {panel.get_xscale() for panel in figure.axes} == {"linear"}


# --- what is said of the runs ---


@pytest.mark.parametrize(("rounds", "words"), [(300, "1 seed"), (120, "1 seed; 120 of 300 rounds")])
def test_a_panel_says_when_its_runs_are_shorter_than_the_papers(lab, story, monkeypatch, rounds, words) -> None:
    lab.play(BNN, level(story), f"rounds={rounds}")

    assert note(only(lab, monkeypatch, "dsvgd", "fig5").axes[0]) == words


@pytest.mark.parametrize("others", [3, 400])
def test_runs_of_the_papers_length_come_before_shorter_and_longer_ones(lab, story, monkeypatch, others) -> None:
    lab.play(BNN, level(story, rounds=1))
    lab.play(BNN, level(story, rounds=3), f"rounds={others}")

    panel = only(lab, monkeypatch, "dsvgd", "fig5").axes[0]

    assert [where for where, _ in drawn(panel)] == [[1.0], [1.0]]
    assert note(panel) == "1 seed"


def test_lines_that_differ_in_rounds_and_seeds_are_named(lab, story, monkeypatch) -> None:
    lab.play(BNN, level(story), "selection=hip", "rounds=7")
    lab.play(BNN | {"axes": {"clients": [27], "seed": [0, 1, 2]}}, level(story), "selection=parallel")

    assert note(only(lab, monkeypatch, "dsvgd", "fig5").axes[0]) == "1 to 3 seeds; HIP: 7 of 300 rounds"


def test_a_panel_says_what_diverged(lab, story, monkeypatch) -> None:
    lab.play(
        BNN | {"axes": {"clients": [27], "seed": [0, 1]}},
        lambda spec: story(gm={1: 0.5}, outcome="diverged" if (scheme(spec), spec.seed) == ("hip", 1) else "done"),
    )

    assert note(only(lab, monkeypatch, "dsvgd", "fig5").axes[0]) == "2 seeds; HIP: 1 of 2 diverged"


def test_what_is_missing_is_said_in_the_figure_and_with_the_command_that_fills_it(lab, story, monkeypatch) -> None:
    lab.play(BNN, level(story), "selection=random")

    saved, said = drawings(lab, monkeypatch, "dsvgd", "fig2")

    few, _, network, _ = saved["dsvgd-fig2"].axes
    assert note(few) == "not run yet: fedbench run --grid dsvgd_blr"
    assert note(network) == "1 seed; no runs of Round-robin, KSD"
    assert legend(saved["dsvgd-fig2"]) == ["Random"]
    assert said.missing[0].endswith("30 clients: no runs. To fill it: fedbench run --grid dsvgd_blr")
    assert said.missing[2].endswith("27 clients: runs of 1 of 3 lines. To fill it: fedbench run --grid dsvgd_bnn")
    assert len(said.missing) == 4


def test_a_figure_without_any_run_names_the_grids_that_fill_it(lab, story, tmp_path: Path) -> None:
    lab.play(BLR, level(story), "order=block")

    with pytest.raises(
        FedbenchError, match=r"settings of figure fig5 of dsvgd(.|\n)*Run: fedbench run --grid dsvgd_bnn$"
    ):
        plot_paper(lab.engine, tmp_path, "dsvgd", "fig5")


# --- all figures of a paper, and one of them ---


def test_a_paper_without_a_name_draws_all_that_it_can(lab, story, monkeypatch) -> None:
    lab.play(BLR, level(story), "order=block")

    saved, said = drawings(lab, monkeypatch, "dsvgd")

    assert list(saved) == ["dsvgd-fig2", "dsvgd-fig3", "dsvgd-fig4", "dsvgd-order"]
    assert [gap for gap in said.missing if gap.startswith("fig5")] == [
        "fig5, neural network, MNIST 0-8, 27 clients: no runs. To fill it: fedbench run --grid dsvgd_bnn"
    ]


def test_the_curves_of_a_papers_tables_are_drawn_beside_its_figures(lab, story, monkeypatch) -> None:
    # no paper that ships has both: pFedBayes with a figure of errors, which its runs do not have
    panel = {"title": "MNIST", "grid": "pfedbayes_mnist", "match": {"size": "small"}}
    content = load_paper("pfedbayes").model_dump()
    content["figures"] = {"errors": {"title": "Errors", "panels": [panel], "metric": "rmse"}}
    monkeypatch.setattr(figures, "load_paper", lambda name: Paper.model_validate(content))
    grid = {"name": "g", "paper": "pfedbayes", "methods": ["fedavg"], "tasks": [{"dataset": "mnist"}]}
    lab.play(grid, lambda spec: story(gm={1: 0.5}), "size=small")

    as_declared, said = drawings(lab, monkeypatch, "pfedbayes")
    by_accuracy, _ = drawings(lab, monkeypatch, "pfedbayes", metric="accuracy")

    assert list(as_declared) == ["pfedbayes-mnist-small-accuracy"]
    assert said.missing[-1] == "errors: no curve of 'rmse' is stored."
    assert list(by_accuracy) == ["pfedbayes-errors-accuracy", "pfedbayes-mnist-small-accuracy"]
    with pytest.raises(FedbenchError, match="no curve of 'rmse' is stored"):
        plot_paper(lab.engine, Path("out"), "pfedbayes", "errors")


def test_an_unknown_figure_gets_a_proposal(lab, tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match=r"dsvgd has no figure 'fig22'(.|\n)*Did you mean fig2"):
        plot_paper(lab.engine, tmp_path, "dsvgd", "fig22")


def test_a_figure_is_written_as_png_and_svg(lab, story, tmp_path: Path) -> None:
    lab.play(BNN, level(story))

    said = plot_paper(lab.engine, tmp_path, "dsvgd", "fig5")

    assert [path.name for path in said.paths] == ["dsvgd-fig5.png", "dsvgd-fig5.svg"]
    assert all(path.stat().st_size > 1000 for path in said.paths)


def test_another_metric_and_axis_than_the_declared_ones_are_in_the_name_and_on_the_axes(
    lab, story, monkeypatch
) -> None:
    lab.play(BNN, lambda spec: story(gm={1: 0.5}, sent=(1, 1)))

    saved, _ = drawings(lab, monkeypatch, "dsvgd", "fig5", metric="nll", x="bytes")

    assert list(saved) == ["dsvgd-fig5-nll-bytes"]
    (panel,) = saved["dsvgd-fig5-nll-bytes"].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("sent down and up, all clients (MB)", "NLL")
    assert drawn(panel)[0][1] == [0.4]  # the fixture's NLL


def test_a_figure_with_a_line_that_its_paper_does_not_name_is_refused() -> None:
    content = load_paper("dsvgd").model_dump()
    content["figures"]["fig2"]["lines"] = ["KSD", "HOP"]

    with pytest.raises(ValidationError, match="figure fig2 has the line 'HOP', which is not under `lines`"):
        Paper.model_validate(content)


def test_a_panel_may_match_one_of_several_values(lab, story) -> None:
    lab.play(BNN, level(story))
    content = load_paper("dsvgd").model_dump()
    content["figures"]["fig5"]["panels"][0]["match"] = {"clients": [27, 54]}
    paper = Paper.model_validate(content)

    (panel,) = declared_picture(paper, "fig5", figures.finished(lab.engine)).panels

    assert [line.label for line in panel.lines] == ["HIP", "Parallel"]
