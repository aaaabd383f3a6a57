"""Mean-field Gaussians: the KL, its gradients, sampling, aggregation and prediction."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from fedbench.algorithm import Ctx, Upload
from fedbench.bayes import (
    RHO_RANGE,
    Gaussian,
    aggregate_gaussians,
    initial_gaussian,
    inverse_softplus,
    kl,
    predict_mc,
    predict_mean,
    random_coordinates,
    set_elbo_grad,
    set_prior_grad,
)
from fedbench.job import Protocol

D = 40
means = st.floats(-10, 10)
deviations = st.floats(1e-3, 10)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def gaussian(mu, sigma):
    return Gaussian(tensor(*mu), inverse_softplus(tensor(*sigma)))


def random_gaussian(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mu, rho = torch.randn(2, D, generator=generator, dtype=dtype)
    return Gaussian(mu, rho - 1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def no_loss(theta):
    return torch.zeros_like(theta)


# --- softplus and KL ---


@pytest.mark.parametrize(("rho", "sigma"), [(-2.5, 0.078890), (-3.0, 0.048587), (-2.0, 0.126928), (-1.0, 0.313262)])
def test_sigma_is_softplus_of_rho(rho, sigma):
    q = Gaussian(tensor(0.0), tensor(rho))

    assert q.sigma.item() == pytest.approx(sigma, abs=1e-6)


@given(st.floats(1e-5, 50))
def test_inverse_softplus_undoes_softplus(sigma):
    assert softplus(inverse_softplus(tensor(sigma))).item() == pytest.approx(sigma, rel=1e-6)


def test_kl_between_gaussians_has_the_worked_values():
    m1, s1, m2, s2 = tensor(1.0), tensor(0.5), tensor(0.0), tensor(1.0)

    # log(1/0.5) + (0.25 + 1)/2 - 0.5 = 0.693147 + 0.625 - 0.5
    assert kl(m1, s1, m2, s2) == pytest.approx(0.818147, abs=1e-6)
    # log(0.5/1) + (1 + 1)/(2 * 0.25) - 0.5 = -0.693147 + 4 - 0.5
    assert kl(m2, s2, m1, s1) == pytest.approx(2.806853, abs=1e-6)


def test_kl_sums_over_the_coordinates():
    m1, s1, m2, s2 = tensor(1.0, 0.0), tensor(0.5, 1.0), tensor(0.0, 1.0), tensor(1.0, 0.5)

    assert kl(m1, s1, m2, s2) == pytest.approx(0.818147 + 2.806853, abs=1e-6)


def test_kl_of_many_small_terms_is_summed_in_double_precision():
    # a million equal terms of 0.5 * 0.01^2 = 5e-5
    n = 1_000_000
    zeros, ones = torch.zeros(n), torch.ones(n)

    assert kl(zeros + 0.01, ones, zeros, ones) == pytest.approx(50.0, rel=1e-6)


@given(means, deviations, means, deviations)
def test_kl_is_never_negative(m1, s1, m2, s2):
    assert kl(tensor(m1), tensor(s1), tensor(m2), tensor(s2)) >= -1e-12


@given(means, deviations)
def test_kl_of_a_gaussian_to_itself_is_zero(m, s):
    assert kl(tensor(m), tensor(s), tensor(m), tensor(s)) == pytest.approx(0.0, abs=1e-12)


# --- gradients ---


def test_the_gradient_of_the_kl_has_the_worked_values():
    q, prior = Gaussian(tensor(0.5), tensor(-2.5)), gaussian([0.0], [0.1])

    set_elbo_grad(q, prior, 1.0, no_loss, 1.0, 1, generator())

    assert kl(q.mu, q.sigma, prior.mu, prior.sigma) == pytest.approx(12.548299, abs=1e-5)
    assert q.grad_mu.item() == pytest.approx(50.0, abs=1e-6)  # 0.5 / 0.1^2
    # (0.078890/0.01 - 1/0.078890) * sigmoid(-2.5) = (7.8890 - 12.6759) * 0.0758582
    assert q.grad_rho.item() == pytest.approx(-0.363129, abs=1e-6)


def slopes(function, at):
    """Central differences of a function of one vector."""
    steps = 1e-5 * torch.eye(D, dtype=torch.float64)
    return torch.stack([(tensor(function(at + h) - function(at - h)) / 2e-5).squeeze() for h in steps])


def test_the_gradient_over_q_is_the_finite_difference_of_the_kl():
    q, prior = random_gaussian(0), random_gaussian(1)

    set_elbo_grad(q, prior, 0.3, no_loss, 1.0, 1, generator())

    over_mu = slopes(lambda mu: 0.3 * kl(mu, q.sigma, prior.mu, prior.sigma), q.mu)
    over_rho = slopes(lambda rho: 0.3 * kl(q.mu, softplus(rho), prior.mu, prior.sigma), q.rho)
    torch.testing.assert_close(q.grad_mu, over_mu, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.grad_rho, over_rho, rtol=1e-6, atol=1e-6)


def test_the_gradient_over_the_prior_is_the_finite_difference_of_the_kl():
    q, prior = random_gaussian(0), random_gaussian(1)

    set_prior_grad(prior, q, 0.3)

    over_mu = slopes(lambda mu: 0.3 * kl(q.mu, q.sigma, mu, prior.sigma), prior.mu)
    over_rho = slopes(lambda rho: 0.3 * kl(q.mu, q.sigma, prior.mu, softplus(rho)), prior.rho)
    torch.testing.assert_close(prior.grad_mu, over_mu, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prior.grad_rho, over_rho, rtol=1e-6, atol=1e-6)


def autograd_kl(mu1, rho1, mu2, rho2):
    """The textbook KL, built so that autograd can follow it."""
    one, other = (torch.distributions.Normal(m, softplus(r)) for m, r in ((mu1, rho1), (mu2, rho2)))
    return torch.distributions.kl_divergence(one, other).sum()


def test_the_gradient_over_the_prior_is_that_of_autograd():
    q, prior = random_gaussian(2), random_gaussian(3)
    mu, rho = (t.detach().clone().requires_grad_() for t in (prior.mu, prior.rho))
    (0.7 * autograd_kl(q.mu, q.rho, mu, rho)).backward()

    set_prior_grad(prior, q, 0.7)

    torch.testing.assert_close(prior.grad_mu, mu.grad)
    torch.testing.assert_close(prior.grad_rho, rho.grad)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.001])
def test_the_gradient_of_the_elbo_is_that_of_autograd_on_the_same_noise(samples, scale):
    q, prior = random_gaussian(4, torch.float32), random_gaussian(5, torch.float32)
    mu, rho = (t.detach().clone().requires_grad_() for t in (q.mu, q.rho))
    noise = generator(9)
    losses = [
        torch.sin(mu + scale * softplus(rho) * torch.randn(D, generator=noise)).mul(torch.arange(D)).sum()
        for _ in range(samples)
    ]
    (torch.stack(losses).mean() + 0.7 * autograd_kl(mu, rho, prior.mu, prior.rho)).backward()

    set_elbo_grad(q, prior, 0.7, lambda theta: theta.cos() * torch.arange(D), scale, samples, generator(9))

    torch.testing.assert_close(q.grad_mu, mu.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.grad_rho, rho.grad, rtol=1e-4, atol=1e-4)


def test_a_gradient_replaces_the_one_before():
    q, prior = random_gaussian(0), random_gaussian(1)

    set_elbo_grad(q, prior, 1.0, no_loss, 1.0, 1, generator())
    once = q.grad.clone()
    set_elbo_grad(q, prior, 1.0, no_loss, 1.0, 1, generator())

    assert torch.equal(q.grad, once)


def test_the_gradient_of_the_kl_vanishes_where_q_is_the_prior():
    q, prior = random_gaussian(0), random_gaussian(0)

    set_elbo_grad(q, prior, 1.0, no_loss, 1.0, 1, generator())
    set_prior_grad(prior, q, 1.0)

    torch.testing.assert_close(q.grad, torch.zeros_like(q.grad))
    torch.testing.assert_close(prior.grad, torch.zeros_like(prior.grad))


def test_noise_of_scale_zero_takes_the_gradient_of_the_loss_at_the_mean():
    q, prior, seen = random_gaussian(0), random_gaussian(1), []

    set_elbo_grad(
        q, prior, 0.0, lambda theta: seen.append(theta.clone()) or torch.ones_like(theta), 0.0, 1, generator()
    )

    assert torch.equal(seen[0], q.mu)
    assert torch.equal(q.grad_mu, torch.ones_like(q.mu))
    assert not q.grad_rho.any()


def test_every_sample_draws_noise_of_its_own():
    q, prior, seen = random_gaussian(0), random_gaussian(1), []

    set_elbo_grad(q, prior, 0.0, lambda theta: seen.append(theta.clone()) or no_loss(theta), 1.0, 3, generator())

    assert len({tuple(theta.tolist()) for theta in seen}) == 3


# --- a posterior in training ---


def test_a_step_moves_mu_and_rho_along_their_gradients():
    q = Gaussian(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]))
    q.grad_mu.copy_(torch.tensor([1.0, -1.0]))
    q.grad_rho.copy_(torch.tensor([2.0, -2.0]))

    q.step(torch.optim.SGD([q.parameter], lr=0.1))

    assert q.state()["mu"].tolist() == pytest.approx([0.9, 2.1])
    assert q.state()["rho"].tolist() == pytest.approx([-1.2, -1.8])


def test_sigma_follows_a_step():
    q = Gaussian(torch.tensor([0.0]), torch.tensor([-1.0]))
    assert q.sigma.item() == pytest.approx(0.313262, abs=1e-6)  # softplus(-1)
    q.grad_rho.fill_(1.0)

    q.step(torch.optim.SGD([q.parameter], lr=1.0))

    assert q.sigma.item() == pytest.approx(0.126928, abs=1e-6)  # softplus(-2)


@pytest.mark.parametrize(("slope", "bound"), [(1e6, -12.0), (-1e6, 5.0)], ids=["below", "above"])
def test_rho_is_clamped(slope, bound):
    q = Gaussian(torch.tensor([3.0]), torch.tensor([0.0]))
    q.grad_rho.fill_(slope)

    q.step(torch.optim.SGD([q.parameter], lr=1.0))

    assert q.rho.item() == bound
    assert q.mu.item() == 3.0  # mu is free
    assert bound in RHO_RANGE


def test_a_state_is_a_copy():
    q = Gaussian(torch.tensor([1.0]), torch.tensor([-1.0]))
    state = q.state()

    q.grad.fill_(1.0)
    q.step(torch.optim.SGD([q.parameter], lr=1.0))

    assert state["mu"].item() == 1.0
    assert state["rho"].item() == -1.0


# --- initial values and point-valued normalisation ---


def test_initial_means_are_normal_and_rhos_constant(make_ctx):
    state = initial_gaussian(make_ctx(), -2.5, 0.1, "point")

    # 7,510 draws: the standard error of the deviation is 0.1 / sqrt(2 * 7510) = 0.0008
    assert state["mu"].std().item() == pytest.approx(0.1, abs=0.004)
    assert state["mu"].mean().item() == pytest.approx(0.0, abs=0.005)
    assert state["rho"].unique().tolist() == [-2.5]


@pytest.fixture
def norm_ctx(make_ctx, pictures):
    return make_ctx(dataset=pictures, model="vgg_s")


@pytest.fixture
def norm_net(norm_ctx):
    return norm_ctx.task.net


def test_point_valued_norms_start_as_the_identity(norm_ctx, norm_net):
    mu = initial_gaussian(norm_ctx, -2.5, 0.1, "point")["mu"]

    # gains 1, offsets 0
    assert mu[norm_net.norm_mask].unique().tolist() == [0.0, 1.0]


def test_gaussian_norms_start_like_any_other_parameter(norm_ctx, norm_net):
    mu = initial_gaussian(norm_ctx, -2.5, 0.1, "gaussian")["mu"]

    assert mu[norm_net.norm_mask].abs().max() < 0.5
    assert len(mu[norm_net.norm_mask].unique()) > 700


def test_initial_values_do_not_depend_on_what_the_network_holds(norm_ctx, norm_net):
    before = initial_gaussian(norm_ctx, -2.5, 0.1, "point")
    norm_net.load(torch.full_like(norm_net.vector, 7.0))  # as a client's training leaves it

    after = initial_gaussian(norm_ctx, -2.5, 0.1, "point")

    assert torch.equal(after["mu"], before["mu"])


def test_all_parameters_are_random_unless_norms_are_point_valued(norm_net, make_ctx):
    assert random_coordinates(norm_net, "gaussian") == 1.0
    assert random_coordinates(make_ctx().task.net, "point") == 1.0
    assert torch.equal(random_coordinates(norm_net, "point") == 0, norm_net.norm_mask)


def test_point_valued_parameters_get_no_noise_and_no_kl_gradient():
    q, prior = random_gaussian(0, torch.float32), random_gaussian(1, torch.float32)
    random, seen = torch.ones(D), []
    random[:5] = 0

    def loss_grad(theta):
        seen.append(theta.clone())
        return torch.full_like(theta, 2.0)

    set_elbo_grad(q, prior, 0.7 * random, loss_grad, random, 1, generator())
    set_prior_grad(prior, q, 0.7 * random)

    assert torch.equal(seen[0][:5], q.mu[:5])
    assert not torch.equal(seen[0][5:], q.mu[5:])
    assert q.grad_mu[:5].tolist() == [2.0] * 5  # the loss alone
    assert not q.grad_rho[:5].any()
    assert not prior.grad[:, :5].any()
    assert prior.grad[:, 5:].all()


def test_point_valued_parameters_get_no_noise_in_prediction(norm_ctx, norm_net):
    state = initial_gaussian(norm_ctx, -2.5, 0.1, "point")

    predict_mc(state, torch.zeros(2, 3, 32, 32), norm_net, random_coordinates(norm_net, "point"), 1, generator())

    assert torch.equal(norm_net.vector[norm_net.norm_mask], state["mu"][norm_net.norm_mask])
    assert not torch.equal(norm_net.vector[~norm_net.norm_mask], state["mu"][~norm_net.norm_mask])


# --- prediction ---


@pytest.fixture
def net(make_ctx):
    return make_ctx().task.net


@pytest.fixture
def model(make_ctx):
    return initial_gaussian(make_ctx(), 0.0, 0.1, "point")


@pytest.fixture
def images():
    return torch.rand(6, 1, 8, 8, generator=generator(4))


def test_rows_of_a_prediction_are_probabilities(model, images, net):
    mc = predict_mc(model, images, net, 1.0, 5, generator())

    for rows in (mc, predict_mean(model, images, net)):
        assert rows.shape == (6, 10)
        assert rows.min() >= 0
        torch.testing.assert_close(rows.sum(-1), torch.ones(6))


def test_mc_without_noise_is_the_mean_prediction(model, images, net):
    mc = predict_mc(model, images, net, 0.0, 4, generator())

    torch.testing.assert_close(mc, predict_mean(model, images, net))


def test_mc_with_noise_is_not_the_mean_prediction(model, images, net):
    mc = predict_mc(model, images, net, 1.0, 4, generator())

    assert not torch.allclose(mc, predict_mean(model, images, net), atol=1e-3)


def test_mc_averages_the_probabilities_of_its_draws_not_their_logits(model, images, net):
    noise, drawn = generator(8), []
    for _ in range(4):
        net.load(model["mu"] + 0.5 * softplus(model["rho"]) * torch.randn(net.d, generator=noise))
        drawn.append(net.logits(images).detach())

    mc = predict_mc(model, images, net, 0.5, 4, generator(8))

    torch.testing.assert_close(mc, torch.stack(drawn).softmax(-1).mean(0), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(mc, torch.stack(drawn).mean(0).softmax(-1), atol=1e-3)


def test_prediction_leaves_the_model_alone(model, images, net):
    before = {key: value.clone() for key, value in model.items()}

    predict_mc(model, images, net, 1.0, 2, generator())
    predict_mean(model, images, net)

    assert all(torch.equal(model[key], before[key]) for key in before)


# --- aggregation ---


def server_ctx(**protocol):
    return Ctx(None, Protocol(**{"weighting": "uniform", **protocol}), seed=0, round=1)


def uploads(mus, sigmas, n=None):
    sizes = n or [1] * len(mus)
    return [
        Upload(i, size, {"mu": torch.tensor([m]), "rho": inverse_softplus(torch.tensor([s]))})
        for i, (m, s, size) in enumerate(zip(mus, sigmas, sizes, strict=True))
    ]


def test_moment_matching_adds_the_spread_of_the_means():
    merged = aggregate_gaussians({}, uploads([0.0, 2.0], [0.1, 0.3]), server_ctx(), "moment")

    # (0.1^2 + 1 + 0.3^2 + 1) / 2
    assert merged["mu"].item() == pytest.approx(1.0)
    assert softplus(merged["rho"]).item() ** 2 == pytest.approx(1.05, abs=1e-5)


def test_averaging_parameters_ignores_the_spread_of_the_means():
    merged = aggregate_gaussians({}, uploads([0.0, 2.0], [0.1, 0.3]), server_ctx(), "param")

    # rho(0.1) = -2.252168, rho(0.3) = -1.050226: softplus(-1.651197)
    assert merged["mu"].item() == pytest.approx(1.0)
    assert softplus(merged["rho"]).item() == pytest.approx(0.175482, abs=1e-6)


def test_moment_matching_weighs_clients_by_their_samples():
    ctx = server_ctx(weighting="samples")

    merged = aggregate_gaussians({}, uploads([0.0, 2.0], [0.1, 0.3], n=[1, 3]), ctx, "moment")

    # mean 1.5; (0.01 + 1.5^2) / 4 + 3 (0.09 + 0.5^2) / 4 = 0.565 + 0.255
    assert merged["mu"].item() == pytest.approx(1.5)
    assert softplus(merged["rho"]).item() ** 2 == pytest.approx(0.82, abs=1e-5)


@pytest.mark.parametrize("how", ["param", "moment"])
def test_aggregation_goes_on_from_the_server_by_beta(how):
    server = {"mu": torch.tensor([5.0]), "rho": torch.tensor([-4.0])}
    at_one = aggregate_gaussians(server, uploads([0.0, 2.0], [0.1, 0.3]), server_ctx(), how)

    merged = aggregate_gaussians(server, uploads([0.0, 2.0], [0.1, 0.3]), server_ctx(beta=0.25), how)

    # 0.75 * 5 + 0.25 * 1
    assert merged["mu"].item() == pytest.approx(4.0)
    assert merged["rho"].item() == pytest.approx(0.75 * -4.0 + 0.25 * at_one["rho"].item())


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.floats(-6, 4, width=32)), min_size=1, max_size=5))
def test_aggregating_identical_clients_changes_nothing(values):
    mu, rho = torch.tensor(values).T.contiguous()
    identical = [Upload(i, 1, {"mu": mu, "rho": rho}) for i in range(3)]

    by_param = aggregate_gaussians({}, identical, server_ctx(), "param")
    by_moment = aggregate_gaussians({}, identical, server_ctx(), "moment")

    assert torch.equal(by_param["mu"], mu)
    assert torch.equal(by_param["rho"], rho)
    torch.testing.assert_close(by_moment["mu"], mu)
    torch.testing.assert_close(by_moment["rho"], rho, rtol=1e-4, atol=1e-4)


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(0.05, 2)), min_size=1, max_size=5),
    st.floats(-0.5, 0.5),
    st.floats(0.5, 2),
)
def test_moment_matching_minimises_the_mean_kl_to_the_server(clients, shift, stretch):
    mus, sigmas = zip(*clients, strict=True)
    merged = aggregate_gaussians({}, uploads(mus, sigmas), server_ctx(), "moment")
    mu, sigma = merged["mu"], softplus(merged["rho"])

    def mean_kl(m, s):
        return sum(kl(tensor(a), tensor(b), m, s) for a, b in clients) / len(clients)

    assert mean_kl(mu, sigma) <= mean_kl(mu + shift, sigma * stretch) + 1e-5


def test_aggregation_keeps_rho_in_its_range():
    # clients a thousand apart: sigma = 500 would have rho = 500
    merged = aggregate_gaussians({}, uploads([0.0, 1000.0], [0.1, 0.1]), server_ctx(), "moment")

    assert merged["rho"].item() == 5.0


@pytest.mark.parametrize("how", ["param", "moment"])
def test_an_aggregate_is_float32_as_its_uploads_were(how):
    merged = aggregate_gaussians({}, uploads([0.0, 2.0], [0.1, 0.3]), server_ctx(), how)

    assert {value.dtype for value in merged.values()} == {torch.float32}
