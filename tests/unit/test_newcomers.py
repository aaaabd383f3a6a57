"""Clients that never train: who they are, and that training does not know of them."""

import pytest
import torch

from fedbench.algorithm import Algorithm, Ctx, Params
from fedbench.errors import FedbenchError
from fedbench.simulation import Surroundings, simulate
from fedbench.task import Task
from fedbench.training import average


@pytest.fixture
def newcomers(make_ctx):
    """The newcomers of a task of ten clients."""

    def make(wanted, method="fedavg", **settings):
        return make_ctx(method, **{"clients": 10, "newcomers": wanted, **settings}).task.newcomers

    return make


# --- who they are ---


def test_without_being_asked_there_are_none(make_ctx):
    task = make_ctx(clients=4).task

    assert task.newcomers == ()
    assert task.members == (0, 1, 2, 3)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_number_means_the_first_so_many(newcomers, count):
    assert newcomers(count) == tuple(range(count))


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 1), (0.3, 3), (0.8, 8), (0.26, 3), (0.24, 2)])
def test_a_fraction_means_as_many_of_the_clients_as_is_nearest(newcomers, fraction, count):
    found = newcomers(fraction)

    assert len(set(found)) == len(found) == count
    assert list(found) == sorted(found)
    assert set(found) <= set(range(10))


def test_a_fraction_is_drawn_by_the_seed(newcomers):
    drawn = [newcomers(0.3, seed=seed) for seed in range(20)]

    assert newcomers(0.3, seed=7) == drawn[7]
    assert len(set(drawn)) > 10  # of 120 possible ones
    assert {client for each in drawn for client in each} == set(range(10))


def test_a_number_does_not_depend_on_the_seed(newcomers):
    assert {newcomers(3, seed=seed) for seed in range(5)} == {(0, 1, 2)}


def test_every_method_of_a_comparison_has_the_same_newcomers(newcomers):
    of_fedavg = newcomers(0.3, "fedavg", seed=3)

    assert newcomers(0.3, "pfedbayes", seed=3) == of_fedavg
    assert newcomers(0.3, "local", seed=3, lr=0.5, rounds=7) == of_fedavg


def test_who_is_no_newcomer_is_a_member(make_ctx):
    task = make_ctx(clients=10, newcomers=0.4).task

    assert sorted((*task.members, *task.newcomers)) == list(range(10))
    assert list(task.members) == sorted(task.members)


def test_newcomers_do_not_change_who_has_which_samples(make_ctx):
    settings = {"clients": 4, "labels": "random"}

    without, with_newcomers = make_ctx(**settings).task, make_ctx(**settings, newcomers=2).task

    assert with_newcomers.split.sha256() == without.split.sha256()
    assert with_newcomers.sizes == without.sizes
    assert with_newcomers.clients == 4


@pytest.mark.parametrize(("clients", "wanted"), [(2, 2), (4, 5), (1, 1), (2, 0.9), (10, 0.96)])
def test_too_many_newcomers_are_a_mistake(make_ctx, clients, wanted):
    with pytest.raises(FedbenchError, match="newcomers"):
        make_ctx(clients=clients, newcomers=wanted)


@pytest.mark.parametrize("wanted", [-1, -0.2, 2.5])
def test_a_number_of_newcomers_that_means_nothing_is_a_mistake(make_ctx, wanted):
    with pytest.raises(FedbenchError, match="newcomers"):
        make_ctx(clients=4, newcomers=wanted)


# --- training does not know of them ---


class Witness(Algorithm):
    """Notes which clients it meets in which hook."""

    title = "Witness"
    met: dict

    def init_server(self, ctx):
        return {"w": torch.zeros(2)}

    def init_client(self, ctx):
        return {"own": torch.zeros(1)}

    def poll(self, down, memory, data, ctx):
        self.met.setdefault("poll", set()).add(ctx.client)
        return {"answer": torch.zeros(1)}

    def select(self, server, polls, ctx):
        self.met.setdefault("answers", set()).update(polls)
        return super().select(server, polls, ctx)

    def download(self, server, ctx):
        self.met.setdefault("download", set()).add(ctx.client)
        return server

    def update(self, down, memory, data, ctx):
        self.met.setdefault("update", set()).add(ctx.client)
        return down, memory

    def aggregate(self, server, uploads, ctx):
        uploads = list(uploads)
        self.met.setdefault("upload", set()).update(upload.client for upload in uploads)
        return average(server, uploads, ctx)

    def personal_model(self, server, memory, data, ctx, epochs):
        self.met.setdefault("personal", set()).add(ctx.client)
        return memory

    def global_model(self, server, memory, data, ctx):
        self.met.setdefault("global", set()).add(ctx.client)
        return server

    def predict(self, model, x, ctx, mode):
        self.met.setdefault("samples", []).append(len(x))
        return torch.full((len(x), 10), 0.1)


@pytest.fixture
def witnessed(make_job, add_method, recorder, tmp_path):
    """Whom a run of ten clients on digits meets, and what it records."""

    def run(**settings):
        cls = type("Noting", (Witness,), {"met": {}})
        add_method("witness", cls)
        job = make_job("witness", **{"clients": 10, "rounds": 8, "eval_every": 1, **settings})
        simulate(job, recorder, Surroundings(tmp_path))
        return cls.met, recorder

    return run


@pytest.mark.parametrize("settings", [{}, {"train_all": True}, {"f": 0.5}], ids=["all", "train_all", "half"])
def test_training_meets_no_newcomer(witnessed, settings):
    met, _ = witnessed(newcomers=3, **settings)

    # eight rounds with at least three of the seven: everyone is drawn at least once
    members = set(range(3, 10))
    for hook in ("poll", "answers", "download", "update", "upload", "personal", "global"):
        assert met[hook] == members, hook


def test_training_meets_no_newcomer_that_was_drawn_at_random(witnessed, make_ctx):
    members = set(make_ctx(clients=10, newcomers=0.4).task.members)

    met, _ = witnessed(newcomers=0.4)

    assert met["update"] == met["personal"] == members


def test_evaluations_score_members_only(witnessed):
    met, recorder = witnessed(newcomers=3)

    for evaluation in recorder.evaluations(stage="final"):
        assert set(evaluation.metrics) == {None, *range(3, 10)}
    # digits, small: 125 test images each
    assert max(met["samples"]) == 7 * 125
    for evaluation in recorder.evaluations(stage="train"):
        assert sum(count for _, count, _, _ in evaluation.reliability[None]) == 7 * 125


def test_newcomers_cost_no_traffic(witnessed):
    _, recorder = witnessed(newcomers=3, rounds=1)

    # 2 numbers down to 7 members; up: an answer of 1 and an upload of 2 each
    assert recorder.traffic() == [(7 * 8, 7 * (4 + 8))]


def test_a_trained_model_does_not_depend_on_the_newcomers_data(make_job, new_recorder, tmp_path, monkeypatch):
    one, other = new_recorder(), new_recorder()
    job = make_job("fedavg", clients=4, newcomers=2, rounds=3, lr=0.1)
    simulate(job, one, Surroundings(tmp_path / "one"))
    original = Task.__init__

    def without_their_data(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for client in self.newcomers:
            self.split.train[client] = self.split.train[client][:1]

    monkeypatch.setattr(Task, "__init__", without_their_data)
    simulate(job, other, Surroundings(tmp_path / "other"))

    assert one.evaluations() == other.evaluations()


@pytest.mark.parametrize(
    ("newcomers", "f", "m"),
    [
        (3, 1.0, 7),
        (3, 0.5, 3),  # floor(0.5 * 7), where 0.5 * 10 would be 5
        (3, 0.1, 1),  # floor(0.7) = 0: at least one
        (8, 0.1, 1),
        (5, 0.6, 3),
        (0.9, 1.0, 1),
        (0, 0.29, 2),  # floor(2.9)
    ],
)
def test_a_cohort_is_a_fraction_of_the_members(make_ctx, newcomers, f, m):
    ctx = make_ctx(clients=10, newcomers=newcomers, f=f)
    algorithm = Algorithm(Params())

    for round_ in range(1, 11):
        cohort = algorithm.select({}, {}, Ctx(ctx.task, ctx.protocol, ctx.seed, round_))
        assert len(cohort.report) == m
        assert set(cohort.report) <= set(ctx.task.members)
        assert cohort.train == cohort.report


def test_with_train_all_every_member_trains_and_a_fraction_reports(make_ctx):
    ctx = make_ctx(clients=10, newcomers=3, f=0.5, train_all=True)

    cohort = Algorithm(Params()).select({}, {}, ctx)

    assert cohort.train == (3, 4, 5, 6, 7, 8, 9)
    assert len(cohort.report) == 3
