"""FedPer by hand: bodies are averaged, heads stay; and when it is FedAvg or plain SGD."""

import pytest
import torch

from fedbench.errors import FedbenchError
from fedbench.wire import on_wire, size_of

BODY, HEAD = slice(0, 300), slice(300, 502)  # of `two_layers`: 2*100+100 and 100*2+2


def test_a_client_steps_with_body_and_head_at_once(two_layers, make_algorithm):
    ctx = two_layers("fedper", client=0)
    algorithm = make_algorithm("fedper")

    message, memory = algorithm.update(
        algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx
    )

    # Both classes have probability 1/2, so p - 1[y] = (-1/2, 1/2) for (1, 0) of class 0 and (1/2, -1/2) for (0, 2) of
    # class 1. Into a unit of the first half flows (p0 - 1[y=0]) (+1) + (p1 - 1[y=1]) (-1) = -1 and +1, so its weights
    # have the mean gradient ((-1) (1, 0) + (+1) (0, 2)) / 2 = (-0.5, 1), its bias 0; in the second half the negative.
    body = message["shared"]
    assert body[:2].tolist() == pytest.approx([1.05, 0.9])
    assert body[198:200].tolist() == pytest.approx([0.95, 1.1])
    assert body[200:].tolist() == pytest.approx([0.0] * 100, abs=1e-7)
    # Units say 1 and 2. Weights of class 0: (-1/2 * 1 + 1/2 * 2) / 2 = 0.25 for all units, class 1: -0.25; biases: 0.
    class_0, class_1, biases = memory["own"].split([100, 100, 2])
    assert class_0.tolist() == pytest.approx([0.975] * 50 + [-1.025] * 50)
    assert class_1.tolist() == pytest.approx([-0.975] * 50 + [1.025] * 50)
    assert biases.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


def test_the_server_averages_bodies_and_clients_keep_their_heads(two_layers, make_algorithm, run_rounds):
    ctx = two_layers("fedper")

    progress = run_rounds(make_algorithm("fedper"), ctx)

    # Client 1 has (2, 0) of class 0 and (0, 1) of class 1: the first half's gradient is (-1, 0.5); units say 2 and 1,
    # and the weights of class 0 have the gradient (-1/2 * 2 + 1/2 * 1) / 2 = -0.25.
    # First half: the mean of (1.05, 0.9) and (1.1, 0.95); second half: of (0.95, 1.1) and (0.9, 1.05).
    assert progress.server["shared"][:2].tolist() == pytest.approx([1.075, 0.925])
    assert progress.server["shared"][198:200].tolist() == pytest.approx([0.925, 1.075])
    heads = [progress.clients[client]["own"][[0, 99, 100, 199]].tolist() for client in (0, 1)]
    assert heads[0] == pytest.approx([0.975, -1.025, -0.975, 1.025])
    assert heads[1] == pytest.approx([1.025, -0.975, -1.025, 0.975])


def test_a_client_deploys_the_averaged_body_with_its_own_head(two_layers, make_algorithm, run_rounds):
    ctx = two_layers("fedper")
    algorithm = make_algorithm("fedper")
    progress = run_rounds(algorithm, ctx)

    for client in (0, 1):
        memory, data = progress.clients[client], ctx.task.train_data(client)
        model = algorithm.personal_model(progress.server, memory, data, ctx.at(client), None)
        assert torch.equal(model["w"][BODY], progress.server["shared"])
        assert torch.equal(model["w"][HEAD], memory["own"])


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.003, "optim_state": "persistent"}],
    ids=["plain", "momentum", "persistent adam"],
)
def test_with_a_single_client_it_is_plain_sgd(make_ctx, make_algorithm, run_rounds, settings):
    # FedAvg with a single client is an ordinary torch loop (test_fedavg.py)
    ctx = make_ctx("fedper", clients=1, batch_size=10, tau=2, rounds=3, **{"lr": 0.1, **settings})
    algorithm = make_algorithm("fedper")

    progress = run_rounds(algorithm, ctx, rounds=3)
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    model = algorithm.personal_model(progress.server, progress.clients[0], ctx.task.train_data(0), ctx.at(0), None)
    assert torch.equal(model["w"], fedavg["w"])


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.003, "optim_state": "persistent"}],
    ids=["momentum", "persistent adam"],
)
def test_with_a_head_of_width_zero_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("fedper", clients=4, f=0.5, train_part="body", batch_size=10, tau=2, **{"lr": 0.1, **settings})

    fedper = run_rounds(make_algorithm("fedper"), ctx, rounds=3)
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3)

    assert torch.equal(fedper.server["shared"], fedavg.server["w"])
    assert fedper.clients[0]["own"].numel() == 0


def test_the_head_never_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fedper", client=0)
    algorithm = make_algorithm("fedper")
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, memory = algorithm.update(down, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    # digits: 4 * (64*100 + 100) bytes both ways; 100*10 + 10 numbers stay
    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 26_000
    assert memory["own"].numel() == 1_010


def test_a_network_of_one_layer_has_nothing_to_share(make_ctx, make_algorithm):
    ctx = make_ctx("fedper", model="logreg")

    with pytest.raises(FedbenchError, match="FedPer shares the body, and a single layer has none"):
        make_algorithm("fedper").init_server(ctx)
