"""Synthetic images: any shape, always the same, learnable but not for nothing, and named in one way only."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from fedbench.dataset import find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.simulation import Surroundings, simulate

NOWHERE = Path("/nowhere")
"""The images are made on the spot: no data root is needed."""


def arrays_of(name):
    return load_arrays(find_dataset(name), NOWHERE)


# --- shapes and counts ---


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("synthetic", (1, 28, 28), 10),
        ("synthetic[classes=5,shape=3x32x32]", (3, 32, 32), 5),
        ("synthetic[classes=2,shape=1x1x54]", (1, 1, 54), 2),
        ("synthetic[shape=2x3x7,per_class=30]", (2, 3, 7), 10),
        ("synthetic[classes=100,shape=1x1x1,per_class=30]", (1, 1, 1), 100),
    ],
)
def test_images_of_any_shape_and_number_of_classes(name, shape, classes):
    dataset, arrays = find_dataset(name), arrays_of(name)

    assert (dataset.shape, dataset.classes) == (shape, classes)
    assert arrays.x.shape[1:] == shape
    assert arrays.x.dtype == np.uint8
    assert sorted(set(arrays.y.tolist())) == list(range(classes))


def test_a_fifth_of_every_class_is_for_testing():
    arrays = arrays_of("synthetic[classes=3,per_class=50,shape=1x4x4]")

    assert np.bincount(arrays.y).tolist() == [50, 50, 50]
    assert np.bincount(arrays.y[arrays.n_train :]).tolist() == [10, 10, 10]
    assert arrays.n_train == 120


def test_classes_come_in_no_order():
    y = arrays_of("synthetic[shape=1x4x4]").y

    assert len(set(y[:20].tolist())) > 5


def test_the_settings_of_one_data_set_do_not_reach_another():
    find_dataset("synthetic[classes=5,shape=3x32x32]")

    plain = find_dataset("synthetic")
    assert (plain.shape, plain.classes, plain.name()) == ((1, 28, 28), 10, "synthetic")


def test_a_task_can_be_made_of_them(make_ctx):
    task = make_ctx(dataset="synthetic[classes=5,shape=3x32x32]", model="lenet").task

    assert task.classes == 5
    assert task.train_data(0).x.shape[1:] == (3, 32, 32)


def test_a_run_learns_from_them(make_job, recorder, tmp_path):
    job = make_job("fedavg", dataset="synthetic[shape=1x8x8]", rounds=10, eval_every=10, lr=0.1, clients=4)

    assert simulate(job, recorder, Surroundings(tmp_path)) == "done"

    # ten classes: chance is 0.1
    assert recorder.curve("gm")[10] > 0.3


# --- always the same ---


def test_the_same_settings_make_the_same_images():
    name = "synthetic[classes=4,shape=1x5x5,per_class=40]"

    assert arrays_of(name).sha256() == arrays_of(name).sha256()


@pytest.mark.parametrize("other", ["classes=5", "shape=1x4x6", "per_class=40", "noise=0.3"])
def test_other_settings_make_other_images(other):
    plain, changed = arrays_of("synthetic[shape=1x5x5]"), arrays_of(f"synthetic[{other}]")

    assert plain.sha256() != changed.sha256()


def test_making_them_draws_nothing_from_the_global_generator():
    before = np.random.get_state()[1].copy()

    arrays_of("synthetic[shape=1x5x5]")

    assert np.array_equal(np.random.get_state()[1], before)


# --- learnable, but not for nothing ---


def linear_accuracy(name, images=200):
    """Of a logistic regression that has seen so many training images, on the test part."""
    arrays = arrays_of(name)
    x = arrays.x.reshape(len(arrays.x), -1) / 255
    with threadpool_limits(1):
        model = LogisticRegression(max_iter=200).fit(x[:images], arrays.y[:images])
    return model.score(x[arrays.n_train :], arrays.y[arrays.n_train :])


SHAPES = ["synthetic", "synthetic[shape=1x8x8]", "synthetic[classes=5,shape=3x32x32]"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_linear_model_learns_them(name):
    assert linear_accuracy(name) > 0.6  # chance is 0.1 or 0.2


@pytest.mark.parametrize("name", SHAPES)
def test_a_linear_model_does_not_learn_them_all_from_a_few_images(name):
    # where everyone is always right, no method can be better than another
    assert linear_accuracy(name) < 0.99


def test_more_noise_makes_them_harder():
    little, much = (linear_accuracy(f"synthetic[shape=1x8x8,noise={noise}]") for noise in (0.25, 1.0))

    assert much < little - 0.2


def test_images_of_a_class_differ():
    arrays = arrays_of("synthetic[shape=1x8x8,noise=0]")

    of_one_class = arrays.x[arrays.y == 0].reshape(-1, 64)
    assert len({image.tobytes() for image in of_one_class}) > 100


# --- clients ---


@pytest.mark.parametrize("size", ["small", "medium", "large"])
@pytest.mark.parametrize(
    "settings", ["classes=10", "per_class=30", "per_class=299", "classes=100,per_class=30", "classes=7", "classes=5"]
)
def test_ten_clients_find_enough_images(make_ctx, settings, size):
    task = make_ctx(dataset=f"synthetic[{settings},shape=1x4x4]", clients=10, size=size).task

    assert task.clients == 10
    assert min(task.sizes) > 0
    assert min(task.test_sizes(tuple(range(10)))) > 0


def test_a_larger_size_has_more_for_training_and_less_for_testing():
    for settings in ("per_class=300", "per_class=60", "classes=20"):
        sizes = find_dataset(f"synthetic[{settings}]").sizes
        (small, of_small), (medium, of_medium), (large, of_large) = (
            sizes[size] for size in ("small", "medium", "large")
        )
        assert small < medium < large
        assert of_small > of_medium > of_large


def test_sizes_of_the_default_are_those_of_its_settings():
    assert find_dataset("synthetic").sizes == find_dataset("synthetic[noise=0.3]").sizes


# --- wrong settings ---


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("classes=1", "classes"),
        ("classes=many", "classes"),
        ("shape=32x32", "shape"),
        ("shape=3x0x32", "shape"),
        ("shape=28", "shape"),
        ("per_class=9", "per_class"),
        ("per_class=40.5", "per_class"),
        ("noise=-1", "noise"),
        ("noise=.nan", "noise"),
        ("noise=.inf", "noise"),
    ],
)
def test_a_wrong_setting_is_named(written, key):
    with pytest.raises(FedbenchError, match=rf"synthetic:\n{key}: "):
        find_dataset(f"synthetic[{written}]")


def test_an_unknown_setting_is_named_with_the_nearest_known_one():
    with pytest.raises(FedbenchError, match=r"no setting 'clases'.\nDid you mean classes"):
        find_dataset("synthetic[clases=5]")


def test_a_data_set_without_settings_refuses_them():
    with pytest.raises(FedbenchError, match="digits has no settings"):
        find_dataset("digits[classes=5]")


def test_a_setting_written_twice_is_a_mistake():
    with pytest.raises(FedbenchError, match="classes"):
        find_dataset("synthetic[classes=5,classes=6]")


@pytest.mark.parametrize("where", ["dataset", "clean", "ood"])
def test_a_job_with_a_wrong_setting_is_refused(make_job, where):
    with pytest.raises(FedbenchError, match="classes"):
        make_job(**{"dataset": "synthetic", where: "synthetic[classes=1]"})


# --- one name for one content ---


def test_a_job_names_the_data_set_the_same_whatever_the_order_of_its_settings(make_job):
    one, other = (
        make_job(dataset=f"synthetic[{settings}]")
        for settings in ("classes=5,shape=3x32x32,noise=0.5", "noise=5e-1, shape=3x32x32 ,classes=5")
    )

    assert one.task.dataset == other.task.dataset == "synthetic[classes=5,noise=0.5,shape=3x32x32]"
    assert one.key == other.key


@pytest.mark.parametrize(
    "written",
    [
        "synthetic[classes=10]",
        "synthetic[shape=1x28x28,noise=0.25,per_class=300,classes=10]",
        "synthetic[]",
        " synthetic ",
    ],
)
def test_defaults_that_are_written_out_vanish(make_job, written):
    plain, spelled_out = make_job(dataset="synthetic"), make_job(dataset=written)

    assert spelled_out.task.dataset == plain.task.dataset == "synthetic"
    assert spelled_out.key == plain.key


def test_the_name_of_a_job_finds_its_data_set_again(make_job):
    job = make_job(dataset="synthetic[shape=1x4x4,classes=6]")

    assert find_dataset(job.task.dataset).name() == job.task.dataset


@pytest.mark.parametrize("where", ["clean", "ood"])
def test_other_data_is_named_the_same_whatever_the_order_of_its_settings(make_job, where):
    one, other = (
        make_job(dataset="synthetic", **{where: f"synthetic[{settings}]"})
        for settings in ("noise=0.5,per_class=60", "per_class=60,noise=0.50,classes=10")
    )

    assert getattr(one.task, where) == getattr(other.task, where) == "synthetic[noise=0.5,per_class=60]"
    assert one.key == other.key


def test_other_settings_are_another_job(make_job):
    keys = {make_job(dataset=name).key for name in ("synthetic", "synthetic[noise=0.5]", "synthetic[classes=11]")}

    assert len(keys) == 3
