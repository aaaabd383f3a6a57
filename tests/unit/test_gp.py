"""Gaussian processes for classes: against scikit-learn, dense algebra, numerical integration and finite differences."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from fedbench.gp import Kernel, Posterior, class_tree, gibbs, part_of_each, predictive, probability, two_means
from fedbench.polya_gamma import polya_gamma_mean

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def embeddings(n, seed=0, width=3):
    return torch.randn(n, width, generator=generator(seed), dtype=torch.float64)


@pytest.fixture
def problem():
    """Kernel, covariances and labels of six known points, and four new ones; omega of three chains."""
    kernel, known, new = Kernel(8.0, 1.0, 1e-3, CPU), embeddings(6, 1), embeddings(4, 2)
    kappa = torch.tensor([0.5, -0.5, 0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    omega = torch.rand(3, 6, generator=generator(3), dtype=torch.float64) * 0.4 + 0.01
    return kernel, known, new, kappa, omega


# --- the kernel ---


def test_the_kernel_is_rbf_on_embeddings_of_length_1():
    x = torch.tensor([[3.0, 0.0], [0.0, 0.5], [1.0, 0.0]])

    k = Kernel(8.0, 1.0, 1e-3, CPU)(x)

    # (1, 0) and (0, 1) are sqrt(2) apart: 8 exp(-2/2) = 2.943036
    expected = torch.tensor([[8.001, 2.943036, 8.0], [2.943036, 8.001, 2.943036], [8.0, 2.943036, 8.001]])
    torch.testing.assert_close(k, expected.double(), rtol=0, atol=1e-6)


def test_scale_and_length_are_those_asked_for():
    x, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    # 3 exp(-2 / (2 * 4)) = 2.336402; between points there is no jitter
    assert Kernel(3.0, 2.0, 0.1, CPU).between(x, other).tolist() == [pytest.approx([2.336402, 3.0], abs=1e-6)]
    assert Kernel(3.0, 2.0, 0.1, CPU).variance == pytest.approx(3.1)


# --- the posterior given omega ---


def test_with_omega_a_quarter_it_is_regression_with_noise_4_on_4_kappa(problem):
    _, known, new, kappa, _ = problem
    kernel = Kernel(8.0, 1.0, 0.0, CPU)
    at_length_1 = [torch.nn.functional.normalize(x).numpy() for x in (known, new)]
    oracle = GaussianProcessRegressor(ConstantKernel(8.0) * RBF(1.0), alpha=4.0, optimizer=None)
    mean, deviation = oracle.fit(at_length_1[0], 4 * kappa.numpy()).predict(at_length_1[1], return_std=True)

    posterior = Posterior(kernel(known), kappa, torch.full((1, 6), 0.25, dtype=torch.float64))
    found_mean, found_variance = posterior.at(kernel.between(known, new), 8.0)

    assert found_mean[0].tolist() == pytest.approx(mean.tolist(), abs=1e-10)
    assert found_variance[0].tolist() == pytest.approx((deviation**2).tolist(), abs=1e-5)


def dense(k, cross, variance, kappa, omega):
    """Mean and variance as the specification writes them, by an explicit inverse."""
    inverse = torch.linalg.inv(k + torch.diag_embed(1 / omega))
    mean = (cross.T @ inverse @ (kappa / omega).unsqueeze(-1)).squeeze(-1)
    return mean, variance - (cross.T @ inverse @ cross).diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize(
    ("function", "tolerance"),
    # one for test points, in single precision where variances are concerned, and one to be differentiated
    [(lambda k, cross, v, kappa, omega: Posterior(k, kappa, omega).at(cross, v), 1e-5), (predictive, 1e-10)],
    ids=["at", "predictive"],
)
def test_every_chain_is_the_formula_with_its_own_omega(problem, function, tolerance):
    kernel, known, new, kappa, omega = problem
    of_problem = kernel(known), kernel.between(known, new), kernel.variance, kappa, omega

    (mean, variance), expected = function(*of_problem), dense(*of_problem)

    torch.testing.assert_close(mean, expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(variance, expected[1], rtol=0, atol=tolerance)


def test_variances_of_test_points_are_right_among_many_known_points():
    kernel, known, new = Kernel(8.0, 1.0, 1e-3, CPU), embeddings(400, 1).abs(), embeddings(50, 2).abs()
    kappa = torch.tensor([0.5, -0.5], dtype=torch.float64).repeat(200)
    of_problem = kernel(known), kernel.between(known, new), kernel.variance, kappa, torch.full((1, 400), 0.25).double()

    _, variance = Posterior(of_problem[0], kappa, of_problem[4]).at(of_problem[1], kernel.variance)

    # of 8 only about 0.1 is left
    torch.testing.assert_close(variance, dense(*of_problem)[1], rtol=0, atol=2e-5)


def test_the_order_of_the_known_points_does_not_matter(problem):
    kernel, known, new, kappa, omega = problem
    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def at_new(index):
        posterior = Posterior(kernel(known[index]), kappa[index], omega[:, index])
        return posterior.at(kernel.between(known[index], new), kernel.variance)

    for one, other in zip(at_new(torch.arange(6)), at_new(order), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_gradient_in_the_embeddings_is_that_of_finite_differences(problem):
    kernel, known, new, kappa, omega = problem

    def of_embeddings(known, new):
        return predictive(kernel(known), kernel.between(known, new), kernel.variance, kappa, omega)

    assert torch.autograd.gradcheck(of_embeddings, (known.requires_grad_(), new.requires_grad_()), atol=1e-6)


def test_points_that_are_the_same_do_no_harm():
    kernel, x = Kernel(8.0, 1.0, 1e-3, CPU), torch.ones(40, 3).requires_grad_()
    kappa = torch.tensor([0.5, -0.5], dtype=torch.float64).repeat(20)

    omega = gibbs(kernel(x).detach(), kappa, 4, 5, 20, generator())
    mean, variance = predictive(kernel(x), kernel.between(x, x), kernel.variance, kappa, omega)
    (mean + variance).sum().backward()

    assert all(bool(value.isfinite().all()) for value in (omega, mean, variance, x.grad))
    assert (variance > 0).all()


# --- Gibbs ---


def mean_omega_of_two(correlation, y):
    """E[omega] of two points by a sum over a grid: p(f | y) ~ N(f; 0, K) sigmoid(y_1 f_1) sigmoid(y_2 f_2)."""
    f = np.linspace(-15, 15, 601)
    one, other = np.meshgrid(f, f, indexing="ij")
    precision = np.linalg.inv(8 * np.array([[1, correlation], [correlation, 1]]))
    energy = precision[0, 0] * one**2 + 2 * precision[0, 1] * one * other + precision[1, 1] * other**2
    density = np.exp(-energy / 2) * expit(y[0] * one) * expit(y[1] * other)
    return (polya_gamma_mean(torch.from_numpy(one)).numpy() * density).sum() / density.sum()


@pytest.mark.parametrize("y", [(1, 1), (1, -1)])
def test_gibbs_draws_omega_from_its_posterior(y):
    k = 8 * torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    expected = mean_omega_of_two(0.9, y)

    omega = gibbs(k, torch.tensor(y, dtype=torch.float64) / 2, 20_000, 12, 20, generator())

    # omega's standard deviation is about 0.15: its mean over 40,000 draws is known to 0.001
    assert omega.mean().item() == pytest.approx(expected, abs=0.003)


def test_labels_that_agree_and_labels_that_do_not_are_far_apart_for_that_test():
    assert mean_omega_of_two(0.9, (1, -1)) - mean_omega_of_two(0.9, (1, 1)) > 0.02


def test_a_chain_starts_from_the_prior_and_forgets_it():
    k = torch.tensor([[8.0]], dtype=torch.float64)

    after_one, after_twenty = (
        gibbs(k, torch.tensor([0.5], dtype=torch.float64), 20_000, steps, 20, generator()).mean().item()
        for steps in (1, 20)
    )

    # one point: E[omega] by a sum over f
    f = np.linspace(-15, 15, 6001)
    density = np.exp(-(f**2) / 16) * expit(f)
    expected = (polya_gamma_mean(torch.from_numpy(f)).numpy() * density).sum() / density.sum()
    assert after_twenty == pytest.approx(expected, abs=0.003)
    assert after_one != after_twenty


# --- the probability of a side ---


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (1.0, 1.0), (-3.0, 0.5), (5.0, 4.0), (2.0, 8.0)])
def test_quadrature_is_numerical_integration(mean, variance):
    def expectation(function):
        value, _ = quad(lambda e: function(mean + variance**0.5 * e) * np.exp(-e * e / 2), -12, 12, limit=400)
        return value / np.sqrt(2 * np.pi)

    gaussian = torch.tensor([mean], dtype=torch.float64), torch.tensor([variance], dtype=torch.float64)

    # the worst case is the prior's variance, 8
    assert probability(*gaussian, 20, "expected").item() == pytest.approx(expectation(expit), abs=1e-4)
    of_logarithm = np.exp(expectation(lambda f: -np.logaddexp(0, -f)))
    assert probability(*gaussian, 20, "code").item() == pytest.approx(of_logarithm, abs=1e-4)


def test_without_variance_it_is_the_sigmoid():
    mean = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)

    for likelihood in ("expected", "code"):
        found = probability(mean, torch.zeros(3, dtype=torch.float64), 20, likelihood)
        torch.testing.assert_close(found, mean.sigmoid(), rtol=0, atol=1e-12)


def test_the_codes_probability_is_smaller():
    mean, variance = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)

    # E[log sigmoid(N(0, 1))] = -0.806059
    assert probability(mean, variance, 20, "expected").item() == pytest.approx(0.5)
    assert probability(mean, variance, 20, "code").item() == pytest.approx(0.446615, abs=1e-6)


# --- the tree ---


def test_two_means_separates_what_is_apart():
    points = torch.tensor([[10.0, 0.0], [0.0, 1.0], [11.0, 1.0], [0.0, 0.0]])

    assert two_means(points).tolist() == [True, False, True, False]


@pytest.mark.parametrize("seed", range(8))
def test_two_means_finds_the_best_of_all_splits(seed):
    points = embeddings(6, seed)

    def spread(side):
        groups = [points[side], points[~side]]
        return sum(((group - group.mean(0)) ** 2).sum().item() for group in groups)

    splits = [torch.tensor((True, *rest)) for rest in product((True, False), repeat=5) if not all(rest)]
    found = two_means(points)
    assert spread(found) == pytest.approx(min(map(spread, splits)))
    assert bool(found[0])  # the first class is always on the first side


@pytest.mark.parametrize("value", [1.0, torch.nan])
def test_points_that_cannot_be_told_apart_are_still_split(value):
    assert two_means(torch.full((3, 2), value)).tolist() == [True, False, False]


def test_a_tree_splits_classes_until_they_are_single():
    # classes 1, 3, 4, 6, 7 of ten at 0, 1, 10, 11, 30
    y = torch.tensor([7, 1, 3, 4, 6, 1])
    x = torch.tensor([[30.0], [-0.5], [1.0], [10.0], [11.0], [0.5]])

    tree = class_tree(x, y, 10)

    # {0, 1, 10, 11} against {30}: sum of squares 101, while {0, 1} against the rest has 254.5
    assert tree.tolist() == [
        [0, 1, 0, 1, 1, 0, 1, -1, 0, 0],
        [0, 1, 0, 1, -1, 0, -1, 0, 0, 0],
        [0, 1, 0, -1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, -1, 0, 0, 0],
    ]


@pytest.mark.parametrize("classes", [0, 1, 2, 5, 12])
def test_a_tree_of_c_classes_has_c_minus_1_splits_and_a_way_for_every_class(classes):
    y = torch.arange(classes).repeat(3)
    tree = class_tree(embeddings(3 * classes), y, classes)

    assert tree.shape == (max(0, classes - 1), classes)
    assert all({1, -1} <= set(row) for row in tree.tolist())
    # whatever the probabilities of the sides, those of the classes add up to 1
    p = torch.rand(len(tree), 1, generator=generator(), dtype=torch.float64)
    of_class = torch.where(tree > 0, p, torch.where(tree < 0, 1 - p, 1.0)).prod(0)
    assert of_class.sum().item() == pytest.approx(1.0 if classes else 0.0)


def test_the_order_of_the_samples_does_not_change_a_tree():
    x, y = embeddings(50), torch.arange(5).repeat(10)
    order = torch.randperm(50, generator=generator())

    assert torch.equal(class_tree(x[order], y[order], 5), class_tree(x, y, 5))


# --- parts of the sides ---


def test_a_part_of_each_side_is_rounded_down_and_nothing_else_is_chosen():
    side = torch.tensor([1] * 7 + [0] * 4 + [-1] * 4)

    chosen = part_of_each(side, 0.5, generator())

    assert [int(chosen[side == value].sum()) for value in (1, 0, -1)] == [3, 0, 2]
    assert not torch.equal(chosen, part_of_each(side, 0.5, generator(1)))


def test_at_least_so_many_are_chosen_where_it_is_asked():
    side = torch.tensor([1] * 99 + [-1])

    assert int(part_of_each(side, 0.5, generator())[-1]) == 0
    assert int(part_of_each(side, 0.5, generator(), at_least=1)[-1]) == 1
