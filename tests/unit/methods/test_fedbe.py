"""FedBE: the two distributions over client models by hand, the ensemble's prediction, and the FedAvg beside it."""

import math

import numpy as np
import pytest
import torch

from fedbench.algorithm import Upload
from fedbench.algorithms.fedbe import dirichlet_draws, gaussian_draws
from fedbench.errors import FedbenchError
from fedbench.job import build_job

HALVES = torch.tensor([0.5, 0.5])
TWO_TENSORS = (slice(0, 2), slice(2, 4))
START = torch.tensor([1.0, 1.0, 2.0, 2.0])
UPDATES = torch.tensor([[3.0, 0.0, 0.0, 0.5], [0.0, 4.0, 0.0, 0.5]])
"""Norms of the first tensor 3 and 4, of the second 1/2 and 1/2."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(updates=UPDATES, weights=HALVES, tensors=TWO_TENSORS, draws=1, var_floor=0.0, noise_scale=1.0):
    return gaussian_draws(
        START,
        START + updates,
        weights,
        tensors,
        draws,
        var_floor=var_floor,
        noise_scale=noise_scale,
        generator=generator(),
    )


def uploads_of(*values, n=(1, 1)):
    return [Upload(i, n[i], {"w": torch.as_tensor(value)}) for i, value in enumerate(values)]


# --- the Gaussian ---


def test_the_gaussians_mean_by_hand():
    found = gaussian(noise_scale=0.0)

    # first tensor: directions (1, 0) and (0, 1), their mean (1/2, 1/2), mean norm 3.5; second: (0, 1), 1/2
    assert found.tolist() == [[1 + 1.75, 1 + 1.75, 2.0, 2.5]]


def test_the_gaussians_noise_by_hand():
    found = gaussian(draws=2) - gaussian(noise_scale=0.0)

    # both directions are 1/2 from their mean: 3.5 * 1/2 * noise; in the second tensor clients agree
    noise = torch.randn((2, 2), generator=generator())
    torch.testing.assert_close(found[:, :2], 1.75 * noise)
    assert found[:, 2:].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_clients_count_as_the_server_weighs_them():
    found = gaussian(weights=torch.tensor([0.25, 0.75]), noise_scale=0.0)

    # mean direction (1/4, 3/4), mean norm 3/4 + 3 = 3.75
    assert found[0].tolist() == pytest.approx([1 + 0.9375, 1 + 2.8125, 2.0, 2.5])


def test_the_variance_is_weighted_too():
    found = gaussian(weights=torch.tensor([0.25, 0.75])) - gaussian(weights=torch.tensor([0.25, 0.75]), noise_scale=0.0)

    # 1/4 (3/4)^2 + 3/4 (1/4)^2 = 3/16 in both coordinates
    noise = torch.randn((1, 2), generator=generator())
    torch.testing.assert_close(found[:, :2], 3.75 * math.sqrt(3 / 16) * noise)


def test_every_tensor_has_norms_of_its_own():
    found = gaussian(tensors=(slice(0, 4),), noise_scale=0.0)

    # as one tensor the norms are sqrt(9.25) and sqrt(16.25), their mean 3.536252
    a, b = 3 / math.sqrt(9.25), 4 / math.sqrt(16.25)
    assert found[0, :2].tolist() == pytest.approx([1 + 3.536252 * a / 2, 1 + 3.536252 * b / 2], abs=1e-5)


def test_a_coordinate_on_which_clients_agree_varies_by_the_floor():
    found = gaussian(var_floor=1e-5) - gaussian(noise_scale=0.0)

    # the second tensor's norm is 1/2; the first one's variance is above the floor
    drawn = generator()
    first, second = (torch.randn((1, 2), generator=drawn) for _ in range(2))
    torch.testing.assert_close(found[:, :2], 1.75 * first)
    torch.testing.assert_close(found[:, 2:], 0.5 * math.sqrt(1e-5) * second, rtol=0, atol=1e-6)


def test_a_tensor_without_updates_stays_where_it_is():
    updates = UPDATES.clone()
    updates[:, 2:] = 0.0

    assert gaussian(updates, var_floor=1e-5)[0, 2:].tolist() == [2.0, 2.0]


def test_identical_clients_without_a_floor_give_their_model():
    updates = torch.tensor([[0.3, -0.7, 0.1, 0.2]] * 2)

    found = gaussian(updates, draws=3)

    torch.testing.assert_close(found, (START + updates[0]).repeat(3, 1))


# --- the Dirichlet distribution ---


def test_a_dirichlet_draw_is_a_mixture_of_the_clients():
    models = START + UPDATES

    found = dirichlet_draws(models, HALVES, 4, 1.0, np.random.default_rng(0))

    p = torch.from_numpy(np.random.default_rng(0).dirichlet([1.0, 1.0], 4)).float()
    torch.testing.assert_close(found, p @ models)


def test_identical_clients_give_their_model_bit_for_bit():
    model = torch.tensor([0.1, 0.3, -0.7])

    found = dirichlet_draws(model.repeat(5, 1), torch.full((5,), 0.2), 3, 1.0, np.random.default_rng(0))

    assert torch.equal(found, model.repeat(3, 1))


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.8]])
def test_mixtures_scatter_around_the_servers_average(weights):
    found = dirichlet_draws(torch.tensor([[0.0], [1.0]]), torch.tensor(weights), 20_000, 1.0, np.random.default_rng(0))

    # p_2 ~ Beta(2 w_1, 2 w_2): mean w_2, variance w_1 w_2 / 3
    assert found.mean().item() == pytest.approx(weights[1], abs=0.01)
    assert found.var().item() == pytest.approx(weights[0] * weights[1] / 3, rel=0.05)


def test_a_larger_concentration_scatters_less():
    found = dirichlet_draws(torch.tensor([[0.0], [1.0]]), HALVES, 20_000, 10.0, np.random.default_rng(0))

    # Beta(10, 10): 1 / (4 * 21)
    assert found.var().item() == pytest.approx(1 / 84, rel=0.05)


# --- the server ---


def test_one_round_of_two_clients(make_ctx, make_algorithm, run_rounds, tiny):
    zeros = torch.zeros(6)
    ctx = make_ctx("fedbe", lr=0.1, **tiny)

    server = run_rounds(make_algorithm("fedbe", noise_scale=0.0), ctx, server={"w": zeros, "ensemble": zeros}).server

    # both updates of the weights, -0.1 of the gradients in test_scaffold.py, have the norm 0.0790569; with equal norms
    # the mean direction times the mean norm is the mean update; the biases do not move
    expected = [0.0375, -0.0375, -0.0375, 0.0375, 0.0, 0.0]
    assert server["w"].tolist() == pytest.approx(expected)
    assert server["ensemble"].shape == (3, 6)
    for row in server["ensemble"]:
        assert row.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("params", [{}, {"posterior": "dirichlet"}, {"include_mean": True}, {"M": 1}])
def test_what_clients_start_from_is_fedavgs_bit_for_bit(make_ctx, make_algorithm, run_rounds, params):
    protocol = {"clients": 4, "f": 0.5, "lr": 0.1, "batch_size": 10, "beta": 0.8}

    ours = run_rounds(make_algorithm("fedbe", **params), make_ctx("fedbe", **protocol), rounds=3).server
    fedavg = run_rounds(make_algorithm("fedavg"), make_ctx(**protocol), rounds=3).server

    assert torch.equal(ours["w"], fedavg["w"])


def test_only_the_average_is_sent(make_ctx, make_algorithm):
    ctx = make_ctx("fedbe", client=0)
    algorithm = make_algorithm("fedbe")
    server = algorithm.init_server(ctx)

    assert set(server) == {"w", "ensemble"}
    assert algorithm.download(server, ctx).keys() == {"w"}


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_identical_clients_give_an_ensemble_of_fedavgs(make_ctx, make_algorithm, posterior, beta):
    ctx = make_ctx("fedbe", beta=beta)
    w = ctx.task.initial
    same = uploads_of(w + 0.1 * w.sin(), w + 0.1 * w.sin())
    algorithm = make_algorithm("fedbe", posterior=posterior, var_floor=0.0)

    merged = algorithm.aggregate(algorithm.init_server(ctx), same, ctx)
    fedavg = make_algorithm("fedavg").aggregate({"w": w}, same, ctx)["w"]

    assert not torch.allclose(fedavg, w, rtol=0, atol=1e-4)
    torch.testing.assert_close(merged["ensemble"], fedavg.repeat(3, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_members_differ_from_one_another_and_from_round_to_round(make_ctx, make_algorithm, posterior):
    def drawn(round_, seed=0):
        ctx = make_ctx("fedbe", round_=round_, seed=seed)
        w, algorithm = torch.zeros_like(ctx.task.initial), make_algorithm("fedbe", posterior=posterior)
        merged = algorithm.aggregate({"w": w, "ensemble": w}, uploads_of(w + 1.0, w.clone().fill_(-1.0)), ctx)
        return [tuple(row[:5].tolist()) for row in merged["ensemble"]]

    assert len({*drawn(1), *drawn(2), *drawn(1, seed=1)}) == 9
    assert drawn(1) == drawn(1)


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_clients_count_in_the_samples_as_in_the_average(make_ctx, make_algorithm, posterior):
    ctx = make_ctx("fedbe", weighting="samples")
    w = torch.zeros_like(ctx.task.initial)
    algorithm = make_algorithm("fedbe", posterior=posterior, var_floor=0.0, noise_scale=0.0, concentration=1e8)

    merged = algorithm.aggregate({"w": w, "ensemble": w}, uploads_of(w + 1.0, w + 3.0, n=(1, 3)), ctx)

    # (1 + 3 * 3) / 4; clients that agree in direction differ in the norm alone
    torch.testing.assert_close(merged["ensemble"], (w + 2.5).repeat(3, 1), rtol=0, atol=2e-3)


def test_samples_follow_the_tensors_of_the_network(make_ctx, make_algorithm):
    ctx = make_ctx("fedbe")
    w = torch.zeros_like(ctx.task.initial)
    moved = w.clone()
    moved[ctx.task.net.tensors[0]] = 1.0  # the first layer's weights alone
    algorithm = make_algorithm("fedbe", var_floor=1.0)

    ensemble = algorithm.aggregate(algorithm.init_server(ctx) | {"w": w}, uploads_of(moved, moved), ctx)["ensemble"]

    assert ensemble[:, ctx.task.net.tensors[0]].std() > 1
    assert ensemble[:, ctx.task.net.tensors[0].stop :].abs().max() == 0


def test_without_uploads_the_server_keeps_its_state(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("fedbe"), make_algorithm("fedbe")
    server = {"w": ctx.task.initial + 1, "ensemble": ctx.task.initial + torch.arange(3.0)[:, None]}

    merged = algorithm.aggregate(server, [], ctx)

    assert torch.equal(merged["w"], server["w"])
    assert torch.equal(merged["ensemble"], server["ensemble"])


# --- prediction ---


def biased(*logits):
    """A model of the tiny task that has these logits for every image."""
    return torch.tensor([0.0, 0.0, 0.0, 0.0, *logits])


MODEL = {
    # probabilities of class 0: 3/4, 1/2, 1/5; of the mean model 9/10
    "ensemble": torch.stack([biased(math.log(3), 0.0), biased(0.0, 0.0), biased(0.0, math.log(4))]),
    "w": biased(math.log(9), 0.0),
}


@pytest.mark.parametrize("mode", ["mean", "mc"])
@pytest.mark.parametrize(
    ("include_mean", "expected"),
    # (0.75 + 0.5 + 0.2) / 3, with 0.9: / 4; averaging logits would give 0.476045 in the first case
    [(False, 1.45 / 3), (True, 2.35 / 4)],
)
def test_members_average_their_probabilities(make_ctx, make_algorithm, tiny, mode, include_mean, expected):
    ctx = make_ctx("fedbe", **tiny)

    rows = make_algorithm("fedbe", include_mean=include_mean).predict(MODEL, ctx.task.test_data(0).x, ctx, mode)

    assert rows.tolist() == [pytest.approx([expected, 1 - expected])] * 2


def test_the_global_model_is_the_ensemble_and_the_same_for_all(make_ctx, make_algorithm, tiny):
    ctx, algorithm = make_ctx("fedbe", **tiny), make_algorithm("fedbe")

    shown = [algorithm.global_model(MODEL, {}, ctx.task.train_data(i), ctx.at(i)) for i in (0, 1)]

    assert shown[0] is shown[1] is MODEL


def test_a_personal_model_is_the_average_fine_tuned(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedbe", client=0, lr=0.1)
    algorithm, fedavg = make_algorithm("fedbe", include_mean=True), make_algorithm("fedavg")
    server, data = run_rounds(algorithm, ctx).server, ctx.task.train_data(0)

    model, expected = (m.personal_model(server, {}, data, ctx, 2) for m in (algorithm, fedavg))

    assert algorithm.personal_model(server, {}, data, ctx, None) is None
    assert torch.equal(model["w"], expected["w"])
    x = ctx.task.test_data(0).x
    with torch.no_grad():
        assert torch.equal(algorithm.predict(model, x, ctx, "mean"), fedavg.predict(expected, x, ctx, "mean"))


# --- what is refused ---


@pytest.mark.parametrize(
    "setting",
    [
        {"M": 0},
        {"posterior": "laplace"},
        {"var_floor": -1e-9},
        {"noise_scale": -0.1},
        {"concentration": 0},
    ],
)
def test_impossible_values_are_refused(setting):
    with pytest.raises(FedbenchError, match="wrong setting for method fedbe"):
        build_job({"method": "fedbe", "dataset": "digits", **setting})


def test_no_gaussian_is_drawn_of_running_statistics(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("fedbe", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("fedbe").init_server(ctx)
    assert "w" in make_algorithm("fedbe", posterior="dirichlet").init_server(ctx)


# --- distillation ---


def test_the_server_holds_a_part_of_every_clients_data_and_no_labels(make_ctx):
    without, ctx = make_ctx("fedbe", clients=4), make_ctx("fedbe", clients=4, server_fraction=0.1)

    # 25 training samples each: 2 go to the server
    assert [*without.task.sizes] == [25] * 4
    assert [*ctx.task.sizes] == [23] * 4
    assert ctx.task.server_data().n == 8
    assert ctx.task.server_data().y.unique().tolist() == [-1]
    train, test = np.concatenate(ctx.task.split.train), np.concatenate(ctx.task.split.test)
    assert sorted([*train, *ctx.task.split.server]) == sorted(np.concatenate(without.task.split.train))
    assert not np.isin(ctx.task.split.server, np.concatenate([train, test])).any()
    assert without.task.server_data() is None


def test_a_student_takes_a_step_towards_its_teachers(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedbe", server_fraction=0.5, **tiny)  # one image of either client, in one batch
    params = {"distill": True, "noise_scale": 0.0, "var_floor": 0.0, "distill_epochs": 1, "distill_lr": 0.1}
    algorithm, zeros = make_algorithm("fedbe", temperature=0.5, **params), torch.zeros(6)

    merged = algorithm.aggregate(algorithm.init_server(ctx) | {"w": zeros}, uploads_of(biased(1.0, 0.0), zeros), ctx)

    # start: the average, biases (1/2, 0). The teachers, 3 samples, 2 clients and the average: directions (1, 0) and
    # none make samples of 1/2 * 1/2, so sigmoid(1/4) = 0.562177 thrice, 0.731059, 0.5 and 0.622459; their mean
    # 0.590008 is sharpened to 0.348110 / (0.348110 + 0.168093) = 0.674366; the student says 0.622459
    assert merged.keys() == {"w"}
    step = 0.1 * (0.674366 - 0.622459)
    assert merged["w"][4:].tolist() == pytest.approx([0.5 + step, -step], abs=1e-6)


def distilled(make_ctx, make_algorithm, **params):
    ctx = make_ctx("fedbe", server_fraction=0.4, lr=0.1, batch_size=5)
    algorithm = make_algorithm("fedbe", distill=True, **params)
    w = ctx.task.initial
    return algorithm.aggregate({"w": w}, uploads_of(w + 0.3 * w.sin(), w + 0.3 * w.cos()), ctx)["w"]


def test_without_epochs_the_student_is_fedavgs_average(make_ctx, make_algorithm):
    ctx = make_ctx("fedbe")
    w = ctx.task.initial
    fedavg = make_algorithm("fedavg").aggregate({"w": w}, uploads_of(w + 0.3 * w.sin(), w + 0.3 * w.cos()), ctx)["w"]

    assert torch.equal(distilled(make_ctx, make_algorithm, distill_epochs=0), fedavg)


def test_every_option_of_the_distillation_matters(make_ctx, make_algorithm):
    found = [
        distilled(make_ctx, make_algorithm, **params)
        for params in (
            {},
            {"temperature": 1.0},
            {"distill_lr": 0.01},
            {"distill_epochs": 10},
            {"swa_start": 1, "swa_every": 1},
            {"swa_start": 1},
            {"swa_start": 60},
        )
    ]

    assert len({tuple(w[-50:].tolist()) for w in found}) == len(found)


def test_swa_averages_the_iterates(make_ctx, make_algorithm):
    # 20 images in batches of 5: step 4 ends the first epoch, step 8 the second
    ends = [distilled(make_ctx, make_algorithm, distill_epochs=epochs) for epochs in (1, 2)]

    averaged = distilled(make_ctx, make_algorithm, distill_epochs=2, swa_start=4, swa_every=4)

    torch.testing.assert_close(averaged, (ends[0] + ends[1]) / 2)


def test_it_refuses_to_distil_without_data(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="no data to distil on"):
        make_algorithm("fedbe", distill=True).init_server(make_ctx("fedbe"))
