"""FedProx by hand: the proximal gradient, and what it becomes without it or with nothing else."""

import pytest
import torch

ZEROS = torch.zeros(6)


def test_with_mu_zero_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx(clients=4, f=0.5, lr=0.1, momentum=0.9, tau=2, batch_size=10)

    fedprox = run_rounds(make_algorithm("fedprox", mu=0.0), ctx, rounds=3).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    assert torch.equal(fedprox["w"], fedavg["w"])


def test_the_first_step_is_that_of_fedavg(make_ctx, make_algorithm, tiny):
    ctx = make_ctx(client=0, lr=0.1, **tiny)

    message, _ = make_algorithm("fedprox", mu=1.0).update({"w": ZEROS}, {}, ctx.task.train_data(0), ctx)

    # there w is the server's model, and the proximal gradient vanishes: -0.1 (-0.25, 0.5, 0.25, -0.5, 0, 0)
    assert message["w"].tolist() == pytest.approx([0.025, -0.05, -0.025, 0.05, 0.0, 0.0])


def test_the_second_step_is_pulled_back_to_the_servers_model(make_ctx, make_algorithm, tiny):
    ctx = make_ctx(client=0, lr=0.1, tau=2, **tiny)
    data = ctx.task.train_data(0)

    fedprox, _ = make_algorithm("fedprox", mu=1.0).update({"w": ZEROS}, {}, data, ctx)
    fedavg, _ = make_algorithm("fedavg").update({"w": ZEROS}, {}, data, ctx)

    # the same gradient of the loss at w1 = (0.025, -0.05, -0.025, 0.05, 0, 0), and -lr mu (w1 - 0) = -0.1 w1
    pulled = (fedprox["w"] - fedavg["w"]).tolist()
    assert pulled == pytest.approx([-0.0025, 0.005, 0.0025, -0.005, 0.0, 0.0], abs=1e-7)


def test_the_pull_is_towards_the_download_and_not_towards_zero(make_ctx, make_algorithm, tiny):
    ctx = make_ctx(client=0, lr=0.1, tau=50, **tiny)
    anchor = torch.tensor([3.0, 3.0, -3.0, -3.0, 1.0, -1.0])

    message, _ = make_algorithm("fedprox", mu=10.0).update({"w": anchor}, {}, ctx.task.train_data(0), ctx)

    # the loss pulls with at most 1 per weight, the proximal term with 10 per unit of distance
    assert (message["w"] - anchor).abs().max() < 0.1


def test_a_quadratic_client_ends_at_the_weighted_mean_of_its_optimum_and_the_server(
    make_ctx, make_algorithm, tiny, monkeypatch
):
    # f(w) = (a/2) (w - c)^2 with a = 2, c = 3, in place of the cross-entropy
    def quadratic(net, x, y):
        net.grad.copy_(2.0 * (net.vector - 3.0))

    monkeypatch.setattr("fedbench.training.backward", quadratic)
    ctx = make_ctx(client=0, lr=0.1, tau=100, **tiny)

    message, _ = make_algorithm("fedprox", mu=1.0).update({"w": ZEROS + 1.5}, {}, ctx.task.train_data(0), ctx)

    # (a c + mu w_t) / (a + mu) = (6 + 1.5) / 3
    assert message["w"].tolist() == pytest.approx([2.5] * 6, abs=1e-5)


def test_a_larger_mu_keeps_clients_nearer_to_the_server(make_ctx, make_algorithm):
    ctx = make_ctx(client=0, lr=0.1, tau=20)

    distances = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        message, _ = make_algorithm("fedprox", mu=mu).update(
            {"w": ctx.task.initial}, {}, ctx.task.train_data(0), ctx.at(0)
        )
        distances.append((message["w"] - ctx.task.initial).norm().item())

    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5 * distances[0]


def test_the_proximal_term_covers_the_trained_part_only(make_ctx, make_algorithm):
    ctx = make_ctx(client=0, train_part="body", lr=0.1, tau=3)
    head = ctx.task.net.flat[ctx.task.net.head].clone()

    make_algorithm("fedprox", mu=1.0).update({"w": ctx.task.initial}, {}, ctx.task.train_data(0), ctx)

    assert torch.equal(ctx.task.net.flat[ctx.task.net.head], head)
