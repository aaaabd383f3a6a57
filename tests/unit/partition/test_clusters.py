"""The partition `clusters`: two halves of clients with different images (section 4.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.dataset import Arrays
from fedbench.errors import FedbenchError
from fedbench.partition.clusters import Clusters, ClustersParams
from fedbench.partition.labels import Labels, LabelsParams
from fedbench.rng import numpy_rng

# Per client and class, training / test, and how often each digit occurs: section 4.1.
MNIST_SIZES = {"small": (50, 950), "medium": (200, 800), "large": (900, 300)}
CIFAR_SIZES = {"small": (25, 475), "medium": (100, 400), "large": (450, 150)}
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
REVERSALS = ["invert", "rot180", "labels"]


@pytest.fixture(scope="session")
def cluster(made_up):
    """Prepared data and its split."""

    def make(arrays, clients, sizes, *, seed=0, **params):
        dataset = made_up(int(arrays.y.max()) + 1, sizes)
        partition = Clusters(ClustersParams(**params))
        prepared = partition.prepare(arrays, dataset)
        return prepared, partition.split(prepared, dataset, clients, numpy_rng(seed, "partition"))

    return make


def named(arrays):
    """The same data with images that tell which they are: four pixels, the last two with the number."""
    numbers = np.arange(len(arrays.y))
    x = np.zeros((len(numbers), 1, 2, 2), dtype=np.uint8)
    x[:, 0, 1, 0], x[:, 0, 1, 1] = numbers // 256, numbers % 256
    return replace(arrays, x=x)


def image_numbers(x, reverse):
    """Which images of `named` these are, after turning them back."""
    back = {"invert": lambda x: 255 - x, "rot180": lambda x: x[:, :, ::-1, ::-1], "labels": lambda x: x}[reverse](x)
    return back[:, 0, 1, 0].astype(int) * 256 + back[:, 0, 1, 1]


# --- the reversed copy ---


def prepare(made_up, reverse, full_scale=255, **content):
    arrays = Arrays(np.array([[[[0, 10], [20, 255]]], [[[1, 2], [3, 4]]]], dtype=np.uint8), np.array([0, 2]), 1)
    dataset = made_up(4, full_scale=full_scale)
    return Clusters(ClustersParams(reverse=reverse)).prepare(replace(arrays, **content), dataset)


def test_inverted_pixels_are_taken_from_the_full_scale(made_up):
    prepared = prepare(made_up, "invert")

    assert prepared.x.dtype == np.uint8
    # training image, its copy, test image, its copy
    assert prepared.x[:, 0].tolist() == [
        [[0, 10], [20, 255]],
        [[255, 245], [235, 0]],
        [[1, 2], [3, 4]],
        [[254, 253], [252, 251]],
    ]
    assert prepared.y.tolist() == [0, 0, 2, 2]


def test_the_full_scale_is_the_data_sets_own(made_up):
    digits = np.array([[[[0]]], [[[16]]]], dtype=np.uint8)

    assert prepare(made_up, "invert", full_scale=16, x=digits).x.ravel().tolist() == [0, 16, 16, 0]


def test_inverting_tables_of_numbers_keeps_their_type(made_up):
    numbers = np.array([[[[0.25]]], [[[1.0]]]], dtype=np.float32)

    prepared = prepare(made_up, "invert", full_scale=1, x=numbers)

    assert prepared.x.dtype == np.float32
    assert prepared.x.ravel().tolist() == [0.25, 0.75, 1.0, 0.0]


def test_half_a_turn_reverses_rows_and_columns(made_up):
    prepared = prepare(made_up, "rot180")

    assert prepared.x[1, 0].tolist() == [[255, 20], [10, 0]]
    assert prepared.x[3, 0].tolist() == [[4, 3], [2, 1]]
    assert prepared.y.tolist() == [0, 0, 2, 2]


def test_reversed_labels_count_from_the_other_end(made_up):
    prepared = prepare(made_up, "labels")

    assert prepared.y.tolist() == [0, 3, 2, 1]  # C - 1 - y with C = 4
    assert np.array_equal(prepared.x[0], prepared.x[1])


def test_copies_stand_behind_each_official_part(made_up):
    prepared = prepare(made_up, "invert")

    assert prepared.n_train == 2
    assert prepared.group.tolist() == [0, 1, 0, 1]


def test_preparing_leaves_the_data_alone(made_up):
    x = np.array([[[[1]]], [[[2]]]], dtype=np.uint8)

    prepare(made_up, "invert", x=x)

    assert x.ravel().tolist() == [1, 2]


# --- the worked sizes ---


@pytest.mark.parametrize("reverse", REVERSALS)
@pytest.mark.parametrize("labels", ["block", "shift"])
@pytest.mark.parametrize(
    ("size", "n_train", "n_test"), [("small", 250, 4750), ("medium", 1000, 4000), ("large", 4500, 1500)]
)
def test_client_totals_on_mnist(official, cluster, size, n_train, n_test, labels, reverse):
    _, split = cluster(official(MNIST_TRAIN, MNIST_TEST), 10, MNIST_SIZES, size=size, labels=labels, reverse=reverse)

    assert [len(part) for part in split.train] == [n_train] * 10
    assert [len(part) for part in split.test] == [n_test] * 10


def test_large_cifar_uses_every_image_exactly_once(official, cluster):
    arrays = named(official([5000] * 10, [1000] * 10))

    prepared, split = cluster(arrays, 20, CIFAR_SIZES, size="large")

    used = np.concatenate([*split.train, *split.test])
    copies = prepared.group[used] == 1
    numbers = np.where(copies, image_numbers(prepared.x[used], "invert"), image_numbers(prepared.x[used], "labels"))
    # 20 clients * 5 classes * (450 + 150) = 60,000
    assert np.array_equal(np.sort(numbers), np.arange(60_000))


def test_the_first_half_of_the_clients_has_the_first_kind(official, cluster):
    prepared, split = cluster(official([100] * 10), 5, {"small": (2, 3)})

    kinds = [set(prepared.group[np.concatenate(own)]) for own in zip(split.train, split.test, strict=True)]
    assert kinds == [{0}, {0}, {0}, {1}, {1}]


@pytest.mark.parametrize("reverse", ["invert", "rot180"])
def test_labels_are_those_of_the_partition_labels(official, cluster, made_up, counts, reverse):
    arrays, sizes = official([100] * 10), {"small": (2, 3)}

    prepared, split = cluster(arrays, 10, sizes, labels="shift", reverse=reverse)

    plain = Labels(LabelsParams(labels="shift")).split(arrays, made_up(10, sizes), 10, numpy_rng(0, "partition"))
    assert [counts(prepared, part) for part in split.train] == [counts(arrays, part) for part in plain.train]


def test_reversed_labels_are_the_labels_of_the_same_images(official, cluster, counts):
    arrays = official([100] * 10)

    prepared, split = cluster(arrays, 4, {"small": (2, 3)}, labels="shift", reverse="labels")

    # images of the classes i, ..., i + 4, whose labels are 9 - i, ..., 9 - i - 4 in the second half
    assert [sorted(counts(prepared, part)) for part in split.train] == [
        [0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [3, 4, 5, 6, 7],
        [2, 3, 4, 5, 6],
    ]


# --- no image in both halves ---


@pytest.mark.parametrize("reverse", REVERSALS)
def test_the_halves_take_from_different_halves_of_every_class(official, cluster, reverse):
    arrays = named(official([100] * 10))

    prepared, split = cluster(arrays, 10, {"small": (2, 3)}, reverse=reverse)

    first = image_numbers(prepared.x[np.concatenate([*split.train[:5], *split.test[:5]])], "labels")
    second = image_numbers(prepared.x[np.concatenate([*split.train[5:], *split.test[5:]])], reverse)
    place = np.empty(1000, dtype=int)  # of an image among those of its class
    for label in range(10):
        place[arrays.y == label] = np.arange(100)
    assert place[first].max() < 50 <= place[second].min()


@given(
    st.sampled_from(REVERSALS),
    st.sampled_from(["block", "shift", "random"]),
    st.integers(2, 9),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 1000),
)
def test_no_image_serves_both_halves_however_scarce_they_are(
    official, cluster, assert_disjoint, reverse, labels, clients, number, stratified, seed
):
    # 3 images of each of its labels for every client: exactly enough if all have a label
    arrays = named(official([3 * clients] * 5, seed=seed))

    prepared, split = cluster(
        arrays,
        clients,
        {"small": (1, 2)},
        reverse=reverse,
        labels=labels,
        labels_per_client=number,
        stratified=stratified,
        seed=seed,
    )

    assert_disjoint(*split.train, *split.test)
    used = np.concatenate([*split.train, *split.test])
    own, copies = used[prepared.group[used] == 0], used[prepared.group[used] == 1]
    assert not set(image_numbers(prepared.x[own], "labels")) & set(image_numbers(prepared.x[copies], reverse))
    assert {len(part) for part in split.train} == {number}
    assert {len(part) for part in split.test} == {2 * number}


def test_the_border_moves_when_a_half_needs_more_than_half_a_class(official, cluster):
    # three clients: two in the first half need 2 * 4 of 12 images of each class, more than 6; the third needs 4
    arrays = named(official([12] * 2))

    prepared, split = cluster(arrays, 3, {"small": (2, 2)}, labels_per_client=2)

    assert len(np.concatenate([*split.train, *split.test])) == 24
    assert (prepared.group[split.train[2]] == 1).all()


# --- pairs ---


@pytest.fixture
def pair(official):
    """Two data sets of two classes, six images each, mixed up."""
    arrays = official([6, 6])
    return replace(arrays, group=np.arange(12) % 2)


def test_a_pair_is_used_as_it_is(pair, made_up):
    assert Clusters(ClustersParams()).prepare(pair, made_up(2)) is pair


def test_a_pair_is_not_halved(official, cluster):
    # each client needs 4 of 4 images of a class of its own half
    arrays = official([8, 8])
    group = np.empty(16, dtype=np.int64)
    for label in (0, 1):
        group[arrays.y == label] = np.arange(8) % 2

    prepared, split = cluster(replace(arrays, group=group), 2, {"small": (2, 2)}, labels_per_client=2)

    assert [set(prepared.group[part]) for part in split.train] == [{0}, {1}]
    assert sum(map(len, (*split.train, *split.test))) == 16


def test_groups_other_than_two_halves_are_refused(pair, cluster):
    with pytest.raises(FedbenchError, match="no pair"):
        cluster(replace(pair, group=np.arange(12) % 3), 2, {"small": (1, 1)}, labels_per_client=2)


# --- randomness, and what is refused ---


@pytest.mark.parametrize("params", [{"labels": "random"}, {"stratified": False}], ids=str)
def test_a_split_follows_from_the_seed(official, cluster, params):
    arrays = official([100] * 10)

    first, again, other = (
        cluster(arrays, 10, {"small": (2, 3)}, seed=seed, **params)[1].sha256() for seed in (7, 7, 8)
    )

    assert first == again
    assert first != other


def test_too_little_data_for_both_halves_is_refused(official, cluster):
    # two clients need 5 + 5 of a class; with 9 images one of them would meet the other's
    with pytest.raises(FedbenchError, match="too few images of class 0"):
        cluster(official([9] * 2), 2, {"small": (2, 3)}, labels_per_client=2)


def test_one_client_is_refused(official, cluster):
    with pytest.raises(FedbenchError, match="at least two clients"):
        cluster(official([9] * 2), 1, {"small": (2, 3)}, labels_per_client=2)


def test_an_unknown_size_gets_a_proposal(official, cluster):
    with pytest.raises(FedbenchError, match="no size 'smal'"):
        cluster(official([9] * 2), 2, {"small": (2, 3)}, size="smal")
