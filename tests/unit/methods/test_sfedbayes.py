"""sFedBayes: the bound and its gradients, gates, one round against autograd, and that lambda 1 is pFedBayes."""

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softplus

from fedbench.algorithm import Upload
from fedbench.bayes import (
    SpikeSlab,
    bernoulli_kl,
    inverse_softplus,
    set_spike_slab_elbo_grad,
    set_spike_slab_prior_grad,
    spike_slab_kl,
)
from fedbench.simulation import on_wire, size_of, train_round

ROWS = ("mu", "rho", "gate")
FORMS = pytest.mark.parametrize("form", ["logit", "raw"])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_state(seed, form, d=6, dtype=torch.float32):
    mu, rho, gate = torch.randn(3, d, generator=generator(seed), dtype=dtype)
    return {"mu": 0.5 * mu, "rho": 0.5 * rho - 1, "gate": gate if form == "logit" else torch.sigmoid(gate)}


def posterior(state, form="logit", seed=0):
    return SpikeSlab(state, form, generator(seed))


def rows(state):
    return torch.stack([state[key] for key in ROWS])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def no_loss(theta):
    return torch.zeros_like(theta)


def lambda_of(gate, form):
    return torch.sigmoid(gate) if form == "logit" else gate


def textbook_bound(q, p, form):
    """The bound of two [mu, rho, gate], built so that autograd can follow it."""
    keep, prior_keep = lambda_of(q[2], form), lambda_of(p[2], form)
    slabs = kl_divergence(Normal(q[0], softplus(q[1])), Normal(p[0], softplus(p[1])))
    return (kl_divergence(Bernoulli(probs=keep), Bernoulli(probs=prior_keep)) + keep * slabs).sum()


# --- the bound ---


def test_the_kl_of_bernoullis_has_the_worked_values():
    # 0.5 log(0.5/0.99) + 0.5 log(0.5/0.01)
    assert bernoulli_kl(tensor(0.5), tensor(0.99)) == pytest.approx(1.614463, abs=1e-6)
    # 0.98 log(0.98/0.99) + 0.02 log(0.02/0.01)
    assert bernoulli_kl(tensor(0.98), tensor(0.99)) == pytest.approx(0.003914, abs=1e-6)
    assert bernoulli_kl(tensor(0.0, 0.3, 1.0), tensor(0.0, 0.3, 1.0)) == 0.0


def test_the_bound_has_the_worked_value():
    sigma = inverse_softplus(tensor(0.5)), inverse_softplus(tensor(1.0))
    q = posterior({"mu": tensor(1.0), "rho": sigma[0], "gate": tensor(0.5)}, "raw")
    prior = posterior({"mu": tensor(0.0), "rho": sigma[1], "gate": tensor(0.99)}, "raw")

    # 1.614463 + 0.5 * 0.818147
    assert spike_slab_kl(q, prior) == pytest.approx(2.023537, abs=1e-6)


def slopes(function, state):
    """Central differences of a function of a state, over each of its rows."""
    found = []
    for key in ROWS:
        steps = 1e-5 * torch.eye(6, dtype=torch.float64)
        moved = [[function({**state, key: state[key] + sign * h}) for sign in (1, -1)] for h in steps]
        found.append([(up - down) / 2e-5 for up, down in moved])
    return torch.tensor(found, dtype=torch.float64)


@FORMS
def test_the_gradients_are_the_finite_differences_of_the_bound(form):
    q, prior = (random_state(seed, form, dtype=torch.float64) for seed in (0, 1))
    trained_q, trained_prior = posterior(q, form), posterior(prior, form)

    set_spike_slab_elbo_grad(trained_q, trained_prior, 0.3, no_loss, 1.0, 1.0, 1, generator(), 0.5)
    set_spike_slab_prior_grad(trained_prior, trained_q, 0.3)

    over_q = slopes(lambda state: 0.3 * spike_slab_kl(posterior(state, form), posterior(prior, form)), q)
    over_prior = slopes(lambda state: 0.3 * spike_slab_kl(posterior(q, form), posterior(state, form)), prior)
    torch.testing.assert_close(trained_q.grad, over_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(trained_prior.grad, over_prior, rtol=1e-6, atol=1e-6)


def straight_through(v, form, noise, gates, scale, temp):
    """A draw of theta whose gates are hard forwards and sigmoid(eta / temp) backwards."""
    eps = torch.randn(v.shape[1], generator=noise)
    u = torch.rand(v.shape[1], generator=gates)
    eta = torch.logit(lambda_of(v[2], form)) + torch.logit(u)
    soft = torch.sigmoid(eta / temp)
    gate = (eta > 0).to(v.dtype) + soft - soft.detach()
    return gate * (v[0] + scale * softplus(v[1]) * eps)


@FORMS
@pytest.mark.parametrize(("samples", "temp"), [(1, 0.5), (3, 2.0)])
def test_the_gradient_of_the_elbo_is_that_of_autograd_on_the_same_draws(form, samples, temp):
    q, prior, slope = random_state(2, form), random_state(3, form), torch.arange(6.0)
    v, noise, gates = rows(q).requires_grad_(), generator(8), generator(9)
    thetas = [straight_through(v, form, noise, gates, 0.7, temp) for _ in range(samples)]
    loss = sum((theta.sin() * slope).sum() for theta in thetas) / samples
    (loss + 0.4 * textbook_bound(v, rows(prior), form)).backward()
    trained = posterior(q, form, seed=9)

    set_spike_slab_elbo_grad(
        trained, posterior(prior, form), 0.4, lambda theta: theta.cos() * slope, 1.0, 0.7, samples, generator(8), temp
    )

    torch.testing.assert_close(trained.grad, v.grad, rtol=1e-4, atol=1e-5)


# --- gates ---


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_gate_is_open_with_probability_lambda(keep):
    state = {"mu": torch.zeros(40_000), "rho": torch.zeros(40_000), "gate": torch.full((40_000,), keep)}

    gates, _ = posterior(state, "raw").draw_gates(1.0)

    assert set(gates.unique().tolist()) == {0.0, 1.0}
    # the standard error of the mean is at most 0.5 / 200
    assert gates.mean().item() == pytest.approx(keep, abs=0.01)


def test_gates_at_the_ends_of_the_range_never_move():
    state = {"mu": torch.zeros(2), "rho": torch.zeros(2), "gate": torch.tensor([30.0, -30.0])}
    trained = posterior(state)

    for _ in range(50):
        gates, slope = trained.draw_gates(1.0, temp=0.5)
        assert gates.tolist() == [1.0, 0.0]
        assert slope[0].item() == 0.0
    assert trained.keep.tolist() == pytest.approx([1.0, 0.0], abs=1e-12)


def test_log_odds_stay_in_their_range():
    trained = posterior({"mu": torch.zeros(2), "rho": torch.zeros(2), "gate": torch.zeros(2)})
    trained.grad_gate.copy_(torch.tensor([1e6, -1e6]))

    trained.step(torch.optim.SGD([trained.parameter], lr=1.0))

    assert trained.state()["gate"].tolist() == [-30.0, 30.0]


def test_a_raw_lambda_may_leave_the_unit_interval_and_come_back():
    prior = posterior({"mu": torch.zeros(1), "rho": torch.zeros(1), "gate": torch.tensor([0.5])}, "raw")
    trained = posterior({"mu": torch.zeros(1), "rho": torch.zeros(1), "gate": torch.tensor([1.01])}, "raw")
    assert trained.keep.item() == pytest.approx(1 - 1e-6, abs=1e-7)

    set_spike_slab_elbo_grad(trained, prior, 1.0, no_loss, 1.0, 0.0, 1, generator(), 0.5)
    before = trained.grad_gate.item()
    trained.step(torch.optim.SGD([trained.parameter], lr=0.001))

    # the KL's slope is the difference of the log odds: log(0.999999 / 0.000001) - 0
    assert before == pytest.approx(13.8155, rel=0.01)
    assert trained.state()["gate"].item() == pytest.approx(1.01 - 0.0138155, rel=1e-3)


# --- a golden round ---


def reference_update(own, shared, form, batches, noise, gates, *, weight, steps, lr):
    """The update of the method card on [mu, rho, gate], by autograd in double precision."""

    def loss(theta, x, y):
        return cross_entropy(linear(x.double().flatten(1), theta[:4].view(2, 2), theta[4:]), y)

    for x, y in batches:
        for _ in range(steps):
            v = own.clone().requires_grad_()
            theta = straight_through(v, form, noise, gates, 1.0, 0.5)
            own = own - lr * torch.autograd.grad(loss(theta, x, y) + weight * textbook_bound(v, shared, form), v)[0]
        v = shared.clone().requires_grad_()
        shared = shared - lr * torch.autograd.grad(weight * textbook_bound(own, v, form), v)[0]
    return own, shared


@FORMS
@pytest.mark.parametrize(("tau", "steps"), [(1, 1), (3, 2)])
def test_a_round_is_autograd_on_the_same_draws(make_ctx, make_algorithm, tiny, form, tau, steps):
    settings = {**tiny, "batch_size": 1}
    ctx = make_ctx("sfedbayes", client=1, optimizer="sgd", lr=0.005, local_unit="batch", tau=tau, **settings)
    own, down, data = random_state(1, form), random_state(2, form), ctx.task.train_data(1)
    expected_own, expected_shared = reference_update(
        rows(own).double(),
        rows(down).double(),
        form,
        list(data.batches(1, ctx.rng("batches"), steps=tau)),
        ctx.rng("noise"),
        ctx.rng("gates"),
        weight=10 / 2,  # zeta / n
        steps=steps,
        lr=0.005,
    )
    algorithm = make_algorithm("sfedbayes", personal_reset=False, personal_steps=steps, lambda_form=form)

    message, memory = algorithm.update(down, own, data, ctx)

    torch.testing.assert_close(rows(memory).double(), expected_own, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows(message).double(), expected_shared, rtol=0, atol=1e-5)


# --- special cases ---


@pytest.mark.parametrize("world", ["digits", "pictures"])
def test_with_lambda_one_it_is_pfedbayes_bit_for_bit(make_ctx, make_algorithm, run_rounds, pictures, world):
    network = {"dataset": pictures, "model": "vgg_s"} if world == "pictures" else {}
    ctx = make_ctx("sfedbayes", clients=4, f=0.5, local_unit="batch", tau=2, train_all=False, **network)
    sparse, dense = make_algorithm("sfedbayes", lambda0=1.0, personal_reset=False), make_algorithm("pfedbayes")

    sfedbayes, pfedbayes = run_rounds(sparse, ctx, rounds=3), run_rounds(dense, ctx, rounds=3)

    assert sfedbayes.server["gate"].unique().tolist() == [30.0]
    pairs = [(sfedbayes.server, pfedbayes.server)]
    pairs += [(sfedbayes.clients[client], pfedbayes.clients[client]) for client in range(4)]
    for one, other in pairs:
        assert all(torch.equal(one[key], other[key]) for key in ("mu", "rho"))
        for mode in ("mean", "mc"):
            x = ctx.task.test_data(0).x
            assert torch.equal(sparse.predict(one, x, ctx, mode), dense.predict(other, x, ctx, mode))


def test_the_bound_with_lambda_one_is_the_kl_of_the_gaussians():
    states = [{**random_state(seed, "logit"), "gate": torch.full((6,), 30.0)} for seed in (0, 1)]
    q, prior = (posterior(state) for state in states)
    normals = [Normal(v.mu.double(), v.sigma.double()) for v in (q, prior)]

    assert spike_slab_kl(q, prior) == pytest.approx(kl_divergence(*normals).sum().item())


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_with_lambda_zero_the_network_is_zero(make_ctx, make_algorithm, mode):
    ctx = make_ctx("sfedbayes", client=0)
    algorithm = make_algorithm("sfedbayes", lambda0=0.0)

    rows_of = algorithm.predict(algorithm.init_server(ctx), ctx.task.test_data(0).x, ctx, mode)

    torch.testing.assert_close(rows_of, torch.full_like(rows_of, 0.1))


# --- what travels and what stays ---


@pytest.mark.parametrize("reset", [True, False])
def test_personal_reset_says_whether_a_round_starts_from_the_download(make_ctx, make_algorithm, reset):
    ctx = make_ctx("sfedbayes", client=0, lr=0.001)
    algorithm = make_algorithm("sfedbayes", personal_reset=reset)
    down = algorithm.init_server(ctx)
    memory = {key: value + 0.5 for key, value in algorithm.init_client(ctx).items()}

    _, kept = algorithm.update(down, memory, ctx.task.train_data(0), ctx)

    start = down if reset else memory
    for key in ROWS:
        assert (kept[key] - start[key]).abs().max() < 0.002  # one Adam step


def test_moments_persist_also_where_the_posterior_is_reset(make_ctx, make_algorithm):
    ctx = make_ctx("sfedbayes", client=0, local_unit="batch", tau=3)
    algorithm = make_algorithm("sfedbayes")
    memory = algorithm.init_client(ctx)

    for _ in range(2):
        _, memory = algorithm.update(algorithm.init_server(ctx), memory, ctx.task.train_data(0), ctx)

    assert memory["own.step"].item() == memory["shared.step"].item() == 6


@FORMS
def test_every_lambda_starts_at_lambda0(make_ctx, make_algorithm, form):
    ctx = make_ctx("sfedbayes")
    algorithm = make_algorithm("sfedbayes", lambda0=0.75, lambda_form=form)

    server = algorithm.init_server(ctx)

    assert lambda_of(server["gate"], form).unique().tolist() == pytest.approx([0.75])
    assert same(algorithm.init_client(ctx.at(1)), server)


def test_raw_lambdas_are_averaged_arithmetically(make_ctx, make_algorithm):
    uploads = [
        Upload(client, 1, {"mu": torch.zeros(1), "rho": torch.zeros(1), "gate": torch.tensor([keep])})
        for client, keep in enumerate((0.99, 1.03))
    ]

    merged = make_algorithm("sfedbayes", lambda_form="raw").aggregate({}, uploads, make_ctx("sfedbayes"))

    assert merged["gate"].item() == pytest.approx(1.01)


@FORMS
def test_moment_matching_weighs_slabs_by_their_lambda(make_ctx, make_algorithm, form):
    uploads = []
    for client, (mean, deviation, keep) in enumerate([(0.0, 0.1, 0.25), (2.0, 0.3, 0.75)]):
        gate = tensor(keep).logit() if form == "logit" else tensor(keep)
        uploads.append(
            Upload(client, 1, {"mu": tensor(mean), "rho": inverse_softplus(tensor(deviation)), "gate": gate})
        )

    merged = make_algorithm("sfedbayes", agg="moment", lambda_form=form).aggregate({}, uploads, make_ctx("sfedbayes"))

    assert lambda_of(merged["gate"], form).item() == pytest.approx(0.5)
    # mean 0.75 * 2; 0.25 (0.01 + 1.5^2) + 0.75 (0.09 + 0.5^2) = 0.565 + 0.255
    assert merged["mu"].item() == pytest.approx(1.5)
    assert softplus(merged["rho"]).item() ** 2 == pytest.approx(0.82, abs=1e-5)
    assert {value.dtype for value in merged.values()} == {torch.float32}


def test_on_the_network_of_the_paper_a_message_has_954120_bytes(make_ctx, make_algorithm, add_dataset):
    # 784-100-10: 79,510 parameters with three numbers each
    add_dataset("wide", torch.zeros(80, 1, 28, 28), torch.arange(10).repeat(8), per_class=(2, 2))
    ctx = make_ctx("sfedbayes", dataset="wide", client=0)
    algorithm = make_algorithm("sfedbayes")
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, _ = algorithm.update(down, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 954_120


@FORMS
def test_point_valued_norms_are_always_kept(make_ctx, make_algorithm, pictures, form):
    ctx = make_ctx("sfedbayes", dataset=pictures, model="vgg_s", client=0)
    algorithm, net = make_algorithm("sfedbayes", lambda0=0.5, lambda_form=form), ctx.task.net
    norms, server = net.norm_mask, algorithm.init_server(ctx)

    message, memory = algorithm.update(server, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    for state in (message, memory):
        assert torch.equal(state["gate"][norms], server["gate"][norms])
        assert not torch.equal(state["mu"][norms], server["mu"][norms])
    for mode in ("mean", "mc"):
        algorithm.predict(memory, ctx.task.test_data(0).x, ctx, mode)
        assert torch.equal(net.vector[norms], memory["mu"][norms])


# --- prediction ---


def test_the_mean_prediction_is_at_lambda_times_mu(make_ctx, make_algorithm):
    ctx = make_ctx("sfedbayes", client=0)
    algorithm = make_algorithm("sfedbayes", lambda0=0.3)
    model = algorithm.init_server(ctx)

    algorithm.predict(model, ctx.task.test_data(0).x, ctx, "mean")

    torch.testing.assert_close(ctx.task.net.vector.detach(), 0.3 * model["mu"])


def test_a_draw_keeps_a_part_of_the_weights(make_ctx, make_algorithm):
    ctx = make_ctx("sfedbayes", client=0)
    algorithm = make_algorithm("sfedbayes", lambda0=0.3)

    algorithm.predict(algorithm.init_server(ctx), ctx.task.test_data(0).x, ctx, "mc")

    # the network holds the last draw: 30 percent of 7,510 weights, standard error 0.5 percent
    assert (ctx.task.net.vector != 0).float().mean().item() == pytest.approx(0.3, abs=0.02)


def test_every_draw_has_gates_of_its_own(make_ctx, make_algorithm, monkeypatch):
    ctx = make_ctx("sfedbayes", client=0)
    algorithm, drawn, load = make_algorithm("sfedbayes", noise_scale=0.0), set(), ctx.task.net.load
    monkeypatch.setattr(ctx.task.net, "load", lambda theta: drawn.add(tuple((theta[:50] != 0).tolist())) or load(theta))

    algorithm.predict(algorithm.init_server(ctx), ctx.task.test_data(0).x, ctx, "mc")

    assert len(drawn) == 30  # as many as the method's default asks for


@pytest.mark.parametrize("lambda_form", ["logit", "raw"])
def test_the_share_of_kept_weights_is_recorded(make_ctx, make_algorithm, lambda_form):
    ctx = make_ctx("sfedbayes")
    algorithm = make_algorithm("sfedbayes", lambda0=0.25, lambda_form=lambda_form)

    described = algorithm.describe(algorithm.init_server(ctx), ctx)

    assert described == {"kept": pytest.approx(0.25), "lambda": pytest.approx(0.25)}


def test_a_raw_lambda_beyond_one_is_recorded_as_it_is(make_ctx, make_algorithm):
    ctx = make_ctx("sfedbayes")
    algorithm = make_algorithm("sfedbayes", lambda_form="raw")
    server = algorithm.init_server(ctx)

    described = algorithm.describe({**server, "gate": torch.full_like(server["mu"], 1.01)}, ctx)

    # the paper prints a lambda of 1.01; in use it is clamped to just below 1
    assert described["lambda"] == pytest.approx(1.01)
    assert described["kept"] == pytest.approx(1.0, abs=1e-5)


# --- what travels ---


@FORMS
def test_small_lambdas_travel_without_their_slabs(make_ctx, make_algorithm, form):
    algorithm, ctx = make_algorithm("sfedbayes", lambda_form=form, send_above=0.3), make_ctx("sfedbayes")
    server = random_state(1, form, d=ctx.task.net.d)
    sent = lambda_of(server["gate"], form) >= 0.3

    down = algorithm.download(server, ctx.at(0))

    assert 0 < int(sent.sum()) < sent.numel()
    assert torch.equal(down["gate"], server["gate"])
    assert torch.equal(down["mu"], server["mu"][sent])
    assert torch.equal(down["rho"], server["rho"][sent])


def test_the_client_takes_a_slab_around_zero_for_what_it_did_not_get(make_ctx, make_algorithm):
    algorithm = make_algorithm("sfedbayes", send_above=0.3, rho0=-2)
    ctx = make_ctx("sfedbayes", tau=1, lr=1e-12, local_unit="batch")  # a step too small to move anything
    server = random_state(1, "logit", d=ctx.task.net.d)
    missing = torch.sigmoid(server["gate"]) < 0.3

    down = algorithm.download(server, ctx.at(0))
    message, own = algorithm.update(down, algorithm.init_client(ctx.at(0)), ctx.task.train_data(0), ctx.at(0))

    assert own["mu"][missing].abs().max().item() < 1e-6
    assert torch.allclose(own["rho"][missing], torch.tensor(-2.0))
    assert torch.allclose(own["mu"][~missing], server["mu"][~missing])
    assert message["mu"].numel() == int((~missing).sum())


def test_the_server_takes_its_own_slab_for_what_a_client_did_not_send(make_ctx, make_algorithm):
    # three weights; client 0 sends the first two (lambda 0.9, 0.5), client 1 the last two (0.5, 0.9); threshold 0.4
    algorithm, ctx = make_algorithm("sfedbayes", lambda_form="raw", send_above=0.4), make_ctx("sfedbayes")
    server = {"mu": torch.tensor([10.0, 20.0, 30.0]), "rho": torch.zeros(3), "gate": torch.full((3,), 0.5)}
    uploads = [
        Upload(0, 1, {"mu": torch.tensor([1.0, 2.0]), "rho": torch.ones(2), "gate": torch.tensor([0.9, 0.5, 0.1])}),
        Upload(1, 1, {"mu": torch.tensor([4.0, 6.0]), "rho": torch.ones(2), "gate": torch.tensor([0.1, 0.5, 0.9])}),
    ]

    merged = algorithm.aggregate(server, uploads, ctx)

    assert merged["mu"].tolist() == [5.5, 3.0, 18.0]  # (1 + 10) / 2, (2 + 4) / 2, (30 + 6) / 2
    assert merged["rho"].tolist() == [0.5, 1.0, 0.5]
    assert merged["gate"].tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_a_threshold_below_every_lambda_changes_nothing(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("sfedbayes", tau=3, local_unit="batch")
    off, low = (run_rounds(make_algorithm("sfedbayes", send_above=above), ctx, 2).server for above in (0.0, 0.01))

    assert same(off, low)


def test_the_byte_count_shows_what_the_threshold_saves(make_ctx, make_algorithm, begin_training):
    """A raw lambda of 0.5 is below 0.6 everywhere: d numbers travel down instead of 3 d, and as many up."""
    ctx = make_ctx("sfedbayes", tau=1, lr=1e-6, local_unit="batch")
    traffic = {}
    for above in (0.0, 0.6):
        algorithm = make_algorithm("sfedbayes", lambda_form="raw", lambda0=0.5, send_above=above)
        traffic[above] = train_round(algorithm, begin_training(algorithm, ctx), ctx)

    d = ctx.task.net.d
    assert (traffic[0.0].bytes_down, traffic[0.0].bytes_up) == (2 * 12 * d, 2 * 12 * d)  # two clients
    assert (traffic[0.6].bytes_down, traffic[0.6].bytes_up) == (2 * 4 * d, 2 * 4 * d)


def test_point_valued_norms_always_travel(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("sfedbayes", dataset="pictures", model="vgg_s")
    algorithm = make_algorithm("sfedbayes", lambda0=0.1, send_above=0.5)

    down = algorithm.download(algorithm.init_server(ctx), ctx.at(0))

    assert down["mu"].numel() == int(ctx.task.net.norm_mask.sum())


def test_gated_weights_have_no_noise_in_the_outputs(make_algorithm):
    with pytest.raises(ValueError, match="local_reparam"):
        make_algorithm("sfedbayes", local_reparam=True)
