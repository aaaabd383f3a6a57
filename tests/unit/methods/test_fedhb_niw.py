"""FedHB-NIW: the worked values of its closed forms, its client's gradient, and the FedProx that it contains."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fedbench.algorithm import Upload
from fedbench.algorithms.fedhb_niw import Niw, proximal_pull, shrunk_mean, spread, student_t
from fedbench.errors import FedbenchError
from fedbench.simulation import Surroundings, simulate

WORKED = Niw(clients=2, samples=100, dim=1)
CLIENTS = torch.tensor([1.0, 3.0], dtype=torch.float64)


def server_of(clients, keep, eps=0.0):
    """m_0 and S of one coordinate."""
    mean, second, n = clients.mean(), clients.square().mean(), len(clients)
    m0 = shrunk_mean(mean, n, keep)
    return m0, spread(m0, mean, second, n, keep, eps)


def random_vector(seed, d=6):
    return 0.5 * torch.randn(d, generator=torch.Generator().manual_seed(seed))


def upload(client, m, n=2):
    return Upload(client, n, {"w": torch.as_tensor(m)})


# --- worked values: d = 1, N = 2, m = (1, 3), |D| = 100 ---


def test_the_posterior_of_two_clients():
    m0, s = server_of(CLIENTS, keep=1.0)

    assert WORKED.n0 == 103
    assert m0.item() == pytest.approx(4 / 3)
    # 1 + (4/3)^2 + (1 - 4/3)^2 + (3 - 4/3)^2 = 1 + 16/9 + 1/9 + 25/9
    assert s.item() == pytest.approx(5.666667, abs=1e-6)
    # 103 / (2 + 1 + 2) times that
    assert WORKED.v0(s).item() == pytest.approx(116.733333, abs=1e-6)


def test_the_penalty_of_a_client():
    m0, s = server_of(CLIENTS, keep=1.0)

    c = WORKED.penalty(s, 1.0)

    # (103 + 1 + 1) / 116.733333, the inverse of the mode's variance 1.111746
    assert c.item() == pytest.approx(0.899486, abs=1e-6)
    assert 1 / c.item() == pytest.approx(1.111746, abs=1e-6)
    assert (c / 2 * (2 - m0) ** 2).item() == pytest.approx(0.199886, abs=1e-6)


def test_the_predictive_student_t():
    _, s = server_of(CLIENTS, keep=1.0)

    assert WORKED.df == 103
    # (102 / 101) 116.733333 / 103
    assert WORKED.t_scale(s).item() == pytest.approx(1.144554, abs=1e-6)


def test_the_posterior_when_columns_are_dropped():
    m0, s = server_of(CLIENTS, keep=0.9)

    assert m0.item() == pytest.approx(1.2)  # 0.9 / 3 * 4
    # rho = 0.9 (1 - 1.2)^2 + 0.1 * 1.44 = 0.18 and 0.9 (3 - 1.2)^2 + 0.144 = 3.06; S = 1 + 1.44 + 3.24
    assert s.item() == pytest.approx(5.68)
    assert WORKED.v0(s).item() == pytest.approx(117.008)


def test_spikes_of_width_eps_add_to_the_spread():
    _, narrow = server_of(CLIENTS, keep=0.9)
    _, wide = server_of(CLIENTS, keep=0.9, eps=0.5)

    assert (wide - narrow).item() == pytest.approx(2 * 0.25)


def test_the_spread_is_at_least_one_wherever_the_clients_are():
    generator = torch.Generator().manual_seed(0)
    clients = 100 * torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    m0 = 100 * torch.randn(1000, generator=generator, dtype=torch.float64)

    for keep in (0.01, 0.5, 1.0):
        assert spread(m0, clients.mean(0), clients.square().mean(0), 3, keep, 0.0).min() >= 1


def test_read_by_coordinate_the_penalty_is_that_of_a_normal_fedprox():
    # MobileNet's body on CIFAR-100: |D| = 50,000, N = 100, n_i = 500, S = 1
    paper, coordinate = Niw(100, 50_000, 3_206_976), Niw(100, 50_000, 1)
    one = torch.ones((), dtype=torch.float64)

    assert (paper.penalty(one, 1.0) / 500).item() == pytest.approx(12_730, rel=1e-3)
    assert (coordinate.penalty(one, 1.0) / 500).item() == pytest.approx(0.206, rel=1e-3)
    assert paper.t_scale(one).sqrt().item() == pytest.approx(0.0045, rel=1e-2)
    assert coordinate.t_scale(one).sqrt().item() == pytest.approx(0.0985, rel=1e-2)


# --- server ---


def test_the_server_computes_the_worked_values(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_niw", **tiny)
    algorithm = make_algorithm("fedhb_niw", p=0.9, eps=0.0)

    merged = algorithm.aggregate({"w": torch.zeros(6)}, [upload(0, [1.0] * 6), upload(1, [3.0] * 6)], ctx)

    assert merged["w"].tolist() == pytest.approx([1.2] * 6)
    assert merged["spread"].tolist() == pytest.approx([5.68] * 6)


def test_a_part_of_the_clients_stands_for_all(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", clients=4)
    algorithm, zeros = make_algorithm("fedhb_niw", p=0.9), {"w": torch.zeros(6)}
    pair = [random_vector(1), random_vector(2)]

    part = algorithm.aggregate(zeros, [upload(0, pair[0]), upload(1, pair[1])], ctx)
    whole = algorithm.aggregate(zeros, [upload(client, pair[client % 2]) for client in range(4)], ctx)

    for key in ("w", "spread"):
        torch.testing.assert_close(part[key], whole[key])


def test_without_shrinkage_the_server_takes_the_average(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_niw", **tiny)
    algorithm = make_algorithm("fedhb_niw", shrink=False)

    merged = algorithm.aggregate({"w": torch.zeros(6)}, [upload(0, [1.0] * 6), upload(1, [3.0] * 6)], ctx)

    assert merged["w"].tolist() == pytest.approx([2.0] * 6)


def test_the_first_spread_is_that_of_clients_at_the_start(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", clients=4)
    w = ctx.task.initial

    server = make_algorithm("fedhb_niw", p=0.9, eps=0.1).init_server(ctx)

    assert torch.equal(server["w"], w)
    # 1 + N eps^2 + m_0^2 (1 + N (1 - p))
    torch.testing.assert_close(server["spread"], 1 + 4 * 0.01 + w**2 * (1 + 4 * 0.1))


def test_its_rate_and_weights_are_those_of_its_paper(make_job):
    protocol = make_job("fedhb_niw").protocol

    assert (protocol.lr, protocol.momentum, protocol.weighting) == (0.1, 0.9, "uniform")


def test_running_statistics_are_refused(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("fedhb_niw", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("fedhb_niw").init_server(ctx)


# --- client ---


def test_its_explicit_step_is_autograd_on_the_printed_objective(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_niw", client=0, lr=0.1, momentum=0.0, tau=3, **tiny)
    data, down = ctx.task.train_data(0), {"w": random_vector(1), "spread": 1 + random_vector(2).abs()}
    # |D| = 4 samples, N = 2, d = 6: n_0 = 12, V_0 = 12/10 S, penalty (p/2) (12 + 6 + 1) (m - m_0)^2 / V_0, n_i = 2
    m0, v0 = down["w"].double(), 1.2 * down["spread"].double()
    draws, expected = ctx.rng("columns"), m0.clone()
    for x, y in data.batches(2, ctx.rng("batches"), epochs=3):
        keep = (torch.rand(3, generator=draws) < 0.5).double()
        m = expected.clone().requires_grad_()
        weights = m[:4].view(2, 2) * keep[1:]  # a column is what one pixel is multiplied by
        loss = cross_entropy(linear(x.double().flatten(1), weights, m[4:]), y)
        objective = loss + (0.5 / 2) * 19 * ((m - m0) ** 2 / v0).sum() / 2
        expected -= 0.1 * torch.autograd.grad(objective, m)[0]

    algorithm = make_algorithm("fedhb_niw", p=0.5, penalty_dim="paper", update="explicit")
    message, _ = algorithm.update(down, {}, data, ctx)

    torch.testing.assert_close(message["w"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_dropping_and_with_one_variance_it_is_fedprox(make_ctx, make_algorithm, momentum):
    ctx = make_ctx("fedhb_niw", client=0, lr=0.1, momentum=momentum, tau=5)
    data, w = ctx.task.train_data(0), ctx.task.initial
    d, samples = w.numel(), sum(ctx.sizes)
    alpha = 1000.0  # V_0 = alpha I
    n0 = samples + d + 2
    s = torch.full_like(w, alpha * (2 + d + 2) / n0)

    niw = make_algorithm("fedhb_niw", p=1.0, penalty_dim="paper", update="explicit")
    fedprox = make_algorithm("fedprox", mu=(n0 + d + 1) / (alpha * data.n))
    held, _ = niw.update({"w": w, "spread": s}, {}, data, ctx)
    expected, _ = fedprox.update({"w": w}, {}, data, ctx)

    torch.testing.assert_close(held["w"], expected["w"], rtol=0, atol=1e-6)


def test_a_proximal_step_solves_for_the_penalty():
    c, eta, m, m0 = torch.tensor([0.0, 1.0, 1e6]), 0.1, torch.tensor([2.0] * 3), torch.tensor([1.0] * 3)

    moved = torch.lerp(m, m0, proximal_pull(c, eta))

    # (m + eta c m_0) / (1 + eta c): 2; 2.1 / 1.1; about m_0 however large c is
    assert moved.tolist() == pytest.approx([2.0, 2.1 / 1.1, 1.0], abs=1e-4)


@pytest.mark.parametrize(
    ("update", "momentum", "weight"),
    [("explicit", 0.9, 1.0), ("proximal", 0.0, 1.0), ("proximal", 0.9, 0.1), ("proximal_momentum", 0.9, 1.0)],
)
def test_a_quadratic_client_ends_between_its_optimum_and_the_server(
    make_ctx, make_algorithm, tiny, quadratic, update, momentum, weight
):
    quadratic(a=2.0, c=3.0)
    ctx = make_ctx("fedhb_niw", client=0, lr=0.05, momentum=momentum, tau=800, **tiny)
    down = {"w": torch.ones(6), "spread": torch.full((6,), 2.0)}
    # |D| = 4, N = 2, d = 1: n_0 = 7, V_0 = 7/5 * 2 = 2.8, c = (7 + 1 + 1) / 2.8 / n_i = 1.607143
    c = weight * 9 / 2.8 / 2  # a plain proximal step weakens it by 1 - momentum

    message, _ = make_algorithm("fedhb_niw", p=1.0, update=update).update(down, {}, ctx.task.train_data(0), ctx)

    assert message["w"].tolist() == pytest.approx([(2 * 3 + c * 1) / (2 + c)] * 6, abs=1e-4)


def test_a_dropped_column_does_not_learn_but_biases_do(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_niw", client=0, lr=0.1, momentum=0.0, **tiny)
    down = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5, 0.0]), "spread": torch.ones(6)}

    message, _ = make_algorithm("fedhb_niw", p=1e-9).update(down, {}, ctx.task.train_data(0), ctx)

    assert message["w"][:4].tolist() == [1.0, 2.0, 3.0, 4.0]
    # all weights dropped, both logits are the biases 0.5 and 0: the gradient is sigmoid(0.5) - 1/2 = 0.122459;
    # the penalty of p = 1e-9 is nothing
    assert message["w"][4:].tolist() == pytest.approx([0.5 - 0.0122459, 0.0122459], abs=1e-6)


# --- prediction ---


def test_the_student_t_has_its_scale_and_heavy_tails():
    generator, zeros = torch.Generator().manual_seed(0), torch.zeros(100_000)

    few = torch.stack([student_t(zeros[:50], torch.tensor(4.0), 5, generator) for _ in range(4000)])
    many = student_t(zeros, torch.tensor(4.0), 100_000, generator)

    # variance scale df / (df - 2) = 4 * 5/3; for many degrees of freedom 4
    assert few.var().item() == pytest.approx(20 / 3, rel=0.1)
    assert many.var().item() == pytest.approx(4.0, rel=0.03)


def test_coordinates_of_a_student_t_share_their_chi_squared_number():
    generator = torch.Generator().manual_seed(0)

    draws = torch.stack([student_t(torch.zeros(1000), torch.tensor(1.0), 3, generator) for _ in range(200)])

    # a draw's mean square is 3 / chi2, common to all coordinates; were they independent it would be near 3 for all
    spread_of_draws = draws.square().mean(1)
    assert spread_of_draws.max() > 5 * spread_of_draws.median()


def test_the_global_model_is_drawn_once_and_alike_for_everyone(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw")
    algorithm, x = make_algorithm("fedhb_niw", sample_dim="coordinate"), ctx.task.test_data(0).x
    server = algorithm.init_server(ctx)

    with torch.no_grad():
        one, again = (algorithm.predict(server, x, ctx.at(client), "mean") for client in (0, None))
        later = algorithm.predict(server, x, make_ctx("fedhb_niw", round_=2), "mean")
        at_mean = make_algorithm("fedhb_niw", prediction="mean").predict(server, x, ctx, "mean")

    assert torch.equal(one, again)
    assert not torch.equal(one, later)
    assert (one - at_mean).abs().max() > 0.01


def test_read_as_in_the_paper_draws_stay_nearer_to_the_mean(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw")
    x = ctx.task.test_data(0).x
    server = make_algorithm("fedhb_niw").init_server(ctx)

    def predicted(**params):
        return make_algorithm("fedhb_niw", **params).predict(server, x, ctx, "mean")

    with torch.no_grad():
        at_mean = predicted(prediction="mean")
        paper, coordinate = (predicted(sample_dim=how) - at_mean for how in ("paper", "coordinate"))

    assert 0 < paper.norm() < 0.5 * coordinate.norm()


def test_personal_models_are_points(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", client=0)
    algorithm, x, data = make_algorithm("fedhb_niw"), ctx.task.test_data(0).x, ctx.task.train_data(0)
    personal = algorithm.personal_model(algorithm.init_server(ctx), {}, data, ctx, 1)

    with torch.no_grad():
        assert torch.equal(algorithm.predict(personal, x, ctx, "mean"), algorithm.predict(personal, x, ctx, "mc"))


# --- personalisation ---


def test_personalisation_moves_body_and_head_and_holds_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", client=0, train_part="body", lr=0.1)
    net, data = ctx.task.net, ctx.task.train_data(0)
    before, algorithm = net.flat.clone(), make_algorithm("fedhb_niw")
    server = algorithm.init_server(ctx)
    held = server | {"spread": torch.full_like(server["spread"], 1e-12)}  # a penalty without end

    free, stuck = (algorithm.personal_model(state, {}, data, ctx, 3)["w"] for state in (server, held))

    assert free.shape == (7_510,)
    assert not torch.allclose(free[net.body], before[net.body])
    assert torch.allclose(stuck[net.body], before[net.body])
    assert not torch.allclose(stuck[net.head], before[net.head])


def test_no_epochs_leave_the_mean_with_its_frozen_head(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", client=0, train_part="body")
    before, algorithm = ctx.task.net.flat.clone(), make_algorithm("fedhb_niw")

    found = algorithm.personal_model(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx, 0)

    assert torch.equal(found["w"], before)


def test_personalisation_of_the_head_leaves_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_niw", client=0, adapt_part="head", lr=0.1, momentum=0.9)
    net, algorithm = ctx.task.net, make_algorithm("fedhb_niw")
    before = net.flat.clone()

    found = algorithm.personal_model(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx, 2)

    assert torch.equal(found["w"][net.body], before[net.body])
    assert not torch.equal(found["w"][net.head], before[net.head])


def test_personalisation_pays(make_job, recorder, tmp_path):
    job = make_job("fedhb_niw", clients=4, rounds=3, lr=0.1, train_part="body", adapt_epochs=[0, 20])

    simulate(job, recorder, Surroundings(tmp_path))

    before, after = (e.metrics[None]["accuracy"] for e in recorder.evaluations(stage="adapt", predict="mean"))
    assert after > before + 0.2


def test_the_norm_of_m0_is_recorded_with_the_global_model_alone(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("fedhb_niw"), make_algorithm("fedhb_niw")
    w = torch.zeros(ctx.task.net.d)
    w[:2] = torch.tensor([3.0, 4.0])

    assert algorithm.describe({"w": w, "spread": torch.ones_like(w)}, ctx) == {"norm_m0": 5.0}
    assert algorithm.describe({"w": w}, ctx) == {}
