"""Centralised: ordinary SGD on the pooled data of whoever takes part in a round."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Ctx
from fedbench.models import build_model
from fedbench.simulation import train_round

ZEROS = torch.zeros(6)


def sgd_on(cohorts, ctx, *, lr, epochs, **options):
    """Plain torch SGD, round after round on the data of these clients, from the task's initial weights."""
    module = build_model("dnn100", (1, 8, 8), ctx.task.classes)
    module.load_state_dict(ctx.task.net.module.state_dict())
    for number, clients in enumerate(cohorts, start=1):
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, **options)
        order = Ctx(ctx.task, ctx.protocol, ctx.seed, number).rng("batches")
        for x, y in ctx.task.train_data(*clients).batches(ctx.protocol.batch_size, order, epochs=epochs):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_one_step_on_the_data_of_both_clients(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("centralised", lr=0.1, **{**tiny, "batch_size": 4})

    server = run_rounds(make_algorithm("centralised"), ctx, server={"w": ZEROS}).server

    # at w = 0 all probabilities are 1/2; the gradient of class 0 over the samples (1, 0), (0, 2), (2, 0), (0, 1) is
    # ((-1/2) (1, 0) + (1/2) (0, 2) + (-1/2) (2, 0) + (1/2) (0, 1)) / 4 = (-0.375, 0.375)
    assert server["w"].tolist() == pytest.approx([0.0375, -0.0375, -0.0375, 0.0375, 0.0, 0.0])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_all_clients_and_one_epoch_it_is_sgd_on_all_data(make_ctx, make_algorithm, run_rounds, rounds):
    ctx = make_ctx("centralised", clients=4, lr=0.1, momentum=0.9, batch_size=10, tau=1, rounds=3)
    expected = sgd_on([range(4)] * rounds, ctx, lr=0.1, epochs=1, momentum=0.9)

    server = run_rounds(make_algorithm("centralised"), ctx, rounds).server

    torch.testing.assert_close(server["w"], expected, rtol=1e-5, atol=1e-6)


def test_a_round_sees_the_data_of_its_cohort_only(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("centralised", clients=4, f=0.5, lr=0.1, batch_size=10, tau=2)
    fedavg = make_algorithm("fedavg")
    cohorts = [fedavg.select({}, {}, Ctx(ctx.task, ctx.protocol, ctx.seed, number)).train for number in (1, 2)]
    expected = sgd_on(cohorts, ctx, lr=0.1, epochs=2)

    server = run_rounds(make_algorithm("centralised"), ctx, rounds=2).server

    assert [len(clients) for clients in cohorts] == [2, 2]
    torch.testing.assert_close(server["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 2 of 4 clients with 25 samples each: 50 samples are 5 batches of 10
        ({"local_unit": "epoch", "tau": 2}, 10),
        # 2 clients with 3 batches each
        ({"local_unit": "batch", "tau": 3}, 6),
    ],
    ids=["epochs", "batches"],
)
def test_a_round_has_as_many_steps_as_its_clients_would_make_in_all(
    make_ctx, make_algorithm, run_rounds, quadratic, settings, expected
):
    steps = quadratic(1.0, 0.0)
    ctx = make_ctx("centralised", clients=4, f=0.5, batch_size=10, **settings)

    run_rounds(make_algorithm("centralised"), ctx)

    assert len(steps) == expected


def test_nothing_is_sent(make_ctx, make_algorithm, begin_training):
    ctx = make_ctx("centralised")
    algorithm = make_algorithm("centralised")

    traffic = train_round(algorithm, begin_training(algorithm, ctx), ctx)

    assert (traffic.bytes_down, traffic.bytes_up, traffic.updates) == (0, 0, 1)


def test_there_is_no_averaging_to_extrapolate(make_ctx, make_algorithm, run_rounds):
    plain, beyond = make_ctx("centralised", lr=0.1), make_ctx("centralised", lr=0.1, beta=2.0)
    algorithm = make_algorithm("centralised")

    assert torch.equal(run_rounds(algorithm, beyond).server["w"], run_rounds(algorithm, plain).server["w"])


def test_the_server_keeps_the_optimisers_history_where_the_protocol_does(make_ctx, make_algorithm, run_rounds):
    settings = {"optimizer": "adam", "batch_size": 10, "tau": 2, "rounds": 2}
    keeping = make_ctx("centralised", optim_state="persistent", **settings)
    forgetful = make_ctx("centralised", optim_state="reset", **settings)
    algorithm = make_algorithm("centralised")

    kept, reset = (run_rounds(algorithm, ctx, rounds=2).server for ctx in (keeping, forgetful))

    # two rounds of two epochs of 50 samples in batches of 10
    assert kept["optimizer.step"].item() == 20
    assert set(reset) == {"w"}


def test_it_has_a_global_model_and_a_personal_one_when_clients_adapt_it(make_ctx, make_algorithm):
    ctx = make_ctx("centralised", client=0, lr=0.1)
    algorithm, data = make_algorithm("centralised"), ctx.task.train_data(0)
    server = algorithm.init_server(ctx)

    def personal(method, epochs):
        return make_algorithm(method).personal_model(server, {}, data, ctx, epochs)

    assert algorithm.global_model(server, {}, data, ctx) is server
    assert personal("centralised", None) is None
    assert torch.equal(personal("centralised", 5)["w"], personal("fedavg", 5)["w"])
