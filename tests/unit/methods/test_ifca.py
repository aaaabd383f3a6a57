"""IFCA: a round by hand, that one cluster is FedAvg, clusters near the truth, and several random beginnings."""

import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Ctx, Upload
from fedbench.simulation import train_round
from fedbench.wire import on_wire, size_of

RIGHT = [3.0, -3.0, -3.0, 3.0, 0.0, 0.0]
"""Weights of a logistic regression that knows the labels of `tiny`; their negative takes every image for the other."""
WRONG = [-value for value in RIGHT]
DIGITS = 64 * 100 + 100 + 100 * 10 + 10
"""Parameters of dnn100 on digits."""


def models(*rows):
    return {"w": torch.tensor(rows)}


def choices(algorithm, server, ctx):
    return [algorithm.cluster_of(server, ctx.task.train_data(c), ctx.at(c)) for c in range(ctx.task.clients)]


# --- a golden round ---


def test_one_round_by_hand(make_ctx, make_algorithm, tiny):
    # one SGD step of rate 0.1 on one batch of both samples
    ctx = make_ctx("ifca", lr=0.1, **tiny)
    algorithm, server = make_algorithm("ifca"), models(WRONG, [0.0] * 6)

    sent = [algorithm.update(server, {}, ctx.task.train_data(c), ctx.at(c))[0] for c in (0, 1)]
    merged = algorithm.aggregate(server, [Upload(c, 1 + c, message) for c, message in enumerate(sent)], ctx)

    # The first model is wrong on every image, the second undecided (log 2 each): both clients take the second.
    assert [message["cluster"].tolist() for message in sent] == [[1], [1]]
    # At 0 both classes have probability 1/2: the gradient is the mean over two samples of (1/2 - is class 0) x for
    # class 0, and the negative for class 1. Client 0 has (1, 0) of class 0 and (0, 2) of class 1: (-1/4, 1/2);
    # client 1 has (2, 0) and (0, 1): (-1/2, 1/4). The biases cancel.
    assert sent[0]["w"].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0, 0])
    assert sent[1]["w"].tolist() == pytest.approx([0.05, -0.025, -0.05, 0.025, 0, 0])
    # the mean of both, whatever their sizes; the model that nobody chose stays
    assert merged["w"][1].tolist() == pytest.approx([0.0375, -0.0375, -0.0375, 0.0375, 0, 0])
    assert merged["w"][0].tolist() == WRONG


# --- special case ---


@pytest.mark.parametrize(
    "protocol", [{}, {"weighting": "samples", "beta": 0.5, "optim_state": "persistent", "momentum": 0.9}]
)
def test_one_cluster_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, protocol):
    ctx = make_ctx("ifca", round_=0, clients=4, f=0.5, tau=2, **protocol)
    ifca, fedavg = make_algorithm("ifca", n_clusters=1), make_algorithm("fedavg")

    clustered, plain = run_rounds(ifca, ctx, rounds=4), run_rounds(fedavg, ctx, rounds=4)

    assert torch.equal(clustered.server["w"][0], plain.server["w"])
    for client in range(4):
        where, data = ctx.at(client), ctx.task.train_data(client)
        one, other = (
            algorithm.personal_model(progress.server, progress.clients[client], data, where, 1)
            for algorithm, progress in ((ifca, clustered), (fedavg, plain))
        )
        assert torch.equal(one["w"], other["w"])


# --- clusters ---


def test_near_the_truth_the_assignment_is_right_after_one_round(make_ctx, make_algorithm, run_rounds, tiny):
    # the second client has its labels exchanged
    ctx = make_ctx("ifca", round_=0, lr=0.1, **tiny, partition="clusters", reverse="labels")
    near = models(WRONG, RIGHT)
    near["w"] += 0.5 * torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    algorithm = make_algorithm("ifca")

    server = run_rounds(algorithm, ctx, server=near).server

    assert choices(algorithm, near, ctx) == [1, 0]
    assert choices(algorithm, server, ctx) == [1, 0]
    # each client moved its own model on: the loss of the chosen ones falls
    for client, cluster in ((0, 1), (1, 0)):
        data, where = ctx.task.train_data(client), ctx.at(client)
        assert algorithm.losses(server, data, where)[cluster] < algorithm.losses(near, data, where)[cluster]


def test_the_first_model_is_the_common_one_and_the_others_are_drawn_anew(make_ctx, make_algorithm):
    ctx = make_ctx("ifca", round_=0)

    server = make_algorithm("ifca", n_clusters=3).init_server(ctx)["w"]

    assert torch.equal(server[0], ctx.task.initial)
    # 7,510 coordinates: the correlation of independent draws has a standard error of 0.012
    assert torch.corrcoef(server).triu(1).abs().max() < 0.05
    # uniform in +-1/8 or +-1/10 by layer, as the common one is
    assert server.std(1).tolist() == pytest.approx([server[0].std().item()] * 3, rel=0.02)


def test_a_client_gets_all_models_and_sends_one_with_its_number(make_ctx, make_algorithm):
    ctx = make_ctx("ifca", client=0)
    algorithm = make_algorithm("ifca", n_clusters=3)
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, kept = algorithm.update(down, {}, ctx.task.train_data(0), ctx)

    assert size_of(on_wire(down)) == 4 * 3 * DIGITS
    assert size_of(on_wire(up)) == 4 * DIGITS + 4
    assert kept == {}


# --- several beginnings ---


def test_all_beginnings_are_tried_at_first_and_one_is_left(make_ctx, make_algorithm, begin_training):
    ctx = make_ctx("ifca", round_=0, clients=2)
    algorithm = make_algorithm("ifca", n_clusters=2, restarts=3, restart_rounds=2)
    progress, traffic, sizes = begin_training(algorithm, ctx), [], []

    for number in (1, 2, 3):
        cost = train_round(algorithm, progress, Ctx(ctx.task, ctx.protocol, ctx.seed, number))
        traffic.append((cost.bytes_down, cost.bytes_up))
        sizes.append(len(progress.server["w"]))

    # two clients: 3 * 2 models down; 3 models, clusters and losses up; then 2 models down, one and its cluster up
    trial = 2 * 4 * 6 * DIGITS, 2 * 4 * 3 * (DIGITS + 2)
    assert traffic == [trial, trial, (2 * 4 * 2 * DIGITS, 2 * 4 * (DIGITS + 1))]
    assert sizes == [6, 2, 2]


def test_beginnings_are_aggregated_apart_and_sorted_by_the_loss_that_clients_report(make_ctx, make_algorithm):
    algorithm = make_algorithm("ifca", restarts=3, restart_rounds=5)
    server = {"w": torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]])}

    def upload(client, values, clusters, losses):
        parts = torch.tensor(values)[:, None], torch.tensor(clusters, dtype=torch.int32)[:, None], torch.tensor(losses)
        return Upload(client, 1, dict(zip(("w", "cluster", "loss"), parts, strict=True)))

    uploads = [
        upload(0, [10.0, 20.0, 30.0], [0, 1, 1], [3.0, 1.0, 1.0]),
        upload(1, [12.0, 22.0, 32.0], [0, 1, 0], [0.5, 2.0, 1.0]),
    ]
    early, late = (algorithm.aggregate(server, uploads, make_ctx("ifca", round_=number)) for number in (4, 5))

    # mean losses 1.75, 1.5, 1.0: the third beginning, in which each model was chosen once; the second, in which both
    # chose the second model, (20 + 22) / 2; the first, in which both chose the first one, (10 + 12) / 2
    assert early["w"].flatten().tolist() == [32.0, 30.0, 2.0, 21.0, 11.0, 1.0]
    assert late["w"].flatten().tolist() == [32.0, 30.0]


def test_reported_losses_are_the_means_of_the_chosen_models_before_training(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("ifca", client=0, lr=0.1, **tiny)
    down = models(WRONG, [0.0] * 6, RIGHT, WRONG)

    message, kept = make_algorithm("ifca", restarts=2).update(down, {}, ctx.task.train_data(0), ctx)

    assert message["cluster"].flatten().tolist() == [1, 0]
    # undecided: log 2; right: logits +-3 of (1, 0) and +-6 of (0, 2): (log(1 + e^-6) + log(1 + e^-12)) / 2
    assert message["loss"].tolist() == pytest.approx([0.693147, 0.001241], abs=1e-6)
    assert message["w"][0].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0, 0])  # as in the golden round
    assert kept == {}


def test_what_is_scored_is_the_best_beginning_so_far(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("ifca", client=0, **tiny)
    algorithm, data = make_algorithm("ifca", restarts=2), ctx.task.train_data(0)

    model = algorithm.global_model(models(WRONG, [0.0] * 6, RIGHT, WRONG), {}, data, ctx)

    assert model["w"].tolist() == [0.0] * 6
    assert algorithm.describe(model, ctx) == {"in_cluster_0": 0.0, "in_cluster_1": 1.0}


def test_a_collapsed_beginning_gives_way_to_one_that_tells_the_clients_apart(
    make_ctx, make_algorithm, run_rounds, tiny
):
    ctx = make_ctx("ifca", round_=0, lr=0.1, **tiny, partition="clusters", reverse="labels")
    far = [0.0, 0.0, 0.0, 0.0, 100.0, -100.0]  # sure that all images are of class 0: nobody ever chooses it
    start = models([0.0] * 6, far, RIGHT, WRONG)

    collapsed = run_rounds(make_algorithm("ifca"), ctx, rounds=3, server={"w": start["w"][:2]}).server
    rescued = run_rounds(make_algorithm("ifca", restarts=2, restart_rounds=2), ctx, rounds=3, server=start).server

    assert choices(make_algorithm("ifca"), collapsed, ctx) == [0, 0]
    assert choices(make_algorithm("ifca"), rescued, ctx) == [0, 1]


def test_optimisers_are_remembered_once_one_beginning_is_left(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("ifca", round_=0, momentum=0.9, optim_state="persistent")
    algorithm = make_algorithm("ifca", restarts=2, restart_rounds=2)

    trying, decided = (run_rounds(algorithm, ctx, rounds=rounds).clients[0] for rounds in (2, 3))

    assert trying == {}
    assert list(decided) == ["optimizer.momentum_buffer"]


@pytest.mark.parametrize("params", [{"n_clusters": 0}, {"restarts": 0}, {"restart_rounds": 0}, {"clusters": 2}])
def test_bad_values_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("ifca", **params)
