"""The partition `corruption`: groups of clients by corruption, newcomers with held-out ones (section 4.4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.dataset import Arrays
from fedbench.errors import FedbenchError

# numpy.random.default_rng(0).permutation(19): the first ten are trained on
TRAIN_TYPES = [2, 10, 3, 14, 0, 12, 4, 18, 7, 5]


def corrupted(classes, per_class, types):
    """The same shuffled images under several corruptions, one corruption after the other."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), per_class))
    y, group = np.tile(labels, types), np.repeat(np.arange(types), len(labels))
    return Arrays(np.zeros((len(y), 1, 1, 1), dtype=np.uint8), y, len(y), group)


@pytest.fixture(scope="module")
def cifar_like():
    """CIFAR-100's 10,000 test images under 19 corruptions."""
    return corrupted(100, 100, 19)


@pytest.mark.parametrize("image_split", ["independent", "by_image"])
@pytest.mark.parametrize("s", [50, 100])
def test_every_client_has_900_training_and_100_test_images(cifar_like, cut, s, image_split):
    split = cut("corruption", cifar_like, 100, s=s, image_split=image_split)

    assert len(split.train) == 190
    assert {len(part) for part in split.train} == {900}
    assert {len(part) for part in split.test} == {100}


def test_groups_of_ten_share_a_corruption_and_newcomers_have_the_others(cifar_like, cut):
    split = cut("corruption", cifar_like, 100)

    kinds = [set(cifar_like.group[np.concatenate(own)]) for own in zip(split.train, split.test, strict=True)]
    assert kinds[:100] == [{kind} for kind in TRAIN_TYPES for _ in range(10)]
    assert split.newcomers == tuple(range(100, 190))
    held_out = set(range(19)) - set(TRAIN_TYPES)
    assert [next(iter(kind)) for kind in kinds[100::10]] != sorted(held_out)  # in the permutation's order
    assert set.union(*kinds[100:]) == held_out


def test_the_corruptions_to_train_on_do_not_depend_on_the_seed(cifar_like, cut):
    one, other = (cut("corruption", cifar_like, 100, seed=seed) for seed in (0, 1))

    assert one.sha256() != other.sha256()
    assert [cifar_like.group[part[0]] for part in one.train] == [cifar_like.group[part[0]] for part in other.train]


def test_a_shard_has_18_training_images_and_2_test_images(cifar_like, cut, counts):
    split = cut("corruption", cifar_like, 100, s=50)

    for train, test in zip(split.train, split.test, strict=True):
        shards = {label: count // 18 for label, count in counts(cifar_like, train).items()}
        assert sum(shards.values()) == 50
        assert counts(cifar_like, test) == {label: 2 * number for label, number in shards.items()}


def test_independent_splits_test_images_that_others_train_on(cifar_like, cut):
    split = cut("corruption", cifar_like, 100, image_split="independent")

    trained, tested = (set(np.concatenate(parts) % 10_000) for parts in (split.train, split.test))
    assert trained & tested


def test_splits_by_image_never_do(cifar_like, cut):
    split = cut("corruption", cifar_like, 100, image_split="by_image")

    trained, tested = (set(np.concatenate(parts) % 10_000) for parts in (split.train, split.test))
    assert not trained & tested
    assert len(tested) == 1000


@given(
    st.integers(2, 5), st.integers(1, 4), st.data(), st.sampled_from(["independent", "by_image"]), st.integers(0, 1000)
)
def test_every_image_is_used_once_under_every_corruption(
    cut, assert_disjoint, types, per_group, data, image_split, seed
):
    groups = data.draw(st.integers(1, types))
    arrays = corrupted(3, 40, types)

    # 3 classes and s = 3: as many shards per class as a group has clients
    split = cut("corruption", arrays, groups * per_group, s=3, train_types=groups, image_split=image_split, seed=seed)

    assert_disjoint(*split.train, *split.test)
    assert sum(map(len, (*split.train, *split.test))) == len(arrays.y)
    assert len(split.newcomers) == (types - groups) * per_group


def test_the_same_seed_gives_the_same_split(cifar_like, cut):
    one, again = (cut("corruption", cifar_like, 100, seed=7) for _ in range(2))

    assert one.sha256() == again.sha256()


# --- what is refused ---


def test_clients_that_are_no_equal_groups_are_refused(cifar_like, cut):
    with pytest.raises(FedbenchError, match="95 clients cannot be 10 groups"):
        cut("corruption", cifar_like, 95)


def test_shards_that_do_not_divide_inside_a_group_are_refused(cifar_like, cut):
    with pytest.raises(FedbenchError, match="11 clients with s=50 have 550 shards"):
        cut("corruption", cifar_like, 110)


def test_fewer_corruptions_than_to_train_on_are_refused(cut):
    with pytest.raises(FedbenchError, match="has 3 corruptions, not 10"):
        cut("corruption", corrupted(2, 10, 3), 10)


def test_data_without_corruptions_is_refused(official, cut):
    with pytest.raises(FedbenchError, match="no corruptions"):
        cut("corruption", official([10, 10]), 10)


def test_groups_of_different_images_are_refused(cut):
    arrays = corrupted(2, 10, 10)
    labels = arrays.y.copy()
    labels[0] = 1 - labels[0]

    with pytest.raises(FedbenchError, match="not the same images"):
        cut("corruption", replace(arrays, y=labels), 10)
