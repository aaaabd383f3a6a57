"""Prior, likelihood and prediction at particles: closed forms against densities written out, autograd, differences."""

import math

import pytest
import torch
from torch.distributions import Gamma, Normal

from fedbench.models import build_model
from fedbench.models.bayesian import ParticleModel
from fedbench.models.network import Network

CPU = torch.device("cpu")
SHAPE = (1, 1, 5)
GENERATOR = torch.Generator


def model_of(name, classes=3, shape=SHAPE, trained="all", **options):
    net = Network(build_model(name, shape, classes), CPU, trained=trained)
    net.initialise(GENERATOR().manual_seed(3))
    return ParticleModel(net, **options)


def regression(**options):
    return model_of("blr", classes=2, **options)


def samples(n=7, classes=3, shape=SHAPE):
    rng = GENERATOR().manual_seed(1)
    x = torch.randn(n, *shape, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, classes, (n,), generator=rng)


def particles_of(model, count=4):
    return 0.5 * torch.randn(count, model.net.d, generator=GENERATOR().manual_seed(2), dtype=torch.float64)


def autograd(f, particles):
    moving = particles.clone().requires_grad_()
    (found,) = torch.autograd.grad(sum(f(row) for row in moving), moving)
    return found


# --- what the coordinates are ---


@pytest.mark.parametrize(("name", "classes", "d"), [("blr", 2, 6), ("bnn100", 9, 5 * 100 + 100 + 900 + 9 + 1)])
def test_the_log_precision_is_one_coordinate_more(name, classes, d):
    assert model_of(name, classes).net.d == d


def test_a_network_without_a_precision_has_only_weights():
    model = model_of("dnn100")

    assert not model.has_precision
    assert torch.equal(model.clamped(particles_of(model)), particles_of(model))


# --- logistic regression ---


def test_the_score_of_the_regressions_prior_is_the_cards_formula():
    particles = torch.tensor([[math.log(2.0), 1.0, -2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

    score = regression().prior_score(particles)

    # D/2 - (xi/2) ||w||^2 + (a - 1) - b xi + 1 with D = 5, xi = 2, ||w||^2 = 5, a = 1, b = 0.01; -xi w
    assert score.tolist()[0] == pytest.approx([2.5 - 5 - 0.02 + 1, -2.0, 4.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(("gamma", "rate"), [("rate", 0.01), ("scale", 100.0)])
def test_the_score_of_the_regressions_prior_is_the_gradient_of_its_density(gamma, rate):
    model = regression(gamma=gamma)
    particles = particles_of(model)

    def log_prior(theta):
        xi = theta[0].exp()
        # the density of log xi is that of xi times xi
        return Gamma(1.0, rate).log_prob(xi) + theta[0] + Normal(0.0, xi**-0.5).log_prob(theta[1:]).sum()

    torch.testing.assert_close(model.prior_score(particles), autograd(log_prior, particles))


def test_class_1_of_the_regression_is_plus_one():
    model, (x, _) = regression(), samples()
    particle = torch.tensor([0.3, 1.0, -1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1, 0, 1])

    # sum log sigmoid(y w^T x) with y = -1 or +1
    signs = 2.0 * y - 1
    expected = torch.sigmoid(signs * (x.flatten(1) @ particle[1:])).log().sum()
    torch.testing.assert_close(model.log_likelihood(particle, x, y), expected)


def test_the_closed_form_of_the_regressions_score_is_the_gradient():
    model, (x, y) = regression(), samples(classes=2)
    particles = particles_of(model)

    expected = autograd(lambda theta: model.log_likelihood(theta, x, y), particles)

    torch.testing.assert_close(model.likelihood_score(particles, x, y, n=7), expected)
    assert torch.equal(expected[:, 0], torch.zeros(4, dtype=torch.float64))


def test_a_regression_predicts_with_the_mean_sigmoid():
    model, (x, _) = regression(), samples()
    particles = particles_of(model)

    probabilities = model.probabilities(particles, x)

    expected = torch.sigmoid(x.flatten(1) @ particles[:, 1:].T).mean(1)
    torch.testing.assert_close(probabilities[:, 1], expected)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(7, dtype=torch.float64))


# --- networks ---


def by_hand(particle, x, classes=3):
    """Outputs of a bnn100 vector: log gamma, 100x5 weights, 100 biases, 3x100 weights, 3 biases."""
    first, bias, second, last = particle[1:].split([500, 100, 100 * classes, classes])
    hidden = torch.relu(x.flatten(1) @ first.view(100, 5).T + bias)
    return hidden @ second.view(classes, 100).T + last


def test_outputs_are_those_of_the_network_written_out():
    model, (x, _) = model_of("bnn100"), samples()
    particles = particles_of(model)

    outputs = model.outputs(particles, x)

    assert outputs.shape == (4, 7, 3)
    for row, particle in zip(outputs, particles, strict=True):
        torch.testing.assert_close(row, by_hand(particle, x))


def test_the_gaussian_likelihood_is_a_normal_density_around_the_one_hot_target():
    model, (x, y) = model_of("bnn100"), samples()
    (particle,) = particles_of(model, 1)

    targets = torch.eye(3, dtype=torch.float64)[y]
    expected = Normal(by_hand(particle, x), particle[0].exp() ** -0.5).log_prob(targets).sum()
    torch.testing.assert_close(model.log_likelihood(particle, x, y), expected)


def test_the_categorical_likelihood_is_the_softmax_and_has_no_precision():
    model, (x, y) = model_of("bnn100", gaussian=False), samples()
    (particle,) = particles_of(model, 1)

    expected = by_hand(particle, x).log_softmax(1)[torch.arange(7), y].sum()
    torch.testing.assert_close(model.log_likelihood(particle, x, y), expected)
    assert model.likelihood_score(particle[None], x, y, n=7)[0, 0] == 0


@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("name", ["bnn100", "dnn100"])
def test_the_scores_of_all_particles_are_their_gradients_by_differences(name, gaussian):
    model, (x, y) = model_of(name, gaussian=gaussian), samples()
    particles, step = particles_of(model, 2), 1e-6

    score = model.likelihood_score(particles, x, y, n=7)

    for coordinate in (0, 3, 550, 700, model.net.d - 1):
        for row in (0, 1):
            up, down = particles[row].clone(), particles[row].clone()
            up[coordinate] += step
            down[coordinate] -= step
            slope = (model.log_likelihood(up, x, y) - model.log_likelihood(down, x, y)) / (2 * step)
            assert score[row, coordinate].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("gamma", "rate"), [("rate", 0.1), ("scale", 10.0)])
def test_the_score_of_a_networks_prior_is_the_gradient_of_its_density(gamma, rate):
    model = model_of("bnn100", gamma=gamma)
    particles = particles_of(model)

    def log_prior(theta):
        weights = Normal(0.0, math.e**-0.5).log_prob(theta[1:]).sum()
        return Gamma(1.0, rate).log_prob(theta[0].exp()) + theta[0] + weights

    torch.testing.assert_close(model.prior_score(particles), autograd(log_prior, particles))


@pytest.mark.parametrize("model", [model_of("bnn100", classes=2), regression()], ids=["network", "regression"])
def test_the_batch_stands_for_all_samples_and_the_prior_counts_once(model):
    x, y = samples(classes=2)
    particles = particles_of(model)

    likelihood = model.likelihood_score(particles, x, y, n=7)

    torch.testing.assert_close(model.likelihood_score(particles, x, y, n=700), 100 * likelihood)
    torch.testing.assert_close(model.score(particles, x, y, n=700), model.prior_score(particles) + 100 * likelihood)


def test_gaussian_outputs_are_averaged_and_probabilities_too():
    (x, _), particles = samples(), particles_of(model_of("bnn100"))
    outputs = torch.stack([by_hand(particle, x) for particle in particles])

    gaussian = model_of("bnn100").probabilities(particles, x)
    categorical = model_of("bnn100", gaussian=False).probabilities(particles, x)

    torch.testing.assert_close(gaussian, outputs.mean(0).softmax(-1))
    assert torch.equal(gaussian.argmax(1), outputs.mean(0).argmax(1))
    torch.testing.assert_close(categorical, outputs.softmax(-1).mean(0))


@pytest.mark.parametrize("trained", ["all", "body"])
def test_a_convolutional_network_and_a_frozen_head_are_those_of_the_network(trained):
    # convolutions lie channels-last in the vector
    model = model_of("vgg_s", classes=4, shape=(3, 32, 32), trained=trained)
    x = torch.rand(6, 3, 32, 32, generator=GENERATOR().manual_seed(1))
    vector = model.net.vector.detach() + 0.01 * torch.randn(model.net.d, generator=GENERATOR().manual_seed(2))

    outputs = model.outputs(vector[None], x)[0]

    model.net.load(vector)
    torch.testing.assert_close(outputs, model.net.logits(x).detach(), rtol=1e-4, atol=1e-4)


# --- initial particles ---


def initial(model, count=2000):
    x, y = samples(50, classes=2 if model.is_regression else 3)
    return model.initial(count, x.float(), y, GENERATOR().manual_seed(0))


@pytest.mark.parametrize(("gamma", "mean"), [("rate", 100.0), ("scale", 0.01)])
def test_regressions_are_drawn_from_the_prior(gamma, mean):
    particles = initial(regression(gamma=gamma))
    log_xi, w = particles[:, 0], particles[:, 1:]

    # xi is exponential: the mean of 2000 draws is within 7 percent (3 deviations) of its mean
    assert log_xi.exp().mean().item() == pytest.approx(mean, rel=0.07)
    # w sqrt(xi) is standard normal; 10,000 values
    standard = w * (log_xi / 2).exp()[:, None]
    assert standard.mean().item() == pytest.approx(0.0, abs=0.04)
    assert standard.std().item() == pytest.approx(1.0, abs=0.03)


def test_networks_are_drawn_with_the_variance_of_their_inputs_and_no_biases():
    particles = initial(model_of("bnn100"), count=20)
    first, bias, second, last = particles[:, 1:].split([500, 100, 300, 3], dim=1)

    # 1 / (fan_in + 1) with 5 and 100 inputs
    assert first.var().item() == pytest.approx(1 / 6, rel=0.05)
    assert second.var().item() == pytest.approx(1 / 101, rel=0.06)
    assert first.mean().item() == pytest.approx(0, abs=0.02)
    assert not bias.any()
    assert not last.any()
    assert len({tuple(row) for row in particles.tolist()}) == 20


def test_the_noise_precision_fits_every_particles_residuals():
    model, (x, y) = model_of("bnn100"), samples(50)

    particles = model.initial(3, x.float(), y, GENERATOR().manual_seed(0))

    for particle in particles.double():
        mean_square = (by_hand(particle, x) - torch.eye(3, dtype=torch.float64)[y]).square().mean()
        assert particle[0].item() == pytest.approx(-math.log(mean_square), abs=1e-4)


def test_log_precisions_stay_within_their_bound():
    particles = particles_of(regression())
    particles[:, 0] = torch.tensor([-11.0, -1.0, 9.0, 30.0])

    clamped = regression(bound=8.0).clamped(particles)

    assert clamped[:, 0].tolist() == [-8, -1, 8, 8]
    assert torch.equal(clamped[:, 1:], particles[:, 1:])
    assert particles[3, 0] == 30
    assert initial(regression(bound=0.5))[:, 0].abs().max() <= 0.5
