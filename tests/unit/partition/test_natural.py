"""The partition `natural`: the data's own clients, all or some of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError


def owners(arrays, split):
    """Of every client of the split, the natural clients whose samples it has."""
    parts = zip(split.train, split.test, strict=True)
    return [set(arrays.group[np.concatenate(own)].tolist()) for own in parts]


@pytest.fixture(scope="session")
def grouped(official):
    """Data with so many samples of each natural client, mixed up; names are 10, 20, 30, ..."""

    def make(sizes, seed=0):
        n = sum(sizes)
        arrays = official([n - n // 2, n // 2], seed=seed)
        names = np.repeat(10 * np.arange(1, len(sizes) + 1), sizes)
        return replace(arrays, group=np.random.default_rng(seed).permutation(names))

    return make


def test_all_clients_are_taken_in_their_order(grouped, cut):
    arrays = grouped([10, 20, 30])

    split = cut("natural", arrays, 3)

    assert owners(arrays, split) == [{10}, {20}, {30}]
    assert [len(part) for part in split.train] == [8, 16, 24]
    assert [len(part) for part in split.test] == [2, 4, 6]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.data(), st.integers(0, 1000))
def test_every_client_has_all_its_samples_once(grouped, cut, assert_disjoint, sizes, data, seed):
    clients = data.draw(st.integers(1, len(sizes)))
    arrays = grouped(sizes, seed)

    split = cut("natural", arrays, clients, min_size=2, seed=seed)

    assert_disjoint(*split.train, *split.test)
    for own, train, test in zip(owners(arrays, split), split.train, split.test, strict=True):
        assert len(own) == 1
        assert len(train) + len(test) == (arrays.group == own.pop()).sum()


def test_a_subset_is_random_and_follows_from_the_seed(grouped, cut):
    arrays = grouped([10] * 20)

    first, again, other = (owners(arrays, cut("natural", arrays, 5, seed=seed)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_small_clients_are_never_chosen(grouped, cut):
    arrays = grouped([10, 9, 10, 3])

    split = cut("natural", arrays, 2, min_size=10)

    assert owners(arrays, split) == [{10}, {30}]


def test_the_mix_of_classes_is_kept_where_possible(grouped, cut, counts):
    arrays = grouped([100])

    split = cut("natural", arrays, 1)

    # 50 of each class; a fifth is for testing
    assert counts(arrays, split.test[0]) == {0: 10, 1: 10}


def test_data_without_clients_is_refused(official, cut):
    with pytest.raises(FedbenchError, match="no clients of its own"):
        cut("natural", official([10, 10]), 2)


def test_more_clients_than_there_are_are_refused_and_small_ones_counted(grouped, cut):
    with pytest.raises(FedbenchError, match=r"has 2 clients with at least 10 samples \(3 in all\), not 3"):
        cut("natural", grouped([10, 9, 10]), 3, min_size=10)


def test_with_a_test_fraction_of_0_every_client_keeps_its_official_parts(grouped, cut):
    arrays = grouped([10, 20, 30])  # the first half of each of the two classes is official training data
    arrays = replace(arrays, n_train=40)

    split = cut("natural", arrays, 3, test_fraction=0)

    for client, name in enumerate((10, 20, 30)):
        own = np.flatnonzero(arrays.group == name).tolist()
        assert split.train[client].tolist() == [index for index in own if index < 40]
        assert split.test[client].tolist() == [index for index in own if index >= 40]


def test_a_client_without_official_test_samples_is_refused(grouped, cut):
    with pytest.raises(FedbenchError, match="no official test samples"):
        cut("natural", grouped([10, 20, 30]), 3, test_fraction=0)  # all of it is training data
