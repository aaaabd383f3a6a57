"""What methods with a shared and an own part have in common: what moves, what travels, what a newcomer learns."""

import pytest
import torch

from fedbench.algorithm import Ctx, Params
from fedbench.partly_shared import PartlyShared, SplitNetwork, joined
from fedbench.simulation import Surroundings, simulate, train_round
from fedbench.training import local_batches, local_sgd

FRONT, BACK = slice(0, 6_500), slice(6_500, 7_510)  # dnn100 on digits: the body, 64*100+100, and the head, 100*10+10


class Halved(PartlyShared):
    """Shares the front or the back of the vector."""

    title = "Halved"

    def __init__(self, shared=FRONT):
        super().__init__(Params())
        self._shared = shared

    def shared(self, net):
        return self._shared


@pytest.fixture(params=[FRONT, BACK], ids=["front shared", "back shared"])
def halved(request):
    return Halved(request.param)


HISTORIES = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"optimizer": "adam", "lr": 0.003, "weight_decay": 0.01},
]
"""Optimisers that move a coordinate without a gradient once they have a history."""


def begin(algorithm, ctx):
    """The network of a client that has just downloaded for the first time."""
    state = {**algorithm.init_server(ctx), **algorithm.init_client(ctx)}
    return SplitNetwork(state, algorithm.parts(ctx), ctx)


def later(ctx, round_, novel=False):
    return Ctx(ctx.task, ctx.protocol, ctx.seed, round_, ctx.client, novel)


# --- the two parts ---


def test_the_two_parts_make_up_the_initial_network(make_ctx, halved):
    ctx = make_ctx(client=0)

    state = {**halved.init_server(ctx), **halved.init_client(ctx)}

    assert torch.equal(joined(state, halved.parts(ctx)), ctx.task.initial)
    assert state["shared"].numel() + state["own"].numel() == 7_510


@pytest.mark.parametrize(
    ("shared", "own"),
    [(slice(0, 7_510), slice(7_510, 7_510)), (slice(7_510, 7_510), slice(0, 7_510))],
    ids=["everything shared", "nothing shared"],
)
def test_one_of_the_parts_may_be_empty(make_ctx, shared, own):
    ctx = make_ctx(client=0, optimizer="adam")
    algorithm = Halved(shared)
    expected, _ = local_sgd(ctx.task.initial, ctx.task.train_data(0), ctx)

    message, memory = algorithm.update(
        algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx
    )

    assert algorithm.parts(ctx)["own"] == own
    assert torch.equal(joined({**message, **memory}, algorithm.parts(ctx)), expected)


# --- local training ---


@pytest.mark.parametrize("settings", HISTORIES, ids=["momentum", "adam"])
def test_a_part_that_does_not_train_stays_bit_for_bit_whatever_history_it_has(make_ctx, halved, settings):
    ctx = make_ctx(client=0, **settings)
    net, data = begin(halved, ctx), ctx.task.train_data(0)
    net.train(local_batches(data, ctx), "all")

    for moving, still in (("own", "shared"), ("shared", "own")):
        before = net[moving], net[still]
        net.train(local_batches(data, ctx), moving)
        assert not torch.equal(net[moving], before[0])
        assert torch.equal(net[still], before[1])


def test_a_part_trains_as_with_the_gradient_of_the_rest_set_to_zero(make_ctx, halved):
    ctx = make_ctx(client=0, lr=0.1, momentum=0.9, tau=3, batch_size=10)
    fixed = halved.parts(ctx)["shared"]
    expected, _ = local_sgd(
        ctx.task.initial, ctx.task.train_data(0), ctx, extra_grad=lambda w, grad: grad[fixed].zero_()
    )
    net = begin(halved, ctx)

    net.train(local_batches(ctx.task.train_data(0), ctx), "own")

    # up to the last bit: the kernel treats the end of a vector, and so that of a part, differently
    torch.testing.assert_close(net["all"], expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(net["shared"], ctx.task.initial[fixed])


def test_both_parts_at_once_are_ordinary_local_training(make_ctx, halved):
    ctx = make_ctx(client=0, lr=0.1, momentum=0.9, tau=3, batch_size=10)
    expected, _ = local_sgd(ctx.task.initial, ctx.task.train_data(0), ctx)

    message, memory = halved.update(halved.init_server(ctx), halved.init_client(ctx), ctx.task.train_data(0), ctx)

    assert torch.equal(joined({**message, **memory}, halved.parts(ctx)), expected)


def test_running_statistics_of_a_part_that_does_not_train_stay_too(make_ctx, pictures):
    ctx = make_ctx(client=0, dataset=pictures, model="vgg_s", norm="bn_stats", local_unit="batch", tau=2)
    algorithm = Halved(ctx.task.net.body)  # which holds all of the statistics
    net, data = begin(algorithm, ctx), ctx.task.train_data(0)
    before = net["shared"]

    net.train(local_batches(data, ctx), "own")
    after_own = net["shared"]
    net.train(local_batches(data, ctx), "shared")

    assert torch.equal(after_own, before)
    statistics = ctx.task.net.norm_mask[ctx.task.net.body]
    assert not torch.equal(net["shared"][statistics], before[statistics])


# --- what travels and what stays ---


def test_only_the_shared_part_travels_and_only_the_own_part_stays(make_ctx, halved):
    ctx = make_ctx(client=0)
    sizes = {name: len(range(7_510)[part]) for name, part in halved.parts(ctx).items()}

    server, memory = halved.init_server(ctx), halved.init_client(ctx)
    message, kept = halved.update(halved.download(server, ctx), memory, ctx.task.train_data(0), ctx)

    for travels in (halved.download(server, ctx), message):
        assert {key: value.numel() for key, value in travels.items()} == {"shared": sizes["shared"]}
    for stays in (memory, kept):
        assert {key: value.numel() for key, value in stays.items()} == {"own": sizes["own"]}


def test_the_server_averages_what_it_gets_and_nothing_else(make_ctx, halved, begin_training):
    ctx = make_ctx(clients=3, lr=0.1, weighting="uniform")
    progress = begin_training(halved, ctx)
    sent = [halved.update(progress.server, progress.clients[c], ctx.task.train_data(c), ctx.at(c)) for c in range(3)]

    train_round(halved, progress, ctx)

    mean = torch.stack([message["shared"] for message, _ in sent]).mean(0)
    torch.testing.assert_close(progress.server["shared"], mean)
    assert progress.server.keys() == {"shared"}
    for client, (_, memory) in enumerate(sent):
        assert torch.equal(progress.clients[client]["own"], memory["own"])


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=["momentum", "adam"])
def test_histories_stay_with_the_client_where_the_protocol_keeps_them(make_ctx, settings):
    ctx = make_ctx(client=0, optim_state="persistent", tau=2, **settings)
    algorithm, data = Halved(slice(0, 7_510)), ctx.task.train_data(0)  # all is shared: the second round goes on
    _, history = local_sgd(ctx.task.initial, data, ctx)
    first, memory = algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), data, ctx)
    expected, _ = local_sgd(first["shared"], data, later(ctx, 2), history)

    second, _ = algorithm.update(first, memory, data, later(ctx, 2))

    assert torch.equal(second["shared"], expected)
    assert {key.replace("all.", "optimizer.") for key in memory} == {"own", *history}


def test_without_persistence_a_client_keeps_its_own_part_only(make_ctx):
    ctx = make_ctx(client=0, optim_state="reset", momentum=0.9)
    algorithm = Halved()

    _, memory = algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert memory.keys() == {"own"}


# --- models ---


def test_a_personal_model_is_the_servers_part_with_the_clients_own(make_ctx, halved):
    ctx = make_ctx(client=0)
    parts = halved.parts(ctx)
    server, memory = halved.init_server(ctx), halved.init_client(ctx)
    server, memory = {"shared": torch.full_like(server["shared"], 2.0)}, {"own": torch.full_like(memory["own"], 3.0)}

    model = halved.personal_model(server, memory, ctx.task.train_data(0), ctx, None)

    assert set(model["w"][parts["shared"]].tolist()) == {2.0}
    assert set(model["w"][parts["own"]].tolist()) == {3.0}


def test_there_is_no_global_model(make_ctx, halved):
    ctx = make_ctx(client=0)

    assert halved.global_model(halved.init_server(ctx), halved.init_client(ctx), ctx.task.train_data(0), ctx) is None


def test_a_client_that_never_trained_has_the_servers_part_with_the_initial_own_one(make_ctx, halved, begin_training):
    ctx = make_ctx(clients=4, f=0.25, lr=0.1)
    progress, parts = begin_training(halved, ctx), halved.parts(ctx)
    train_round(halved, progress, ctx)
    (trained,) = halved.select(progress.server, {}, ctx).train
    idle = ctx.at((trained + 1) % 4)

    model = halved.personal_model(progress.server, progress.clients[idle.client], ctx.task.train_data(0), idle, None)

    assert torch.equal(model["w"][parts["shared"]], progress.server["shared"])
    assert torch.equal(model["w"][parts["own"]], ctx.task.initial[parts["own"]])


def test_an_adaptation_trains_the_own_part_and_keeps_the_servers(make_ctx, halved):
    ctx = make_ctx(client=0, lr=0.1, adapt_lr=0.05, momentum=0.9, batch_size=10)
    server, memory, parts = halved.init_server(ctx), halved.init_client(ctx), halved.parts(ctx)
    data = ctx.task.train_data(0)

    models = {epochs: halved.personal_model(server, memory, data, ctx, epochs)["w"] for epochs in (0, 1, 2)}

    assert torch.equal(models[0], ctx.task.initial)
    for epochs in (1, 2):
        assert torch.equal(models[epochs][parts["shared"]], server["shared"])
    assert not torch.equal(models[1][parts["own"]], models[0][parts["own"]])
    assert not torch.equal(models[2][parts["own"]], models[1][parts["own"]])


def test_an_adaptation_does_not_depend_on_who_adapted_before(make_ctx, pictures):
    # dropout draws masks: from a generator of the client's own
    ctx = make_ctx("fedper", dataset=pictures, model="cnn5_100", lr=0.1, batch_size=10)
    algorithm = Halved(ctx.task.net.body)
    server, memory = algorithm.init_server(ctx), algorithm.init_client(ctx)

    def adapt(client):
        return algorithm.personal_model(server, memory, ctx.task.train_data(client), ctx.at(client), 1)["w"]

    alone = adapt(1)
    adapt(0)

    assert torch.equal(adapt(1), alone)


def test_an_adaptation_takes_its_own_rate_and_no_history(make_ctx):
    # one full batch, so one step: -adapt_lr times the gradient, whatever the client's momentum is
    ctx = make_ctx(client=0, lr=0.1, adapt_lr=0.05, momentum=0.9, optim_state="persistent", batch_size=25)
    algorithm, data = Halved(), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)
    slow = make_ctx(client=0, lr=0.05, batch_size=25)
    expected, _ = local_sgd(ctx.task.initial, data, slow)
    own = algorithm.init_client(ctx)
    moments = {key + "momentum_buffer": torch.ones(7_510)[algorithm.parts(ctx)[key[:-1]]] for key in ("all.", "own.")}

    adapted = algorithm.personal_model(server, own | moments, data, ctx, 1)["w"]

    torch.testing.assert_close(adapted[BACK], expected[BACK])


# --- newcomers ---


@pytest.mark.parametrize("settings", [{}, *HISTORIES], ids=["plain", "momentum", "adam"])
@pytest.mark.parametrize("method", ["fedper", "lgfedavg", "fedrep"])
def test_a_newcomer_keeps_the_shared_part_bit_for_bit_and_learns_its_own(make_ctx, make_algorithm, method, settings):
    ctx = make_ctx(method, client=0, newcomers=1, optim_state="persistent", tau=2, **settings)
    algorithm, data = make_algorithm(method), ctx.task.train_data(0)
    server, memory = algorithm.init_server(ctx), algorithm.init_client(ctx)
    before = memory["own"]

    for number in (2, 3):
        when = later(ctx, number, novel=True)
        message, memory = algorithm.update(algorithm.download(server, when), memory, data, when)
        model = algorithm.personal_model(server, memory, data, when, None)["w"]
        assert torch.equal(message["shared"], server["shared"])
        assert torch.equal(model[algorithm.parts(ctx)["shared"]], server["shared"])
        assert not torch.equal(memory["own"], before)
        before = memory["own"]


def test_a_newcomer_does_no_work_on_the_shared_part(make_ctx):
    ctx = make_ctx(client=0)
    algorithm = Halved()
    net = begin(algorithm, later(ctx, 2, novel=True))
    work = local_batches(ctx.task.train_data(0), ctx)

    net.train(work, "shared")

    # not one batch was taken
    assert sum(1 for _ in work) == 1
    assert torch.equal(net["all"], ctx.task.initial)


@pytest.mark.parametrize("method", ["fedper", "lgfedavg", "fedrep"])
def test_newcomers_are_scored_as_they_learn_and_after_an_adaptation(make_job, recorder, tmp_path, method):
    job = make_job(
        method, clients=3, newcomers=1, rounds=2, tau=20, lr=0.1, novel_rounds=2, adapt_epochs=[0, 5], eval_every=2
    )

    assert simulate(job, recorder, Surroundings(tmp_path)) == "done"

    novel, adapted = recorder.evaluations(stage="novel"), recorder.evaluations(stage="adapt")
    assert [(e.step, e.view) for e in novel] == [(1, "pm"), (2, "pm")]
    assert [(e.step, e.view) for e in adapted] == [(0, "pm"), (5, "pm")]
    start, trained = adapted[0].metrics[None]["nll"], adapted[1].metrics[None]["nll"]
    assert trained < start
    assert novel[0].metrics[None]["nll"] < start
