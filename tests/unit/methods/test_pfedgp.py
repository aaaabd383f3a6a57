"""pFedGP by hand: what a client predicts from two points, a round against dense autograd, and what the options do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy, linear, normalize

from fedbench import gp
from fedbench.algorithms import pfedgp
from fedbench.errors import FedbenchError
from fedbench.evaluation import Standing
from fedbench.gp import Kernel, class_tree, gibbs, part_of_each
from fedbench.metrics import Tally
from fedbench.simulation import is_finite
from fedbench.wire import on_wire, size_of

BODY = 6_500  # of dnn100 on digits: 64*100 + 100
CPU = torch.device("cpu")


def update_once(algorithm, ctx, phi=None, memory=None):
    server = algorithm.init_server(ctx) if phi is None else {"phi": phi}
    return algorithm.update(server, memory or {}, ctx.task.train_data(ctx.client), ctx)


def model_of(algorithm, ctx, server=None):
    server = server or algorithm.init_server(ctx)
    return algorithm.personal_model(server, {}, ctx.task.train_data(ctx.client), ctx, None)


@pytest.fixture
def plane(tiny, make_ctx):
    """Two clients with two pixels per image, a point of class 0 and one of class 1, and the pixels as embedding.

    On length 1 the points of either client are (1, 0) and (0, 1).
    """

    def make(**settings):
        ctx = make_ctx("pfedgp", client=0, **{**tiny, "model": "dnn100", **settings})
        initial = torch.zeros_like(ctx.task.initial)
        initial[[0, 3]] = 1.0  # the first unit says the first pixel, the second unit the second
        ctx.task.initial = initial
        return ctx

    return make


# --- what a client predicts ---


def images(*pixels):
    return torch.tensor(pixels).view(-1, 1, 1, 2)


def test_two_points_with_omega_a_quarter(plane, make_algorithm):
    ctx, algorithm = plane(), make_algorithm("pfedgp")
    model = model_of(algorithm, ctx)
    by_hand = {**model, "omega": torch.full((1, 1, 2), 0.25, dtype=torch.float64)}

    found = algorithm.predict(by_hand, images((5.0, 0.0), (3.0, 3.0), (0.0, 1.0)), ctx, "mean")

    # Noise 4 on the targets 2 and -2; K has 8.001 on its diagonal and 8/e beside it. At (1, 0) the mean is 1.116579,
    # the variance 2.582759, and E[sigmoid] = 0.683351 by numerical integration. Midway the mean is 0.
    assert found[:, 0].tolist() == pytest.approx([0.683351, 0.5, 0.316649], abs=1e-5)
    assert found.sum(1).tolist() == pytest.approx([1.0] * 3)


def test_midway_between_two_points_both_classes_have_one_half(plane, make_algorithm):
    ctx, algorithm = plane(), make_algorithm("pfedgp", test_chains=4_000)

    found = algorithm.predict(model_of(algorithm, ctx), images((1.0, 1.0)), ctx, "mean")

    # the chains' probabilities have a standard deviation of about 0.1
    assert found[0].tolist() == pytest.approx([0.5, 0.5], abs=0.008)


def test_with_one_class_it_has_probability_1_and_nothing_is_learned(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=1, labels_per_client=1, clients=2), make_algorithm("pfedgp")

    model, (message, _) = model_of(algorithm, ctx), update_once(algorithm, ctx)

    found = algorithm.predict(model, ctx.task.test_data(1).x, ctx, "mean")
    own = int(ctx.task.train_data(1).y[0])
    assert found[:, own].unique().tolist() == [1.0]
    assert found.sum(1).unique().tolist() == [1.0]
    assert torch.equal(message["phi"], ctx.task.initial[:BODY])


def test_only_the_clients_own_classes_have_a_probability(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")

    found = algorithm.predict(model_of(algorithm, ctx), ctx.task.test_data(0).x, ctx, "mean")

    own = ctx.task.train_data(0).y.unique()
    foreign = sorted({*range(10)} - {*own.tolist()})
    assert len(own) == 5
    assert found[:, foreign].unique().tolist() == [0.0]
    assert found[:, own].min() > 0
    torch.testing.assert_close(found.sum(1), torch.ones(len(found)), rtol=0, atol=1e-6)


def test_a_foreign_class_costs_a_finite_nll(make_ctx, make_algorithm):
    ctx, algorithm, tally = make_ctx("pfedgp", client=0), make_algorithm("pfedgp"), Tally.zeros(1)
    foreign = next(label for label in range(10) if label not in ctx.task.train_data(0).y.tolist())
    found = algorithm.predict(model_of(algorithm, ctx), ctx.task.test_data(0).x[:3], ctx, "mean")

    tally.add(found, torch.full((3,), foreign), torch.zeros(3, dtype=torch.int64))

    # the probability is 0, clipped at 1e-12: -log(1e-12) = 27.631021
    assert tally.rows()[0]["nll"] == pytest.approx(27.631021)


def test_a_model_predicts_by_itself_and_alike_in_either_mode(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")
    model, x = model_of(algorithm, ctx), ctx.task.test_data(0).x
    by_mean = algorithm.predict(model, x, ctx, "mean")

    ctx.task.net.load(torch.full_like(ctx.task.initial, 0.5))  # as another client's training leaves it

    assert torch.equal(algorithm.predict(model, x, ctx, "mc"), by_mean)


def test_a_prediction_does_not_depend_on_the_other_images_of_its_block(make_ctx, make_algorithm, monkeypatch):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")
    model, x = model_of(algorithm, ctx), ctx.task.test_data(0).x[:30]
    together = algorithm.predict(model, x, ctx, "mean")

    monkeypatch.setattr(pfedgp, "BLOCK", 7)

    torch.testing.assert_close(algorithm.predict(model, x, ctx, "mean"), together, rtol=0, atol=1e-6)


def test_a_personal_model_is_the_tree_on_the_clients_data(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=1), make_algorithm("pfedgp", test_chains=7)
    data = ctx.task.train_data(1)

    model = model_of(algorithm, ctx)

    w, b = ctx.task.initial[:BODY].split([6_400, 100])
    torch.testing.assert_close(model["x"], linear(data.x.flatten(1), w.view(100, 64), b).relu())
    assert torch.equal(model["y"], data.y)
    assert torch.equal(model["tree"], class_tree(model["x"], data.y, 10))
    assert model["omega"].shape == (4, 7, data.n)
    # a split sees the points of its classes and no others
    for split, omega in zip(model["tree"], model["omega"], strict=True):
        assert torch.equal(omega.gt(0).all(0), split[data.y] != 0)
        assert torch.equal(omega.gt(0).any(0), split[data.y] != 0)


def test_there_is_no_global_model(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")

    assert algorithm.global_model(algorithm.init_server(ctx), {}, ctx.task.train_data(0), ctx) is None


def test_the_untrained_embedding_already_classifies(make_ctx, make_algorithm, begin_training):
    ctx, algorithm = make_ctx("pfedgp"), make_algorithm("pfedgp")
    progress = begin_training(algorithm, ctx)

    found = Standing(algorithm, progress.server, progress.clients, ctx).evaluate("pm", "mean")

    # five classes: 0.2 by chance
    assert found.metrics[None]["accuracy"] > 0.8


# --- a golden round ---


def dense_loss(x, side, held_out, omega):
    """The formulas of the specification with explicit inverses: kernel, conditioning, E[sigmoid], cross-entropy."""
    known, new = (normalize(x[part]) for part in (~held_out, held_out))

    def kernel(one, other):
        return 8 * (-(one.unsqueeze(1) - other).square().sum(-1) / 2).exp()

    k = kernel(known, known) + 1e-3 * torch.eye(len(known), dtype=x.dtype)
    cross, kappa = kernel(known, new), side[~held_out] / 2
    inverse = torch.linalg.inv(k + torch.diag_embed(1 / omega))
    mean = (cross.T @ inverse @ (kappa / omega).unsqueeze(-1)).squeeze(-1)
    variance = 8.001 - (cross.T @ inverse @ cross).diagonal(dim1=-2, dim2=-1)
    places, weights = map(torch.from_numpy, np.polynomial.hermite.hermgauss(20))
    f = mean.unsqueeze(-1) + (2 * variance).sqrt().unsqueeze(-1) * places
    probability = (f.sigmoid() @ weights / np.sqrt(np.pi)).mean(0)
    return binary_cross_entropy(probability, (side[held_out] + 1) / 2)


def reference_update(phi, data, ctx, *, steps, lr, momentum, decay):
    """The update of the method card by autograd, on the same splits and the same omega."""
    rng, velocity, tree = ctx.rng("gibbs"), 0.0, None
    for x, y in data.batches(data.n, ctx.rng("batches"), steps=steps):
        v = phi.double().requires_grad_()
        w, b = v.split([6_400, 100])
        embeddings = linear(x.double().flatten(1), w.view(100, 64), b).relu()
        tree = class_tree(embeddings.detach().float(), y, 10) if tree is None else tree
        losses = []
        for split in tree:
            points = split[y] != 0
            side, z = split[y][points].double(), embeddings[points]
            held_out = part_of_each(side, 0.5, rng)
            known = z[~held_out].detach()
            omega = gibbs(Kernel(8.0, 1.0, 1e-3, CPU)(known), side[~held_out] / 2, 20, 5, 20, rng)
            losses.append(dense_loss(z, side, held_out, omega))
        grad = torch.autograd.grad(sum(losses) / len(losses), v)[0] + decay * v.detach()
        velocity = momentum * velocity + grad
        phi = v.detach() - lr * velocity
    return phi


@pytest.mark.parametrize("steps", [1, 3])
def test_a_round_is_autograd_on_the_same_draws(make_ctx, make_algorithm, steps):
    ctx, algorithm = make_ctx("pfedgp", client=1, tau=steps), make_algorithm("pfedgp")
    data = ctx.task.train_data(1)
    expected = reference_update(ctx.task.initial[:BODY], data, ctx, steps=steps, lr=0.05, momentum=0.9, decay=1e-3)

    message, memory = update_once(algorithm, ctx)

    moved = message["phi"].double() - ctx.task.initial[:BODY]
    torch.testing.assert_close(moved, expected - ctx.task.initial[:BODY], rtol=0, atol=1e-6)
    assert moved.abs().max() > 1e-3
    assert memory == {}


def test_the_server_averages_uniformly(make_ctx, make_algorithm, run_rounds):
    ctx, algorithm = make_ctx("pfedgp"), make_algorithm("pfedgp")

    one, other = (update_once(algorithm, ctx.at(client))[0]["phi"] for client in (0, 1))

    assert ctx.protocol.weighting == "uniform"
    torch.testing.assert_close(run_rounds(algorithm, ctx).server["phi"], (one + other) / 2)


def test_training_lowers_the_loss_on_test_points(make_ctx, make_algorithm, run_rounds):
    ctx, algorithm = make_ctx("pfedgp", tau=5), make_algorithm("pfedgp")
    server = run_rounds(algorithm, ctx, rounds=4).server

    def nll(phi):
        progress = Standing(algorithm, {"phi": phi}, {0: {}, 1: {}}, ctx)
        return progress.evaluate("pm", "mean").metrics[None]["nll"]

    assert nll(server["phi"]) < 0.9 * nll(ctx.task.initial[:BODY])


# --- local work ---


def test_with_one_step_per_round_and_a_fresh_optimiser_momentum_is_idle(make_ctx, make_algorithm):
    algorithm = make_algorithm("pfedgp")

    one, other = (update_once(algorithm, make_ctx("pfedgp", client=0, momentum=m))[0] for m in (0.0, 0.9))

    assert torch.equal(one["phi"], other["phi"])


def test_a_kept_optimiser_goes_on_with_its_momentum(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0, optim_state="persistent"), make_algorithm("pfedgp")
    message, memory = update_once(algorithm, ctx)

    again, _ = update_once(algorithm, ctx, message["phi"], memory)
    anew, _ = update_once(algorithm, ctx, message["phi"])

    # the step of round 1 once more, times lr * momentum
    difference = 0.05 * 0.9 * memory["optimizer.momentum_buffer"]
    torch.testing.assert_close(anew["phi"] - again["phi"], difference, rtol=0, atol=1e-6)


def test_the_batch_size_is_not_used(make_ctx, make_algorithm):
    algorithm = make_algorithm("pfedgp")

    one, other = (update_once(algorithm, make_ctx("pfedgp", client=0, batch_size=size))[0] for size in (3, 50))

    assert torch.equal(one["phi"], other["phi"])


def plain(make_ctx, **settings):
    return make_ctx("pfedgp", client=0, momentum=0.0, weight_decay=0.0, **settings)


def test_the_gradient_is_clipped(make_ctx, make_algorithm):
    ctx = plain(make_ctx, lr=1.0)

    message, _ = update_once(make_algorithm("pfedgp", clip=1e-3), ctx)

    assert (message["phi"] - ctx.task.initial[:BODY]).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_sum_over_four_splits_steps_four_times_as_far_as_their_mean(make_ctx, make_algorithm):
    ctx = plain(make_ctx, lr=1.0)

    by_mean, by_sum = (
        update_once(make_algorithm("pfedgp", tree_loss=kind), ctx)[0]["phi"] - ctx.task.initial[:BODY]
        for kind in ("mean", "sum")
    )

    torch.testing.assert_close(by_sum, 4 * by_mean, rtol=0, atol=1e-6)
    assert by_mean.abs().max() > 1e-3


def test_a_client_with_a_point_per_class_has_nothing_to_hold_out(plane, make_algorithm):
    ctx, algorithm = plane(weight_decay=0.1), make_algorithm("pfedgp")

    message, _ = update_once(algorithm, ctx)

    assert torch.equal(message["phi"], algorithm.init_server(ctx)["phi"])


@pytest.mark.parametrize(
    "option",
    [
        {"output_scale": 4.0},
        {"length_scale": 0.5},
        {"jitter": 1.0},
        {"gibbs_steps": 2},
        {"chains": 5},
        {"pg_terms": 3},
        {"held_out": 0.3},
        {"max_points": 8},
        {"quadrature": 3},
        {"likelihood": "code"},
    ],
    ids=str,
)
def test_every_option_changes_the_embedding_that_is_learned(make_ctx, make_algorithm, option):
    ctx = make_ctx("pfedgp", client=0)

    changed, _ = update_once(make_algorithm("pfedgp", **option), ctx)

    assert (changed["phi"] - update_once(make_algorithm("pfedgp"), ctx)[0]["phi"]).abs().max() > 1e-7


@pytest.mark.parametrize(
    "option",
    [
        {"output_scale": 0.0},
        {"length_scale": 0.0},
        {"jitter": 0.0},
        {"gibbs_steps": 0},
        {"chains": 0},
        {"test_chains": 0},
        {"pg_terms": 0},
        {"held_out": 1.0},
        {"max_points": 1},
        {"quadrature": 0},
        {"likelihood": "log"},
        {"tree_loss": "max"},
        {"clip": 0.0},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(make_job, option):
    with pytest.raises(FedbenchError, match=next(iter(option))):
        make_job("pfedgp", **option)


def test_the_codes_likelihood_gives_the_first_side_less_and_still_adds_up_to_1(make_ctx, make_algorithm):
    ctx = make_ctx("pfedgp", client=0)
    model, x = model_of(make_algorithm("pfedgp"), ctx), ctx.task.test_data(0).x[:20]

    expected, code = (
        make_algorithm("pfedgp", likelihood=kind).predict(model, x, ctx, "mean") for kind in ("expected", "code")
    )

    first = model["tree"][0] > 0
    assert (code[:, first].sum(1) < expected[:, first].sum(1)).all()
    torch.testing.assert_close(code.sum(1), torch.ones(20), rtol=0, atol=1e-6)


# --- many points, equal points, points that are no numbers ---


def test_a_split_sees_at_most_max_points_of_both_sides(make_ctx, make_algorithm, monkeypatch):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp", max_points=7)
    seen = []

    def spied(k, *rest):
        seen.append(len(k))
        return gibbs(k, *rest)

    monkeypatch.setattr(pfedgp, "gibbs", spied)
    model = model_of(algorithm, ctx)
    update_once(algorithm, ctx)

    assert ctx.task.train_data(0).n == 25
    assert set(seen[:4]) <= {6, 7}  # of the personal model; both sides are rounded down
    assert max(seen[4:]) <= 4  # of a round, which holds out half of them
    for split, omega in zip(model["tree"], model["omega"], strict=True):
        sides = split[model["y"][omega[0] > 0]]
        assert {1, -1} == set(sides.tolist())
    assert algorithm.predict(model, ctx.task.test_data(0).x, ctx, "mean").isfinite().all()


def test_an_embedding_without_any_difference_does_no_harm(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")
    server = {"phi": torch.zeros(BODY)}  # all embeddings are 0

    message, _ = update_once(algorithm, ctx, server["phi"])
    found = algorithm.predict(model_of(algorithm, ctx, server), ctx.task.test_data(0).x, ctx, "mean")

    assert is_finite(message)
    torch.testing.assert_close(found.sum(1), torch.ones(len(found)), rtol=0, atol=1e-6)


def test_an_embedding_that_is_no_number_is_sent_as_such_for_the_loop_to_see(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")

    message, _ = update_once(algorithm, ctx, torch.full((BODY,), torch.nan))

    assert not is_finite(message)


# --- what travels, and newcomers ---


def test_only_the_body_travels(make_ctx, make_algorithm):
    ctx, algorithm = make_ctx("pfedgp", client=0), make_algorithm("pfedgp")
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, _ = update_once(algorithm, ctx)

    # 4 * (64*100 + 100) bytes both ways
    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 26_000


def test_a_frozen_head_makes_no_difference(make_ctx, make_algorithm):
    algorithm = make_algorithm("pfedgp")

    whole, body = (update_once(algorithm, make_ctx("pfedgp", client=0, train_part=part))[0] for part in ("all", "body"))

    assert torch.equal(whole["phi"], body["phi"])


def test_a_newcomer_builds_its_tree_and_trains_nothing(make_ctx, make_algorithm):
    ctx, algorithm = replace(make_ctx("pfedgp", client=0), novel=True), make_algorithm("pfedgp")
    server = algorithm.init_server(ctx)

    message, memory = update_once(algorithm, ctx)
    models = [algorithm.personal_model(server, memory, ctx.task.train_data(0), ctx, epochs) for epochs in (None, 5)]

    assert torch.equal(message["phi"], server["phi"])
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert torch.equal(models[0]["phi"], server["phi"])


def test_a_network_of_one_layer_has_nothing_to_share(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="pFedGP shares the body, and a single layer has none"):
        make_algorithm("pfedgp").init_server(make_ctx("pfedgp", model="logreg"))


def test_the_functions_of_the_method_are_those_that_are_tested():
    assert pfedgp.gibbs is gp.gibbs
    assert pfedgp.predictive is gp.predictive
