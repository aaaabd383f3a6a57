"""FedSOUL-VI against autograd, where it is FedPer, and its local variant, whose bodies nobody downloads."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softplus

from fedbench.errors import FedbenchError
from fedbench.wire import on_wire, size_of

BODY, HEAD = slice(0, 6_500), slice(6_500, 7_510)  # dnn100 on digits
BOTH = pytest.mark.parametrize("method", ["fedsoul_vi", "fedsoul_vi_local"])


def update_once(algorithm, ctx, memory=None, server=None):
    memory = algorithm.init_client(ctx) if memory is None else memory
    down = algorithm.download(algorithm.init_server(ctx) if server is None else server, ctx)
    return algorithm.update(down, memory, ctx.task.train_data(ctx.client), ctx)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- a golden round ---


def reference_update(body, head, batches, noise, *, weight, steps, samples, lr, reverse, scale):
    """The update of the method card on the body and the head's [mu, rho], by autograd in double precision."""

    def loss(phi, z, x, y):
        (w1, b1), (w2, b2) = phi.split([200, 100]), z.split([200, 2])
        hidden = linear(x.double().flatten(1), w1.view(100, 2), b1).relu()
        return cross_entropy(linear(hidden, w2.view(2, 100), b2), y)

    for x, y in batches:
        reference = Normal(head[0], softplus(head[1]))
        for _ in range(steps):
            phi, v = body.clone().requires_grad_(), head.clone().requires_grad_()
            draws = [torch.randn(202, generator=noise).double() for _ in range(samples)]
            fit = sum(loss(phi, v[0] + scale * softplus(v[1]) * eps, x, y) for eps in draws) / samples
            q = Normal(v[0], softplus(v[1]))
            kl = (kl_divergence(reference, q) if reverse else kl_divergence(q, reference)).sum()
            over_body, over_head = torch.autograd.grad(fit + weight * kl, (phi, v))
            body, head = body - lr * over_body, head - lr * over_head
    return body, head


@BOTH
@pytest.mark.parametrize(
    ("params", "weight"),
    [
        ({"zeta": 0.3}, 0.1),  # R = 3 batches
        ({"zeta": 0.3, "kl_scale": "samples", "kl_direction": "forward"}, 0.15),  # n = 2
        ({"zeta": 0.3, "samples": 2, "personal_steps": 2, "noise_scale": 0.5, "rho0": -1.0}, 0.1),
    ],
    ids=["defaults", "forward KL by samples", "two samples"],
)
def test_a_round_is_autograd_on_the_same_noise(make_ctx, make_algorithm, tiny, method, params, weight):
    settings = {**tiny, "model": "dnn100", "batch_size": 1, "local_unit": "batch", "tau": 3}
    ctx = make_ctx(method, client=1, optimizer="sgd", lr=0.01, **settings)
    algorithm, data = make_algorithm(method, **params), ctx.task.train_data(1)
    memory, server = algorithm.init_client(ctx), algorithm.init_server(ctx)
    body, head = reference_update(
        server["shared"].double(),
        torch.stack([memory["mu"], memory["rho"]]).double(),
        list(data.batches(1, ctx.rng("batches"), steps=3)),
        ctx.rng("noise"),
        weight=weight,
        steps=params.get("personal_steps", 5),
        samples=params.get("samples", 1),
        lr=0.01,
        reverse=params.get("kl_direction", "reverse") == "reverse",
        scale=params.get("noise_scale", 1.0),
    )

    message, kept = update_once(algorithm, ctx)

    torch.testing.assert_close(message["shared"].double(), body, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.stack([kept["mu"], kept["rho"]]).double(), head, rtol=0, atol=2e-5)


def test_the_server_averages_bodies_and_clients_keep_their_heads(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedsoul_vi", weighting="uniform")
    algorithm = make_algorithm("fedsoul_vi")
    sent = [update_once(algorithm, ctx.at(client)) for client in (0, 1)]

    progress = run_rounds(algorithm, ctx)

    torch.testing.assert_close(progress.server["shared"], (sent[0][0]["shared"] + sent[1][0]["shared"]) / 2)
    assert set(progress.server) == {"shared"}
    assert all(same(progress.clients[client], sent[client][1]) for client in (0, 1))
    assert not torch.equal(sent[0][1]["mu"], sent[1][1]["mu"])


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
    ctx = make_ctx("fedsoul_vi", clients=4, f=0.5, local_unit="batch", tau=3, batch_size=10, **settings)
    algorithm = make_algorithm("fedsoul_vi", noise_scale=0.0, zeta=0.0, personal_steps=1)
    ctx.task.initial[HEAD] = algorithm.init_client(ctx)["mu"]  # FedPer starts from the same head

    vi = run_rounds(algorithm, ctx, rounds=4)
    fedper = run_rounds(make_algorithm("fedper"), ctx, rounds=4)

    # not bit for bit: the optimiser's kernel rounds by where in memory a number lies
    torch.testing.assert_close(vi.server["shared"], fedper.server["shared"], rtol=0, atol=1e-6)
    for client in range(4):
        torch.testing.assert_close(vi.clients[client]["mu"], fedper.clients[client]["own"], rtol=0, atol=1e-6)
        assert vi.clients[client]["rho"].unique().tolist() == [-3.0]
    assert (vi.server["shared"] - ctx.task.initial[BODY]).abs().max() > 1e-3


def test_the_local_variant_without_noise_and_kl_is_local_training(make_ctx, make_algorithm, run_rounds):
    settings = {"optimizer": "adam", "lr": 0.003, "optim_state": "persistent", "batch_size": 10}
    ctx = make_ctx("fedsoul_vi_local", local_unit="batch", tau=3, **settings)
    algorithm = make_algorithm("fedsoul_vi_local", noise_scale=0.0, zeta=0.0, personal_steps=1)
    ctx.task.initial[HEAD] = algorithm.init_client(ctx)["mu"]

    vi = run_rounds(algorithm, ctx, rounds=4)
    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds=4)

    for client in (0, 1):
        memory = vi.clients[client]
        own = torch.cat([memory["shared"], memory["mu"]])
        torch.testing.assert_close(own, local.clients[client]["w"], rtol=0, atol=1e-6)


# --- who has which body ---


def test_a_round_starts_from_the_downloaded_body_and_the_own_head(make_ctx, make_algorithm, quadratic):
    ctx = make_ctx("fedsoul_vi", client=0)
    visited = quadratic(1.0, 0.0)
    algorithm = make_algorithm("fedsoul_vi", noise_scale=0.0)
    memory = {key: value + 0.1 for key, value in algorithm.init_client(ctx).items()}

    update_once(algorithm, ctx, memory, {"shared": torch.full((6_500,), 0.7)})

    assert torch.equal(visited[0], torch.cat([torch.full((6_500,), 0.7), memory["mu"]]))


def test_the_local_variants_body_never_receives_a_download(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedsoul_vi_local")
    algorithm = make_algorithm("fedsoul_vi_local")
    usual = run_rounds(algorithm, ctx, rounds=2)

    other = run_rounds(algorithm, ctx, rounds=2, server={"shared": torch.full((6_500,), 5.0)})

    assert algorithm.download(usual.server, ctx.at(0)) == {}
    assert all(same(usual.clients[client], other.clients[client]) for client in (0, 1))
    # while a body that is downloaded follows the server
    shared = make_algorithm("fedsoul_vi")
    assert not torch.equal(
        run_rounds(shared, ctx, 1).clients[0]["mu"],
        run_rounds(shared, ctx, 1, server={"shared": torch.full((6_500,), 0.1)}).clients[0]["mu"],
    )


def test_the_local_variants_bodies_travel_up_and_are_averaged(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedsoul_vi_local", weighting="uniform")

    progress = run_rounds(make_algorithm("fedsoul_vi_local"), ctx, rounds=2)

    bodies = [progress.clients[client]["shared"] for client in (0, 1)]
    assert not torch.equal(*bodies)
    torch.testing.assert_close(progress.server["shared"], sum(bodies) / 2)


def test_what_a_client_deploys(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedsoul_vi")
    averaged, own = make_algorithm("fedsoul_vi"), make_algorithm("fedsoul_vi_local")
    for algorithm, progress in ((a, run_rounds(a, ctx, rounds=2)) for a in (averaged, own)):
        memory, data, here = progress.clients[0], ctx.task.train_data(0), ctx.at(0)
        personal = algorithm.personal_model(progress.server, memory, data, here, None)
        common = algorithm.global_model(progress.server, memory, data, here)

        body = progress.server["shared"] if algorithm is averaged else memory["shared"]
        assert torch.equal(personal["mu"], torch.cat([body, memory["mu"]]))
        assert torch.equal(personal["rho"][HEAD], memory["rho"])
        # as the repository logs its GM: the average of the bodies under the client's own head
        expected = None if algorithm is averaged else torch.cat([progress.server["shared"], memory["mu"]])
        assert common is expected or torch.equal(common["mu"], expected)


@BOTH
def test_all_clients_start_alike(make_ctx, make_algorithm, method):
    ctx = make_ctx(method, seed=4)
    algorithm = make_algorithm(method, rho0=-2.0, mu_std=0.2)

    one, other = (algorithm.init_client(ctx.at(client)) for client in (0, 1))

    assert same(one, other)
    assert one["rho"].unique().tolist() == [-2.0]
    assert one["mu"].shape == (1_010,)
    assert one["mu"].std().item() == pytest.approx(0.2, rel=0.1)
    assert torch.equal(algorithm.init_server(ctx)["shared"], ctx.task.initial[BODY])


# --- newcomers and adaptation ---


@BOTH
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_for_a_newcomer_only_the_head_moves(make_ctx, make_algorithm, method, weight_decay):
    ctx = replace(make_ctx(method, client=0, newcomers=1, tau=3, weight_decay=weight_decay), novel=True)
    algorithm, data = make_algorithm(method), ctx.task.train_data(0)
    server, memory = {"shared": torch.linspace(-0.2, 0.2, 6_500)}, algorithm.init_client(ctx)

    for _ in range(2):
        message, kept = update_once(algorithm, ctx, memory, server)
        model = algorithm.personal_model(server, kept, data, ctx, None)
        assert torch.equal(message["shared"], server["shared"])
        assert torch.equal(model["mu"], torch.cat([server["shared"], kept["mu"]]))
        assert not torch.equal(kept["mu"], memory["mu"])
        assert not torch.equal(kept["rho"], memory["rho"])
        memory = kept


@BOTH
def test_adaptation_fits_the_head_on_the_body_that_the_client_has(make_ctx, make_algorithm, run_rounds, method):
    ctx = make_ctx(method)
    algorithm, data, here = make_algorithm(method), ctx.task.train_data(0), ctx.at(0)
    progress = run_rounds(algorithm, ctx)
    memory = progress.clients[0]

    at_once, later = (algorithm.personal_model(progress.server, memory, data, here, epochs) for epochs in (0, 2))

    body = progress.server["shared"] if method == "fedsoul_vi" else memory["shared"]
    for model in (at_once, later):
        assert torch.equal(model["mu"][BODY], body)
    assert torch.equal(at_once["mu"][HEAD], memory["mu"])
    assert not torch.equal(later["mu"][HEAD], memory["mu"])


def test_a_newcomer_adapts_on_the_servers_body_in_the_local_variant_too(make_ctx, make_algorithm):
    ctx = make_ctx("fedsoul_vi_local", client=0, newcomers=1)
    algorithm = make_algorithm("fedsoul_vi_local")
    server = {"shared": torch.linspace(-0.2, 0.2, 6_500)}

    model = algorithm.personal_model(server, algorithm.init_client(ctx), ctx.task.train_data(0), ctx, 1)

    assert torch.equal(model["mu"][BODY], server["shared"])


# --- optimisers and predictions ---


def test_both_optimisers_keep_their_moments_over_rounds(make_ctx, make_algorithm):
    ctx = make_ctx("fedsoul_vi", client=0, local_unit="batch", tau=3)
    algorithm = make_algorithm("fedsoul_vi", personal_steps=2)
    memory = algorithm.init_client(ctx)

    for _ in range(2):
        _, memory = update_once(algorithm, ctx, memory)

    assert memory["body.step"].item() == memory["head.step"].item() == 12
    _, forgetful = update_once(algorithm, make_ctx("fedsoul_vi", client=0, optim_state="reset"))
    assert set(forgetful) == {"mu", "rho"}


def test_only_the_head_has_noise_in_a_prediction(make_ctx, make_algorithm):
    ctx = make_ctx("fedsoul_vi", client=0, mc_samples=3)
    x, algorithm = ctx.task.test_data(0).x, make_algorithm("fedsoul_vi", noise_scale=0.5)
    body, head = ctx.task.initial.split([6_500, 1_010])
    memory = {"mu": head, "rho": torch.full_like(head, 1.0)}
    model = algorithm.personal_model({"shared": body}, memory, ctx.task.train_data(0), ctx, None)
    hidden = linear(x.flatten(1), body[:6_400].view(100, 64), body[6_400:]).relu()

    def classes(z):
        return linear(hidden, z[:1_000].view(10, 100), z[1_000:]).softmax(-1)

    noise = ctx.rng("mc")
    draws = [torch.randn(7_510, generator=noise)[HEAD] for _ in range(3)]
    expected = sum(classes(head + 0.5 * softplus(torch.tensor(1.0)) * eps) for eps in draws) / 3
    torch.testing.assert_close(algorithm.predict(model, x, ctx, "mc"), expected)
    torch.testing.assert_close(algorithm.predict(model, x, ctx, "mean"), classes(head))
    assert (expected - classes(head)).abs().max() > 0.05


# --- what travels, and what is refused ---


@pytest.mark.parametrize(("method", "numbers_down"), [("fedsoul_vi", 6_500), ("fedsoul_vi_local", 0)])
def test_only_bodies_travel(make_ctx, make_algorithm, method, numbers_down):
    ctx = make_ctx(method, client=0)
    algorithm = make_algorithm(method)

    message, _ = update_once(algorithm, ctx)

    assert size_of(on_wire(algorithm.download(algorithm.init_server(ctx), ctx))) == 4 * numbers_down
    assert size_of(on_wire(message)) == 4 * 6_500


@BOTH
def test_a_network_of_one_layer_has_nothing_to_share(make_ctx, make_algorithm, method):
    with pytest.raises(FedbenchError, match="shares the body, and a single layer has none"):
        make_algorithm(method).init_server(make_ctx(method, model="logreg"))


@pytest.mark.parametrize(
    "params",
    [{"zeta": -1.0}, {"personal_steps": 0}, {"samples": 0}, {"rho0": 6.0}, {"noise_scale": -0.1}, {"mu_std": -0.1}],
)
def test_settings_that_make_no_sense_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("fedsoul_vi", **params)
