"""Gaussian-process classification: a tree of binary classifiers, each with Polya-Gamma augmentation.

Given omega ~ PG(1, f), a binary label with kappa = y - 1/2 is a Gaussian observation kappa / omega of f with variance
1 / omega. All formulas here are in W = diag(omega)^(1/2) and B = I + W K W, for (K + omega^-1)^-1 = W B^-1 W: no
eigenvalue of B is below 1, so that every factorisation is safe, and nothing is divided by an omega near 0.
"""

from __future__ import annotations

import math
from functools import cache, cached_property
from typing import Any, Literal

import gpytorch
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from fedbench.polya_gamma import draw_polya_gamma

Likelihood = Literal["expected", "code"]
LLOYD_STEPS = 50
"""At most; a handful of class means is settled after two or three."""


class Kernel:
    """RBF on embeddings of length 1, scale exp(-|x - x'|^2 / (2 length^2)); at a point itself also the jitter."""

    def __init__(self, scale: float, length: float, jitter: float, device: torch.device) -> None:
        self.variance = scale + jitter
        """Of f at any point."""
        self._jitter, self._rbf = jitter, _rbf(scale, length, device)

    def __call__(self, x: Tensor) -> Tensor:
        """The covariance of f at these embeddings, in double precision."""
        k = self.between(x, x)
        return k + self._jitter * torch.eye(len(k), dtype=k.dtype, device=k.device)

    def between(self, x: Tensor, other: Tensor) -> Tensor:
        """The covariance of f at some embeddings and at others."""
        values: Tensor = self._rbf(normalize(x.double()), normalize(other.double())).to_dense()
        return values


@cache
def _rbf(scale: float, length: float, device: torch.device) -> Any:
    rbf = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(device, torch.float64)
    rbf.outputscale, rbf.base_kernel.lengthscale = scale, length
    return rbf.requires_grad_(False)


# --- one binary classifier ---


def gibbs(k: Tensor, kappa: Tensor, chains: int, steps: int, terms: int, rng: torch.Generator) -> Tensor:
    """omega [chains, n] after so many steps of f | omega, omega | f; every chain starts from f ~ N(0, K)."""
    prior, k_kappa = _cholesky(k), k @ kappa

    def normal() -> Tensor:
        return torch.randn(chains, len(kappa), dtype=k.dtype, device=k.device, generator=rng)

    omega = draw_polya_gamma(normal() @ prior.T, terms, rng)
    for _ in range(steps):
        # f ~ N(Sigma kappa, Sigma) by one factorisation: a draw of the prior, moved by how far the observations are
        # from a draw of what they would be under it: f0 + K (K + omega^-1)^-1 (kappa / omega - f0 - e / omega^(1/2))
        w, f0 = omega.sqrt(), normal() @ prior.T
        observed = (w * (k_kappa + f0) + normal()).unsqueeze(-1)
        f = f0 + (kappa - w * torch.cholesky_solve(observed, _factor(k, w)).squeeze(-1)) @ k
        omega = draw_polya_gamma(f, terms, rng)
    return omega


class Posterior:
    """f given the labels of n points and omega [chains, n]: a Gaussian process per chain."""

    def __init__(self, k: Tensor, kappa: Tensor, omega: Tensor) -> None:
        self.w = omega.sqrt()
        self.factor = _factor(k, self.w)
        towards = (self.w * (k @ kappa)).unsqueeze(-1)
        self.weights = kappa - self.w * torch.cholesky_solve(towards, self.factor).squeeze(-1)
        """(K + omega^-1)^-1 kappa / omega [chains, n]: the mean of f is a sum over the points with these weights."""

    def at(self, cross: Tensor, variance: float) -> tuple[Tensor, Tensor]:
        """Mean and variance [chains, m] of f at new points: prior variance, and covariances [n, m] with the known."""
        explained = torch.einsum("cij,jm->cim", self._projection, cross.float()).square().sum(-2)
        return self.weights @ cross, variance - explained.double()

    @cached_property
    def _projection(self) -> Tensor:
        """L^-1 W, where L L^T = B, in single precision: twice as fast, and exact to 1e-5 as B is well conditioned."""
        inverse: Tensor = torch.linalg.solve_triangular(self.factor, torch.diag_embed(self.w), upper=False)
        return inverse.float()


class _Predictive(torch.autograd.Function):
    """`Posterior.at` in double precision, with its gradient, which is much cheaper than that of a factorisation.

    With v = (K + omega^-1)^-1 cross and a the weights of the posterior, for every chain:
    d mean = a^T d cross - v^T dK a, d variance = -2 v^T d cross + v^T dK v (column by column).
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, cross: Tensor, variance: float, kappa: Tensor, omega: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.posterior = known = Posterior(k, kappa, omega)
        ctx.projected = torch.linalg.solve_triangular(known.factor, known.w.unsqueeze(-1) * cross, upper=False)
        return known.weights @ cross, variance - ctx.projected.square().sum(-2)

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor | None, ...]:
        known: Posterior = ctx.posterior
        v = known.w.unsqueeze(-1) * torch.linalg.solve_triangular(known.factor.mT, ctx.projected, upper=True)
        weighted = v * of_variance.unsqueeze(-2)
        of_k = (weighted @ v.mT).sum(0) - (v @ of_mean.unsqueeze(-1)).squeeze(-1).T @ known.weights
        return of_k, known.weights.T @ of_mean - 2 * weighted.sum(0), None, None, None


def predictive(k: Tensor, cross: Tensor, variance: float, kappa: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """`Posterior(k, kappa, omega).at(cross, variance)`, differentiable in k and cross."""
    moments: tuple[Tensor, Tensor] = _Predictive.apply(k, cross, variance, kappa, omega)  # type: ignore[no-untyped-call]
    return moments


def probability(mean: Tensor, variance: Tensor, points: int, likelihood: Likelihood) -> Tensor:
    """E[sigmoid(f)] of Gaussian f by Gauss-Hermite quadrature; `code`: exp(E[log sigmoid(f)]), which is less."""
    places, weights = (torch.from_numpy(values).to(mean) for values in _gauss_hermite(points))
    f = mean.unsqueeze(-1) + (2 * variance.clamp_min(0)).sqrt().unsqueeze(-1) * places
    return f.sigmoid() @ weights if likelihood == "expected" else (logsigmoid(f) @ weights).exp()


@cache
def _gauss_hermite(points: int) -> tuple[np.ndarray, np.ndarray]:
    places, weights = np.polynomial.hermite.hermgauss(points)
    return places, weights / math.sqrt(math.pi)


def _factor(k: Tensor, w: Tensor) -> Tensor:
    """The Cholesky factor of B, one per chain."""
    identity = torch.eye(len(k), dtype=k.dtype, device=k.device)
    return _cholesky(torch.addcmul(identity, w.unsqueeze(-1) * w.unsqueeze(-2), k))


def _cholesky(matrix: Tensor) -> Tensor:
    """Unchecked: of matrices that are far from singular. What is not a number stays so, for the loop to see."""
    factor: Tensor = torch.linalg.cholesky_ex(matrix).L
    return factor


# --- the tree ---


def class_tree(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """The classes of y split in two again and again, by 2-means on the means of their embeddings.

    A row per split, 1 for the classes on one side, -1 for those on the other, 0 for all others: C - 1 rows.
    """
    present = y.unique()
    means = torch.stack([x[y == label].mean(0) for label in present]) if len(present) else x
    rows, groups = [], [torch.arange(len(present), device=y.device)]
    while groups:
        group = groups.pop(0)
        if len(group) < 2:
            continue
        first = two_means(means[group])
        row = torch.zeros(classes, dtype=torch.int8, device=y.device)
        row[present[group]] = torch.where(first, 1, -1).to(torch.int8)
        rows.append(row)
        groups += [group[first], group[~first]]
    return torch.stack(rows) if rows else torch.zeros(0, classes, dtype=torch.int8, device=y.device)


def two_means(points: Tensor) -> Tensor:
    """Which points share the first point's cluster: the best of Lloyd's algorithm from every pair of points."""
    one, other = torch.triu_indices(len(points), len(points), 1, device=points.device)
    centres = torch.stack([points[one], points[other]], 1)
    for _ in range(LLOYD_STEPS):
        distances = torch.cdist(points.expand(len(centres), -1, -1), centres).square()
        first = distances[..., 0] <= distances[..., 1]
        shares = torch.stack([first, ~first], 1).to(points)
        before, centres = centres, shares @ points / shares.sum(-1, keepdim=True)
        if torch.equal(before, centres):
            break
    best = first[distances.amin(-1).sum(-1).nan_to_num(torch.inf).argmin()]
    if bool(best.all()) or not bool(best.any()):  # all points are the same, or not numbers
        best = torch.arange(len(points), device=points.device) == 0
    return best == best[0]


def part_of_each(side: Tensor, share: float, rng: torch.Generator, at_least: int = 0) -> Tensor:
    """True at a random part of the points on each side (1 or -1), rounded down."""
    chosen = torch.zeros_like(side, dtype=torch.bool)
    for value in (1, -1):
        members = (side == value).nonzero().squeeze(-1)
        order = torch.randperm(len(members), generator=rng, device=rng.device)
        chosen[members[order[: max(at_least, int(share * len(members)))]]] = True
    return chosen
