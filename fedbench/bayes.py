"""Mean-field Gaussian posteriors on flat vectors: sample, KL and its gradients in closed form, aggregate, predict.

N(mu, sigma^2) with sigma = softplus(rho), one pair per parameter. Gradients are written out instead of taken by
autograd, which would cost half as much again per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedbench.algorithm import Ctx, Message, Params, State, Upload
from fedbench.models.network import Network
from fedbench.training import average, extrapolate, weight_of

LossGrad = Callable[[Tensor], Tensor]
"""The gradient of the loss at a vector of weights; a view, valid until the next call."""
OutputsGrad = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""The gradients of the loss over mean and spread of Gaussian weights, by one draw of the noise in layers' outputs."""
KLDirection = Literal["forward", "reverse"]
"""KL(q || prior), or KL(prior || q)."""
RHO_RANGE = (-12.0, 5.0)
"""sigma from 6e-6 to 5: outside, gradients of the KL overflow float32."""
ODDS_RANGE = (-30.0, 30.0)
"""Log odds of lambda. Beyond 17 it is 0 or 1 in float32; no draw in float32 opens a gate at -30 or closes it at 30."""
LAMBDA_MARGIN = 1e-6
"""How near to 0 and 1 a lambda is used that is a parameter itself."""


class GaussianParams(Params):
    """What all methods with Gaussian weights can set."""

    bayes_norm: Literal["point", "gaussian"] = Field(
        "point", description="normalisation parameters: point or posterior"
    )
    local_reparam: bool = Field(
        False, description="draw the noise in the layers' outputs, for every image by itself: less variance, more time"
    )

    @model_validator(mode="after")
    def _outputs_of_norms_have_no_noise(self) -> Self:
        if self.local_reparam and self.bayes_norm == "gaussian":
            raise ValueError("local_reparam is for linear layers and convolutions: use bayes_norm point")
        return self


class Gaussian:
    """A posterior in training: mu and rho are the rows of one tensor, so that one optimiser step moves both."""

    def __init__(self, mu: Tensor, rho: Tensor, *more: Tensor) -> None:
        """`more` are further rows, of a family that has more parameters."""
        self.parameter = nn.Parameter(torch.stack([mu, rho, *more]), requires_grad=False)
        self.grad = torch.zeros_like(self.parameter)
        self.parameter.grad = self.grad
        self.mu, self.rho = self.parameter[:2].unbind()
        self.grad_mu, self.grad_rho = self.grad[:2].unbind()
        self._sigma: Tensor | None = None
        self._held: tuple[slice, Tensor] | None = None

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
        if self._held is not None:
            part, values = self._held
            self.parameter[:, part] = values
        self._sigma = None

    def hold(self, part: slice) -> None:
        """Keep these coordinates as they are now, whatever the optimiser does."""
        self._held = part, self.parameter[:, part].clone()

    def state(self) -> State:
        return {"mu": self.mu.detach().clone(), "rho": self.rho.detach().clone()}


class SpikeSlab(Gaussian):
    """A posterior gamma (mu + sigma eps) in training, gamma ~ Bern(lambda) per weight; the third row is lambda's.

    With `form` "logit" that row holds the log odds of lambda; with "raw" lambda itself, free to leave [0, 1] and
    clamped where it is used. The clamp lets gradients pass, so that a lambda may come back.
    """

    def __init__(self, state: State, form: Literal["logit", "raw"], generator: torch.Generator) -> None:
        """`generator` draws the gates."""
        super().__init__(state["mu"], state["rho"], state["gate"])
        self.gate, self.grad_gate = self.parameter[2], self.grad[2]
        self._form, self._generator = form, generator

    @property
    def odds(self) -> Tensor:
        """The log odds of lambda."""
        return self.gate if self._form == "logit" else self.gate.logit(LAMBDA_MARGIN)

    @property
    def keep(self) -> Tensor:
        """lambda, the probability that a weight is kept."""
        return torch.sigmoid(self.odds)

    @property
    def odds_slope(self) -> Tensor | float:
        """d log odds / d parameter."""
        if self._form == "logit":
            return 1.0
        keep = self.keep
        return (keep * (1 - keep)).reciprocal_()

    def draw_gates(self, random: Tensor | float, temp: float = 1.0) -> tuple[Tensor, Tensor]:
        """Gates, 1 or 0, and the slope over the log odds that stands for theirs: that of sigmoid(eta / temp).

        Where `random` is 0, the gate is open and has no slope.
        """
        u = torch.rand(self.gate.shape, generator=self._generator, device=self._generator.device)
        eta = u.clamp_min_(2.0**-25).logit_().add_(self.odds)  # eta > 0 with probability lambda
        soft = torch.sigmoid(eta / temp)
        slope = (1 - soft).mul_(soft).mul_(random).div_(temp)
        return (eta > 0).to(eta.dtype).mul_(random).add_(1 - random), slope

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        super().step(optimizer)
        if self._form == "logit":
            self.gate.clamp_(*ODDS_RANGE)

    def state(self) -> State:
        return {**super().state(), "gate": self.gate.detach().clone()}


def initial_gaussian(
    ctx: Ctx,
    rho: float,
    mu_std: float,
    bayes_norm: Literal["gaussian", "point"],
    purpose: str = "init_gaussian",
    rho_std: float = 0.0,
) -> State:
    """mu ~ N(0, mu_std^2), rho ~ N(rho, rho_std^2); point-valued normalisation parameters start where the network's do.

    Another purpose of the generator is another, independent draw.
    """
    initial, is_norm, draws = ctx.task.initial, ctx.task.net.norm_mask, ctx.rng(purpose, on_cpu=True)
    # Drawn on the CPU, so that every device starts from the same values.
    mu = torch.randn(initial.shape, generator=draws).mul_(mu_std).to(initial.device)
    if bayes_norm == "point":
        mu = torch.where(is_norm, initial, mu)
    rhos = torch.full_like(mu, rho)
    if rho_std > 0:
        rhos += torch.randn(initial.shape, generator=draws).mul_(rho_std).to(initial.device)
    return {"mu": mu, "rho": rhos.clamp_(*RHO_RANGE)}


def random_coordinates(net: Network, bayes_norm: Literal["gaussian", "point"]) -> Tensor | float:
    """1 where a parameter has a posterior, 0 where it is a point value; the plain number 1 when all have one."""
    return 1.0 if bayes_norm == "gaussian" or net.not_norm is None else net.not_norm


def kl(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> float:
    """KL(N(mu1, sigma1^2) || N(mu2, sigma2^2)), summed over the coordinates in float64."""
    mu1, sigma1, mu2, sigma2 = (value.double() for value in (mu1, sigma1, mu2, sigma2))
    return float(_kl_terms(mu1, sigma1, mu2, sigma2).sum())


def _kl_terms(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> Tensor:
    return torch.log(sigma2 / sigma1) + (sigma1**2 + (mu1 - mu2) ** 2) / (2 * sigma2**2) - 0.5


def bernoulli_kl(keep1: Tensor, keep2: Tensor) -> float:
    """KL(Bern(keep1) || Bern(keep2)), summed over the coordinates in float64."""
    a, c = keep1.double(), keep2.double()
    terms = torch.xlogy(a, a) - torch.xlogy(a, c) + torch.xlogy(1 - a, 1 - a) - torch.xlogy(1 - a, 1 - c)
    return float(terms.sum())


def spike_slab_kl(q: SpikeSlab, prior: SpikeSlab) -> float:
    """The bound KL(Bern || Bern) + lambda KL(N || N) on the KL of two spike-and-slabs, summed in float64."""
    slabs = _kl_terms(*(value.double() for value in (q.mu, q.sigma, prior.mu, prior.sigma)))
    return bernoulli_kl(q.keep, prior.keep) + float((q.keep.double() * slabs).sum())


def set_elbo_grad(
    q: Gaussian,
    prior: Gaussian,
    kl_weight: Tensor | float,
    loss_grad: LossGrad,
    scale: Tensor | float,
    samples: int,
    generator: torch.Generator,
    kl_direction: KLDirection = "forward",
    outputs_grad: OutputsGrad | None = None,
) -> None:
    """Set the gradient over q of E[loss(theta)] + kl_weight * KL(q || prior), theta = mu + scale * sigma * eps.

    `loss_grad` returns the gradient of the loss at theta; the expectation is over `samples` draws of eps ~ N(0, I).
    With `outputs_grad` the noise is drawn in the layers' outputs instead. With kl_direction "reverse" the KL is
    KL(prior || q).
    """
    _set_kl_grad(q, prior, first=kl_direction == "forward")
    q.grad_mu.mul_(kl_weight)
    q.grad_rho.mul_(kl_weight)
    for _ in range(samples):
        if outputs_grad is not None:
            over_mu, over_spread = outputs_grad(q.mu, q.sigma * scale, generator)
            q.grad_mu.add_(over_mu, alpha=1 / samples)
            q.grad_rho.add_(over_spread.mul_(scale), alpha=1 / samples)
            continue
        noise = torch.randn(q.mu.shape, generator=generator, device=generator.device).mul_(scale)
        grad = loss_grad(torch.addcmul(q.mu, q.sigma, noise))
        q.grad_mu.add_(grad, alpha=1 / samples)
        q.grad_rho.addcmul_(grad, noise, value=1 / samples)
    q.grad_rho.mul_(q.sigma_slope)


def set_prior_grad(prior: Gaussian, q: Gaussian, weight: Tensor | float, kl_direction: KLDirection = "forward") -> None:
    """Set the gradient over the prior of weight * KL(q || prior), or with "reverse" of weight * KL(prior || q)."""
    _set_kl_grad(prior, q, first=kl_direction == "reverse")
    prior.grad_mu.mul_(weight)
    prior.grad_rho.mul_(prior.sigma_slope).mul_(weight)


def _set_kl_grad(of: Gaussian, other: Gaussian, *, first: bool) -> None:
    """Set the gradient of KL(of || other), or of KL(other || of) where `of` is not the first.

    The second row is left as the gradient over sigma; the slope makes it that over rho.
    """
    if first:
        precision = other.sigma.square().reciprocal_()
        torch.sub(of.mu, other.mu, out=of.grad_mu).mul_(precision)
        torch.mul(of.sigma, precision, out=of.grad_rho).sub_(of.sigma.reciprocal())
    else:
        inverse = of.sigma.reciprocal()
        precision = inverse.square()
        difference = of.mu - other.mu
        torch.mul(difference, precision, out=of.grad_mu)
        spread = other.sigma.square().addcmul_(difference, difference)  # s1^2 + (m1 - m2)^2
        torch.mul(spread.mul_(precision).neg_().add_(1.0), inverse, out=of.grad_rho)


def set_spike_slab_elbo_grad(
    q: SpikeSlab,
    prior: SpikeSlab,
    kl_weight: Tensor | float,
    loss_grad: LossGrad,
    random: Tensor | float,
    noise_scale: float,
    samples: int,
    generator: torch.Generator,
    temp: float,
) -> None:
    """As `set_elbo_grad`, for theta = gate * (mu + noise_scale * sigma * eps) and the bound on the KL.

    Gates are hard, 1 or 0; for their gradient sigmoid(eta / temp) stands in (straight-through).
    """
    keep = q.keep
    over_odds = _kl_terms(q.mu, q.sigma, prior.mu, prior.sigma).add_(q.odds).sub_(prior.odds)
    over_odds.mul_(keep * (1 - keep)).mul_(kl_weight)

    def gated(weights: Tensor) -> Tensor:
        gate, slope = q.draw_gates(random, temp)
        grad = loss_grad(weights * gate)
        over_odds.addcmul_(grad * weights, slope, value=1 / samples)
        return grad * gate

    set_elbo_grad(q, prior, kl_weight * keep, gated, random * noise_scale, samples, generator)
    torch.mul(over_odds, q.odds_slope, out=q.grad_gate)


def set_spike_slab_prior_grad(prior: SpikeSlab, q: SpikeSlab, weight: Tensor | float) -> None:
    """Set the gradient over the prior of weight * (the bound on KL(q || prior))."""
    set_prior_grad(prior, q, weight * q.keep)
    torch.sub(prior.keep, q.keep, out=prior.grad_gate).mul_(weight).mul_(prior.odds_slope)


def predict_mean(model: State, x: Tensor, net: Network) -> Tensor:
    """The prediction at the posterior mean."""
    net.load(model["mu"])
    return net.predict(x)


def predict_mc(
    model: State,
    x: Tensor,
    net: Network,
    scale: Tensor | float,
    samples: int,
    generator: torch.Generator,
    gated: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Predictions averaged over draws of the weights, each of which goes through `gated` if that is given."""
    sigma = softplus(model["rho"])
    total = torch.zeros(())
    for _ in range(samples):
        noise = torch.randn(sigma.shape, generator=generator, device=generator.device).mul_(scale)
        theta = torch.addcmul(model["mu"], sigma, noise)
        net.load(theta if gated is None else gated(theta))
        total = total + net.predict(x)
    return total / samples


def aggregate_gaussians(server: State, uploads: Iterable[Upload], ctx: Ctx, how: Literal["param", "moment"]) -> State:
    """Average mu and rho componentwise, or match moments, which minimises the average KL(q_i || server)."""
    if how == "param":
        return average(server, uploads, ctx)
    return extrapolate(server, _matched((weight_of(upload, ctx), upload.message) for upload in uploads), ctx)


def aggregate_spike_slabs(
    server: State, uploads: Iterable[Upload], ctx: Ctx, how: Literal["param", "moment"], form: Literal["logit", "raw"]
) -> State:
    """Average mu, rho and the gates' row, or minimise the average bound on KL(q_i || server).

    The minimiser has the average lambda, and matches the moments of the slabs, each weighted by its own lambda.
    """
    if how == "param":
        return average(server, uploads, ctx)
    total, kept = 0.0, torch.zeros(())

    def weighted() -> Iterator[tuple[Tensor, Message]]:
        nonlocal total, kept
        for upload in uploads:
            gate, weight = upload.message["gate"].double(), weight_of(upload, ctx)
            slab = weight * (gate.sigmoid() if form == "logit" else gate.clamp(LAMBDA_MARGIN, 1 - LAMBDA_MARGIN))
            total, kept = total + weight, kept + slab
            yield slab, upload.message

    merged, keep = _matched(weighted()), kept / total
    merged["gate"] = (keep.logit().clamp_(*ODDS_RANGE) if form == "logit" else keep).float()
    return extrapolate(server, merged, ctx)


def _matched(weighted: Iterable[tuple[Tensor | float, Message]]) -> State:
    """The Gaussian with the mean and the variance of a weighted mixture of Gaussians."""
    total: Tensor | float = 0.0
    mean, second = torch.zeros(()), torch.zeros(())
    for weight, message in weighted:  # float64: the variance is a difference of second moments
        mu, sigma = message["mu"].double(), softplus(message["rho"].double())
        total = total + weight
        mean = mean + weight * mu
        second = second + weight * (sigma**2 + mu**2)
    mean, second = mean / total, second / total
    sigma = (second - mean**2).clamp_min_(1e-24).sqrt()
    return {"mu": mean.float(), "rho": inverse_softplus(sigma).clamp_(*RHO_RANGE).float()}


def inverse_softplus(sigma: Tensor) -> Tensor:
    """rho with softplus(rho) = sigma."""
    return sigma + torch.log(-torch.expm1(-sigma))
