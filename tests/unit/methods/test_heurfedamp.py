"""HeurFedAMP by hand: the weights of the mixtures, who is in them, and the cases in which nothing is mixed."""

import pytest
import torch

from fedbench.algorithm import Ctx, Upload
from fedbench.algorithms.heurfedamp import mixing_weights

ZEROS = torch.zeros(6)


def everyone(n):
    return torch.ones(n, dtype=torch.bool)


def uploads(models):
    return [Upload(client, 1, {"w": torch.as_tensor(w)}) for client, w in models.items()]


def server_after(algorithm, ctx, models):
    """The server once these clients have sent these models."""
    return algorithm.aggregate(algorithm.init_server(ctx), uploads(models), ctx)


# --- weights by hand ---


def test_the_worked_example_of_three_clients():
    models = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])

    weights = mixing_weights(models, everyone(3), xi=0.5, scale=1.0)

    # cosines of client 0: 1/sqrt(2) and 0; half of exp(0.707107) / (exp(0.707107) + 1), and the rest of the half
    assert weights[0].tolist() == pytest.approx([0.5, 0.334881, 0.165119], abs=1e-6)
    # client 1 is as near to 0 as to 2
    assert weights[1].tolist() == pytest.approx([0.25, 0.5, 0.25], abs=1e-6)
    # u_0 = 0.5 (1, 0) + 0.334881 (1, 1) + 0.165119 (0, 1)
    assert (weights[0] @ models).tolist() == pytest.approx([0.834881, 0.5], abs=1e-6)


def test_cosines_do_not_see_how_long_models_are():
    models = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    lengths = torch.tensor([[3.0], [0.1], [20.0]])

    torch.testing.assert_close(
        mixing_weights(lengths * models, everyone(3), xi=0.5, scale=25.0),
        mixing_weights(models, everyone(3), xi=0.5, scale=25.0),
    )


def test_a_large_scale_gives_all_to_the_most_similar_client():
    models = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])

    weights = mixing_weights(models, everyone(3), xi=0.2, scale=1e4)

    # exp(1e4) would be infinite
    assert weights[0].tolist() == pytest.approx([0.2, 0.8, 0.0])


def test_scale_zero_gives_all_others_the_same():
    models = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))

    weights = mixing_weights(models, everyone(5), xi=0.2, scale=0.0)

    torch.testing.assert_close(weights, torch.full((5, 5), 0.2))


def test_every_mixture_is_an_average():
    models = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    sent = torch.tensor([True, True, False, True, False, True])

    weights = mixing_weights(models, sent, xi=0.3, scale=25.0)

    torch.testing.assert_close(weights.sum(1), torch.ones(6))
    assert weights.min() >= 0
    torch.testing.assert_close(weights.diagonal(), torch.full((6,), 0.3))


def test_who_has_sent_nothing_is_in_no_other_mixture():
    models = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))

    weights = mixing_weights(models, torch.tensor([True, False, True]), xi=0.5, scale=25.0)

    assert weights[:, 1].tolist() == [0.0, 0.5, 0.0]


def test_who_has_nobody_to_mix_with_keeps_its_own():
    models = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))

    weights = mixing_weights(models, torch.tensor([True, False, False]), xi=0.25, scale=25.0)

    assert weights.tolist() == [[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]


def test_a_model_of_zeros_is_similar_to_none():
    weights = mixing_weights(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), everyone(3), xi=0.5, scale=25.0)

    assert weights[0].tolist() == pytest.approx([0.5, 0.25, 0.25])


# --- rounds ---


def test_one_round_of_two_clients(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("heurfedamp", lr=0.1, **tiny)
    ctx.task.initial = ZEROS
    algorithm = make_algorithm("heurfedamp", xi=0.8)

    server = run_rounds(algorithm, ctx).server

    # both start from u = 0, where the proximal term vanishes: one step as for FedAvg
    w_0, w_1 = [0.025, -0.05, -0.025, 0.05, 0.0, 0.0], [0.05, -0.025, -0.05, 0.025, 0.0, 0.0]
    assert server["models"].tolist() == [pytest.approx(w_0), pytest.approx(w_1)]
    # the only other client gets all of 1 - 0.8: u_0 = 0.8 w_0 + 0.2 w_1
    assert algorithm.download(server, ctx.at(0))["w"].tolist() == pytest.approx([0.03, -0.045, -0.03, 0.045, 0.0, 0.0])
    assert algorithm.download(server, ctx.at(1))["w"].tolist() == pytest.approx([0.045, -0.03, -0.045, 0.03, 0.0, 0.0])


def test_a_client_is_held_near_its_mixture(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(2.0, 3.0)
    ctx = make_ctx("heurfedamp", client=0, lr=0.1, tau=100, **tiny)

    message, memory = make_algorithm("heurfedamp", prox=1.0).update(
        {"w": ZEROS + 1.5}, {"w": ZEROS - 9.0}, ctx.task.train_data(0), ctx
    )

    # (a c + prox u) / (a + prox) = (6 + 1.5) / 3, from wherever the client was before
    assert message["w"].tolist() == pytest.approx([2.5] * 6, abs=1e-5)
    assert torch.equal(memory["w"], message["w"])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_all_weight_on_the_own_model_it_is_local_training(make_ctx, make_algorithm, run_rounds, rounds):
    ctx = make_ctx("heurfedamp", clients=3, lr=0.1, momentum=0.9, batch_size=10, tau=2, optim_state="persistent")

    alone = run_rounds(make_algorithm("heurfedamp", xi=1.0, prox=0.0), ctx, rounds)
    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds)

    for client in range(3):
        assert torch.equal(alone.clients[client]["w"], local.clients[client]["w"])


def test_equal_models_mix_to_themselves(make_ctx, make_algorithm):
    ctx = make_ctx("heurfedamp", clients=4)
    algorithm, w = make_algorithm("heurfedamp"), 0.5 * ctx.task.initial
    server = server_after(algorithm, ctx, dict.fromkeys(range(4), w))

    for client in range(4):
        torch.testing.assert_close(algorithm.download(server, ctx.at(client))["w"], w)


def test_everyone_starts_from_the_common_initial_network(make_ctx, make_algorithm):
    ctx = make_ctx("heurfedamp", clients=3)
    algorithm = make_algorithm("heurfedamp")
    server = algorithm.init_server(ctx)

    for client in range(3):
        assert torch.equal(algorithm.download(server, ctx.at(client))["w"], ctx.task.initial)


def test_who_does_not_report_is_mixed_in_with_its_last_model(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("heurfedamp", **tiny)
    algorithm = make_algorithm("heurfedamp", xi=0.5)
    before = server_after(algorithm, ctx, {0: ZEROS + 1.0, 1: ZEROS + 2.0})

    after = algorithm.aggregate(before, uploads({0: ZEROS + 3.0}), ctx)

    # half of its own 3, half of the other's 2
    assert algorithm.download(after, ctx.at(0))["w"].tolist() == pytest.approx([2.5] * 6)


def test_a_client_that_comes_late_is_at_the_initial_network_until_then(make_ctx, make_algorithm):
    ctx = make_ctx("heurfedamp", clients=3)
    algorithm, w = make_algorithm("heurfedamp", xi=0.5), 2 * ctx.task.initial
    server = server_after(algorithm, ctx, {0: w, 1: w})

    torch.testing.assert_close(algorithm.download(server, ctx.at(2))["w"], 1.5 * ctx.task.initial)
    torch.testing.assert_close(algorithm.download(server, ctx.at(0))["w"], w)


def test_a_newcomer_gets_the_mean_of_all_that_were_sent(make_ctx, make_algorithm):
    ctx = make_ctx("heurfedamp", clients=3, newcomers=1)
    algorithm, w = make_algorithm("heurfedamp"), ctx.task.initial
    server = server_after(algorithm, ctx, {1: w, 2: 2 * w})

    assert ctx.task.newcomers == (0,)
    torch.testing.assert_close(algorithm.download(server, ctx.at(0))["w"], 1.5 * w)


# --- what is deployed ---


@pytest.fixture
def trained(make_ctx, make_algorithm, run_rounds):
    """A context of client 0 and what is there after a round: context, server, memory, data."""
    ctx = make_ctx("heurfedamp", client=0, lr=0.1)
    progress = run_rounds(make_algorithm("heurfedamp"), ctx)
    return ctx, progress.server, progress.clients[0], ctx.task.train_data(0)


def test_the_personal_model_is_the_mixture_or_the_clients_own_as_asked_for(trained, make_algorithm):
    ctx, server, memory, data = trained

    cloud = make_algorithm("heurfedamp").personal_model(server, memory, data, ctx, None)
    own = make_algorithm("heurfedamp", personal="trained").personal_model(server, memory, data, ctx, None)

    assert torch.equal(cloud["w"], make_algorithm("heurfedamp").download(server, ctx)["w"])
    assert own is memory
    assert torch.equal(own["w"], server["models"][0])  # what it sent
    assert not torch.equal(own["w"], cloud["w"])


def test_a_client_that_never_trained_deploys_its_mixture(trained, make_algorithm):
    ctx, server, _, data = trained

    for personal in ("cloud", "trained"):
        algorithm = make_algorithm("heurfedamp", personal=personal)
        model = algorithm.personal_model(server, algorithm.init_client(ctx), data, ctx, None)
        assert torch.equal(model["w"], algorithm.download(server, ctx)["w"])


def test_a_newcomer_deploys_what_it_trained_because_it_sends_nothing(make_ctx, make_algorithm):
    ctx = make_ctx("heurfedamp", clients=3, newcomers=1, client=0)
    algorithm, own = make_algorithm("heurfedamp"), {"w": 3 * ctx.task.initial}
    server, data = algorithm.init_server(ctx), ctx.task.train_data(0)

    assert algorithm.personal_model(server, own, data, ctx, None) is own


def test_it_has_no_global_model(trained, make_algorithm):
    ctx, server, memory, data = trained

    assert make_algorithm("heurfedamp").global_model(server, memory, data, ctx) is None


@pytest.mark.parametrize(("personal", "start"), [("cloud", 1.5), ("trained", 0.0)])
def test_adaptation_trains_on_near_the_mixture(make_ctx, make_algorithm, tiny, quadratic, personal, start):
    quadratic(2.0, 3.0)
    ctx = make_ctx("heurfedamp", client=0, lr=0.5, adapt_lr=0.1, **tiny)
    algorithm = make_algorithm("heurfedamp", personal=personal, prox=1.0)
    server = server_after(algorithm, ctx, {0: ZEROS + 1.5, 1: ZEROS + 1.5})

    adapted = algorithm.personal_model(server, {"w": ZEROS}, ctx.task.train_data(0), ctx, 2)

    # two steps: the distance to (6 + 1.5) / 3 = 2.5 shrinks by 1 - 0.1 (2 + 1) = 0.7 each
    assert adapted["w"].tolist() == pytest.approx([2.5 + (start - 2.5) * 0.49] * 6, abs=1e-5)


def test_a_larger_xi_keeps_mixtures_further_apart(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("heurfedamp", clients=3, lr=0.1)

    spreads = []
    for xi in (0.4, 0.6, 0.9):  # at 1/3 all three are the same mean
        algorithm = make_algorithm("heurfedamp", xi=xi)
        server = run_rounds(algorithm, ctx).server
        now = Ctx(ctx.task, ctx.protocol, ctx.seed, 1)
        spreads.append(torch.stack([algorithm.download(server, now.at(c))["w"] for c in range(3)]).std(0).norm().item())

    assert spreads == sorted(spreads)
    assert spreads[-1] > 2 * spreads[0]
