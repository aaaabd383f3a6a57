"""The partition `class_ratio`: 1:9 inside every client, one fixed test set for all (section 4.5, Covtype)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError

# Covertype: type 2 (283,301 rows, here class 0) against the rest (class 1).
COVTYPE = [283_301, 297_711]


@pytest.fixture(scope="module")
def covtype_like(official):
    return official(COVTYPE)


def tables(arrays, split):
    """Of every client the number of training samples of class 0 and of class 1."""
    return [tuple(np.bincount(arrays.y[part], minlength=2).tolist()) for part in split.train]


@pytest.mark.parametrize("clients", [30, 120])
def test_covtype_clients_alternate(covtype_like, cut, clients):
    split = cut("class_ratio", covtype_like, clients)

    assert tables(covtype_like, split) == [(100, 900), (900, 100)] * (clients // 2)


@pytest.mark.parametrize("clients", [30, 120])
def test_covtype_clients_in_blocks(covtype_like, cut, clients):
    split = cut("class_ratio", covtype_like, clients, order="block")

    assert tables(covtype_like, split) == [(100, 900)] * (clients // 2) + [(900, 100)] * (clients // 2)


def test_the_test_set_is_one_for_all_clients_and_all_seeds(covtype_like, cut):
    splits = [cut("class_ratio", covtype_like, 30, seed=seed) for seed in range(4)]

    first = splits[0].test[0]
    assert len(first) == 10_000
    assert all(np.array_equal(part, first) for split in splits for part in split.test)
    assert len({split.sha256() for split in splits}) == 4


def test_the_same_seed_gives_the_same_split(covtype_like, cut):
    one, again = (cut("class_ratio", covtype_like, 30, seed=7) for _ in range(2))

    assert one.sha256() == again.sha256()


def test_clients_can_be_as_large_as_the_data_allows(covtype_like, cut):
    split = cut("class_ratio", covtype_like, 30, n_client=0)

    # four fifths of class 0 are 226,641 samples, and the 30 clients together need 15 n of each class
    assert {len(part) for part in split.train} == {15_109}


def test_fewer_test_samples_than_asked_for_are_all_used(official, cut):
    split = cut("class_ratio", official([100, 100]), 2, n_client=10)

    assert len(split.test[0]) == 40  # a fifth of 200


def test_official_test_samples_are_the_test_part(official, cut):
    arrays = official([100, 100], [30, 30])

    split = cut("class_ratio", arrays, 2, n_client=10)

    assert np.array_equal(split.test[0], np.arange(200, 260))


@given(st.integers(5, 200), st.integers(5, 200), st.integers(1, 9), st.sampled_from(["alternate", "block"]))
def test_the_largest_size_fits_and_one_more_does_not(official, cut, assert_disjoint, first, second, clients, order):
    arrays = official([first, second])
    try:
        split = cut("class_ratio", arrays, clients, n_client=0, order=order)
    except FedbenchError:
        largest = 0  # not even one sample each
    else:
        assert_disjoint(*split.train, split.test[0])
        (largest,) = {len(part) for part in split.train}

    with pytest.raises(FedbenchError, match="too few training samples"):
        cut("class_ratio", arrays, clients, n_client=largest + 1, order=order)


@given(st.integers(1, 100), st.floats(0.5, 0.99))
def test_every_client_has_its_size_and_ratio(official, cut, size, majority):
    arrays = official([400, 400])

    split = cut("class_ratio", arrays, 4, n_client=size, majority=majority)

    frequent = round(majority * size)
    assert tables(arrays, split) == [(size - frequent, frequent), (frequent, size - frequent)] * 2


def test_too_large_clients_are_refused_with_the_largest_size(official, cut):
    # 80 of 100 samples of each class are for training; two clients need n of each
    with pytest.raises(FedbenchError, match="too few training samples for 2 clients with 100 each") as caught:
        cut("class_ratio", official([100, 100]), 2, n_client=100)

    assert "n_client=80" in caught.value.hint


def test_data_with_other_than_two_classes_is_refused(official, cut):
    with pytest.raises(FedbenchError, match="for two classes"):
        cut("class_ratio", official([100] * 3), 2)
