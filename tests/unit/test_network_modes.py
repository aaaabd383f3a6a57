"""Training and evaluation of a network, running statistics, dropout, and the frozen head: on networks made by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedbench.models.dropout import Dropout
from fedbench.models.network import Network
from fedbench.training import average, backward, local_sgd

CPU = torch.device("cpu")


def with_statistics():
    """One channel, a batch norm and two classes: flat = (convolution, scale, shift, mean, variance, head 2 + 2)."""
    net = Network(nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 2)), CPU)
    net.load(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, -1.0, 0.0, 0.0]))
    return net


def with_dropout(width=1000):
    net = Network(nn.Sequential(Dropout(0.6), nn.Linear(width, width, bias=False)), CPU)
    net.load(torch.eye(width).flatten())
    return net


def with_frozen_head():
    """A body of 3 * 2 + 2 = 8 and a head of 2 * 2 + 2 = 6 parameters."""
    net = Network(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), CPU, trained="body")
    net.initialise(torch.Generator().manual_seed(0))
    return net


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def column(*values):
    return torch.tensor(values).view(-1, 1, 1, 1)


# --- running statistics ---


def test_running_statistics_lie_beside_their_layers_parameters():
    net = with_statistics()
    net.flat.copy_(torch.arange(9.0))

    norm = net.module[1]

    assert [t.item() for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)] == [1, 2, 3, 4]
    assert (net.body, net.head, net.d, net.n_parameters) == (slice(0, 5), slice(5, 9), 9, 7)
    assert net.norm_mask.tolist() == [False, True, True, True, True, False, False, False, False]


def test_training_normalises_by_the_batch_and_moves_the_running_statistics_a_tenth():
    net = with_statistics()

    logits = net.logits(column(0.0, 2.0), training=True)

    # mean 1, variance 1 in the batch: -1 and 1; its unbiased variance is 2
    torch.testing.assert_close(logits[:, 0], torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.flat[3:5], torch.tensor([0.1, 0.9 + 0.1 * 2]))


def test_every_training_pass_moves_them_by_the_same_tenth():
    net = with_statistics()

    for _ in range(3):
        net.logits(column(0.0, 2.0), training=True)

    # 1 - 0.9^3 of the way from 0 to 1 and from 1 to 2
    torch.testing.assert_close(net.flat[3:5], torch.tensor([0.271, 1.271]))


def test_evaluation_normalises_by_the_running_statistics_and_leaves_them():
    net = with_statistics()
    net.flat[3:5] = torch.tensor([1.0, 4.0])
    before = net.flat.clone()

    logits = net.logits(column(5.0))

    torch.testing.assert_close(logits[:, 0], torch.tensor([2.0]))  # (5 - 1) / sqrt 4
    assert torch.equal(net.flat, before)
    assert not net.uses_batch_statistics


def test_training_and_evaluation_may_alternate():
    net, x = with_statistics(), column(0.0, 2.0)
    first = net.logits(x)

    net.logits(x, training=True)
    moved = net.logits(x)
    net.flat[3:5] = torch.tensor([0.0, 1.0])

    assert not torch.equal(moved, first)
    assert torch.equal(net.logits(x), first)


def test_a_gradient_step_leaves_the_running_statistics_alone():
    net = with_statistics()
    backward(net, column(0.0, 3.0), torch.tensor([0, 1]))
    statistics = net.flat[3:5].clone()

    torch.optim.SGD([net.vector], lr=0.1, momentum=0.9, fused=True).step()
    torch.optim.Adam([net.vector], lr=0.1, fused=True).step()

    assert net.grad[3:5].tolist() == [0, 0]
    assert torch.equal(net.flat[3:5], statistics)


def test_batch_statistics_do_not_change_with_the_mode():
    module = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(1, 2))
    net = Network(module, CPU)
    net.initialise(generator())
    x = column(0.0, 2.0)

    assert net.uses_batch_statistics
    assert torch.equal(net.logits(x), net.logits(x, training=True))
    assert (net.d, net.n_parameters) == (6, 6)


def test_clients_train_and_servers_average_running_statistics(make_ctx, pictures):
    from fedbench.algorithm import Upload

    ctx = make_ctx(dataset=pictures, model="vgg_s", norm="bn_stats", client=0)
    net, start = ctx.task.net, ctx.task.initial
    # 280,074 parameters and two statistics for each of 16+32+64+128+128 channels
    assert start.numel() == 280_074 + 2 * 368

    trained, _ = local_sgd(start, ctx.task.train_data(0), ctx)
    merged = average({"w": start}, [Upload(0, 1, {"w": trained}), Upload(1, 1, {"w": start})], ctx)["w"]

    net.load(trained)
    of_client = net.module[1].running_mean.clone()
    net.load(merged)
    assert of_client.any()
    torch.testing.assert_close(net.module[1].running_mean, of_client / 2)
    assert not torch.equal(net.logits(ctx.task.train_data(0).x), net.logits(ctx.task.train_data(0).x, training=True))


def test_a_task_takes_the_normalisation_of_its_job(make_ctx, pictures):
    kinds = [
        type(make_ctx(dataset=pictures, model="vgg_s", norm=norm).task.net.module[1]) for norm in ("bn_nostats", "gn")
    ]

    assert kinds == [nn.BatchNorm2d, nn.GroupNorm]


# --- dropout ---


def test_dropout_keeps_two_fifths_and_scales_them():
    net = with_dropout()
    net.use_generator(generator())

    out = net.logits(torch.ones(10, 1000), training=True)

    assert out.unique().tolist() == [0, 2.5]  # 1 / (1 - 0.6)
    # 10,000 draws with probability 0.4: standard deviation 0.0049
    assert (out > 0).float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_a_gradient_passes_where_a_value_was_kept():
    net = with_dropout()
    net.use_generator(generator())
    x = torch.ones(1, 1000, requires_grad=True)

    out = net.logits(x, training=True)
    out.sum().backward()

    assert torch.equal(x.grad, out.detach())


def test_dropout_masks_come_from_the_given_generator():
    net, x = with_dropout(), torch.ones(1, 1000)

    def masks(seed):
        net.use_generator(generator(seed))
        return [net.logits(x, training=True) for _ in range(2)]

    first, again, other = masks(1), masks(1), masks(2)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_dropout_draws_nothing_from_the_global_generator():
    net = with_dropout()
    net.use_generator(generator())
    before = torch.get_rng_state()

    net.logits(torch.ones(1, 1000), training=True)

    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_off_in_evaluation():
    net, x, masks = with_dropout(), torch.ones(1, 1000), generator()
    net.use_generator(masks)
    net.logits(x, training=True)
    before = masks.get_state()

    assert torch.equal(net.logits(x), x)
    assert torch.equal(masks.get_state(), before)


def test_dropout_without_a_generator_says_what_is_missing():
    net = with_dropout()
    assert net.logits(torch.ones(1, 1000)).all()

    with pytest.raises(RuntimeError, match="use_generator"):
        net.logits(torch.ones(1, 1000), training=True)


def test_a_network_without_dropout_takes_a_generator_and_needs_none():
    net = with_frozen_head()
    x = torch.ones(1, 3)
    before = net.logits(x, training=True)

    net.use_generator(generator())

    assert torch.equal(net.logits(x, training=True), before)


# --- the frozen head ---


def test_a_trained_vector_is_extended_by_the_frozen_head():
    net = with_frozen_head()
    head = net.flat[net.head].clone()

    whole = net.extended(torch.full((8,), 2.0))

    assert whole.tolist() == [2.0] * 8 + head.tolist()
    assert net.extended(whole) is whole


def test_where_all_is_trained_a_vector_is_whole_already():
    net = with_statistics()
    vector = torch.zeros(9)

    assert net.extended(vector) is vector
    assert net.whole.data_ptr() == net.vector.data_ptr() == net.flat.data_ptr()
    assert net.whole.shape == net.vector.shape


def test_a_whole_vector_is_loaded_with_its_own_head():
    net = with_frozen_head()

    net.load(torch.arange(14.0))

    assert net.flat.tolist() == list(range(14))
    assert net.vector.tolist() == list(range(8))


def test_a_trained_vector_is_loaded_with_the_frozen_head_whatever_was_there_before():
    net = with_frozen_head()
    start = net.flat.clone()
    net.load(torch.arange(14.0))

    net.load(start[net.body])

    assert torch.equal(net.flat, start)


def test_a_head_trained_in_place_does_not_stay_either():
    net = with_frozen_head()
    start = net.flat.clone()
    net.whole.add_(1.0)

    net.load(start[net.body])

    assert torch.equal(net.flat, start)


def test_the_frozen_head_is_that_of_the_last_initialisation():
    net = with_frozen_head()
    first = net.extended(net.vector)

    net.initialise(generator(1))

    assert not torch.equal(net.extended(net.vector), first)
    assert torch.equal(net.extended(net.vector), net.flat)


def test_the_frozen_head_is_no_view_that_training_could_move():
    net = with_frozen_head()
    whole = net.extended(net.vector)

    net.whole.zero_()

    assert torch.equal(net.extended(whole[net.body]), whole)


def test_a_vector_of_another_length_is_refused():
    for length in (1, 6, 9, 15):
        with pytest.raises(RuntimeError, match="size"):
            with_frozen_head().load(torch.zeros(length))


def test_an_optimiser_of_the_whole_moves_the_head_and_one_of_the_vector_does_not():
    net = with_frozen_head()
    start = net.flat.clone()
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])

    backward(net, x, y)
    torch.optim.SGD([net.vector], lr=0.1, fused=True).step()
    after_vector = net.flat.clone()
    torch.optim.SGD([net.whole], lr=0.1, fused=True).step()

    assert net.whole.grad.shape == (14,)
    assert net.whole.grad[net.body].data_ptr() == net.grad.data_ptr()
    torch.testing.assert_close(after_vector, start - 0.1 * torch.cat([net.grad, torch.zeros(6)]))
    torch.testing.assert_close(net.flat, after_vector - 0.1 * net.whole.grad)
    assert net.whole.grad[net.head].any()


def test_the_gradient_of_the_whole_is_that_of_the_plain_module():
    net = with_frozen_head()
    plain = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    plain.load_state_dict(net.module.state_dict())
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])

    backward(net, x, y)
    cross_entropy(plain(x), y).backward()

    torch.testing.assert_close(net.whole.grad, torch.cat([p.grad.flatten() for p in plain.parameters()]))
