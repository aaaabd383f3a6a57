"""Two methods, or two databases, against each other: which runs make a pair, and what is said of them."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fedbench.cli import app
from fedbench.errors import FedbenchError
from fedbench.report.compare import METRICS, compare_databases, compare_methods
from fedbench.report.compare_view import comparison_table, notes, render_comparison

GRID = {
    "name": "g",
    "methods": ["fedavg", "fedprox"],
    "tasks": [{"dataset": "digits"}],
    "set": {"rounds": 4, "eval_every": 1},
    "axes": {"seed": [0, 1, 2]},
}
SIZES = GRID | {"axes": {"seed": [0, 1, 2], "size": ["small", "medium"]}}


def ends(spec: Any) -> float:
    """FedAvg ends at 0.90 for all seeds, FedProx at 0.91, 0.92, 0.93: differences of 1, 2, 3 percent."""
    return 0.90 if spec.method == "fedavg" else 0.91 + 0.01 * spec.seed


@pytest.fixture
def played(lab, story):
    """A database of both methods whose only score is at the end."""
    lab.play(GRID, lambda spec: story(gm={4: ends(spec)}))
    return lab


def said(found: Any) -> str:
    return "\n".join(notes(found))


class TestPairs:
    def test_a_pair_is_two_runs_of_the_same_seed(self, played) -> None:
        found = compare_methods(played.engine, "fedprox", "fedavg")

        (row,) = found.rows
        # as in test_stats: differences 1, 2, 3, so p = 1 - sqrt(12/14)
        assert row.seeds == (0, 1, 2)
        assert (row.a.mean, row.b.mean) == (pytest.approx(92), pytest.approx(90))
        assert row.test.difference == pytest.approx(2)
        assert row.test.p == pytest.approx(1 - (12 / 14) ** 0.5)
        assert row.verdict == "no difference shown"

    def test_the_order_of_the_seeds_in_the_queue_does_not_matter(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={4: 0.5 + 0.1 * spec.seed}))
        backwards = GRID | {"methods": ["fedprox"], "axes": {"seed": [2, 1, 0]}}
        lab.play(backwards, lambda spec: story(gm={4: 0.5 + 0.1 * spec.seed}))

        (row,) = compare_methods(lab.engine, "fedprox", "fedavg").rows

        assert row.verdict == "identical"

    def test_seeds_of_one_side_only_are_left_out_and_counted(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={4: ends(spec)}))
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={4: 0.1}), "seed=7")

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert found.rows[0].b.mean == pytest.approx(90)
        assert "1 run(s) whose seed the other side does not have are left out." in said(found)

    def test_a_diverged_run_is_left_out_and_it_is_said_whom_that_flatters(self, lab, story) -> None:
        outcome = lambda spec: "diverged" if (spec.method, spec.seed) == ("fedprox", 1) else "done"  # noqa: E731
        lab.play(GRID, lambda spec: story(gm={4: ends(spec)}, outcome=outcome(spec)))

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert found.rows[0].seeds == (0, 2)
        assert found.rows[0].verdict == "cannot tell"
        assert "1 run(s) of A diverged: they are left out, which flatters A." in said(found)

    def test_of_a_newer_version_of_a_method_the_older_runs_do_not_count(self, played, story, monkeypatch) -> None:
        from fedbench.algorithms.fedprox import FedProx

        monkeypatch.setattr(FedProx, "version", FedProx.version + 1)
        played.play(GRID | {"methods": ["fedprox"]}, lambda spec: story(gm={4: 0.5}))

        assert compare_methods(played.engine, "fedprox", "fedavg").rows[0].a.mean == pytest.approx(50)


class TestSettings:
    def test_every_task_is_a_row_and_p_is_corrected_for_all_of_them(self, lab, story) -> None:
        lab.play(SIZES, lambda spec: story(gm={4: ends(spec)}))

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert found.where == ("size",)
        assert [row.place for row in found.rows] == [("small",), ("medium",)]
        for row in found.rows:
            assert row.p_holm == pytest.approx(2 * (1 - (12 / 14) ** 0.5))

    def test_a_protocol_that_varies_within_the_methods_is_a_row_too(self, lab, story) -> None:
        lab.play(
            GRID | {"axes": {"seed": [0, 1, 2], "tau": [1, 5]}}, lambda spec: story(gm={4: 0.1 * spec.protocol.tau})
        )

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert found.where == ("tau",)
        assert [(row.place, row.a.mean) for row in found.rows] == [(("1",), pytest.approx(10)), (("5",), 50)]

    def test_a_setting_that_is_named_is_what_is_compared(self, lab, story) -> None:
        lab.play(GRID | {"axes": {"seed": [0, 1, 2], "tau": [1, 5]}}, lambda spec: story(gm={4: 0.5}))

        found = compare_methods(lab.engine, "fedavg[tau=1]", "fedavg[tau=5]")

        assert (found.where, len(found.rows)) == (("dataset",), 1)

    def test_settings_of_one_side_only_are_counted(self, lab, story) -> None:
        lab.play(SIZES | {"methods": ["fedavg"]}, lambda spec: story(gm={4: ends(spec)}))
        lab.play(GRID | {"methods": ["fedprox"]}, lambda spec: story(gm={4: ends(spec)}))

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert [row.place for row in found.rows] == [("small",)]
        assert "1 setting(s) that only B has are left out." in said(found)

    def test_settings_that_differ_without_being_named_are_told(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg", {"fedprox": {"lr": 0.5}}]}, lambda spec: story(gm={4: ends(spec)}))

        assert "A and B also differ in lr (0.5 against" in said(compare_methods(lab.engine, "fedprox", "fedavg"))

    def test_wins_ties_and_losses_are_counted_by_verdict(self, lab, story) -> None:
        # small: 10, 10.1, 10.2 points apart; medium: nothing; large: the other way round
        apart = {"small": 0.10, "medium": 0.0, "large": -0.10}
        lab.play(
            GRID | {"axes": {"seed": [0, 1, 2], "size": list(apart)}},
            lambda spec: story(
                gm={4: 0.5 + (spec.method == "fedprox") * apart[spec.partition_params["size"]] * (1 + 0.01 * spec.seed)}
            ),
        )

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert [row.verdict for row in found.rows] == ["A better", "identical", "B better"]
        assert "A wins 1, ties 1, loses 1, cannot tell 0; its mean is the better one in 1 of 3 setting(s)." in said(
            found
        )


class TestMetrics:
    def test_curves_are_read_with_their_bytes(self, lab, story) -> None:
        # FedProx sends twice as much a round, so it ends its 4 rounds at 8 MB, FedAvg at 4
        told = {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.8}
        lab.play(
            GRID,
            lambda spec: story(gm=told, sent=(1_000_000 if spec.method == "fedavg" else 2_000_000, 0)),
        )

        means = {
            metric: (row.a.mean, row.b.mean)
            for metric in ("auc", "auc_bytes", "first", "last", "wobble")
            for row in compare_methods(lab.engine, "fedprox", "fedavg", metric).rows
        }

        assert means["auc"] == (pytest.approx(37.5), pytest.approx(37.5))  # (10 + 20 + 40 + 80) / 4
        # from 2 to 4 MB FedProx has 10; FedAvg 20 and then 40
        assert means["auc_bytes"] == (pytest.approx(10), pytest.approx(30))
        assert means["first"] == (pytest.approx(15), pytest.approx(15))  # the first 2 of 4
        assert means["last"] == (pytest.approx(60), pytest.approx(60))
        assert means["wobble"] == (pytest.approx(800**0.5), pytest.approx(800**0.5))  # 40 and 80: (400 + 400) / 1

    def test_smaller_bytes_are_better(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={4: 0.5}, sent=(1_000_000 * (1 + (spec.method == "fedavg")), 0)))

        (row,) = compare_methods(lab.engine, "fedprox", "fedavg", "mb").rows

        assert (row.a.mean, row.b.mean, row.verdict) == (4, 8, "A better")

    @pytest.mark.parametrize(("rule", "ece"), [("final", 9), ("best_all", 1)])
    def test_calibration_is_of_the_state_that_the_headline_is_of(self, lab, story, rule, ece) -> None:
        closing = {("gm", "best", "mean"): {"ece": 0.01}, ("gm", "final", "mean"): {"ece": 0.09}}
        lab.play(GRID, lambda spec: story(gm={1: 0.9, 4: 0.5}, closing=closing), f"rule={rule}")

        (row,) = compare_methods(lab.engine, "fedprox", "fedavg", "ece").rows

        assert (row.a.mean, row.smaller_wins) == (pytest.approx(ece), True)

    def test_headline_is_by_the_rule_and_final_of_the_last_round(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={1: 0.9, 4: 0.5}), "rule=best_all")

        assert compare_methods(lab.engine, "fedprox", "fedavg", "accuracy").rows[0].a.mean == pytest.approx(90)
        assert compare_methods(lab.engine, "fedprox", "fedavg", "final").rows[0].a.mean == pytest.approx(50)

    def test_a_metric_that_is_not_the_headline_is_not_passed_off_as_it(self, played) -> None:
        with pytest.raises(FedbenchError, match="no two runs with the same seed have a rmse"):
            compare_methods(played.engine, "fedprox", "fedavg", "rmse")

    def test_smaller_errors_are_better(self, lab, story) -> None:
        grid = {
            "name": "q",
            "methods": ["fedavg", "fedprox"],
            "tasks": [{"dataset": "quadratics", "clients": 2, "partition": "natural", "model": "linear"}],
            "set": {"rounds": 2, "eval_every": 1, "normalize": "none", "headline": "rmse"},
            "axes": {"seed": [0, 1, 2]},
        }
        error = lambda spec: 1.0 + (spec.method == "fedavg") * (1 + 0.01 * spec.seed)  # noqa: E731
        lab.play(grid, lambda spec: story(gm={1: error(spec), 2: error(spec)}, rmse=True))

        for metric in ("headline", "rmse", "auc"):
            (row,) = compare_methods(lab.engine, "fedprox", "fedavg", metric).rows
            assert (row.a.mean, row.verdict) == (1, "A better")

    def test_the_pm_is_compared_where_a_method_has_one_unless_the_gm_is_asked_for(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={4: 0.5}) if spec.method == "fedavg" else story(pm={4: 0.8}, gm={4: 0.6}))

        found = compare_methods(lab.engine, "fedprox", "fedavg")

        assert found.rows[0].a.mean == pytest.approx(80)
        assert "A: of the personal model (PM); B: of the global model (GM)" in said(found)
        assert compare_methods(lab.engine, "fedprox", "fedavg", view="gm").rows[0].a.mean == pytest.approx(60)


class TestMistakes:
    @pytest.mark.parametrize(
        ("a", "b", "message"),
        [
            ("fedproxx", "fedavg", "no finished run of 'fedproxx'.\nDid you mean fedprox"),
            ("fedprox[muu=1]", "fedavg", "fedprox has no setting 'muu'.\nDid you mean mu"),
            ("fedprox[tau=77]", "fedavg", "has tau=77.\nThere are: "),
            ("fedavg", "fedavg", "find the same runs"),
        ],
    )
    def test_a_selector_that_finds_nothing_says_what_there_is(self, played, a: str, b: str, message: str) -> None:
        with pytest.raises(FedbenchError) as error:
            compare_methods(played.engine, a, b)

        assert message in str(error.value)

    def test_runs_with_different_hyperparameters_do_not_become_one_mean(self, lab, story) -> None:
        grid = GRID | {"methods": ["fedavg", {"fedprox": {"mu": 0.01}}, {"fedprox": {"mu": 0.1}}]}
        lab.play(grid, lambda spec: story(gm={4: 0.5}))

        with pytest.raises(FedbenchError, match=r"mu 0\.01 and 0\.1 in the same setting") as error:
            compare_methods(lab.engine, "fedprox", "fedavg")
        assert error.value.hint == "Name one: fedprox[mu=0.01]."
        assert len(compare_methods(lab.engine, "fedprox[mu=0.1]", "fedavg").rows) == 1

    def test_different_numbers_of_rounds_are_compared_only_by_name(self, lab, story) -> None:
        lab.play(GRID | {"methods": ["fedavg"]}, lambda spec: story(gm={4: 0.5}))
        lab.play(GRID | {"methods": ["fedprox"]}, lambda spec: story(gm={2: 0.5}), "rounds=2")

        with pytest.raises(FedbenchError, match="no setting in common: rounds 2 against 4"):
            compare_methods(lab.engine, "fedprox", "fedavg")
        assert compare_methods(lab.engine, "fedprox[rounds=2]", "fedavg").rows[0].verdict == "identical"

    def test_an_unknown_metric_names_the_near_ones(self, played) -> None:
        with pytest.raises(FedbenchError, match="Did you mean wobble"):
            compare_methods(played.engine, "fedprox", "fedavg", "woble")


class TestDatabases:
    @pytest.fixture
    def other(self, played, story, tmp_path):
        """The same jobs, of which FedAvg scored 1 point more; and one that the first database does not have."""
        lab = type(played)(_folder(tmp_path / "other"))
        lab.play(GRID, lambda spec: story(gm={4: ends(spec) + 0.01 * (spec.method == "fedavg")}))
        lab.play(GRID | {"methods": ["local"]}, lambda spec: story(pm={4: 0.5}))
        return lab

    def test_the_same_jobs_are_compared_a_row_per_method(self, played, other) -> None:
        found = compare_databases(played.engine, other.engine, ("old", "new"))

        assert [(row.place[-1], row.verdict) for row in found.rows] == [
            ("fedavg", "B better"),
            ("fedprox", "identical"),
        ]
        assert found.rows[0].test.difference == pytest.approx(-1)

    def test_or_those_of_one_method(self, played, other) -> None:
        found = compare_databases(played.engine, other.engine, ("old", "new"), "fedprox")

        assert [row.verdict for row in found.rows] == ["identical"]

    def test_a_method_may_be_compared_with_one_of_another_database(self, played, other) -> None:
        (row,) = compare_methods(played.engine, "fedavg", "fedavg", other=other.engine).rows

        assert (row.a.mean, row.b.mean) == (pytest.approx(90), pytest.approx(91))

    def test_runs_of_another_version_are_other_jobs(self, played, story, tmp_path, monkeypatch) -> None:
        from fedbench.algorithms.fedprox import FedProx

        monkeypatch.setattr(FedProx, "version", FedProx.version + 1)
        newer = type(played)(_folder(tmp_path / "newer"))
        newer.play(GRID, lambda spec: story(gm={4: ends(spec)}))

        found = compare_databases(played.engine, newer.engine, ("old", "new"))

        assert [row.place[-1] for row in found.rows] == ["fedavg"]
        with pytest.raises(FedbenchError, match="no finished job in common"):
            compare_databases(played.engine, newer.engine, ("old", "new"), "fedprox")

    def test_a_method_that_one_of_them_does_not_have_is_told(self, played, other) -> None:
        with pytest.raises(FedbenchError, match="no finished run of 'local'"):
            compare_databases(played.engine, other.engine, ("old", "new"), "local")


class TestFormats:
    def test_a_table_has_the_numbers_with_their_signs(self, played) -> None:
        table = comparison_table(compare_methods(played.engine, "fedprox", "fedavg"))

        texts = [cell.text for cell in table.rows[0].cells]
        assert table.title == "headline: A fedprox against B fedavg"
        assert texts == ["3", "", "", "+2.00", "-0.48 to +4.48", "0.074", "0.250", "no difference shown"]

    def test_csv_and_json_have_a_record_per_setting(self, played) -> None:
        found = compare_methods(played.engine, "fedprox", "fedavg")

        (line,) = csv.DictReader(io.StringIO(render_comparison(found, "csv")))
        (record,) = json.loads(render_comparison(found, "json"))["settings"]

        assert (line["dataset"], line["seeds"], float(line["p"])) == ("digits", "0 1 2", pytest.approx(0.0741799))
        assert (record["seeds"], record["low"]) == ([0, 1, 2], pytest.approx(-0.484138, abs=1e-6))

    def test_every_metric_can_be_read(self, lab, story) -> None:
        lab.play(GRID, lambda spec: story(gm={1: 0.3, 2: 0.2, 3: 0.4, 4: ends(spec)}, sent=(1, 1)))

        for metric in METRICS.keys() - {"macro", "rmse"}:
            found = compare_methods(lab.engine, "fedprox", "fedavg", metric)
            assert found.rows[0].test.n == 3
            assert f"{metric}: {METRICS[metric]}" in said(found)

    def test_the_command_prints_every_format(self, played) -> None:
        call = ["compare", "fedprox", "fedavg", "--db", str(played.engine.url.database)]

        for format_ in ("rich", "md", "latex", "csv", "json"):
            done = CliRunner().invoke(app, [*call, "--format", format_])
            assert (done.exit_code, "no difference shown" in " ".join(done.output.split())) == (0, True)

    def test_the_help_names_every_metric(self) -> None:
        words = CliRunner().invoke(app, ["compare", "--help"]).output.replace(",", " ").replace(";", " ").split()

        assert {word.rstrip(":") for word in words} >= METRICS.keys()

    def test_one_method_alone_has_nothing_to_be_compared_with(self, played) -> None:
        done = CliRunner().invoke(app, ["compare", "fedavg", "--db", str(played.engine.url.database)])

        assert isinstance(done.exception, FedbenchError)
        assert done.exception.message == "there is nothing to compare with."


def _folder(path: Any) -> Any:
    path.mkdir()
    return path
