"""The two quadratic clients: their objectives, the minimiser of the sum, and how test samples measure the way to it.

With along = (cos 20, sin 20) = (0.939693, 0.342020) and across = (-0.342020, 0.939693), and condition 10, scale 0.2:
Sigma_1^-1 = along along^T + 10 across across^T, Sigma_2^-1 = 10 along along^T + across across^T, their sum is 11 I.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.dataset import find_dataset, load_arrays
from fedbench.errors import FedbenchError

NAMES = ["quadratics", "quadratics[scale=0.01]", "quadratics[condition=10000]", "quadratics[n=50,scale=100]"]
PRECISIONS = [[[2.052800, -2.892544], [-2.892544, 8.947200]], [[8.947200, 2.892544], [2.892544, 2.052800]]]
# (Sigma_1^-1 - Sigma_2^-1) mu_1 / 11 = 0.2 * 9/11 * (cos 40 + sin 40, sin 40 - cos 40)
GLOBAL_MEAN = [0.230536, -0.020169]


def parts_of(name):
    """Of both clients the training samples, then the test samples: pairs of x [n, 2] and y [n]."""
    dataset = find_dataset(name)
    arrays = load_arrays(dataset, Path("/nowhere"))
    x, y = arrays.x.reshape(-1, 2).astype(np.float64), arrays.y / dataset.target_scale
    is_train = np.arange(len(y)) < arrays.n_train
    return [
        [(x[own], y[own]) for own in (part & (arrays.group == client) for client in (0, 1))]
        for part in (is_train, ~is_train)
    ]


@pytest.mark.parametrize("client", [0, 1])
def test_half_the_mean_squared_error_is_the_quadratic(client):
    x, y = parts_of("quadratics")[0][client]
    optimum = [[-0.2, -0.2], [0.2, 0.2]][client]

    assert np.abs(x.T @ x / len(x) - PRECISIONS[client]).max() < 1e-6
    assert np.linalg.lstsq(x, y, rcond=None)[0] == pytest.approx(optimum, abs=1e-6)


def test_the_global_mean_is_the_minimiser_of_the_sum():
    dataset = find_dataset("quadratics")
    parts, _ = parts_of("quadratics")
    x, y = (np.concatenate(both) for both in zip(*parts, strict=True))

    assert dataset.global_mean() == pytest.approx(GLOBAL_MEAN, abs=1e-6)
    assert np.linalg.lstsq(x, y, rcond=None)[0] == pytest.approx(GLOBAL_MEAN, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_moves_optima_and_curvature_by_less_than_a_millionth(name):
    dataset = find_dataset(name)
    params = dataset.params
    for client, (x, y) in enumerate(parts_of(name)[0]):
        optimum = np.linalg.lstsq(x, y, rcond=None)[0]
        assert np.abs(optimum - dataset.optima()[client]).max() < 1e-6 * max(1, params.scale)
        assert np.abs(x.T @ x / len(x) - dataset.precisions()[client]).max() < 1e-6 * params.condition
        assert len(y) == params.n


@pytest.mark.parametrize("name", NAMES)
def test_the_rmse_of_a_linear_model_is_its_distance_from_the_global_mean(name):
    dataset, w = find_dataset(name), np.array([0.3, -1.1])
    distance = np.linalg.norm(w - dataset.global_mean())

    for x, y in parts_of(name)[1]:
        assert np.sqrt(np.mean((x @ w - y) ** 2)) == pytest.approx(distance, rel=1e-6)


def test_round_quadratics_have_the_mean_of_the_optima_in_the_middle():
    assert find_dataset("quadratics[condition=1]").global_mean() == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize("setting", ["n=3", "n=0", "condition=0.5", "scale=0"])
def test_settings_that_make_no_such_problem_are_refused(setting):
    with pytest.raises(FedbenchError, match="wrong setting for data set quadratics"):
        find_dataset(f"quadratics[{setting}]")


def test_a_task_hands_out_numbers_and_keeps_the_official_parts(make_ctx, regression):
    task = make_ctx(**regression).task

    assert task.sizes == (4, 4)
    assert task.test_sizes((0, 1)) == [2, 2]
    assert task.train_data(0).y.dtype == torch.float32
    # sqrt(2) times along and sqrt(10) across, dot mu_1 = (-0.2, -0.2): sqrt(2) * -0.256343, sqrt(20) * -0.119534
    assert task.train_data(0).y.tolist() == pytest.approx([-0.362523, -0.534574] * 2, abs=1e-6)
