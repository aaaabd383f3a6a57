"""pFedMe by hand: theta's steps, the envelope's step of w, and what is left without the pull."""

import pytest
import torch

ZEROS = torch.zeros(6)


# --- by hand ---


def test_the_worked_example_of_one_batch_on_a_quadratic(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(1.0, 3.0)
    ctx = make_ctx("pfedme", client=0, lr=0.01, **tiny)
    algorithm = make_algorithm("pfedme", lam=15.0, personal_steps=5)

    message, memory = algorithm.update({"w": ZEROS + 1.0}, {}, ctx.task.train_data(0), ctx)

    # f = (theta-3)^2 / 2 with the pull to w = 1: five steps contract the distance to 1.125 by 1 - 0.01 (1 + 15) = 0.84,
    # theta = 1.125 - 0.125 * 0.84^5; then w = 1 + 0.01 * 15 (theta - 1)
    assert memory["w"].tolist() == pytest.approx([1.072724] * 6, abs=1e-6)
    assert message["w"].tolist() == pytest.approx([1.010909] * 6, abs=1e-6)


def test_many_steps_end_where_loss_and_pull_balance(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(1.0, 3.0)
    ctx = make_ctx("pfedme", client=0, lr=0.01, **tiny)
    algorithm = make_algorithm("pfedme", lam=15.0, personal_steps=200)

    _, memory = algorithm.update({"w": ZEROS + 1.0}, {}, ctx.task.train_data(0), ctx)

    # theta - 3 + 15 (theta - 1) = 0
    assert memory["w"].tolist() == pytest.approx([1.125] * 6, abs=1e-5)


def test_one_round_of_two_clients(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("pfedme", lr=0.1, **tiny)

    progress = run_rounds(make_algorithm("pfedme", lam=2.0, personal_steps=1), ctx, server={"w": ZEROS})

    # theta: one step of SGD from 0, where the pull vanishes, as for FedAvg
    assert progress.clients[0]["w"].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0.0, 0.0])
    assert progress.clients[1]["w"].tolist() == pytest.approx([0.05, -0.025, -0.05, 0.025, 0.0, 0.0])
    # w_i = 0.1 * 2 theta_i; their mean is 0.2 * 0.0375
    assert progress.server["w"].tolist() == pytest.approx([0.0075, -0.0075, -0.0075, 0.0075, 0.0, 0.0])


# --- special cases ---


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_without_pull_the_server_stands_still(make_ctx, make_algorithm, run_rounds, rounds):
    ctx = make_ctx("pfedme", lr=0.1, batch_size=10, tau=2)

    progress = run_rounds(make_algorithm("pfedme", lam=0.0), ctx, rounds)

    assert torch.equal(progress.server["w"], ctx.task.initial)
    assert not torch.equal(progress.clients[0]["w"], ctx.task.initial)


def test_without_pull_theta_is_local_sgd_over_all_batches(make_ctx, make_algorithm):
    ctx = make_ctx("pfedme", client=0, lr=0.1, momentum=0.9, batch_size=10, tau=2)
    data, down = ctx.task.train_data(0), {"w": ctx.task.initial}

    _, memory = make_algorithm("pfedme", lam=0.0, personal_steps=1).update(down, {}, data, ctx)
    message, _ = make_algorithm("fedavg").update(down, {}, data, ctx)

    # six batches: theta goes on from batch to batch
    assert torch.equal(memory["w"], message["w"])


def test_theta_starts_every_round_at_the_servers_model(make_ctx, make_algorithm):
    ctx = make_ctx("pfedme", client=0, lr=0.01)
    algorithm, data, down = make_algorithm("pfedme"), ctx.task.train_data(0), {"w": ctx.task.initial}

    _, fresh = algorithm.update(down, {}, data, ctx)
    _, again = algorithm.update(down, fresh, data, ctx)

    assert torch.equal(again["w"], fresh["w"])


def test_all_steps_of_theta_are_on_the_same_batch(make_ctx, make_algorithm, monkeypatch):
    seen = []
    monkeypatch.setattr("fedbench.algorithms.pfedme.backward", lambda net, x, y: seen.append(x))
    ctx = make_ctx("pfedme", client=0, batch_size=10, local_unit="batch", tau=2)

    make_algorithm("pfedme", personal_steps=3).update({"w": ctx.task.initial}, {}, ctx.task.train_data(0), ctx)

    assert [x is seen[0] for x in seen] == [True] * 3 + [False] * 3
    assert [x is seen[3] for x in seen] == [False] * 3 + [True] * 3


# --- options ---


def test_by_default_all_clients_train_and_only_some_report(make_ctx, make_algorithm, run_rounds):
    everyone = make_ctx("pfedme", clients=4, f=0.5)
    sampled = make_ctx("pfedme", clients=4, f=0.5, train_all=False)

    assert len(run_rounds(make_algorithm("pfedme"), everyone).clients) == 4
    assert len(run_rounds(make_algorithm("pfedme"), sampled).clients) == 2


def test_mu_shrinks_theta(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(0.0, 0.0)
    ctx = make_ctx("pfedme", client=0, lr=0.1, **tiny)
    algorithm = make_algorithm("pfedme", lam=0.0, mu=0.5, personal_steps=2)

    _, memory = algorithm.update({"w": ZEROS + 1.0}, {}, ctx.task.train_data(0), ctx)

    # no loss, no pull: two steps of factor 1 - 0.1 * 0.5
    assert memory["w"].tolist() == pytest.approx([0.95**2] * 6)


def test_the_rate_of_w_is_lr_unless_given(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("pfedme", client=0, lr=0.01, rounds=1, lr_decay=0.5, **tiny)
    data, down = ctx.task.train_data(0), {"w": ZEROS}

    default, theta = make_algorithm("pfedme").update(down, {}, data, ctx)
    given, same_theta = make_algorithm("pfedme", lr_global=0.005).update(down, {}, data, ctx)

    # the rate of a single round has dropped twice, to 0.0025: w = 0.0025 * 15 theta; then 0.005 * 15 theta
    torch.testing.assert_close(default["w"], 0.0375 * theta["w"])
    torch.testing.assert_close(given["w"], 0.075 * theta["w"])
    assert torch.equal(same_theta["w"], theta["w"])


def test_theta_keeps_its_moments_where_the_protocol_does(make_ctx, make_algorithm):
    ctx = make_ctx("pfedme", client=0, optimizer="adam", lr=0.001, optim_state="persistent")
    algorithm, memory = make_algorithm("pfedme"), {}

    for _ in range(2):
        _, memory = algorithm.update({"w": ctx.task.initial}, memory, ctx.task.train_data(0), ctx)

    # two rounds of one batch with five steps
    assert memory["optimizer.step"].item() == 10


# --- what is deployed ---


def test_the_personal_model_is_theta_and_the_global_one_is_w(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("pfedme", client=0)
    algorithm, data = make_algorithm("pfedme"), ctx.task.train_data(0)
    progress = run_rounds(algorithm, ctx)
    memory = progress.clients[0]

    assert algorithm.personal_model(progress.server, memory, data, ctx, None) is memory
    assert algorithm.global_model(progress.server, memory, data, ctx) is progress.server


def test_a_client_that_never_trained_deploys_the_servers_model(make_ctx, make_algorithm):
    ctx = make_ctx("pfedme", client=0)
    algorithm, server = make_algorithm("pfedme"), {"w": ctx.task.initial + 1.0}

    assert algorithm.personal_model(server, algorithm.init_client(ctx), ctx.task.train_data(0), ctx, None) is server


@pytest.mark.parametrize(
    ("memory", "start"), [({"w": ZEROS + 2.0}, 2.0), ({}, 1.0)], ids=["from theta", "a newcomer, from the server's"]
)
def test_adaptation_trains_theta_on_with_the_servers_model_as_w(
    make_ctx, make_algorithm, tiny, quadratic, memory, start
):
    quadratic(1.0, 3.0)
    ctx = make_ctx("pfedme", client=0, lr=0.5, adapt_lr=0.01, **tiny)

    personal = make_algorithm("pfedme").personal_model({"w": ZEROS + 1.0}, memory, ctx.task.train_data(0), ctx, 2)

    # two epochs of one batch with five steps: the distance to 1.125 shrinks by 0.84^10
    assert personal["w"].tolist() == pytest.approx([1.125 + (start - 1.125) * 0.84**10] * 6, abs=1e-5)


def test_where_the_head_was_frozen_adaptation_trains_it_too(make_ctx, make_algorithm):
    ctx = make_ctx("pfedme", client=0, train_part="body", lr=0.01)
    algorithm, server, net = make_algorithm("pfedme"), {"w": ctx.task.initial}, ctx.task.net
    frozen = net.extended(ctx.task.initial)[net.head]

    personal = algorithm.personal_model(server, {}, ctx.task.train_data(0), ctx, 1)

    assert personal["w"].shape == net.flat.shape
    assert not torch.equal(personal["w"][net.head], frozen)
