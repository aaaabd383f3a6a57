"""What reports read: one row per finished job, its settings as columns, and the figures of any number of runs."""

import pytest
from sqlalchemy import insert

from fedbench import queue
from fedbench.errors import FedbenchError
from fedbench.records import Cost, Evaluation, RoundRecord
from fedbench.store import models, queries
from fedbench.store.database import writing
from fedbench.store.recorder import DatabaseRecorder

RUN = {"device": "cpu", "host": "here", "versions": {}, "started": 0.0}


@pytest.fixture
def finish(engine, make_job):
    """Runs a job in name only: claims it, records the rounds given, and ends it. Returns its key."""

    def run(*rounds, outcome="done", sweep="sweep", **settings):
        job = make_job(**settings)
        queue.enqueue(engine, sweep, {}, [job])
        claimed = queue.claim(engine, "me")
        assert claimed.key == job.key
        recorder = DatabaseRecorder(engine, claimed.job_id, "me")
        recorder.start(rounds=5, split_hash="abc", device="cpu")
        for record in rounds:
            recorder.record(record)
        recorder.fail("no luck") if outcome == "failed" else recorder.finish(outcome)
        return job.key

    return run


def evaluation(round_, stage, accuracy, predict="mean", split="test"):
    """Pooled accuracy as given, client 0 at half of it; one reliability bin each."""
    return Evaluation(
        round_,
        stage,
        "gm",
        predict,
        metrics={None: {"accuracy": accuracy}, 0: {"accuracy": accuracy / 2}},
        reliability={None: [(9, 10.0, 9.5, 10 * accuracy)], 0: [(9, 5.0, 4.75, 5 * accuracy)]},
        split=split,
    )


def two_rounds():
    return (
        RoundRecord(1, [evaluation(1, "train", 0.25)], [Cost(1, "client", 2.0, 10, 80, 40), Cost(1, "server", 1.0)]),
        RoundRecord(
            2,
            [evaluation(2, "train", 0.5), evaluation(1, "best", 0.25), evaluation(2, "final", 0.5)],
            [Cost(2, "client", 3.0, 10, 80, 40), Cost(2, "client", 0.5, 1, 8, 4, client=0)],
        ),
    )


def rows(frame, *columns):
    return list(frame[list(columns)].itertuples(index=False, name=None))


# --- finished runs ---


def test_a_finished_run_comes_with_its_facts_and_its_settings_as_columns(engine, finish):
    key = finish(*two_rounds(), method="fedprox", mu=0.5, seed=3, rounds=2)

    frame = queries.finished_runs(engine)

    assert rows(frame, "key", "status", "last_round", "device", "split_hash") == [(key, "done", 2, "cpu", "abc")]
    assert rows(frame, "method", "mu", "seed", "rounds", "dataset", "size") == [
        ("fedprox", 0.5, 3, 2, "digits", "small")
    ]
    assert frame["spec"][0].key == key


def test_settings_that_a_method_does_not_have_are_missing_values(engine, finish):
    finish(method="fedavg")
    finish(method="fedprox", mu=0.5)

    frame = queries.finished_runs(engine)

    assert list(frame["mu"].isna()) == [True, False]


@pytest.mark.parametrize(("outcome", "expected"), [("done", 1), ("diverged", 1), ("failed", 0), ("interrupted", 0)])
def test_only_done_and_diverged_runs_are_results(engine, finish, outcome, expected):
    finish(outcome=outcome)

    assert len(queries.finished_runs(engine)) == expected


def test_the_newest_of_a_jobs_finished_runs_counts(engine, finish, sql):
    key = finish(*two_rounds())
    sql("UPDATE job SET status = 'pending'")  # asked for again
    finish(two_rounds()[0], outcome="diverged")

    frame = queries.finished_runs(engine)

    assert rows(frame, "key", "status", "last_round") == [(key, "diverged", 1)]


def test_a_failed_run_before_the_good_one_does_not_count(engine, finish):
    finish(two_rounds()[0], outcome="failed")
    queue.retry(engine, [])
    finish(*two_rounds())

    assert rows(queries.finished_runs(engine), "status", "last_round") == [("done", 2)]


def test_a_sweep_has_the_jobs_that_were_last_asked_for_under_its_name(engine, finish, make_job):
    finish(sweep="first", seed=0)
    wanted = finish(sweep="second", seed=1)
    shared = make_job(seed=0)
    queue.enqueue(engine, "third", {}, [shared, make_job(seed=1)])

    assert list(queries.finished_runs(engine, "second")["key"]) == [wanted]
    assert list(queries.finished_runs(engine, "third")["key"]) == [shared.key, wanted]


def test_an_unknown_sweep_is_a_clear_error(engine, finish):
    finish(sweep="quickstart")

    with pytest.raises(FedbenchError, match="no sweep 'quickstrt'") as caught:
        queries.finished_runs(engine, "quickstrt")

    assert "quickstart" in caught.value.hint


# --- figures ---


def test_curves_are_the_pooled_metrics_of_training(engine, finish):
    finish(*two_rounds())

    frame = queries.curves(engine, [1])

    assert rows(frame, "run", "round", "view", "predict", "name", "value") == [
        (1, 1, "gm", "mean", "accuracy", 0.25),
        (1, 2, "gm", "mean", "accuracy", 0.5),
    ]
    assert list(frame.columns) == ["run", "round", "view", "predict", "name", "value"]


def test_curves_are_of_the_test_split(engine, finish):
    finish(RoundRecord(1, [evaluation(1, "train", 0.25), evaluation(1, "train", 0.75, split="fog")], []))

    assert rows(queries.curves(engine, [1]), "value") == [(0.25,)]


def test_figures_are_pooled_at_the_best_and_the_final_round(engine, finish):
    finish(*two_rounds())

    assert rows(queries.figures(engine, [1]), "stage", "round", "name", "value") == [
        ("best", 1, "accuracy", 0.25),
        ("final", 2, "accuracy", 0.5),
    ]


def test_figures_come_per_client_when_asked(engine, finish):
    finish(*two_rounds())

    frame = queries.figures(engine, [1], stages=("final",), per_client=True)

    assert list(frame["client"].isna()) == [True, False]
    assert rows(frame[frame["client"] == 0], "value") == [(0.25,)]


def test_figures_are_those_of_the_runs_asked_for(engine, finish):
    finish(*two_rounds(), seed=0)
    finish(*two_rounds(), seed=1)

    assert set(queries.figures(engine, [2])["run"]) == {2}


def test_reliability_bins_are_pooled_at_the_best_and_the_final_round(engine, finish):
    finish(*two_rounds())

    assert rows(queries.reliability(engine, [1]), "stage", "bin", "count", "confidence", "correct") == [
        ("best", 9, 10.0, 9.5, 2.5),
        ("final", 9, 10.0, 9.5, 5.0),
    ]


def test_costs_are_those_of_all_clients_together(engine, finish):
    finish(*two_rounds())

    assert rows(queries.costs(engine, [1]), "round", "phase", "seconds", "count", "bytes_down", "bytes_up") == [
        (1, "client", 2.0, 10, 80, 40),
        (1, "server", 1.0, 1, 0, 0),
        (2, "client", 3.0, 10, 80, 40),
    ]


def test_more_runs_than_a_statement_takes_are_read_whole(engine, claim):
    job, runs = claim().job_id, range(1, 1202)
    with writing(engine).begin() as connection:
        connection.execute(insert(models.Run), [{"id": n, "job_id": job, "status": "done", **RUN} for n in runs])
        evaluations = [
            {"id": n, "run_id": n, "recorded": 1, "round": 1, "stage": "final"}
            | {"view": "gm", "split": "test", "predict": "mean"}
            for n in runs
        ]
        connection.execute(insert(models.Evaluation), evaluations)
        metrics = [{"evaluation_id": n, "client": None, "name": "accuracy", "value": n / 2000} for n in runs]
        connection.execute(insert(models.Metric), metrics)

    frame = queries.figures(engine, list(runs))

    assert rows(frame, "run", "value") == [(n, n / 2000) for n in runs]


# --- nothing there ---


def test_an_empty_database_has_no_finished_runs_but_their_columns(engine):
    frame = queries.finished_runs(engine)

    assert frame.empty
    assert {"run", "key", "spec", "status", "seconds", "last_round"} <= set(frame.columns)


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        (queries.curves, {"run", "round", "view", "predict", "name", "value"}),
        (queries.figures, {"run", "stage", "round", "step", "view", "split", "predict", "client", "name", "value"}),
        (queries.reliability, {"run", "stage", "view", "predict", "bin", "count", "confidence", "correct"}),
        (queries.costs, {"run", "round", "phase", "seconds", "count", "bytes_down", "bytes_up"}),
    ],
)
@pytest.mark.parametrize("runs", [[], [1]])
def test_figures_of_no_runs_are_an_empty_frame_with_its_columns(engine, query, columns, runs):
    frame = query(engine, runs)

    assert frame.empty
    assert set(frame.columns) == columns
