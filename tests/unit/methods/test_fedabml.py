"""FedABML against autograd in double precision, and in the cases where it is a simpler method."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fedbench.algorithms.fedabml import NU_RANGE, LogGaussian
from fedbench.bayes import kl, set_prior_grad


def gaussian(mu, nu):
    return {"mu": torch.as_tensor(mu), "nu": torch.as_tensor(nu)}


def random_gaussian(seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    return gaussian(0.5 * torch.randn(d, generator=generator), -1 + 0.3 * torch.randn(d, generator=generator))


# --- a Gaussian with sigma = exp(nu) ---


def test_sigma_is_the_exponential_of_nu():
    q = LogGaussian(torch.zeros(2), torch.tensor([-3.0, 0.0]))

    assert q.sigma.tolist() == pytest.approx([0.049787, 1.0], abs=1e-6)


def test_the_kl_of_the_specification_and_its_gradient_over_the_prior():
    # m1 = 1, s1 = 0.5, m2 = 0, s2 = 1
    q, prior = LogGaussian(torch.ones(1), torch.tensor([math.log(0.5)])), LogGaussian(torch.zeros(1), torch.zeros(1))

    set_prior_grad(prior, q, 1.0)

    assert kl(q.mu, q.sigma, prior.mu, prior.sigma) == pytest.approx(0.818147, abs=1e-6)
    # over m2: (m2 - m1) / s2^2; over nu2: 1 - (s1^2 + (m1 - m2)^2) / s2^2
    assert prior.grad.flatten().tolist() == pytest.approx([-1.0, -0.25])


def test_nu_stays_in_its_range():
    q = LogGaussian(torch.zeros(2), torch.tensor([-9.9, 0.9]))
    q.grad_rho.copy_(torch.tensor([1.0, -1.0]))

    q.step(torch.optim.SGD([q.parameter], lr=1.0))

    assert tuple(q.rho.tolist()) == NU_RANGE
    assert q.sigma.tolist() == pytest.approx([math.exp(-10), math.e])


# --- a round ---


def reference_update(start, batches, noise, *, weight, k, samples, first_order, reset, lr):
    """The card's update by autograd on [mu, nu] in double precision."""

    def loss(q, x, y):
        draws = [q[0] + q[1].exp() * torch.randn(6, generator=noise).double() for _ in range(samples)]
        return sum(cross_entropy(linear(x.double().flatten(1), w[:4].view(2, 2), w[4:]), y) for w in draws) / samples

    def penalty(q, p):
        normal = torch.distributions.Normal
        return weight * torch.distributions.kl_divergence(normal(q[0], q[1].exp()), normal(p[0], p[1].exp())).sum()

    phi = theta = torch.stack([start["mu"], start["nu"]]).double()
    for x, y in batches:
        phi = theta if reset else phi
        for _ in range(k):
            q = phi.clone().requires_grad_()
            phi = phi - lr * torch.autograd.grad(loss(q, x, y) + penalty(q, theta), q)[0]
        q, p = phi.clone().requires_grad_(), theta.clone().requires_grad_()
        objective = penalty(q, p) + (loss(q, x, y) if first_order else 0.0)
        over_phi, over_theta = torch.autograd.grad(objective, [q, p])
        theta = theta - lr * (over_theta + (over_phi if first_order else 0.0))
    return theta


@pytest.mark.parametrize("theta_grad", ["first_order", "partial"])
@pytest.mark.parametrize("phi", ["carry", "reset"])
@pytest.mark.parametrize("kl_scale", ["per_sample", "per_client"])
def test_a_round_is_autograd_on_the_same_noise(make_ctx, make_algorithm, tiny, theta_grad, phi, kl_scale):
    ctx = make_ctx("fedabml", client=1, lr=0.05, local_unit="batch", tau=3, **{**tiny, "batch_size": 1})
    down, data = random_gaussian(1), ctx.task.train_data(1)
    expected = reference_update(
        down,
        list(data.batches(1, ctx.rng("batches"), steps=3)),
        ctx.rng("noise"),
        weight=0.4 / 2 if kl_scale == "per_sample" else 0.4,  # n = 2
        k=2,
        samples=3,
        first_order=theta_grad == "first_order",
        reset=phi == "reset",
        lr=0.05,
    )

    algorithm = make_algorithm("fedabml", lam=0.4, k=2, samples=3, theta_grad=theta_grad, phi=phi, kl_scale=kl_scale)
    message, memory = algorithm.update(down, {}, data, ctx)

    torch.testing.assert_close(torch.stack([message["mu"], message["nu"]]).double(), expected, rtol=0, atol=1e-5)
    assert memory == {}


def test_the_server_averages_with_equal_weights(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("fedabml", **tiny)
    ctx.task.split.train[1] = ctx.task.split.train[1][:1]  # client 1 is left with one sample of three
    algorithm, server = make_algorithm("fedabml"), random_gaussian(1)
    copies = [algorithm.update(server, {}, ctx.task.train_data(c), ctx.at(c))[0] for c in (0, 1)]

    merged = run_rounds(algorithm, ctx, server=server).server

    for key in ("mu", "nu"):
        torch.testing.assert_close(merged[key], (copies[0][key] + copies[1][key]) / 2)


# --- special cases ---


def test_without_variance_and_kl_the_first_batch_is_first_order_perfedavg(make_ctx, make_algorithm):
    # one batch of all samples, so that the inner and the outer batch of Per-FedAvg are this one
    ctx = make_ctx("fedabml", client=0, lr=0.5, local_unit="batch", tau=1, batch_size=1000)
    data, w = ctx.task.train_data(0), ctx.task.initial

    abml, _ = make_algorithm("fedabml", lam=0.0, k=1).update(gaussian(w, torch.full_like(w, -10.0)), {}, data, ctx)
    meta, _ = make_algorithm("perfedavg", lr_inner=0.5).update({"w": w}, {}, data, ctx)
    plain, _ = make_algorithm("fedavg").update({"w": w}, {}, data, ctx)

    # sigma is exp(-10) = 4.5e-5, which moves gradients by about as much
    assert (abml["mu"] - meta["w"]).norm() < 1e-2 * (meta["w"] - plain["w"]).norm()


def test_without_variance_kl_and_inner_steps_it_is_fedavg(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", client=0, lr=0.1, momentum=0.9, tau=3)
    data, w = ctx.task.train_data(0), ctx.task.initial

    abml, _ = make_algorithm("fedabml", lam=0.0, k=0).update(gaussian(w, torch.full_like(w, -10.0)), {}, data, ctx)
    average, _ = make_algorithm("fedavg").update({"w": w}, {}, data, ctx)

    assert (abml["mu"] - average["w"]).norm() < 1e-2 * (average["w"] - w).norm()


def test_the_partial_gradient_without_kl_does_not_move_theta(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", client=0)
    algorithm = make_algorithm("fedabml", theta_grad="partial", lam=0.0)
    server = algorithm.init_server(ctx)

    message, _ = algorithm.update(server, {}, ctx.task.train_data(0), ctx)

    assert all(torch.equal(message[key], server[key]) for key in server)


def test_point_valued_norms_learn_from_the_partial_gradient_too(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("fedabml", client=0, dataset=pictures, model="vgg_s", lr=0.1)
    algorithm = make_algorithm("fedabml", theta_grad="partial", k=1, samples=1)
    server, is_norm = algorithm.init_server(ctx), ctx.task.net.norm_mask

    message, _ = algorithm.update(server, {}, ctx.task.train_data(0), ctx)

    assert not torch.equal(message["mu"][is_norm], server["mu"][is_norm])
    assert torch.equal(message["nu"][is_norm], server["nu"][is_norm])


# --- models ---


def test_the_personal_model_starts_at_theta_and_fits_the_client(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", client=0, lr=0.1)
    algorithm, data = make_algorithm("fedabml", k=2, samples=1), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)

    none, some = (algorithm.personal_model(server, {}, data, ctx, epochs) for epochs in (0, 5))

    assert all(torch.equal(none[key], server[key]) for key in server)
    with torch.no_grad():
        right = [(algorithm.predict(m, data.x, ctx, "mean").argmax(1) == data.y).float().mean() for m in (none, some)]
    assert right[1] > right[0] + 0.3


def test_by_default_a_personal_model_takes_so_many_passes(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", client=0)
    algorithm, data = make_algorithm("fedabml", passes=2, k=1, samples=1), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)

    default, two = (algorithm.personal_model(server, {}, data, ctx, epochs) for epochs in (None, 2))

    assert torch.equal(default["mu"], two["mu"])


def test_a_personal_model_of_the_head_leaves_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", client=0, adapt_part="head", lr=0.1)
    algorithm, net = make_algorithm("fedabml", k=1, samples=1), ctx.task.net
    server = algorithm.init_server(ctx)

    found = algorithm.personal_model(server, {}, ctx.task.train_data(0), ctx, 1)

    for key in ("mu", "nu"):
        assert torch.equal(found[key][net.body], server[key][net.body])
        assert not torch.equal(found[key][net.head], server[key][net.head])


def test_sampled_predictions_use_the_exponential(make_ctx, make_algorithm, tiny):
    # the first weight of class 0 is N(1, 1), all others are 0: on the pixels (3, 0) the logits differ by 3 + 3 z
    ctx = make_ctx("fedabml", mc_samples=4000, **tiny)
    model = gaussian([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, -10.0, -10.0, -10.0, -10.0, -10.0])
    x = torch.tensor([[[[3.0, 0.0]]]])

    with torch.no_grad():
        drawn = make_algorithm("fedabml").predict(model, x, ctx, "mc")

    # E sigmoid(3 + 3 z), by quadrature
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = (-(z**2) / 2).exp()
    expected = ((3 + 3 * z).sigmoid() * density).sum() / density.sum()
    assert drawn[0, 0].item() == pytest.approx(expected.item(), abs=0.03)


def test_both_terms_of_a_clients_objective_are_recorded(make_ctx, make_algorithm):
    """Without steps phi is theta: the loss is that of the network, and the KL is 0; with steps it is not."""
    ctx = make_ctx("fedabml", batch_size=20).at(0)
    data = ctx.task.train_data(0)
    plain, trained = make_algorithm("fedabml", k=0), make_algorithm("fedabml", k=3, lam=0.5, samples=1)
    server = plain.init_server(ctx)
    ctx.task.net.load(server["mu"])
    loss = torch.nn.functional.cross_entropy(ctx.task.net.logits(data.x), data.y).item()

    at_theta = plain.describe(plain.personal_model(server, {}, data, ctx, 1), ctx)
    model = trained.personal_model(server, {}, data, ctx, 2)
    moved = trained.describe(model, ctx)

    assert at_theta["loss_term"] == pytest.approx(loss, rel=1e-5)
    assert at_theta["kl_term"] == pytest.approx(0.0, abs=1e-9)
    normal = torch.distributions.Normal
    q, p = (normal(state["mu"].double(), state["nu"].double().exp()) for state in (model, server))
    assert moved["kl_term"] == pytest.approx(
        0.5 / data.n * torch.distributions.kl_divergence(q, p).sum().item(), rel=1e-4
    )
    assert moved["kl_term"] > 0
    assert moved["loss_term"] < loss
    assert trained.describe(server, ctx) == {}


def test_noise_in_the_outputs_is_another_draw_of_the_same_step(make_ctx, make_algorithm):
    ctx = make_ctx("fedabml", lr=0.05, tau=2, batch_size=20).at(0)
    data = ctx.task.train_data(0)
    models = []
    for local in (False, True):
        algorithm = make_algorithm("fedabml", local_reparam=local)
        models.append(algorithm.update(algorithm.init_server(ctx), {}, data, ctx)[0]["mu"])

    start = ctx.task.initial
    assert not torch.equal(*models)
    # they go the same way
    assert torch.nn.functional.cosine_similarity(models[0] - start, models[1] - start, dim=0).item() > 0.9


def test_noise_in_the_outputs_is_refused_where_norms_have_posteriors(make_algorithm):
    with pytest.raises(ValueError, match="use bayes_norm point"):
        make_algorithm("fedabml", local_reparam=True, bayes_norm="gaussian")
