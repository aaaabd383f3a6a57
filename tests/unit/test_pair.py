"""A pair: two data sets one after the other, training parts first, with the half that an image came from."""

import numpy as np
import pytest

from fedbench.dataset import Arrays, find_dataset, load_arrays
from fedbench.errors import FedbenchError


@pytest.fixture
def halves(monkeypatch):
    """MNIST with two images and Fashion-MNIST with three, the last of each a test image."""

    def read(n, first_pixel):
        x = np.zeros((n, 1, 28, 28), dtype=np.uint8)
        x[:, 0, 0, 0] = first_pixel + np.arange(n)
        return Arrays(x, np.arange(n), n - 1)

    contents = {"mnist": read(2, 10), "fashion_mnist": read(3, 20)}
    monkeypatch.setattr("fedbench.datasets.pair.load_arrays", lambda dataset, root: contents[dataset.name()])


def test_training_parts_come_first_and_groups_say_whose_they_are(halves, tmp_path):
    arrays = find_dataset("pair").read(tmp_path)

    assert arrays.x[:, 0, 0, 0].tolist() == [10, 20, 21, 11, 22]
    assert arrays.y.tolist() == [0, 0, 1, 1, 2]
    assert arrays.group.tolist() == [0, 1, 1, 0, 1]
    assert arrays.n_train == 3


def test_a_pair_takes_shape_classes_and_title_from_its_halves():
    pair = find_dataset("pair[first=cifar10,second=cifar100]")

    assert (pair.shape, pair.classes) == ((3, 32, 32), 100)
    assert pair.title == "CIFAR-10 and CIFAR-100"


def test_images_of_different_shapes_make_no_pair():
    with pytest.raises(FedbenchError, match="mnist and cifar10 make no pair"):
        find_dataset("pair[first=mnist,second=cifar10]")


def test_an_embedded_set_can_be_a_half(tmp_path):
    arrays = load_arrays(find_dataset("pair[first=digits,second=digits]"), tmp_path)

    assert len(arrays.y) == 2 * 1797
    assert np.bincount(arrays.group).tolist() == [1797, 1797]
