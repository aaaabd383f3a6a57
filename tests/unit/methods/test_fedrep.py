"""FedRep by hand: first the head, then the body; its other scheme; and when it is FedAvg on the body or FedPer."""

from math import log, sqrt

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Ctx
from fedbench.models import build_model
from fedbench.training import local_batches, local_sgd
from fedbench.wire import on_wire, size_of

BODY, HEAD = slice(0, 6_500), slice(6_500, 7_510)  # dnn100 on digits


def first_update(algorithm, ctx):
    return algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx)


def joined(message, memory):
    return torch.cat([message["shared"], memory["own"]])


def test_the_body_steps_with_the_head_that_has_just_learned(two_layers, make_algorithm):
    u = sqrt(log(3) / 5)
    ctx = two_layers("fedrep", u=u, client=0)

    message, memory = first_update(make_algorithm("fedrep", head_epochs=1, rep_epochs=1), ctx)

    # The head as for FedPer, with units that say u and 2u: the gradient is 0.25 u for class 0, -0.25 u for class 1.
    shift = 0.025 * u
    class_0, class_1, biases = memory["own"].split([100, 100, 2])
    assert class_0.tolist() == pytest.approx([1 - shift] * 50 + [-1 - shift] * 50)
    assert class_1.tolist() == pytest.approx([-1 + shift] * 50 + [1 + shift] * 50)
    assert biases.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    # Now an image whose pixels sum to s has the logits -/+ 100 u s shift = -/+ 2.5 u^2 s = -/+ s log(3) / 2, that is
    # p0 = 1 / (1 + 3^s): 1/4 for (1, 0) of class 0, 1/10 for (0, 2) of class 1. Into a unit of the first half flows
    # 2 (p0 - 1[y=0]) (1 - shift) = (1 - shift) (-1.5 and 0.2), so its weights have the mean gradient
    # (1 - shift) ((-1.5) (1, 0) + 0.2 (0, 2)) / 2 = (1 - shift) (-0.75, 0.2), its bias (1 - shift) (-0.65);
    # in the second half 1 + shift takes the place of 1 - shift, and all signs change.
    first, second = 0.1 * (1 - shift), 0.1 * (1 + shift)
    body = message["shared"]
    assert body[:2].tolist() == pytest.approx([u + 0.75 * first, u - 0.2 * first])
    assert body[198:200].tolist() == pytest.approx([u - 0.75 * second, u + 0.2 * second])
    assert body[[200, 299]].tolist() == pytest.approx([0.65 * first, -0.65 * second], rel=1e-5)


def test_the_server_averages_bodies_and_clients_keep_their_heads(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedrep", clients=2, lr=0.1, weighting="uniform")
    algorithm = make_algorithm("fedrep")
    server = algorithm.init_server(ctx)
    sent = [
        algorithm.update(server, algorithm.init_client(ctx.at(c)), ctx.task.train_data(c), ctx.at(c)) for c in (0, 1)
    ]

    progress = run_rounds(algorithm, ctx)

    torch.testing.assert_close(progress.server["shared"], (sent[0][0]["shared"] + sent[1][0]["shared"]) / 2)
    for client in (0, 1):
        assert torch.equal(progress.clients[client]["own"], sent[client][1]["own"])


def test_the_head_never_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fedrep", client=0)
    algorithm = make_algorithm("fedrep")

    message, memory = first_update(algorithm, ctx)

    # digits: 4 * (64*100 + 100) bytes both ways; 100*10 + 10 numbers stay
    assert size_of(on_wire(algorithm.download(algorithm.init_server(ctx), ctx))) == 26_000
    assert size_of(on_wire(message)) == 26_000
    assert memory["own"].numel() == 1_010


# --- phases ---


@pytest.mark.parametrize(
    ("tau", "params", "head", "body"),
    [
        (11, {}, 10, 1),  # FedRep's own code
        (5, {}, 4, 1),  # FedABML
        (15, {"rep_epochs": 5}, 10, 5),  # FedRep's own code on CIFAR-100
        (5, {"head_epochs": 10}, 10, 1),
        (20, {}, 18, 2),
        (1, {}, 1, 1),
        (5, {"rep_epochs": 0}, 5, 0),
        (5, {"head_epochs": 0, "rep_epochs": 5}, 0, 5),
    ],
)
@pytest.mark.parametrize("unit", ["epoch", "batch"])
def test_tau_is_divided_between_head_and_body(make_ctx, make_algorithm, monkeypatch, unit, tau, params, head, body):
    ctx = make_ctx("fedrep", client=0, local_unit=unit, tau=tau, batch_size=10)
    steps = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: steps.append(self.param_groups[0]["params"][0].numel()))

    first_update(make_algorithm("fedrep", **params), ctx)

    # digits, small: 25 samples, 3 batches of 10 in a pass
    per_unit = 3 if unit == "epoch" else 1
    assert steps == [1_010] * head * per_unit + [6_500] * body * per_unit


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-4}, {"lr": 0.003, "optimizer": "adam"}],
    ids=["FedRep's SGD", "adam"],
)
def test_phases_are_a_torch_loop_with_one_half_frozen_at_a_time(make_ctx, make_algorithm, settings):
    ctx = make_ctx("fedrep", client=0, batch_size=10, **settings)
    data, module = ctx.task.train_data(0), twin(ctx.task)
    make = torch.optim.Adam if "optimizer" in settings else torch.optim.SGD
    options = {key: value for key, value in settings.items() if key != "optimizer"}
    order = ctx.rng("batches")
    for layer, frozen, epochs in ((module[3], module[1], 3), (module[1], module[3], 2)):
        layer.requires_grad_(True)
        frozen.requires_grad_(False)
        optimizer = make(layer.parameters(), **options)
        for x, y in data.batches(10, order, epochs=epochs):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()

    update = first_update(make_algorithm("fedrep", head_epochs=3, rep_epochs=2), ctx)

    torch.testing.assert_close(joined(*update), vector_of(module), rtol=1e-5, atol=1e-6)


def test_without_body_epochs_the_body_stays_at_its_initial_value_and_heads_are_fitted(
    make_ctx, make_algorithm, run_rounds
):
    ctx = make_ctx("fedrep", lr=0.1, momentum=0.9, tau=3)

    progress = run_rounds(make_algorithm("fedrep", rep_epochs=0), ctx, rounds=3)

    assert torch.equal(progress.server["shared"], ctx.task.initial[BODY])
    heads = [progress.clients[client]["own"] for client in (0, 1)]
    assert not torch.equal(heads[0], ctx.task.initial[HEAD])
    assert not torch.equal(heads[0], heads[1])


def test_without_head_epochs_it_is_fedavg_on_the_body_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    # all clients then have the common initial head: a shared one that never learns, FedBABU's
    settings = {"clients": 4, "f": 0.5, "lr": 0.1, "momentum": 0.9, "tau": 2, "batch_size": 10}
    ctx, body_only = make_ctx("fedrep", **settings), make_ctx("fedavg", train_part="body", **settings)

    fedrep = run_rounds(make_algorithm("fedrep", head_epochs=0, rep_epochs=2), ctx, rounds=3)
    fedavg = run_rounds(make_algorithm("fedavg"), body_only, rounds=3)

    assert torch.equal(fedrep.server["shared"], fedavg.server["w"])
    assert all(torch.equal(fedrep.clients[client]["own"], ctx.task.initial[HEAD]) for client in range(4))


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=["momentum", "adam"])
def test_head_and_body_keep_a_history_each(make_ctx, make_algorithm, settings):
    ctx = make_ctx("fedrep", client=0, optim_state="persistent", **settings)

    _, memory = first_update(make_algorithm("fedrep"), ctx)

    sizes = {key.split(".")[0]: value.numel() for key, value in memory.items() if value.numel() > 1 and "." in key}
    assert sizes == {"own": 1_010, "shared": 6_500}


# --- batches ---


@pytest.mark.parametrize("settings", [{}, {"optim_state": "persistent"}], ids=["reset", "persistent"])
def test_without_steps_of_the_head_alone_it_is_fedper_bit_for_bit(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("fedrep", clients=4, f=0.5, lr=0.1, momentum=0.9, tau=2, batch_size=10, **settings)

    fedrep = run_rounds(make_algorithm("fedrep", scheme="batches", head_steps=0), ctx, rounds=3)
    fedper = run_rounds(make_algorithm("fedper"), ctx, rounds=3)

    assert torch.equal(fedrep.server["shared"], fedper.server["shared"])
    for client in range(4):
        assert torch.equal(fedrep.clients[client]["own"], fedper.clients[client]["own"])


def test_every_batch_is_one_common_step_and_four_of_the_head_with_an_optimiser_each(make_ctx, make_algorithm):
    ctx = make_ctx("fedrep", client=0, lr=0.001, optimizer="adam", local_unit="batch", tau=5, batch_size=10)
    data, module = ctx.task.train_data(0), twin(ctx.task)
    common = torch.optim.Adam(module.parameters(), lr=0.001)
    head = torch.optim.Adam(module[3].parameters(), lr=0.001)
    for x, y in local_batches(data, ctx):
        for optimizer in (common, head, head, head, head):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()

    update = first_update(make_algorithm("fedrep", scheme="batches"), ctx)

    torch.testing.assert_close(joined(*update), vector_of(module), rtol=1e-4, atol=1e-5)


# --- newcomers ---


def test_a_newcomer_trains_a_fresh_head_for_the_epochs_of_the_head(make_ctx, make_algorithm):
    ctx = make_ctx("fedrep", client=0, newcomers=1, lr=0.1, tau=5, batch_size=10)
    algorithm, data = make_algorithm("fedrep"), ctx.task.train_data(0)
    novel = Ctx(ctx.task, ctx.protocol, ctx.seed, 1, 0, novel=True)
    body = torch.linspace(-0.2, 0.2, 6_500)
    four = make_ctx("fedrep", client=0, lr=0.1, tau=4, batch_size=10)
    start = torch.cat([body, ctx.task.initial[HEAD]])
    expected, _ = local_sgd(start, data, four, extra_grad=lambda w, grad: grad[BODY].zero_())

    message, memory = algorithm.update({"shared": body}, algorithm.init_client(ctx), data, novel)

    assert torch.equal(message["shared"], body)
    torch.testing.assert_close(memory["own"], expected[HEAD])


def twin(task):
    """An ordinary torch module with the task's initial weights."""
    module = build_model("dnn100", (1, 8, 8), task.classes)
    module.load_state_dict(task.net.module.state_dict())
    return module


def vector_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])
