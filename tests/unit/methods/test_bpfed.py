"""BPFed against autograd, in its special cases, and for newcomers."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softplus

from fedbench.errors import FedbenchError
from fedbench.simulation import on_wire, size_of

BODY = 6_500
"""Of dnn100 on digits: 64*100 + 100; the head has 100*10 + 10."""


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def body_of(state):
    return {key: state[key][:BODY] for key in ("mu", "rho")}


def update_once(algorithm, ctx, memory=None):
    memory = algorithm.init_client(ctx) if memory is None else memory
    return algorithm.update(algorithm.init_server(ctx), memory, ctx.task.train_data(ctx.client), ctx)


def shifted(state, by):
    return {key: value + by for key, value in state.items()}


# --- a golden round ---


def reference_update(fit, anchor, batches, noise, *, weight, steps, lr, reverse):
    """The update of the method card on [mu, rho], by autograd in double precision."""

    def loss(theta, x, y):
        w1, b1, w2, b2 = theta.split([200, 100, 200, 2])
        hidden = linear(x.double().flatten(1), w1.view(100, 2), b1).relu()
        return cross_entropy(linear(hidden, w2.view(2, 100), b2), y)

    def kl(q, p):
        one, other = (Normal(v[0], softplus(v[1])) for v in (q, p))
        return (kl_divergence(other, one) if reverse else kl_divergence(one, other)).sum()

    for x, y in batches:
        for _ in range(steps):
            v, eps = fit.clone().requires_grad_(), torch.randn(502, generator=noise).double()
            objective = loss(v[0] + softplus(v[1]) * eps, x, y) + weight * kl(v, anchor)
            fit = fit - lr * torch.autograd.grad(objective, v)[0]
        v = anchor.clone().requires_grad_()
        anchor = anchor - lr * torch.autograd.grad(weight * kl(fit, v), v)[0]
    return fit, anchor


@pytest.mark.parametrize("kl_direction", ["forward", "reverse"])
@pytest.mark.parametrize(("tau", "steps"), [(1, 1), (3, 2)])
def test_a_round_is_autograd_on_the_same_noise(make_ctx, make_algorithm, tiny, kl_direction, tau, steps):
    settings = {**tiny, "model": "dnn100", "batch_size": 1}
    ctx = make_ctx("bpfed", client=1, optimizer="sgd", lr=0.01, local_unit="batch", tau=tau, **settings)
    algorithm, data = make_algorithm("bpfed", personal_steps=steps, kl_direction=kl_direction), ctx.task.train_data(1)
    down, memory = shifted(algorithm.init_server(ctx), 0.05), shifted(algorithm.init_client(ctx), -0.02)
    # fit and anchor start alike: the downloaded body (300 numbers) and the client's own head
    start = torch.stack([torch.cat([down[key], memory[key][300:]]) for key in ("mu", "rho")]).double()
    fit, anchor = reference_update(
        start,
        start,
        list(data.batches(1, ctx.rng("batches"), steps=tau)),
        ctx.rng("noise"),
        weight=1 / 2,  # zeta / n, zeta = 1
        steps=steps,
        lr=0.01,
        reverse=kl_direction == "reverse",
    )

    message, kept = algorithm.update(down, memory, data, ctx)

    torch.testing.assert_close(torch.stack([kept["mu"], kept["rho"]]).double(), fit, rtol=0, atol=2e-5)
    sent = torch.stack([message["mu"], message["rho"]]).double()
    torch.testing.assert_close(sent, anchor[:, :300], rtol=0, atol=2e-5)


# --- special cases ---


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "optim_state": "reset"},
        {"optimizer": "adam", "lr": 0.003, "optim_state": "persistent"},
    ],
    ids=["momentum", "persistent adam"],
)
def test_without_noise_and_kl_the_means_are_those_of_fedper(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("bpfed", clients=4, f=0.5, local_unit="batch", tau=3, batch_size=10, train_all=False, **settings)
    algorithm = make_algorithm("bpfed", noise_scale=0.0, zeta=0.0, upload="fit")
    ctx.task.initial = algorithm.init_client(ctx)["mu"]  # FedPer starts from the same values

    bpfed = run_rounds(algorithm, ctx, rounds=4)
    fedper = run_rounds(make_algorithm("fedper"), ctx, rounds=4)

    # not bit for bit: the optimiser's kernel rounds by where in memory a number lies
    torch.testing.assert_close(bpfed.server["mu"], fedper.server["shared"], rtol=0, atol=1e-6)
    for client in range(4):
        head = bpfed.clients[client]["mu"][BODY:]
        torch.testing.assert_close(head, fedper.clients[client]["own"], rtol=0, atol=1e-6)
    assert (bpfed.server["mu"] - ctx.task.initial[:BODY]).abs().max() > 1e-3
    assert bpfed.server["rho"].unique().tolist() == [-2.5]


def test_with_an_empty_personal_part_it_is_pfedbayes_with_zeta_1(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("bpfed", clients=4, f=0.5, train_part="body", local_unit="batch", tau=3, train_all=False)

    bpfed = run_rounds(make_algorithm("bpfed", personal_reset=False), ctx, rounds=4)
    pfedbayes = run_rounds(make_algorithm("pfedbayes", zeta=1.0), ctx, rounds=4)

    assert same(bpfed.server, pfedbayes.server)
    assert all(same(bpfed.clients[client], pfedbayes.clients[client]) for client in range(4))


# --- what travels and what stays ---


def test_the_head_never_travels(make_ctx, make_algorithm):
    ctx = make_ctx("bpfed", client=0)
    algorithm = make_algorithm("bpfed")

    message, memory = update_once(algorithm, ctx)

    # mu and rho of the body: 4 * 2 * 6500 bytes both ways
    assert size_of(on_wire(algorithm.download(algorithm.init_server(ctx), ctx))) == size_of(on_wire(message)) == 52_000
    assert memory["mu"].shape == memory["rho"].shape == (BODY + 1_010,)


def test_on_the_network_of_the_paper_a_message_has_628000_bytes(make_ctx, make_algorithm, add_dataset):
    # 784-100-10: a body of 78,500 numbers
    add_dataset("wide", torch.zeros(80, 1, 28, 28), torch.arange(10).repeat(8), per_class=(2, 2))
    ctx = make_ctx("bpfed", dataset="wide")

    assert size_of(make_algorithm("bpfed").init_server(ctx)) == 628_000


@pytest.mark.parametrize(("upload", "is_fit"), [("anchor", False), ("fit", True)])
def test_upload_says_whose_body_travels(make_ctx, make_algorithm, upload, is_fit):
    ctx = make_ctx("bpfed", client=0, local_unit="batch", tau=3)

    message, memory = update_once(make_algorithm("bpfed", upload=upload), ctx)

    assert same(message, body_of(memory)) is is_fit


@pytest.fixture
def starts(monkeypatch):
    """What every training started from, first the fit, then the anchor."""
    from fedbench.algorithms.pfedbayes import PFedBayes

    made, posterior = [], PFedBayes._posterior

    def spied(self, state, ctx):
        made.append(state)
        return posterior(self, state, ctx)

    monkeypatch.setattr(PFedBayes, "_posterior", spied)
    return made


@pytest.mark.parametrize("reset", [True, False])
def test_a_round_starts_from_the_download_and_the_own_head(make_ctx, make_algorithm, starts, reset):
    ctx = make_ctx("bpfed", client=0)
    algorithm = make_algorithm("bpfed", personal_reset=reset)
    memory = shifted(algorithm.init_client(ctx), 0.1)

    update_once(algorithm, ctx, memory)

    fit, anchor = starts
    assert torch.equal(anchor["mu"][:BODY], algorithm.init_server(ctx)["mu"])
    assert torch.equal(anchor["mu"][BODY:], memory["mu"][BODY:])
    assert torch.equal(fit["mu"], anchor["mu"] if reset else memory["mu"])


def test_a_client_deploys_its_fit_and_there_is_no_global_model(make_ctx, make_algorithm):
    ctx = make_ctx("bpfed", client=0)
    algorithm = make_algorithm("bpfed")
    _, memory = update_once(algorithm, ctx)

    assert algorithm.personal_model(algorithm.init_server(ctx), memory, ctx.task.train_data(0), ctx, None) is memory
    assert algorithm.global_model(algorithm.init_server(ctx), memory, ctx.task.train_data(0), ctx) is None


def test_server_and_clients_start_from_one_network(make_ctx, make_algorithm):
    ctx = make_ctx("bpfed")
    algorithm = make_algorithm("bpfed")

    assert same(algorithm.init_server(ctx), body_of(algorithm.init_client(ctx.at(1))))
    assert same(algorithm.init_client(ctx.at(0)), algorithm.init_client(ctx.at(1)))


def test_point_valued_norms_of_the_body_travel_with_it(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("bpfed", dataset=pictures, model="vgg_s", client=0)
    algorithm, net = make_algorithm("bpfed"), ctx.task.net
    norms = net.norm_mask[net.body]

    message, memory = update_once(algorithm, ctx)

    assert torch.equal(message["mu"][norms], memory["mu"][net.body][norms])
    assert not torch.equal(message["mu"][norms], algorithm.init_server(ctx)["mu"][norms])


# --- newcomers and adaptation ---


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_for_a_newcomer_only_the_head_moves(make_ctx, make_algorithm, weight_decay):
    ctx = replace(make_ctx("bpfed", client=0, tau=3, weight_decay=weight_decay), novel=True)
    algorithm = make_algorithm("bpfed", personal_reset=False)
    server, memory = shifted(algorithm.init_server(ctx), 0.1), algorithm.init_client(ctx)

    for _ in range(2):
        message, kept = algorithm.update(server, memory, ctx.task.train_data(0), ctx)
        assert same(body_of(kept), server)
        assert same(message, server)
        assert not torch.equal(kept["mu"][BODY:], memory["mu"][BODY:])
        assert not torch.equal(kept["rho"][BODY:], memory["rho"][BODY:])
        memory = kept


def test_adaptation_trains_the_head_on_the_servers_body(make_ctx, make_algorithm):
    ctx = make_ctx("bpfed", client=0)
    algorithm, data = make_algorithm("bpfed"), ctx.task.train_data(0)
    server = shifted(algorithm.init_server(ctx), 0.1)
    _, memory = update_once(algorithm, ctx)

    at_once, later = (algorithm.personal_model(server, memory, data, ctx, epochs) for epochs in (0, 2))

    assert same(body_of(at_once), server)
    assert same(body_of(later), server)
    assert torch.equal(at_once["mu"][BODY:], memory["mu"][BODY:])
    assert not torch.equal(later["mu"][BODY:], memory["mu"][BODY:])


def test_a_network_of_one_layer_has_nothing_to_share(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="BPFed shares the body, and a single layer has none"):
        make_algorithm("bpfed").init_server(make_ctx("bpfed", model="logreg"))
