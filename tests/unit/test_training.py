"""Local training on the flat vector, and the server's average."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Ctx, Upload
from fedbench.job import Protocol
from fedbench.models import build_model
from fedbench.training import (
    adjusted,
    average,
    backward,
    fine_tune,
    gradient,
    learning_rate,
    local_batches,
    local_sgd,
    make_optimizer,
    optimizer_state,
    proximal,
    restore_optimizer,
)


def server_ctx(round_=1, **protocol):
    """A context for hooks that need no task."""
    return Ctx(None, Protocol(**protocol), seed=0, round=round_)


def uploads_of(*vectors, n=None):
    sizes = n or [1] * len(vectors)
    return [Upload(i, size, {"w": torch.as_tensor(v)}) for i, (v, size) in enumerate(zip(vectors, sizes, strict=True))]


# --- learning rate ---


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        # floor(8/2) = 4 and floor(24/4) = 6 rounds are done before the drops
        (8, [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        # floor(5/2) = 2 and floor(15/4) = 3
        (5, [1, 1, 0.1, 0.01, 0.01]),
    ],
)
def test_the_rate_drops_after_half_and_after_three_quarters_of_the_rounds(rounds, expected):
    rates = [learning_rate(server_ctx(r, rounds=rounds, lr=1.0, lr_decay=0.1)) for r in range(1, rounds + 1)]

    assert rates == pytest.approx(expected)


def test_the_rate_is_constant_without_decay():
    rates = {learning_rate(server_ctx(r, rounds=8, lr=0.3)) for r in range(1, 9)}

    assert rates == {0.3}


# --- local work ---


def test_tau_counts_epochs_or_batches_as_the_protocol_says(make_ctx):
    # digits, small: 5 labels x 5 images = 25 training samples, i.e. 3 batches of 10 in a pass
    epochs = make_ctx(client=0, local_unit="epoch", tau=2, batch_size=10)
    batches = make_ctx(client=0, local_unit="batch", tau=4, batch_size=10)

    assert [len(y) for _, y in local_batches(epochs.task.train_data(0), epochs)] == [10, 10, 5, 10, 10, 5]
    assert [len(y) for _, y in local_batches(batches.task.train_data(0), batches)] == [10, 10, 5, 10]


@pytest.mark.parametrize(("unit", "sizes"), [("epoch", [10, 10, 5] * 3), ("batch", [10, 10, 5])])
def test_a_phase_says_how_much_of_the_unit_it_wants(make_ctx, unit, sizes):
    ctx = make_ctx(client=0, local_unit=unit, tau=1, batch_size=10)

    assert [len(y) for _, y in local_batches(ctx.task.train_data(0), ctx, work=3)] == sizes
    assert list(local_batches(ctx.task.train_data(0), ctx, work=0)) == []


def test_phases_with_one_generator_are_one_round_of_work(make_ctx):
    ctx = make_ctx(client=0, tau=5, batch_size=10)
    data, order = ctx.task.train_data(0), ctx.rng("batches")

    phases = [x for work in (3, 0, 2) for x, _ in local_batches(data, ctx, work, order)]

    assert torch.equal(torch.cat(phases), torch.cat([x for x, _ in local_batches(data, ctx)]))


def test_local_batches_of_two_rounds_are_in_different_order(make_ctx):
    ctx = make_ctx(client=0, rounds=2)
    later = Ctx(ctx.task, ctx.protocol, ctx.seed, round=2, client=0)
    data = ctx.task.train_data(0)

    first, second = (torch.cat([x for x, _ in local_batches(data, when)]) for when in (ctx, later))

    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.05, "local_unit": "batch", "tau": 7},
        {"lr": 0.05, "rounds": 1, "lr_decay": 0.5},
        {"lr": 0.003, "optimizer": "adam", "weight_decay": 0.01},
    ],
    ids=["plain", "momentum and decay", "batches", "decayed rate", "adam"],
)
def test_local_training_is_an_ordinary_torch_loop_on_the_same_batches(make_ctx, settings):
    ctx = make_ctx(client=1, batch_size=10, **{"tau": 2, **settings})
    task, protocol = ctx.task, ctx.protocol
    module = build_model("dnn100", (1, 8, 8), 10)
    module.load_state_dict(task.net.module.state_dict())
    rate = 0.05 * 0.5**2 if "lr_decay" in settings else protocol.lr  # a single round lies after both drops
    if protocol.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), lr=rate, weight_decay=protocol.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            module.parameters(), lr=rate, momentum=protocol.momentum, weight_decay=protocol.weight_decay
        )
    work = {"steps" if protocol.local_unit == "batch" else "epochs": protocol.tau}
    for x, y in task.train_data(1).batches(10, ctx.rng("batches"), **work):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    trained, _ = local_sgd(task.initial, task.train_data(1), ctx)

    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(trained, task.initial)


def test_local_training_leaves_its_start_alone_and_returns_a_copy(make_ctx):
    ctx = make_ctx(client=0, lr=0.1)
    start = ctx.task.initial.clone()

    trained, _ = local_sgd(start, ctx.task.train_data(0), ctx)
    kept = trained.clone()
    ctx.task.net.load(torch.zeros_like(start))

    assert torch.equal(start, ctx.task.initial)
    assert torch.equal(trained, kept)


def test_an_extra_gradient_is_added_before_every_step(make_ctx):
    # 25 samples, full batch, 1 epoch: one step of rate 0.1, to which the extra gradient of ones adds -0.1
    ctx = make_ctx(client=0, lr=0.1, batch_size=25)
    data = ctx.task.train_data(0)

    plain, _ = local_sgd(ctx.task.initial, data, ctx)
    pushed, _ = local_sgd(ctx.task.initial, data, ctx, extra_grad=lambda w, grad: grad.add_(1.0))

    torch.testing.assert_close(pushed, plain - 0.1, rtol=0, atol=1e-6)


def test_an_extra_gradient_sees_the_parameters_of_the_moment(make_ctx):
    ctx = make_ctx(client=0, lr=0.1, batch_size=25, tau=2)
    seen = []

    local_sgd(ctx.task.initial, ctx.task.train_data(0), ctx, extra_grad=lambda w, grad: seen.append(w.clone()))

    assert len(seen) == 2
    assert torch.equal(seen[0], ctx.task.initial)
    assert not torch.equal(seen[1], seen[0])


def test_a_gradient_is_taken_at_the_given_vector_times_a_factor(make_ctx):
    ctx = make_ctx(client=0)
    net, data = ctx.task.net, ctx.task.train_data(0)
    vector = ctx.task.initial * 0.5

    once = gradient(net, data.x, data.y, 1, vector).clone()
    tripled = gradient(net, data.x, data.y, 3, vector)

    assert torch.equal(net.vector, vector)
    torch.testing.assert_close(tripled, 3 * once)


def test_a_proximal_gradient_is_the_distance_from_the_anchor_times_its_weight():
    anchor, grad = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    pull = proximal(anchor, 0.5)

    pull(torch.tensor([3.0, 2.0]), grad)
    # 10 + 0.5 (3 - 1), 20 + 0.5 (2 - 2)
    assert grad.tolist() == [11.0, 20.0]

    anchor.zero_()
    pull(torch.tensor([3.0, 2.0]), grad)
    # a moved anchor counts from then on: 11 + 0.5 * 3, 20 + 0.5 * 2
    assert grad.tolist() == [12.5, 21.0]


def test_an_adjusted_context_differs_in_these_settings_only():
    ctx = server_ctx(round_=3, lr=0.1, tau=2)

    other = adjusted(ctx, tau=8)

    assert (other.round, other.protocol.lr, other.protocol.tau) == (3, 0.1, 8)
    assert ctx.protocol.tau == 2


# --- fine-tuning ---


def test_fine_tuning_runs_for_epochs_or_for_single_batches(make_ctx):
    ctx = make_ctx(client=0, lr=0.1, batch_size=10)
    net, data, start = ctx.task.net, ctx.task.train_data(0), ctx.task.initial
    x, y = next(data.batches(10, ctx.rng("adapt"), epochs=1))
    net.load(start)
    backward(net, x, y)
    expected = start - 0.1 * net.grad

    one_batch = fine_tune(start, data, ctx, steps=1)

    torch.testing.assert_close(one_batch, expected, rtol=1e-5, atol=1e-7)
    # 25 samples: a pass is three batches
    assert torch.equal(fine_tune(start, data, ctx, steps=3), fine_tune(start, data, ctx, 1))


def test_fine_tuning_repeats_its_steps_on_each_batch(make_ctx):
    # one full batch: two steps on it are two epochs, up to the order of the samples
    ctx = make_ctx(client=0, lr=0.1, batch_size=25)
    data, start = ctx.task.train_data(0), ctx.task.initial

    torch.testing.assert_close(fine_tune(start, data, ctx, 1, repeats=2), fine_tune(start, data, ctx, 2))


def test_an_extra_gradient_of_fine_tuning_is_of_the_whole_network(make_ctx):
    ctx = make_ctx(client=0, lr=0.1, batch_size=25, train_part="body")
    net, data, start = ctx.task.net, ctx.task.train_data(0), ctx.task.initial

    plain = fine_tune(start, data, ctx, 1)
    pushed = fine_tune(start, data, ctx, 1, extra_grad=lambda w, grad: grad.add_(1.0))

    # one step of rate 0.1
    assert plain.shape == net.flat.shape
    torch.testing.assert_close(pushed, plain - 0.1, rtol=0, atol=1e-6)


def test_an_extra_gradient_does_not_move_a_body_that_is_not_adapted(make_ctx):
    ctx = make_ctx(client=0, lr=0.1, adapt_part="head")
    net, start = ctx.task.net, ctx.task.initial

    tuned = fine_tune(start, ctx.task.train_data(0), ctx, 1, extra_grad=lambda w, grad: grad.add_(1.0))

    assert torch.equal(tuned[net.body], start[net.body])
    assert not torch.equal(tuned[net.head], start[net.head])


def test_dropout_of_fine_tuning_does_not_depend_on_what_ran_before(make_ctx, pictures):
    ctx = make_ctx(client=0, dataset=pictures, model="cnn5_100", lr=0.1)
    data, start = ctx.task.train_data(0), ctx.task.initial

    first = fine_tune(start, data, ctx, 1)
    ctx.task.net.use_generator(torch.Generator().manual_seed(5))

    assert torch.equal(fine_tune(start, data, ctx, 1), first)


# --- optimiser state ---


def steps(vector, optimizer, gradients):
    for grad in gradients:
        vector.grad = grad.clone()
        optimizer.step()


@pytest.fixture
def gradients():
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9}], ids=["adam", "momentum"])
def test_a_restored_optimiser_goes_on_as_if_it_had_never_stopped(settings, gradients):
    ctx = server_ctx(optim_state="persistent", **settings)
    whole, halved = (torch.nn.Parameter(torch.ones(50), requires_grad=False) for _ in range(2))
    steps(whole, make_optimizer(whole, ctx), gradients)

    before = make_optimizer(halved, ctx)
    steps(halved, before, gradients[:3])
    memory = optimizer_state(before, ctx, "optimizer.")
    after = make_optimizer(halved, ctx)
    restore_optimizer(after, memory, "optimizer.")
    steps(halved, after, gradients[3:])

    assert torch.equal(halved, whole)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9}], ids=["adam", "momentum"])
def test_without_restoring_the_optimiser_goes_elsewhere(settings, gradients):
    ctx = server_ctx(optim_state="persistent", **settings)
    whole, halved = (torch.nn.Parameter(torch.ones(50), requires_grad=False) for _ in range(2))
    steps(whole, make_optimizer(whole, ctx), gradients)

    for half in (gradients[:3], gradients[3:]):
        steps(halved, make_optimizer(halved, ctx), half)

    assert not torch.equal(halved, whole)


def test_a_restored_optimiser_does_not_change_the_memory_it_came_from(gradients):
    ctx = server_ctx(optimizer="adam", optim_state="persistent")
    vector = torch.nn.Parameter(torch.ones(50), requires_grad=False)
    first = make_optimizer(vector, ctx)
    steps(vector, first, gradients[:3])
    memory = optimizer_state(first, ctx, "optimizer.")
    before = {key: value.clone() for key, value in memory.items()}

    second = make_optimizer(vector, ctx)
    restore_optimizer(second, memory, "optimizer.")
    steps(vector, second, gradients[3:])

    assert memory.keys() == before.keys()
    assert all(torch.equal(memory[key], before[key]) for key in memory)


def test_nothing_is_kept_when_the_protocol_resets_the_optimiser(gradients):
    ctx = server_ctx(optimizer="adam", optim_state="reset")
    vector = torch.nn.Parameter(torch.ones(50), requires_grad=False)
    optimizer = make_optimizer(vector, ctx)
    steps(vector, optimizer, gradients)

    assert optimizer_state(optimizer, ctx, "optimizer.") == {}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"optimizer": "adam"}, {"optimizer.step", "optimizer.exp_avg", "optimizer.exp_avg_sq"}),
        ({"momentum": 0.9}, {"optimizer.momentum_buffer"}),
        ({}, set()),
    ],
    ids=["adam", "momentum", "plain SGD has no history"],
)
def test_local_training_keeps_the_optimisers_history_in_memory(make_ctx, settings, keys):
    ctx = make_ctx(client=0, optim_state="persistent", **settings)

    _, memory = local_sgd(ctx.task.initial, ctx.task.train_data(0), ctx)

    assert set(memory) == keys


def test_two_trainings_keep_their_histories_under_different_names(make_ctx):
    ctx = make_ctx(client=0, optim_state="persistent", momentum=0.9, lr=0.1)
    data, start = ctx.task.train_data(0), ctx.task.initial

    one, kept = local_sgd(start, data, ctx)
    other, kept_by_other = local_sgd(0.5 * start, data, ctx, prefix="own.")
    both = {**kept, **kept_by_other}

    assert set(both) == {"optimizer.momentum_buffer", "own.momentum_buffer"}
    assert torch.equal(local_sgd(one, data, ctx, both)[0], local_sgd(one, data, ctx, kept)[0])
    assert not torch.equal(local_sgd(other, data, ctx, both, prefix="own.")[0], local_sgd(other, data, ctx, both)[0])


def test_local_training_takes_up_the_history_it_kept(make_ctx):
    ctx = make_ctx(client=0, optim_state="persistent", momentum=0.9, lr=0.1)
    data = ctx.task.train_data(0)
    trained, memory = local_sgd(ctx.task.initial, data, ctx)

    with_history, _ = local_sgd(trained, data, ctx, memory)
    without, _ = local_sgd(trained, data, ctx)

    assert not torch.equal(with_history, without)


# --- the server's average ---


def test_an_average_weighted_by_samples():
    # (1*0 + 3*4) / 4
    result = average({}, uploads_of([0.0], [4.0], n=[1, 3]), server_ctx(weighting="samples"))

    assert result["w"].tolist() == [3.0]


def test_an_average_with_equal_weights():
    # (0 + 4) / 2, whatever the sizes
    result = average({}, uploads_of([0.0], [4.0], n=[1, 3]), server_ctx(weighting="uniform"))

    assert result["w"].tolist() == [2.0]


def test_an_average_of_three_clients():
    # (1*1 + 2*4 + 5*10) / 8 = 59 / 8
    result = average({}, uploads_of([1.0], [4.0], [10.0], n=[1, 2, 5]), server_ctx(weighting="samples"))

    assert result["w"].tolist() == pytest.approx([7.375])


@pytest.mark.parametrize(("beta", "expected"), [(0.25, 1.5), (1.0, 3.0), (2.0, 5.0)])
def test_beta_goes_from_the_servers_model_towards_the_average_and_beyond(beta, expected):
    # (1 - beta) * 1 + beta * 3
    result = average({"w": torch.tensor([1.0])}, uploads_of([2.0], [4.0]), server_ctx(beta=beta))

    assert result["w"].tolist() == pytest.approx([expected])


def test_an_average_treats_every_tensor_of_the_message():
    uploads = [Upload(i, 1, {"a": torch.tensor([v]), "b": torch.tensor([10 * v])}) for i, v in enumerate((1.0, 3.0))]

    result = average({}, uploads, server_ctx())

    assert {key: value.tolist() for key, value in result.items()} == {"a": [2.0], "b": [20.0]}


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    st.lists(st.integers(1, 5000), min_size=1, max_size=9),
)
def test_the_average_of_equal_models_is_that_model_bit_for_bit(values, sizes):
    model = torch.tensor(values)

    result = average({}, uploads_of(*[model] * len(sizes), n=sizes), server_ctx(weighting="samples"))

    assert torch.equal(result["w"], model)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 5000)), min_size=1, max_size=20))
def test_an_average_is_the_weighted_mean_in_double_precision(clients):
    values, sizes = zip(*clients, strict=True)

    result = average({}, uploads_of(*[[v] for v in values], n=list(sizes)), server_ctx(weighting="samples"))

    expected = sum(v * n for v, n in clients) / sum(sizes)
    assert result["w"].item() == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_an_average_does_not_change_what_it_averages():
    uploads, server = uploads_of([1.0, 2.0], [3.0, 4.0]), {"w": torch.tensor([5.0, 6.0])}

    average(server, uploads, server_ctx(beta=0.5))

    assert [u.message["w"].tolist() for u in uploads] == [[1.0, 2.0], [3.0, 4.0]]
    assert server["w"].tolist() == [5.0, 6.0]


def test_an_average_takes_uploads_as_they_come():
    asked = []

    def stream():
        for upload in uploads_of([1.0], [2.0], [3.0]):
            asked.append(upload.client)
            yield upload

    result = average({}, stream(), server_ctx())

    assert asked == [0, 1, 2]
    assert result["w"].tolist() == pytest.approx([2.0])
