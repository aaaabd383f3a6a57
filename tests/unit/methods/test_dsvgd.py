"""DSVGD by hand: a visit, the polls and the selection, the parallel server, its traffic, and plain SVGD as a case."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Ctx, Upload
from fedbench.algorithms.dsvgd import inner_products, shares
from fedbench.errors import FedbenchError
from fedbench.evaluation import Standing
from fedbench.models.bayesian import ParticleModel
from fedbench.simulation import train_round
from fedbench.stein import Svgd, median_bandwidth, svgd_direction, v_statistic


@pytest.fixture
def tiny_blr(tiny):
    """The tiny task with a logistic regression: a particle holds log xi and two weights.

    Client 0 has (1, 0) of class 0 and (0, 2) of class 1, client 1 has (2, 0) of class 0 and (0, 1) of class 1.
    """
    return {**tiny, "model": "blr"}


WIDE = {
    "dataset": "synthetic[classes=2,shape=1x8x8]",
    "partition": "class_ratio",
    "n_client": 60,
    "clients": 3,
    "model": "blr",
    "batch_size": 20,
    "lr": 0.05,
    "tau": 4,
}
"""65 dimensions, in which the code's density estimate is a constant."""


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def model_of(ctx, **options):
    return ParticleModel(ctx.task.net, **options)


def whole(data):
    return data.x.double(), data.y


# --- a visit ---


def test_a_visit_by_hand(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", client=0, lr=0.1, tau=1, **tiny_blr)
    algorithm = make_algorithm("dsvgd", kde="log", kde_bandwidth=2.0, fudge=1.0, local_steps=1)

    message, memory = algorithm.update(
        {"particles": torch.tensor([[0.0, 1.0, -1.0]])},
        {"particles": torch.tensor([[0.4, 1.0, -1.8]])},
        ctx.task.train_data(0),
        ctx,
    )

    # prior at xi = 1, w = (1, -1), D = 2: (2/2 - 2/2 - 0.01 + 1, -1, 1)
    # likelihood: -sigmoid(1) (1, 0) + (1 - sigmoid(-2)) (0, 2) = (-0.731059, 1.761594)
    # one particle: log q pulls it nowhere, -log t pushes it from (0.4, 1, -1.8): (-0.1, 0, 0.2)
    # phi = (0.89, -1.731059, 2.961594), a step of 0.1 phi / (1 + |phi|)
    assert message["particles"].flatten().tolist() == pytest.approx([0.0470899, 0.9366158, -0.9252424], abs=1e-6)
    # log q_new - log q_old + log t at t itself: the step / 4, so (0.0117725, -0.0158460, 0.0186894), stepped likewise
    assert memory["particles"].flatten().tolist() == pytest.approx([0.4011636, 0.9984401, -1.7981653], abs=1e-6)


def plain_svgd(ctx, particles, rounds, local_batches):
    """SVGD on the client's posterior, begun anew (and rounded to float32) every round."""
    model, n = model_of(ctx), ctx.task.train_data(0).n
    for number in range(1, rounds + 1):
        svgd, now = Svgd(ctx.protocol.lr, 1e-6), particles.double()
        for x, y in local_batches(ctx.task.train_data(0), Ctx(ctx.task, ctx.protocol, ctx.seed, number, 0)):
            now = model.clamped(svgd.step(now, model.prior_score(now) + model.likelihood_score(now, x, y, n)))
        particles = now.float()
    return particles


@pytest.mark.parametrize("rounds", [1, 3])
def test_round_robin_with_one_client_is_plain_svgd(make_ctx, make_algorithm, run_rounds, rounds):
    from fedbench.training import local_batches

    ctx, algorithm = make_ctx("dsvgd", **{**WIDE, "clients": 1}), make_algorithm("dsvgd")

    found = run_rounds(algorithm, ctx, rounds).server["particles"]

    assert torch.equal(found, plain_svgd(ctx, algorithm.init_server(ctx)["particles"], rounds, local_batches))


def test_one_particle_climbs_the_gradient_of_the_log_posterior(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("dsvgd", **{**WIDE, "clients": 1, "batch_size": 60})
    algorithm = make_algorithm("dsvgd", n_particles=1)

    found = run_rounds(algorithm, ctx).server["particles"].double().flatten()

    x, y = whole(ctx.task.train_data(0))
    theta, mean_square = algorithm.init_server(ctx)["particles"].double().flatten(), None
    for _ in range(4):
        theta.requires_grad_()
        xi, w = theta[0].exp(), theta[1:]
        logits = x.flatten(1) @ w
        likelihood = torch.nn.functional.logsigmoid((2.0 * y - 1) * logits).sum()
        prior = 32 * theta[0] - xi / 2 * w.square().sum() - 0.01 * xi + theta[0]
        (gradient,) = torch.autograd.grad(likelihood + prior, theta)
        mean_square = gradient**2 if mean_square is None else 0.9 * mean_square + 0.1 * gradient**2
        theta = (theta + 0.05 * gradient / (1e-6 + mean_square.sqrt())).detach()
    torch.testing.assert_close(found, theta, rtol=1e-5, atol=1e-5)


def test_a_client_that_has_not_been_visited_adds_nothing_but_its_data(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("dsvgd", **WIDE)

    first, later = (
        [run_rounds(make_algorithm("dsvgd", kde=kde), ctx, rounds).server["particles"] for kde in ("code", "log")]
        for rounds in (1, 2)
    )

    # at first q is p_0 and so is what client 0 holds of it: their densities cancel, whatever their form
    assert torch.equal(*first)
    assert not torch.allclose(*later)


def test_the_likelihood_counts_the_clients_samples(make_ctx, make_algorithm):
    ctx = make_ctx("dsvgd", client=0, **{**WIDE, "tau": 1, "batch_size": 7})
    algorithm = make_algorithm("dsvgd", local_steps=0, fudge=1e9)
    data, start = ctx.task.train_data(0), algorithm.init_server(ctx)

    message, _ = algorithm.update(start, algorithm.init_client(ctx), data, ctx)

    particles, (x, y) = start["particles"].double(), next(data.batches(7, ctx.rng("batches"), steps=1))
    gradient = model_of(ctx).score(particles, x, y, n=60)
    phi = svgd_direction(particles, gradient, median_bandwidth(particles))
    # a large fudge makes the step lr phi / fudge
    moved = message["particles"].double() - particles
    torch.testing.assert_close(moved, 0.05 * phi / 1e9, rtol=1e-3, atol=2e-7)


def test_a_client_keeps_its_own_particles_and_sends_the_moved_ones(make_ctx, make_algorithm, run_rounds):
    ctx, algorithm = make_ctx("dsvgd", **WIDE), make_algorithm("dsvgd")

    progress = run_rounds(algorithm, ctx, rounds=1)

    start = algorithm.init_server(ctx)["particles"]
    assert not torch.equal(progress.clients[0]["particles"], start)
    assert not torch.equal(progress.clients[0]["particles"], progress.server["particles"])
    assert torch.equal(progress.clients[1]["particles"], start)
    for state in (progress.server, progress.clients[0]):
        assert state["particles"].dtype == torch.float32


def test_log_precisions_are_clamped_while_training(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("dsvgd", **{**WIDE, "lr": 5.0})

    free, held = (run_rounds(make_algorithm("dsvgd", log_precision_bound=bound), ctx, 2) for bound in (50.0, 4.5))

    for of_free, of_held in ((free.server, held.server), (free.clients[0], held.clients[0])):
        assert of_free["particles"][:, 0].abs().max() > 4.5
        assert of_held["particles"][:, 0].abs().max() <= 4.5


# --- where it begins ---


def test_all_begin_with_the_same_particles(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("dsvgd", **WIDE), make_algorithm("dsvgd")
    start = algorithm.init_server(ctx)["particles"]

    for client in range(3):
        assert torch.equal(algorithm.init_client(ctx.at(client))["particles"], start)
    assert torch.equal(make_algorithm("dsvgd").init_client(ctx.at(2))["particles"], start)


def test_another_seed_or_task_begins_elsewhere_also_with_the_same_method(make_ctx, make_algorithm):
    algorithm = make_algorithm("dsvgd")

    starts = [algorithm.init_server(make_ctx("dsvgd", seed=seed, **WIDE))["particles"] for seed in (0, 1, 0)]
    network = algorithm.init_server(make_ctx("dsvgd", seed=0, **{**WIDE, "model": "bnn100"}))["particles"]

    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert network.shape == (20, 6703)


@pytest.mark.parametrize(
    ("params", "model", "shape"),
    [({}, "blr", (6, 65)), ({}, "bnn100", (20, 6703)), ({}, "dnn100", (6, 6702)), ({"n_particles": 3}, "blr", (3, 65))],
)
def test_how_many_particles_depends_on_the_network(make_ctx, make_algorithm, params, model, shape):
    ctx = make_ctx("dsvgd", **{**WIDE, "model": model})

    # 64 * 100 + 100 + 100 * 2 + 2 weights and biases, and a log precision
    assert make_algorithm("dsvgd", **params).init_server(ctx)["particles"].shape == shape


def test_it_refuses_running_statistics(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("dsvgd", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("dsvgd").init_server(ctx)


# --- who is visited ---


def visited(algorithm, ctx, rounds, polls=None):
    return [
        algorithm.select(algorithm.init_server(ctx), polls or {}, Ctx(ctx.task, ctx.protocol, ctx.seed, number))
        for number in range(1, rounds + 1)
    ]


def test_round_robin_visits_one_after_the_other_whatever_f_is(make_ctx, make_algorithm):
    for f in (1.0, 0.3):
        cohorts = visited(make_algorithm("dsvgd"), make_ctx("dsvgd", f=f, **WIDE), 7)

        assert [cohort.train for cohort in cohorts] == [(0,), (1,), (2,), (0,), (1,), (2,), (0,)]
        assert all(cohort.report == cohort.train for cohort in cohorts)


def test_newcomers_are_not_visited(make_ctx, make_algorithm):
    ctx = make_ctx("dsvgd", newcomers=1, **WIDE)

    for selection in ("round_robin", "random"):
        cohorts = visited(make_algorithm("dsvgd", selection=selection), ctx, 10)
        assert {cohort.train for cohort in cohorts} == {(1,), (2,)}


def test_random_visits_all_alike(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("dsvgd", **WIDE), make_algorithm("dsvgd", selection="random")

    counts = np.bincount([cohort.train[0] for cohort in visited(algorithm, ctx, 600)])

    # 200 each, with a deviation of 11.5
    assert counts.tolist() == pytest.approx([200] * 3, abs=40)


def test_ksd_visits_in_proportion_to_the_discrepancies(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("dsvgd", **WIDE), make_algorithm("dsvgd", selection="ksd")
    polls = {client: {"ksd": torch.tensor(value)} for client, value in enumerate((1.0, 0.0, 3.0))}

    counts = np.bincount([cohort.train[0] for cohort in visited(algorithm, ctx, 600, polls)], minlength=3)

    assert algorithm.probabilities({}, polls, ctx).tolist() == [0.25, 0.0, 0.75]
    assert counts.tolist() == pytest.approx([150, 0, 450], abs=35)
    assert counts[1] == 0


def test_discrepancies_that_are_alike_are_random_selection(make_ctx, make_algorithm):
    ctx = make_ctx("dsvgd", **WIDE)
    polls = {client: {"ksd": torch.tensor(0.7)} for client in range(3)}

    ksd = visited(make_algorithm("dsvgd", selection="ksd"), ctx, 30, polls)

    assert ksd == visited(make_algorithm("dsvgd", selection="random"), ctx, 30)


def test_the_worked_probabilities():
    particles = rows([-1.0], [0.5])
    # clients N(0, 1) and N(2, 1), h = 1: KSD 0.680105 and 3.443603, inner products with the mean 0.818280 and 2.200029
    inner = inner_products(particles, [-particles, 2 - particles], 1.0)

    assert shares([0.680105, 3.443603]).tolist() == pytest.approx([0.164926, 0.835074], abs=1e-6)
    assert inner == pytest.approx([0.818280, 2.200029], abs=1e-6)
    assert shares(inner).tolist() == pytest.approx([0.271105, 0.728895], abs=1e-6)


def test_hip_draws_from_the_inner_products_at_the_servers_particles(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("dsvgd", **WIDE), make_algorithm("dsvgd", selection="hip", median="code")
    particles = rows([-1.0], [0.5]).float()
    polls = {k: {"scores": centre - particles} for k, centre in enumerate((0.0, 2.0, 1.0))}

    found = algorithm.probabilities({"particles": particles}, polls, ctx)

    inner = inner_products(particles.double(), [polls[k]["scores"] for k in range(3)], "code")
    assert found.tolist() == pytest.approx(shares(inner).tolist())
    assert found.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "negative", "expected"),
    [
        ([3.0, -1.0, 1.0], "clip", [0.75, 0.0, 0.25]),
        ([3.0, -1.0, 1.0], "shift", [4 / 6, 0.0, 2 / 6]),
        ([-3.0, -1.0], "clip", [0.5, 0.5]),
        ([0.0, 0.0], "clip", [0.5, 0.5]),
        ([2.0, 2.0], "shift", [0.5, 0.5]),
    ],
)
def test_negative_inner_products(values, negative, expected):
    assert shares(values, negative).tolist() == pytest.approx(expected)


def test_the_option_for_negative_inner_products_reaches_the_selection(make_ctx, make_algorithm):
    ctx, particles = make_ctx("dsvgd", **WIDE), rows([-1.0], [0.5])
    # client 1 pulls against the mean of all
    polls = {k: {"scores": factor * torch.ones(2, 1)} for k, factor in enumerate((30.0, -20.0, 10.0))}

    clip, shift = (
        make_algorithm("dsvgd", selection="hip", negative_hip=negative).probabilities(
            {"particles": particles}, polls, ctx
        )
        for negative in ("clip", "shift")
    )

    assert clip[1] == shift[1] == 0
    assert clip[0] > shift[0]


# --- polls ---


@pytest.fixture
def one_label_each(add_dataset, make_ctx):
    """Client 0 has class 0 only, client 1 class 1 only; all pixels are 1, so that the sum of weights decides."""
    add_dataset("flat", np.ones((40, 1, 1, 3)), [0] * 20 + [1] * 20, per_class=(10, 10), full_scale=1)
    return lambda method, **settings: make_ctx(
        method, dataset="flat", normalize="none", model="blr", labels_per_client=1, batch_size=5, **settings
    )


@pytest.mark.parametrize("selection", ["ksd", "hip"])
@pytest.mark.parametrize(("weight", "surprised"), [(2.0, 0), (-2.0, 1)])
def test_the_client_whose_data_the_particles_do_not_know_is_drawn(
    one_label_each, make_algorithm, selection, weight, surprised
):
    ctx, algorithm = one_label_each("dsvgd"), make_algorithm("dsvgd", selection=selection)
    spread = torch.tensor([[0.0], [0.5], [-0.5]])
    server = {"particles": torch.cat([torch.zeros(3, 1), torch.full((3, 3), weight) + spread], 1)}

    polls = {client: algorithm.poll(server, server, ctx.task.train_data(client), ctx.at(client)) for client in range(2)}
    found = algorithm.probabilities(server, polls, ctx)

    # positive weights say class 1, which client 0 has never seen
    assert found.sum() == pytest.approx(1.0)
    assert found[surprised] > 0.8


def test_a_polled_discrepancy_is_that_of_the_tilted_density(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", client=0, **tiny_blr)
    algorithm = make_algorithm("dsvgd", selection="ksd", kde="log")
    q, t = rows([0.0, 1.0, -1.0], [0.3, 0.2, 0.1]), rows([0.4, 1.0, -1.8], [0.0, 0.0, 0.5])

    answer = algorithm.poll({"particles": q.float()}, {"particles": t.float()}, ctx.task.train_data(0), ctx)

    def log_kde(x, centres):
        return torch.logsumexp(-(x - centres).square().sum(1) / (2 * 0.55**2), 0)

    def tilted(theta):
        x, y = whole(ctx.task.train_data(0))
        xi, w = theta[0].exp(), theta[1:]
        likelihood = torch.nn.functional.logsigmoid((2.0 * y - 1) * (x.flatten(1) @ w)).sum()
        prior = theta[0] - xi / 2 * w.square().sum() - 0.01 * xi + theta[0]  # D / 2 = 1, and the change of variable
        return log_kde(theta, q) - log_kde(theta, t) + likelihood + prior

    moving = q.clone().requires_grad_()
    (score,) = torch.autograd.grad(tilted(moving[0]) + tilted(moving[1]), moving)
    assert answer["ksd"].shape == ()
    assert answer["ksd"].item() == pytest.approx(v_statistic(q, score, score, "paper").item(), rel=1e-5)


def test_polled_gradients_are_those_of_the_likelihood_alone(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", client=0, **tiny_blr)
    particles = torch.tensor([[0.0, 1.0, -1.0]])

    answer = make_algorithm("dsvgd", selection="hip").poll(
        {"particles": particles}, {"particles": particles + 1}, ctx.task.train_data(0), ctx
    )

    # as in the visit by hand
    assert answer["scores"].flatten().tolist() == pytest.approx([0.0, -0.731059, 1.761594], abs=1e-6)


@pytest.mark.parametrize("selection", ["ksd", "hip"])
def test_a_poll_looks_at_one_batch_or_at_everything(make_ctx, make_algorithm, selection):
    ctx = make_ctx("dsvgd", client=0, **{**WIDE, "batch_size": 10})
    data = ctx.task.train_data(0)

    def answer(poll_data, round_):
        algorithm = make_algorithm("dsvgd", selection=selection, poll_data=poll_data)
        start = algorithm.init_server(ctx)
        (value,) = algorithm.poll(start, start, data, Ctx(ctx.task, ctx.protocol, 0, round_, 0)).values()
        return value

    # all samples are the same in every round but for their order, a batch is not
    torch.testing.assert_close(answer("all", 1), answer("all", 2))
    assert not torch.allclose(answer("batch", 1), answer("batch", 2), rtol=1e-3)
    if selection == "hip":
        start = make_algorithm("dsvgd").init_server(ctx)["particles"].double()
        torch.testing.assert_close(answer("all", 1), model_of(ctx).likelihood_score(start, *whole(data), n=60))


@pytest.mark.parametrize("selection", ["round_robin", "random", "ksd", "hip", "parallel"])
def test_only_ksd_and_hip_ask_before_they_select(make_ctx, make_algorithm, run_rounds, monkeypatch, selection):
    asked = []
    algorithm = make_algorithm("dsvgd", selection=selection, kde="log")
    answers = algorithm.poll
    monkeypatch.setattr(algorithm, "poll", lambda *args: asked.append(args[3].client) or answers(*args))

    run_rounds(algorithm, make_ctx("dsvgd", **WIDE))

    assert asked == ([0, 1, 2] if selection in ("ksd", "hip") else [])


# --- traffic ---

PARTICLES = 4 * 6 * 65
"""Bytes of six particles in 65 dimensions."""


@pytest.mark.parametrize(
    ("selection", "down", "up"),
    [
        ("round_robin", PARTICLES, PARTICLES),
        ("random", PARTICLES, PARTICLES),
        ("ksd", 4 * PARTICLES, 4 * 4 + PARTICLES),  # to all four; a number from all, particles from one
        ("hip", 4 * PARTICLES, 4 * PARTICLES + PARTICLES),
        ("parallel", 2 * PARTICLES, 2 * PARTICLES),  # f = 1/2
    ],
)
def test_the_bytes_of_every_scheme(make_ctx, make_algorithm, begin_training, selection, down, up):
    ctx = make_ctx("dsvgd", **{**WIDE, "clients": 4, "f": 0.5})
    algorithm = make_algorithm("dsvgd", selection=selection, kde="log")
    progress = begin_training(algorithm, ctx)

    for number in (1, 2):
        traffic = train_round(algorithm, progress, Ctx(ctx.task, ctx.protocol, ctx.seed, number))
        assert (traffic.bytes_down, traffic.bytes_up) == (down, up)


# --- the parallel server ---


def test_parallel_clients_send_their_own_particles(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", client=0, **tiny_blr)
    algorithm = make_algorithm("dsvgd", selection="parallel", kde="log")
    start = algorithm.init_server(ctx)

    message, memory = algorithm.update(start, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert torch.equal(message["particles"], memory["particles"])
    assert not torch.equal(message["particles"], start["particles"])


def test_a_step_of_the_parallel_server_by_hand(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", lr=0.1, **tiny_blr)
    algorithm = make_algorithm("dsvgd", selection="parallel", kde="log", kde_bandwidth=2.0, fudge=1.0, server_steps=1)
    sent = (torch.tensor([[0.4, 1.0, -1.8]]), torch.tensor([[-0.8, 1.4, -1.0]]), torch.tensor([[0.0, 0.6, -1.0]]))

    found = algorithm.aggregate(
        {"particles": torch.tensor([[0.0, 1.0, -1.0]])},
        [Upload(k, 2, {"particles": particles}) for k, particles in enumerate(sent)],
        ctx,
    )

    # log p_0 + sum_k (log p_0 t_k - log p_0): pulls (0.1, 0, -0.2) + (-0.2, 0.1, 0) + (0, -0.1, 0), minus twice the
    # prior's (0.99, -1, 1): (-2.08, 2, -2.2), a step of 0.1 phi / (1 + |phi|)
    expected = [-0.1 * 2.08 / 3.08, 1 + 0.1 * 2 / 3, -1 - 0.1 * 2.2 / 3.2]
    assert found["particles"].flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_the_parallel_server_steps_as_often_as_it_is_told(make_ctx, make_algorithm, run_rounds, tiny_blr):
    ctx = make_ctx("dsvgd", **tiny_blr)

    still, once, often = (
        run_rounds(make_algorithm("dsvgd", selection="parallel", kde="log", server_steps=steps), ctx).server
        for steps in (0, 1, 50)
    )

    start = make_algorithm("dsvgd").init_server(ctx)["particles"]
    assert torch.equal(still["particles"], start)
    assert (often["particles"] - start).abs().max() > 5 * (once["particles"] - start).abs().max()


def test_parallel_with_densities_that_say_nothing_is_refused(make_ctx, make_algorithm, tiny_blr):
    with pytest.raises(FedbenchError, match="parallel clients could tell nothing") as caught:
        make_algorithm("dsvgd", selection="parallel").init_server(make_ctx("dsvgd", **WIDE))

    assert caught.value.hint == "Set kde=log."
    make_algorithm("dsvgd", selection="parallel").init_server(make_ctx("dsvgd", **tiny_blr))  # three dimensions


def test_the_parallel_server_hears_all_its_clients(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", **tiny_blr)
    algorithm = make_algorithm("dsvgd", selection="parallel", kde="log", gamma="scale")
    start = algorithm.init_server(ctx)
    uploads = [Upload(k, 2, {"particles": start["particles"] + k}) for k in range(3)]

    of_all, of_two = (algorithm.aggregate(start, uploads[:n], ctx)["particles"] for n in (3, 2))

    assert not torch.allclose(of_all, of_two)


# --- options ---


@pytest.mark.parametrize(
    "params",
    [
        {"n_particles": 5},
        {"fudge": 1.0},
        {"median": "code"},
        {"kde_bandwidth": 1.0},
        {"local_steps": 3},
        {"gamma": "scale"},
        {"log_precision_bound": 1.0},
        {"selection": "random"},
        {"selection": "parallel"},
    ],
    ids=str,
)
def test_an_option_changes_the_particles(make_ctx, make_algorithm, run_rounds, tiny_blr, params):
    ctx, common = make_ctx("dsvgd", seed=2, lr=0.1, **tiny_blr), {"kde": "log"}

    plain = run_rounds(make_algorithm("dsvgd", **common), ctx, rounds=5).server["particles"]
    changed = run_rounds(make_algorithm("dsvgd", **{**common, **params}), ctx, rounds=5).server["particles"]

    assert plain.shape != changed.shape or not torch.allclose(plain, changed)


def test_the_likelihood_of_a_network_with_noise_is_an_option(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("dsvgd", **{**WIDE, "model": "bnn100", "lr": 0.001})

    one, other = (
        run_rounds(make_algorithm("dsvgd", bnn_likelihood=likelihood, n_particles=3), ctx).server["particles"]
        for likelihood in ("gaussian", "categorical")
    )

    assert not torch.allclose(one[:, 1:], other[:, 1:])


def test_the_kernel_of_the_discrepancy_is_an_option(make_ctx, make_algorithm):
    ctx = make_ctx("dsvgd", client=0, **{**WIDE, "batch_size": 60})
    data = ctx.task.train_data(0)
    median, fixed = (make_algorithm("dsvgd", selection="ksd", ksd_kernel=name) for name in ("rbf_median", "gauss055"))
    start = median.init_server(ctx)

    particles = start["particles"].double()
    score = model_of(ctx).score(particles, *whole(data), n=60)

    assert median.poll(start, start, data, ctx)["ksd"].item() == pytest.approx(
        v_statistic(particles, score, score, "paper").item()
    )
    # exp(-r^2 / (2 * 0.55^2)): h = 0.605
    assert fixed.poll(start, start, data, ctx)["ksd"].item() == pytest.approx(
        v_statistic(particles, score, score, 0.605).item()
    )


@pytest.mark.parametrize(
    "params",
    [
        {"selection": "best"},
        {"n_particles": 0},
        {"local_steps": -1},
        {"server_steps": -1},
        {"fudge": 0},
        {"kde": "none"},
        {"kde_bandwidth": 0},
        {"median": "mean"},
        {"ksd_kernel": "imq"},
        {"poll_data": "some"},
        {"negative_hip": "abs"},
        {"gamma": "shape"},
        {"bnn_likelihood": "student"},
        {"particle_accuracy": "never"},
        {"log_precision_bound": 0},
    ],
    ids=str,
)
def test_bad_values_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("dsvgd", **params)


# --- prediction ---


def test_it_predicts_with_the_mean_over_particles(make_ctx, make_algorithm, tiny_blr):
    ctx = make_ctx("dsvgd", **tiny_blr)
    model = {"particles": torch.tensor([[0.0, 1.0, 0.0], [5.0, -3.0, 0.0]])}

    probabilities = make_algorithm("dsvgd").predict(model, torch.tensor([2.0, 7.0]).view(1, 1, 1, 2), ctx, "mean")

    # sigmoid(2) = 0.880797, sigmoid(-6) = 0.002473
    assert probabilities.flatten().tolist() == pytest.approx([1 - 0.441635, 0.441635], abs=1e-6)


def test_the_accuracy_of_single_particles_is_recorded_beside_the_ensembles(make_ctx, make_algorithm, tiny_blr):
    # test images are (9, 0) of class 0 and (0, 9) of class 1
    particles = torch.tensor([[0.0, -1.0, 1.0], [0.0, -1.0, -1.0], [0.0, 1.0, -1.0], [0.0, -9.0, 9.0]])
    ctx = make_ctx("dsvgd", rounds=1, **tiny_blr)
    algorithm = make_algorithm("dsvgd")

    # right: both, one, none, both
    assert algorithm.describe({"particles": particles}, ctx) == {"particle_accuracy": pytest.approx(5 / 8)}


def test_single_particles_are_scored_in_the_last_round_or_always(make_ctx, make_algorithm, begin_training, tiny_blr):
    ctx = make_ctx("dsvgd", rounds=2, **tiny_blr)

    def recorded(algorithm, round_):
        progress, here = begin_training(algorithm, ctx), Ctx(ctx.task, ctx.protocol, 0, round_)
        return Standing(algorithm, progress.server, progress.clients, here).evaluate("gm", "mean").metrics[None]

    last, always = (make_algorithm("dsvgd", particle_accuracy=when) for when in ("last", "always"))
    assert "particle_accuracy" not in recorded(last, 1)
    assert "particle_accuracy" in recorded(last, 2)
    assert "particle_accuracy" in recorded(always, 1)


def test_one_test_set_for_all_clients_is_scored_once(make_ctx, make_algorithm, monkeypatch):
    ctx, algorithm = make_ctx("dsvgd", rounds=1, **WIDE), make_algorithm("dsvgd")
    start, asked, test_data = algorithm.init_server(ctx), [], ctx.task.test_data
    monkeypatch.setattr(ctx.task, "test_data", lambda *clients: asked.append(clients) or test_data(*clients))

    found = algorithm.describe(start, ctx)["particle_accuracy"]

    data = test_data(0)
    guesses = (start["particles"][:, 1:] @ data.x.flatten(1).T > 0).long()
    assert asked == [(0,)]
    assert found == pytest.approx((guesses == data.y).double().mean().item())


def test_it_learns_a_regression_and_a_network(make_ctx, make_algorithm, run_rounds, begin_training):
    for model, lr, rounds in (("blr", 0.05, 12), ("bnn100", 0.003, 12)):
        ctx = make_ctx("dsvgd", majority=0.5, **{**WIDE, "tau": 10, "model": model, "lr": lr})
        algorithm = make_algorithm("dsvgd", n_particles=4, gamma="scale")

        def accuracy(progress, algorithm=algorithm, ctx=ctx):
            scored = Standing(algorithm, progress.server, progress.clients, ctx).evaluate("gm", "mean")
            return scored.metrics[None]["accuracy"]

        assert accuracy(run_rounds(algorithm, ctx, rounds)) > max(0.8, accuracy(begin_training(algorithm, ctx))), model
