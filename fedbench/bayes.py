"""Mean-field Gaussian posteriors on flat vectors: sample, KL and its gradients in closed form, aggregate, predict.

N(mu, sigma^2) with sigma = softplus(rho), one pair per parameter. Gradients are written out instead of taken by
autograd, which would cost half as much again per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedbench.algorithm import Ctx, State, Upload
from fedbench.models.network import Network
from fedbench.training import average, extrapolate, weight_of

RHO_RANGE = (-12.0, 5.0)
"""sigma from 6e-6 to 5: outside, gradients of the KL overflow float32."""


class Gaussian:
    """A posterior in training: mu and rho are the rows of one tensor, so that one optimiser step moves both."""

    def __init__(self, mu: Tensor, rho: Tensor) -> None:
        self.parameter = nn.Parameter(torch.stack([mu, rho]), requires_grad=False)
        self.grad = torch.zeros_like(self.parameter)
        self.parameter.grad = self.grad
        self.mu, self.rho = self.parameter.unbind()
        self.grad_mu, self.grad_rho = self.grad.unbind()
        self._sigma: Tensor | None = None

    @property
    def sigma(self) -> Tensor:
        """softplus(rho), kept until the next step: it is needed several times in between. Not to be changed."""
        if self._sigma is None:
            self._sigma = softplus(self.rho)
        return self._sigma

    @property
    def sigma_slope(self) -> Tensor:
        """d sigma / d rho."""
        return torch.sigmoid(self.rho)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move along the gradient, and keep rho where the arithmetic is sound."""
        optimizer.step()
        self.rho.clamp_(*RHO_RANGE)
        self._sigma = None

    def state(self) -> State:
        return {"mu": self.mu.detach().clone(), "rho": self.rho.detach().clone()}


def initial_gaussian(ctx: Ctx, rho: float, mu_std: float, bayes_norm: Literal["gaussian", "point"]) -> State:
    """mu ~ N(0, mu_std^2), rho constant; point-valued normalisation parameters start where the network's do."""
    initial, is_norm = ctx.task.initial, ctx.task.net.norm_mask
    # Drawn on the CPU, so that every device starts from the same values.
    mu = torch.randn(initial.shape, generator=ctx.rng("init_gaussian", on_cpu=True)).mul_(mu_std).to(initial.device)
    if bayes_norm == "point":
        mu = torch.where(is_norm, initial, mu)
    return {"mu": mu, "rho": torch.full_like(mu, rho)}


def random_coordinates(net: Network, bayes_norm: Literal["gaussian", "point"]) -> Tensor | float:
    """1 where a parameter has a posterior, 0 where it is a point value; the plain number 1 when all have one."""
    return 1.0 if bayes_norm == "gaussian" or net.not_norm is None else net.not_norm


def kl(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> float:
    """KL(N(mu1, sigma1^2) || N(mu2, sigma2^2)), summed over the coordinates in float64."""
    mu1, sigma1, mu2, sigma2 = (value.double() for value in (mu1, sigma1, mu2, sigma2))
    terms = torch.log(sigma2 / sigma1) + (sigma1**2 + (mu1 - mu2) ** 2) / (2 * sigma2**2) - 0.5
    return float(terms.sum())


def set_elbo_grad(
    q: Gaussian,
    prior: Gaussian,
    kl_weight: Tensor | float,
    loss_grad: Callable[[Tensor], Tensor],
    scale: Tensor | float,
    samples: int,
    generator: torch.Generator,
) -> None:
    """Set the gradient over q of E[loss(theta)] + kl_weight * KL(q || prior), theta = mu + scale * sigma * eps.

    `loss_grad` returns the gradient of the loss at theta; the expectation is over `samples` draws of eps ~ N(0, I).
    """
    precision = prior.sigma.square().reciprocal_()
    torch.sub(q.mu, prior.mu, out=q.grad_mu).mul_(precision).mul_(kl_weight)
    torch.mul(q.sigma, precision, out=q.grad_rho).sub_(q.sigma.reciprocal()).mul_(kl_weight)
    for _ in range(samples):
        noise = torch.randn(q.mu.shape, generator=generator, device=generator.device).mul_(scale)
        grad = loss_grad(torch.addcmul(q.mu, q.sigma, noise))
        q.grad_mu.add_(grad, alpha=1 / samples)
        q.grad_rho.addcmul_(grad, noise, value=1 / samples)
    q.grad_rho.mul_(q.sigma_slope)


def set_prior_grad(prior: Gaussian, q: Gaussian, weight: Tensor | float) -> None:
    """Set the gradient over the prior of weight * KL(q || prior)."""
    inverse = prior.sigma.reciprocal()
    precision = inverse.square()
    difference = prior.mu - q.mu
    torch.mul(difference, precision, out=prior.grad_mu)
    spread = q.sigma.square().addcmul_(difference, difference)  # s1^2 + (m1 - m2)^2
    torch.mul(spread.mul_(precision).neg_().add_(1.0), inverse, out=prior.grad_rho).mul_(prior.sigma_slope)
    prior.grad.mul_(weight)


def predict_mean(model: State, x: Tensor, net: Network) -> Tensor:
    """Class probabilities at the posterior mean."""
    net.load(model["mu"])
    return net.logits(x).softmax(-1)


def predict_mc(
    model: State, x: Tensor, net: Network, scale: Tensor | float, samples: int, generator: torch.Generator
) -> Tensor:
    """Class probabilities averaged over draws of the weights."""
    sigma = softplus(model["rho"])
    total = torch.zeros(())
    for _ in range(samples):
        noise = torch.randn(sigma.shape, generator=generator, device=generator.device).mul_(scale)
        net.load(torch.addcmul(model["mu"], sigma, noise))
        total = total + net.logits(x).softmax(-1)
    return total / samples


def aggregate_gaussians(server: State, uploads: Iterable[Upload], ctx: Ctx, how: Literal["param", "moment"]) -> State:
    """Average mu and rho componentwise, or match moments, which minimises the average KL(q_i || server)."""
    if how == "param":
        return average(server, uploads, ctx)
    total, mean, second = 0.0, torch.zeros(()), torch.zeros(())
    for upload in uploads:  # float64: the variance is a difference of second moments
        weight = weight_of(upload, ctx)
        mu, sigma = upload.message["mu"].double(), softplus(upload.message["rho"].double())
        total += weight
        mean = mean + weight * mu
        second = second + weight * (sigma**2 + mu**2)
    mean, second = mean / total, second / total
    sigma = (second - mean**2).clamp_min_(1e-24).sqrt()
    merged = {"mu": mean.float(), "rho": inverse_softplus(sigma).clamp_(*RHO_RANGE).float()}
    return extrapolate(server, merged, ctx)


def inverse_softplus(sigma: Tensor) -> Tensor:
    """rho with softplus(rho) = sigma."""
    return sigma + torch.log(-torch.expm1(-sigma))
