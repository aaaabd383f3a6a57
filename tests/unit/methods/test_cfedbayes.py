"""cFedBayes: how clients choose, what the server makes of it, and that one cluster is pFedBayes."""

import math

import pytest
import torch

from fedbench.algorithm import Upload
from fedbench.simulation import on_wire, size_of

RHO_OF_ONE = math.log(math.e - 1)
"""softplus of it is 1; its slope there, sigmoid(rho), is 1 - 1/e = 0.632121."""
RIGHT = [3.0, -3.0, -3.0, 3.0, 0.0, 0.0]
"""Weights of a logistic regression that knows the labels of `tiny`; their negative takes every image for the other."""


def gaussian(mu, rho=RHO_OF_ONE):
    return {"mu": torch.as_tensor(mu), "rho": torch.full((len(mu),), rho)}


def stacked(*states):
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}


def opposite():
    """Two clusters: the first takes every image of `tiny` for the other class, the second is right."""
    return stacked(gaussian([-value for value in RIGHT]), gaussian(RIGHT))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Swapped:
    """A client's data with the two labels exchanged."""

    def __init__(self, data):
        self._data, self.n = data, data.n

    def chunks(self, size):
        return ((x, 1 - y) for x, y in self._data.chunks(size))

    def batches(self, *args, **kwargs):
        return ((x, 1 - y) for x, y in self._data.batches(*args, **kwargs))


# --- a golden round ---


def test_one_round_by_hand_without_noise(make_ctx, make_algorithm, tiny):
    # SGD of rate 0.1, one batch of both samples, all sigma = 1, zeta / n = 2 / 2 = 1
    ctx = make_ctx("cfedbayes", client=0, optimizer="sgd", lr=0.1, optim_state="reset", **tiny)
    down = stacked(gaussian([-value for value in RIGHT]), gaussian([0.1] * 6))
    algorithm = make_algorithm("cfedbayes", zeta=2.0, noise_scale=0.0)

    message, memory = algorithm.update(down, gaussian([0.0] * 6), ctx.task.train_data(0), ctx)

    # The first cluster is wrong on both images, the second undecided (loss log 2 each): the client takes the second.
    assert message["cluster"].tolist() == [1]
    # Personal step: the loss has the gradient (-0.25, 0.5, 0.25, -0.5, 0, 0) at 0, the KL (0 - 0.1) / 1^2 = -0.1;
    # own mu = -0.1 times their sum.
    assert memory["mu"].tolist() == pytest.approx([0.035, -0.04, -0.015, 0.06, 0.01, 0.01])
    # Global step: the gradient over mu is the distance 0.1 - own mu = (0.065, 0.14, 0.115, 0.04, 0.09, 0.09).
    assert message["mu"].tolist() == pytest.approx([0.0935, 0.086, 0.0885, 0.096, 0.091, 0.091])


def upload(client, cluster, mu, rho):
    return Upload(client, 1, {"mu": torch.tensor([mu]), "rho": torch.tensor([rho]), "cluster": torch.tensor([cluster])})


def test_the_server_averages_each_cluster_and_leaves_one_that_nobody_chose(make_ctx, make_algorithm):
    server = {"mu": torch.tensor([[5.0], [6.0], [7.0]]), "rho": torch.tensor([[-1.0], [-1.0], [-1.0]])}
    uploads = [upload(0, 0, 1.0, -2.0), upload(1, 2, 4.0, -3.0), upload(2, 0, 3.0, -4.0)]

    merged = make_algorithm("cfedbayes", n_clusters=3).aggregate(server, iter(uploads), make_ctx("cfedbayes"))

    # clients 0 and 2: (1 + 3) / 2 and (-2 - 4) / 2; nobody: 6; client 1 alone
    assert merged["mu"].tolist() == [[2.0], [6.0], [4.0]]
    assert merged["rho"].tolist() == [[-3.0], [-1.0], [-3.0]]


def test_the_server_goes_on_by_beta_in_every_cluster(make_ctx, make_algorithm):
    server = {"mu": torch.tensor([[5.0], [6.0]]), "rho": torch.tensor([[-1.0], [-1.0]])}

    merged = make_algorithm("cfedbayes").aggregate(server, [upload(0, 1, 2.0, -3.0)], make_ctx("cfedbayes", beta=0.25))

    # 0.75 * 6 + 0.25 * 2, 0.75 * -1 + 0.25 * -3
    assert merged["mu"].tolist() == [[5.0], [5.0]]
    assert merged["rho"].tolist() == [[-1.0], [-1.5]]


# --- special case ---


@pytest.mark.parametrize("train_all", [True, False])
def test_one_cluster_is_pfedbayes_bit_for_bit(make_ctx, make_algorithm, run_rounds, train_all):
    ctx = make_ctx("cfedbayes", round_=0, clients=4, f=0.5, local_unit="batch", tau=3, train_all=train_all)
    clustered, plain = make_algorithm("cfedbayes", n_clusters=1), make_algorithm("pfedbayes")

    cfedbayes, pfedbayes = run_rounds(clustered, ctx, rounds=4), run_rounds(plain, ctx, rounds=4)

    assert all(torch.equal(cfedbayes.server[key][0], pfedbayes.server[key]) for key in ("mu", "rho"))
    for client in range(4):
        where, data = ctx.at(client), ctx.task.train_data(client)
        for epochs in (None, 1):
            one, other = (
                algorithm.personal_model(progress.server, progress.clients[client], data, where, epochs)
                for algorithm, progress in ((clustered, cfedbayes), (plain, pfedbayes))
            )
            assert one.pop("in_cluster").tolist() == [1]
            assert same(one, other)


# --- the choice ---


@pytest.mark.parametrize("choose_on", ["all", "batch"])
def test_a_client_chooses_the_cluster_that_explains_its_training_data(make_ctx, make_algorithm, tiny, choose_on):
    ctx = make_ctx("cfedbayes", client=0, **tiny)
    algorithm, data = make_algorithm("cfedbayes", choose_on=choose_on, noise_scale=0.1), ctx.task.train_data(0)

    own, swapped = (
        algorithm.update(opposite(), {}, given, ctx)[0]["cluster"].item() for given in (data, Swapped(data))
    )

    assert (own, swapped) == (1, 0)


def test_well_separated_clusters_keep_their_clients(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", tau=3, **tiny)
    algorithm, server = make_algorithm("cfedbayes"), opposite()
    data = [ctx.task.train_data(0), Swapped(ctx.task.train_data(1))]
    memories, chosen = [{}, {}], []

    for _ in range(5):
        sent = [algorithm.update(server, memories[c], data[c], ctx.at(c)) for c in (0, 1)]
        memories = [kept for _, kept in sent]
        chosen.append([message["cluster"].item() for message, _ in sent])
        server = algorithm.aggregate(server, [Upload(c, 2, message) for c, (message, _) in enumerate(sent)], ctx)

    assert chosen == [[1, 0]] * 5


@pytest.mark.parametrize(
    ("params", "passes"),
    [({}, 2 * 3), ({"choose_on": "batch"}, 2 * 1), ({"choose_on": "batch", "samples": 4}, 2 * 4)],
    ids=["25 samples in batches of 10", "one batch", "one batch, four samples"],
)
def test_choose_on_says_how_much_is_computed_for_the_choice(make_ctx, make_algorithm, monkeypatch, params, passes):
    ctx = make_ctx("cfedbayes", client=0, batch_size=10)
    algorithm, forwards, logits = make_algorithm("cfedbayes", **params), [], ctx.task.net.logits
    monkeypatch.setattr(ctx.task.net, "logits", lambda x: forwards.append(len(x)) or logits(x))

    algorithm.global_model(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx)

    assert len(forwards) == passes


def test_every_cluster_is_compared_on_the_same_batch_and_noise(make_ctx, make_algorithm):
    ctx = make_ctx("cfedbayes", client=0, batch_size=10)
    algorithm, twin = make_algorithm("cfedbayes", choose_on="batch"), make_algorithm("pfedbayes").init_server(ctx)

    losses = [algorithm._loss(twin, ctx.task.train_data(0), ctx) for _ in range(2)]

    assert losses[0] == losses[1]


# --- states ---


def test_clusters_start_from_different_means(make_ctx, make_algorithm):
    ctx = make_ctx("cfedbayes", round_=0)

    server = make_algorithm("cfedbayes", n_clusters=3).init_server(ctx)

    assert torch.equal(server["mu"][0], make_algorithm("pfedbayes").init_server(ctx)["mu"])
    # 7,510 coordinates: the correlation of independent draws has a standard error of 0.012
    assert torch.corrcoef(server["mu"]).triu(1).abs().max() < 0.05
    assert server["rho"].unique().tolist() == [-2.5]


@pytest.mark.parametrize(("client", "cluster"), [(0, 0), (1, 1)])
def test_a_client_starts_from_the_initial_posterior_of_its_first_cluster(make_ctx, make_algorithm, client, cluster):
    ctx = make_ctx("cfedbayes", client=client, round_=7)
    algorithm, data = make_algorithm("cfedbayes"), ctx.task.train_data(client)
    initial = algorithm.init_server(make_ctx("cfedbayes", round_=0))

    model = algorithm.personal_model(initial, algorithm.init_client(ctx), data, ctx, None)

    assert torch.equal(model["mu"], initial["mu"][cluster])
    assert same(model, algorithm.global_model(initial, {}, data, ctx))


def test_the_personal_posterior_persists_when_the_cluster_changes(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", client=0, lr=0.001, **tiny)
    algorithm, data = make_algorithm("cfedbayes"), ctx.task.train_data(0)
    exchanged = {key: value.flip(0) for key, value in opposite().items()}

    first, memory = algorithm.update(opposite(), {}, data, ctx)
    second, later = algorithm.update(exchanged, memory, data, ctx)

    assert (first["cluster"].item(), second["cluster"].item()) == (1, 0)
    assert (later["mu"] - memory["mu"]).abs().max() < 0.002  # one Adam step from where it was


def test_a_client_gets_all_clusters_and_sends_one_with_its_number(make_ctx, make_algorithm):
    ctx = make_ctx("cfedbayes", client=0)
    algorithm = make_algorithm("cfedbayes", n_clusters=3)
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, _ = algorithm.update(down, {}, ctx.task.train_data(0), ctx)

    # digits: 7,510 parameters; 3 * 2 of each down, 2 up and an integer of 4 bytes
    assert size_of(on_wire(down)) == 4 * 6 * 7_510
    assert size_of(on_wire(up)) == 4 * 2 * 7_510 + 4
    assert up["cluster"].dtype == torch.int32


def test_clients_of_a_cluster_share_one_global_model(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", **tiny)
    algorithm, server, data = make_algorithm("cfedbayes"), opposite(), [ctx.task.train_data(c) for c in (0, 1)]

    models = [algorithm.global_model(server, {}, data[c], ctx.at(c)) for c in (0, 1)]
    other = algorithm.global_model(server, {}, Swapped(data[0]), ctx.at(0))
    later = algorithm.global_model(opposite(), {}, data[0], ctx.at(0))

    assert models[0] is models[1]
    assert models[0]["mu"].tolist() == RIGHT
    assert other["mu"].tolist() == [-value for value in RIGHT]
    assert later is not models[0]


# --- who belongs where ---


def test_both_models_say_which_cluster_the_client_would_choose_now(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", client=0, **tiny)
    algorithm, data, server = make_algorithm("cfedbayes"), ctx.task.train_data(0), opposite()
    _, memory = algorithm.update(server, {}, data, ctx)
    exchanged = {key: value.flip(0) for key, value in server.items()}

    said = [
        algorithm.describe(model, ctx)
        for now in (server, exchanged)
        for model in (
            algorithm.global_model(now, memory, data, ctx),
            algorithm.personal_model(now, memory, data, ctx, None),
            algorithm.personal_model(now, memory, data, ctx, 1),
        )
    ]

    assert said == [{"in_cluster_0": 0.0, "in_cluster_1": 1.0}] * 3 + [{"in_cluster_0": 1.0, "in_cluster_1": 0.0}] * 3


def test_the_cluster_is_no_part_of_what_a_client_keeps(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", client=0, optim_state="reset", **tiny)
    algorithm = make_algorithm("cfedbayes")

    _, memory = algorithm.update(opposite(), {}, ctx.task.train_data(0), ctx)

    assert memory.keys() == {"mu", "rho"}


def test_adaptation_is_pfedbayess_with_the_chosen_cluster_as_prior(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("cfedbayes", client=0, optimizer="sgd", lr=0.1, **tiny)
    algorithm, data, own = make_algorithm("cfedbayes"), ctx.task.train_data(0), gaussian([0.5] * 6)

    adapted = algorithm.personal_model(opposite(), own, data, ctx, 2)
    by_hand, wrong = (
        make_algorithm("pfedbayes").personal_model(gaussian([sign * value for value in RIGHT]), own, data, ctx, 2)
        for sign in (1, -1)
    )

    assert same({key: adapted[key] for key in ("mu", "rho")}, by_hand)
    assert not torch.equal(adapted["mu"], wrong["mu"])
