"""The federated loop: traffic, cohorts, polls, divergence, errors, the evaluation schedule, stopping and resuming."""

import math
from itertools import count
from typing import ClassVar

import pytest
import torch

from fedbench import checkpoint
from fedbench.algorithm import Algorithm, Cohort, Ctx, Params
from fedbench.errors import FedbenchError
from fedbench.evaluation import Standing
from fedbench.job import build_job
from fedbench.simulation import Surroundings, check_jobs, is_finite, simulate, train_round
from fedbench.training import average
from fedbench.wire import on_wire, size_of

ACCURACY = [0.0, 0.2, 0.6, 0.4, 0.6, 0.3]
"""Of the toy's global model after every round; the best is reached in rounds 2 and 4."""
PERSONAL = [0.0, 0.1, 0.2, 0.9, 0.5, 0.4]
"""Of its personal models; the best is round 3."""


class Toy(Algorithm):
    """Counts rounds in w, and gets as many labels of `numbers` right as the tables above say."""

    title = "Toy"
    curve: ClassVar = {"gm": ACCURACY, "pm": PERSONAL}

    def init_server(self, ctx):
        return {"w": torch.zeros(3), "personal": torch.zeros(1)}

    def init_client(self, ctx):
        return {"w": torch.zeros(3), "personal": torch.ones(1)}

    def update(self, down, memory, data, ctx):
        return {"w": down["w"] + 1, "personal": down["personal"]}, {**memory, "w": torch.full((3,), float(ctx.round))}

    def aggregate(self, server, uploads, ctx):
        return average(server, uploads, ctx)

    def personal_model(self, server, memory, data, ctx, epochs):
        return memory

    def predict(self, model, x, ctx, mode):
        accuracy = self.curve["pm" if model["personal"] else "gm"][int(model["w"][0])]
        label = x.flatten().long()
        guess = torch.where(label < 10 * accuracy - 0.5, label, (label + 1) % 10)
        return torch.nn.functional.one_hot(guess, 10) * 0.9 + 0.01


@pytest.fixture
def toy_job(make_job, add_method, numbers):
    """A job of a toy method whose two clients have all ten labels."""

    def make(cls=Toy, **settings):
        add_method("toy", cls)
        task = {"dataset": numbers, "normalize": "none", "model": "logreg", "labels_per_client": 10}
        return make_job("toy", **{**task, "rounds": 5, "eval_every": 1, **settings})

    return make


@pytest.fixture
def toy_round(make_ctx, add_method, begin_training):
    """One round of training of a toy method with four clients; what it cost, and the state after it."""

    def train(cls, **settings):
        add_method("toy", cls)
        ctx = make_ctx("toy", clients=4, model="logreg", **settings)
        algorithm = cls(Params())
        progress = begin_training(algorithm, ctx)
        return train_round(algorithm, progress, ctx), progress

    return train


def rounds_of(progress):
    """The round in which each of the four clients last trained, as its memory has it."""
    return [progress.clients[client]["w"][0].item() for client in range(4)]


@pytest.fixture
def place(tmp_path):
    def make(**options):
        return Surroundings(checkpoints=tmp_path / "checkpoints", **options)

    return make


def stop_after(rounds):
    """True from the call that comes after so many rounds on."""
    asked = count()
    return lambda: next(asked) >= rounds


def measured(recorder):
    """All that a run recorded but its seconds."""
    return [
        (record.round, list(record.evaluations), [(c.phase, c.count, c.bytes_down, c.bytes_up) for c in record.costs])
        for record in recorder.kept.values()
    ]


# --- bytes ---


def test_floats_travel_as_float32_and_integers_as_int32():
    message = {
        "double": torch.zeros(3, dtype=torch.float64),
        "half": torch.zeros(3, dtype=torch.float16),
        "long": torch.zeros(3, dtype=torch.int64),
        "flag": torch.zeros(3, dtype=torch.bool),
    }

    sent = on_wire(message)

    assert [value.dtype for value in sent.values()] == [torch.float32, torch.float32, torch.int32, torch.int32]


def test_the_size_of_a_message_is_four_bytes_per_number():
    message = on_wire({"w": torch.zeros(10, 7, dtype=torch.float64), "cluster": torch.tensor(3)})

    assert size_of(message) == 4 * 70 + 4


@pytest.mark.parametrize(("method", "expected"), [("fedavg", 318_040), ("pfedbayes", 636_080)])
def test_a_round_of_dnn100_on_28x28_images_costs_what_the_ledger_says(
    make_job, add_dataset, place, recorder, method, expected
):
    # 79,510 parameters of 4 bytes, down and up; twice as many for a mean and a deviation each
    add_dataset("grey", torch.zeros(20, 1, 28, 28), torch.arange(10).repeat(2), per_class=(1, 1))
    job = make_job(method, dataset="grey", clients=1, labels_per_client=10, rounds=1)

    simulate(job, recorder, place())

    assert recorder.traffic() == [(expected, expected)]


def test_clients_that_train_without_reporting_download_but_do_not_upload(toy_round):
    traffic, _ = toy_round(Toy, f=0.5, train_all=True)

    # four numbers of 4 bytes: down to 4 clients, up from 2
    assert (traffic.bytes_down, traffic.bytes_up) == (4 * 16, 2 * 16)


def test_non_participants_cost_nothing(toy_round):
    traffic, progress = toy_round(Toy, f=0.5, train_all=False)

    assert (traffic.bytes_down, traffic.bytes_up) == (2 * 16, 2 * 16)
    assert sorted(rounds_of(progress)) == [0, 0, 1, 1]


def test_a_client_gets_its_download_as_it_travelled(toy_round):
    seen = []

    class Doubled(Toy):
        def download(self, server, ctx):
            return {"w": server["w"].double(), "personal": server["personal"], "cluster": torch.tensor(2)}

        def update(self, down, memory, data, ctx):
            seen.append({key: value.dtype for key, value in down.items()})
            return super().update(down, memory, data, ctx)

    toy_round(Doubled)

    assert seen == [{"w": torch.float32, "personal": torch.float32, "cluster": torch.int32}] * 4


def test_an_aggregation_gets_uploads_as_they_travelled_with_their_sizes_sorted_by_client(toy_round):
    seen = []

    class Doubled(Toy):
        def update(self, down, memory, data, ctx):
            message, kept = super().update(down, memory, data, ctx)
            return {**message, "w": message["w"].double() + 1e-12}, kept

        def aggregate(self, server, uploads, ctx):
            kept = list(uploads)
            seen.extend((u.client, u.n, u.message["w"].dtype) for u in kept)
            return super().aggregate(server, kept, ctx)

    toy_round(Doubled)

    # digits, small: 25 training samples each
    assert seen == [(client, 25, torch.float32) for client in range(4)]


# --- who trains ---


def test_everyone_trains_and_the_cohort_reports_with_train_all(toy_round):
    updated, reported = [], []

    class Logged(Toy):
        def update(self, down, memory, data, ctx):
            updated.append(ctx.client)
            return super().update(down, memory, data, ctx)

        def aggregate(self, server, uploads, ctx):
            uploads = list(uploads)
            reported.extend(upload.client for upload in uploads)
            return super().aggregate(server, uploads, ctx)

    traffic, progress = toy_round(Logged, f=0.5, train_all=True)

    assert updated == [0, 1, 2, 3]
    assert len(reported) == 2
    assert traffic.updates == 4
    # the memories of those that did not report are kept as well
    assert rounds_of(progress) == [1, 1, 1, 1]


@pytest.mark.parametrize("consumed", [0, 1])
def test_clients_train_even_if_the_aggregation_does_not_ask_for_their_uploads(toy_round, consumed):
    class Lazy(Toy):
        def aggregate(self, server, uploads, ctx):
            for _, _ in zip(range(consumed), uploads, strict=False):
                pass
            return server

    traffic, progress = toy_round(Lazy)

    assert traffic.updates == 4
    assert traffic.bytes_up == 4 * 16
    assert rounds_of(progress) == [1, 1, 1, 1]


def test_uploads_are_computed_when_they_are_asked_for(toy_round):
    order = []

    class Streamed(Toy):
        def update(self, down, memory, data, ctx):
            order.append(f"update {ctx.client}")
            return super().update(down, memory, data, ctx)

        def aggregate(self, server, uploads, ctx):
            order.extend(f"take {upload.client}" for upload in uploads)
            return server

    toy_round(Streamed)

    assert order[:4] == ["update 0", "take 0", "update 1", "take 1"]


def test_memory_is_handed_to_the_client_that_kept_it(toy_job, place, recorder):
    seen = []

    class Remembering(Toy):
        def update(self, down, memory, data, ctx):
            seen.append((ctx.round, ctx.client, memory["w"][0].item()))
            message, kept = super().update(down, memory, data, ctx)
            return message, {**kept, "w": torch.full((3,), 10.0 * ctx.client + ctx.round)}

        def personal_model(self, server, memory, data, ctx, epochs):
            return None

    simulate(toy_job(Remembering, rounds=2), recorder, place())

    # (round, client, what it kept in the round before)
    assert seen == [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 11)]


# --- polls ---


class Polled(Toy):
    """Every client says its number; the one with the largest trains."""

    polled: ClassVar[list] = []

    def poll(self, down, memory, data, ctx):
        self.polled.append((ctx.client, down["w"].tolist(), memory["personal"].item(), data.n))
        return {"score": torch.tensor(ctx.client, dtype=torch.float64)}

    def select(self, server, polls, ctx):
        winner = max(polls, key=lambda client: polls[client]["score"].item())
        return Cohort(train=(winner,), report=(winner,))


def test_a_poll_goes_to_every_client_with_its_download_memory_and_data(toy_round, monkeypatch):
    monkeypatch.setattr(Polled, "polled", [])

    toy_round(Polled, f=0.25)

    assert Polled.polled == [(client, [0.0, 0.0, 0.0], 1.0, 25) for client in range(4)]


def test_a_selection_sees_the_answers_of_all_clients(toy_round):
    _, progress = toy_round(Polled)

    assert rounds_of(progress) == [0, 0, 0, 1]


def test_a_polled_client_downloads_once_and_its_answer_counts_as_upload(toy_round):
    traffic, _ = toy_round(Polled)

    # down: 16 bytes to 4 clients, not again to the one that trains; up: 4 answers of one number, and one upload
    assert traffic.bytes_down == 4 * 16
    assert traffic.bytes_up == 4 * 4 + 16


def test_polls_are_timed_apart_from_updates(toy_job, recorder, place):
    simulate(toy_job(Polled, clients=4, rounds=1), recorder, place())

    counts = {cost.phase: cost.count for cost in recorder.kept[1].costs}
    assert counts["poll"] == 4
    assert counts["client"] == 1


def test_a_client_that_does_not_answer_a_poll_costs_its_download_only(toy_round):
    class Shy(Polled):
        def poll(self, down, memory, data, ctx):
            return super().poll(down, memory, data, ctx) if ctx.client < 2 else None

    traffic, progress = toy_round(Shy)

    assert traffic.bytes_up == 2 * 4 + 16
    assert rounds_of(progress) == [0, 1, 0, 0]  # the largest that answered


# --- divergence and errors ---


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_with_one_bad_number_is_not_finite(value):
    assert is_finite({"w": torch.ones(100), "n": torch.tensor(3)})
    assert not is_finite({"good": torch.ones(100), "w": torch.cat([torch.ones(99), torch.tensor([value])])})


def test_infinities_of_opposite_sign_do_not_cancel():
    assert not is_finite({"w": torch.tensor([float("inf"), float("-inf")])})


def diverging(where, at_round=3):
    """A toy whose message, memory or server state gets a NaN in one round."""

    class Diverging(Toy):
        updates: ClassVar[list] = []

        def update(self, down, memory, data, ctx):
            self.updates.append(ctx.round)
            message, kept = super().update(down, memory, data, ctx)
            bad = torch.tensor([1.0, math.nan, 1.0])
            if ctx.round == at_round and where == "message":
                message = {**message, "w": bad}
            if ctx.round == at_round and where == "memory":
                kept = {**kept, "w": bad}
            return message, kept

        def aggregate(self, server, uploads, ctx):
            merged = super().aggregate(server, uploads, ctx)
            return merged if (ctx.round, where) != (at_round, "server") else {**merged, "w": merged["w"] * math.inf}

    return Diverging


@pytest.mark.parametrize("where", ["message", "memory", "server"])
def test_a_run_whose_states_are_no_longer_finite_ends_as_diverged_with_its_curve(toy_job, place, recorder, where):
    method = diverging(where)

    outcome = simulate(toy_job(method), recorder, place())

    assert outcome == "diverged"
    assert recorder.curve("gm") == pytest.approx({1: 0.2, 2: 0.6})
    assert recorder.last_round() == 3  # the round in which it happened, without figures
    assert max(method.updates) == 3


def test_a_diverged_round_is_not_tried_again(toy_job, place, recorder):
    method = diverging("message")

    simulate(toy_job(method), recorder, place())

    # the first of two clients brought the NaN
    assert method.updates == [1, 1, 2, 2, 3]


def test_a_learning_rate_beyond_all_measure_diverges(make_job, place, recorder):
    outcome = simulate(make_job("fedavg", lr=1e38, rounds=10, eval_every=1), recorder, place())

    assert outcome == "diverged"


def test_a_run_whose_loss_is_not_a_number_has_diverged_even_if_its_parameters_are_finite(make_job, place, recorder):
    # one step of rate 1e20 leaves finite weights of about 1e19, whose products overflow: the logits are inf - inf
    outcome = simulate(make_job("fedavg", lr=1e20, rounds=1, clients=4), recorder, place())

    assert outcome == "diverged"
    assert not any(math.isnan(e.metrics[None]["nll"]) for e in recorder.evaluations())


@pytest.mark.parametrize("hook", ["update", "poll"])
def test_an_error_says_in_which_hook_round_and_client_it_arose(toy_job, place, recorder, hook):
    def broken(self, down, memory, data, ctx):
        if (ctx.round, ctx.client) == (2, 1):
            raise RuntimeError("matrix is singular")
        return Toy.update(self, down, memory, data, ctx) if hook == "update" else None

    cls = type("Broken", (Toy,), {hook: broken})

    with pytest.raises(RuntimeError, match="matrix is singular") as caught:
        simulate(toy_job(cls), recorder, place())

    assert f"in {hook}, round 2, client 1" in caught.value.__notes__
    assert recorder.last_round() == 1


def test_an_error_of_the_aggregation_says_its_round(toy_job, place, recorder):
    class Broken(Toy):
        def aggregate(self, server, uploads, ctx):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        simulate(toy_job(Broken), recorder, place())

    assert caught.value.__notes__ == ["in aggregate, round 1"]


# --- what is evaluated, and when ---


def test_the_curve_holds_what_the_model_scored_after_every_round(toy_job, place, recorder):
    outcome = simulate(toy_job(rule="best_all"), recorder, place())

    assert outcome == "done"
    assert recorder.curve("gm") == pytest.approx(dict(enumerate(ACCURACY[1:], start=1)))
    assert recorder.curve("pm") == pytest.approx(dict(enumerate(PERSONAL[1:], start=1)))


@pytest.mark.parametrize(
    ("rule", "rounds", "expected"),
    [
        ("final", 5, [2, 4, 5]),
        ("best_all", 5, [1, 2, 3, 4, 5]),
        ("mean_last10", 5, [1, 2, 3, 4, 5]),
        ("best_last100", 5, [1, 2, 3, 4, 5]),
        ("mean_last10", 15, [2, 4, *range(6, 16)]),
        ("best_last100", 104, [2, 4, *range(5, 105)]),
    ],
)
def test_rounds_are_evaluated_on_the_schedule_and_in_the_window_of_the_rule(
    toy_job, place, recorder, rule, rounds, expected
):
    class Flat(Toy):
        curve: ClassVar = {"gm": [0.5] * 200, "pm": [0.5] * 200}

    simulate(toy_job(Flat, rule=rule, rounds=rounds, eval_every=2), recorder, place())

    assert list(recorder.curve("gm")) == expected
    assert list(recorder.kept) == list(range(1, rounds + 1))


def test_the_best_round_of_every_view_is_evaluated_again_at_the_end(toy_job, place, recorder):
    simulate(toy_job(rule="best_all"), recorder, place())

    (gm,) = recorder.evaluations(stage="best", view="gm", predict="mean")
    (pm,) = recorder.evaluations(stage="best", view="pm", predict="mean")
    # the first of two equal ones for GM
    assert (gm.round, gm.metrics[None]["accuracy"]) == (2, pytest.approx(0.6))
    assert (pm.round, pm.metrics[None]["accuracy"]) == (3, pytest.approx(0.9))


def test_the_best_state_scores_what_the_curve_says_of_its_round(toy_job, place, recorder):
    simulate(toy_job(rule="best_all"), recorder, place())

    for view in ("gm", "pm"):
        (best,) = recorder.evaluations(stage="best", view=view, predict="mean")
        (then,) = recorder.evaluations(stage="train", view=view, predict="mean", round=best.round)
        assert best.metrics[None] == then.metrics[None]


def test_the_best_state_of_a_real_method_scores_what_the_curve_says_of_its_round(make_job, place, recorder):
    # a large rate, so that the curve goes up and down
    job = make_job("fedavg", lr=2.0, rounds=8, rule="best_all", clients=4)

    simulate(job, recorder, place())

    curve = recorder.curve("gm")
    (best,) = recorder.evaluations(stage="best", view="gm")
    assert best.metrics[None]["accuracy"] == max(curve.values())
    assert best.round == min(r for r in curve if curve[r] == max(curve.values()))
    assert best.round < 8


def test_a_best_rule_forgets_rounds_outside_its_window(toy_job, place, recorder):
    class Early(Toy):
        # rounds 1-5 lie outside the last 100 of 105 and are evaluated by the schedule; the best inside is round 50
        curve: ClassVar = {
            view: [0, 0.9, 0.9, 0.9, 0.9, 0.9] + [0.2] * 44 + [0.5] + [0.3] * 60 for view in ("gm", "pm")
        }

    simulate(toy_job(Early, rule="best_last100", rounds=105), recorder, place())

    assert {e.round for e in recorder.evaluations(stage="best")} == {50}


def test_the_headline_decides_which_round_is_best(toy_job, place, recorder, monkeypatch):
    # macro accuracy is made to fall while pooled accuracy follows the table
    original = Standing.evaluate

    def falling(*args, **kwargs):
        evaluation = original(*args, **kwargs)
        evaluation.metrics[None]["macro"] = 1 / evaluation.round
        return evaluation

    monkeypatch.setattr(Standing, "evaluate", falling)

    simulate(toy_job(rule="best_all", headline="macro"), recorder, place())

    assert {e.round for e in recorder.evaluations(stage="best")} == {1}


def test_the_final_state_is_evaluated_per_client_beside_the_best(toy_job, place, recorder):
    simulate(toy_job(rule="best_all"), recorder, place())

    for stage in ("best", "final"):
        for view in ("gm", "pm"):
            (evaluation,) = recorder.evaluations(stage=stage, view=view, predict="mean")
            assert set(evaluation.metrics) == {None, 0, 1}
    (final,) = recorder.evaluations(stage="final", view="gm", predict="mean")
    assert (final.round, final.metrics[None]["accuracy"]) == (5, pytest.approx(0.3))


def test_mc_prediction_comes_at_the_end_only_unless_asked_for(toy_job, place, recorder):
    simulate(toy_job(rule="best_all"), recorder, place())

    described = {(e.stage, e.view, e.round) for e in recorder.evaluations(predict="mc")}
    assert described == {("best", "gm", 2), ("final", "gm", 5), ("best", "pm", 3), ("final", "pm", 5)}


def test_mc_prediction_during_training_follows_mc_every(toy_job, place, recorder):
    simulate(toy_job(rule="final", eval_every=5, mc_every=2), recorder, place())

    assert [e.round for e in recorder.evaluations(stage="train", view="gm", predict="mc")] == [2, 4]
    assert list(recorder.curve("gm")) == [5]


def test_a_point_method_never_predicts_by_mc(make_job, place, recorder):
    simulate(make_job("fedavg", rounds=2, mc_every=1), recorder, place())

    assert recorder.evaluations(predict="mc") == []
    assert recorder.evaluations(predict="mean") != []


def test_a_view_that_the_method_does_not_have_is_not_recorded(make_job, place, new_recorder):
    fedavg, local = new_recorder(), new_recorder()

    simulate(make_job("fedavg", rounds=1), fedavg, place())
    simulate(make_job("local", rounds=1), local, place())

    assert {e.view for e in fedavg.evaluations()} == {"gm"}
    assert {e.view for e in local.evaluations()} == {"pm"}


def test_costs_say_how_many_updates_and_predictions_took_the_time(toy_job, place, recorder):
    simulate(toy_job(rule="final", rounds=2, eval_every=2), recorder, place())

    costs = [[(cost.phase, cost.count) for cost in record.costs] for record in recorder.kept.values()]
    # round 2: GM and PM of the schedule; best and final, of two views, by mean and by MC
    assert costs == [[("client", 2), ("server", 1)], [("client", 2), ("server", 1), ("predict", 10)]]
    assert all(cost.seconds >= 0 for record in recorder.kept.values() for cost in record.costs)


def test_the_recorder_is_told_of_the_run_and_the_watcher_of_every_round(toy_job, place, recorder):
    told = []

    simulate(toy_job(rule="final", eval_every=2), recorder, place(progress=lambda *news: told.append(news)))

    (start,) = recorder.starts
    assert (start["rounds"], start["device"], len(start["split_hash"])) == (5, "cpu", 64)
    assert [round_ for round_, _ in told] == [1, 2, 3, 4, 5]
    assert told[0][1] == {}
    assert told[1][1] == pytest.approx({"gm": 0.6, "pm": 0.2})
    assert told[4][1] == pytest.approx({"gm": 0.3, "pm": 0.4})


# --- stopping and resuming ---


def test_a_stopped_run_is_interrupted_and_leaves_a_checkpoint(toy_job, place, recorder):
    here = place(should_stop=stop_after(2))

    outcome = simulate(toy_job(), recorder, here)

    assert outcome == "interrupted"
    assert recorder.last_round() == 2
    assert checkpoint.load_newest(here.checkpoints, 2)["round"] == 2


def test_a_run_stopped_before_its_first_round_can_go_on(toy_job, place, recorder):
    assert simulate(toy_job(), recorder, place(should_stop=lambda: True)) == "interrupted"

    assert simulate(toy_job(), recorder, place()) == "done"
    assert list(recorder.kept) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", ["toy", "fedavg", "local", "pfedbayes"])
@pytest.mark.parametrize("stopped", [1, 3, 4])
def test_a_resumed_run_records_what_an_uninterrupted_one_does(
    toy_job, make_job, tmp_path, new_recorder, method, stopped
):
    settings = {"rounds": 5, "rule": "best_all", "optim_state": "persistent", "momentum": 0.5, "lr": 0.05}
    job = toy_job(**settings) if method == "toy" else make_job(method, clients=4, f=0.5, **settings)
    whole, halved = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))

    simulate(job, halved, Surroundings(tmp_path / "halved", should_stop=stop_after(stopped)))
    outcome = simulate(job, halved, Surroundings(tmp_path / "halved"))

    assert outcome == "done"
    assert halved.rewinds == [0, stopped]
    assert measured(halved) == measured(whole)


class CrashError(Exception):
    """What kills a worker."""


def crash_at(round_):
    def progress(now, accuracy):
        if now == round_:
            raise CrashError

    return progress


def test_after_a_crash_rounds_beyond_the_checkpoint_are_recorded_anew(make_job, tmp_path, new_recorder):
    job = make_job("pfedbayes", rounds=5, rule="best_all")
    whole, crashed = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))

    with pytest.raises(CrashError):  # round 3 is recorded, but its checkpoint is not written yet
        simulate(job, crashed, Surroundings(tmp_path / "crashed", checkpoint_seconds=0.0, progress=crash_at(3)))
    assert crashed.last_round() == 3
    simulate(job, crashed, Surroundings(tmp_path / "crashed"))

    assert crashed.rewinds == [0, 2]
    assert measured(crashed) == measured(whole)


def test_a_checkpoint_beyond_the_records_is_not_used(toy_job, place, new_recorder):
    simulate(toy_job(), new_recorder(), place(should_stop=stop_after(3)))
    forgetful = new_recorder()

    outcome = simulate(toy_job(), forgetful, place())

    assert outcome == "done"
    assert forgetful.rewinds == [0]
    assert list(forgetful.kept) == [1, 2, 3, 4, 5]


def test_checkpoints_are_written_by_time(toy_job, place, new_recorder):
    hurried, patient = place(checkpoint_seconds=0.0), place(checkpoint_seconds=3600.0)

    simulate(toy_job(), new_recorder(), patient)
    assert not patient.checkpoints.exists()
    simulate(toy_job(), new_recorder(), hurried)

    # after every round but the last, of which the newest two are kept
    assert sorted(path.name for path in hurried.checkpoints.glob("*.ckpt")) == ["00000003.ckpt", "00000004.ckpt"]


def test_a_context_knows_its_rounds_and_its_clients_size(make_ctx):
    ctx: Ctx = make_ctx(rounds=7, client=1)

    assert (ctx.rounds, ctx.sizes, ctx.n, ctx.at(None).client) == (7, (25, 25), 25, None)


def test_a_method_that_cannot_work_on_its_network_is_refused_before_anything_runs(tmp_path):
    job = build_job({"method": "fedper", "dataset": "digits", "model": "logreg"})

    with pytest.raises(FedbenchError, match="a single layer has none"):
        check_jobs([job], tmp_path)
