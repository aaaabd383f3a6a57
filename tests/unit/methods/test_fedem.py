"""FedEM: the worked E-step, an M-step whose weights follow the samples, the mixture, and the FedAvg that K = 1 is."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from fedbench.algorithm import Upload
from fedbench.algorithms.fedem import m_step, responsibilities
from fedbench.errors import FedbenchError
from fedbench.images import ClientData, Images
from fedbench.job import build_job
from fedbench.training import make_optimizer

PLAIN = [0.0] * 6
"""A component of the tiny task with probability 1/2 for both classes."""
BIASED = [0.0, 0.0, 0.0, 0.0, math.log(3), 0.0]
"""One with probability 3/4 for class 0, whatever the image."""


def server_of(*components):
    return {"components": torch.tensor(components)}


def pi_of(*values):
    return {"pi": torch.tensor(values)}


# --- the E-step ---


def test_the_worked_e_step():
    losses = torch.tensor([[0.1, 2.0], [1.5, 0.2]])

    q = responsibilities(losses, torch.tensor([0.5, 0.5]))

    # 1 / (1 + exp(-1.9)), 1 / (1 + exp(1.3))
    assert q.flatten().tolist() == pytest.approx([0.869892, 0.130108, 0.214165, 0.785835], abs=1e-6)
    assert q.mean(0).tolist() == pytest.approx([0.542028, 0.457972], abs=1e-6)


def test_responsibilities_are_in_proportion_to_pi():
    # equal losses: q = pi; a component without weight gets none
    q = responsibilities(torch.full((1, 3), 2.0), torch.tensor([0.25, 0.75, 0.0]))

    assert q[0].tolist() == pytest.approx([0.25, 0.75, 0.0])


def test_the_log_likelihood_never_falls_with_exact_m_steps():
    """Components that know no x: p_k(y) is a table, and the exact M-step is the q-weighted frequency of labels."""
    drawn = torch.Generator().manual_seed(0)
    labels = [torch.randint(0, 4, (30,), generator=drawn), torch.randint(1, 3, (20,), generator=drawn)]
    tables = torch.rand(3, 4, generator=drawn, dtype=torch.float64)
    tables /= tables.sum(1, keepdim=True)
    pis, curve = [torch.full((3,), 1 / 3, dtype=torch.float64)] * 2, []

    for _ in range(30):
        likelihoods = [tables[:, y].T @ pi for y, pi in zip(labels, pis, strict=True)]
        curve.append(sum(float(values.log().sum()) for values in likelihoods))
        qs = [responsibilities(-tables[:, y].T.log(), pi) for y, pi in zip(labels, pis, strict=True)]
        pis = [q.mean(0) for q in qs]
        counts = sum(q.T @ one_hot(y, 4).double() for q, y in zip(qs, labels, strict=True))
        tables = counts / counts.sum(1, keepdim=True)

    assert all(later >= earlier - 1e-10 for earlier, later in pairwise(curve))
    assert curve[-1] > curve[0] + 1


def test_the_log_likelihood_rises_with_small_steps_of_the_method_itself(make_ctx, make_algorithm, run_rounds):
    ctx, algorithm = make_ctx("fedem", clients=1, lr=0.05, batch_size=1000), make_algorithm("fedem")
    data = ctx.task.train_data(0)

    def log_likelihood(rounds):
        progress = run_rounds(algorithm, ctx, rounds)
        with torch.no_grad():
            rows = algorithm.predict(progress.server | progress.clients[0], data.x, ctx, "mean")
        return float(rows.gather(1, data.y[:, None]).log().sum())

    curve = [log_likelihood(rounds) for rounds in range(6)]

    assert all(later > earlier for earlier, later in pairwise(curve))


def test_samples_are_seen_as_they_are(make_ctx, make_algorithm, pictures):
    """Without dropout (this network has some) and without augmentation."""
    task = {"dataset": pictures, "model": "cnn5_100", "client": 0}
    plain, augmented = (make_ctx("fedem", augment=augment, **task) for augment in ("none", "crop_flip"))
    components = make_algorithm("fedem", K=2).init_server(plain)["components"]

    def pi_after(ctx):
        ctx.task.net.use_generator(torch.Generator().manual_seed(1))
        return make_algorithm("fedem", K=2).global_model(
            {"components": components}, pi_of(0.5, 0.5), ctx.task.train_data(0), ctx
        )["pi"]

    data, losses = plain.task.train_data(0), []
    for w in components:
        plain.task.net.load(w)
        with torch.no_grad():
            losses.append(cross_entropy(plain.task.net.logits(data.x), data.y, reduction="none"))
    expected = (-torch.stack(losses, 1)).softmax(1).mean(0)
    torch.testing.assert_close(pi_after(plain), expected)
    torch.testing.assert_close(pi_after(augmented), expected)


# --- the M-step ---


@pytest.mark.parametrize("seed", range(6))
def test_weights_follow_their_samples_through_the_shuffle(make_ctx, tiny, seed):
    ctx = make_ctx("fedem", lr=0.1, **tiny)
    net, data, weights = ctx.task.net, ctx.task.train_data(0), torch.tensor([0.25, 1.0])
    net.load(torch.zeros(6))

    shuffled = data.numbered().batches(2, torch.Generator().manual_seed(seed), epochs=1)
    m_step(net, make_optimizer(net.vector, ctx), shuffled, data.y, weights)

    # class 0: (1/2) [0.25 (-1/2) (1, 0) + (1/2) (0, 2)] for the weights, (1/2) [-0.125 + 0.5] for the bias, times -0.1
    assert net.vector.tolist() == pytest.approx([0.00625, -0.05, -0.00625, 0.05, -0.01875, 0.01875])


def test_weights_follow_their_samples_through_batches_and_epochs(make_ctx):
    ctx = make_ctx("fedem")
    data = ctx.task.train_data(1)
    weights = data.x.flatten(1).sum(1)  # known from the image itself

    seen = list(data.numbered().batches(7, torch.Generator().manual_seed(0), epochs=2))

    assert torch.cat([numbers for _, numbers in seen]).sort().values.tolist() == sorted([*range(data.n)] * 2)
    for x, numbers in seen:
        torch.testing.assert_close(x.flatten(1).sum(1), weights[numbers])


def test_numbered_samples_come_in_the_order_of_the_plain_ones(make_ctx):
    data = make_ctx("fedem").task.train_data(1)

    plain, numbered = (list(d.batches(7, torch.Generator().manual_seed(0), steps=9)) for d in (data, data.numbered()))

    for (x, y), (same_x, numbers) in zip(plain, numbered, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, data.y[numbers])


# --- one round ---


def test_one_client_by_hand(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedem", client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("fedem", K=2).update(
        server_of(PLAIN, BIASED), pi_of(0.5, 0.5), ctx.task.train_data(0), ctx
    )

    # likelihoods of (1, 0), class 0: 1/2, 3/4; of (0, 2), class 1: 1/2, 1/4. So q = (0.4, 0.6), (2/3, 1/3)
    assert memory.keys() == {"pi"}
    assert memory["pi"].tolist() == pytest.approx([(0.4 + 2 / 3) / 2, (0.6 + 1 / 3) / 2])
    # first component, class 0: weights (1/2) [0.4 (-1/2) (1, 0) + (2/3) (1/2) (0, 2)], bias (1/2) [-0.2 + 1/3]
    # second: (1/2) [0.6 (-1/4) (1, 0) + (1/3) (3/4) (0, 2)], bias (1/2) [-0.15 + 0.25]; times -0.1
    third, fifteenth = 0.1 / 3, 0.1 / 15
    assert message.keys() == {"components"}
    assert message["components"][0].tolist() == pytest.approx([0.01, -third, -0.01, third, -fifteenth, fifteenth])
    assert message["components"][1].tolist() == pytest.approx(
        [0.0075, -0.025, -0.0075, 0.025, math.log(3) - 0.005, 0.005]
    )


def test_the_kept_pi_is_where_the_next_e_step_begins(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedem", client=0, **tiny)

    _, memory = make_algorithm("fedem", K=2).update(
        server_of(PLAIN, PLAIN), pi_of(0.2, 0.8), ctx.task.train_data(0), ctx
    )

    assert memory["pi"].tolist() == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(("weighting", "expected"), [("uniform", 2.0), ("samples", 2.5)])
def test_the_server_averages_every_component(make_ctx, make_algorithm, tiny, weighting, expected):
    ctx = make_ctx("fedem", **{**tiny, "weighting": weighting})
    uploads = [Upload(i, n, {"components": torch.tensor([[v], [10 * v]])}) for i, n, v in ((0, 1, 1.0), (1, 3, 3.0))]

    merged = make_algorithm("fedem", K=2).aggregate({"components": torch.zeros(2, 1)}, uploads, ctx)

    # (1 + 3) / 2, or (1 + 3 * 3) / 4
    assert merged["components"].tolist() == [[expected], [10 * expected]]


def test_components_start_as_different_draws_the_first_where_all_methods_start(make_ctx, make_algorithm):
    ctx = make_ctx("fedem")

    components = make_algorithm("fedem", K=4).init_server(ctx)["components"]

    assert torch.equal(components[0], ctx.task.initial)
    # uniform in +-1/8 or +-1/10: two draws are about 0.07 apart
    for i, j in ((0, 1), (0, 2), (1, 2), (2, 3)):
        assert (components[i] - components[j]).abs().mean() > 0.05


def test_components_become_different_models(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedem", lr=0.1, clients=2)

    progress = run_rounds(make_algorithm("fedem", K=2), ctx, rounds=5)

    pis = torch.stack([progress.clients[client]["pi"] for client in (0, 1)])
    torch.testing.assert_close(pis.sum(1), torch.ones(2))
    assert (pis - 0.5).abs().max() > 0.01


# --- one component is FedAvg ---


@pytest.mark.parametrize(
    "protocol",
    [
        {"tau": 2, "batch_size": 7},
        {"tau": 5, "batch_size": 7, "local_unit": "batch", "f": 0.5, "weighting": "uniform", "beta": 0.7},
        {"momentum": 0.9, "optim_state": "persistent"},
        {"optimizer": "adam", "lr": 0.001, "optim_state": "persistent"},
        {"train_part": "body"},
    ],
    ids=["epochs", "batches", "momentum", "adam", "body"],
)
def test_one_component_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, protocol):
    ctx = make_ctx(**{"clients": 4, "lr": 0.1, **protocol})

    ours = run_rounds(make_algorithm("fedem", K=1), ctx, rounds=3).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    assert torch.equal(ours["components"][0], fedavg["w"])


def test_one_component_is_fedavg_also_with_dropout_and_augmentation(make_ctx, make_algorithm, run_rounds, pictures):
    ctx = make_ctx(dataset=pictures, model="cnn5_100", augment="crop_flip", lr=0.1)

    ours = run_rounds(make_algorithm("fedem", K=1), ctx, rounds=2).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=2).server

    assert torch.equal(ours["components"][0], fedavg["w"])


@pytest.mark.parametrize(
    "protocol",
    [{}, {"adapt_lr": 0.01, "momentum": 0.9}, {"train_part": "body"}, {"adapt_part": "head"}],
    ids=["plain", "rate", "frozen head", "head only"],
)
def test_one_component_is_fine_tuned_as_fedavg_is(make_ctx, make_algorithm, run_rounds, protocol):
    ctx = make_ctx(client=0, lr=0.1, batch_size=7, **protocol)
    server, data = run_rounds(make_algorithm("fedavg"), ctx).server, ctx.task.train_data(0)

    ours = make_algorithm("fedem", K=1).personal_model(
        {"components": server["w"][None]}, pi_of(1.0), data, ctx, epochs=2
    )
    fedavg = make_algorithm("fedavg").personal_model(server, {}, data, ctx, epochs=2)

    assert torch.equal(ours["components"][0], fedavg["w"])
    assert ours["pi"].tolist() == [1.0]


def test_an_adaptation_draws_dropout_masks_of_its_own(make_ctx, make_algorithm, pictures):
    ctx = make_ctx(client=0, dataset=pictures, model="cnn5_100", lr=0.1)
    server, data = {"w": ctx.task.initial}, ctx.task.train_data(0)

    ours = make_algorithm("fedem", K=1).personal_model({"components": server["w"][None]}, pi_of(1.0), data, ctx, 1)
    fedavg = make_algorithm("fedavg").personal_model(server, {}, data, ctx, 1)

    assert torch.equal(ours["components"][0], fedavg["w"])


# --- what is deployed ---


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_a_prediction_is_a_mixture_of_probabilities(make_ctx, make_algorithm, tiny, mode):
    ctx, algorithm = make_ctx("fedem", **tiny), make_algorithm("fedem", K=2)
    x, server = ctx.task.test_data(0).x, server_of([0.0] * 6, BIASED)

    # 0.2 * 1/2 + 0.8 * 3/4; without weights (1/2 + 3/4) / 2
    assert algorithm.predict(server | pi_of(0.2, 0.8), x, ctx, mode)[:, 0].tolist() == pytest.approx([0.7, 0.7])
    assert algorithm.predict(server, x, ctx, mode)[:, 0].tolist() == pytest.approx([0.625, 0.625])


@pytest.mark.parametrize(
    ("gm_weights", "expected"),
    # of pi = (0.2, 0.8) the E-step makes q = (1/7, 6/7) and (1/3, 2/3), from the likelihoods 1/2, 3/4 and 1/2, 1/4
    [("e_step", [5 / 21, 16 / 21]), ("kept", [0.2, 0.8])],
)
def test_the_weights_of_the_global_model(make_ctx, make_algorithm, tiny, gm_weights, expected):
    ctx, server = make_ctx("fedem", client=0, **tiny), server_of(PLAIN, BIASED)

    model = make_algorithm("fedem", K=2, gm_weights=gm_weights).global_model(
        server, pi_of(0.2, 0.8), ctx.task.train_data(0), ctx
    )

    assert torch.equal(model["components"], server["components"])
    assert model["pi"].tolist() == pytest.approx(expected)


def test_a_global_model_of_uniform_weights_is_one_for_all(make_ctx, make_algorithm, tiny):
    ctx, server = make_ctx("fedem", **tiny), server_of(PLAIN, BIASED)
    algorithm = make_algorithm("fedem", K=2, gm_weights="uniform")

    models = [algorithm.global_model(server, pi_of(0.2, 0.8), ctx.task.train_data(i), ctx.at(i)) for i in (0, 1)]

    assert models[0] is models[1]
    assert algorithm.predict(models[0], ctx.task.test_data(0).x, ctx, "mean")[0, 0].item() == pytest.approx(0.625)


def test_a_personal_model_is_the_clients_pi_on_the_servers_components(make_ctx, make_algorithm, tiny):
    ctx, server = make_ctx("fedem", client=0, **tiny), server_of(PLAIN, BIASED)
    algorithm = make_algorithm("fedem", K=2)
    data = ctx.task.train_data(0)

    kept = algorithm.personal_model(server, pi_of(0.2, 0.8), data, ctx, None)
    never_trained = algorithm.personal_model(server, algorithm.init_client(ctx), data, ctx, None)

    assert torch.equal(kept["components"], server["components"])
    assert kept["pi"].tolist() == pytest.approx([0.2, 0.8])
    assert never_trained["pi"].tolist() == [0.5, 0.5]


def test_an_adaptation_is_an_e_step_and_an_m_step(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedem", client=0, lr=0.5, adapt_lr=0.1, **tiny)
    algorithm, data, start = make_algorithm("fedem", K=2), ctx.task.train_data(0), pi_of(0.5, 0.5)
    server = server_of(PLAIN, BIASED)

    by_epochs = [algorithm.personal_model(server, start, data, ctx, epochs) for epochs in (0, 1)]

    # the numbers of `test_one_client_by_hand`
    for model in by_epochs:
        assert model["pi"].tolist() == pytest.approx([(0.4 + 2 / 3) / 2, (0.6 + 1 / 3) / 2])
    assert torch.equal(by_epochs[0]["components"], server["components"])
    assert by_epochs[1]["components"][1].tolist() == pytest.approx(
        [0.0075, -0.025, -0.0075, 0.025, math.log(3) - 0.005, 0.005]
    )


# --- limits ---


def test_a_client_without_data_changes_nothing(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("fedem", client=0), make_algorithm("fedem", K=2)
    server = algorithm.init_server(ctx)
    image = Images(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), 16, "half")
    nothing = ClientData(image, torch.zeros(1, dtype=torch.long), torch.arange(0))

    message, memory = algorithm.update(server, pi_of(0.2, 0.8), nothing, ctx)

    assert torch.equal(message["components"], server["components"])
    assert memory["pi"].tolist() == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize("setting", [{"K": 0}, {"gm_weights": "best"}])
def test_impossible_values_are_refused(setting):
    with pytest.raises(FedbenchError, match="wrong setting for method fedem"):
        build_job({"method": "fedem", "dataset": "digits", **setting})
