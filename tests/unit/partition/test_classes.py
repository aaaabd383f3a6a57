"""The partition `classes`: S different classes per client where shares cannot be equal (section 4.3, EMNIST)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError

EMNIST_TRAIN, EMNIST_TEST = 697_932, 116_323


@pytest.fixture(scope="module")
def emnist_like(official):
    """62 classes as uneven as EMNIST's, of which digits are ten times as frequent as most letters."""
    weights = np.repeat([10.0, 1.5], [10, 52])
    rng = np.random.default_rng(0)
    train, test = (rng.multinomial(total, weights / weights.sum()).tolist() for total in (EMNIST_TRAIN, EMNIST_TEST))
    return official(train, test)


def test_emnist_is_used_to_a_tenth(emnist_like, cut):
    split = cut("classes", emnist_like, 150, fraction=0.1)

    # every class has an owner, so that nothing of the tenth is left over
    assert sum(map(len, split.train)) == 69_793
    assert sum(map(len, split.test)) == 11_632


def test_emnist_classes_have_seven_or_eight_clients(emnist_like, cut, counts):
    split = cut("classes", emnist_like, 150, fraction=0.1)

    owners = np.bincount([label for part in split.train for label in counts(emnist_like, part)])
    # 150 * 3 = 7 * 62 + 16
    assert np.bincount(owners)[7:].tolist() == [46, 16]
    assert {len(counts(emnist_like, part)) for part in split.train} == {3}


@st.composite
def cases(draw):
    classes = draw(st.integers(1, 7))
    return classes, draw(st.integers(1, 12)), draw(st.integers(1, classes))


@given(cases(), st.booleans(), st.integers(0, 1000))
def test_no_image_is_used_twice(official, cut, assert_disjoint, case, has_test, seed):
    classes, clients, width = case
    arrays = official([80] * classes, [20] * classes if has_test else ())

    split = cut("classes", arrays, clients, classes_per_client=width, seed=seed)

    assert_disjoint(*split.train, *split.test)


@given(cases(), st.integers(0, 1000))
def test_a_client_has_its_number_of_classes_in_training_and_testing(official, cut, counts, case, seed):
    classes, clients, width = case
    arrays = official([30] * classes, [20] * classes)

    split = cut("classes", arrays, clients, classes_per_client=width, seed=seed)

    for train, test in zip(split.train, split.test, strict=True):
        assert set(counts(arrays, train)) == set(counts(arrays, test))
        assert len(counts(arrays, train)) == width


@given(cases(), st.integers(0, 1000))
def test_a_class_is_split_evenly_among_its_clients(official, cut, counts, case, seed):
    classes, clients, width = case
    arrays = official([31] * classes, [20] * classes)

    split = cut("classes", arrays, clients, classes_per_client=width, seed=seed)

    for label in range(classes):
        shares = [count for part in split.train if (count := counts(arrays, part).get(label))]
        # together all of it, and nobody more than one image more than another
        assert not shares or (sum(shares) == 31 and max(shares) - min(shares) <= 1)


def test_a_split_follows_from_the_seed(official, cut):
    arrays = official([50] * 7, [20] * 7)

    first, again, other = (cut("classes", arrays, 10, seed=seed).sha256() for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_more_classes_than_there_are_are_refused(official, cut):
    with pytest.raises(FedbenchError, match="classes_per_client is 8"):
        cut("classes", official([50] * 7, [20] * 7), 10, classes_per_client=8)


def test_a_class_with_fewer_test_images_than_clients_is_refused(official, cut):
    with pytest.raises(FedbenchError, match=r"test samples .* class 0 has 2, too few for the 3 shards"):
        cut("classes", official([50] * 2, [2] * 2), 3, classes_per_client=2)
