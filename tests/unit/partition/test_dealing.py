"""What partitions share: stratified parts, held-out test data, rows of labels, and shards."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError
from fedbench.partition._dealing import deal, distinct_rows, hold_out, official_parts, stratified

seeds = st.integers(0, 2**32)
label_lists = st.lists(st.integers(0, 4), min_size=2, max_size=60).map(np.array)


def rng(seed=0):
    return np.random.default_rng(seed)


# --- parts with the same mix ---


@given(label_lists, st.data(), seeds)
def test_a_stratified_part_has_its_size_and_leaves_the_rest(labels, data, seed):
    n = data.draw(st.integers(0, len(labels)))

    part, rest = stratified(labels, np.arange(len(labels)), n, rng(seed))

    assert len(part) == n
    assert sorted([*part, *rest]) == list(range(len(labels)))


@given(label_lists, st.data(), seeds)
def test_every_class_gives_its_share_up_to_rounding(labels, data, seed):
    n = data.draw(st.integers(0, len(labels)))

    part, _ = stratified(labels, np.arange(len(labels)), n, rng(seed))

    given_away = Counter(labels[part].tolist())
    for label, count in Counter(labels.tolist()).items():
        assert abs(given_away[label] - count * n / len(labels)) < 1


def test_a_stratified_part_of_some_samples_touches_no_other():
    part, rest = stratified(np.array([0, 1, 0, 1, 0, 1]), np.array([1, 2, 4]), 2, rng())

    assert set(part) | set(rest) == {1, 2, 4}


def test_the_largest_remainders_get_what_rounding_left():
    # 3 of 10: shares 7 * 0.3 = 2.1 and 3 * 0.3 = 0.9; rounded down 2 and 0, so the last one is of class 1
    part, _ = stratified(np.repeat([0, 1], [7, 3]), np.arange(10), 3, rng())

    assert Counter(np.repeat([0, 1], [7, 3])[part].tolist()) == {0: 2, 1: 1}


@given(label_lists, st.floats(0.01, 0.99), seeds)
def test_neither_training_nor_test_samples_are_ever_empty(labels, fraction, seed):
    train, test = hold_out(labels, np.arange(len(labels)), fraction, rng(seed))

    assert len(train) >= 1
    assert len(test) >= 1
    assert len(train) + len(test) == len(labels)


def test_official_test_samples_stay_what_they_are(official):
    fit, held = official_parts(official([3, 3], [1, 1]), 0.5, rng())

    assert fit.tolist() == [0, 1, 2, 3, 4, 5]
    assert held.tolist() == [6, 7]


def test_without_official_test_samples_some_of_every_class_are_held_out(official):
    arrays = official([10, 20])

    fit, held = official_parts(arrays, 0.2, rng())

    assert Counter(arrays.y[held].tolist()) == {0: 2, 1: 4}
    assert Counter(arrays.y[fit].tolist()) == {0: 8, 1: 16}


# --- rows of different labels ---


@given(st.integers(1, 8), st.integers(1, 30), st.data(), seeds)
def test_rows_have_different_labels_and_use_all_classes_alike(classes, clients, data, seed):
    width = data.draw(st.integers(1, classes))

    rows = distinct_rows(classes, clients, width, rng(seed))

    assert rows.shape == (clients, width)
    assert all(len(set(row)) == width for row in rows.tolist())
    uses = np.bincount(rows.ravel(), minlength=classes)
    assert uses.max() - uses.min() <= 1


# --- shards ---


def test_left_over_samples_go_to_the_first_shards():
    # 7 samples of class 0 in 3 shards: 3, 2, 2, contiguous
    parts = deal(np.zeros(7, dtype=np.int64), np.arange(7), np.zeros((3, 1), dtype=np.int64), rng(), "samples")

    assert sorted(part.tolist() for part in parts) == [[0, 1, 2], [3, 4], [5, 6]]


def test_a_row_that_names_a_label_twice_gets_two_shards_of_it():
    labels = np.array([0, 0, 1, 1, 0, 1, 0, 1])

    first, second = deal(labels, np.arange(8), np.array([[0, 0], [1, 1]]), rng(), "samples")

    assert sorted(first) == [0, 1, 4, 6]
    assert sorted(second) == [2, 3, 5, 7]


def test_which_shard_a_row_gets_depends_on_the_seed():
    rows = np.zeros((8, 1), dtype=np.int64)

    orders = {tuple(int(part[0]) for part in deal(np.zeros(8), np.arange(8), rows, rng(seed), "")) for seed in range(5)}

    assert len(orders) > 1


def test_fewer_samples_than_shards_are_an_error_that_names_the_class():
    with pytest.raises(FedbenchError, match="test samples of x: class 1 has 1, too few for the 2 shards"):
        deal(np.array([0, 0, 1]), np.arange(3), np.array([[0, 1], [0, 1]]), rng(), "test samples of x")
