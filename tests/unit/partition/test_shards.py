"""The partition `shards`: the sizes of sections 4.3 and 4.4, equal labels in training and testing, no image twice."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.dataset import datasets, load_arrays
from fedbench.errors import FedbenchError

# How often each digit occurs in MNIST's training and test images.
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@st.composite
def cases(draw):
    """Classes, clients and s that fit together, with a few images per shard."""
    classes = draw(st.integers(1, 6))
    clients = draw(st.integers(1, 8))
    s = classes // gcd(clients, classes) * draw(st.integers(1, 3))
    return classes, clients, s, s * clients // classes


def sizes(parts):
    return {len(part) for part in parts}


# --- the worked sizes ---


@pytest.mark.parametrize(
    ("classes", "per_class", "clients", "s", "n_train", "n_test"),
    [
        (10, (5000, 1000), 100, 2, 500, 100),  # CIFAR-10: 20 shards per class of 250 / 50
        (10, (5000, 1000), 100, 5, 500, 100),  # 50 shards of 100 / 20
        (100, (500, 100), 100, 5, 500, 100),  # CIFAR-100: 5 shards of 100 / 20
        (100, (500, 100), 100, 20, 500, 100),  # 20 shards of 25 / 5
        (100, (500, 100), 100, 10, 500, 100),  # FedHB: s shards per class
        (100, (500, 100), 100, 100, 500, 100),
        (10, (6000, 1000), 200, 2, 300, 50),  # Fashion-MNIST: 40 shards of 150 / 25
        (10, (6000, 1000), 100, 5, 600, 100),
    ],
)
@pytest.mark.parametrize("repeat", [True, False])
def test_client_totals(official, cut, classes, per_class, clients, s, n_train, n_test, repeat):
    arrays = official([per_class[0]] * classes, [per_class[1]] * classes)

    split = cut("shards", arrays, clients, s=s, repeat=repeat)

    assert sizes(split.train) == {n_train}
    assert sizes(split.test) == {n_test}
    assert len(split.train) == len(split.test) == clients


@pytest.mark.parametrize(
    ("classes", "per_class", "clients", "s", "shard"),
    [
        (10, (5000, 1000), 100, 2, (250, 50)),
        (10, (5000, 1000), 100, 5, (100, 20)),
        (100, (500, 100), 100, 20, (25, 5)),
        (10, (6000, 1000), 200, 2, (150, 25)),
    ],
)
def test_shard_sizes(official, cut, counts, classes, per_class, clients, s, shard):
    arrays = official([per_class[0]] * classes, [per_class[1]] * classes)

    split = cut("shards", arrays, clients, s=s, repeat=False)

    for parts, size in zip((split.train, split.test), shard, strict=True):
        assert all(set(counts(arrays, part).values()) == {size} for part in parts)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_client_totals_on_mnist(official, cut, seed):
    split = cut("shards", official(MNIST_TRAIN, MNIST_TEST), 100, s=5, seed=seed)

    # five shards of digit 5 (5421 / 50 and 892 / 50) at least, five of digit 1 (6742 / 50 and 1135 / 50) at most
    assert 540 <= min(sizes(split.train)) < 600 < max(sizes(split.train)) <= 675
    assert 85 <= min(sizes(split.test)) < 100 < max(sizes(split.test)) <= 115
    assert sum(map(len, split.train)) == 60_000
    assert sum(map(len, split.test)) == 10_000


def test_one_in_ten_fashion_clients_has_a_single_class(official, cut, counts):
    arrays = official([6000] * 10, [1000] * 10)

    single = [
        sum(len(counts(arrays, part)) == 1 for part in cut("shards", arrays, 200, s=2, seed=seed).train)
        for seed in range(10)
    ]

    # the second of two shards is of the first one's label with probability 39 / 399: 19.5 of 200 expected
    assert np.mean(single) == pytest.approx(19.5, abs=5)


# --- what holds for every split ---


@given(cases(), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_every_image_is_used_once(official, cut, assert_disjoint, case, has_test, repeat, seed):
    classes, clients, s, shards = case
    repeat = repeat or s > classes
    train = [5 * shards + extra for extra in range(classes)]
    arrays = official(train, [2 * shards] * classes if has_test else ())

    split = cut("shards", arrays, clients, s=s, repeat=repeat, seed=seed)

    assert_disjoint(*split.train, *split.test)
    assert sum(map(len, (*split.train, *split.test))) == len(arrays.y)


@given(cases(), st.integers(0, 1000))
def test_training_and_test_have_the_same_labels_in_the_same_proportions(official, cut, counts, case, seed):
    classes, clients, s, shards = case
    arrays = official([3 * shards] * classes, [2 * shards] * classes)

    split = cut("shards", arrays, clients, s=s, seed=seed)

    for train, test in zip(split.train, split.test, strict=True):
        # 3 training and 2 test images per shard
        rows = {label: count // 3 for label, count in counts(arrays, train).items()}
        assert counts(arrays, test) == {label: 2 * number for label, number in rows.items()}
        assert sum(rows.values()) == s


@given(cases(), st.integers(0, 1000))
def test_official_test_images_are_only_tested_on(official, cut, case, seed):
    classes, clients, s, shards = case
    arrays = official([shards] * classes, [shards] * classes)

    split = cut("shards", arrays, clients, s=s, seed=seed)

    assert max(part.max() for part in split.train) < arrays.n_train
    assert min(part.min() for part in split.test) >= arrays.n_train


@given(cases(), st.integers(0, 1000))
def test_without_repeats_a_client_has_s_different_labels(official, cut, counts, case, seed):
    classes, clients, s, shards = case
    s, shards = (s, shards) if s <= classes else (classes, clients)
    arrays = official([shards] * classes, [shards] * classes)

    split = cut("shards", arrays, clients, s=s, repeat=False, seed=seed)

    assert {len(counts(arrays, part)) for part in split.train} == {s}


def test_with_repeats_some_clients_have_fewer_labels(official, cut, counts):
    arrays = official([100] * 10, [100] * 10)

    split = cut("shards", arrays, 50, s=5)

    assert min(len(counts(arrays, part)) for part in split.train) < 5


def test_shards_are_contiguous_in_their_class(official, cut):
    arrays = official([20, 20], [4, 4])

    split = cut("shards", arrays, 4, s=1)

    for part in split.train:
        own = np.flatnonzero(arrays.y[: arrays.n_train] == arrays.y[part[0]])
        start = int(np.searchsorted(own, part[0]))
        assert np.array_equal(part, own[start : start + 10])  # 20 images in 2 shards
        assert start in (0, 10)


# --- randomness ---


@pytest.mark.parametrize("repeat", [True, False])
def test_a_split_follows_from_the_seed(official, cut, repeat):
    arrays = official([50] * 10, [10] * 10)

    first, again, other = (cut("shards", arrays, 20, s=5, repeat=repeat, seed=seed).sha256() for seed in (7, 7, 8))

    assert first == again
    assert first != other


# --- data without an official test part ---


def test_the_digits_get_a_test_part_of_a_fifth(cut, tmp_path):
    arrays = load_arrays(datasets.get("digits"), tmp_path)

    split = cut("shards", arrays, 10, s=5)

    assert sum(map(len, split.train)) == 1438  # 1797 - 359
    assert sum(map(len, split.test)) == 359  # a fifth of 1797, rounded


# --- what is refused ---


def test_shards_that_do_not_divide_are_refused_with_the_way_out(official, cut):
    with pytest.raises(FedbenchError, match="15 clients with s=3 have 45 shards, not a multiple of the 10") as caught:
        cut("shards", official([50] * 10, [50] * 10), 15, s=3)

    # 10 / gcd(3, 10) and 10 / gcd(15, 10)
    assert "a multiple of 10 clients, a multiple of 2 for s, or the partition classes" in caught.value.hint


def test_more_different_labels_than_classes_are_refused(official, cut):
    with pytest.raises(FedbenchError, match="s is 11"):
        cut("shards", official([50] * 10, [50] * 10), 10, s=11, repeat=False)


@pytest.mark.parametrize(("train", "test", "which"), [(4, 5, "training"), (5, 4, "test")])
def test_a_class_with_fewer_images_than_shards_is_refused(official, cut, train, test, which):
    with pytest.raises(FedbenchError, match=f"{which} samples .* class 0 has 4, too few for the 5 shards"):
        cut("shards", official([train] * 2, [test] * 2), 10, s=1)
