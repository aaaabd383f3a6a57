"""FedPA: the recursion against a dense solve, the sampling of iterates, the server's step, and the FedAvg within."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.algorithm import Upload
from fedbench.algorithms.fedpa import posterior_delta
from fedbench.errors import FedbenchError
from fedbench.images import ClientData, Images
from fedbench.job import build_job

ZEROS = torch.zeros(6)


def random_rows(seed, rows, d, dtype=torch.float64):
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense_delta(w, samples, rho):
    """Sigma^{-1} (w - mean) with Sigma written out."""
    number, d = samples.shape
    r = 1 / (1 + (number - 1) * rho)
    S = torch.cov(samples.T).view(d, d) if number > 1 else torch.zeros(d, d, dtype=samples.dtype)
    return torch.linalg.solve(r * torch.eye(d, dtype=samples.dtype) + (1 - r) * S, w - samples.mean(0))


# --- the recursion ---


def test_two_samples_by_hand():
    delta = posterior_delta(torch.tensor([4.0]), [torch.tensor([0.0]), torch.tensor([2.0])], rho=1.0)

    # mean 1, S = 2, r = 1/2, Sigma = 1/2 + 2/2 = 3/2: (4 - 1) / (3/2)
    assert delta.item() == pytest.approx(2.0)


def test_one_sample_gives_the_plain_difference():
    w, x = random_rows(0, 2, 5)

    assert torch.equal(posterior_delta(w, [x], rho=3.0), w - x)


def test_without_shrinkage_it_is_the_difference_to_the_mean():
    w, samples = random_rows(0, 1, 5)[0], random_rows(1, 6, 5)

    torch.testing.assert_close(posterior_delta(w, samples, rho=0.0), w - samples.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_recursion_is_the_dense_solve_of_six_samples(dtype, tolerance):
    w, samples = random_rows(0, 1, 4)[0], random_rows(1, 6, 4)

    found = posterior_delta(w.to(dtype), samples.to(dtype), rho=0.5)

    torch.testing.assert_close(found.double(), dense_delta(w, samples, 0.5), rtol=0, atol=tolerance)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    number=st.integers(1, 9),
    d=st.integers(1, 7),
    rho=st.floats(0, 10),
    spread=st.floats(1e-3, 10),
)
def test_the_recursion_is_the_dense_solve(seed, number, d, rho, spread):
    w, samples = random_rows(seed, 1, d)[0], spread * random_rows(seed + 1, number, d)

    expected = dense_delta(w, samples, rho)

    torch.testing.assert_close(posterior_delta(w, samples, rho), expected, rtol=1e-7, atol=1e-9)


def test_dot_products_are_taken_in_float64():
    # l = 2: mean 1e20, S = 2e40, (1-r) S = 1e-40 * 2e40 = 2, Sigma = 3; <u, u> = 4e40 is beyond float32
    samples = [torch.tensor([0.0]), torch.tensor([2e20])]

    assert posterior_delta(torch.tensor([4e20]), samples, rho=1e-40).item() == pytest.approx(1e20)


def test_it_changes_neither_the_model_nor_the_samples():
    w, samples = random_rows(0, 1, 3)[0], random_rows(1, 4, 3)
    before = w.clone(), samples.clone()

    posterior_delta(w, list(samples), rho=1.0)

    assert torch.equal(w, before[0])
    assert torch.equal(samples, before[1])


# --- the worked fixed point ---

MEANS = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
VARIANCES = torch.tensor([[1.0, 1 / 4], [1 / 3, 1.0]], dtype=torch.float64)
"""Of the posteriors of two quadratics with A1 = diag(1, 4) and A2 = diag(3, 1)."""


def samples_with(mean, variances):
    """Five samples whose Sigma is diag(variances) exactly for rho = 1: r = 1/5, so S = (variances - 1/5) / (4/5).

    mean +- a along every axis, and the mean itself: S = 2 a^2 / 4.
    """
    a = torch.diag((2 * (variances - 0.2) / 0.8).sqrt())
    return torch.stack([mean, *(mean + a), *(mean - a)])


@pytest.mark.parametrize(
    ("rho", "expected"),
    # (A1 + A2)^{-1} (A1 mu1 + A2 mu2) = (1/4, 2/5); FedAvg's is the mean of the means
    [(1.0, [0.25, 0.4]), (0.0, [0.5, 1.0])],
    ids=["posteriors", "fedavg"],
)
def test_the_fixed_point_of_two_quadratics(make_ctx, make_algorithm, tiny, rho, expected):
    ctx, algorithm, server = make_ctx("fedpa", beta=0.3, **tiny), make_algorithm("fedpa"), {"w": torch.zeros(2)}

    for _ in range(100):
        w = server["w"].double()
        deltas = [posterior_delta(w, samples_with(m, v), rho) for m, v in zip(MEANS, VARIANCES, strict=True)]
        uploads = [Upload(i, 2, {"w": (w - delta).float()}) for i, delta in enumerate(deltas)]
        server = algorithm.aggregate(server, uploads, ctx)

    assert server["w"].tolist() == pytest.approx(expected, abs=1e-6)


# --- sampling: f = (w-2)^2 / 2 from 0 at rate 1/2 has the iterates 1, 1.5, 1.75, 1.875, ... = 2 - 2^(1-k) ---


def uploaded(ctx, make_algorithm, quadratic, **params):
    quadratic(1.0, 2.0)
    algorithm = make_algorithm("fedpa", burnin_rounds=0, **params)
    message, _ = algorithm.update({"w": ZEROS}, {}, ctx.task.train_data(0), ctx)
    assert set(message) == {"w"}
    return message["w"].tolist()


@pytest.fixture
def steps_of(make_ctx, tiny):
    def make(tau, **settings):
        return make_ctx("fedpa", client=0, lr=0.5, tau=tau, **{**tiny, "local_unit": "batch", **settings})

    return make


def test_a_client_sends_the_model_to_which_its_posterior_leads(steps_of, make_algorithm, quadratic):
    found = uploaded(steps_of(4), make_algorithm, quadratic, samples=2, steps_per_sample=2, rho=1.0)

    # samples 1.25 and 1.8125 in all six coordinates: u = 0.5625 (1, ..., 1), S = u u^T / 2, r = 1/2;
    # Sigma (1, ..., 1) = (1/2 + 6 * 0.5625^2 / 4) (1, ..., 1) = 0.974609, Delta = -1.53125 / 0.974609
    assert found == pytest.approx([1.571142] * 6, abs=1e-6)


@pytest.mark.parametrize(
    ("tau", "params", "first"),
    [
        (20, {}, 11),  # 10 steps of burn-in, 5 samples of 2
        (19, {}, 10),  # the larger half is 10 steps
        (12, {}, 8),  # the second half is 6 steps: 5 samples of 1, and one more of burn-in
        (6, {}, 2),  # 5 samples of 1
        (3, {}, 1),  # fewer steps than samples: 3 samples
        (1, {}, 1),
        (20, {"samples": 2}, 11),  # 2 samples of 5
        (8, {"samples": 3, "steps_per_sample": 2}, 3),
        (8, {"samples": 3, "burnin_steps": 0}, 3),  # samples of 2, two steps are left
        (8, {"samples": 3, "burnin_steps": 5}, 6),
        (8, {"samples": 3, "burnin_steps": 1, "steps_per_sample": 2}, 3),  # one step more of burn-in
    ],
)
def test_the_samples_are_of_the_last_iterates(steps_of, make_algorithm, quadratic, tau, params, first):
    found = uploaded(steps_of(tau), make_algorithm, quadratic, rho=0.0, **params)

    # without shrinkage the upload is the mean of all iterates after the burn-in
    iterates = [2 - 2.0 ** (1 - k) for k in range(first, tau + 1)]
    assert found == pytest.approx([sum(iterates) / len(iterates)] * 6, abs=1e-6)


def test_how_many_samples_there_are_and_of_how_many_iterates_matters(steps_of, make_algorithm, quadratic):
    def of(**params):
        return tuple(uploaded(steps_of(20), make_algorithm, quadratic, rho=1.0, **params))

    found = {of(), of(samples=10), of(samples=2), of(samples=5, steps_per_sample=1), of(samples=5, burnin_steps=0)}

    assert len(found) == 5


def test_epochs_are_counted_in_batches(steps_of, make_algorithm, quadratic):
    # two samples in batches of one: two epochs are four steps
    found = uploaded(steps_of(2, local_unit="epoch", batch_size=1), make_algorithm, quadratic, rho=0.0, samples=2)

    # two samples of one: 1.75 and 1.875
    assert found == pytest.approx([1.8125] * 6)


def test_momentum_and_its_state_are_the_protocols(make_ctx, make_algorithm, run_rounds):
    def after_two_rounds(method, **params):
        ctx = make_ctx("fedavg", lr=0.1, momentum=0.9, optim_state="persistent", rounds=2)
        return run_rounds(make_algorithm(method, **params), ctx, rounds=2)

    ours = after_two_rounds("fedpa", samples=1, steps_per_sample=1, burnin_rounds=0)
    fedavg = after_two_rounds("fedavg")

    torch.testing.assert_close(ours.server["w"], fedavg.server["w"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        ours.clients[0]["optimizer.momentum_buffer"], fedavg.clients[0]["optimizer.momentum_buffer"]
    )


# --- one round ---


def test_one_round_of_two_clients(make_ctx, make_algorithm, run_rounds, tiny, quadratic):
    quadratic(1.0, 2.0)
    ctx = make_ctx("fedpa", lr=0.5, tau=4, local_unit="batch", beta=0.5, **tiny)
    algorithm = make_algorithm("fedpa", samples=2, rho=1.0, burnin_rounds=0, steps_per_sample=2)

    progress = run_rounds(algorithm, ctx, server={"w": ZEROS})

    # both lead to 1.571142 (above), half of the way at eta_s = 1/2
    assert progress.server["w"].tolist() == pytest.approx([0.785571] * 6, abs=1e-6)


@pytest.mark.parametrize(("weighting", "expected"), [("uniform", 2.0), ("samples", 2.5)])
def test_the_server_averages_as_the_protocol_says(make_ctx, make_algorithm, tiny, weighting, expected):
    uploads = [Upload(0, 1, {"w": ZEROS + 1.0}), Upload(1, 3, {"w": ZEROS + 3.0})]

    merged = make_algorithm("fedpa").aggregate(
        {"w": ZEROS}, uploads, make_ctx("fedpa", **{**tiny, "weighting": weighting})
    )

    # (1 + 3) / 2, or (1 + 3 * 3) / 4
    assert merged["w"].tolist() == [expected] * 6


# --- special cases ---

PROTOCOL = {"clients": 3, "lr": 0.1, "batch_size": 10, "tau": 2, "rounds": 10, "momentum": 0.5, "beta": 0.7}


def test_the_first_rounds_are_fedavgs_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    def after(rounds):
        ours = run_rounds(make_algorithm("fedpa", burnin_rounds=0.3), make_ctx(**PROTOCOL), rounds).server
        fedavg = run_rounds(make_algorithm("fedavg"), make_ctx(**PROTOCOL), rounds).server
        return ours["w"], fedavg["w"]

    assert torch.equal(*after(3))
    assert not torch.allclose(*after(4))


@pytest.mark.parametrize(("part", "rounds", "same"), [(0.1, 10, 1), (0.29, 100, 29), (0.1, 9, 0), (1.0, 4, 4)])
def test_how_many_rounds_are_fedavgs(make_ctx, make_algorithm, tiny, part, rounds, same):
    algorithm = make_algorithm("fedpa", burnin_rounds=part, rho=5.0)

    def is_fedavgs(number):
        ctx = make_ctx("fedpa", client=0, round_=number, rounds=rounds, tau=4, lr=1.0, **tiny)
        down, data = {"w": ZEROS}, ctx.task.train_data(0)
        ours, fedavg = (m.update(down, {}, data, ctx)[0]["w"] for m in (algorithm, make_algorithm("fedavg")))
        return torch.equal(ours, fedavg)

    assert [is_fedavgs(number) for number in (same, same + 1) if 0 < number <= rounds] == (
        [True, False] if 0 < same < rounds else [same > 0]
    )


def test_one_sample_of_the_last_iterate_is_fedavg(make_ctx, make_algorithm, run_rounds):
    ours = make_algorithm("fedpa", burnin_rounds=0, samples=1, steps_per_sample=1, rho=2.0)

    one, other = (run_rounds(m, make_ctx(**PROTOCOL), 3).server for m in (ours, make_algorithm("fedavg")))

    # w - (w - w_i) is w_i up to rounding
    torch.testing.assert_close(one["w"], other["w"], rtol=1e-5, atol=1e-6)


def test_a_client_without_data_sends_what_it_got(make_ctx, make_algorithm):
    ctx = make_ctx("fedpa", client=0)
    nothing = ClientData(
        Images(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), 16, "half"), torch.zeros(1), torch.arange(0)
    )

    message, _ = make_algorithm("fedpa", burnin_rounds=0).update({"w": ctx.task.initial}, {}, nothing, ctx)

    assert torch.equal(message["w"], ctx.task.initial)


# --- the server's optimiser ---


def server_steps(algorithm, ctx, targets):
    """The server's w from 5 on, when all clients lead to one target after the other; and its last state."""
    server, found = {"w": ZEROS + 5.0}, []
    for target in targets:
        server = algorithm.aggregate(server, [Upload(0, 2, {"w": ZEROS + target})], ctx)
        found.append(server["w"][0].item())
    return found, server


def test_server_momentum(make_ctx, make_algorithm, tiny):
    found, _ = server_steps(
        make_algorithm("fedpa", server_momentum=0.5), make_ctx("fedpa", beta=0.1, **tiny), [3.0, 3.8]
    )

    # Delta 2: 5 - 0.1 * 2; Delta 1, velocity 0.5 * 2 + 1: 4.8 - 0.1 * 2
    assert found == pytest.approx([4.8, 4.6])


def test_server_adam(make_ctx, make_algorithm, tiny):
    found, _ = server_steps(
        make_algorithm("fedpa", server_optimizer="adam"), make_ctx("fedpa", beta=0.01, **tiny), [3.0, 5.99]
    )

    # Delta 2: a first step of Adam is as long as its rate. Delta -1: m = 0.9 * 0.2 - 0.1 = 0.08, corrected 0.08 / 0.19;
    # v = 0.999 * 0.004 + 0.001 = 0.004996, corrected 0.004996 / 0.001999; 0.01 * 0.421053 / 1.580902 = 0.002663
    assert found == pytest.approx([4.99, 4.987337], abs=1e-6)


@pytest.mark.parametrize("params", [{"server_momentum": 0.5}, {"server_optimizer": "adam"}], ids=["momentum", "adam"])
def test_the_servers_moments_are_never_sent(make_ctx, make_algorithm, tiny, params):
    algorithm, ctx = make_algorithm("fedpa", **params), make_ctx("fedpa", client=0, beta=0.1, **tiny)

    _, server = server_steps(algorithm, ctx, [3.0])

    assert len(server) > 1
    assert algorithm.download(server, ctx).keys() == {"w"}


def test_a_server_without_momentum_keeps_no_moments(make_ctx, make_algorithm, tiny):
    found, server = server_steps(make_algorithm("fedpa"), make_ctx("fedpa", beta=0.1, **tiny), [3.0, 3.8])

    assert found == pytest.approx([4.8, 4.7])
    assert server.keys() == {"w"}


# --- what is refused ---


@pytest.mark.parametrize(
    "setting",
    [
        {"samples": 0},
        {"burnin_steps": -1},
        {"steps_per_sample": 0},
        {"rho": -0.1},
        {"burnin_rounds": 1.1},
        {"server_optimizer": "adagrad"},
        {"server_momentum": 1.0},
        {"server_momentum": 0.5, "server_optimizer": "adam"},
    ],
)
def test_impossible_values_are_refused(setting):
    with pytest.raises(FedbenchError, match="wrong setting for method fedpa"):
        build_job({"method": "fedpa", "dataset": "digits", **setting})


@pytest.mark.parametrize(
    "params",
    [{"steps_per_sample": 3}, {"burnin_steps": 8}, {"burnin_steps": 3, "steps_per_sample": 2}, {"burnin_steps": 20}],
)
def test_it_refuses_to_begin_when_samples_and_burnin_do_not_fit(make_ctx, make_algorithm, params):
    ctx = make_ctx("fedpa", local_unit="batch", tau=12)

    with pytest.raises(FedbenchError, match="do not fit into the 12 steps"):
        make_algorithm("fedpa", **params).init_server(ctx)


def test_it_begins_when_they_just_fit(make_ctx, make_algorithm):
    ctx = make_ctx("fedpa", local_unit="batch", tau=12)

    for params in ({"steps_per_sample": 2}, {"burnin_steps": 7}, {"burnin_steps": 2, "steps_per_sample": 2}):
        assert make_algorithm("fedpa", **params).init_server(ctx).keys() == {"w"}


def test_it_looks_at_the_client_with_the_fewest_samples(make_ctx, make_algorithm):
    ctx = make_ctx("fedpa", tau=1, batch_size=10)
    ctx.task.sizes = (60, 20)

    with pytest.raises(FedbenchError, match="do not fit into the 2 steps"):
        make_algorithm("fedpa", steps_per_sample=1).init_server(ctx)


def test_it_refuses_to_begin_with_running_statistics(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("fedpa", dataset=pictures, model="vgg_s", norm="bn_stats")

    with pytest.raises(FedbenchError, match="running statistics"):
        make_algorithm("fedpa").init_server(ctx)


# --- what is deployed ---


def test_its_model_is_fine_tuned_like_that_of_fedavg(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedpa", client=0, lr=0.1)
    algorithm = make_algorithm("fedpa", server_momentum=0.5)
    server, data = run_rounds(algorithm, ctx).server, ctx.task.train_data(0)

    assert algorithm.personal_model(server, {}, data, ctx, None) is None
    assert torch.equal(
        algorithm.personal_model(server, {}, data, ctx, 2)["w"],
        make_algorithm("fedavg").personal_model(server, {}, data, ctx, 2)["w"],
    )
