"""Adaptation by fine-tuning: an ordinary loop over the whole network, after which a frozen head is frozen again."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Ctx
from fedbench.models import build_model
from fedbench.training import fine_tune


def vector_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def twin(task):
    """An ordinary torch module with the task's initial weights."""
    module = build_model("dnn100", (1, 8, 8), task.classes)
    module.load_state_dict(task.net.module.state_dict())
    return module


def tuned(ctx, epochs=1, start=None, client=0):
    start = ctx.task.initial if start is None else start
    return fine_tune(start, ctx.task.train_data(client), ctx.at(client), epochs)


# --- the loop ---


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({"lr": 0.05}, 0.05),
        ({"lr": 0.05, "adapt_lr": 0.2}, 0.2),
        ({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, 0.05),
        ({"lr": 0.05, "lr_decay": 0.1, "rounds": 1}, 0.05),
        ({"lr": 0.05, "local_unit": "batch", "tau": 17}, 0.05),
        ({"lr": 0.003, "optimizer": "adam"}, 0.003),
    ],
    ids=["plain", "a rate of its own", "momentum and decay", "the rate has not decayed", "epochs all the same", "adam"],
)
@pytest.mark.parametrize("part", ["all", "body"])
def test_it_is_an_ordinary_torch_loop_on_the_same_batches(make_ctx, settings, rate, part):
    ctx = make_ctx(client=1, batch_size=10, train_part=part, **settings)
    task, protocol = ctx.task, ctx.protocol
    module = twin(task)
    choices = {"lr": rate, "weight_decay": protocol.weight_decay}
    if protocol.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), **choices)
    else:
        optimizer = torch.optim.SGD(module.parameters(), momentum=protocol.momentum, **choices)
    for x, y in task.train_data(1).batches(10, ctx.rng("adapt"), epochs=3):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    found = tuned(ctx, 3, client=1)

    torch.testing.assert_close(found, vector_of(module), rtol=1e-5, atol=1e-6)
    assert found.shape == (7_510,)  # body and head: 64*100+100 + 100*10+10


def test_by_hand(make_ctx, add_dataset):
    # class 0 is the image (1, 0), class 1 is (0, 2); one for training, one for testing
    add_dataset("two", [[[[1, 0]]], [[[1, 0]]], [[[0, 2]]], [[[0, 2]]]], [0, 0, 1, 1], per_class=(1, 1), full_scale=1)
    ctx = make_ctx(dataset="two", normalize="none", model="logreg", clients=1, labels_per_client=2, adapt_lr=0.2)

    found = tuned(ctx, start=torch.zeros(6))

    # At 0 both classes have probability 1/2; the mean gradient of class 0 is ((-1/2) (1, 0) + (1/2) (0, 2)) / 2 =
    # (-0.25, 0.5), of class 1 its negative, of the biases 0. One step of 0.2.
    assert found.tolist() == pytest.approx([0.05, -0.1, -0.05, 0.1, 0.0, 0.0])


def test_no_epochs_change_nothing(make_ctx):
    ctx = make_ctx(lr=0.5)

    assert torch.equal(tuned(ctx, 0), ctx.task.initial)


def test_it_leaves_its_start_alone_and_returns_a_copy(make_ctx):
    ctx = make_ctx(lr=0.1)
    start = ctx.task.initial.clone()

    found = tuned(ctx, start=start)
    kept = found.clone()
    ctx.task.net.load(torch.zeros_like(start))

    assert torch.equal(start, ctx.task.initial)
    assert torch.equal(found, kept)


def test_it_does_not_depend_on_what_the_network_held_before(make_ctx):
    ctx = make_ctx(lr=0.1, momentum=0.9)
    first = tuned(ctx)

    ctx.task.net.load(torch.randn(ctx.task.net.d, generator=torch.Generator().manual_seed(0)))
    again = tuned(ctx)

    assert torch.equal(first, again)


def test_batches_come_in_another_order_than_in_training_and_for_every_client(make_ctx):
    ctx = make_ctx(client=0, batch_size=10)
    data = ctx.task.train_data(0)

    orders = [
        torch.cat([y for _, y in data.batches(10, here.rng(purpose), epochs=1)])
        for here, purpose in ((ctx, "adapt"), (ctx, "batches"), (ctx.at(1), "adapt"))
    ]

    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


# --- what moves ---


@pytest.mark.parametrize("part", ["all", "body"])
def test_body_and_head_move(make_ctx, part):
    ctx = make_ctx(lr=0.1, train_part=part)
    net = ctx.task.net
    before = net.extended(ctx.task.initial)

    found = tuned(ctx)

    assert not torch.equal(found[net.body], before[net.body])
    assert not torch.equal(found[net.head], before[net.head])


@pytest.mark.parametrize("part", ["all", "body"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"optimizer": "adam"}, {"weight_decay": 0.1}, {"optimizer": "adam", "weight_decay": 0.1}],
    ids=["sgd", "momentum", "adam", "weight decay", "adam with weight decay"],
)
def test_with_adapt_part_head_only_the_head_moves(make_ctx, part, settings):
    ctx = make_ctx(lr=0.1, train_part=part, adapt_part="head", **settings)
    net = ctx.task.net
    before = net.extended(ctx.task.initial)

    found = tuned(ctx, 2)

    assert torch.equal(found[net.body], before[net.body])
    assert not torch.equal(found[net.head], before[net.head])


def test_with_adapt_part_head_running_statistics_of_the_body_stay(make_ctx, pictures):
    ctx = make_ctx(dataset=pictures, model="vgg_s", norm="bn_stats", lr=0.1, adapt_part="head")
    net = ctx.task.net

    found = tuned(ctx, 1)

    assert torch.equal(found[net.body], ctx.task.initial[net.body])
    assert not torch.equal(found[net.head], ctx.task.initial[net.head])


def test_with_adapt_part_head_the_head_learns_as_if_it_were_alone(make_ctx):
    ctx = make_ctx(client=0, lr=0.1, momentum=0.9, batch_size=10, adapt_part="head")
    module = twin(ctx.task)
    optimizer = torch.optim.SGD(module[-1].parameters(), lr=0.1, momentum=0.9)
    for x, y in ctx.task.train_data(0).batches(10, ctx.rng("adapt"), epochs=2):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    torch.testing.assert_close(tuned(ctx, 2), vector_of(module), rtol=1e-5, atol=1e-6)


# --- a frozen head ---


def test_it_starts_from_the_frozen_head(make_ctx):
    ctx = make_ctx(train_part="body")
    net = ctx.task.net
    whole = net.flat.clone()
    net.load(torch.zeros(7_510))  # some other network was here before

    found = tuned(ctx, 0, start=torch.ones(6_500))

    assert torch.equal(found[net.head], whole[net.head])
    assert torch.equal(found[net.body], torch.ones(6_500))


def test_a_body_vector_predicts_with_the_frozen_head_again_afterwards(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0, lr=0.5)
    algorithm, data = make_algorithm("fedbabu"), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)
    before = algorithm.predict(server, data.x, ctx, "mean").detach().clone()

    adapted = algorithm.personal_model(server, {}, data, ctx, 5)
    changed = algorithm.predict(adapted, data.x, ctx, "mean").detach().clone()
    after = algorithm.predict(server, data.x, ctx, "mean").detach().clone()

    assert torch.equal(after, before)
    assert not torch.equal(changed, before)


def test_training_goes_on_with_the_frozen_head_afterwards(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0, lr=0.5)
    algorithm, data = make_algorithm("fedbabu"), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)
    expected, _ = algorithm.update(server, {}, data, ctx)

    algorithm.personal_model(server, {}, data, ctx, 5)
    found, _ = algorithm.update(server, {}, data, ctx)

    assert torch.equal(found["w"], expected["w"])


# --- methods that adapt in their own way ---


def test_a_bayesian_adaptation_does_not_decay_its_rate_either(make_ctx, make_algorithm):
    # a single round lies after both drops of the rate; the protocol: "default: lr without decay"
    plain, decayed = (make_ctx("pfedbayes", client=0, rounds=1, lr_decay=decay) for decay in (1.0, 0.1))
    algorithm = make_algorithm("pfedbayes")
    server = algorithm.init_server(plain)

    one, other = (algorithm.personal_model(server, server, ctx.task.train_data(0), ctx, 2) for ctx in (plain, decayed))

    assert torch.equal(one["mu"], other["mu"])


def test_a_bayesian_adaptation_has_a_rate_of_its_own(make_ctx, make_algorithm):
    usual, own = make_ctx("pfedbayes", client=0), make_ctx("pfedbayes", client=0, lr=0.5, adapt_lr=0.001)
    algorithm = make_algorithm("pfedbayes")
    server = algorithm.init_server(usual)

    # the rate of pFedBayes is 0.001
    one, other = (algorithm.personal_model(server, server, ctx.task.train_data(0), ctx, 2) for ctx in (usual, own))

    assert torch.equal(one["mu"], other["mu"])
    assert not torch.equal(one["mu"], server["mu"])


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedbabu"])
def test_point_methods_fine_tune_the_servers_model(make_ctx, make_algorithm, method):
    ctx: Ctx = make_ctx(method, client=0, lr=0.1)
    algorithm, data = make_algorithm(method), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)

    found = algorithm.personal_model(server, {}, data, ctx, 2)

    assert torch.equal(found["w"], fine_tune(server["w"], data, ctx, 2))
