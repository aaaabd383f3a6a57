"""Networks for particles: next to the weights, a log precision that the prior or the likelihood has.

The log precision is the first coordinate of the flat vector, and so of the body; the forward pass does not use it.
`ParticleModel` is the Bayesian model around any network: prior, likelihood and prediction, for all particles at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, one_hot, pad

from fedbench.errors import FedbenchError
from fedbench.models.mlp import classifier
from fedbench.models.network import Network
from fedbench.models.shape import Shape

GammaForm = Literal["rate", "scale"]

WEIGHT_PRECISION = math.e
"""Of the prior of a network's weights, N(0, 1/e)."""


class WithPrecision(nn.Sequential):
    """Layers, and one parameter more."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.log_precision = nn.Parameter(torch.zeros(1))


class Odds(nn.Linear):
    """Logits (0, w^T x): softmax then gives class 1 the probability sigmoid(w^T x)."""

    def __init__(self, features: int) -> None:
        super().__init__(features, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return pad(super().forward(x), (1, 0))


def blr(shape: Shape, classes: int) -> nn.Sequential:
    """Bayesian logistic regression without bias; log_precision is log xi of the prior w ~ N(0, 1/xi)."""
    if classes != 2:
        raise FedbenchError(f"blr is for 2 classes, not {classes}.", "Use logreg.")
    return WithPrecision(nn.Flatten(), Odds(prod(shape)))


def bnn100(shape: Shape, classes: int) -> nn.Sequential:
    """One hidden layer and linear outputs; log_precision is log gamma of the noise y - f(x) ~ N(0, 1/gamma)."""
    return WithPrecision(*classifier(prod(shape), 100, classes))


@dataclass(frozen=True)
class ParticleModel:
    """Prior, likelihood and prediction of a network at particles [P, d]; d is the length of its trained vector.

    Logistic regression: xi ~ Gamma(1, b), w ~ N(0, 1/xi), labels given by sigmoid(w^T x). A network with a noise
    precision: gamma ~ Gamma(1, b), weights N(0, 1/e), one-hot targets with Gaussian noise if `gaussian`, else classes
    given by softmax. Any other network: weights N(0, 1/e) and softmax.
    """

    net: Network
    gaussian: bool = True
    gamma: GammaForm = "rate"
    bound: float = 10.0
    """A log precision stays within plus and minus this."""

    @property
    def has_precision(self) -> bool:
        return isinstance(self.net.module, WithPrecision)

    @property
    def is_regression(self) -> bool:
        """Logistic regression, whose precision is the prior's."""
        return isinstance(self.net.module[-1], Odds)

    @property
    def has_noise(self) -> bool:
        """A network whose precision is that of the noise on its outputs."""
        return self.has_precision and not self.is_regression

    @property
    def is_noisy(self) -> bool:
        """Such a network, with targets that have the noise."""
        return self.gaussian and self.has_noise

    @property
    def gamma_rate(self) -> float:
        """b of Gamma(1, b) as a rate."""
        b = 0.01 if self.is_regression else 0.1
        return b if self.gamma == "rate" else 1 / b

    def initial(self, count: int, x: Tensor, y: Tensor, rng: torch.Generator) -> Tensor:
        """Particles, drawn on the CPU: logistic regressions from the prior, networks with weights N(0, 1/(fan_in + 1)).

        The noise precision of a network fits its residuals on these samples.
        """
        device = self.net.flat.device
        if self.is_regression:
            xi = torch.empty(count, 1).exponential_(self.gamma_rate, generator=rng)
            w = torch.randn(count, self.net.flat.numel() - 1, generator=rng) / xi.sqrt()
            return self.clamped(torch.cat([xi.log(), w], 1)).to(device)[:, : self.net.d]
        particles = _random_networks(self.net, count, rng).to(device)[:, : self.net.d]
        if self.is_noisy:
            particles[:, 0] = -self._residuals(particles, x, y).square().mean((1, 2)).log()
        return self.clamped(particles)

    def clamped(self, particles: Tensor) -> Tensor:
        """The particles with their log precisions within bounds."""
        if not self.has_precision:
            return particles
        return torch.cat([particles[:, :1].clamp(-self.bound, self.bound), particles[:, 1:]], 1)

    def score(self, particles: Tensor, x: Tensor, y: Tensor, n: int) -> Tensor:
        """The gradient of log p_0 + log p_k, with the batch standing for n samples."""
        return self.prior_score(particles) + self.likelihood_score(particles, x, y, n)

    def prior_score(self, particles: Tensor) -> Tensor:
        """The gradient of log p_0 at every particle."""
        precision = particles[:, :1].exp()
        if self.is_regression:
            w = particles[:, 1:]
            squares = w.square().sum(1, keepdim=True)
            of_log = w.shape[1] / 2 - precision / 2 * squares - self.gamma_rate * precision + 1
            return torch.cat([of_log, -precision * w], 1)
        score = -WEIGHT_PRECISION * particles
        if self.has_precision:
            score[:, :1] = 1 - self.gamma_rate * precision
        return score

    def likelihood_score(self, particles: Tensor, x: Tensor, y: Tensor, n: int) -> Tensor:
        """The gradient of log p_k at every particle, with the batch standing for n samples."""
        x = x.to(particles)
        if self.is_regression and self.net.d == self.net.flat.numel():  # in closed form: 50 times faster
            rows, w = x.flatten(1), particles[:, 1:]
            of_w = (y[:, None] - (rows @ w.T).sigmoid()).T @ rows
            return pad(of_w, (1, 0)) * (n / len(x))
        of_all = vmap(grad(self.log_likelihood), in_dims=(0, None, None), chunk_size=self._at_once)
        scores: Tensor = of_all(particles, x, y)
        return scores * (n / len(x))

    def log_likelihood(self, particle: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The sum over these samples, at one particle."""
        outputs = self._network(particle, x)
        if not self.is_noisy:
            return -cross_entropy(outputs, y, reduction="sum")
        log_gamma = particle[0]
        squares = (outputs - one_hot(y, outputs.shape[1])).square().sum()
        return outputs.numel() / 2 * (log_gamma - math.log(2 * math.pi)) - log_gamma.exp() / 2 * squares

    def outputs(self, particles: Tensor, x: Tensor) -> Tensor:
        """What every particle's network says, [P, samples, classes]."""
        said: Tensor = vmap(self._network, in_dims=(0, None), chunk_size=self._at_once)(particles, x)
        return said

    def probabilities(self, particles: Tensor, x: Tensor) -> Tensor:
        """Of the ensemble: mean softmax; for Gaussian targets, which have none, softmax of the mean output."""
        outputs = self.outputs(particles, x)
        if self.is_noisy:
            return outputs.mean(0).softmax(-1)
        return outputs.softmax(-1).mean(0)

    @property
    def _at_once(self) -> int | None:
        """How many particles share a pass: all, but convolutions with different weights are slower together."""
        return 1 if any(isinstance(layer, nn.Conv2d) for layer in self.net.module.modules()) else None

    def _residuals(self, particles: Tensor, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.outputs(particles, x)
        return outputs - one_hot(y, outputs.shape[-1])

    def _network(self, particle: Tensor, x: Tensor) -> Tensor:
        said: Tensor = functional_call(self.net.module, _unflattened(self.net, particle), (x,))
        return said


def _random_networks(net: Network, count: int, rng: torch.Generator) -> Tensor:
    """Vectors of the whole network: weights N(0, 1/(fan_in + 1)), norms as the identity, everything else 0."""
    drawn = torch.zeros(count, net.flat.numel())
    for layer in net.module.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        place = slice(start := int(weight.storage_offset()), start + weight.numel())
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            drawn[:, place] = torch.randn(count, weight.numel(), generator=rng) / (weight[0].numel() + 1) ** 0.5
        else:
            drawn[:, place] = 1.0
    return drawn


def _unflattened(net: Network, vector: Tensor) -> dict[str, Tensor]:
    """A trained vector as the module's parameters, by name; convolutions lie channels-last in it."""
    whole = net.extended(vector)
    return {name: net.values_of(whole, like) for name, like in net.module.named_parameters()}
