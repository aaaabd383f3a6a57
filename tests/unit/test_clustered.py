"""Several server models: who belongs where, what is averaged, sent, scored and recorded."""

import math

import pytest
import torch

from fedbench.algorithm import Ctx, Upload, methods
from fedbench.clustered import AssignedByServer, ChosenByClients, summed_loss
from fedbench.evaluation import Standing
from fedbench.simulation import Surroundings, simulate, train_round
from fedbench.training import fine_tune

FedAvg = methods.get("fedavg")


class Chosen(ChosenByClients, FedAvg):
    title = "chosen"


class Assigned(AssignedByServer, FedAvg):
    title = "assigned"


def rows(*values):
    """Models of a network with 6 parameters, each constant."""
    return torch.tensor(values)[:, None].repeat(1, 6)


def upload(client, value, n=1, **more):
    return Upload(client, n, {"w": torch.full((6,), value), **more})


@pytest.fixture
def chosen():
    return Chosen(Chosen.Params())


@pytest.fixture
def assigned():
    return Assigned(Assigned.Params())


@pytest.fixture
def pair(add_dataset):
    """Settings of four clients with one black and one white pixel as images; to the last two, black is white."""
    pixels = torch.tensor([0, 1]).repeat(8).view(16, 1, 1, 1)
    add_dataset("pair", pixels, [0, 1] * 8, per_class=(1, 1), full_scale=1)
    settings = {"dataset": "pair", "normalize": "half", "model": "logreg", "labels_per_client": 2, "batch_size": 2}
    return {**settings, "clients": 4, "partition": "clusters", "reverse": "labels"}


# logits of a pixel x = -1 or 1: class 0 has -3 x, class 1 has 3 x; the other way round; undecided
RIGHT, WRONG, UNDECIDED = [-3.0, 3.0, 0.0, 0.0], [3.0, -3.0, 0.0, 0.0], [0.0] * 4


# --- the server ---


def test_every_cluster_is_averaged_by_itself_and_one_without_uploads_stays(make_ctx, chosen):
    server = {"w": rows(5.0, 6.0, 7.0)}
    sent = [(0, 1.0, 1, 0), (1, 9.0, 1, 2), (2, 3.0, 3, 0)]
    uploads = [upload(client, value, n, cluster=torch.tensor([k])) for client, value, n, k in sent]

    merged = chosen.aggregate(server, iter(uploads), make_ctx())

    # by samples: (1 * 1 + 3 * 3) / 4; nobody: 6; client 1 alone
    assert torch.equal(merged["w"], rows(2.5, 6.0, 9.0))
    assert torch.equal(server["w"], rows(5.0, 6.0, 7.0))


def test_what_else_the_server_knows_stays(make_ctx, assigned):
    server = {"w": rows(5.0, 6.0), "assigned": torch.tensor([1, 0]), "note": torch.tensor([3])}

    merged = assigned.aggregate(server, [upload(0, 2.0)], make_ctx())

    assert torch.equal(merged["w"], rows(5.0, 2.0))
    assert merged["assigned"] is server["assigned"]
    assert merged["note"] is server["note"]


def test_a_known_client_gets_the_model_of_its_cluster_and_no_other(make_ctx, assigned):
    server = {"w": rows(5.0, 6.0), "assigned": torch.tensor([1, 0], dtype=torch.int32)}

    downs = [assigned.download(server, make_ctx().at(client)) for client in (0, 1)]

    assert [list(down) for down in downs] == [["w"], ["w"]]
    assert [down["w"].tolist() for down in downs] == [[6.0] * 6, [5.0] * 6]


@pytest.mark.parametrize(
    ("known", "cluster"), [([-1, 2, 1, 2], 2), ([-1, 1, 0, -1], 0), ([-1, -1, -1, -1], 0)], ids=["most", "tie", "none"]
)
def test_an_unknown_client_belongs_to_the_largest_cluster(make_ctx, assigned, known, cluster):
    server = {"w": rows(5.0, 6.0, 7.0), "assigned": torch.tensor(known, dtype=torch.int32)}

    assert assigned.cluster_of(server, None, make_ctx(client=0)) == cluster
    assert assigned.download(server, make_ctx(client=0))["w"].tolist() == [5.0 + cluster] * 6


# --- the choice ---


def test_a_client_chooses_the_smallest_loss_on_its_training_data(make_ctx, chosen, pair):
    ctx = make_ctx(**pair)
    server = {"w": torch.tensor([UNDECIDED, WRONG, RIGHT])}

    found = [chosen.cluster_of(server, ctx.task.train_data(client), ctx.at(client)) for client in range(4)]

    assert found == [2, 2, 1, 1]


def test_of_equal_models_the_first_is_chosen(make_ctx, chosen, pair):
    ctx = make_ctx(client=0, **pair)

    assert chosen.cluster_of({"w": torch.tensor([WRONG, RIGHT, RIGHT])}, ctx.task.train_data(0), ctx) == 1


def test_where_there_is_one_model_nothing_is_compared(make_ctx, chosen, pair, monkeypatch):
    ctx = make_ctx(client=0, **pair)
    monkeypatch.setattr(chosen, "losses", None)

    assert chosen.cluster_of({"w": torch.tensor([RIGHT])}, ctx.task.train_data(0), ctx) == 0


def test_the_loss_is_the_summed_cross_entropy(make_ctx, pair):
    ctx = make_ctx(**pair)
    data = ctx.task.train_data(0)

    undecided, both = (
        summed_loss([torch.tensor(w) for w in vectors], data.chunks(2), ctx)
        for vectors in ([UNDECIDED], [UNDECIDED, WRONG])
    )

    # two images; undecided: log 2 each; wrong: logits -3 and 3, log(1 + e^6) each
    assert undecided.item() == pytest.approx(2 * math.log(2))
    assert both.item() == pytest.approx(2 * math.log(2) + 2 * math.log(1 + math.exp(6)))
    assert undecided.dtype == torch.float64


def test_a_client_trains_what_it_chose_and_says_so(make_ctx, chosen, pair):
    ctx = make_ctx(client=3, **pair)
    data, server = ctx.task.train_data(3), {"w": torch.tensor([RIGHT, WRONG])}

    message, _ = chosen.update(server, {}, data, ctx)
    plain, _ = FedAvg(FedAvg.Params()).update({"w": torch.tensor(WRONG)}, {}, data, ctx)

    assert message["cluster"].tolist() == [1]
    assert message["cluster"].dtype == torch.int32
    assert torch.equal(message["w"], plain["w"])


# --- what is scored ---


def test_members_of_a_cluster_share_one_global_model(make_ctx, chosen, pair):
    ctx, server = make_ctx(**pair), {"w": torch.tensor([RIGHT, WRONG])}

    models = [chosen.global_model(server, {}, ctx.task.train_data(c), ctx.at(c)) for c in range(4)]
    later = chosen.global_model(dict(server), {}, ctx.task.train_data(0), ctx.at(0))

    assert models[0] is models[1]
    assert models[2] is models[3]
    assert [models[c]["w"].tolist() for c in (0, 2)] == [RIGHT, WRONG]
    assert later is not models[0]


def test_a_cluster_is_scored_in_one_pass(make_ctx, chosen, pair, begin_training, monkeypatch):
    ctx = make_ctx(**pair)
    seen, predict = [], chosen.predict
    monkeypatch.setattr(chosen, "predict", lambda model, x, *rest: seen.append(len(x)) or predict(model, x, *rest))
    progress = begin_training(chosen, ctx, {"w": torch.tensor([RIGHT, WRONG])})

    Standing(chosen, progress.server, progress.clients, ctx).evaluate("gm", "mean")

    assert seen == [4, 4]  # two clients with two test images each


def test_every_evaluation_records_who_belongs_where(make_ctx, chosen, pair, begin_training):
    ctx = make_ctx(**{**pair, "clients": 3})  # the first half is the larger one
    progress = begin_training(chosen, ctx, {"w": torch.tensor([UNDECIDED, WRONG, RIGHT])})

    found = Standing(chosen, progress.server, progress.clients, ctx).evaluate("gm", "mean", per_client=True)

    shares, each = found.metrics[None], [found.metrics[client] for client in range(3)]
    assert [shares[f"in_cluster_{k}"] for k in range(3)] == pytest.approx([0, 1 / 3, 2 / 3])
    assert [[of[f"in_cluster_{k}"] for k in range(3)] for of in each] == [[0, 0, 1], [0, 0, 1], [0, 1, 0]]


def test_the_personal_model_is_the_clusters_fine_tuned(make_ctx, chosen, pair):
    ctx = make_ctx(client=2, **pair)
    data, server = ctx.task.train_data(2), {"w": torch.tensor([RIGHT, WRONG])}

    adapted = chosen.personal_model(server, {}, data, ctx, 2)

    assert chosen.personal_model(server, {}, data, ctx, None) is None
    assert torch.equal(adapted["w"], fine_tune(torch.tensor(WRONG), data, ctx, 2))
    assert chosen.describe(adapted, ctx) == {"in_cluster_0": 0.0, "in_cluster_1": 1.0}


# --- known halves are found ---

HALVES = {"clients": 5, "size": "medium", "partition": "clusters", "labels_per_client": 10, "tau": 2, "batch_size": 10}
"""All ten digits for everybody; the last two of five clients see them inverted, or with labels 9 - y."""


@pytest.mark.parametrize("reverse", ["invert", "labels"])
@pytest.mark.parametrize(
    ("method", "params", "lr"),
    [("ifca", {}, 0.1), ("fesem", {}, 0.1), ("fedcfl", {"split_after": 5}, 0.1), ("cfedbayes", {}, 0.001)],
)
def test_two_kinds_of_clients_are_told_apart(make_ctx, make_algorithm, begin_training, method, params, lr, reverse):
    ctx = make_ctx(method, round_=0, lr=lr, reverse=reverse, seed=1, **HALVES)
    algorithm = make_algorithm(method, **params)
    progress = begin_training(algorithm, ctx)

    for number in range(1, 11):
        now = Ctx(ctx.task, ctx.protocol, ctx.seed, number)
        train_round(algorithm, progress, now)
    found = [algorithm.cluster_of(progress.server, ctx.task.train_data(c), now.at(c)) for c in range(5)]

    first = found[0]
    assert found == [first, first, first, 1 - first, 1 - first]


@pytest.mark.parametrize("method", ["ifca", "fesem", "fedcfl", "cfedbayes", "fedhb_preset"])
def test_the_shares_of_the_clusters_are_recorded_with_every_view(make_job, recorder, tmp_path, method):
    job = make_job(method, clients=4, rounds=3, tau=1, eval_every=2, adapt_epochs=[1])

    simulate(job, recorder, Surroundings(tmp_path))

    found = recorder.evaluations()
    assert {(e.round, e.stage, e.view) for e in found} >= {(2, "train", "gm"), (3, "final", "gm"), (3, "adapt", "pm")}
    for evaluation in found:
        shares = [value for name, value in evaluation.metrics[None].items() if name.startswith("in_cluster_")]
        assert len(shares) == (1 if method == "fedcfl" else 2)  # it has not split yet
        assert sum(shares) == pytest.approx(1)
