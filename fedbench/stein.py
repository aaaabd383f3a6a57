"""Stein variational gradient descent (SVGD) and Stein discrepancies on particles [P, d], meant for float64.

The kernel is k(x, y) = exp(-||x - y||^2 / h). A score is the gradient of a log-density at every particle, [P, d].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

MedianForm = Literal["paper", "code"]
Bandwidth = float | MedianForm
"""h itself, or how it is taken from the median distance of the particles."""
KdeForm = Literal["code", "log"]

MIN_BANDWIDTH = 1e-8
"""Of h: the median distance is 0 when particles coincide."""
KERNEL_FLOOR = 1e-9
"""What the code's density estimate adds to every kernel value."""
DENSITY_FLOOR = 1e-10
"""What the code adds to a density before it takes the logarithm."""


def median_bandwidth(particles: Tensor, form: MedianForm = "paper") -> float:
    """h = med^2 / log P with the median distance of all pairs.

    Form `code`: the median of all squared distances, those of particles to themselves among them, over log(P + 1).
    """
    return _bandwidth(_squared_distances(_centred(particles)), form)


def svgd_direction(particles: Tensor, score: Tensor, bandwidth: Bandwidth) -> Tensor:
    """phi(x) = (1/P) sum_j [k(theta_j, x) score(theta_j) + grad_j k(theta_j, x)] at every particle x."""
    x = _centred(particles)
    squares = _squared_distances(x)
    h = _bandwidth(squares, bandwidth)
    k = (squares / -h).exp()
    # repulsion: sum_j -(2/h) (theta_j - x) k(theta_j, x)
    return (k @ score).addmm_(k.sum(1).diag() - k, x, alpha=2 / h).div_(len(x))


class Svgd:
    """The steps of one run of SVGD: theta + rate phi / (fudge + sqrt(G)), G the running mean of phi^2."""

    def __init__(self, rate: float, fudge: float, bandwidth: Bandwidth = "paper", decay: float = 0.9) -> None:
        self._rate, self._fudge, self._bandwidth, self._decay = rate, fudge, bandwidth, decay
        self._squares: Tensor | None = None

    def step(self, particles: Tensor, score: Tensor) -> Tensor:
        """The particles after one more step."""
        phi = svgd_direction(particles, score, self._bandwidth)
        if self._squares is None:
            self._squares = phi.square()
        else:
            self._squares.mul_(self._decay).addcmul_(phi, phi, value=1 - self._decay)
        return torch.addcdiv(particles, phi, self._squares.sqrt().add_(self._fudge), value=self._rate)


def stein_kernel(particles: Tensor, left: Tensor, right: Tensor, bandwidth: Bandwidth) -> Tensor:
    """k s(a)^T s'(b) + s(a)^T grad_b k + grad_a k^T s'(b) + tr(grad_a grad_b k) at all pairs (a, b), [P, P].

    `left` holds the scores s, `right` the scores s'.
    """
    x = _centred(particles)
    squares = _squared_distances(x)
    h = _bandwidth(squares, bandwidth)
    of_left, of_right = left @ x.T, x @ right.T
    along = of_left.diagonal()[:, None] - of_left + of_right.diagonal() - of_right  # s(a)^T (a - b) + (b - a)^T s'(b)
    trace = 2 * x.shape[1] / h - 4 * squares / h**2
    return (squares / -h).exp() * (left @ right.T + (2 / h) * along + trace)


def v_statistic(particles: Tensor, left: Tensor, right: Tensor, bandwidth: Bandwidth) -> Tensor:
    """The mean over all pairs, a particle with itself among them: KSD for equal scores, HIP for different ones."""
    return stein_kernel(particles, left, right, bandwidth).mean()


def u_statistic(particles: Tensor, left: Tensor, right: Tensor, bandwidth: Bandwidth) -> Tensor:
    """The mean over all pairs of different particles: without the V-statistic's bias, so that it may be negative."""
    pairs, n = stein_kernel(particles, left, right, bandwidth), len(particles)
    return (pairs.sum() - pairs.trace()) / (n * (n - 1))


@dataclass(frozen=True)
class Kde:
    """A Gaussian kernel density estimate around centres [P, d], or the product of several, [groups, P, d].

    Form `log` is exact at any distance. Form `code` has the floors of the public DSVGD code, and P inside the power of
    its normaliser; in many dimensions nothing is left above the floors, and its score is 0.
    """

    centres: Tensor
    bandwidth: float
    form: KdeForm = "log"

    @property
    def is_flat(self) -> bool:
        """Whether even the largest value that the code's estimate can take is lost when the floor is added to it."""
        largest = math.log(self.centres.shape[-2] * (1 + KERNEL_FLOOR)) - self._log_normaliser
        return self.form == "code" and largest < math.log(DENSITY_FLOOR) - 53 * math.log(2)

    @property
    def _log_normaliser(self) -> float:
        n, d = self.centres.shape[-2:]
        spread = math.log(2 * math.pi * self.bandwidth**2)
        return d / 2 * (spread + math.log(n)) if self.form == "code" else d / 2 * spread + math.log(n)

    def log_density(self, x: Tensor) -> Tensor:
        """At every row of x; the code's form with its floors."""
        exponents = self._exponents(x)
        if self.form == "log":
            return (exponents.logsumexp(-1) - self._log_normaliser).sum(-1)
        total = (exponents.exp() + KERNEL_FLOOR).sum(-1)
        return ((total.log() - self._log_normaliser).exp() + DENSITY_FLOOR).log().sum(-1)

    def score(self, x: Tensor) -> Tensor:
        """The gradient of log_density at every row of x: springs towards the centres near by."""
        if self.is_flat:
            return torch.zeros_like(x)
        exponents = self._exponents(x)
        if self.form == "log":
            weights = exponents.softmax(-1)
        else:
            kernels = exponents.exp()
            floor = math.exp(min(math.log(DENSITY_FLOOR) + self._log_normaliser, 700.0))  # e^700 stands for infinity
            weights = kernels / ((kernels + KERNEL_FLOOR).sum(-1, keepdim=True) + floor)
        weights = weights.flatten(1)
        pull = weights @ self._around - weights.sum(1, keepdim=True) * (x - self._middle)
        return pull.div_(self.bandwidth**2)

    @cached_property
    def _middle(self) -> Tensor:
        return self.centres.flatten(0, -2).mean(0)

    @cached_property
    def _around(self) -> Tensor:
        """All centres, seen from their middle, so that large norms do not cancel."""
        return self.centres.flatten(0, -2) - self._middle

    def _exponents(self, x: Tensor) -> Tensor:
        """-||x - centre||^2 / (2 bandwidth^2) as [rows of x, groups, P]."""
        seen = x - self._middle
        squares = _squares(seen)[:, None] + _squares(self._around) - 2 * seen @ self._around.T
        return squares.clamp_min_(0).div_(-2 * self.bandwidth**2).view(len(x), -1, self.centres.shape[-2])


def _bandwidth(squares: Tensor, bandwidth: Bandwidth) -> float:
    """h for particles at these squared distances."""
    if not isinstance(bandwidth, str):
        return bandwidth
    if (n := len(squares)) == 1:
        return 1.0  # a particle alone: its kernel is 1 whatever the bandwidth
    if bandwidth == "code":
        h = float(squares.quantile(0.5)) / math.log(n + 1)
    else:
        one, other = torch.triu_indices(n, n, 1, device=squares.device)
        h = float(squares[one, other].sqrt().quantile(0.5)) ** 2 / math.log(n)
    return max(h, MIN_BANDWIDTH)


def _centred(particles: Tensor) -> Tensor:
    """Only differences of particles count; from their middle, large norms do not cancel."""
    return particles - particles.mean(0)


def _squared_distances(centred: Tensor) -> Tensor:
    """[P, P], from inner products."""
    products = centred @ centred.T
    norms = products.diagonal()
    return (norms[:, None] + norms - 2 * products).clamp_min_(0)


def _squares(x: Tensor) -> Tensor:
    """||x||^2 of every row."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    return norms.square()
