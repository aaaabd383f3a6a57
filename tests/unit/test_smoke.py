"""Smoke twins: every shipped grid has one, it is short, it needs no data, and it says what it is."""

import numpy as np
import pytest

from fedbench.dataset import find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.grid import Changes, expand, grid_names, load_grid, parse_grid
from fedbench.smoke import stand_in


@pytest.mark.parametrize("name", grid_names())
def test_every_grid_has_a_twin_with_all_its_methods_that_needs_no_data(name):
    grid, jobs = load_grid(name), expand(load_grid(f"{name}_smoke"))

    assert {job.method for job in jobs} == {entry.name for entry in grid.methods}
    assert all(find_dataset(job.task.dataset).embedded for job in jobs)
    assert max(job.protocol.rounds for job in jobs) <= 2
    assert max(job.task.clients for job in jobs) <= 10


def test_a_stand_in_has_the_shape_the_classes_and_the_groups_of_the_data_set():
    assert stand_in("cifar10") == "synthetic[classes=10,shape=3x32x32,per_class=60,groups=0]"
    assert stand_in("pair").endswith("groups=2]")
    assert find_dataset(stand_in("cifar100")).classes == 100


def test_data_that_comes_with_fedbench_stays():
    assert stand_in("digits") == "digits"


def test_a_twin_has_a_name_and_a_title_of_its_own():
    twin = load_grid("pfedbayes_mnist_smoke")

    assert twin.name == "pfedbayes_mnist_smoke"
    assert twin.title == "Smoke test on synthetic data: pFedBayes Table 1 on MNIST"


def test_a_twin_keeps_the_papers_settings_of_the_data_set_it_stands_for():
    (job,) = expand(load_grid("fedhb_mnist_smoke"), Changes(methods="fedavg"))

    assert (job.task.model, job.task.normalize, job.protocol.momentum) == ("mlp256", "mnist", 0.9)
    assert job.task.dataset.startswith("synthetic")


def test_the_command_line_has_the_last_word():
    (job,) = expand(load_grid("pfedbayes_mnist_smoke"), Changes(methods="fedavg", set=["rounds=3"]))

    assert job.protocol.rounds == 3


def test_a_grid_of_ones_own_can_be_a_smoke_test():
    text = (
        "name: own\nsmoke: true\nmethods: [fedavg]\ntasks: [{dataset: mnist}, {dataset: cifar10}]\naxes: {seed: [4, 5]}"
    )

    (job,) = expand(parse_grid(text, "own.yaml"))

    assert job.task.dataset.startswith("synthetic")
    assert job.seed == 4


def test_a_twin_of_nothing_is_unknown():
    with pytest.raises(FedbenchError, match="no grid file 'nothing_smoke'"):
        load_grid("nothing_smoke")


def test_synthetic_groups_are_copies_of_the_same_images():
    arrays = load_arrays(find_dataset("synthetic[groups=3,per_class=30]"), None)

    copies = [arrays.x[arrays.group == group] for group in range(3)]
    assert all(np.array_equal(copies[0], copy) for copy in copies)
    assert len(arrays.y) == 3 * 300
    assert arrays.n_train == 3 * 240
    assert (np.unique(arrays.group[: arrays.n_train], return_counts=True)[1] == 240).all()
