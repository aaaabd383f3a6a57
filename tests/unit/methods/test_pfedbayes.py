"""pFedBayes by hand, against autograd with textbook Adam, and in its special cases."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, softplus

from fedbench.algorithm import Ctx, Upload
from fedbench.bayes import inverse_softplus

RHO_OF_ONE = math.log(math.e - 1)
"""softplus of it is 1; its slope there, sigmoid(rho), is 1 - 1/e = 0.632121."""


def gaussian(mu, rho):
    return {"mu": torch.as_tensor(mu), "rho": torch.as_tensor(rho)}


def random_gaussian(seed, d=6):
    generator = torch.Generator().manual_seed(seed)
    return gaussian(0.5 * torch.randn(d, generator=generator), -1 + 0.5 * torch.randn(d, generator=generator))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def update_once(algorithm, ctx):
    return algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx.at(0))


# --- golden rounds ---


def test_one_round_by_hand_without_noise(make_ctx, make_algorithm, tiny):
    # SGD of rate 0.1, one batch of both samples, all sigma = 1, zeta / n = 2 / 2 = 1
    ctx = make_ctx("pfedbayes", client=0, optimizer="sgd", lr=0.1, optim_state="reset", **tiny)
    own, down = gaussian(torch.zeros(6), torch.full((6,), RHO_OF_ONE)), gaussian([0.1] * 6, [RHO_OF_ONE] * 6)
    algorithm = make_algorithm("pfedbayes", zeta=2.0, noise_scale=0.0)

    message, memory = algorithm.update(down, own, ctx.task.train_data(0), ctx)

    # Personal step: the loss has the gradient (-0.25, 0.5, 0.25, -0.5, 0, 0) at 0, the KL (0 - 0.1) / 1^2 = -0.1;
    # own mu = -0.1 times their sum. The KL's gradient over own rho is (1/1 - 1/1) * slope = 0.
    assert memory["mu"].tolist() == pytest.approx([0.035, -0.04, -0.015, 0.06, 0.01, 0.01])
    assert memory["rho"].tolist() == pytest.approx([RHO_OF_ONE] * 6)
    # Global step: the gradient over mu is the distance 0.1 - own mu = (0.065, 0.14, 0.115, 0.04, 0.09, 0.09).
    assert message["mu"].tolist() == pytest.approx([0.0935, 0.086, 0.0885, 0.096, 0.091, 0.091])
    # Over sigma it is 1 - (1 + distance^2) = -distance^2, times the slope 0.632121; rho grows by a tenth of that.
    growth = [0.000267, 0.001239, 0.000836, 0.000101, 0.000512, 0.000512]
    assert (message["rho"] - RHO_OF_ONE).tolist() == pytest.approx(growth, abs=1e-6)


class Adam:
    """As in the paper by Kingma and Ba, in double precision."""

    def __init__(self, lr):
        self.lr, self.t, self.m, self.v = lr, 0, 0.0, 0.0

    def step(self, value, grad):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = 0.999 * self.v + 0.001 * grad**2
        unbiased_m, unbiased_v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return value - self.lr * unbiased_m / (unbiased_v.sqrt() + 1e-8)


def reference_update(own, shared, batches, noise, *, weight, steps, samples, scale, lr):
    """The update of the method card, by autograd on [mu, rho] in double precision."""

    def loss(theta, x, y):
        return cross_entropy(linear(x.double().flatten(1), theta[:4].view(2, 2), theta[4:]), y)

    def kl(q, p):
        normal = torch.distributions.Normal
        return torch.distributions.kl_divergence(normal(q[0], softplus(q[1])), normal(p[0], softplus(p[1]))).sum()

    own, shared = (torch.stack([state["mu"], state["rho"]]).double() for state in (own, shared))
    own_adam, shared_adam = Adam(lr), Adam(lr)
    for x, y in batches:
        for _ in range(steps):
            q = own.clone().requires_grad_()
            draws = [q[0] + scale * softplus(q[1]) * torch.randn(6, generator=noise).double() for _ in range(samples)]
            objective = sum(loss(theta, x, y) for theta in draws) / samples + weight * kl(q, shared)
            own = own_adam.step(own, torch.autograd.grad(objective, q)[0])
        p = shared.clone().requires_grad_()
        shared = shared_adam.step(shared, torch.autograd.grad(weight * kl(own, p), p)[0])
    return own, shared


@pytest.mark.parametrize(
    ("tau", "params"),
    [
        (1, {"personal_steps": 1, "samples": 1, "noise_scale": 1.0}),
        (4, {"personal_steps": 3, "samples": 2, "noise_scale": 0.5}),
    ],
    ids=["one batch, one step", "four batches, three steps, two samples"],
)
def test_a_round_is_autograd_with_textbook_adam_on_the_same_noise(make_ctx, make_algorithm, tiny, tau, params):
    ctx = make_ctx("pfedbayes", client=1, lr=0.01, local_unit="batch", tau=tau, **{**tiny, "batch_size": 1})
    own, down, data = random_gaussian(1), random_gaussian(2), ctx.task.train_data(1)
    expected_own, expected_shared = reference_update(
        own,
        down,
        list(data.batches(1, ctx.rng("batches"), steps=tau)),
        ctx.rng("noise"),
        weight=10 / 2,  # zeta / n
        steps=params["personal_steps"],
        samples=params["samples"],
        scale=params["noise_scale"],
        lr=0.01,
    )

    message, memory = make_algorithm("pfedbayes", zeta=10.0, **params).update(down, own, data, ctx)

    torch.testing.assert_close(torch.stack([memory["mu"], memory["rho"]]).double(), expected_own, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        torch.stack([message["mu"], message["rho"]]).double(), expected_shared, rtol=0, atol=1e-5
    )


def test_the_server_averages_the_clients_copies(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("pfedbayes", clients=2)
    algorithm = make_algorithm("pfedbayes")
    server = algorithm.init_server(ctx)
    copies = [
        algorithm.update(server, algorithm.init_client(ctx.at(c)), ctx.task.train_data(c), ctx.at(c))[0] for c in (0, 1)
    ]

    merged = run_rounds(algorithm, ctx).server

    for key in ("mu", "rho"):
        torch.testing.assert_close(merged[key], (copies[0][key] + copies[1][key]) / 2)


# --- special cases ---


def test_with_zeta_zero_the_global_model_does_not_depend_on_data(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("pfedbayes", clients=2, local_unit="batch", tau=3)
    algorithm = make_algorithm("pfedbayes", zeta=0.0)

    progress = run_rounds(algorithm, ctx, rounds=2)

    initial = algorithm.init_server(ctx)
    assert same(progress.server, initial)
    assert not torch.equal(progress.clients[0]["mu"], initial["mu"])  # while the personal models learn


def test_without_noise_the_personal_step_does_not_depend_on_the_noise_stream(make_ctx, make_algorithm, tiny):
    class OtherNoise(Ctx):
        def rng(self, purpose):
            return super().rng("other" if purpose == "noise" else purpose)

    ctx = make_ctx("pfedbayes", client=0, **tiny)
    other = OtherNoise(ctx.task, ctx.protocol, ctx.seed, ctx.round, ctx.client)
    silent, noisy = make_algorithm("pfedbayes", noise_scale=0.0), make_algorithm("pfedbayes", noise_scale=1.0)

    def personal(algorithm, where):
        return algorithm.update(random_gaussian(2), random_gaussian(1), ctx.task.train_data(0), where)[1]

    assert same(personal(silent, ctx), personal(silent, other))
    assert not same(personal(noisy, ctx), personal(noisy, other))


# --- what a client keeps ---


def test_the_personal_posterior_persists_and_is_what_the_client_deploys(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("pfedbayes", client=0)
    algorithm = make_algorithm("pfedbayes")
    server, data = algorithm.init_server(ctx), ctx.task.train_data(0)
    fresh = algorithm.init_client(ctx)

    _, first = algorithm.update(server, fresh, data, ctx)
    _, second = algorithm.update(server, first, data, ctx)

    # one Adam step moves a parameter by at most about lr; the second round goes on from the first
    assert (second["mu"] - fresh["mu"]).abs().max() > 1.5 * (first["mu"] - fresh["mu"]).abs().max()
    assert algorithm.personal_model(server, first, data, ctx, None) is first


def test_the_upload_is_the_global_copy_and_not_the_personal_posterior(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", client=0)
    algorithm = make_algorithm("pfedbayes")

    message, memory = algorithm.update(
        algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx
    )

    assert set(message) == {"mu", "rho"}
    assert not torch.equal(message["mu"], memory["mu"])


def test_both_optimisers_keep_their_moments_over_rounds(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", client=0, local_unit="batch", tau=3)
    algorithm = make_algorithm("pfedbayes", personal_steps=2)
    server, memory = algorithm.init_server(ctx), algorithm.init_client(ctx)

    for _ in range(2):
        _, memory = algorithm.update(server, memory, ctx.task.train_data(0), ctx)

    # two rounds of three batches: 2 personal steps and 1 global step per batch
    assert memory["own.step"].item() == 12
    assert memory["shared.step"].item() == 6


def test_moments_are_forgotten_where_the_protocol_resets_them(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", client=0, optim_state="reset")
    algorithm = make_algorithm("pfedbayes")

    _, memory = algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert set(memory) == {"mu", "rho"}


def test_every_client_starts_from_the_servers_posterior(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", seed=4)
    algorithm = make_algorithm("pfedbayes", rho0=-3.0, mu_std=0.2)

    server = algorithm.init_server(ctx)

    assert same(algorithm.init_client(ctx.at(1)), server)
    assert server["rho"].unique().tolist() == [-3.0]
    assert server["mu"].std().item() == pytest.approx(0.2, rel=0.05)


def test_with_a_frozen_head_the_posterior_is_of_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", client=0, train_part="body")
    algorithm, net = make_algorithm("pfedbayes"), ctx.task.net
    head = net.flat[net.head].clone()

    message, memory = update_once(algorithm, ctx)
    algorithm.predict(memory, ctx.task.test_data(0).x, ctx, "mc")

    # digits: 64*100 + 100
    assert message["mu"].shape == memory["rho"].shape == (6_500,)
    assert torch.equal(net.flat[net.head], head)


# --- hyperparameters ---


@pytest.fixture
def calls(monkeypatch):
    """The gradients that updates ask for: (over "own" or "shared", KL weight, noise scale, samples)."""
    from fedbench.algorithms import pfedbayes

    made, elbo, prior = [], pfedbayes.set_elbo_grad, pfedbayes.set_prior_grad

    def spied_elbo(q, p, weight, loss_grad, scale, samples, *rest):
        made.append(("own", weight, scale, samples))
        elbo(q, p, weight, loss_grad, scale, samples, *rest)

    def spied_prior(p, q, weight, *rest):
        made.append(("shared", weight, None, None))
        prior(p, q, weight, *rest)

    monkeypatch.setattr(pfedbayes, "set_elbo_grad", spied_elbo)
    monkeypatch.setattr(pfedbayes, "set_prior_grad", spied_prior)
    return made


@pytest.mark.parametrize(
    ("protocol", "kl_scale", "expected"),
    [
        ({"local_unit": "batch", "tau": 20}, "samples", 0.4),  # 10 / 25 samples
        ({"local_unit": "batch", "tau": 20}, "batches", 0.005),  # 10 / (20 * 100)
        ({"local_unit": "batch", "tau": 20}, "steps", 0.5),  # 10 / 20
        # 25 samples in batches of 10 are 3 steps a pass: R = 6
        ({"local_unit": "epoch", "tau": 2, "batch_size": 10}, "samples", 0.4),
        ({"local_unit": "epoch", "tau": 2, "batch_size": 10}, "batches", 1 / 6),  # 10 / (6 * 10)
        ({"local_unit": "epoch", "tau": 2, "batch_size": 10}, "steps", 10 / 6),
    ],
)
def test_kl_scale_says_what_zeta_is_divided_by(make_ctx, make_algorithm, calls, protocol, kl_scale, expected):
    ctx = make_ctx("pfedbayes", **protocol)

    update_once(make_algorithm("pfedbayes", zeta=10.0, kl_scale=kl_scale), ctx)

    assert [weight for _, weight, _, _ in calls] == pytest.approx([expected] * len(calls))
    assert calls


def test_personal_steps_are_taken_on_every_batch_before_the_global_one(make_ctx, make_algorithm, calls):
    ctx = make_ctx("pfedbayes", local_unit="batch", tau=2)

    update_once(make_algorithm("pfedbayes", personal_steps=3), ctx)

    assert [over for over, *_ in calls] == ["own", "own", "own", "shared"] * 2


def test_noise_scale_and_samples_reach_the_personal_step(make_ctx, make_algorithm, calls):
    update_once(make_algorithm("pfedbayes", noise_scale=0.001, samples=3), make_ctx("pfedbayes"))

    assert calls[0][2:] == (0.001, 3)


def test_mc_prediction_uses_the_noise_scale_of_training(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", client=0)
    x = ctx.task.test_data(0).x
    model = make_algorithm("pfedbayes", rho0=0.0).init_server(ctx)

    def distance(noise_scale):
        algorithm = make_algorithm("pfedbayes", noise_scale=noise_scale)
        return (algorithm.predict(model, x, ctx, "mc") - algorithm.predict(model, x, ctx, "mean")).abs().max().item()

    assert distance(1.0) > 0.1
    assert 0 < distance(0.001) < 0.01
    assert distance(0.0) < 1e-6


def test_mc_prediction_averages_as_many_draws_as_the_protocol_says(make_ctx, make_algorithm, monkeypatch):
    ctx = make_ctx("pfedbayes", client=0, mc_samples=7)
    algorithm = make_algorithm("pfedbayes")
    forwards, logits = [], ctx.task.net.logits
    monkeypatch.setattr(ctx.task.net, "logits", lambda x: forwards.append(1) or logits(x))

    algorithm.predict(algorithm.init_server(ctx), ctx.task.test_data(0).x, ctx, "mc")

    assert len(forwards) == 7


def test_the_rate_of_the_global_copy_is_lr_unless_given(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes", lr=0.001)
    server = make_algorithm("pfedbayes").init_server(ctx)

    default, own = update_once(make_algorithm("pfedbayes"), ctx)
    faster, own_of_faster = update_once(make_algorithm("pfedbayes", lr_global=0.005), ctx)

    # the first Adam step moves every coordinate with a gradient by the rate
    assert (default["mu"] - server["mu"]).abs().max().item() == pytest.approx(0.001, rel=1e-3)
    assert (faster["mu"] - server["mu"]).abs().max().item() == pytest.approx(0.005, rel=1e-3)
    assert torch.equal(own["mu"], own_of_faster["mu"])


@pytest.mark.parametrize(
    ("agg", "sigma"),
    [("param", 0.175482), ("moment", math.sqrt(1.05))],  # softplus of the mean rho; sqrt((0.01 + 1 + 0.09 + 1) / 2)
)
def test_agg_says_how_posteriors_are_merged(make_ctx, make_algorithm, agg, sigma):
    uploads = [
        Upload(client, 1, {"mu": torch.tensor([mean]), "rho": inverse_softplus(torch.tensor([deviation]))})
        for client, mean, deviation in ((0, 0.0, 0.1), (1, 2.0, 0.3))
    ]

    merged = make_algorithm("pfedbayes", agg=agg).aggregate({}, uploads, make_ctx("pfedbayes"))

    assert merged["mu"].item() == pytest.approx(1.0)
    assert softplus(merged["rho"]).item() == pytest.approx(sigma, abs=1e-5)


def test_the_scale_of_the_loss_hardly_matters_to_adam(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("pfedbayes", client=0, tau=5, lr=0.01, **tiny)

    by_scale = {}
    for scale in ("mean", "sum"):
        algorithm = make_algorithm("pfedbayes", loss_scale=scale)
        by_scale[scale] = algorithm.update(random_gaussian(2), random_gaussian(1), ctx.task.train_data(0), ctx)

    for mean, total in zip(by_scale["mean"], by_scale["sum"], strict=True):
        torch.testing.assert_close(mean["mu"], total["mu"], rtol=0, atol=1e-5)
        torch.testing.assert_close(mean["rho"], total["rho"], rtol=0, atol=1e-5)


def test_the_scale_of_the_loss_multiplies_a_step_of_sgd_by_n(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("pfedbayes", client=0, optimizer="sgd", lr=0.01, **tiny)
    own = random_gaussian(1)

    moves = {}
    for scale in ("mean", "sum"):
        algorithm = make_algorithm("pfedbayes", loss_scale=scale)
        _, memory = algorithm.update(random_gaussian(2), own, ctx.task.train_data(0), ctx)
        moves[scale] = torch.cat([memory[key] - own[key] for key in ("mu", "rho")])

    # n = 2 samples, one step
    torch.testing.assert_close(moves["sum"], 2 * moves["mean"], rtol=1e-4, atol=1e-6)


# --- point-valued normalisation ---


def test_point_valued_norms_are_trained_sent_and_kept_without_a_posterior(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("pfedbayes", dataset=pictures, model="vgg_s", client=0)
    algorithm = make_algorithm("pfedbayes", bayes_norm="point")
    norms, server = ctx.task.net.norm_mask, algorithm.init_server(ctx)

    message, memory = algorithm.update(server, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert torch.equal(message["mu"][norms], memory["mu"][norms])
    assert not torch.equal(message["mu"][norms], server["mu"][norms])
    for state in (message, memory):
        assert torch.equal(state["rho"][norms], server["rho"][norms])


def test_gaussian_norms_are_parameters_like_any_other(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("pfedbayes", dataset=pictures, model="vgg_s", client=0)
    algorithm = make_algorithm("pfedbayes", bayes_norm="gaussian")
    norms, server = ctx.task.net.norm_mask, algorithm.init_server(ctx)

    message, memory = algorithm.update(server, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert not torch.equal(message["mu"][norms], memory["mu"][norms])
    assert not torch.equal(memory["rho"][norms], server["rho"][norms])


def test_a_client_that_comes_late_starts_where_the_others_started(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("pfedbayes", dataset=pictures, model="vgg_s", clients=2, tau=3)
    algorithm = make_algorithm("pfedbayes", bayes_norm="point")
    early = algorithm.init_client(ctx.at(0))
    algorithm.update(algorithm.init_server(ctx), early, ctx.task.train_data(0), ctx.at(0))

    late = algorithm.init_client(ctx.at(1))

    assert same(late, early)


def test_rho_starts_around_rho0_where_it_is_drawn(make_ctx, make_algorithm):
    drawn = make_algorithm("pfedbayes", rho0=-3, rho_std=0.1).init_server(make_ctx("pfedbayes"))["rho"]
    plain = make_algorithm("pfedbayes", rho0=-3).init_server(make_ctx("pfedbayes"))

    # 7,510 draws: their mean is within 0.1 / sqrt(7510) = 0.0012 of -3, three times over
    assert drawn.mean().item() == pytest.approx(-3.0, abs=0.0036)
    assert drawn.std().item() == pytest.approx(0.1, abs=0.004)
    assert torch.equal(plain["rho"], torch.full_like(drawn, -3.0))


def test_drawing_rho_leaves_the_means_alone(make_ctx, make_algorithm):
    ctx = make_ctx("pfedbayes")
    plain, drawn = (make_algorithm("pfedbayes", rho_std=std).init_server(ctx)["mu"] for std in (0.0, 0.1))

    assert torch.equal(plain, drawn)


def test_noise_in_the_outputs_is_refused_where_norms_have_posteriors(make_algorithm):
    with pytest.raises(ValueError, match="use bayes_norm point"):
        make_algorithm("pfedbayes", local_reparam=True, bayes_norm="gaussian")


def test_noise_in_the_outputs_trains_another_posterior_of_the_same_kind(make_ctx, make_algorithm, run_rounds):
    """Weight noise and output noise are other draws; after a few rounds both have learned their five digits."""
    ctx = make_ctx("pfedbayes", lr=0.01, tau=20, local_unit="batch", batch_size=20)
    weights = run_rounds(make_algorithm("pfedbayes"), ctx, 6).clients[0]
    outputs = run_rounds(make_algorithm("pfedbayes", local_reparam=True), ctx, 6).clients[0]

    assert not torch.equal(weights["mu"], outputs["mu"])
    data = ctx.task.test_data(0)
    for memory in (weights, outputs):
        predicted = make_algorithm("pfedbayes").predict(memory, data.x, ctx, "mean").argmax(1)
        assert (predicted == data.y).double().mean().item() > 0.8


def test_without_noise_it_does_not_matter_where_it_is_drawn(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("pfedbayes", lr=0.01, tau=5, local_unit="batch")
    weights, outputs = (
        run_rounds(make_algorithm("pfedbayes", noise_scale=0, local_reparam=local), ctx, 2).server
        for local in (False, True)
    )

    # the outputs' smallest variance, 1e-20, stands below the float32 of any output
    assert torch.allclose(weights["mu"], outputs["mu"], atol=1e-6)
