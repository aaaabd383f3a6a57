"""The partition `label_window`: three neighbouring labels per client, one test set for all (section 4.5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError

# How often each digit occurs in MNIST's training and test images.
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize("clients", [27, 120])
def test_mnist_without_nines(official, cut, clients):
    split = cut("label_window", official(MNIST_TRAIN, MNIST_TEST), clients)

    assert sum(map(len, split.train)) == 54_051
    assert {len(part) for part in split.test} == {8_991}


@pytest.mark.parametrize(
    ("clients", "owners"),
    # 120 = 13 * 9 + 3: of the three last clients, one has label 0, two have 1, three have 2, two have 3 and one has 4
    [(27, [9] * 9), (120, [40, 41, 42, 41, 40, 39, 39, 39, 39])],
)
def test_every_class_is_split_evenly_over_its_clients(official, cut, counts, clients, owners):
    arrays = official(MNIST_TRAIN, MNIST_TEST)

    split = cut("label_window", arrays, clients)

    for label in range(9):
        shares = [count for part in split.train if (count := counts(arrays, part).get(label))]
        assert len(shares) == owners[label]
        assert max(shares) - min(shares) <= 1


def test_the_window_moves_by_one_and_wraps_around(official, cut, counts):
    arrays = official([100] * 10, [10] * 10)

    split = cut("label_window", arrays, 9)

    # (k + j) mod 9, j = 0, 1, 2
    assert [sorted(counts(arrays, part)) for part in split.train] == [
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
        [4, 5, 6],
        [5, 6, 7],
        [6, 7, 8],
        [0, 7, 8],
        [0, 1, 8],
    ]


def test_all_clients_have_the_same_test_images(official, cut, counts):
    arrays = official([100] * 10, [10] * 10)

    split = cut("label_window", arrays, 12)

    assert all(np.array_equal(part, split.test[0]) for part in split.test)
    assert counts(arrays, split.test[0]) == dict.fromkeys(range(9), 10)


@given(st.integers(2, 8), st.integers(1, 12), st.data(), st.integers(0, 1000))
def test_no_training_image_is_used_twice_or_tested_on(official, cut, assert_disjoint, classes, clients, data, seed):
    keep = data.draw(st.integers(1, classes))
    window = data.draw(st.integers(1, keep))
    arrays = official([40] * classes, [10] * classes if data.draw(st.booleans()) else ())

    split = cut("label_window", arrays, clients, keep_classes=keep, window=window, seed=seed)

    assert_disjoint(*split.train, split.test[0])


def test_the_kept_classes_are_all_that_there_are(official, cut):
    assert cut("label_window", official([100] * 10, [10] * 10), 9).classes == 9


def test_a_split_follows_from_the_seed(official, cut):
    arrays = official([100] * 10, [10] * 10)

    first, again, other = (cut("label_window", arrays, 27, seed=seed).sha256() for seed in (7, 7, 8))

    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("params", "message"),
    [({"keep_classes": 11}, "keep_classes is 11"), ({"keep_classes": 2, "window": 3}, "window is 3")],
)
def test_windows_that_do_not_fit_are_refused(official, cut, params, message):
    with pytest.raises(FedbenchError, match=message):
        cut("label_window", official([100] * 10, [10] * 10), 5, **params)
