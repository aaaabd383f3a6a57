"""SCAFFOLD by hand: the correction, the control variates, and the cases in which they change nothing."""

import pytest
import torch

from fedbench.algorithm import Upload
from fedbench.errors import FedbenchError

ZEROS = torch.zeros(6)
GRADIENT_0 = [-0.25, 0.5, 0.25, -0.5, 0.0, 0.0]
"""Of client 0 at w = 0, where both classes have probability 1/2: see test_fedavg.py."""
GRADIENT_1 = [-0.5, 0.25, 0.5, -0.25, 0.0, 0.0]
"""Of client 1: ((-1/2) (2, 0) + (1/2) (0, 1)) / 2 for class 0."""


def server_of(value=0.0, c=0.0):
    return {"w": ZEROS + value, "c": ZEROS + c}


# --- by hand ---


def test_the_worked_example_of_two_steps_on_a_quadratic(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(1.0, 2.0)
    ctx = make_ctx("scaffold", client=0, lr=0.1, tau=2, **tiny)

    message, memory = make_algorithm("scaffold").update(server_of(), {"c": ZEROS}, ctx.task.train_data(0), ctx)

    # f = (y-2)^2 / 2 from 0: gradients -2 and -1.8, so y = 0.2 + 0.18; c_i is their mean
    assert message["w"].tolist() == pytest.approx([0.38] * 6)
    assert memory["c"].tolist() == pytest.approx([-1.9] * 6)
    assert message["c"].tolist() == pytest.approx([-1.9] * 6)


def test_one_round_of_two_clients(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("scaffold", lr=0.1, **tiny)

    progress = run_rounds(make_algorithm("scaffold"), ctx, server=server_of())

    # one step each: c_i is the client's gradient, x the mean of -0.1 times the gradients, c the mean of the gradients
    assert progress.clients[0]["c"].tolist() == pytest.approx(GRADIENT_0)
    assert progress.clients[1]["c"].tolist() == pytest.approx(GRADIENT_1)
    assert progress.server["w"].tolist() == pytest.approx([0.0375, -0.0375, -0.0375, 0.0375, 0.0, 0.0])
    assert progress.server["c"].tolist() == pytest.approx([-0.375, 0.375, 0.375, -0.375, 0.0, 0.0])


def test_a_step_is_corrected_by_c_minus_c_i(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("scaffold", client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("scaffold").update(
        server_of(c=0.3), {"c": ZEROS + 0.1}, ctx.task.train_data(0), ctx
    )

    # y - x = -0.1 (gradient + 0.3 - 0.1)
    assert message["w"].tolist() == pytest.approx([0.005, -0.07, -0.045, 0.03, -0.02, -0.02])
    # c_i+ = 0.1 - 0.3 + (gradient + 0.2): after one step it is the gradient, whatever was before
    assert memory["c"].tolist() == pytest.approx(GRADIENT_0, abs=1e-6)
    assert message["c"].tolist() == pytest.approx([value - 0.1 for value in GRADIENT_0], abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"tau": 2, "batch_size": 10},  # 25 samples: 3 + 3 steps
        {"tau": 4, "batch_size": 10, "local_unit": "batch"},
        {"tau": 2, "batch_size": 10, "rounds": 1, "lr_decay": 0.5},  # a single round lies after both drops
    ],
    ids=["epochs", "batches", "decayed rate"],
)
def test_c_i_is_the_mean_gradient_over_the_steps_that_were_made(make_ctx, make_algorithm, monkeypatch, settings):
    monkeypatch.setattr("fedbench.training.backward", lambda net, x, y: net.grad.fill_(1.0))
    ctx = make_ctx("scaffold", client=0, lr=0.1, **settings)
    algorithm = make_algorithm("scaffold")

    _, memory = algorithm.update(algorithm.init_server(ctx), algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    torch.testing.assert_close(memory["c"], torch.ones_like(memory["c"]), rtol=0, atol=1e-4)


# --- special cases ---


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_one_client_it_is_fedavg(make_ctx, make_algorithm, run_rounds, rounds):
    ctx = make_ctx(clients=1, lr=0.1, batch_size=10, tau=2, rounds=3, lr_decay=0.5)

    scaffold = run_rounds(make_algorithm("scaffold"), ctx, rounds)
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds).server

    # c_i and c are the same bits, so that the correction is 0; x + (y - x) is y up to rounding
    assert torch.equal(scaffold.server["c"], scaffold.clients[0]["c"])
    torch.testing.assert_close(scaffold.server["w"], fedavg["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", [1.0, 0.5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_c_is_the_mean_of_all_clients_c_i_after_every_round(make_ctx, make_algorithm, run_rounds, f, rounds):
    ctx = make_ctx("scaffold", clients=4, f=f, lr=0.1, batch_size=10)

    progress = run_rounds(make_algorithm("scaffold"), ctx, rounds)

    # those that have not taken part yet are at 0
    mean = torch.stack([progress.clients[client]["c"] for client in range(4)]).mean(0)
    torch.testing.assert_close(progress.server["c"], mean, rtol=1e-4, atol=1e-6)
    assert progress.server["c"].abs().max() > 0


def test_two_clients_with_the_same_data_are_fedavg(make_ctx, make_algorithm, run_rounds, add_dataset):
    image = torch.tensor([[1, 0], [0, 2]]).repeat_interleave(4, dim=0).view(8, 1, 1, 2)
    add_dataset("same", image, [0] * 4 + [1] * 4, per_class=(1, 1), full_scale=1)
    settings = {"dataset": "same", "normalize": "none", "model": "logreg", "labels_per_client": 2, "batch_size": 2}
    ctx = make_ctx(lr=0.5, tau=3, **settings)

    scaffold = run_rounds(make_algorithm("scaffold"), ctx, rounds=3).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    # full batches: equal clients have no drift to correct
    torch.testing.assert_close(scaffold["w"], fedavg["w"], rtol=1e-5, atol=1e-6)


# --- the server ---


def two_uploads(n=(1, 1)):
    values = (1.0, 3.0)
    return [Upload(i, n[i], {"w": ZEROS + values[i], "c": ZEROS + 10 * values[i]}) for i in (0, 1)]


def test_the_server_divides_c_by_all_clients_and_x_by_those_that_report(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("scaffold", **tiny)

    merged = make_algorithm("scaffold").aggregate(server_of(5.0, c=1.0), two_uploads()[1:], ctx)

    # x = 5 + 3 / 1; c = 1 + 30 / 2
    assert merged["w"].tolist() == [8.0] * 6
    assert merged["c"].tolist() == [16.0] * 6


def test_newcomers_do_not_count_among_all_clients(make_ctx, make_algorithm):
    ctx = make_ctx("scaffold", clients=3, newcomers=1)
    zeros = torch.zeros_like(ctx.task.initial)

    merged = make_algorithm("scaffold").aggregate(
        {"w": zeros, "c": zeros}, [Upload(1, 1, {"w": zeros, "c": zeros + 4.0})], ctx
    )

    assert merged["c"].unique().tolist() == [2.0]


def test_beta_is_the_rate_of_the_server(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("scaffold", beta=0.5, **tiny)

    merged = make_algorithm("scaffold").aggregate(server_of(5.0), two_uploads(), ctx)

    # x = 5 + 0.5 (1 + 3) / 2; c = (10 + 30) / 2 whatever the rate
    assert merged["w"].tolist() == [6.0] * 6
    assert merged["c"].tolist() == [20.0] * 6


@pytest.mark.parametrize(("settings", "expected"), [({}, 2.0), ({"weighting": "samples"}, 2.5)])
def test_clients_weigh_the_same_unless_the_protocol_says_otherwise(make_ctx, make_algorithm, tiny, settings, expected):
    ctx = make_ctx("scaffold", **settings, **tiny)

    merged = make_algorithm("scaffold").aggregate(server_of(), two_uploads(n=(1, 3)), ctx)

    # (1 + 3) / 2, or (1 * 1 + 3 * 3) / 4; control variates have no weights
    assert merged["w"].tolist() == [expected] * 6
    assert merged["c"].tolist() == [20.0] * 6


# --- options and limits ---


def test_clip_bounds_the_gradient_and_not_the_correction(make_ctx, make_algorithm, tiny, quadratic):
    quadratic(1.0, 2.0)
    ctx = make_ctx("scaffold", client=0, lr=0.1, **tiny)

    message, memory = make_algorithm("scaffold", clip=0.6**0.5).update(
        server_of(c=1.0), {"c": ZEROS}, ctx.task.train_data(0), ctx
    )

    # the gradient (-2, ..., -2) has the norm sqrt(24); clipped to sqrt(0.6) it is (-sqrt(0.1), ...) = -0.316228
    assert message["w"].tolist() == pytest.approx([-0.1 * (1 - 0.316228)] * 6, abs=1e-6)
    assert memory["c"].tolist() == pytest.approx([-0.316228] * 6, abs=1e-5)


def test_a_gradient_within_the_bound_is_left_alone(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("scaffold", lr=0.1)

    free = run_rounds(make_algorithm("scaffold"), ctx, rounds=2).server
    bounded = run_rounds(make_algorithm("scaffold", clip=1e6), ctx, rounds=2).server

    assert torch.equal(bounded["w"], free["w"])


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=["momentum", "adam"])
def test_it_refuses_to_begin_without_plain_sgd(make_ctx, make_algorithm, settings):
    with pytest.raises(FedbenchError, match="needs plain SGD"):
        make_algorithm("scaffold").init_server(make_ctx("scaffold", **settings))


def test_it_refuses_to_begin_with_running_statistics(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("scaffold", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("scaffold").init_server(ctx)


# --- what is deployed ---


def test_its_model_is_fine_tuned_like_that_of_fedavg(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("scaffold", client=0, lr=0.1)
    server, data = run_rounds(make_algorithm("scaffold"), ctx).server, ctx.task.train_data(0)

    def personal(method, epochs):
        return make_algorithm(method).personal_model(server, {}, data, ctx, epochs)

    assert personal("scaffold", None) is None
    assert torch.equal(personal("scaffold", 0)["w"], server["w"])
    assert torch.equal(personal("scaffold", 2)["w"], personal("fedavg", 2)["w"])
