"""A task: clients' samples, their batches, and pixel scaling."""

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError
from fedbench.rng import torch_rng
from fedbench.task import ClientData, Images

CPU = torch.device("cpu")


def pixel(value, full_scale, normalize, channels=1):
    """One pixel of every channel after scaling."""
    x = torch.full((1, channels, 1, 1), value, dtype=torch.uint8)
    return Images(x, full_scale, normalize)[torch.tensor([0])].flatten().tolist()


def samples(n):
    """A client whose i-th sample has the pixel value and the label i."""
    x = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1)
    return ClientData(Images(x, 1, "none"), torch.arange(n), torch.arange(n))


def rng(seed=0):
    return torch_rng(seed, "batches", 1, 0, CPU)


def labels_of(batches):
    return [y.tolist() for _, y in batches]


# --- batches ---


def test_an_epoch_keeps_its_short_last_batch():
    sizes = [len(y) for _, y in samples(25).batches(10, rng(), epochs=2)]

    assert sizes == [10, 10, 5, 10, 10, 5]


def test_steps_cycle_over_passes():
    # a pass is 10, 10, 5: the fourth and fifth batches belong to the second pass
    sizes = [len(y) for _, y in samples(25).batches(10, rng(), steps=5)]

    assert sizes == [10, 10, 5, 10, 10]


def test_a_batch_size_above_n_gives_all_samples_in_every_step():
    batches = labels_of(samples(7).batches(100, rng(), steps=3))

    assert [sorted(batch) for batch in batches] == [list(range(7))] * 3


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 3))
def test_every_sample_comes_once_in_every_pass(n, size, epochs):
    batches = labels_of(samples(n).batches(size, rng(), epochs=epochs))

    per_pass = -(-n // size)
    for start in range(0, len(batches), per_pass):
        assert sorted(chain(*batches[start : start + per_pass])) == list(range(n))
    assert len(batches) == epochs * per_pass


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 30))
def test_steps_are_the_first_batches_of_as_many_epochs_as_are_needed(n, size, steps):
    by_steps = labels_of(samples(n).batches(size, rng(), steps=steps))
    by_epochs = labels_of(islice(samples(n).batches(size, rng(), epochs=steps + 1), steps))

    assert by_steps == by_epochs
    assert len(by_steps) == steps


def test_every_pass_is_shuffled_anew():
    first, second = labels_of(samples(25).batches(25, rng(), epochs=2))

    assert first != second
    assert first != list(range(25))


def test_the_order_of_batches_follows_from_the_generator():
    batches = labels_of(samples(25).batches(10, rng(0), epochs=1))

    assert labels_of(samples(25).batches(10, rng(0), epochs=1)) == batches
    assert labels_of(samples(25).batches(10, rng(1), epochs=1)) != batches


def test_an_image_stays_with_its_label():
    for x, y in samples(25).batches(10, rng(), epochs=1):
        assert torch.equal(x.flatten().long(), y)


@pytest.mark.parametrize("work", [{}, {"steps": 1, "epochs": 1}], ids=["neither", "both"])
def test_batches_want_either_steps_or_epochs(work):
    with pytest.raises(ValueError, match="steps or epochs"):
        list(samples(5).batches(2, rng(), **work))


def test_chunks_keep_the_order_of_the_samples():
    chunks = [y.tolist() for _, y in samples(5).chunks(2)]

    assert chunks == [[0, 1], [2, 3], [4]]


# --- pixel scaling ---


@pytest.mark.parametrize(
    ("normalize", "value", "expected"),
    [
        ("none", 0, 0.0),
        ("none", 255, 1.0),
        ("half", 0, -1.0),
        ("half", 255, 1.0),
        ("half", 51, -0.6),  # 51 / 255 = 0.2; (0.2 - 0.5) / 0.5
        ("mnist", 0, -0.424213),  # -0.1307 / 0.3081
        ("mnist", 255, 2.821487),  # (1 - 0.1307) / 0.3081
    ],
)
def test_pixels_are_scaled_by_mean_and_deviation(normalize, value, expected):
    assert pixel(value, 255, normalize) == pytest.approx([expected], abs=1e-5)


def test_every_channel_has_its_own_mean_and_deviation():
    # (1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225
    assert pixel(255, 255, "imagenet", channels=3) == pytest.approx([2.248908, 2.428571, 2.64], abs=1e-5)


def test_the_full_scale_of_a_data_set_is_one():
    # digits count to 16: 8 / 16 = 0.5, which half maps to 0
    assert pixel(8, 16, "half") == pytest.approx([0.0], abs=1e-6)
    assert pixel(16, 16, "half") == pytest.approx([1.0], abs=1e-6)


def test_scaling_leaves_the_stored_bytes_alone():
    x = torch.full((2, 1, 1, 1), 255, dtype=torch.uint8)
    images = Images(x, 255, "half")

    first, second = images[torch.tensor([0, 1])], images[torch.tensor([0, 1])]

    assert torch.equal(first, second)
    assert x.unique().tolist() == [255]


def test_an_unknown_scaling_is_named_with_the_nearest_known_one():
    with pytest.raises(FedbenchError, match="Did you mean mnist"):
        Images(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), 255, "mnst")


def test_a_scaling_for_three_channels_refuses_grey_images():
    with pytest.raises(FedbenchError, match="3 channels, not 1"):
        Images(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), 255, "imagenet")


# --- clients ---


def test_clients_have_the_samples_that_their_size_says(make_ctx):
    task = make_ctx(size="medium", clients=4).task

    # digits, medium: 15 training and 15 test images of each of 5 labels
    assert task.sizes == (75, 75, 75, 75)
    assert task.test_sizes((0, 3)) == [75, 75]
    assert Counter(task.train_data(0).y.tolist()) == dict.fromkeys(range(5), 15)
    assert Counter(task.train_data(1).y.tolist()) == dict.fromkeys(range(5, 10), 15)


def test_test_data_of_several_clients_comes_one_client_after_the_other(make_ctx):
    task = make_ctx(clients=4).task

    together = task.test_data(2, 0, 3)

    apart = [task.test_data(client) for client in (2, 0, 3)]
    assert torch.equal(together.x, torch.cat([data.x for data in apart]))
    assert torch.equal(together.y, torch.cat([data.y for data in apart]))
    assert together.n == sum(task.test_sizes((2, 0, 3)))


def test_no_sample_is_both_trained_and_tested_on_or_owned_twice(make_ctx):
    split = make_ctx(clients=10).task.split

    owned = np.concatenate([*split.train, *split.test])

    assert len(set(owned.tolist())) == len(owned)


def test_the_same_seed_gives_the_same_split_to_every_method(make_ctx):
    settings = {"clients": 4, "labels": "random", "seed": 3}
    fedavg, pfedbayes = make_ctx("fedavg", **settings).task, make_ctx("pfedbayes", **settings).task

    assert fedavg.split.sha256() == pfedbayes.split.sha256()
    assert torch.equal(fedavg.train_data(1).x, pfedbayes.train_data(1).x)


def test_another_seed_gives_another_random_split(make_ctx):
    one, other = (make_ctx(clients=4, labels="random", seed=seed).task.split.sha256() for seed in (0, 1))

    assert one != other


def test_the_initial_vector_depends_on_the_seed_alone(make_ctx):
    initial = make_ctx("fedavg", seed=0).task.initial

    assert torch.equal(make_ctx("fedprox", seed=0, lr=0.5).task.initial, initial)
    assert not torch.equal(make_ctx("fedavg", seed=1).task.initial, initial)


def test_the_initial_vector_is_not_touched_by_training(make_ctx):
    task = make_ctx().task
    before = task.initial.clone()

    task.net.load(torch.zeros_like(before))

    assert torch.equal(task.initial, before)


def test_making_a_task_draws_nothing_from_the_global_generators(make_ctx):
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    make_ctx(labels="random")

    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_a_network_has_an_output_for_every_class_that_the_partition_keeps(make_ctx):
    task = make_ctx(partition="label_window", keep_classes=4, window=2).task

    assert task.classes == 4
    assert task.net.logits(task.test_data(0).x).shape[1] == 4
