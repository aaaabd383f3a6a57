"""Local: every client on its own, for as many rounds as its budget says."""

import pytest
import torch

from fedbench.algorithm import Ctx


def test_one_client_takes_one_gradient_step_from_its_own_model(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("local", client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("local").update({}, {"w": torch.zeros(6)}, ctx.task.train_data(0), ctx)

    # the gradient at 0 is (-0.25, 0.5, 0.25, -0.5, 0, 0), as for FedAvg
    assert message == {}
    assert memory["w"].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0.0, 0.0])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "optim_state": "persistent"}], ids=["reset", "persistent"])
def test_it_is_fedavg_with_a_single_client(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("local", clients=1, lr=0.1, batch_size=10, tau=2, rounds=3, lr_decay=0.5, **settings)

    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds=3).clients[0]
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    assert torch.equal(local["w"], fedavg["w"])


def test_a_client_does_not_depend_on_the_others(make_ctx, make_algorithm, run_rounds):
    # with `labels: block` the first client has the same images whether it has company or not
    alone, in_company = make_ctx("local", clients=1, lr=0.1), make_ctx("local", clients=4, lr=0.1)
    algorithm = make_algorithm("local", budget="full")

    one = run_rounds(algorithm, alone, rounds=2).clients[0]
    other = run_rounds(algorithm, in_company, rounds=2).clients[0]

    assert torch.equal(one["w"], other["w"])


@pytest.mark.parametrize(
    ("budget", "f", "rounds", "expected"),
    [
        ("expected", 0.1, 100, 10),  # round(f T)
        ("expected", 0.25, 10, 2),  # round(2.5), to the even number
        ("expected", 0.01, 10, 1),  # at least one
        ("expected", 1.0, 10, 10),
        ("full", 0.1, 100, 100),
        ("one_round", 0.1, 100, 1),
    ],
)
def test_the_budget_says_in_how_many_rounds_clients_train(make_ctx, make_algorithm, budget, f, rounds, expected):
    ctx = make_ctx("local", f=f, rounds=rounds)
    algorithm = make_algorithm("local", budget=budget)

    cohorts = [
        algorithm.select({}, {}, Ctx(ctx.task, ctx.protocol, ctx.seed, number)) for number in range(1, rounds + 1)
    ]

    # all clients in the first rounds, nobody later; nobody ever reports
    assert [cohort.train for cohort in cohorts] == [(0, 1)] * expected + [()] * (rounds - expected)
    assert {cohort.report for cohort in cohorts} == {()}


def test_models_stand_still_once_the_budget_is_spent(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("local", rounds=3, lr=0.1)
    algorithm = make_algorithm("local", budget="one_round")

    after_one, after_three = (run_rounds(algorithm, ctx, rounds=n).clients[0] for n in (1, 3))

    assert torch.equal(after_one["w"], after_three["w"])
    assert not torch.equal(after_one["w"], ctx.task.initial)


def test_every_client_starts_from_the_common_initial_network(make_ctx, make_algorithm):
    ctx = make_ctx("local")

    for client in (0, 1):
        assert torch.equal(make_algorithm("local").init_client(ctx.at(client))["w"], ctx.task.initial)


def test_it_has_personal_models_and_no_global_one(make_ctx, make_algorithm):
    ctx = make_ctx("local", client=0)
    algorithm, memory = make_algorithm("local"), {"w": ctx.task.initial}

    assert algorithm.global_model({}, memory, ctx.task.train_data(0), ctx) is None
    assert algorithm.personal_model({}, memory, ctx.task.train_data(0), ctx, None) is memory
