"""The partition `labels`: exact counts per class, label sets, and no image twice (specification, section 4.1)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbench.dataset import Arrays, Dataset, datasets
from fedbench.errors import FedbenchError
from fedbench.partition import Indices, Split, get_partition, partition_names
from fedbench.partition.labels import Labels, LabelsParams
from fedbench.rng import numpy_rng


def made_up(classes: int, sizes: dict[str, tuple[int, int]]) -> type[Dataset]:
    """A data set of which a partition sees only the number of classes and the sizes."""

    class MadeUp(Dataset):
        @classmethod
        def read(cls, root: Path) -> Arrays:
            raise AssertionError("a partition reads no data")

    MadeUp.classes = classes
    MadeUp.sizes = sizes
    return MadeUp


# Per client and class, training / test: the table of section 4.1.
MNIST_SIZES = {"small": (50, 950), "medium": (200, 800), "large": (900, 300)}
CIFAR_SIZES = {"small": (25, 475), "medium": (100, 400), "large": (450, 150)}
MNIST_LIKE = made_up(10, MNIST_SIZES)
CIFAR_LIKE = made_up(10, CIFAR_SIZES)
# How often each digit occurs in MNIST's 70,000 images; 5 is the rarest.
MNIST_COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


@pytest.fixture(scope="module")
def mnist_labels() -> Indices:
    labels = np.repeat(np.arange(10), MNIST_COUNTS)
    return np.random.default_rng(0).permutation(labels)


@pytest.fixture(scope="module")
def cifar_labels() -> Indices:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))


def cut(
    labels: Indices, dataset: type[Dataset], clients: int, /, *, rng: np.random.Generator | None = None, **params: Any
) -> Split:
    partition = Labels(LabelsParams(**params))
    images = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)  # a partition looks at labels only
    return partition.split(Arrays(images, labels, len(labels)), dataset, clients, rng or np.random.default_rng(0))


def counts(labels: Indices, part: Indices) -> dict[int, int]:
    """Class -> how often it occurs in this part."""
    return {int(label): count for label, count in Counter(labels[part].tolist()).items()}


def label_sets(labels: Indices, split: Split) -> list[list[int]]:
    return [sorted(counts(labels, np.concatenate(parts))) for parts in zip(split.train, split.test, strict=True)]


def all_indices(split: Split) -> Indices:
    return np.concatenate([*split.train, *split.test])


# --- the table of section 4.1 ---


@pytest.mark.parametrize(
    ("name", "sizes"), [("mnist", MNIST_SIZES), ("fashion_mnist", MNIST_SIZES), ("cifar10", CIFAR_SIZES)]
)
def test_the_shipped_data_sets_have_the_sizes_of_the_specification(
    name: str, sizes: dict[str, tuple[int, int]]
) -> None:
    assert datasets.get(name).sizes == sizes


@pytest.mark.parametrize(
    ("size", "n_train", "n_test"),
    [("small", 250, 4750), ("medium", 1000, 4000), ("large", 4500, 1500)],  # 5 classes times the table
)
def test_client_totals_on_mnist(mnist_labels: Indices, size: str, n_train: int, n_test: int) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, size=size)

    assert [len(part) for part in split.train] == [n_train] * 10
    assert [len(part) for part in split.test] == [n_test] * 10


@pytest.mark.parametrize(
    ("size", "n_train", "n_test"),
    [("small", 125, 2375), ("medium", 500, 2000), ("large", 2250, 750)],
)
def test_client_totals_on_cifar(cifar_labels: Indices, size: str, n_train: int, n_test: int) -> None:
    split = cut(cifar_labels, CIFAR_LIKE, 20, size=size)

    assert [len(part) for part in split.train] == [n_train] * 20
    assert [len(part) for part in split.test] == [n_test] * 20


@pytest.mark.parametrize("size", ["small", "medium", "large"])
@pytest.mark.parametrize("labels", ["block", "shift"])
def test_every_class_of_a_client_has_its_exact_count(mnist_labels: Indices, size: str, labels: str) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, size=size, labels=labels)

    n_train, n_test = MNIST_SIZES[size]
    assert all(set(counts(mnist_labels, part).values()) == {n_train} for part in split.train)
    assert all(set(counts(mnist_labels, part).values()) == {n_test} for part in split.test)


def test_large_cifar_uses_every_image_exactly_once(cifar_labels: Indices) -> None:
    split = cut(cifar_labels, CIFAR_LIKE, 20, size="large")

    # 20 clients * 5 classes * (450 + 150) = 60,000
    assert np.array_equal(np.sort(all_indices(split)), np.arange(60_000))


def test_large_cifar_with_one_image_less_does_not_fit(cifar_labels: Indices) -> None:
    with pytest.raises(FedbenchError, match="too few images"):
        cut(cifar_labels[:-1], CIFAR_LIKE, 20, size="large")


# --- who has which labels ---


def test_blocks_are_two_sets_that_take_turns(mnist_labels: Indices) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, labels="block")

    # (5 i + j) mod 10, j = 0..4
    assert label_sets(mnist_labels, split) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 5


def test_shift_gives_every_client_a_set_of_its_own(mnist_labels: Indices) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, labels="shift")

    # (i + j) mod 10, j = 0..4
    assert label_sets(mnist_labels, split) == [
        [0, 1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [2, 3, 4, 5, 6],
        [3, 4, 5, 6, 7],
        [4, 5, 6, 7, 8],
        [5, 6, 7, 8, 9],
        [0, 6, 7, 8, 9],
        [0, 1, 7, 8, 9],
        [0, 1, 2, 8, 9],
        [0, 1, 2, 3, 9],
    ]


PLENTY = made_up(10, {"small": (2, 3)})
PLENTY_LABELS = np.tile(np.arange(10), 100)  # 100 images per class


def test_random_sets_have_the_right_number_of_labels() -> None:
    split = cut(PLENTY_LABELS, PLENTY, 20, labels="random", labels_per_client=3)

    assert {len(own) for own in label_sets(PLENTY_LABELS, split)} == {3}


def test_random_sets_differ_between_clients() -> None:
    split = cut(PLENTY_LABELS, PLENTY, 20, labels="random")

    # 20 draws from the C(10, 5) = 252 sets: not all the same, and more than the two of `block`
    assert len({tuple(own) for own in label_sets(PLENTY_LABELS, split)}) > 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_sets_fit_the_digits(seed: int) -> None:
    labels = datasets.get("digits").read(Path()).y

    split = cut(labels, datasets.get("digits"), 10, rng=numpy_rng(seed, "partition"), labels="random")

    assert [len(part) for part in split.train] == [25] * 10  # 5 classes * 5


@pytest.mark.parametrize("labels", ["block", "shift", "random"])
@pytest.mark.parametrize("number", [1, 2, 10])
def test_a_client_has_as_many_labels_as_asked_for(labels: str, number: int) -> None:
    split = cut(PLENTY_LABELS, PLENTY, 4, labels=labels, labels_per_client=number)

    assert [len(own) for own in label_sets(PLENTY_LABELS, split)] == [number] * 4


@pytest.mark.parametrize("labels", ["block", "shift", "random"])
def test_train_and_test_of_a_client_have_the_same_labels(labels: str) -> None:
    split = cut(PLENTY_LABELS, PLENTY, 10, labels=labels)

    for train, test in zip(split.train, split.test, strict=True):
        assert set(counts(PLENTY_LABELS, train)) == set(counts(PLENTY_LABELS, test))


# --- which images ---


def test_images_are_consumed_in_file_order() -> None:
    #        position  0  1  2  3  4  5  6  7  8  9
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    dataset = made_up(2, {"small": (1, 1)})

    split = cut(labels, dataset, 2, labels_per_client=2)

    # class 0 lies at 0, 2, 4, ..., class 1 at 1, 3, 5, ...; the first client takes two of each, the second the next two
    assert [part.tolist() for part in split.train] == [[0, 1], [4, 5]]
    assert [part.tolist() for part in split.test] == [[2, 3], [6, 7]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Indices, type[Dataset], int, dict[str, Any]]:
    """Shuffled labels with just enough images of every class, whoever the owners are."""
    classes = draw(st.integers(1, 6))
    clients = draw(st.integers(1, 6))
    size = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    labels = np.repeat(np.arange(classes), clients * sum(size))
    params = {
        "labels_per_client": draw(st.integers(1, classes)),
        "labels": draw(st.sampled_from(["block", "shift", "random"])),
        "stratified": draw(st.booleans()),
    }
    shuffled = np.random.default_rng(draw(st.integers(0, 2**32))).permutation(labels)
    return shuffled, made_up(classes, {"small": size}), clients, params


@given(cases(), st.integers(0, 2**32))
def test_no_image_is_used_twice(case: tuple[Indices, type[Dataset], int, dict[str, Any]], seed: int) -> None:
    labels, dataset, clients, params = case

    used = all_indices(cut(labels, dataset, clients, rng=np.random.default_rng(seed), **params))

    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < len(labels)


@given(cases(), st.integers(0, 2**32))
def test_every_client_gets_its_totals(case: tuple[Indices, type[Dataset], int, dict[str, Any]], seed: int) -> None:
    labels, dataset, clients, params = case

    split = cut(labels, dataset, clients, rng=np.random.default_rng(seed), **params)

    n_train, n_test = (count * params["labels_per_client"] for count in dataset.sizes["small"])
    assert [len(part) for part in split.train] == [n_train] * clients
    assert [len(part) for part in split.test] == [n_test] * clients


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(1, 5), st.sampled_from(["block", "shift"]))
def test_a_split_fails_exactly_when_a_class_has_more_demand_than_images(
    available: list[int], clients: int, labels: str
) -> None:
    dataset = made_up(4, {"small": (1, 2)})
    stride = 2 if labels == "block" else 1
    demand = Counter((stride * client + j) % 4 for client in range(clients) for j in range(2))
    fits = all(available[label] >= 3 * owners for label, owners in demand.items())  # 1 + 2 images each

    try:
        cut(np.repeat(np.arange(4), available), dataset, clients, labels=labels, labels_per_client=2)
    except FedbenchError:
        assert not fits
    else:
        assert fits


# --- randomness ---


@pytest.mark.parametrize("params", [{"labels": "random"}, {"stratified": False}], ids=str)
def test_the_same_seed_gives_the_same_split(params: dict[str, Any]) -> None:
    first, second = (cut(PLENTY_LABELS, PLENTY, 10, rng=numpy_rng(7, "partition"), **params) for _ in range(2))

    assert first.sha256() == second.sha256()


@pytest.mark.parametrize("params", [{"labels": "random"}, {"stratified": False}], ids=str)
def test_another_seed_gives_another_split(params: dict[str, Any]) -> None:
    first, second = (cut(PLENTY_LABELS, PLENTY, 10, rng=numpy_rng(seed, "partition"), **params) for seed in (7, 8))

    assert first.sha256() != second.sha256()


@pytest.mark.parametrize("labels", ["block", "shift"])
def test_exact_splits_do_not_depend_on_the_seed(labels: str) -> None:
    first, second = (cut(PLENTY_LABELS, PLENTY, 10, rng=numpy_rng(seed, "partition"), labels=labels) for seed in (7, 8))

    assert first.sha256() == second.sha256()


def test_the_hash_of_a_split_sees_where_one_client_ends() -> None:
    one = Split([np.array([1, 2]), np.array([3])], [np.array([4]), np.array([5])])
    other = Split([np.array([1]), np.array([2, 3])], [np.array([4]), np.array([5])])

    assert one.sha256() != other.sha256()


def test_the_hash_of_a_split_sees_what_is_for_testing() -> None:
    one = Split([np.array([1])], [np.array([2])])
    other = Split([np.array([2])], [np.array([1])])

    assert one.sha256() != other.sha256()


# --- not stratified ---


def test_without_strata_the_totals_stay(mnist_labels: Indices) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, stratified=False)

    assert [len(part) for part in split.train] == [250] * 10
    assert [len(part) for part in split.test] == [4750] * 10


def test_without_strata_the_counts_per_class_fluctuate(mnist_labels: Indices) -> None:
    split = cut(mnist_labels, MNIST_LIKE, 10, stratified=False)

    found = {count for part in split.train for count in counts(mnist_labels, part).values()}
    # 250 of 5000 drawn, 50 expected per class with a deviation of about 6: never all equal
    assert len(found) > 1


def test_without_strata_a_client_has_the_same_images(mnist_labels: Indices) -> None:
    exact = cut(mnist_labels, MNIST_LIKE, 10, stratified=True)
    shuffled = cut(mnist_labels, MNIST_LIKE, 10, stratified=False)

    for client in range(10):
        assert set(exact.train[client]) | set(exact.test[client]) == (
            set(shuffled.train[client]) | set(shuffled.test[client])
        )


# --- what is refused ---


def test_too_little_data_names_the_class_and_the_way_out(mnist_labels: Indices) -> None:
    # 12 clients: 6 owners per class, 6 * 1200 = 7200, and already digit 0 has only 6903 images
    with pytest.raises(FedbenchError, match="too few images of class 0 for 12 clients of size large") as caught:
        cut(mnist_labels, MNIST_LIKE, 12, size="large")

    assert "fewer clients" in caught.value.hint


def test_a_class_without_images_is_too_little_data() -> None:
    with pytest.raises(FedbenchError, match="too few images of class 1"):
        cut(np.zeros(100, dtype=np.int64), made_up(2, {"small": (1, 1)}), 1, labels_per_client=2)


def test_an_unknown_size_gets_a_proposal(mnist_labels: Indices) -> None:
    with pytest.raises(FedbenchError, match="no size 'larg'") as caught:
        cut(mnist_labels, MNIST_LIKE, 10, size="larg")

    assert caught.value.hint == "Did you mean large?"


def test_a_data_set_without_sizes_is_refused() -> None:
    with pytest.raises(FedbenchError, match="has no sizes, which the partition labels goes by"):
        cut(PLENTY_LABELS, made_up(10, {}), 10)


def test_more_labels_than_classes_are_refused() -> None:
    with pytest.raises(FedbenchError, match="labels_per_client is 11"):
        cut(PLENTY_LABELS, PLENTY, 10, labels_per_client=11)


# --- the digits ---


@pytest.mark.parametrize(
    ("size", "n_train", "n_test"),
    [("small", 25, 125), ("medium", 75, 75), ("large", 120, 50)],  # 5 classes times (5, 25), (15, 15), (24, 10)
)
@pytest.mark.parametrize("labels", ["block", "shift"])
def test_every_size_of_the_digits_fits_ten_clients(size: str, n_train: int, n_test: int, labels: str) -> None:
    digits = datasets.get("digits")

    split = cut(digits.read(Path()).y, digits, 10, size=size, labels=labels)

    assert [len(part) for part in split.train] == [n_train] * 10
    assert [len(part) for part in split.test] == [n_test] * 10


# --- by name ---


def test_a_partition_is_found_by_the_name_of_its_file() -> None:
    assert "labels" in partition_names()
    assert get_partition("labels") is Labels


def test_an_unknown_partition_gets_a_proposal() -> None:
    with pytest.raises(FedbenchError, match="unknown partition 'lables'") as caught:
        get_partition("lables")

    assert caught.value.hint.startswith("Did you mean labels")
