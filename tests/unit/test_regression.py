"""Regression in the ordinary engine, on two quadratic clients, against closed forms and a reference in numpy.

Along the common principal directions of the quadratics (curvatures 1 and 10, exchanged between the clients), a method
that pulls a client's model towards its optimum by a part g(h) in a direction of curvature h ends where the exact
solution would be if the condition were c = g(10) / g(1), that is at 0.2 (c - 1)/(c + 1) (cos 40 + sin 40, sin 40 - cos
40): at a distance of 0.2 sqrt(2) (9/11 - (c - 1)/(c + 1)) from the exact global mean.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbench.algorithm import Algorithm, fits_regression, methods
from fedbench.errors import FedbenchError
from fedbench.metrics import Errors
from fedbench.models.network import Network
from fedbench.simulation import Surroundings, simulate, train_round
from fedbench.training import backward

ANGLE = math.radians(20)
ALONG, ACROSS = (np.array([[math.cos(ANGLE)], [math.sin(ANGLE)]]), np.array([[-math.sin(ANGLE)], [math.cos(ANGLE)]]))
CURVATURES = [ALONG @ ALONG.T + 10 * ACROSS @ ACROSS.T, 10 * ALONG @ ALONG.T + ACROSS @ ACROSS.T]


def optima(scale=0.2):
    return [np.array([-scale, -scale]), np.array([scale, scale])]


@pytest.fixture
def run(make_job, regression, recorder, tmp_path):
    """Simulate a job on the quadratics; what it recorded."""

    def simulated(method, **settings):
        job = make_job(method, **{**regression, **settings})
        assert simulate(job, recorder, Surroundings(tmp_path)) == "done"
        return recorder

    return simulated


# --- the network ---


@pytest.fixture
def net():
    """w^T x with w = (1, 2), for regression."""
    network = Network(
        nn.Sequential(nn.Flatten(), nn.Linear(2, 1, bias=False)), torch.device("cpu"), trained="all", regression=True
    )
    network.load(torch.tensor([1.0, 2.0]))
    return network


def test_the_loss_is_half_the_mean_squared_error(net):
    x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([0.0, 5.0])

    loss = backward(net, x, y)

    # predictions 1 and 3, errors 1 and -2: (1 + 4) / 2 / 2; gradient (1 * (1, 0) - 2 * (1, 1)) / 2
    assert loss.item() == 1.25
    assert net.grad.tolist() == [-0.5, -1.0]


def test_the_prediction_is_the_number_itself(net):
    assert net.predict(torch.tensor([[1.0, 0.0], [1.0, 1.0]])).tolist() == [1.0, 3.0]


# --- metrics ---


def test_the_rmse_is_the_root_of_the_mean_square_per_client_and_pooled():
    errors = Errors.zeros(3)
    errors.add(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]), torch.tensor([0, 0]))
    errors.add(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([2]))

    # errors 3 and 4: root of 25/2; error 1; together the root of 26/3. Client 1 has no samples.
    assert errors.rows() == [{"rmse": pytest.approx(math.sqrt(12.5))}, {}, {"rmse": 1.0}]
    assert errors.pooled().rows() == [{"rmse": pytest.approx(math.sqrt(26 / 3))}]


def test_an_evaluation_has_the_rmse_and_nothing_of_classes(run):
    final = run("ditto", rounds=2).evaluations(stage="final", view="pm")

    assert [set(metrics) for metrics in final[0].metrics.values()] == [{"rmse"}] * 3
    assert list(final[0].metrics) == [None, 0, 1]
    assert final[0].reliability == final[0].entropy == {}


def test_the_best_round_is_the_one_with_the_smallest_error(run):
    # one step per round multiplies the distance from the global mean by 1 - 0.4 * 11/2 = -1.2
    recorder = run("fedavg", lr=0.4, rounds=5, rule="best_all")

    distances = recorder.curve("gm", "rmse")
    (best,) = recorder.evaluations(stage="best", view="gm")
    assert min(distances, key=distances.get) == best.round == 1
    assert best.metrics[None]["rmse"] == distances[1] < distances[5]


def test_progress_shows_no_accuracy(make_job, regression, recorder, tmp_path):
    told = []
    place = Surroundings(tmp_path, progress=lambda round_, accuracy: told.append((round_, accuracy)))

    simulate(make_job("fedavg", **regression, rounds=2), recorder, place)

    assert told == [(1, {}), (2, {})]


# --- FedAvg ---


def test_fedavg_follows_gradient_descent_in_closed_form(make_ctx, make_algorithm, begin_training, regression):
    ctx = make_ctx(**regression, lr=0.0316, tau=20)
    progress, w = begin_training(make_algorithm("fedavg"), ctx), ctx.task.initial.double().numpy()

    for _ in range(3):
        train_round(make_algorithm("fedavg"), progress, ctx)
        # 20 steps leave (I - lr H)^20 of a client's distance from its optimum
        left = [np.linalg.matrix_power(np.eye(2) - 0.0316 * h, 20) for h in CURVATURES]
        w = sum(mu + part @ (w - mu) for mu, part in zip(optima(), left, strict=True)) / 2

        assert progress.server["w"].tolist() == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize(
    ("lr", "tau", "rounds", "distance"),
    [
        (0.0316, 1, 150, 0.0),  # one step is a step on the common objective: c = 10
        (0.0316, 20, 30, 0.130511),  # c = (1 - 0.684^20) / (1 - 0.9684^20) = 0.999498 / 0.473867 = 2.109237
        (0.1, 150, 3, 0.231417),  # clients end at their optima, the model between them: c = 1, 0.2 sqrt(2) 9/11 away
    ],
)
def test_fedavg_ends_the_farther_from_the_global_mean_the_longer_clients_train(run, lr, tau, rounds, distance):
    recorder = run("fedavg", lr=lr, tau=tau, rounds=rounds)

    (final,) = recorder.evaluations(stage="final", view="gm")
    assert final.metrics[None]["rmse"] == pytest.approx(distance, abs=2e-6)
    assert final.metrics[0] == final.metrics[1]  # both clients ask for the same distance


# --- FedABML ---


def reference_path(start, nu0, rounds, *, lr, lr_theta, tau, k, weight, first_order, scale):
    """FedABML with exact expectations: E[grad f] = H (m - mu), and over nu diag(H) sigma^2; the means m of theta."""
    m, nu, path = np.array(start), np.full(2, nu0), []
    for _ in range(rounds):
        copies = []
        for h, mu in zip(CURVATURES, optima(scale), strict=True):
            theta, phi = np.array([m, nu]), np.array([m, nu])

            def over_phi(phi, theta, h=h, mu=mu):
                variance, prior = np.exp(2 * phi[1]), np.exp(2 * theta[1])
                over_mean = h @ (phi[0] - mu) + weight * (phi[0] - theta[0]) / prior
                return np.array([over_mean, np.diag(h) * variance + weight * (variance / prior - 1)])

            for _ in range(tau):
                for _ in range(k):
                    phi = phi - lr * over_phi(phi, theta)
                prior, gap = np.exp(2 * theta[1]), theta[0] - phi[0]
                grad = weight * np.array([gap / prior, 1 - (np.exp(2 * phi[1]) + gap**2) / prior])
                theta = theta - lr_theta * (grad + (over_phi(phi, theta) if first_order else 0))
            copies.append(theta)
        m, nu = np.mean(copies, axis=0)
        path.append(m)
    return np.array(path)


# KL weight lambda / n: with sigma = exp(-10) a spring of rho = lambda / (n sigma^2) = 5 holds phi to theta
LAM = 5 * 4 * math.exp(-20)


@pytest.mark.parametrize("theta_grad", ["first_order", "partial"])
@pytest.mark.parametrize("lr_theta", [None, 0.00316])
def test_fedabml_follows_the_reference(make_ctx, make_algorithm, begin_training, regression, theta_grad, lr_theta):
    ctx = make_ctx("fedabml", **regression, lr=0.0316, tau=20)
    algorithm = make_algorithm("fedabml", nu0=-10, lam=LAM, theta_grad=theta_grad, lr_theta=lr_theta)
    progress, path = begin_training(algorithm, ctx), []
    for _ in range(4):
        train_round(algorithm, progress, ctx)
        path.append(progress.server["mu"].tolist())

    expected = reference_path(
        ctx.task.initial.tolist(),
        -10.0,
        4,
        lr=0.0316,
        lr_theta=lr_theta or 0.0316,
        tau=20,
        k=5,
        weight=LAM / 4,
        first_order=theta_grad == "first_order",
        scale=0.2,
    )
    # weight samples are off by 4.5e-5, and so gradients by up to 4.5e-4
    assert np.abs(np.array(path) - expected).max() < 3e-4


@pytest.mark.parametrize("theta_grad", ["first_order", "partial"])
def test_fedabml_ends_at_the_minimiser_of_the_moreau_envelopes(
    make_ctx, make_algorithm, begin_training, regression, theta_grad
):
    # on so small a scale nu stays; phi is where 40 steps end, and theta takes one step per round
    ctx = make_ctx("fedabml", **{**regression, "dataset": "quadratics[scale=0.02]"}, lr=0.1)
    algorithm = make_algorithm("fedabml", lam=LAM, k=40, theta_grad=theta_grad)
    progress = begin_training(algorithm, ctx, {"mu": torch.zeros(2), "nu": torch.full((2,), -10.0)})

    for number in range(1, 41):
        train_round(algorithm, progress, replace(ctx, round=number))

    # the exact solution for Sigma_i + I/rho, whose variances are 1.2 and 0.3, so that c = 4:
    # 0.02 * 3/5 * (cos 40 + sin 40, sin 40 - cos 40); the exact global mean is 0.006171 away
    assert progress.server["mu"].tolist() == pytest.approx([0.016906, -0.001479], abs=2e-4)


def test_the_mean_over_weight_samples_predicts_numbers_too(run):
    recorder = run("fedabml", lr=0.0316, rounds=3, nu0=-10, lam=LAM)

    mean, sampled = (recorder.evaluations(stage="final", view="gm", predict=mode)[0] for mode in ("mean", "mc"))
    # sigma is 4.5e-5
    assert sampled.metrics[None]["rmse"] == pytest.approx(mean.metrics[None]["rmse"], abs=1e-3)
    assert sampled.metrics[None]["rmse"] != mean.metrics[None]["rmse"]


# --- who may ---


class Says(Algorithm):
    title = "Says"
    regression = True


class Inherits(Says):
    title = "Inherits"


def test_a_class_says_for_itself_that_it_fits_regression():
    assert fits_regression(Says)
    assert not fits_regression(Inherits)
    assert {name for name in methods.names() if fits_regression(methods.get(name))} >= {"fedavg", "fedabml"}


def test_a_method_that_needs_classes_is_refused_with_those_that_do_not(make_job, add_method, regression):
    add_method("inherits", Inherits)

    with pytest.raises(FedbenchError, match="quadratics is regression, and method inherits needs classes") as caught:
        make_job("inherits", **regression)

    assert "fedabml" in caught.value.hint


@pytest.mark.parametrize("partition", ["labels", "shards", "dirichlet"])
def test_a_partition_that_needs_classes_is_refused(make_job, regression, partition):
    settings = {key: value for key, value in regression.items() if key not in ("test_fraction", "min_size")}

    with pytest.raises(FedbenchError, match=f"and partition {partition} needs classes"):
        make_job("fedavg", **{**settings, "partition": partition})


def test_settings_for_images_and_classes_are_named_together(make_job, regression):
    with pytest.raises(FedbenchError, match="not all settings fit") as caught:
        make_job("fedavg", **{**regression, "headline": "macro", "normalize": "half", "augment": "crop_flip"})

    assert caught.value.hint == "Set headline: rmse, normalize: none, augment: none."


def test_the_rmse_of_classes_is_refused(make_job):
    with pytest.raises(FedbenchError, match="headline rmse is for regression; digits has classes"):
        make_job("fedavg", headline="rmse")
