"""`fedbench.load`: tidy DataFrames with the numbers that the tables show."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedbench
from fedbench.errors import FedbenchError
from fedbench.store.export import export

GRID = {
    "name": "g",
    "methods": ["fedavg", {"fedprox": {"mu": 0.5}}],
    "tasks": [{"dataset": "digits"}],
    "set": {"rounds": 2},
    "axes": {"seed": [0, 1]},
}
WHO = ["run", "method", "label", "dataset", "size", "seed"]


def at(spec, gm):
    return 0.125 * spec.seed + (0.25 if spec.method == "fedprox" else 0.0) + gm


@pytest.fixture
def results(lab, story):
    """GM accuracy 0.25, then 0.5; an eighth more for seed 1, a quarter more for FedProx. The PM is best at round 1."""
    lab.play(
        GRID,
        lambda spec: story(
            gm={1: at(spec, 0.25), 2: at(spec, 0.5)},
            pm={1: 0.75, 2: 0.5},
            closing={("pm", "best", "mean"): {"ece": 0.25}, ("pm", "final", "mean"): {"ece": 0.125}},
            sent=(1_000_000, 500_000),
            seconds=3.0,
        ),
    )
    return fedbench.load(lab.engine.url.database)


def test_there_is_a_row_per_run_with_its_headline(results):
    found = results.runs[["method", "seed", "status", "headline", "gm_value", "pm_value", "mb", "seconds"]]

    # 1.5 MB in each of 2 rounds; the rule is `final`
    assert list(found.itertuples(index=False, name=None)) == [
        ("fedavg", 0, "done", "accuracy", 0.5, 0.5, 3.0, 3.0),
        ("fedavg", 1, "done", "accuracy", 0.625, 0.5, 3.0, 3.0),
        ("fedprox", 0, "done", "accuracy", 0.75, 0.5, 3.0, 3.0),
        ("fedprox", 1, "done", "accuracy", 0.875, 0.5, 3.0, 3.0),
    ]


def test_one_line_gives_the_mean_over_seeds(results):
    assert results.runs.groupby("method")["gm_value"].mean().to_dict() == {"fedavg": 0.5625, "fedprox": 0.8125}


def test_settings_are_columns_as_far_as_they_vary(results):
    assert list(results.runs.columns[:7]) == [*WHO, "mu"]
    assert "rounds" in results.runs
    assert "lr" not in results.runs
    assert results.runs["mu"].isna().tolist() == [True, True, False, False]


@pytest.mark.parametrize(("rule", "ece"), [("final", 0.125), ("best_all", 0.25)])
def test_calibration_is_of_the_state_that_the_headline_is_of(lab, story, rule, ece):
    closing = {("pm", "best", "mean"): {"ece": 0.25}, ("pm", "final", "mean"): {"ece": 0.125}}
    lab.play(GRID, lambda spec: story(pm={1: 0.75, 2: 0.5}, closing=closing), f"rule={rule}")

    found = fedbench.load(lab.engine.url.database).runs

    assert found["pm_ece"].tolist() == [ece] * 4
    assert found["gm_ece"].isna().all()


def test_a_diverged_run_has_a_cost_and_no_value(lab, story):
    lab.play(GRID, lambda spec: story(gm={1: 0.5}, outcome="diverged", sent=(1_000_000, 0)))

    found = fedbench.load(lab.engine.url.database).runs

    assert found["status"].tolist() == ["diverged"] * 4
    assert found["gm_value"].isna().all()
    assert found["mb"].tolist() == [1.0] * 4


def test_curves_are_long_and_say_whose_they_are(results):
    found = results.curves.query("metric == 'accuracy' and view == 'gm' and predict == 'mean'")

    assert list(results.curves) == [*WHO, "round", "view", "split", "predict", "metric", "value"]
    assert found.pivot_table(index="round", columns=["method", "seed"], values="value").to_dict("list") == {
        ("fedavg", 0): [0.25, 0.5],
        ("fedavg", 1): [0.375, 0.625],
        ("fedprox", 0): [0.5, 0.75],
        ("fedprox", 1): [0.625, 0.875],
    }


def test_scores_are_those_of_the_closing_states(results):
    found = results.scores.query("metric == 'ece' and view == 'pm' and method == 'fedavg' and seed == 0")

    assert found[["stage", "round", "value"]].values.tolist() == [["best", 1, 0.25], ["final", 2, 0.125]]


def test_costs_are_per_round_and_phase(results):
    found = results.costs.query("method == 'fedavg' and seed == 0")

    assert list(found) == [*WHO, "round", "phase", "seconds", "count", "bytes_down", "bytes_up"]
    assert found[["round", "phase", "bytes_down", "bytes_up"]].values.tolist() == [
        [1, "client", 1_000_000, 500_000],
        [2, "client", 1_000_000, 500_000],
    ]


@pytest.mark.parametrize("format_", ["parquet", "csv"])
def test_an_export_loads_like_its_database(results, lab, tmp_path, format_):
    export(lab.engine, tmp_path / "out", format_)

    copy = fedbench.load(tmp_path / "out")

    for name in ("runs", "curves", "scores", "clients", "histograms", "costs"):
        assert getattr(copy, name).equals(getattr(results, name)), name
    assert len(copy.curves) > 0


def test_a_url_loads_like_a_path(results, lab):
    assert fedbench.load(f"sqlite:///{lab.engine.url.database}").runs.equals(results.runs)


def test_without_a_word_it_is_the_database_of_the_commands(results, lab, monkeypatch):
    monkeypatch.setenv("FEDBENCH_DB", lab.engine.url.database)

    assert fedbench.load().runs.equals(results.runs)


def test_an_empty_database_has_empty_frames_with_their_columns(lab):
    found = fedbench.load(lab.engine.url.database)

    assert [len(frame) for frame in (found.runs, found.curves, found.clients, found.histograms, found.costs)] == [0] * 5
    assert list(found.curves) == [*WHO, "round", "view", "split", "predict", "metric", "value"]


def test_a_missing_database_is_a_clear_error(tmp_path):
    with pytest.raises(FedbenchError, match="there is no database"):
        fedbench.load(tmp_path / "missing.sqlite")


def test_loading_imports_no_torch_and_fedbench_itself_no_pandas(results, lab):
    script = (
        "import sys, fedbench; print('pandas' in sys.modules);"
        "fedbench.load(sys.argv[1]).runs; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, lab.engine.url.database], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["False", "False"]
