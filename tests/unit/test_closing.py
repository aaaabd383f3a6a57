"""What is scored when training is over: best and final state, other data, adaptation, newcomers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from fedbench.algorithm import Algorithm, Params
from fedbench.closing import adapted, closing, novel
from fedbench.dataset import Arrays, Dataset, datasets
from fedbench.evaluation import Standing
from fedbench.memory import ClientStore
from fedbench.simulation import Surroundings, simulate
from fedbench.training import average


def right(count):
    """A model of the toys below: how many labels of `numbers` it gets right."""
    return {"right": torch.tensor(float(count))}


class Toy(Algorithm):
    """Knows the labels of `numbers`: right for labels below the model's `right`, else wrong.

    Every epoch of adaptation, and every update of a client, teaches one more label.
    """

    title = "Toy"

    def __init__(self, params=None):
        super().__init__(params or Params())
        self.calls = []
        self.asked = []

    def init_server(self, ctx):
        return right(0)

    def init_client(self, ctx):
        return right(0)

    def update(self, down, memory, data, ctx):
        self.calls.append((ctx.round, ctx.client, ctx.novel, memory["right"].item(), down["right"].item()))
        return right(down["right"] + 1), right(memory["right"] + 1)

    def aggregate(self, server, uploads, ctx):
        return average(server, uploads, ctx)

    def personal_model(self, server, memory, data, ctx, epochs):
        self.asked.append((ctx.round, ctx.client, epochs))
        return memory if epochs is None else right(server["right"] + epochs)

    def predict(self, model, x, ctx, mode):
        label = x.flatten().long()
        guess = torch.where(label < model["right"], label, (label + 1) % 10)
        return one_hot(guess, 10) * 0.9 + 0.01


def no_memories():
    return ClientStore(lambda client: right(0))


@pytest.fixture
def task_of(make_ctx, numbers):
    """The context of the last of 7 rounds, four clients, each with 2 test images of all ten labels."""

    def make(**settings):
        task = {"dataset": numbers, "normalize": "none", "model": "logreg", "labels_per_client": 10}
        return make_ctx(round_=7, clients=4, rounds=7, **task, **settings)

    return make


def accuracies(evaluations):
    """(step, pooled accuracy), in order; mean predictions only."""
    return [(e.step, pytest.approx(e.metrics[None]["accuracy"])) for e in evaluations if e.predict == "mean"]


# --- adaptation ---


def test_adaptation_has_a_rung_per_entry_of_adapt_epochs(task_of):
    ctx = task_of(adapt_epochs=[0, 1, 2, 5])

    found = adapted({}, Standing(Toy(), right(3), no_memories(), ctx))

    # three of ten labels are right before the first epoch, and one more after every epoch
    assert accuracies(found) == [(0, 0.3), (1, 0.4), (2, 0.5), (5, 0.8)]
    assert {(e.stage, e.view, e.split) for e in found} == {("adapt", "pm", "test")}


def test_adaptation_is_scored_by_mean_and_where_it_differs_by_mc(task_of):
    ctx = task_of(adapt_epochs=[1, 2])

    found = adapted({}, Standing(Toy(), right(3), no_memories(), ctx))

    assert [(e.step, e.predict) for e in found] == [(1, "mean"), (1, "mc"), (2, "mean"), (2, "mc")]


def test_nobody_adapts_unless_asked(task_of):
    algorithm = Toy()

    assert adapted({}, Standing(algorithm, right(3), no_memories(), task_of())) == []
    assert algorithm.asked == []


def test_a_method_without_personal_models_has_no_adaptation(task_of):
    algorithm = Toy()
    algorithm.personal_model = lambda *_: None

    assert adapted({}, Standing(algorithm, right(3), no_memories(), task_of(adapt_epochs=[1]))) == []


def test_members_adapt_if_there_are_no_newcomers(task_of):
    algorithm = Toy()

    (found, _) = adapted({}, Standing(algorithm, right(3), no_memories(), task_of(adapt_epochs=[1])))

    assert {client for _, client, _ in algorithm.asked} == {0, 1, 2, 3}
    assert set(found.metrics) == set(found.reliability) == {None, 0, 1, 2, 3}


def test_only_newcomers_adapt_if_there_are_any(task_of):
    algorithm = Toy()

    (found, _) = adapted({}, Standing(algorithm, right(3), no_memories(), task_of(adapt_epochs=[1], newcomers=2)))

    assert {client for _, client, _ in algorithm.asked} == {0, 1}
    assert set(found.metrics) == {None, 0, 1}


def standings(algorithm, ctx):
    """Best states of rounds 2 (GM, two labels) and 4 (PM, four labels), and the final one (seven labels)."""
    best = {
        view: Standing(algorithm, right(round_), no_memories(), replace(ctx, round=round_))
        for view, round_ in (("gm", 2), ("pm", 4))
    }
    return best, Standing(algorithm, right(7), no_memories(), ctx)


def test_clients_adapt_the_final_state(task_of):
    found = adapted(*standings(Toy(), task_of(adapt_epochs=[1], adapt_from="final")))

    assert {e.round for e in found} == {7}
    assert accuracies(found) == [(1, 0.8)]


def test_clients_adapt_the_best_global_model_if_the_protocol_says_so(task_of):
    found = adapted(*standings(Toy(), task_of(adapt_epochs=[1], adapt_from="best")))

    assert {e.round for e in found} == {2}
    assert accuracies(found) == [(1, 0.3)]


def test_clients_adapt_the_best_personal_state_where_there_is_no_global_model(task_of):
    best, final = standings(Toy(), task_of(adapt_epochs=[1], adapt_from="best"))
    del best["gm"]

    found = adapted(best, final)

    assert {e.round for e in found} == {4}
    assert accuracies(found) == [(1, 0.5)]


def test_adaptation_gets_the_memories_of_its_state(task_of):
    ctx = task_of(adapt_epochs=[1], adapt_from="best")
    algorithm = Toy()
    algorithm.personal_model = lambda server, memory, data, ctx, epochs: memory
    then = ClientStore(lambda client: right(9))

    found = adapted({"gm": Standing(algorithm, right(0), then, ctx)}, Standing(algorithm, right(0), no_memories(), ctx))

    assert accuracies(found) == [(1, 0.9)]


def test_zero_epochs_score_what_the_global_model_scores(make_job, recorder, tmp_path):
    simulate(make_job("fedavg", clients=4, rounds=2, lr=0.1, adapt_epochs=[0, 3]), recorder, Surroundings(tmp_path))

    (model,) = recorder.evaluations(stage="final", view="gm")
    untouched, trained = recorder.evaluations(stage="adapt")
    assert (untouched.step, trained.step) == (0, 3)
    for client in (None, 0, 1, 2, 3):
        # the same network in batches of other sizes: rounding may differ, guesses do not
        assert untouched.metrics[client]["accuracy"] == model.metrics[client]["accuracy"]
        assert untouched.metrics[client]["nll"] == pytest.approx(model.metrics[client]["nll"], rel=1e-5)
    assert trained.metrics[None]["accuracy"] > model.metrics[None]["accuracy"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedbabu"])
def test_zero_epochs_of_newcomers_score_what_the_global_model_scores_on_them(make_ctx, make_algorithm, method):
    ctx = make_ctx(method, clients=4, newcomers=2, adapt_epochs=[0])
    algorithm = make_algorithm(method)
    final = Standing(algorithm, algorithm.init_server(ctx), ClientStore(lambda client: {}), ctx)

    (found,) = adapted({}, final)

    expected = final.evaluate("gm", "mean", clients=(0, 1))
    assert found.metrics[None]["accuracy"] == expected.metrics[None]["accuracy"]
    assert found.metrics[None]["nll"] == pytest.approx(expected.metrics[None]["nll"], rel=1e-5)


def test_a_longer_adaptation_goes_on_from_a_shorter_one(make_ctx, make_algorithm):
    # 25 samples, batches of 25: e epochs are e steps on the same data, in whatever order
    ctx = make_ctx("fedavg", client=0, lr=0.1, batch_size=25)
    algorithm, data = make_algorithm("fedavg"), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)

    one, two = (algorithm.personal_model(server, {}, data, ctx, epochs) for epochs in (1, 2))
    again = algorithm.personal_model(one, {}, data, ctx, 1)

    torch.testing.assert_close(two["w"], again["w"], rtol=1e-4, atol=1e-6)


@pytest.fixture
def with_dropout(make_ctx, make_algorithm, pictures):
    """What is adapted of a method on a network with dropout, by these newcomers, for these epochs."""

    def run(method, newcomers, epochs):
        ctx = make_ctx(method, dataset=pictures, model="cnn5_100", newcomers=1, lr=0.05, adapt_epochs=epochs)
        algorithm = make_algorithm(method)
        ctx.task.newcomers = newcomers
        ctx.task.net.use_generator(torch.Generator())  # as training left it
        server = algorithm.init_server(ctx)
        return adapted({}, Standing(algorithm, server, ClientStore(lambda c: algorithm.init_client(ctx.at(c))), ctx))

    return run


@pytest.mark.parametrize("method", ["fedavg", "pfedbayes"])
def test_a_rung_does_not_depend_on_the_others(with_dropout, method):
    # dropout masks, too, follow from round and client, not from what ran before
    alone = with_dropout(method, (0,), [2])
    in_company = with_dropout(method, (0,), [1, 2])

    assert [e.metrics for e in in_company if e.step == 2] == [e.metrics for e in alone]


@pytest.mark.parametrize("method", ["fedavg", "pfedbayes"])
def test_a_clients_adaptation_does_not_depend_on_who_adapts_before_it(with_dropout, method):
    alone = with_dropout(method, (1,), [1])
    in_company = with_dropout(method, (0, 1), [1])

    assert [e.metrics[1] for e in in_company] == [e.metrics[1] for e in alone]


# --- adaptation in a run ---


@pytest.fixture
def toy_run(make_job, add_method, numbers, recorder, tmp_path):
    """What a run of 5 rounds of the toy records: its personal models know one more label with every round."""

    def run(cls=Toy, **settings):
        add_method("toy", cls)
        task = {"dataset": numbers, "normalize": "none", "model": "logreg", "labels_per_client": 10, "clients": 4}
        job = make_job("toy", **{**task, "rounds": 5, "eval_every": 1, **settings})
        assert simulate(job, recorder, Surroundings(tmp_path)) == "done"
        return recorder

    return run


class Falling(Toy):
    """Its best global model is that of round 2: the server forgets what it learns later."""

    def aggregate(self, server, uploads, ctx):
        list(uploads)
        return right([0, 1, 6, 5, 4, 3][ctx.round])


@pytest.mark.parametrize(("adapt_from", "round_", "expected"), [("best", 2, 0.8), ("final", 5, 0.5)])
def test_a_run_adapts_its_best_or_its_final_state(toy_run, adapt_from, round_, expected):
    recorder = toy_run(Falling, rule="best_all", adapt_epochs=[2], adapt_from=adapt_from)

    # six labels at the best, three at the end, and two more
    (found,) = recorder.evaluations(stage="adapt", predict="mean")
    assert (found.round, found.metrics[None]["accuracy"]) == (round_, pytest.approx(expected))


def test_adaptation_belongs_to_the_last_round_and_its_time_is_personalisation(toy_run):
    recorder = toy_run(adapt_epochs=[1, 2])

    phases = [
        [(c.phase, c.count) for c in record.costs if c.phase == "personalise"] for record in recorder.kept.values()
    ]
    # two rungs, by mean and by MC
    assert phases == [[], [], [], [], [("personalise", 4)]]
    assert {e.stage for e in recorder.kept[5].evaluations} == {"train", "best", "final", "adapt"}


def test_a_run_without_adaptation_spends_no_time_on_it(toy_run):
    recorder = toy_run()

    assert "personalise" not in {c.phase for record in recorder.kept.values() for c in record.costs}


def test_an_adaptation_that_diverges_is_a_diverged_run(make_job, recorder, tmp_path):
    # weights of about 1e38: their logits are not numbers
    job = make_job("fedavg", rounds=1, adapt_epochs=[5], adapt_lr=1e38)

    outcome = simulate(job, recorder, Surroundings(tmp_path))

    assert outcome == "diverged"
    assert not any(np.isnan(e.metrics[None]["nll"]) for e in recorder.evaluations())


# --- newcomers with the method's own update ---


@pytest.fixture
def novel_ctx(task_of):
    """Clients 0 and 1 are newcomers, for three rounds after the seventh."""
    return task_of(newcomers=2, novel_rounds=3)


def test_newcomers_are_scored_after_every_step(novel_ctx):
    found = novel(Standing(Toy(), right(5), no_memories(), novel_ctx))

    # they begin without a label and learn one in every step
    assert accuracies(found) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert {(e.stage, e.view, e.predict, e.split) for e in found} == {("novel", "pm", "mean", "test")}


def test_newcomers_train_in_rounds_after_the_last_and_know_that_they_are_new(novel_ctx):
    algorithm = Toy()

    novel(Standing(algorithm, right(5), no_memories(), novel_ctx))

    # round, client, novel, memory before, what the server sends: five labels all the time
    assert algorithm.calls == [(7 + step, client, True, step - 1, 5) for step in (1, 2, 3) for client in (0, 1)]


def test_newcomers_begin_with_the_memory_of_a_client_that_never_trained(novel_ctx):
    algorithm = Toy()

    novel(Standing(algorithm, right(5), ClientStore(lambda client: right(10 * client)), novel_ctx))

    first_step = [(client, memory) for round_, client, _, memory, _ in algorithm.calls if round_ == 8]
    assert first_step == [(0, 0), (1, 10)]


def test_newcomers_change_neither_the_server_nor_the_members(novel_ctx):
    server, memories = right(5), no_memories()
    memories.put(2, right(7), 7)

    novel(Standing(Toy(), server, memories, novel_ctx))

    assert server == right(5)
    assert [memories[client]["right"].item() for client in range(4)] == [0, 0, 7, 0]
    assert len(memories) == 1


def test_no_member_trains_on_with_the_newcomers(novel_ctx):
    algorithm = Toy()

    novel(Standing(algorithm, right(5), no_memories(), novel_ctx))

    assert {client for _, client, *_ in algorithm.calls} == {0, 1}
    assert {client for _, client, _ in algorithm.asked} == {0, 1}


def test_a_newcomer_gets_its_download_as_it_travels(novel_ctx):
    seen = []

    class Doubled(Toy):
        def update(self, down, memory, data, ctx):
            seen.append(down["right"].dtype)
            return super().update(down, memory, data, ctx)

    novel(Standing(Doubled(), {"right": torch.tensor(5.0, dtype=torch.float64)}, no_memories(), novel_ctx))

    assert set(seen) == {torch.float32}


def test_without_newcomers_or_novel_rounds_nobody_trains_on(task_of):
    algorithm = Toy()

    assert novel(Standing(algorithm, right(5), no_memories(), task_of(novel_rounds=3))) == []
    assert novel(Standing(algorithm, right(5), no_memories(), task_of(newcomers=2))) == []
    assert algorithm.calls == []


def test_a_method_without_personal_models_has_no_newcomers_steps(novel_ctx):
    algorithm = Toy()
    algorithm.personal_model = lambda *_: None

    assert novel(Standing(algorithm, right(5), no_memories(), novel_ctx)) == []


def test_every_newcomer_has_random_streams_of_its_own_in_every_step(novel_ctx):
    drawn = []

    class Drawing(Toy):
        def update(self, down, memory, data, ctx):
            drawn.append(torch.rand(1, generator=ctx.rng("noise")).item())
            return super().update(down, memory, data, ctx)

    novel(Standing(Drawing(), right(5), no_memories(), novel_ctx))

    assert len(set(drawn)) == len(drawn) == 6


def test_a_run_ends_with_the_steps_of_its_newcomers(toy_run):
    recorder = toy_run(newcomers=1, novel_rounds=2)

    steps = recorder.evaluations(stage="novel")
    assert [(e.round, e.step, e.metrics[None]["accuracy"]) for e in steps] == [
        (5, 1, pytest.approx(0.1)),
        (5, 2, pytest.approx(0.2)),
    ]
    assert set(recorder.kept) == {1, 2, 3, 4, 5}


# --- best and final state ---


def kinds(evaluations):
    return [(e.stage, e.view, e.predict, e.split) for e in evaluations]


def test_the_best_and_the_final_state_of_every_view_are_scored_by_mean_and_by_mc(task_of):
    found = closing(*standings(Toy(), task_of()))

    assert kinds(found) == [
        (stage, view, mode, "test") for view in ("gm", "pm") for stage in ("best", "final") for mode in ("mean", "mc")
    ]
    assert [e.round for e in found] == [2, 2, 7, 7, 4, 4, 7, 7]
    assert all(set(e.metrics) == {None, 0, 1, 2, 3} for e in found)


def test_a_view_without_a_best_state_is_not_scored(task_of):
    best, final = standings(Toy(), task_of())
    del best["pm"]

    assert {e.view for e in closing(best, final)} == {"gm"}


def test_point_methods_are_scored_by_mean_only(make_ctx, make_algorithm):
    ctx = make_ctx("fedavg")
    algorithm = make_algorithm("fedavg")
    standing = Standing(algorithm, algorithm.init_server(ctx), ClientStore(lambda client: {}), ctx)

    assert kinds(closing({"gm": standing}, standing)) == [
        ("best", "gm", "mean", "test"),
        ("final", "gm", "mean", "test"),
    ]


# --- other data ---


@pytest.fixture
def add_parts(monkeypatch):
    """Registers one-pixel images whose first `n_train` are official training data."""

    def add(name, pixels, labels, n_train, sizes=(1, 2)):
        x = np.array(pixels, dtype=np.uint8).reshape(-1, 1, 1, 1)
        arrays = Arrays(x, np.array(labels, dtype=np.int64), n_train)
        content = {
            "title": name,
            "shape": (1, 1, 1),
            "classes": max(2, max(labels) + 1),
            "full_scale": 1,
            "sizes": {"small": sizes},
            "embedded": True,
            "sha256": None,
            "read": classmethod(lambda cls, root: arrays),
        }
        made_up, known = type("MadeUp", (Dataset,), content), datasets.get
        monkeypatch.setattr(datasets, "get", lambda asked: made_up if asked == name else known(asked))

    return add


class Doubtful(Algorithm):
    """Says class 0 with probability 1 - v/200 and class 1 with v/200, for an image of value v <= 100."""

    title = "Doubtful"

    def init_server(self, ctx):
        return {}

    def personal_model(self, server, memory, data, ctx, epochs):
        return memory

    def predict(self, model, x, ctx, mode):
        doubt = x.flatten().double() / 200
        return torch.stack([1 - doubt, doubt], -1)


@pytest.fixture
def doubts(add_parts):
    """Two clients: client 0 has images of class 0, client 1 of class 1; the first image of each is for training.

    Test images are 10 and 30 for client 0, and 50 and 50 for client 1.
    """
    add_parts("home", [0, 10, 30, 0, 50, 50], [0, 0, 0, 1, 1, 1], n_train=6)
    # of which the official test part: 20 and 40 of class 0, 50 and 20 of class 1, 99 of a class that nobody has
    add_parts("abroad", [0, 0, 20, 50, 40, 20, 99], [0, 1, 0, 1, 0, 1, 2], n_train=2)
    return {"dataset": "home", "normalize": "none", "model": "logreg", "labels_per_client": 1, "clients": 2}


@pytest.fixture
def doubtful(make_ctx, doubts):
    """Final state of a method whose entropies are known, on a task with these settings."""

    def make(**settings):
        ctx = make_ctx(**doubts, **settings)
        return Standing(Doubtful(Params()), {}, ClientStore(lambda client: {}), ctx)

    return make


def split(evaluations, name, **wanted):
    found = [e for e in evaluations if e.split == name]
    return [e for e in found if all(getattr(e, key) == value for key, value in wanted.items())]


def closed(standing):
    return closing({"gm": standing, "pm": standing}, standing)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"test"}),
        ({"clean": "abroad"}, {"test", "clean"}),
        ({"ood": "abroad"}, {"test", "ood"}),
        ({"clean": "home", "ood": "abroad"}, {"test", "clean", "ood"}),
    ],
    ids=["neither", "clean", "foreign", "both"],
)
def test_other_data_is_scored_only_if_the_task_names_it(doubtful, settings, expected):
    found = closed(doubtful(**settings))

    assert {e.split for e in found} == expected


def test_clean_data_is_for_global_models_and_foreign_data_for_both_views(doubtful):
    found = closed(doubtful(clean="home", ood="abroad"))

    every = [(stage, mode) for stage in ("best", "final") for mode in ("mean", "mc")]
    assert sorted(kinds(split(found, "clean"))) == sorted((stage, "gm", mode, "clean") for stage, mode in every)
    assert sorted(kinds(split(found, "ood"))) == sorted(
        (stage, view, mode, "ood") for stage, mode in every for view in ("gm", "pm")
    )


def test_a_global_model_is_scored_on_the_training_part_of_the_clean_data(doubtful, add_parts):
    # the model says class 0 for everything: right for three of four; the official test image does not count
    add_parts("clean", [10, 10, 10, 10, 10], [0, 0, 1, 0, 1], n_train=4)

    (found,) = split(closed(doubtful(clean="clean")), "clean", stage="final", predict="mean")

    # p = 0.95 or 0.05: -(3 ln 0.95 + ln 0.05) / 4 = (3 * 0.051293 + 2.995732) / 4
    assert found.metrics[None]["accuracy"] == pytest.approx(0.75)
    assert found.metrics[None]["nll"] == pytest.approx(0.787403, abs=1e-6)
    assert found.metrics[None]["macro"] == pytest.approx(0.75)
    assert set(found.metrics) == {None}


def test_clean_data_without_a_test_part_is_scored_as_a_whole(doubtful, add_parts):
    add_parts("clean", [10, 10], [0, 1], n_train=2)

    (found,) = split(closed(doubtful(clean="clean")), "clean", stage="final", predict="mean")

    assert found.metrics[None]["accuracy"] == pytest.approx(0.5)
    assert sum(count for _, count, _, _ in found.reliability[None]) == 2


def test_a_method_without_a_global_model_is_not_scored_on_clean_data(doubtful):
    standing = doubtful(clean="abroad", ood="abroad")
    standing.algorithm.global_model = lambda *_: None

    found = closed(standing)

    assert split(found, "clean") == []
    assert {e.view for e in split(found, "ood")} == {"pm"}


def test_the_foreign_images_of_a_client_are_those_with_its_labels(doubtful):
    task = doubtful(ood="abroad").ctx.task

    assert [task.ood_data(client).x.flatten().tolist() for client in (0, 1)] == [[20, 40], [50, 20]]
    assert [task.ood_data(client).y.unique().tolist() for client in (0, 1)] == [[0], [1]]


def test_a_foreign_data_set_without_a_test_part_is_foreign_as_a_whole(doubtful, add_parts):
    add_parts("whole", [1, 2, 3], [0, 1, 0], n_train=3)

    task = doubtful(ood="whole").ctx.task

    assert [task.ood_data(client).x.flatten().tolist() for client in (0, 1)] == [[1, 3], [2]]


def test_a_data_set_may_be_clean_and_foreign_at_once(doubtful, add_parts):
    add_parts("whole", [1, 2, 3], [0, 1, 0], n_train=3)

    task = doubtful(clean="whole", ood="whole").ctx.task

    assert task.clean_data().x.flatten().tolist() == [1, 2, 3]
    assert [task.ood_data(client).x.flatten().tolist() for client in (0, 1)] == [[1, 3], [2]]


def test_auroc_is_the_share_of_pairs_in_which_the_foreign_image_is_the_more_doubtful(doubtful):
    (found,) = split(closed(doubtful(ood="abroad")), "ood", stage="final", view="pm", predict="mean")

    # client 0: own 10 and 30, foreign 20 and 40: three of four pairs.
    # client 1: own 50 and 50, foreign 50 and 20: two ties, which count half, of four pairs.
    # together, own 10, 30, 50, 50: 20 is above one, 40 above two, 50 above two and ties with two, 20 above one: 7/16
    assert {client: metrics["auroc"] for client, metrics in found.metrics.items()} == pytest.approx(
        {0: 0.75, 1: 0.25, None: 0.4375}
    )


def test_the_entropy_of_foreign_images_is_scored(doubtful):
    (found,) = split(closed(doubtful(ood="abroad")), "ood", stage="final", view="pm", predict="mean")

    # H(0.1) = 0.325083, H(0.2) = 0.500402, H(0.25) = 0.562335; means of (20, 40), of (50, 20), and of all four
    assert {client: metrics["entropy"] for client, metrics in found.metrics.items()} == pytest.approx(
        {0: 0.412743, 1: 0.443709, None: 0.428226}, abs=1e-6
    )


def test_foreign_images_have_no_accuracy(doubtful):
    (found,) = split(closed(doubtful(ood="abroad")), "ood", stage="final", view="gm", predict="mean")

    # their labels mean nothing to the model
    assert {key for metrics in found.metrics.values() for key in metrics} == {"entropy", "auroc"}
    assert found.reliability == {}


def test_entropy_histograms_count_foreign_images_in_50_bins_up_to_log_c(doubtful):
    (found,) = split(closed(doubtful(ood="abroad")), "ood", stage="final", view="pm", predict="mean")

    # H / ln 2 = 0.4690, 0.7219, 0.8113: bins 23, 36, 40 of 50
    assert found.entropy == {
        None: [(23, 2, 0, 0), (36, 1, 0, 0), (40, 1, 0, 0)],
        0: [(23, 1, 0, 0), (36, 1, 0, 0)],
        1: [(23, 1, 0, 0), (40, 1, 0, 0)],
    }


def test_entropy_histograms_of_own_images_stand_beside_them(doubtful):
    (found,) = split(closed(doubtful(ood="abroad")), "test", stage="final", view="pm", predict="mean")

    # 10, 30, 50: H(0.05) = 0.198515, H(0.15) = 0.422709, over ln 2: 0.2864, 0.6098, 0.8113
    assert found.entropy == {
        None: [(14, 1, 0, 0), (30, 1, 0, 0), (40, 2, 0, 0)],
        0: [(14, 1, 0, 0), (30, 1, 0, 0)],
        1: [(40, 2, 0, 0)],
    }


def test_entropy_histograms_sum_to_the_number_of_samples(make_job, recorder, tmp_path):
    # digits against their own likes: 125 test images of 5 labels per client; foreign: all images with these labels
    simulate(make_job("pfedbayes", rounds=1, ood="digits"), recorder, Surroundings(tmp_path))

    def samples(evaluation):
        return {client: sum(row[1] for row in rows) for client, rows in evaluation.entropy.items()}

    for stage in ("best", "final"):
        for evaluation in recorder.evaluations(stage=stage, split="test"):
            assert samples(evaluation) == {None: 250, 0: 125, 1: 125}
        for evaluation in recorder.evaluations(stage=stage, split="ood"):
            # labels 0-4 and 5-9 of the 1,797 images: 901 and 896
            assert samples(evaluation) == {None: 1797, 0: 901, 1: 896}
    assert len(recorder.evaluations(split="ood")) == 8


def test_without_foreign_data_no_entropy_histograms_are_kept(doubtful):
    assert all(e.entropy == {} for e in closed(doubtful(clean="abroad")))


def test_a_client_whose_labels_no_foreign_image_has_is_left_out(doubtful, add_parts):
    add_parts("half", [0, 20], [1, 0], n_train=1)

    (found,) = split(closed(doubtful(ood="half")), "ood", stage="final", view="pm", predict="mean")

    assert set(found.metrics) == set(found.entropy) == {None, 0}
    assert found.metrics[None]["auroc"] == pytest.approx(0.5)  # 20 against 10 and 30


def test_foreign_data_that_no_client_has_labels_of_is_not_scored(doubtful, add_parts):
    add_parts("strange", [0, 20], [0, 3], n_train=1)

    assert split(closed(doubtful(ood="strange")), "ood") == []


def test_a_client_without_test_images_has_no_auroc(doubtful):
    standing = doubtful(ood="abroad")
    standing.ctx.task.split.test[1] = standing.ctx.task.split.test[1][:0]

    (found,) = split(closed(standing), "ood", stage="final", view="pm", predict="mean")

    assert set(found.metrics) == {None, 0}
    assert found.metrics[None]["auroc"] == pytest.approx(0.75)


def test_newcomers_meet_no_foreign_data(doubtful):
    (found,) = split(closed(doubtful(ood="abroad", newcomers=1)), "ood", stage="final", view="pm", predict="mean")

    assert set(found.metrics) == {None, 1}


def test_mc_prediction_on_foreign_data_draws_the_clients_own_noise(doubtful, monkeypatch):
    seen = []

    def predict(self, model, x, ctx, mode):
        seen.append((ctx.client, mode))
        return torch.full((len(x), 2), 0.5)

    monkeypatch.setattr(Doubtful, "predict", predict)
    standing = doubtful(ood="abroad")

    standing.evaluate_ood("pm", "mc", "final")

    assert set(seen) == {(0, "mc"), (1, "mc")}
