"""Entropy histograms in the database: beside the reliability bins, told apart by their kind."""

import pytest

from fedbench.records import Evaluation, RoundRecord
from fedbench.simulation import Surroundings, simulate
from fedbench.store.recorder import DatabaseRecorder


@pytest.fixture
def recorder(engine, claim):
    """A recorder whose run has begun."""
    made = DatabaseRecorder(engine, claim().job_id, "me")
    made.start(rounds=5, split_hash="abc", device="cpu")
    return made


def scored(**histograms):
    return Evaluation(1, "final", "pm", "mc", {None: {"entropy": 0.5, "auroc": 0.75}}, split="ood", **histograms)


ROWS = "SELECT client, kind, bin, count, confidence, correct FROM histogram ORDER BY id"


def test_an_entropy_histogram_is_kept_by_its_kind(recorder, sql):
    entropy = {None: [(3, 5.0, 0.0, 0.0), (49, 2.0, 0.0, 0.0)], 4: [(3, 1.0, 0.0, 0.0)]}

    recorder.record(RoundRecord(1, [scored(entropy=entropy)], []))

    assert sql(ROWS) == [
        (None, "entropy", 3, 5.0, 0.0, 0.0),
        (None, "entropy", 49, 2.0, 0.0, 0.0),
        (4, "entropy", 3, 1.0, 0.0, 0.0),
    ]


def test_both_kinds_of_one_evaluation_stand_side_by_side(recorder, sql):
    same_bin = {"reliability": {None: [(3, 7.0, 6.5, 6.0)]}, "entropy": {None: [(3, 7.0, 0.0, 0.0)]}}

    recorder.record(RoundRecord(1, [scored(**same_bin)], []))

    assert sorted(sql(ROWS)) == [(None, "entropy", 3, 7.0, 0.0, 0.0), (None, "reliability", 3, 7.0, 6.5, 6.0)]
    assert sql("SELECT DISTINCT evaluation_id FROM histogram") == sql("SELECT id FROM evaluation")


def test_an_evaluation_without_histograms_is_kept(recorder, sql):
    recorder.record(RoundRecord(1, [scored()], []))

    assert sql(ROWS) == []
    assert sql("SELECT stage, split FROM evaluation") == [("final", "ood")]


def test_auroc_is_a_metric(recorder, sql):
    recorder.record(RoundRecord(1, [scored()], []))

    assert sql("SELECT name, value FROM metric ORDER BY name") == [("auroc", 0.75), ("entropy", 0.5)]


def test_rewinding_forgets_entropy_histograms(recorder, sql):
    recorder.record(RoundRecord(1, [scored(entropy={None: [(3, 5.0, 0.0, 0.0)]})], []))

    recorder.rewind(0)

    assert sql(ROWS) == []


def test_a_run_with_foreign_data_leaves_histograms_of_both_splits(engine, claim, make_job, sql, tmp_path):
    settings = {"method": "fedavg", "rounds": 1, "ood": "digits"}
    recorder = DatabaseRecorder(engine, claim(**settings).job_id, "me")

    simulate(make_job(**settings), recorder, Surroundings(tmp_path))

    counted = sql(
        "SELECT split, sum(count) FROM histogram JOIN evaluation ON evaluation.id = evaluation_id "
        "WHERE kind = 'entropy' AND client IS NULL AND stage = 'final' GROUP BY split ORDER BY split"
    )
    # foreign: all 1,797 digits, each in the view of one of two clients; own: 125 test images of either
    assert counted == [("ood", 1797.0), ("test", 250.0)]
