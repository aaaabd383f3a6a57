"""Per-FedAvg by hand: inner step, first-order and Hessian meta step, and the adaptation that makes personal models."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fedbench.models.dropout import Dropout

ZEROS = torch.zeros(6)
ONES = torch.ones(6)


def update(algorithm, ctx, w):
    message, _ = algorithm.update({"w": w}, {}, ctx.task.train_data(ctx.client), ctx)
    return message["w"]


# --- by hand ---


@pytest.mark.parametrize(("meta_gradient", "expected"), [("fo", 1.16), ("hf", 1.128)])
def test_the_worked_example_on_a_quadratic(make_ctx, make_algorithm, tiny, quadratic, meta_gradient, expected):
    visited = quadratic(2.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, lr=0.05, **tiny)

    w = update(make_algorithm("perfedavg", lr_inner=0.1, meta_gradient=meta_gradient), ctx, ONES)

    # f = (w-3)^2 from 1: gradient -4, inner point 1 + 0.1 * 4; there the gradient is -3.2.
    # First order: 1 + 0.05 * 3.2. With the Hessian 2: 1 + 0.05 * 3.2 (1 - 0.1 * 2)
    assert visited[1].tolist() == pytest.approx([1.4] * 6)
    assert w.tolist() == pytest.approx([expected] * 6, abs=1e-5)


def test_one_first_order_step_on_the_tiny_task(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("perfedavg", client=0, lr=0.1, **tiny)

    w = update(make_algorithm("perfedavg", lr_inner=1.0), ctx, ZEROS)

    # Inner point: minus the gradient at 0, (0.25, -0.5, -0.25, 0.5, 0, 0). There the image (1, 0) of class 0 has logits
    # 0.25 and -0.25, so class 1 has probability 1/(1 + e^0.5) = 0.377541; the image (0, 2) of class 1 has logits -1 and
    # 1, so class 0 has 1/(1 + e^2) = 0.119203. Gradient of class 0: (-0.377541 (1, 0) + 0.119203 (0, 2)) / 2; of its
    # bias: (-0.377541 + 0.119203) / 2; of class 1: the negative. The step goes from 0, not from the inner point.
    expected = [0.0188770, -0.0119203, -0.0188770, 0.0119203, 0.0129169, -0.0129169]
    assert w.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_hessian_step_is_the_exact_meta_gradient(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("perfedavg", client=0, lr=0.1, **tiny)
    data, start = ctx.task.train_data(0), torch.tensor([0.5, -0.3, 0.2, 0.4, -0.1, 0.3])
    w = start.double().requires_grad_()

    def loss(theta):
        return cross_entropy(linear(data.x.double().flatten(1), theta[:4].view(2, 2), theta[4:]), data.y)

    (inner,) = torch.autograd.grad(loss(w), w, create_graph=True)
    (exact,) = torch.autograd.grad(loss(w - 2.0 * inner), w)  # full batches: B, B' and B'' are the same data

    moved = update(make_algorithm("perfedavg", lr_inner=2.0, meta_gradient="hf"), ctx, start)
    first_order = update(make_algorithm("perfedavg", lr_inner=2.0), ctx, start)

    torch.testing.assert_close(moved.double(), start.double() - 0.1 * exact, rtol=0, atol=2e-5)
    assert (first_order - moved).abs().max() > 1e-3  # the Hessian's part is not negligible here


def test_the_finite_difference_is_a_given_part_of_the_weights(make_ctx, make_algorithm, tiny, quadratic):
    visited = quadratic(2.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, **tiny)

    update(make_algorithm("perfedavg", meta_gradient="hf", delta=0.01), ctx, 5 * ONES)

    # w, w', w + delta g', w - delta g'; ||w|| = 5 sqrt(6)
    above, below = (point - 5 * ONES for point in visited[2:])
    assert above.norm().item() == pytest.approx(0.01 * 5 * math.sqrt(6), rel=1e-4)
    torch.testing.assert_close(below, -above, rtol=1e-4, atol=1e-6)


def test_the_finite_difference_works_at_zero_weights_and_at_zero_gradients(make_ctx, make_algorithm, tiny, quadratic):
    visited = quadratic(2.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, lr=0.05, **tiny)
    algorithm = make_algorithm("perfedavg", lr_inner=0.1, meta_gradient="hf")

    from_zero, from_optimum = update(algorithm, ctx, ZEROS), update(algorithm, ctx, 3 * ONES)

    # from 0: gradient -6, inner point 0.6, there -4.8; 0.05 * 4.8 (1 - 0.1 * 2). The difference has length 1e-3
    assert from_zero.tolist() == pytest.approx([0.192] * 6, abs=1e-5)
    assert visited[2].norm().item() == pytest.approx(1e-3, rel=1e-4)
    assert from_optimum.tolist() == [3.0] * 6


# --- batches ---


@pytest.fixture
def batches(monkeypatch):
    """The images of every gradient that updates ask for."""
    from fedbench.algorithms import perfedavg

    seen, gradient = [], perfedavg.gradient

    def spied(net, x, y, factor, vector):
        seen.append(x)
        return gradient(net, x, y, factor, vector)

    monkeypatch.setattr(perfedavg, "gradient", spied)
    return seen


def test_the_three_batches_of_a_step_are_independent(make_ctx, make_algorithm, batches):
    ctx = make_ctx("perfedavg", client=0, batch_size=10, local_unit="batch", tau=1)

    update(make_algorithm("perfedavg", meta_gradient="hf"), ctx, ctx.task.initial)

    inner, outer, above, below = batches
    assert torch.equal(above, below)
    for one, other in ((inner, outer), (inner, above), (outer, above)):
        assert not torch.equal(one, other)


def test_the_first_order_step_needs_two_gradients(make_ctx, make_algorithm, batches):
    ctx = make_ctx("perfedavg", client=0, batch_size=10, tau=2)

    update(make_algorithm("perfedavg"), ctx, ctx.task.initial)

    # two epochs of three batches
    assert len(batches) == 2 * 6


def test_both_sides_of_the_difference_have_the_same_dropout(make_ctx, make_algorithm, pictures, monkeypatch):
    masks, forward = [], Dropout.forward
    monkeypatch.setattr(
        Dropout, "forward", lambda self, x: masks.append(forward(self, 1.0 + 0 * x)) or forward(self, x)
    )
    ctx = make_ctx("perfedavg", client=0, dataset=pictures, model="cnn5_100", local_unit="batch", tau=1)

    update(make_algorithm("perfedavg", meta_gradient="hf"), ctx, ctx.task.initial)

    inner, outer, above, below = masks
    assert torch.equal(above, below)
    assert not torch.equal(inner, outer)
    assert not torch.equal(outer, above)


# --- special cases ---


@pytest.mark.parametrize("meta_gradient", ["fo", "hf"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_with_alpha_zero_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, rounds, meta_gradient):
    settings = {"momentum": 0.9, "optim_state": "persistent", "lr_decay": 0.5, "rounds": 3}
    ctx = make_ctx(clients=4, f=0.5, lr=0.1, batch_size=10, tau=2, **settings)

    # B' is drawn from the stream of FedAvg's batches; B and B'' have streams of their own, and no effect
    algorithm = make_algorithm("perfedavg", lr_inner=0.0, meta_gradient=meta_gradient)
    perfedavg = run_rounds(algorithm, ctx, rounds).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds).server

    assert torch.equal(perfedavg["w"], fedavg["w"])


def test_alpha_is_lr_unless_given(make_ctx, make_algorithm):
    ctx = make_ctx("perfedavg", client=0, lr=0.1)

    default, given, other = (
        update(make_algorithm("perfedavg", **params), ctx, ctx.task.initial)
        for params in ({}, {"lr_inner": 0.1}, {"lr_inner": 0.5})
    )

    assert torch.equal(default, given)
    assert not torch.equal(default, other)


# --- what is deployed ---


def personal(algorithm, ctx, start=1.0, epochs=None):
    return algorithm.personal_model({"w": start * ONES}, {}, ctx.task.train_data(0), ctx, epochs)["w"].tolist()


@pytest.mark.parametrize(
    ("params", "steps", "rate"),
    [
        # two samples in batches of one: two steps a pass
        ({}, 2, 0.1),  # one pass is the default
        ({"adapt": "one_pass"}, 2, 0.1),
        ({"adapt": "one_step"}, 1, 0.1),
        ({"adapt": "epochs"}, 10, 0.05),
        ({"adapt": "epochs", "passes": 3}, 6, 0.05),
    ],
)
def test_the_personal_model_is_an_adaptation_of_the_servers(
    make_ctx, make_algorithm, tiny, quadratic, params, steps, rate
):
    quadratic(1.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, lr=0.05, **{**tiny, "batch_size": 1})

    # the distance to 3 shrinks by 1 - rate in every step: alpha, or the global rate
    expected = 3 - 2 * (1 - rate) ** steps
    assert personal(make_algorithm("perfedavg", lr_inner=0.1, **params), ctx) == pytest.approx([expected] * 6)


@pytest.mark.parametrize(("adapt", "rate"), [("one_step", 0.1), ("one_pass", 0.1), ("epochs", 0.05)])
def test_so_many_epochs_are_asked_for_at_the_rate_of_its_adaptation(
    make_ctx, make_algorithm, tiny, quadratic, adapt, rate
):
    quadratic(1.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, lr=0.05, **{**tiny, "batch_size": 1})
    algorithm = make_algorithm("perfedavg", lr_inner=0.1, adapt=adapt)

    assert personal(algorithm, ctx, epochs=0) == [1.0] * 6
    assert personal(algorithm, ctx, epochs=3) == pytest.approx([3 - 2 * (1 - rate) ** 6] * 6)


@pytest.mark.parametrize("adapt", ["one_pass", "epochs"])
def test_adapt_lr_is_the_rate_of_every_adaptation(make_ctx, make_algorithm, tiny, quadratic, adapt):
    quadratic(1.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, lr=0.05, adapt_lr=0.2, **tiny)
    algorithm = make_algorithm("perfedavg", lr_inner=0.1, adapt=adapt, passes=1)

    assert personal(algorithm, ctx) == pytest.approx([3 - 2 * 0.8] * 6)


def test_with_alpha_zero_the_personal_model_is_the_servers(make_ctx, make_algorithm):
    ctx = make_ctx("perfedavg", client=0, lr=0.1)
    server = {"w": ctx.task.initial}

    adapted = make_algorithm("perfedavg", lr_inner=0.0).personal_model(server, {}, ctx.task.train_data(0), ctx, None)

    assert torch.equal(adapted["w"], server["w"])


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9}], ids=["adam", "momentum"])
def test_steps_at_rate_alpha_are_plain_whatever_the_optimiser(make_ctx, make_algorithm, tiny, quadratic, settings):
    quadratic(1.0, 3.0)
    ctx = make_ctx("perfedavg", client=0, **settings, **{**tiny, "batch_size": 1})

    # Adam's steps would have the length 0.1 each, and momentum would lengthen the second
    assert personal(make_algorithm("perfedavg", lr_inner=0.1), ctx) == pytest.approx([3 - 2 * 0.9**2] * 6)


def test_five_epochs_at_the_global_rate_are_the_fine_tuning_of_fedavg(make_ctx, make_algorithm):
    ctx = make_ctx("perfedavg", client=0, lr=0.1, momentum=0.9, batch_size=10)
    data, server = ctx.task.train_data(0), {"w": ctx.task.initial}

    adapted = make_algorithm("perfedavg", adapt="epochs").personal_model(server, {}, data, ctx, None)
    fine_tuned = make_algorithm("fedavg").personal_model(server, {}, data, ctx, 5)

    assert torch.equal(adapted["w"], fine_tuned["w"])


def test_test_data_is_never_looked_at(make_ctx, make_algorithm, run_rounds, monkeypatch):
    ctx = make_ctx("perfedavg", client=0)
    monkeypatch.setattr(ctx.task, "test_data", lambda *clients: pytest.fail("asked for test data"))
    algorithm = make_algorithm("perfedavg", meta_gradient="hf")

    server = run_rounds(algorithm, ctx).server
    adapted = algorithm.personal_model(server, {}, ctx.task.train_data(0), ctx, None)

    assert not torch.equal(adapted["w"], server["w"])
