"""The Polya-Gamma distribution: its mean, and draws that have its moments and its Laplace transform."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from fedbench.polya_gamma import draw_polya_gamma, polya_gamma_mean


def draws(c, terms=20, count=200_000, seed=0):
    return draw_polya_gamma(torch.full((count,), c, dtype=torch.float64), terms, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("c", "mean"),
    [(0.0, 0.25), (2.0, 0.190399), (-2.0, 0.190399), (10.0, 0.049995)],  # tanh(1)/4, tanh(5)/20
)
def test_the_mean_is_tanh_half_c_over_two_c(c, mean):
    assert polya_gamma_mean(torch.tensor(c, dtype=torch.float64)).item() == pytest.approx(mean, abs=5e-7)


def test_the_mean_is_smooth_where_the_series_takes_over():
    c = torch.tensor([0.999e-3, 1.001e-3], dtype=torch.float64)

    series, quotient = polya_gamma_mean(c).tolist()

    # both are 1/4 - c^2/48 + c^4/480 - ...: the next term is 2e-15
    assert series == pytest.approx(0.25 - 0.999e-3**2 / 48, abs=1e-14)
    assert quotient == pytest.approx(0.25 - 1.001e-3**2 / 48, abs=1e-14)


@pytest.mark.parametrize(
    ("c", "mean", "variance"),
    # variance (sinh c - c) / (4 c^3 cosh(c/2)^2), 1/24 at c = 0
    [(0.0, 0.25, 0.0416667), (2.0, 0.190399, 0.0213513), (6.0, 0.082921, 0.0022478)],
)
def test_draws_have_the_mean_and_the_variance(c, mean, variance):
    found = draws(c)

    # four standard errors: sd / sqrt(200,000)
    assert found.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / 200_000))
    assert found.var().item() == pytest.approx(variance, rel=0.04)
    assert found.min() > 0


@pytest.mark.parametrize(
    ("c", "transform"),
    # E[exp(-3 omega)] = cosh(c/2) / cosh(sqrt((c^2/2 + 3) / 2)): 1/cosh(1.224745), cosh(1)/cosh(1.581139)
    [(0.0, 0.540960), (2.0, 0.609163)],
)
def test_draws_have_the_laplace_transform(c, transform):
    assert (-3 * draws(c)).exp().mean().item() == pytest.approx(transform, abs=2e-3)


def test_terms_that_are_left_out_enter_by_their_mean():
    # the first term alone has the mean 1 / (2 pi^2 / 4) = 0.2026
    assert draws(0.0, terms=1).mean().item() == pytest.approx(0.25, abs=2e-3)


def test_draws_are_those_of_a_sum_of_many_gammas():
    c, rng = 1.5, np.random.default_rng(0)
    denominators = (np.arange(500) + 0.5) ** 2 + (c / (2 * np.pi)) ** 2
    reference = (rng.gamma(1.0, size=(10_000, 500)) / denominators).sum(1) / (2 * np.pi**2)

    assert ks_2samp(draws(c, count=10_000).numpy(), reference).pvalue > 0.01


def test_draws_come_from_the_generator():
    assert torch.equal(draws(1.0, count=9, seed=1), draws(1.0, count=9, seed=1))
    assert not torch.equal(draws(1.0, count=9, seed=1), draws(1.0, count=9, seed=2))
