"""The Polya-Gamma distribution PG(1, c), which turns logistic likelihoods into Gaussian ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def polya_gamma_mean(c: Tensor) -> Tensor:
    """E[PG(1, c)] = tanh(c/2) / (2c), and 1/4 at 0."""
    near_zero = c.abs() < 1e-3  # there the quotient's series is exact in double precision
    away = torch.where(near_zero, 1.0, c)
    return torch.where(near_zero, 0.25 - c.square() / 48, (away / 2).tanh() / (2 * away))


def draw_polya_gamma(c: Tensor, terms: int, rng: torch.Generator) -> Tensor:
    """One draw of PG(1, c) for every element of c.

    PG(1, c) = sum_k g_k / (2 pi^2 d_k) with g_k ~ Exp(1) and d_k = (k - 1/2)^2 + (c / 2 pi)^2, k = 1, 2, ... The terms
    that are left out enter by their mean: the mean is exact, and of the variance 1 / (12 pi^4 terms^3) is missing at
    most, 1e-7 for 20 terms, beside 1/24 at c = 0. (Simply cut after 200 terms, the mean would be 0.00025 too small.)
    """
    k = torch.arange(terms, dtype=c.dtype, device=c.device) + 0.5
    d = k.square() + (c / (2 * math.pi)).square().unsqueeze(-1)
    uniform = torch.rand(d.shape, dtype=d.dtype, device=d.device, generator=rng)
    g = uniform.neg_().log1p_().neg_()  # three times as fast as exponential_
    return polya_gamma_mean(c) + ((g - 1) / d).sum(-1) / (2 * math.pi**2)
