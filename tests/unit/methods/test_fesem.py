"""FeSEM: k-means over models by hand, its fixed points, and that one centre is FedAvg."""

import warnings

import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Upload
from fedbench.errors import FedbenchError
from fedbench.wire import on_wire, size_of


def uploads(values, n=None):
    """One model of a single parameter per client."""
    return [Upload(client, (n or {}).get(client, 1), {"w": torch.tensor([value])}) for client, value in values.items()]


def state(centres, assigned):
    return {"w": torch.tensor(centres)[:, None], "assigned": torch.tensor(assigned, dtype=torch.int32)}


def centres_of(server):
    return server["w"].flatten().tolist()


@pytest.fixture
def ctx(make_ctx):
    return make_ctx("fesem", clients=4)


# --- golden rounds ---


@pytest.mark.parametrize("seed", range(4))
def test_the_first_uploads_are_clustered_by_k_means(make_ctx, make_algorithm, seed):
    sent = uploads({0: 10.0, 1: 1.0, 2: 12.0, 3: 3.0}, n={0: 5})

    server = make_algorithm("fesem").aggregate(
        state([5.0, 5.0], [-1] * 4), iter(sent), make_ctx("fesem", clients=4, seed=seed)
    )

    # uniform means, (10 + 12) / 2 and (1 + 3) / 2; clusters are numbered in the order of their first clients
    assert server["assigned"].tolist() == [0, 1, 0, 1]
    assert centres_of(server) == [11.0, 2.0]


def test_later_every_round_is_one_step_of_k_means(ctx, make_algorithm):
    server = make_algorithm("fesem").aggregate(
        state([0.0, 10.0], [0, 0, 1, 1]), iter(uploads({0: 1.0, 1: 6.0, 2: 9.0, 3: 13.0})), ctx
    )

    # 6 is nearer to 10 than to 0; centres 1 / 1 and (6 + 9 + 13) / 3, to which nobody moves in the same round
    assert server["assigned"].tolist() == [0, 1, 1, 1]
    assert centres_of(server) == pytest.approx([1.0, 28 / 3])


def test_a_whole_round_trains_from_the_own_centre(make_ctx, make_algorithm, run_rounds, tiny, quadratic):
    quadratic(1.0, 8.0)  # one step of rate 0.25 goes a quarter of the way to 8
    ctx = make_ctx("fesem", round_=0, lr=0.25, **tiny)
    start = {"w": torch.tensor([[0.0], [4.0]]).repeat(1, 6), "assigned": torch.tensor([0, 1], dtype=torch.int32)}

    server = run_rounds(make_algorithm("fesem"), ctx, server=start).server

    # client 0: 0 -> 2, as far from 0 as from 4, so it stays in the first; client 1: 4 -> 5
    assert server["w"].tolist() == [[2.0] * 6, [5.0] * 6]
    assert server["assigned"].tolist() == [0, 1]


# --- special cases ---


@pytest.mark.parametrize("protocol", [{}, {"weighting": "samples", "beta": 0.5}])
def test_one_centre_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, protocol):
    ctx = make_ctx("fesem", round_=0, clients=4, f=0.5, tau=2, **protocol)
    fesem, fedavg = make_algorithm("fesem", n_clusters=1), make_algorithm("fedavg")

    clustered, plain = run_rounds(fesem, ctx, rounds=4), run_rounds(fedavg, ctx, rounds=4)

    assert torch.equal(clustered.server["w"][0], plain.server["w"])
    for client in range(4):
        where, data = ctx.at(client), ctx.task.train_data(client)
        one, other = (
            algorithm.personal_model(progress.server, {}, data, where, 1)
            for algorithm, progress in ((fesem, clustered), (fedavg, plain))
        )
        assert torch.equal(one["w"], other["w"])


def test_means_of_their_members_are_a_fixed_point(ctx, make_algorithm):
    algorithm, sent = make_algorithm("fesem"), uploads({0: -1.0, 1: 1.0, 2: 9.0, 3: 12.0})
    first = algorithm.aggregate(state([5.0, 5.0], [-1] * 4), sent, ctx)

    second = algorithm.aggregate(first, sent, ctx)

    assert centres_of(first) == [0.0, 10.5]
    assert torch.equal(second["w"], first["w"])
    assert torch.equal(second["assigned"], first["assigned"])


def test_after_training_centres_are_the_means_of_their_members(make_ctx, make_algorithm, begin_training):
    ctx = make_ctx("fesem", clients=4, tau=1)
    algorithm = make_algorithm("fesem")
    server = begin_training(algorithm, ctx).server
    for _ in range(3):
        sent = [
            Upload(
                c, 25, algorithm.update(algorithm.download(server, ctx.at(c)), {}, ctx.task.train_data(c), ctx.at(c))[0]
            )
            for c in range(4)
        ]
        server = algorithm.aggregate(server, sent, ctx)

    members = server["assigned"].tolist()
    assert set(members) == {0, 1}
    for cluster in (0, 1):
        own = torch.stack([upload.message["w"] for upload in sent if members[upload.client] == cluster])
        torch.testing.assert_close(server["w"][cluster], own.mean(0))


# --- who belongs where ---


def test_before_the_first_round_everybody_has_the_common_initial_model(make_ctx, make_algorithm):
    ctx = make_ctx("fesem", round_=0)
    algorithm = make_algorithm("fesem")
    server = algorithm.init_server(ctx)

    assert all(torch.equal(algorithm.download(server, ctx.at(c))["w"], ctx.task.initial) for c in (0, 1))
    assert server["assigned"].tolist() == [-1, -1]
    assert server["assigned"].dtype == torch.int32


def test_who_does_not_report_stays_and_does_not_count(ctx, make_algorithm):
    server = make_algorithm("fesem").aggregate(state([0.0, 10.0], [0, 0, 1, 1]), uploads({1: 2.0}), ctx)

    # the centre is client 1's model alone; the other one keeps its centre
    assert server["assigned"].tolist() == [0, 0, 1, 1]
    assert centres_of(server) == [2.0, 10.0]


def test_who_comes_later_moves_to_the_nearest_centre_at_once(ctx, make_algorithm):
    server = make_algorithm("fesem").aggregate(state([0.0, 10.0], [0, -1, 0, -1]), uploads({1: 7.0}), ctx)

    assert server["assigned"].tolist() == [0, 1, 0, -1]
    assert centres_of(server) == [0.0, 7.0]


def test_who_never_took_part_has_the_centre_of_the_largest_cluster(ctx, make_algorithm):
    algorithm = make_algorithm("fesem")
    server = algorithm.aggregate(state([5.0, 5.0], [-1] * 4), uploads({0: 0.0, 2: 10.0, 3: 12.0}), ctx)

    assert server["assigned"].tolist() == [0, -1, 1, 1]
    assert algorithm.download(server, ctx.at(1))["w"].tolist() == [11.0]
    assert algorithm.global_model(server, {}, ctx.task.train_data(1), ctx.at(1))["w"].tolist() == [11.0]


def test_centres_for_which_there_are_no_models_stay(ctx, make_algorithm):
    few = make_algorithm("fesem", n_clusters=3).aggregate(state([5.0] * 3, [-1] * 4), uploads({1: 1.0, 3: 9.0}), ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal = make_algorithm("fesem").aggregate(state([5.0] * 2, [-1] * 4), uploads({1: 1.0, 3: 1.0}), ctx)

    assert (centres_of(few), few["assigned"].tolist()) == ([1.0, 9.0, 5.0], [-1, 0, -1, 1])
    assert (centres_of(equal), equal["assigned"].tolist()) == ([1.0, 5.0], [-1, 0, -1, 0])


def test_only_the_own_centre_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fesem", client=0)
    algorithm = make_algorithm("fesem", n_clusters=5)

    down = algorithm.download(algorithm.init_server(ctx), ctx)
    up, _ = algorithm.update(down, {}, ctx.task.train_data(0), ctx)

    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * 7_510


# --- options ---


def test_by_samples_a_large_client_draws_the_centre_to_itself(make_ctx, make_algorithm):
    ctx = make_ctx("fesem", clients=4, weighting="samples")

    server = make_algorithm("fesem").aggregate(
        state([5.0, 5.0], [-1] * 4), uploads({0: 0.0, 1: 4.0, 2: 20.0, 3: 24.0}, n={1: 3}), ctx
    )

    # (0 + 3 * 4) / 4 and (20 + 24) / 2
    assert centres_of(server) == [3.0, 22.0]


@pytest.mark.parametrize("seed", range(4))
def test_by_samples_a_large_client_keeps_others_away(make_ctx, make_algorithm, seed):
    sent = uploads({0: 0.0, 1: 2.0, 2: 11.0, 3: 12.0, 4: 16.0, 5: 19.0, 6: 27.0}, n={6: 100})
    with_the_last = []
    for weighting in ("uniform", "samples"):
        ctx = make_ctx("fesem", clients=7, labels_per_client=1, seed=seed, weighting=weighting)
        members = make_algorithm("fesem").aggregate(state([5.0, 5.0], [-1] * 7), sent, ctx)["assigned"].tolist()
        with_the_last.append(members.count(members[6]))

    # By samples {19, 27} has its centre at 26.92, the others at 8.2: the border, 17.56, leaves all where they are, and
    # no other border does. Uniformly the centre would be 23 and the border 15.6, across which 16 leaves the others.
    assert with_the_last[1] == 2
    assert with_the_last[0] > 2


def test_distances_can_be_measured_on_the_head_alone(make_ctx, make_algorithm, two_layers):
    ctx = two_layers("fesem", clients=2)
    size = ctx.task.net.d
    near = torch.zeros(size)
    near[ctx.task.net.body] = 10.0  # far from the first centre by its body, at it by its head
    centres = torch.stack([torch.zeros(size), torch.full((size,), 10.0)])
    server = {"w": centres, "assigned": torch.tensor([0, 1], dtype=torch.int32)}

    found = [
        make_algorithm("fesem", compare=compare)
        .aggregate(server, [Upload(0, 1, {"w": near})], ctx)["assigned"][0]
        .item()
        for compare in ("all", "head")
    ]

    # 300 coordinates of the body against 202 of the head
    assert found == [1, 0]


def test_heads_that_are_frozen_cannot_be_compared(make_ctx, make_algorithm):
    ctx = make_ctx("fesem", train_part="body")

    with pytest.raises(FedbenchError, match="heads that nobody trains"):
        make_algorithm("fesem", compare="head").init_server(ctx)
    assert make_algorithm("fesem").init_server(ctx)["w"].shape == (2, 6_500)


POINTS = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0, 7: 40.0}
"""Seven models in a row and one far away: the best two clusters are the seven and the one."""


def first_sizes(make_ctx, make_algorithm, **params):
    """How many of the points are in the smaller cluster, for some seeds."""
    found = []
    for seed in range(12):
        ctx = make_ctx("fesem", clients=8, labels_per_client=1, seed=seed)
        server = make_algorithm("fesem", **params).aggregate(state([9.0, 9.0], [-1] * 8), uploads(POINTS), ctx)
        found.append(min(server["assigned"].tolist().count(k) for k in (0, 1)))
    return found


def test_lloyd_steps_and_seeding_decide_how_often_the_best_clusters_are_found(make_ctx, make_algorithm):
    best = first_sizes(make_ctx, make_algorithm)
    random_few = first_sizes(make_ctx, make_algorithm, seeding="random", first_steps=1)
    random_many = first_sizes(make_ctx, make_algorithm, seeding="random")

    # k-means++ draws the far point as a centre with probability 1600 / (1600 + ...) > 0.9; two random ones with 1/4
    assert best == [1] * 12
    assert random_few.count(1) < 12
    assert random_few.count(1) < random_many.count(1)


@pytest.mark.parametrize(
    "params", [{"n_clusters": 0}, {"first_steps": 0}, {"seeding": "best"}, {"compare": "body"}, {"k": 2}]
)
def test_bad_values_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("fesem", **params)
