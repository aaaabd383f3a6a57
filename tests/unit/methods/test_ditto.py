"""Ditto by hand: the personal model's pull, and the cases in which both models are simpler methods'."""

import pytest
import torch

from fedbench.training import backward, local_batches

ZEROS = torch.zeros(6)


# --- by hand ---


def test_both_models_take_one_step(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("ditto", client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("ditto", lam=0.5).update(
        {"w": ZEROS + 0.1}, {"w": ZEROS}, ctx.task.train_data(0), ctx
    )

    # equal weights give both classes probability 1/2, at 0.1 as at 0: the gradient is (-0.25, 0.5, 0.25, -0.5, 0, 0).
    # w = 0.1 - 0.1 gradient
    assert message["w"].tolist() == pytest.approx([0.125, 0.05, 0.075, 0.15, 0.1, 0.1])
    # v = 0 - 0.1 (gradient + 0.5 (0 - 0.1)) = -0.1 gradient + 0.005
    assert memory["w"].tolist() == pytest.approx([0.03, -0.045, -0.02, 0.055, 0.005, 0.005])


def test_a_rate_of_one_over_lambda_puts_v_one_gradient_step_from_w(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("ditto", client=0, lr=0.1, **tiny)

    _, memory = make_algorithm("ditto", lam=10.0).update(
        {"w": ZEROS + 0.1}, {"w": ZEROS + 5.0}, ctx.task.train_data(0), ctx
    )

    # v - 0.1 gradient - 0.1 * 10 (v - w) = w - 0.1 gradient
    assert memory["w"].tolist() == pytest.approx([0.125, 0.05, 0.075, 0.15, 0.1, 0.1], abs=1e-6)


def test_v_is_pulled_to_the_download_and_not_to_the_model_in_training(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(2.0, 3.0)
    ctx = make_ctx("ditto", client=0, lr=0.1, tau=100, **tiny)

    message, memory = make_algorithm("ditto", lam=1.0).update(
        {"w": ZEROS + 1.5}, {"w": ZEROS}, ctx.task.train_data(0), ctx
    )

    # w ends at the client's optimum 3, v at (a c + lambda w_t) / (a + lambda) = (6 + 1.5) / 3
    assert message["w"].tolist() == pytest.approx([3.0] * 6, abs=1e-5)
    assert memory["w"].tolist() == pytest.approx([2.5] * 6, abs=1e-5)


def test_a_round_is_the_steps_in_turn_on_the_same_batches(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", client=0, lr=0.1, batch_size=10, tau=2)
    net, data, start = ctx.task.net, ctx.task.train_data(0), ctx.task.initial
    w, v = start.clone(), 0.5 * start
    for x, y in local_batches(data, ctx):
        for model, lam in ((w, 0.0), (v, 0.75)):
            net.load(model)
            backward(net, x, y)
            model.sub_(0.1 * (net.grad + lam * (model - start)))

    message, memory = make_algorithm("ditto", lam=0.75).update({"w": start}, {"w": 0.5 * start}, data, ctx)

    torch.testing.assert_close(message["w"], w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(memory["w"], v, rtol=1e-5, atol=1e-6)


# --- special cases ---


@pytest.mark.parametrize("settings", [{}, {"optim_state": "persistent"}], ids=["reset", "persistent"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_lambda_zero_v_is_local_training(make_ctx, make_algorithm, run_rounds, rounds, settings):
    ctx = make_ctx("ditto", clients=2, lr=0.1, momentum=0.9, batch_size=10, tau=2, rounds=3, lr_decay=0.5, **settings)

    ditto = run_rounds(make_algorithm("ditto", lam=0.0), ctx, rounds)
    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds)

    for client in (0, 1):
        assert torch.equal(ditto.clients[client]["w"], local.clients[client]["w"])


@pytest.mark.parametrize("settings", [{}, {"optim_state": "persistent"}], ids=["reset", "persistent"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_server_is_that_of_fedavg(make_ctx, make_algorithm, run_rounds, rounds, settings):
    ctx = make_ctx("ditto", clients=4, f=0.5, lr=0.1, momentum=0.9, batch_size=10, **settings)

    ditto = run_rounds(make_algorithm("ditto"), ctx, rounds).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds).server

    assert torch.equal(ditto["w"], fedavg["w"])


# --- what a client keeps and deploys ---


def test_v_goes_on_from_round_to_round(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", client=0, lr=0.1)
    algorithm, data, down = make_algorithm("ditto"), ctx.task.train_data(0), {"w": ctx.task.initial}

    _, first = algorithm.update(down, {}, data, ctx)
    _, second = algorithm.update(down, first, data, ctx)

    assert not torch.equal(second["w"], first["w"])
    assert algorithm.personal_model(down, first, data, ctx, None)["w"] is first["w"]


def test_a_larger_lambda_keeps_v_nearer_to_the_server(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", client=0, lr=0.1, tau=20)
    start, data = ctx.task.initial, ctx.task.train_data(0)

    memories = [
        make_algorithm("ditto", lam=lam).update({"w": start}, {}, data, ctx)[1] for lam in (0.0, 0.25, 1.0, 5.0)
    ]

    distances = [(memory["w"] - start).norm().item() for memory in memories]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5 * distances[0]


def test_both_optimisers_keep_their_moments_where_the_protocol_does(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", client=0, momentum=0.9, optim_state="persistent", lr=0.1)

    _, memory = make_algorithm("ditto").update({"w": ctx.task.initial}, {}, ctx.task.train_data(0), ctx)

    assert set(memory) == {"w", "optimizer.momentum_buffer", "own.momentum_buffer"}


def test_before_its_first_round_a_clients_v_is_the_initial_network(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", client=0)
    algorithm = make_algorithm("ditto")

    personal = algorithm.personal_model({"w": ctx.task.initial + 1.0}, {}, ctx.task.train_data(0), ctx, None)

    assert torch.equal(personal["w"], ctx.task.initial)


def test_a_newcomer_starts_from_the_servers_model(make_ctx, make_algorithm):
    ctx = make_ctx("ditto", clients=3, newcomers=1, client=0, lr=0.1)
    algorithm, data, server = make_algorithm("ditto", lam=0.0), ctx.task.train_data(0), {"w": ctx.task.initial * 0.5}

    adapted = algorithm.personal_model(server, algorithm.init_client(ctx), data, ctx, 0)
    message, memory = algorithm.update(server, algorithm.init_client(ctx), data, ctx)

    assert torch.equal(adapted["w"], server["w"])
    # without pull v is trained from where w is
    assert torch.equal(memory["w"], message["w"])


def test_adaptation_trains_v_on_near_the_servers_model(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(2.0, 3.0)
    ctx = make_ctx("ditto", client=0, lr=0.5, adapt_lr=0.1, **tiny)

    personal = make_algorithm("ditto", lam=1.0).personal_model(
        {"w": ZEROS + 1.5}, {"w": ZEROS}, ctx.task.train_data(0), ctx, 2
    )

    # two steps: the distance to (6 + 1.5) / 3 = 2.5 shrinks by 1 - 0.1 (2 + 1) = 0.7 each
    assert personal["w"].tolist() == pytest.approx([2.5 - 2.5 * 0.49] * 6, abs=1e-5)
