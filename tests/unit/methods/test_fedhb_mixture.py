"""FedHB-Mixture: the worked EM step, the client's gradient, the gate, and the FedProx that one prototype is."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fedbench.algorithm import Upload
from fedbench.algorithms.fedhb_mixture import add_penalty_grad, em_step, is_orphan, responsibilities
from fedbench.simulation import Surroundings, simulate

PROTOTYPES = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
CLIENTS = torch.tensor([[1.0], [3.0]], dtype=torch.float64)


def em_of_clients(clients, prototypes, sigma2, n):
    c = torch.stack([responsibilities(m, prototypes, sigma2) for m in clients])
    return em_step(c.T @ clients / len(clients), c.mean(0), sigma2, n)


def random_rows(seed, rows, d=6):
    return 0.5 * torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))


def upload(client, m, n=2, **more):
    return Upload(client, n, {"w": torch.as_tensor(m), **more})


# --- worked values: d = 1, r = (0, 4), m = (1, 3), sigma^2 = 1 ---


def test_responsibilities_of_two_clients():
    # exponents -1/2 and -9/2: 1 / (1 + exp(-4)) = 0.982014
    assert responsibilities(CLIENTS[0], PROTOTYPES, 1.0).tolist() == pytest.approx([0.982014, 0.017986], abs=1e-6)
    assert responsibilities(CLIENTS[1], PROTOTYPES, 1.0).tolist() == pytest.approx([0.017986, 0.982014], abs=1e-6)


def test_the_em_step_of_two_clients():
    found = em_of_clients(CLIENTS, PROTOTYPES, 1.0, n=2)

    # (0.982014 + 3 * 0.017986) / 2 over 1/2 + 1/2
    assert found.flatten().tolist() == pytest.approx([0.517986, 1.482014], abs=1e-6)


def test_the_em_step_of_two_out_of_ten_clients():
    found = em_of_clients(CLIENTS, PROTOTYPES, 1.0, n=10)

    # the same over 1/10 + 1/2
    assert found.flatten().tolist() == pytest.approx([0.863310, 2.470023], abs=1e-6)


def test_one_prototype_is_the_shrunk_mean():
    # sum m / (N + sigma^2) = 4 / 3
    assert em_of_clients(CLIENTS, PROTOTYPES[:1], 1.0, n=2).item() == pytest.approx(4 / 3)


def test_the_penaltys_gradient_between_two_prototypes():
    m, grad = CLIENTS[0], torch.zeros(1, dtype=torch.float64)

    add_penalty_grad(grad, m, PROTOTYPES, responsibilities(m, PROTOTYPES, 1.0), 1.0)

    # 0.982014 (1 - 0) + 0.017986 (1 - 4)
    assert grad.item() == pytest.approx(0.928055, abs=1e-6)


def test_the_penaltys_gradient_is_autograds():
    prototypes, m = random_rows(1, 3).double(), random_rows(2, 1)[0].double()
    variable = m.clone().requires_grad_()
    exponents = -((variable - prototypes) ** 2).sum(1) / (2 * 0.3)
    (-exponents.logsumexp(0) / 7).backward()  # n_i = 7

    grad = torch.zeros(6, dtype=torch.float64)
    add_penalty_grad(grad, m, prototypes, responsibilities(m, prototypes, 0.3), 1 / (7 * 0.3))

    torch.testing.assert_close(grad, variable.grad)


def test_responsibilities_of_far_prototypes_are_finite():
    prototypes = torch.tensor([[100.0] * 100, [101.0] * 100])

    # exponents near -5,000,000: their exponentials underflow unless the largest is taken out
    assert responsibilities(torch.zeros(100), prototypes, 0.1).tolist() == [1.0, 0.0]


# --- server ---


def test_the_server_takes_the_em_step(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", **tiny)
    # one coordinate differs, so that distances are those of the worked case
    prototypes, clients = torch.zeros(2, 6), torch.zeros(2, 6)
    prototypes[:, 0], clients[:, 0] = torch.tensor([0.0, 4.0]), torch.tensor([1.0, 3.0])
    server = {"prototypes": prototypes, "gate": torch.zeros(3)}
    uploads = [upload(i, clients[i], gate=torch.tensor([i, 1.0, 2.0 * i])) for i in (0, 1)]

    merged = make_algorithm("fedhb_mixture", sigma2=1.0).aggregate(server, uploads, ctx)

    assert merged["prototypes"][:, 0].tolist() == pytest.approx([0.517986, 1.482014], abs=1e-6)
    assert merged["gate"].tolist() == [0.5, 1.0, 1.0]


def test_clients_weigh_the_same_whatever_their_samples(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", **tiny)
    uploads = [upload(0, torch.ones(6), n=1), upload(1, torch.full((6,), 3.0), n=9)]

    merged = make_algorithm("fedhb_mixture", K=1, sigma2=1.0).aggregate({"prototypes": torch.zeros(1, 6)}, uploads, ctx)

    assert merged["prototypes"][0].tolist() == pytest.approx([4 / 3] * 6)


def test_a_prototype_that_nobody_is_near_stays(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", **tiny)
    prototypes = torch.stack([torch.ones(6), torch.full((6,), 9.0)])
    uploads = [upload(client, torch.ones(6), gate=torch.zeros(3)) for client in (0, 1)]

    merged = make_algorithm("fedhb_mixture").aggregate({"prototypes": prototypes, "gate": torch.zeros(3)}, uploads, ctx)

    assert torch.equal(merged["prototypes"][1], prototypes[1])
    # all of the mass: 1 / (0.1 / 2 + 1)
    assert merged["prototypes"][0].tolist() == pytest.approx([1 / 1.05] * 6)


def test_a_prototype_is_kept_below_ten_sigma2_over_n():
    # 10 * 0.1 / 100 = 0.01
    assert is_orphan(torch.tensor([0.0099, 0.0101]), 0.1, 100, 10.0).tolist() == [True, False]


def test_with_few_clients_some_prototype_still_learns():
    # 10 * 0.1 / 2 = 0.5 would keep both; half of an equal share is 0.25
    assert is_orphan(torch.tensor([0.6, 0.4]), 0.1, 2, 10.0).tolist() == [False, False]
    assert is_orphan(torch.tensor([1.0]), 0.1, 1, 10.0).tolist() == [False]


# --- client ---


def test_a_round_is_autograd_on_the_printed_objective(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", client=0, lr=0.1, tau=3, **tiny)
    data, prototypes = ctx.task.train_data(0), random_rows(1, 2)
    rows, expected = prototypes.double(), prototypes.double().mean(0)
    for x, y in data.batches(2, ctx.rng("batches"), epochs=3):
        m = expected.clone().requires_grad_()
        loss = cross_entropy(linear(x.double().flatten(1), m[:4].view(2, 2), m[4:]), y)
        penalty = -(-((m - rows) ** 2).sum(1) / (2 * 0.5)).logsumexp(0)
        expected = expected - 0.1 * torch.autograd.grad(loss + penalty / 2, m)[0]  # n_i = 2

    algorithm = make_algorithm("fedhb_mixture", sigma2=0.5, start="centre")
    gate = algorithm.init_server(ctx)["gate"]
    message, _ = algorithm.update({"prototypes": prototypes, "gate": gate}, {}, data, ctx)

    torch.testing.assert_close(message["w"].double(), expected, rtol=0, atol=1e-6)


def test_one_prototype_is_fedprox_bit_for_bit(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0, lr=0.1, momentum=0.9, tau=5)
    data, w = ctx.task.train_data(0), ctx.task.initial

    held, _ = make_algorithm("fedhb_mixture", K=1, sigma2=0.1).update({"prototypes": w[None]}, {}, data, ctx)
    expected, _ = make_algorithm("fedprox", mu=1 / (0.1 * data.n)).update({"w": w}, {}, data, ctx)

    assert torch.equal(held["w"], expected["w"])


def test_one_prototype_trains_like_fedprox_with_a_shrunk_average(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedhb_mixture", clients=4, lr=0.1)
    mu = 1 / (0.1 * ctx.sizes[0])

    mixture = run_rounds(make_algorithm("fedhb_mixture", K=1, sigma2=0.1), ctx, rounds=1).server
    fedprox = run_rounds(make_algorithm("fedprox", mu=mu), ctx, rounds=1).server

    assert mixture.keys() == {"prototypes"}  # and no gate
    torch.testing.assert_close(mixture["prototypes"][0], fedprox["w"] * 4 / 4.1)


def test_noise_of_the_posterior_moves_the_gradient_a_little(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0, lr=0.1)
    data = ctx.task.train_data(0)

    def trained(**params):
        algorithm = make_algorithm("fedhb_mixture", **params)
        return algorithm.update(algorithm.init_server(ctx), {}, data, ctx)[0]["w"]

    plain, noisy = trained(), trained(eps_noise=True)
    assert 0 < (noisy - plain).norm() < 0.01 * (plain - ctx.task.initial).norm() + 1e-3
    assert torch.equal(trained(eps_noise=True, eps=0.0), plain)


# --- where it starts ---


def test_prototypes_are_independent_draws_of_which_the_first_is_the_common_one(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture")
    held = ctx.task.net.flat.clone()

    first, second = make_algorithm("fedhb_mixture").init_server(ctx)["prototypes"]

    assert torch.equal(first, ctx.task.initial)
    # two draws from U(-b, b) of 6,400 weights, b = 1/8: their difference has the variance 2 b^2 / 3
    assert (second - first)[:6_400].std().item() == pytest.approx((2 / 3) ** 0.5 / 8, rel=0.05)
    assert torch.equal(ctx.task.net.flat, held)  # a frozen head would be there


def test_perturbed_prototypes_differ_by_a_hundredth_of_the_weights_spread(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture")

    rows = make_algorithm("fedhb_mixture", init="perturbed", K=3).init_server(ctx)["prototypes"]

    weights = ctx.task.initial[:6_400]
    for row in rows:
        assert (row[:6_400] - weights).std().item() == pytest.approx(0.01 * weights.std().item(), rel=0.05)


def starting_point(algorithm, ctx, prototypes, memory):
    """Where no epochs of personalisation leave a client."""
    gate = algorithm.init_server(ctx)["gate"]
    server = {"prototypes": prototypes, "gate": gate}
    return algorithm.personal_model(server, memory, ctx.task.train_data(0), ctx, 0)["w"]


def test_clients_start_at_the_prototype_that_fits_their_data(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", client=0, **tiny)
    # class 0 has the first pixel, class 1 the second
    right = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0])
    algorithm = make_algorithm("fedhb_mixture")

    for rows in ([right, -right], [-right, right]):
        assert torch.equal(starting_point(algorithm, ctx, torch.stack(rows), {}), right)


def test_clients_may_start_at_the_centre_or_where_they_ended(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", client=0, **tiny)
    right, last = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0]), torch.full((6,), 5.0)
    rows = torch.stack([right, 3 * right])

    centre, ended = (make_algorithm("fedhb_mixture", start=start) for start in ("centre", "last"))

    assert torch.equal(starting_point(centre, ctx, rows, {}), 2 * right)
    assert torch.equal(starting_point(ended, ctx, rows, {"w": last}), last)
    assert torch.equal(starting_point(ended, ctx, rows, {}), 3 * right)  # the best, when there is no last


def test_a_client_that_starts_where_it_ended_remembers(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0)
    data = ctx.task.train_data(0)

    def memory_of(start):
        algorithm = make_algorithm("fedhb_mixture", start=start)
        message, memory = algorithm.update(algorithm.init_server(ctx), {}, data, ctx)
        return message, memory

    message, memory = memory_of("last")
    assert torch.equal(memory["w"], message["w"])
    assert memory_of("best")[1] == {}


# --- gate ---


def test_the_gate_learns_the_nearest_prototype_and_its_head_stays(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0, lr=0.1, tau=20)
    net, initial = ctx.task.companion(2)
    head, x = net.flat[net.head].clone(), ctx.task.train_data(0).x
    algorithm = make_algorithm("fedhb_mixture")
    server = algorithm.init_server(ctx)

    message, _ = algorithm.update(server, {}, ctx.task.train_data(0), ctx)

    nearest = int(responsibilities(message["w"], server["prototypes"], 0.1).argmax())
    net.load(message["gate"])
    with torch.no_grad():
        trained = net.logits(x).softmax(-1)[:, nearest].mean()
        net.load(initial)
        untrained = net.logits(x).softmax(-1)[:, nearest].mean()
    assert trained > max(0.9, untrained)
    assert message["gate"].shape == (6_500,)
    assert torch.equal(net.flat[net.head], head)


def test_the_gate_has_the_same_start_in_every_process(make_ctx):
    (one, start), (other, again) = (make_ctx("fedhb_mixture").task.companion(3) for _ in range(2))

    assert torch.equal(start, again)
    assert torch.equal(one.flat[one.head], other.flat[other.head])
    assert one.flat[one.head].numel() == 100 * 3 + 3


def test_the_global_model_weighs_prototypes_by_the_gate(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_mixture", **tiny)
    right = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0])
    # a logistic regression has no body, so that its gate is trained as a whole: here it says (3/4, 1/4) for all inputs
    gate = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 1.0]).log().nan_to_num(neginf=0.0)
    model = {"prototypes": torch.stack([right, -right]), "gate": gate}

    rows = make_algorithm("fedhb_mixture").predict(model, torch.tensor([[[[1.0, 0.0]]]]), ctx, "mean")

    # logits (1, -1): 0.880797 for class 0, of the other prototype 0.119203; 3/4 and 1/4 of them
    assert rows[0].tolist() == pytest.approx([0.690398, 0.309602], abs=1e-6)


# --- personalisation ---


def test_personalisation_moves_body_and_head_and_holds_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0, train_part="body", lr=0.1)
    net, data = ctx.task.net, ctx.task.train_data(0)
    before = net.flat.clone()

    def personal(sigma2):
        algorithm = make_algorithm("fedhb_mixture", K=1, sigma2=sigma2)
        return algorithm.personal_model(algorithm.init_server(ctx), {}, data, ctx, 3)["w"] - before

    free, held = personal(1e6), personal(1 / (5 * data.n))  # a pull of 5 per unit of distance

    assert held[net.body].norm() < 0.6 * free[net.body].norm()
    assert held[net.head].norm() > 0.6 * free[net.head].norm() > 0


def test_personalisation_of_the_head_leaves_the_body(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_mixture", client=0, adapt_part="head", lr=0.1)
    net, algorithm = ctx.task.net, make_algorithm("fedhb_mixture", K=1)
    before = net.flat.clone()

    found = algorithm.personal_model(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx, 2)["w"]

    assert torch.equal(found[net.body], before[net.body])
    assert not torch.equal(found[net.head], before[net.head])


def test_personalisation_pays(make_job, recorder, tmp_path):
    job = make_job("fedhb_mixture", clients=4, rounds=3, lr=0.1, train_part="body", adapt_epochs=[0, 20])

    simulate(job, recorder, Surroundings(tmp_path))

    before, after = (e.metrics[None]["accuracy"] for e in recorder.evaluations(stage="adapt", predict="mean"))
    assert after > before + 0.1
