"""FedPop by hand, against autograd on the same noise, and where the posterior of the head is known."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
from pydantic import ValidationError
from torch.distributions import Normal
from torch.nn.functional import cross_entropy, linear, softplus

from fedbench.algorithm import Upload
from fedbench.algorithms.fedpop import log_prior_gradient, retained_steps
from fedbench.errors import FedbenchError
from fedbench.images import ClientData, Images
from fedbench.wire import on_wire, size_of

BODY, HEAD = slice(0, 300), slice(300, 502)  # of `two_layers`: 2*100+100 and 100*2+2
UNIT = log(exp(1) - 1)
"""rho with softplus(rho) = 1."""
BATCHES = {"local_unit": "batch"}


def update_once(algorithm, ctx, memory=None, down=None):
    memory = algorithm.init_client(ctx) if memory is None else memory
    down = algorithm.download(algorithm.init_server(ctx), ctx) if down is None else down
    return algorithm.update(down, memory, ctx.task.train_data(ctx.client), ctx)


# --- golden rounds ---


def test_a_round_by_hand(two_layers, make_algorithm, run_rounds):
    u = sqrt(log(3) / 5)
    ctx = two_layers("fedpop", u=u, tau=1, **BATCHES)
    algorithm = make_algorithm(
        "fedpop", langevin_noise=False, prior_rho=UNIT, body_optimizer="sgd", lr_body=0.1, retained=3
    )

    progress = run_rounds(algorithm, ctx)

    # The step of the head. As for FedPer, CE has the gradient 0.25 u (client 1: -0.25 u) at the weights of class 0, and
    # its negative at those of class 1; the prior adds z / (n 1^2) = z / 2. So class 0 has 1 - 0.1 (0.25 u + 0.5) in the
    # first half and -1 - 0.1 (0.25 u - 0.5) in the second. One step is all of M, and its sample is retained.
    shift = 0.025 * u
    for client, sign in ((0, 1), (1, -1)):
        class_0, class_1, biases = progress.clients[client]["samples"].squeeze(0).split([100, 100, 2])
        assert class_0.tolist() == pytest.approx([0.95 - sign * shift] * 50 + [-0.95 - sign * shift] * 50)
        assert class_1.tolist() == pytest.approx([-0.95 + sign * shift] * 50 + [0.95 + sign * shift] * 50)
        assert biases.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    # The gradient of the body at that head. Client 0: pixels that sum to s give the logits -/+ 100 u s shift
    # = -/+ s log(3) / 2, so p0 = 1 / (1 + 3^s): 1/4 for (1, 0) of class 0, 1/10 for (0, 2) of class 1. Into a unit of
    # the first half flows 2 (p0 - 1[y=0]) (0.95 - shift): the mean gradient is (0.95 - shift) (-0.75, 0.2). Client 1:
    # p0 = 3^s / (1 + 3^s): 9/10 for (2, 0) of class 0, 3/4 for (0, 1) of class 1, and (0.95 + shift) (-0.2, 0.75).
    # The body steps by 0.1 along the mean over the clients.
    less, more = 0.95 - shift, 0.95 + shift
    body = progress.server["shared"]
    assert body[:2].tolist() == pytest.approx(
        [u + 0.05 * (0.75 * less + 0.2 * more), u - 0.05 * (0.2 * less + 0.75 * more)]
    )
    # second half: all signs change, and 0.95 + shift is client 0's
    assert body[198:200].tolist() == pytest.approx(
        [u - 0.05 * (0.75 * more + 0.2 * less), u + 0.05 * (0.2 * more + 0.75 * less)]
    )
    # biases: client 0 has -0.65 (0.95 - shift), client 1 0.65 (0.95 + shift); in the second half the same mean
    assert body[200:].tolist() == pytest.approx([-0.05 * 0.65 * 2 * shift] * 100, rel=1e-4)


def reference_round(body, z, prior, chain, further, noise, *, rate, n, first_kept):
    """The algorithm on given batches by autograd in double precision: samples, body gradient, prior gradient."""

    def loss(phi, head, x, y):
        (w1, b1), (w2, b2) = phi.split([200, 100]), head.split([200, 2])
        hidden = linear(x.double().flatten(1), w1.view(100, 2), b1).relu()
        return cross_entropy(linear(hidden, w2.view(2, 100), b2), y)

    samples = []
    for step, (x, y) in enumerate(chain, 1):
        v = z.clone().requires_grad_()
        energy = n * loss(body, v, x, y) - Normal(prior[0], softplus(prior[1])).log_prob(v).sum()
        g = rate / n  # the step at sum scale
        z = z - g * torch.autograd.grad(energy, v)[0] + sqrt(2 * g) * torch.randn(202, generator=noise).double()
        if step >= first_kept:
            samples.append(z)
    phi, beta = body.clone().requires_grad_(), prior.clone().requires_grad_()
    fit = sum(loss(phi, z, x, y) for z, (x, y) in zip(samples, further, strict=True)) / len(samples)
    (body_grad,) = torch.autograd.grad(fit, phi)
    known = sum(Normal(beta[0], softplus(beta[1])).log_prob(z).sum() for z in samples) / len(samples)
    (prior_grad,) = torch.autograd.grad(-known, beta)
    return torch.stack(samples), body_grad, prior_grad


@pytest.mark.parametrize(("tau", "first_kept"), [(1, 1), (2, 2), (6, 4)])  # M0 = 0, 1, 3
def test_a_round_is_autograd_on_the_same_noise(make_ctx, make_algorithm, tiny, tau, first_kept):
    ctx = make_ctx("fedpop", client=1, lr=0.02, tau=tau, **BATCHES, **{**tiny, "model": "dnn100", "batch_size": 1})
    algorithm, data = make_algorithm("fedpop", prior="learned", prior_rho=-1.0), ctx.task.train_data(1)
    down = algorithm.download(algorithm.init_server(ctx), ctx)
    down["prior"] = down["prior"] + torch.linspace(-0.3, 0.3, 404).view(2, 202)
    memory = {"samples": torch.stack([torch.full((202,), 9.0), 0.5 * ctx.task.initial[HEAD]])}  # the last one counts
    order = ctx.rng("batches")
    chain = list(data.batches(1, order, steps=tau))
    samples, body_grad, prior_grad = reference_round(
        down["shared"].double(),
        memory["samples"][-1].double(),
        down["prior"].double(),
        chain,
        list(data.batches(1, order, steps=tau - first_kept + 1)),
        ctx.rng("langevin"),
        rate=0.02,
        n=2,
        first_kept=first_kept,
    )

    message, kept = update_once(algorithm, ctx, memory, down)

    torch.testing.assert_close(kept["samples"].double(), samples, rtol=0, atol=2e-5)
    torch.testing.assert_close(message["body_grad"].double(), body_grad, rtol=0, atol=2e-5)
    torch.testing.assert_close(message["prior_grad"].double(), prior_grad, rtol=1e-4, atol=1e-4)


# --- where the posterior is known ---


def test_a_long_chain_has_the_mean_and_the_variance_of_the_posterior(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2, tau=2000, **BATCHES)
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", prior_rho=UNIT, retained=1000)

    _, memory = update_once(algorithm, ctx)

    # n = 2 observations with precision 1 around 2, and the prior N(0, 1): precision 3, mean 2 * 2 / 3. A step at sum
    # scale is 0.2 / 2, it leaves 1 - 0.1 * 3 = 0.7 of a deviation: the chain's variance is 2 * 0.1 / (1 - 0.7^2)
    # = 0.392157 (1/3 for infinitely small steps). 202 chains of 1000 samples are about 35,000 independent ones.
    samples = memory["samples"]
    assert samples.shape == (1000, 202)
    assert samples.mean().item() == pytest.approx(4 / 3, abs=0.015)
    assert samples.var().item() == pytest.approx(0.392157, abs=0.015)


def test_without_noise_the_chain_descends_to_the_mode(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2, tau=10, **BATCHES)
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", langevin_noise=False, prior_rho=UNIT)
    start = ctx.task.initial[HEAD]

    _, first = update_once(algorithm, ctx)
    _, second = update_once(algorithm, ctx, first)

    # gradient descent on (2/2) (z - 2)^2 + z^2 / 2, whose mode is 4/3: a step leaves 0.7 of the distance. The last five
    # of ten are retained; the second round goes on from the last one
    for memory, steps in ((first, range(6, 11)), (second, range(16, 21))):
        expected = torch.stack([4 / 3 + 0.7**step * (start - 4 / 3) for step in steps])
        torch.testing.assert_close(memory["samples"], expected, rtol=1e-5, atol=1e-5)


def test_the_more_data_a_client_has_the_less_noise_there_is(make_ctx, make_algorithm, quadratic):
    ctx = make_ctx("fedpop", client=0, lr=0.02, tau=1, **BATCHES)
    quadratic(0.0, 0.0)
    start = ctx.task.initial[6_500:]

    _, memory = update_once(make_algorithm("fedpop", prior_rho=5.0), ctx)

    # digits, small: n = 25; sqrt(2 * 0.02 / 25) = 0.04
    assert (memory["samples"][0] - start).std().item() == pytest.approx(0.04, rel=0.08)


def test_a_learned_prior_maximises_the_marginal_likelihood(two_layers, make_algorithm, quadratic, run_rounds):
    ctx = two_layers("fedpop", lr=0.05, tau=10, **BATCHES)
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", prior="learned", lr_prior=0.05, prior_rho=UNIT, body_optimizer="sgd")

    prior = run_rounds(algorithm, ctx, rounds=150).server["prior"]

    # Both clients have n = 2 observations with precision 1 around 2; without z this is N(2; m, v), v = 1/2 + s^2. With
    # the priors N(0, 1) of m and rho, 2 log N(2; m, v) - m^2 / 2 - rho^2 / 2 is largest at m = 4 / (2 + v) = 1.4336,
    # rho = -0.3373 (s = 0.5387, v = 0.7902; found numerically). The chain's step widens its samples a little.
    assert prior[0].mean().item() == pytest.approx(1.4336, abs=0.03)
    assert prior[1].mean().item() == pytest.approx(-0.3373, abs=0.08)


# --- the chain and its samples ---


@pytest.mark.parametrize(
    ("steps", "burn_in", "count", "expected"),
    [
        (10, 0.5, 5, {6, 7, 8, 9, 10}),  # FedPop's own M = 10, M0 = 5
        (20, 0.5, 5, {12, 14, 16, 18, 20}),
        (50, 0.5, 5, {30, 35, 40, 45, 50}),
        (50, 0.5, 100, set(range(26, 51))),
        (3, 0.5, 5, {2, 3}),
        (1, 0.5, 5, {1}),
        (10, 0.0, 20, set(range(1, 11))),
        (10, 0.9, 5, {10}),
        (100, 0.0, 3, {100, 67, 34}),
        (0, 0.5, 5, set()),
    ],
)
def test_samples_are_evenly_spaced_after_the_burn_in(steps, burn_in, count, expected):
    assert retained_steps(steps, burn_in, count) == expected


@pytest.mark.parametrize(("unit", "steps"), [("batch", 4), ("epoch", 12)])  # 25 samples: 3 batches of 10 a pass
def test_a_round_of_local_work_is_the_chain_and_a_further_batch_per_sample(
    make_ctx, make_algorithm, quadratic, unit, steps
):
    ctx = make_ctx("fedpop", client=0, local_unit=unit, tau=4, batch_size=10, lr=0.1)
    visited = quadratic(1.0, 0.3)
    algorithm = make_algorithm("fedpop", retained=2)
    down = algorithm.init_server(ctx)

    message, memory = update_once(algorithm, ctx)

    assert len(visited) == steps + 2
    assert torch.equal(visited[0], ctx.task.initial)
    assert torch.equal(torch.stack(visited[-2:])[:, 6_500:], memory["samples"])
    # the body does not move on the client
    assert all(torch.equal(vector[:6_500], down["shared"]) for vector in visited)
    torch.testing.assert_close(message["body_grad"], down["shared"] - 0.3)


def test_the_body_gradient_is_a_mean_over_samples_and_batches(make_ctx, make_algorithm):
    # batches of all 25 samples: every one is the client's data
    ctx = make_ctx("fedpop", client=0, tau=6, batch_size=25, lr=0.5, **BATCHES)
    data, net = ctx.task.train_data(0), ctx.task.net

    message, memory = update_once(make_algorithm("fedpop", retained=3), ctx)

    grads = []
    for z in memory["samples"]:
        net.load(torch.cat([ctx.task.initial[:6_500], z]))
        net.zero_grad()
        cross_entropy(net.logits(data.x), data.y).backward()
        grads.append(net.grad[:6_500].clone())
    assert (grads[0] - grads[2]).abs().max() > 1e-3
    torch.testing.assert_close(message["body_grad"], sum(grads) / 3, rtol=0, atol=1e-6)


def test_every_round_has_new_noise(make_ctx, make_algorithm):
    ctx = make_ctx("fedpop", client=0, tau=2, batch_size=25, **BATCHES)
    algorithm = make_algorithm("fedpop")

    one, again, later = (update_once(algorithm, replace(ctx, round=number))[1]["samples"] for number in (1, 1, 2))

    assert torch.equal(one, again)
    assert not torch.allclose(one, later, atol=1e-3)


def test_the_rate_falls_with_the_protocols_schedule(two_layers, make_algorithm, quadratic):
    settings = {"client": 0, "lr": 0.2, "lr_decay": 0.1, "rounds": 4, "tau": 1, **BATCHES}
    early, late = two_layers("fedpop", round_=2, **settings), two_layers("fedpop", round_=3, **settings)
    quadratic(1.0, 2.0)
    algorithm, start = make_algorithm("fedpop", langevin_noise=False, prior_rho=UNIT), early.task.initial[HEAD]

    moves = [update_once(algorithm, ctx)[1]["samples"][0] - start for ctx in (early, late)]

    torch.testing.assert_close(moves[0], 10 * moves[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_without_noise_other_optimisers_may_step_and_keep_their_history(make_ctx, make_algorithm, kind):
    protocol = {"optimizer": "adam"} if kind == "adam" else {}
    params = {"head_optimizer": "rmsprop"} if kind == "rmsprop" else {}
    ctx = make_ctx("fedpop", client=0, lr=0.006, tau=4, batch_size=25, optim_state="persistent", **BATCHES, **protocol)
    algorithm = make_algorithm("fedpop", langevin_noise=False, **params)
    data, net = ctx.task.train_data(0), ctx.task.net
    z = torch.nn.Parameter(ctx.task.initial[6_500:].clone())
    optimizer = (torch.optim.Adam if kind == "adam" else torch.optim.RMSprop)([z], lr=0.006)
    for _ in range(8):  # two rounds on all data
        hidden = data.x.flatten(1) @ ctx.task.initial[:6_400].view(100, 64).T + ctx.task.initial[6_400:6_500]
        loss = cross_entropy(linear(hidden.relu(), z[:1_000].view(10, 100), z[1_000:]), data.y)
        optimizer.zero_grad()
        (loss + z.square().sum() / (2 * 25 * 0.99916**2)).backward()
        optimizer.step()
    assert net.d == 7_510

    memory = algorithm.init_client(ctx)
    for _ in range(2):
        _, memory = update_once(algorithm, ctx, memory)

    torch.testing.assert_close(memory["samples"][-1], z.detach(), rtol=0, atol=2e-4)
    assert memory["own.step"].item() == 8


# --- the server ---


def uploads(*grads):
    return [
        Upload(client, n, {key: torch.tensor(value) for key, value in message.items()})
        for client, (n, message) in enumerate(grads)
    ]


def test_the_server_averages_the_bodys_gradients_by_samples_and_the_priors_by_clients(make_ctx, make_algorithm):
    ctx = make_ctx("fedpop", weighting="samples")
    algorithm = make_algorithm("fedpop", prior="learned", body_optimizer="sgd", lr_body=0.1, lr_prior=0.2)
    server = {"shared": torch.tensor([1.0, 2.0]), "prior": torch.tensor([[0.5], [0.54]])}
    sent = uploads(
        (1, {"body_grad": [1.0, 0.0], "prior_grad": [[1.0], [2.0]]}),
        (3, {"body_grad": [0.0, 1.0], "prior_grad": [[3.0], [-2.0]]}),
    )

    merged = algorithm.aggregate(server, sent, ctx)

    # (1/4, 3/4); the clients' mean (2, 0) and beta / N = (0.25, 0.27) of the prior N(0, 1) of beta
    assert merged["shared"].tolist() == pytest.approx([0.975, 1.925])
    assert merged["prior"].flatten().tolist() == pytest.approx([0.5 - 0.2 * 2.25, 0.54 - 0.2 * 0.27])


@pytest.mark.parametrize(
    ("params", "protocol", "expected"),
    [
        ({}, {"weighting": "samples"}, [0.975, 1.925]),
        ({}, {"weighting": "uniform"}, [0.95, 1.95]),
        ({"lr_body": 0.2}, {"weighting": "samples"}, [0.95, 1.85]),
        ({}, {"weighting": "samples", "beta": 2.0}, [0.95, 1.85]),
        # round 1 of 1: past T/2 = 0 and 3T/4 = 0
        ({}, {"weighting": "samples", "lr_decay": 0.1, "rounds": 1}, [0.99975, 1.99925]),
        # two clients of 25 samples: (1, 2) / (50 * 0.1^2) = (2, 4) more
        ({"body_prior": 0.1}, {"weighting": "samples"}, [0.775, 1.525]),
        # a first step of Adam is the rate, one of RMSprop (decay 0.99) ten times the rate
        ({"body_optimizer": "adam"}, {"weighting": "samples"}, [0.9, 1.9]),
        ({"body_optimizer": "rmsprop"}, {"weighting": "samples"}, [0.0, 1.0]),
    ],
)
def test_a_step_of_the_body(make_ctx, make_algorithm, params, protocol, expected):
    ctx = make_ctx("fedpop", **protocol)
    algorithm = make_algorithm("fedpop", **{"body_optimizer": "sgd", "lr_body": 0.1, **params})
    sent = uploads((1, {"body_grad": [1.0, 0.0]}), (3, {"body_grad": [0.0, 1.0]}))

    merged = algorithm.aggregate({"shared": torch.tensor([1.0, 2.0])}, sent, ctx)

    assert merged["shared"].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_servers_optimiser_keeps_its_history_whatever_clients_do(make_ctx, make_algorithm):
    ctx = make_ctx("fedpop", optim_state="reset")
    algorithm, server = make_algorithm("fedpop", lr_body=0.01), {"shared": torch.tensor([1.0, 2.0])}
    value = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.Adam([value], lr=0.01)

    for grad in ([1.0, -2.0], [-0.5, 3.0], [0.1, 0.2]):
        server = algorithm.aggregate(server, uploads((5, {"body_grad": grad})), ctx)
        value.grad = torch.tensor(grad)
        optimizer.step()

    torch.testing.assert_close(server["shared"], value.detach())
    assert server["shared.step"].item() == 3


def test_a_server_that_hears_nothing_stays_as_it_is(make_ctx, make_algorithm):
    server = {"shared": torch.ones(2)}

    assert make_algorithm("fedpop").aggregate(server, [], make_ctx("fedpop")) is server


def test_a_learned_rho_stays_where_the_arithmetic_is_sound(make_ctx, make_algorithm):
    algorithm = make_algorithm("fedpop", prior="learned", body_optimizer="sgd", lr_prior=1.0)
    server = {"shared": torch.zeros(1), "prior": torch.tensor([[0.0], [-11.0]])}
    sent = uploads((1, {"body_grad": [0.0], "prior_grad": [[0.0], [50.0]]}))

    assert algorithm.aggregate(server, sent, make_ctx("fedpop"))["prior"][1].item() == -12.0


def test_the_gradient_of_the_log_prior_is_autograds():
    z = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double()
    prior = torch.stack([torch.linspace(-1, 1, 7), torch.linspace(-2, 2, 7)]).double().requires_grad_()

    found = log_prior_gradient(z, prior.detach())

    for row, gradient in zip(z, found, strict=True):
        (expected,) = torch.autograd.grad(Normal(prior[0], softplus(prior[1])).log_prob(row).sum(), prior)
        torch.testing.assert_close(gradient, expected)


# --- special cases ---


def test_with_a_head_of_width_zero_and_all_data_in_a_batch_it_is_one_step_of_fedavg(
    make_ctx, make_algorithm, run_rounds
):
    ctx = make_ctx("fedpop", clients=4, f=0.5, train_part="body", tau=1, batch_size=25, lr=0.1, **BATCHES)

    fedpop = run_rounds(make_algorithm("fedpop", body_optimizer="sgd", lr_body=0.1), ctx, rounds=3)
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3)

    torch.testing.assert_close(fedpop.server["shared"], fedavg.server["w"], rtol=0, atol=1e-6)
    assert not torch.equal(fedpop.server["shared"], ctx.task.initial)


def test_head_and_body_step_together_to_the_joint_mode(two_layers, make_algorithm, quadratic, run_rounds):
    ctx = two_layers("fedpop", lr=0.2, tau=10, **BATCHES)
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", langevin_noise=False, prior_rho=UNIT, body_optimizer="sgd", lr_body=0.5)

    progress = run_rounds(algorithm, ctx, rounds=30)

    # the body has no prior: 2; the heads have: 4/3
    torch.testing.assert_close(progress.server["shared"], torch.full((300,), 2.0))
    for client in (0, 1):
        torch.testing.assert_close(progress.clients[client]["samples"][-1], torch.full((202,), 4 / 3))


# --- sequential ---


def test_sequential_clients_hand_body_and_optimiser_on(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpop", tau=4, batch_size=25, **BATCHES)
    algorithm = make_algorithm("fedpop", body_update="sequential", retained=2, lr_body=0.01)
    server = algorithm.init_server(ctx)
    kept = {client: algorithm.init_client(ctx.at(client)) for client in (0, 1)}
    for number in (1, 2):  # by hand: client 1 downloads what client 0 sent
        for client in (0, 1):
            here = replace(ctx, round=number, client=client)
            message, kept[client] = update_once(algorithm, here, kept[client], algorithm.download(server, here))
            server = server | message

    progress = run_rounds(algorithm, ctx, rounds=2)

    assert torch.equal(progress.server["shared"], server["shared"])
    assert torch.equal(progress.clients[1]["samples"], kept[1]["samples"])
    # two rounds, two clients, a step for each of two samples
    assert progress.server["shared.step"].item() == 8


def test_a_sequential_client_steps_once_per_sample_along_the_mean_over_all(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2, tau=10, **BATCHES)
    visited = quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", body_update="sequential", body_optimizer="sgd", lr_body=0.1)

    message, _ = update_once(algorithm, ctx)

    # ten steps of the chain, then five of the body with a gradient at each of five samples; each leaves 0.9
    assert len(visited) == 10 + 5 * 5
    start = ctx.task.initial[BODY]
    torch.testing.assert_close(message["shared"], 2 + 0.9**5 * (start - 2))


def test_with_one_client_and_one_sample_sequential_is_parallel(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpop", clients=1, tau=4, weighting="uniform", **BATCHES)

    one, other = (
        run_rounds(make_algorithm("fedpop", body_update=how, retained=1), ctx, rounds=3).server["shared"]
        for how in ("parallel", "sequential")
    )

    assert torch.equal(one, other)


def test_with_more_clients_it_is_not(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpop", tau=4, **BATCHES)

    one, other = (
        run_rounds(make_algorithm("fedpop", body_update=how, retained=1), ctx, rounds=3).server["shared"]
        for how in ("parallel", "sequential")
    )

    assert (one - other).abs().max() > 1e-3


def test_sequential_adam_travels_with_the_body(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpop", client=0)
    algorithm = make_algorithm("fedpop", body_update="sequential")
    down = algorithm.download(run_rounds(algorithm, ctx.at(None)).server, ctx)

    up, _ = update_once(algorithm, ctx, down=down)

    # the body, its two moments, and the number of steps
    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * (3 * 6_500 + 1)


# --- prediction ---


@pytest.fixture
def two_heads(make_ctx):
    """A context, a model of two different heads, images, and the class probabilities under either head."""
    ctx = make_ctx("fedpop", client=0)
    body, head = ctx.task.initial.split([6_500, 1_010])
    heads, x = torch.stack([3 * head, -5 * head]), ctx.task.test_data(0).x
    hidden = linear(x.flatten(1), body[:6_400].view(100, 64), body[6_400:]).relu()
    each = [linear(hidden, z[:1_000].view(10, 100), z[1_000:]).softmax(-1) for z in heads]
    return ctx, {"shared": body, "samples": heads}, x, each


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_a_prediction_is_the_mean_of_softmax_over_the_retained_samples(two_heads, make_algorithm, mode):
    ctx, model, x, (one, other) = two_heads

    predicted = make_algorithm("fedpop").predict(model, x, ctx, mode)

    assert (one - other).abs().max() > 0.3
    torch.testing.assert_close(predicted, (one + other) / 2)


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_or_the_last_sample_alone(two_heads, make_algorithm, mode):
    ctx, model, x, (_, last) = two_heads

    torch.testing.assert_close(make_algorithm("fedpop", prediction="last").predict(model, x, ctx, mode), last)


def test_a_client_deploys_its_samples_on_the_servers_body_of_now(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpop", clients=4, f=0.5, tau=4, **BATCHES)
    algorithm = make_algorithm("fedpop")
    progress = run_rounds(algorithm, ctx, rounds=3)

    for client in range(4):
        memory, data = progress.clients[client], ctx.task.train_data(client)
        model = algorithm.personal_model(progress.server, memory, data, ctx.at(client), None)
        assert torch.equal(model["shared"], progress.server["shared"])
        assert torch.equal(model["samples"], memory["samples"])
        assert algorithm.global_model(progress.server, memory, data, ctx.at(client)) is None


# --- newcomers and adaptation ---


def test_for_a_newcomer_only_the_chain_moves(make_ctx, make_algorithm):
    ctx = replace(make_ctx("fedpop", client=0, newcomers=1, tau=4, batch_size=25, lr=0.1, **BATCHES), novel=True)
    algorithm = make_algorithm("fedpop", langevin_noise=False)
    server = {"shared": -ctx.task.initial[:6_500]}
    fresh = algorithm.init_client(ctx)

    message, first = update_once(algorithm, ctx, fresh, server)
    _, second = update_once(algorithm, ctx, first, server)

    assert message == {}
    assert set(first) == {"samples"}
    losses = []
    for memory in (fresh, first, second):
        ctx.task.net.load(torch.cat([server["shared"], memory["samples"][-1]]))
        losses.append(cross_entropy(ctx.task.net.logits(ctx.task.train_data(0).x), ctx.task.train_data(0).y).item())
    assert losses[0] > losses[1] > losses[2]


def test_adaptation_goes_on_with_the_chain_for_so_many_passes(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2, adapt_lr=0.1, batch_size=1)
    visited = quadratic(1.0, 2.0)
    algorithm, data = make_algorithm("fedpop", langevin_noise=False, prior_rho=UNIT), ctx.task.train_data(0)
    server, memory = {"shared": torch.zeros(300)}, {"samples": torch.zeros(3, 202)}

    at_once, later = (algorithm.personal_model(server, memory, data, ctx, epochs) for epochs in (0, 2))

    assert torch.equal(at_once["samples"], memory["samples"])
    # two passes of two batches at 0.1: each leaves 1 - 0.05 * 3 = 0.85 of the distance to 4/3; the last two are kept
    expected = torch.stack([torch.full((202,), 4 / 3 * (1 - 0.85**step)) for step in (3, 4)])
    torch.testing.assert_close(later["samples"], expected)
    assert len(visited) == 4
    assert torch.equal(later["shared"], server["shared"])


def test_adaptation_has_noise_of_its_own(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2, batch_size=1)
    quadratic(0.0, 0.0)
    algorithm, data = make_algorithm("fedpop", prior_rho=5.0), ctx.task.train_data(0)
    memory = algorithm.init_client(ctx)

    _, trained = update_once(algorithm, ctx)
    adapted = algorithm.personal_model(algorithm.init_server(ctx), memory, data, ctx, 1)

    moved = [samples[-1] - memory["samples"][0] for samples in (trained["samples"], adapted["samples"])]
    # two steps of sqrt(2 * 0.2 / 2) each, in 202 coordinates, and not the same ones
    assert moved[1].std().item() == pytest.approx(sqrt(0.4), rel=0.2)
    assert abs(torch.corrcoef(torch.stack(moved))[0, 1].item()) < 0.3


def test_adaptation_has_the_servers_prior(two_layers, make_algorithm, quadratic):
    ctx = two_layers("fedpop", client=0, lr=0.2)
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpop", langevin_noise=False, prior="learned")
    prior = torch.stack([torch.full((202,), 5.0), torch.full((202,), UNIT)])
    server = {"shared": torch.zeros(300), "prior": prior, "shared.step": torch.tensor(1.0)}

    model = algorithm.personal_model(server, {"samples": torch.zeros(1, 202)}, ctx.task.train_data(0), ctx, 60)

    # (2 * 2 + 5) / 3
    torch.testing.assert_close(model["samples"][-1], torch.full((202,), 3.0), rtol=1e-4, atol=1e-4)


# --- what travels and what stays ---


@pytest.mark.parametrize(("prior", "numbers"), [("fixed", 6_500), ("learned", 6_500 + 2 * 1_010)])
def test_body_and_learned_prior_travel_and_nothing_else(make_ctx, make_algorithm, run_rounds, prior, numbers):
    ctx = make_ctx("fedpop", client=0)
    algorithm = make_algorithm("fedpop", prior=prior)
    server = run_rounds(algorithm, ctx.at(None)).server
    down = algorithm.download(server, ctx)

    up, memory = update_once(algorithm, ctx, down=down)

    assert "shared.exp_avg" in server
    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * numbers
    assert memory["samples"].shape[1] == 1_010


def test_a_client_without_data_changes_nothing(make_ctx, make_algorithm):
    ctx = make_ctx("fedpop", client=0, tau=3)
    algorithm, images = make_algorithm("fedpop"), Images(torch.zeros(1, 1, 8, 8), 1.0, "none")
    empty = ClientData(images, torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    message, memory = algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), empty, ctx)

    assert not message["body_grad"].any()
    assert torch.equal(memory["samples"][0], ctx.task.initial[6_500:])


# --- what is refused ---


@pytest.mark.parametrize("protocol", [{"optimizer": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_langevin_noise_needs_plain_steps(make_ctx, make_algorithm, protocol):
    ctx = make_ctx("fedpop", **protocol)

    with pytest.raises(FedbenchError, match="plain gradient steps with noise"):
        make_algorithm("fedpop").init_server(ctx)
    make_algorithm("fedpop", langevin_noise=False).init_server(ctx)


def test_running_statistics_are_refused(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("fedpop", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("fedpop").init_server(ctx)


def test_a_network_of_one_layer_has_nothing_to_share(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="FedPop shares the body, and a single layer has none"):
        make_algorithm("fedpop").init_server(make_ctx("fedpop", model="logreg"))


@pytest.mark.parametrize(
    "params",
    [
        {"burn_in": 1.0},
        {"burn_in": -0.1},
        {"retained": 0},
        {"lr_body": 0.0},
        {"lr_prior": -1.0},
        {"body_prior": 0.0},
        {"prior_rho": 6.0},
        {"prior": "flat"},
        {"head_optimizer": "rmsprop"},  # with Langevin noise
    ],
)
def test_settings_that_make_no_sense_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("fedpop", **params)
