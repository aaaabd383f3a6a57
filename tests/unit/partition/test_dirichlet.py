"""The partition `dirichlet`: class proportions per client, a smallest size, and a tenth of the data (section 4.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.errors import FedbenchError


def totals(split):
    return [len(train) + len(test) for train, test in zip(split.train, split.test, strict=True)]


@pytest.fixture(scope="module")
def emnist_like(official):
    """62 classes with 814,255 samples in all, as EMNIST byclass has them."""
    train = np.full(62, 697_932 // 62) + (np.arange(62) < 697_932 % 62)
    test = np.full(62, 116_323 // 62) + (np.arange(62) < 116_323 % 62)
    return official(train.tolist(), test.tolist())


def test_emnist_is_used_to_a_tenth_by_two_hundred_clients(emnist_like, cut):
    split = cut("dirichlet", emnist_like, 200)

    assert sum(totals(split)) == 81_426  # a tenth of 814,255, rounded to even
    assert len(split.train) == 200
    assert min(totals(split)) >= 20


def test_all_of_the_data_is_an_option(emnist_like, cut):
    split = cut("dirichlet", emnist_like, 200, fraction=1.0)

    assert np.array_equal(np.sort(np.concatenate([*split.train, *split.test])), np.arange(814_255))


def test_the_used_part_has_every_class_in_proportion(official, cut, counts):
    arrays = official([1000, 3000], [200, 600])

    split = cut("dirichlet", arrays, 5, fraction=0.25)

    # training and test data are pooled: a quarter of 1200 and of 3600
    assert counts(arrays, np.concatenate([*split.train, *split.test])) == {0: 300, 1: 900}


@given(
    st.lists(st.integers(5, 40), min_size=1, max_size=6),
    st.integers(1, 10),
    st.sampled_from([1e-9, 0.01, 0.4, 1.0, 1e6]),
    st.integers(0, 1000),
)
def test_every_sample_is_used_once_and_nobody_is_too_small(
    official, cut, assert_disjoint, per_class, clients, alpha, seed
):
    arrays = official(per_class)
    smallest = max(2, len(arrays.y) // clients)  # the largest that can be asked for
    if smallest * clients > len(arrays.y):
        return

    split = cut("dirichlet", arrays, clients, alpha=alpha, fraction=1.0, min_size=smallest, seed=seed)

    assert_disjoint(*split.train, *split.test)
    assert sum(totals(split)) == len(arrays.y)
    assert min(totals(split)) >= smallest


@given(st.integers(0, 1000), st.floats(0.05, 0.9))
def test_every_client_is_split_by_the_test_fraction(official, cut, seed, fraction):
    split = cut("dirichlet", official([200] * 5), 6, fraction=1.0, test_fraction=fraction, seed=seed)

    for train, test in zip(split.train, split.test, strict=True):
        assert len(test) == round(fraction * (len(train) + len(test)))


def test_a_small_alpha_concentrates_classes_and_a_large_one_spreads_them(official, cut):
    arrays = official([400] * 5)

    def largest_share(alpha):
        """Of a class, the part that its largest owner has; averaged over classes."""
        split = cut("dirichlet", arrays, 10, fraction=1.0, alpha=alpha, min_size=2)
        table = np.stack([np.bincount(arrays.y[part], minlength=5) for part in split.train])
        return (table.max(axis=0) / table.sum(axis=0)).mean()

    assert largest_share(0.05) > 0.5
    assert largest_share(1000.0) < 0.15  # a tenth each


def test_only_clients_below_the_smallest_size_grow(official, cut):
    arrays = official([300] * 4)

    free = totals(cut("dirichlet", arrays, 20, alpha=0.1, fraction=1.0, min_size=2))
    held = totals(cut("dirichlet", arrays, 20, alpha=0.1, fraction=1.0, min_size=20))

    assert min(free) < 20 <= min(held)
    for before, after in zip(free, held, strict=True):
        assert after == 20 if before < 20 else after <= before


def test_a_split_follows_from_the_seed(official, cut):
    arrays = official([100] * 5)

    first, again, other = (cut("dirichlet", arrays, 4, fraction=1.0, seed=seed).sha256() for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_too_little_data_is_refused_with_the_way_out(official, cut):
    with pytest.raises(FedbenchError, match=r"50 samples .* too few for 3 clients with at least 20 each") as caught:
        cut("dirichlet", official([100] * 5), 3)  # a tenth of 500

    assert "larger fraction" in caught.value.hint
