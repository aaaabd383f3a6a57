"""The tables as data: what stands in which cell, and what the notes say."""

from __future__ import annotations

import pytest

from fedbench.errors import FedbenchError
from fedbench.report.cells import Cell, Printed, Summary, Table
from fedbench.report.comparison import tolerance
from fedbench.report.table import paper_table, results_table

GRID = {
    "name": "g",
    "methods": ["fedavg", "local"],
    "tasks": [{"dataset": "digits"}],
    "set": {"rounds": 2, "eval_every": 1},
    "axes": {"seed": [0, 1, 2]},
}
QUADRATICS = {
    "name": "q",
    "methods": ["fedavg"],
    "tasks": [{"dataset": "quadratics", "clients": 2, "partition": "natural", "model": "linear"}],
    "set": {"rounds": 2, "eval_every": 1, "normalize": "none", "headline": "rmse"},
    "axes": {"seed": [0, 1]},
}
MNIST = {
    "name": "pfedbayes_mnist",
    "paper": "pfedbayes",
    "methods": ["fedavg"],
    "tasks": [{"dataset": "mnist"}],
    "axes": {"size": ["small"], "seed": [0, 1, 2]},
}


def cell(table: Table, row: str, *column: str) -> Cell:
    """The cell of the row whose last header is `row`."""
    at = next(i for i, candidate in enumerate(table.columns) if candidate.header == column)
    return next(candidate for candidate in table.rows if candidate.header[-1] == row).cells[at]


def headers(table: Table) -> list[tuple[str, ...]]:
    return [row.header for row in table.rows]


def notes(table: Table) -> str:
    return "\n".join(table.notes)


def of_method(fedavg, local):
    return lambda spec: {"fedavg": fedavg, "local": local}[spec.method](spec)


class TestResults:
    def test_a_row_is_mean_and_sample_deviation_over_seeds_in_percent(self, lab, story) -> None:
        # 0.90, 0.92, 0.94: mean 92 %, squared deviations 4 + 0 + 4, / (3 - 1) = 4, root 2
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={1: 0.5, 2: 0.90 + 0.02 * spec.seed}))

        table = results_table(lab.engine, "g")

        measured = cell(table, "fedavg", "GM acc").measured
        assert measured is not None
        assert measured.mean == pytest.approx(92.0)
        assert measured.std == pytest.approx(2.0)
        assert measured.n == 3
        assert cell(table, "fedavg", "seeds").measured == Summary(3.0, None, 3)

    def test_one_seed_has_no_deviation(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={2: 0.75}), "seed=0")

        assert cell(results_table(lab.engine), "fedavg", "GM acc").measured == Summary(75.0, None, 1)

    def test_a_view_that_a_method_does_not_have_is_a_dash(self, lab, story) -> None:
        lab.play(GRID, of_method(lambda spec: story(gm={2: 0.5}), lambda spec: story(pm={2: 0.5})), "seed=0")

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "PM acc").text == "-"
        assert cell(table, "local", "GM acc").text == "-"

    def test_calibration_is_the_pms_or_else_the_gms_percent_for_ece_only(self, lab, story) -> None:
        closing = {
            ("pm", "final", "mean"): {"ece": 0.02, "brier": 0.2, "nll": 0.3},
            ("gm", "final", "mean"): {"ece": 0.04, "brier": 0.4, "nll": 0.5},
        }
        lab.play(
            GRID,
            of_method(
                lambda spec: story(gm={2: 0.5}, closing=closing),
                lambda spec: story(pm={2: 0.5}, gm={2: 0.5}, closing=closing),
            ),
            "seed=0",
        )

        table = results_table(lab.engine)

        found = {
            (method, name): cell(table, method, name).measured
            for method in ("local", "fedavg")
            for name in ("ECE", "Brier", "NLL")
        }
        assert {key: value.mean for key, value in found.items() if value} == {
            ("local", "ECE"): 2.0,
            ("local", "Brier"): 0.2,
            ("local", "NLL"): 0.3,
            ("fedavg", "ECE"): 4.0,
            ("fedavg", "Brier"): 0.4,
            ("fedavg", "NLL"): 0.5,
        }

    def test_calibration_is_of_the_state_that_the_rule_chooses(self, lab, story) -> None:
        closing = {("gm", "best", "mean"): {"ece": 0.01}, ("gm", "final", "mean"): {"ece": 0.09}}
        tell = lambda spec: story(gm={1: 0.9, 2: 0.5}, closing=closing)  # noqa: E731
        lab.play(GRID | {"name": "last", "methods": ["fedavg"]}, tell, "seed=0", "rule=final")
        lab.play(GRID | {"name": "best", "methods": ["fedavg"]}, tell, "seed=0", "rule=best_all")

        assert cell(results_table(lab.engine, "last"), "fedavg", "ECE").measured == Summary(9.0, None, 1)
        assert cell(results_table(lab.engine, "best"), "fedavg", "ECE").measured == Summary(1.0, None, 1)

    def test_under_another_rule_than_final_the_final_value_stands_beside_the_headline(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={1: 0.75, 2: 0.5}), "rule=best_all", "seed=0")

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "GM acc").measured == Summary(75.0, None, 1)
        assert cell(table, "fedavg", "GM final").measured == Summary(50.0, None, 1)
        assert "of the best round (chosen by test accuracy: optimistic)" in notes(table)

    def test_under_the_rule_final_there_is_no_second_column(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(pm={2: 0.5}))

        assert ("PM final",) not in [column.header for column in results_table(lab.engine).columns]

    def test_megabytes_and_seconds_are_means_over_seeds(self, lab, story) -> None:
        # seconds 10, 11, 12; 2 rounds of 3 MB
        lab.play(
            GRID | {"methods": ["fedavg"]},
            lambda spec: story(gm={2: 0.5}, sent=(2_000_000, 1_000_000), seconds=10.0 + spec.seed),
        )

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "seconds").measured == Summary(11.0, 1.0, 3)
        assert cell(table, "fedavg", "MB sent").measured == Summary(6.0, 0.0, 3)

    def test_what_varies_becomes_a_row_header_and_what_does_not_a_fact(self, lab, story) -> None:
        lab.play(
            GRID | {"methods": ["fedavg", {"fedprox": {"mu": 0.1}}, {"fedprox": {"mu": 1.0}}]},
            lambda spec: story(gm={spec.protocol.rounds: 0.5}),
            "seed=0",
        )
        lab.play(GRID | {"name": "h", "tasks": [{"dataset": "mnist"}]}, lambda spec: story(gm={3: 0.5}), "rounds=3")

        table = results_table(lab.engine)

        assert table.row_names == ("dataset", "rounds", "method")
        assert headers(table) == [
            ("digits", "2", "fedavg"),
            ("digits", "2", "fedprox[mu=0.1]"),
            ("digits", "2", "fedprox[mu=1]"),
            ("mnist", "3", "fedavg"),
            ("mnist", "3", "local"),
        ]
        assert dict(table.facts)["size"] == "small"

    def test_a_sweep_shows_its_own_jobs_only(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={2: 0.5}))
        lab.play(GRID | {"name": "h", "methods": ["fedavg"]}, lambda spec: story(gm={2: 0.5}))

        assert headers(results_table(lab.engine, "h")) == [("fedavg",)]
        assert headers(results_table(lab.engine)) == [("fedavg",), ("local",)]

    def test_a_method_that_always_diverges_says_so_and_shows_its_cost(self, lab, story) -> None:
        lab.play(
            GRID | {"methods": ["fedavg"]},
            lambda spec: story(gm={1: 0.5}, outcome="diverged", sent=(1_000_000, 0), seconds=3.0),
        )

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "GM acc").text == "diverged"
        assert cell(table, "fedavg", "PM acc").text == "-"
        assert cell(table, "fedavg", "MB sent").measured == Summary(1.0, 0.0, 3)
        assert cell(table, "fedavg", "MB sent").marks == ("diverged",)

    def test_a_mean_over_the_seeds_that_did_not_diverge_is_marked(self, lab, story) -> None:
        # seed 1 diverges: mean of 0.9 and 0.94, deviation sqrt(2 * 0.02^2) = 0.0283
        lab.play(
            GRID | {"methods": ["fedavg"]},
            lambda spec: story(gm={2: 0.90 + 0.02 * spec.seed}, outcome="diverged" if spec.seed == 1 else "done"),
        )

        found = cell(results_table(lab.engine), "fedavg", "GM acc")

        assert found.measured is not None
        assert (found.measured.mean, found.measured.n) == (pytest.approx(92.0), 2)
        assert found.measured.std == pytest.approx(2.8284, abs=1e-4)
        assert (found.marks, found.diverged) == (("diverged",), 1)
        assert cell(results_table(lab.engine), "fedavg", "seeds").measured == Summary(3.0, None, 3)
        assert "‡ some seeds diverged" in notes(results_table(lab.engine))

    def test_a_cost_is_of_the_seeds_that_finished_if_any_did(self, lab, story) -> None:
        # seeds 0 and 2 take 10 and 12 seconds; seed 1 stopped after 1
        lab.play(
            GRID | {"methods": ["fedavg"]},
            lambda spec: (
                story(gm={1: 0.5}, outcome="diverged", seconds=1.0)
                if spec.seed == 1
                else story(gm={2: 0.5}, seconds=10.0 + spec.seed)
            ),
        )

        found = cell(results_table(lab.engine), "fedavg", "seconds")

        assert found.measured is not None
        assert (found.measured.mean, found.measured.n, found.marks) == (11.0, 2, ())

    def test_runs_that_diverged_before_anything_was_scored_are_shown_under_both_views(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(rounds=1, outcome="diverged"))

        assert cell(results_table(lab.engine), "fedavg", "PM acc").text == "diverged"
        assert cell(results_table(lab.engine), "fedavg", "GM acc").text == "diverged"

    def test_only_the_newest_version_of_a_method_counts(self, lab, story, monkeypatch) -> None:
        from fedbench.algorithms.fedavg import FedAvg

        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={2: 0.5}))
        monkeypatch.setattr(FedAvg, "version", 2)
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={2: 0.75}), "seed=0")

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "GM acc").measured == Summary(75.0, None, 1)
        assert "Left out: 3 run(s) of earlier versions." in table.notes

    def test_jobs_without_a_result_are_named_in_the_notes(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={2: 0.5}))
        lab.enqueue(GRID)

        assert "Not finished: 3 pending job(s); see fedbench queue list." in results_table(lab.engine, "g").notes

    def test_without_a_finished_run_there_is_no_table_but_the_way_to_one(self, lab) -> None:
        lab.enqueue(GRID)

        with pytest.raises(FedbenchError, match=r"no finished run yet(.|\n)*fedbench run --grid g"):
            results_table(lab.engine, "g")


class TestRegression:
    def test_the_error_stands_where_accuracy_and_calibration_would(self, lab, story) -> None:
        lab.play(QUADRATICS, lambda spec: story(gm={1: 0.3, 2: 0.2 + 0.1 * spec.seed}, rmse=True))

        table = results_table(lab.engine, "q")

        assert [column.header[0] for column in table.columns] == ["seeds", "PM RMSE", "GM RMSE", "MB sent", "seconds"]
        measured = cell(table, "fedavg", "GM RMSE").measured
        assert measured is not None
        # 0.2 and 0.3: mean 0.25, deviation sqrt(2 * 0.05^2) = 0.070711; not in percent
        assert (measured.mean, measured.std) == (pytest.approx(0.25), pytest.approx(0.070711, abs=1e-6))
        assert cell(table, "fedavg", "PM RMSE").text == "-"
        assert "RMSE: root mean squared error of the final round, pooled over the clients' test samples." in table.notes
        assert "acc" not in notes(table)
        assert "ECE" not in notes(table)

    def test_the_best_round_has_the_smallest_error(self, lab, story) -> None:
        lab.play(QUADRATICS, lambda spec: story(gm={1: 0.1, 2: 0.4}, rmse=True), "seed=0", "rule=best_all")

        table = results_table(lab.engine)

        assert cell(table, "fedavg", "GM RMSE").measured == Summary(0.1, None, 1)
        assert cell(table, "fedavg", "GM final RMSE").measured == Summary(0.4, None, 1)
        assert "of the best round (chosen by test error: optimistic)" in notes(table)

    def test_beside_classes_each_has_its_own_columns(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["local"]}, lambda spec: story(pm={2: 0.5}), "seed=0")
        lab.play(QUADRATICS, lambda spec: story(gm={2: 0.2}, rmse=True), "seed=0")

        table = results_table(lab.engine)

        assert cell(table, "local", "PM acc").measured == Summary(50.0, None, 1)
        assert cell(table, "local", "PM RMSE").text == cell(table, "local", "GM RMSE").text == "-"
        assert cell(table, "fedavg", "GM RMSE").measured == Summary(0.2, None, 1)
        assert {cell(table, "fedavg", name).text for name in ("PM acc", "GM acc", "ECE", "Brier", "NLL")} == {"-"}


class TestPaper:
    """pFedBayes, Table 1: FedAvg on MNIST small prints GM 87.38 ± 0.27; MNIST medium 90.60 ± 0.19."""

    def test_rows_are_the_papers_methods_in_its_order(self, lab) -> None:
        table = paper_table(lab.engine, "pfedbayes", "T1")

        assert [row.header[0] for row in table.rows] == [
            *("Per-FedAvg", "pFedMe", "HeurFedAMP", "pFedGP", "pFedBayes"),
            *("FedAvg", "FedProx", "BNFed", "FedPA"),
        ]

    def test_columns_are_data_set_size_and_view(self, lab) -> None:
        table = paper_table(lab.engine, "pfedbayes", "T1")

        assert table.column_names == ("dataset", "size", "view")
        assert len(table.columns) == 3 * 3 * 2
        assert table.columns[0].header == ("MNIST", "small", "PM")
        assert table.columns[-1].header == ("CIFAR-10", "large", "GM")

    def test_a_measured_cell_stands_beside_the_published_one(self, lab, story) -> None:
        # 0.87, 0.88, 0.89: mean 88, deviation 1; 88 - 87.38 = 0.62, within 2 sqrt(1 + 0.27^2) = 2.07
        lab.play(MNIST, lambda spec: story(gm={750: 0.87 + 0.01 * spec.seed, 800: 0.8}))

        found = cell(paper_table(lab.engine, "pfedbayes", "T1"), "FedAvg", "MNIST", "small", "GM")

        assert found.published == Printed(87.38, 0.27)
        assert found.measured is not None
        assert found.measured.mean == pytest.approx(88.0)
        assert found.measured.std == pytest.approx(1.0)
        assert found.final is not None
        assert found.final.mean == pytest.approx(80.0)
        assert found.difference == pytest.approx(0.62)
        assert found.agrees is True
        assert (found.marks, found.fill, found.rounds) == ((), "", 800)

    def test_a_number_that_is_too_far_away_does_not_agree_and_is_counted(self, lab, story) -> None:
        # 0.80 three times: 80 - 87.38 = -7.38, further than max(2 sqrt(0 + 0.27^2), 1) = 1
        lab.play(MNIST, lambda spec: story(gm={800: 0.8}))

        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "FedAvg", "MNIST", "small", "GM")
        assert found.difference == pytest.approx(-7.38)
        assert found.agrees is False
        assert "0 of 1 compared numbers agree" in notes(table)

    def test_the_tolerance_is_two_joint_deviations_and_at_least_a_point(self) -> None:
        assert tolerance(Summary(90.0, 3.0, 3), Printed(90.0, 4.0)) == 10.0  # 2 sqrt(9 + 16)
        assert tolerance(Summary(90.0, 0.3, 3), Printed(90.0, 0.2)) == 1.0  # 2 sqrt(0.13) = 0.72
        assert tolerance(Summary(90.0, None, 1), Printed(90.0, 4.0)) == 2.0
        assert tolerance(Summary(90.0, 3.0, 3), Printed(90.0)) == 2.0

    def test_a_run_with_fewer_rounds_is_partial_and_not_compared(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={200: 0.87}), "rounds=200")

        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "FedAvg", "MNIST", "small", "GM")
        assert found.measured == Summary(87.0, 0.0, 3)
        assert (found.marks, found.difference, found.agrees) == (("partial",), None, None)
        assert found.fill == "fedbench run --grid pfedbayes_mnist"
        assert "† 200 of 800 rounds, not compared." in table.notes
        assert "No number can be compared yet." in table.notes

    def test_full_runs_push_partial_ones_out(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={200: 0.5}), "rounds=200")
        lab.play(MNIST, lambda spec: story(gm={800: 0.87}), "seed=0")

        found = cell(paper_table(lab.engine, "pfedbayes", "T1"), "FedAvg", "MNIST", "small", "GM")

        assert found.measured == Summary(87.0, None, 1)
        assert found.marks == ()

    def test_a_longer_run_than_the_papers_is_not_compared_either(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={900: 0.87}), "rounds=900")

        table = paper_table(lab.engine, "pfedbayes", "T1")

        assert cell(table, "FedAvg", "MNIST", "small", "GM").marks == ("longer",)
        assert "† 900 of 800 rounds, not compared." in table.notes

    def test_the_notes_tell_cells_of_different_length_apart(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={200: 0.87}), "rounds=200")
        lab.play(MNIST, lambda spec: story(gm={9: 0.87}), "rounds=9", "size=medium")

        found = paper_table(lab.engine, "pfedbayes", "T1").notes

        assert "† 200 of 800 rounds, not compared: FedAvg MNIST small." in found
        assert "† 9 of 800 rounds, not compared: FedAvg MNIST medium." in found

    def test_a_missing_cell_names_the_grid_that_fills_it(self, lab) -> None:
        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "FedAvg", "FMNIST", "large", "GM")
        assert (found.text, found.fill) == ("missing", "fedbench run --grid pfedbayes_fmnist")
        assert found.published == Printed(85.42, 0.14)
        assert "To fill FMNIST: fedbench run --grid pfedbayes_fmnist" in table.notes

    def test_a_method_that_the_grid_does_not_run_is_asked_for_by_name(self, lab, tmp_path, monkeypatch) -> None:
        (tmp_path / "bnfed.py").write_text("")
        monkeypatch.setenv("FEDBENCH_PLUGINS", str(tmp_path))

        found = cell(paper_table(lab.engine, "pfedbayes", "T1"), "BNFed", "MNIST", "small", "GM")

        assert found.fill == "fedbench run --grid pfedbayes_mnist --methods bnfed"

    def test_a_method_without_a_file_is_not_implemented(self, lab, monkeypatch) -> None:
        monkeypatch.setattr("fedbench.report.comparison.is_implemented", lambda method: method != "bnfed")

        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "BNFed", "MNIST", "small", "GM")
        assert (found.text, found.fill) == ("not implemented", "")
        assert found.published == Printed(78.70, 0.69)

    def test_where_the_paper_has_no_number_and_nothing_was_measured_is_a_dash(self, lab) -> None:
        found = cell(paper_table(lab.engine, "pfedbayes", "T1"), "FedAvg", "MNIST", "small", "PM")

        assert found == Cell(text="-")

    def test_an_uncertain_number_is_shown_and_never_compared(self, lab, story, monkeypatch) -> None:
        # pFedMe on MNIST medium prints GM 90.60 ± 0.19, which is marked uncertain; FedAvg stands in for it here
        from fedbench.paper import load_published

        uncertain = [
            entry.model_copy(update={"uncertain": True, "note": "blurred"}) for entry in load_published("pfedbayes")
        ]
        monkeypatch.setattr("fedbench.report.comparison.load_published", lambda name: tuple(uncertain))
        lab.play(MNIST, lambda spec: story(gm={800: 0.87}))

        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "FedAvg", "MNIST", "small", "GM")
        assert found.published == Printed(87.38, 0.27, uncertain=True, note="blurred")
        assert found.measured is not None
        assert (found.difference, found.agrees) == (None, None)
        assert "? cannot be read with certainty in the paper: shown, never compared." in table.notes
        assert "No number can be compared yet." in table.notes

    def test_a_number_that_is_not_legible_is_kept_as_such(self, lab) -> None:
        found = cell(paper_table(lab.engine, "pfedbayes", "T1"), "pFedBayes", "FMNIST", "medium", "PM").published

        assert found is not None
        assert found.mean is None

    def test_our_method_that_the_paper_does_not_print_comes_last_and_is_marked(self, lab, story) -> None:
        lab.play(MNIST | {"methods": ["local"]}, lambda spec: story(pm={800: 0.9}))

        table = paper_table(lab.engine, "pfedbayes", "T1")

        assert table.rows[-1].header == ("local",)
        assert not table.rows[-1].in_paper
        assert cell(table, "local", "MNIST", "small", "PM").measured == Summary(90.0, 0.0, 3)
        assert cell(table, "local", "MNIST", "small", "GM").text == "-"
        assert cell(table, "local", "MNIST", "large", "PM").text == ""
        assert "§ not in the paper: local." in table.notes

    def test_a_view_that_the_paper_prints_and_our_runs_do_not_have_is_named(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(pm={800: 0.9}))

        assert cell(paper_table(lab.engine, "pfedbayes", "T1"), "FedAvg", "MNIST", "small", "GM").text == "no GM"

    def test_a_mean_without_the_seeds_that_diverged_is_not_compared(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={800: 0.87}, outcome="diverged" if spec.seed else "done"))

        table = paper_table(lab.engine, "pfedbayes", "T1")

        found = cell(table, "FedAvg", "MNIST", "small", "GM")
        assert found.measured == Summary(87.0, None, 1)
        assert (found.marks, found.diverged, found.difference) == (("diverged",), 2, None)
        assert "‡ mean over the seeds that did not diverge, not compared." in table.notes

    def test_a_run_with_other_settings_is_left_out_and_the_notes_say_which(self, lab, story) -> None:
        lab.play(MNIST, lambda spec: story(gm={800: 0.99}), "lr=0.5", "seed=0")

        table = paper_table(lab.engine, "pfedbayes", "T1")

        assert cell(table, "FedAvg", "MNIST", "small", "GM").text == "missing"
        assert "Left out, because settings differ from the paper's: 1 run(s) of fedavg (lr)." in table.notes

    def test_runs_of_other_tasks_are_not_mentioned(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={2: 0.5}))

        assert "Left out" not in notes(paper_table(lab.engine, "pfedbayes", "T1"))

    def test_an_unknown_table_is_refused_with_those_there_are(self, lab) -> None:
        with pytest.raises(FedbenchError, match=r"paper pfedbayes has no table 'T9'(.|\n)*T1"):
            paper_table(lab.engine, "pfedbayes", "T9")
