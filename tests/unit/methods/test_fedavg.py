"""FedAvg by hand, and the special cases in which it is something simpler."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Ctx
from fedbench.models import build_model

ZEROS = torch.zeros(6)


def vector_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def twin(task, model="dnn100", shape=(1, 8, 8)):
    """An ordinary torch module with the task's initial weights."""
    module = build_model(model, shape, task.classes)
    module.load_state_dict(task.net.module.state_dict())
    return module


def test_one_client_takes_one_gradient_step_from_the_servers_model(make_ctx, make_algorithm, tiny):
    ctx = make_ctx(client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("fedavg").update({"w": ZEROS}, {}, ctx.task.train_data(0), ctx)

    # At w = 0 both classes have probability 1/2. The gradient of the mean cross-entropy is the mean of (p - 1[y]) x:
    # class 0: ((-1/2) (1, 0) + (1/2) (0, 2)) / 2 = (-0.25, 0.5); class 1: its negative; biases: 0. Step: -0.1 times it.
    assert message["w"].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0.0, 0.0])
    assert memory == {}


def test_the_server_averages_its_clients(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx(lr=0.1, **tiny)

    server = run_rounds(make_algorithm("fedavg"), ctx, server={"w": ZEROS}).server

    # client 0: (0.025, -0.05), as above; client 1: -0.1 ((-1/2) (2, 0) + (1/2) (0, 1)) / 2 = (0.05, -0.025)
    assert server["w"].tolist() == pytest.approx([0.0375, -0.0375, -0.0375, 0.0375, 0.0, 0.0])


def test_the_server_goes_beyond_the_average_by_beta(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx(lr=0.1, beta=2.0, **tiny)

    server = run_rounds(make_algorithm("fedavg"), ctx, server={"w": ZEROS}).server

    # twice the way from 0 to the average
    assert server["w"].tolist() == pytest.approx([0.075, -0.075, -0.075, 0.075, 0.0, 0.0])


def test_with_one_client_it_is_plain_sgd(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx(clients=1, lr=0.1, batch_size=10, tau=2, rounds=3)
    module = twin(ctx.task)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in (1, 2, 3):
        batches = Ctx(ctx.task, ctx.protocol, ctx.seed, number, client=0).rng("batches")
        for x, y in ctx.task.train_data(0).batches(10, batches, epochs=2):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()

    server = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    torch.testing.assert_close(server["w"], vector_of(module), rtol=1e-5, atol=1e-6)


def test_identical_clients_on_full_batches_have_the_servers_model(make_ctx, make_algorithm, run_rounds, add_dataset):
    image = torch.tensor([[1, 0], [0, 2]]).repeat_interleave(6, dim=0).view(12, 1, 1, 2)
    add_dataset("same", image, [0] * 6 + [1] * 6, per_class=(1, 1), full_scale=1)
    ctx = make_ctx(
        dataset="same", normalize="none", model="logreg", labels_per_client=2, clients=3, batch_size=2, tau=4, lr=0.5
    )
    algorithm = make_algorithm("fedavg")
    alone, _ = algorithm.update({"w": ctx.task.initial}, {}, ctx.task.train_data(1), ctx.at(1))

    server = run_rounds(algorithm, ctx).server

    torch.testing.assert_close(server["w"], alone["w"], rtol=1e-6, atol=1e-7)


def test_one_full_batch_of_equal_clients_is_one_step_on_the_pooled_data(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx(clients=4, lr=0.1, batch_size=25, tau=1)
    module = twin(ctx.task)
    pooled = [ctx.task.train_data(client) for client in range(4)]
    cross_entropy(module(torch.cat([d.x for d in pooled])), torch.cat([d.y for d in pooled])).backward()
    expected = torch.cat([(p.detach() - 0.1 * p.grad).flatten() for p in module.parameters()])

    server = run_rounds(make_algorithm("fedavg"), ctx).server

    torch.testing.assert_close(server["w"], expected, rtol=1e-5, atol=1e-6)


def test_clients_weigh_as_much_as_their_samples(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx(lr=0.1, weighting="samples", **tiny)
    ctx.task.split.train[1] = ctx.task.split.train[1][:1]  # client 1 is left with (2, 0) of class 0

    server = run_rounds(make_algorithm("fedavg"), ctx, server={"w": ZEROS}).server

    # client 0, weight 2/3: (0.025, -0.05) and biases 0; client 1, weight 1/3: -0.1 (-1/2) (2, 0) = (0.1, 0), and biases
    # -0.1 (-1/2) = 0.05 and -0.05
    expected = [0.05, -0.1 / 3, -0.05, 0.1 / 3, 0.05 / 3, -0.05 / 3]
    assert server["w"].tolist() == pytest.approx(expected)


def test_momentum_survives_the_round_only_if_the_protocol_says_so(make_ctx, make_algorithm, tiny):
    forgetful = make_ctx(client=0, momentum=0.9, **tiny)
    keeping = make_ctx(client=0, momentum=0.9, optim_state="persistent", **tiny)
    algorithm = make_algorithm("fedavg")

    _, nothing = algorithm.update({"w": ZEROS}, {}, forgetful.task.train_data(0), forgetful)
    _, memory = algorithm.update({"w": ZEROS}, {}, keeping.task.train_data(0), keeping)

    # after one step the momentum is the gradient itself
    assert nothing == {}
    assert memory["optimizer.momentum_buffer"].tolist() == pytest.approx([-0.25, 0.5, 0.25, -0.5, 0.0, 0.0])


def test_it_has_a_global_model_and_no_personal_one_while_it_trains(make_ctx, make_algorithm):
    ctx = make_ctx(client=0)
    algorithm = make_algorithm("fedavg")
    server = algorithm.init_server(ctx)

    assert algorithm.global_model(server, {}, ctx.task.train_data(0), ctx) is server
    assert algorithm.personal_model(server, {}, ctx.task.train_data(0), ctx, None) is None


def test_it_starts_from_the_common_initial_network(make_ctx, make_algorithm):
    ctx = make_ctx()

    assert torch.equal(make_algorithm("fedavg").init_server(ctx)["w"], ctx.task.initial)


def test_with_a_frozen_head_it_sends_the_body_only(make_ctx, make_algorithm):
    ctx = make_ctx(client=0, train_part="body")
    algorithm = make_algorithm("fedavg")

    message, _ = algorithm.update(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx)

    # digits: 64*100 + 100
    assert message["w"].shape == (6_500,)
