"""FedABML: the server's Gaussian is the prior of all clients, and a few steps lead from it to a client's own.

min_theta (1/N) sum_i min_{phi_i} E_{q(w|phi_i)}[-log p(D_i | w)] + lambda KL(q(w|phi_i) || p(w|theta))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, Message, PredictMode, State, Upload
from fedbench.bayes import (
    Gaussian,
    GaussianParams,
    inverse_softplus,
    kl,
    predict_mc,
    predict_mean,
    random_coordinates,
    set_elbo_grad,
    set_prior_grad,
)
from fedbench.local_reparam import BatchLoss
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    average,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

NU_RANGE = (-10.0, 1.0)
"""sigma from 4.5e-5 to 2.7."""


class LogGaussian(Gaussian):
    """A Gaussian in training whose second row is nu = log sigma."""

    @property
    def sigma(self) -> Tensor:
        if self._sigma is None:
            self._sigma = self.rho.exp()
        return self._sigma

    @property
    def sigma_slope(self) -> Tensor:
        return self.sigma

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        super().step(optimizer)
        self.rho.clamp_(*NU_RANGE)

    def state(self) -> State:
        return {"mu": self.mu.detach().clone(), "nu": self.rho.detach().clone()}


class FedABMLParams(GaussianParams):
    lam: float = Field(0.05, ge=0, description="lambda, weight of the KL to the prior (paper: not stated)")
    kl_scale: Literal["per_sample", "per_client"] = Field(
        "per_sample", description="KL weight beside the mean loss: lambda/n_i, or lambda"
    )
    k: int = Field(5, ge=0, description="steps on phi per batch; 0: a variational FedAvg")
    samples: int = Field(5, ge=1, description="s, weight samples per step")
    theta_grad: Literal["first_order", "partial"] = Field(
        "first_order",
        description="theta's gradient: phi's and its own, as if phi moved along with theta, or its own, of the KL",
    )
    phi: Literal["carry", "reset"] = Field(
        "carry", description="phi goes on from batch to batch, or starts at theta on each"
    )
    nu0: float = Field(-3.0, ge=-10, le=1, description="initial log sigma (paper: not stated; also tried: -4)")
    lr_theta: float | None = Field(None, gt=0, description="rate of theta; default: lr")
    passes: int = Field(5, ge=0, description="epochs that make a personal model")


class FedABML(Algorithm):
    """Clients keep nothing: a personal model is made from theta whenever it is asked for."""

    title = "FedABML"
    regression = True
    Params = FedABMLParams
    defaults: ClassVar = {"weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        mu = ctx.task.initial
        return {"mu": mu, "nu": torch.full_like(mu, self.params.nu0)}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        p = self.params
        phi, theta = LogGaussian(down["mu"], down["nu"]), LogGaussian(down["mu"], down["nu"])
        phi_optimizer = make_optimizer(phi.parameter, ctx)
        theta_optimizer = make_optimizer(theta.parameter, ctx, p.lr_theta)
        restore_optimizer(theta_optimizer, memory, "theta.")
        noise, weight = ctx.rng("noise"), self._kl_weight(data.n, ctx)
        for batch in local_batches(data, ctx):
            if p.phi == "reset" or p.k == 0:
                phi = LogGaussian(theta.mu, theta.rho)
                phi_optimizer = make_optimizer(phi.parameter, ctx)
            self._adapt(phi, theta, batch, phi_optimizer, noise, weight, ctx)
            set_prior_grad(theta, phi, weight)
            if p.theta_grad == "first_order":
                self._set_phi_grad(phi, theta, batch, noise, weight, ctx)
                theta.grad.add_(phi.grad)
            theta.step(theta_optimizer)
        message, random = theta.state(), random_coordinates(ctx.task.net, p.bayes_norm)
        if p.theta_grad == "partial" and isinstance(random, Tensor):  # point values have no KL to learn from
            message["mu"] = torch.where(random.bool(), message["mu"], phi.mu)
        return message, optimizer_state(theta_optimizer, ctx, "theta.")

    def _adapt(
        self,
        phi: Gaussian,
        theta: Gaussian,
        batch: tuple[Tensor, Tensor],
        optimizer: torch.optim.Optimizer,
        noise: torch.Generator,
        weight: Tensor | float,
        ctx: Ctx,
    ) -> None:
        """k steps over phi on one batch."""
        for _ in range(self.params.k):
            self._set_phi_grad(phi, theta, batch, noise, weight, ctx)
            phi.step(optimizer)

    def _set_phi_grad(
        self,
        phi: Gaussian,
        theta: Gaussian,
        batch: tuple[Tensor, Tensor],
        noise: torch.Generator,
        weight: Tensor | float,
        ctx: Ctx,
    ) -> None:
        """The gradient over phi of the mean CE over s weight samples + weight * KL(phi || theta)."""
        p, loss = self.params, BatchLoss(ctx.task.net, *batch)
        scale, in_outputs = (
            random_coordinates(ctx.task.net, p.bayes_norm),
            loss.outputs_grad if p.local_reparam else None,
        )
        set_elbo_grad(phi, theta, weight, loss.grad, scale, p.samples, noise, outputs_grad=in_outputs)

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return average(server, uploads, ctx)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """phi by k steps per batch from theta, which stays the prior; for so many epochs, by default `passes`."""
        phi, theta = LogGaussian(server["mu"], server["nu"]), LogGaussian(server["mu"], server["nu"])
        protocol, noise, weight = ctx.protocol, ctx.rng("adapt_noise"), self._kl_weight(data.n, ctx)
        ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
        optimizer = make_optimizer(phi.parameter, ctx, adapt_rate(ctx))
        if protocol.adapt_part == "head":
            phi.hold(ctx.task.net.body)
        wanted = self.params.passes if epochs is None else epochs
        for batch in data.batches(protocol.batch_size, ctx.rng("adapt"), epochs=wanted):
            self._adapt(phi, theta, batch, optimizer, noise, weight, ctx)
        return {**phi.state(), "terms": self._terms(phi, theta, data, ctx)}

    def _terms(self, phi: Gaussian, theta: Gaussian, data: ClientData, ctx: Ctx) -> Tensor:
        """Both terms of the client's objective: the mean loss on its training data at the mean, and the weighted KL."""
        net, loss = ctx.task.net, 0.0
        net.load(phi.mu)
        with torch.no_grad():
            for x, y in data.chunks(ctx.protocol.batch_size):
                loss += float(net.loss(x, y, training=False)) * len(y) / data.n
        random = random_coordinates(net, self.params.bayes_norm)
        part = random.bool() if isinstance(random, Tensor) else slice(None)
        divergence = kl(*(value[part] for value in (phi.mu, phi.sigma, theta.mu, theta.sigma)))
        scale = data.n if self.params.kl_scale == "per_sample" else 1
        return torch.tensor([loss, self.params.lam * divergence / scale])

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """What a personal model's loss is made of: in large networks the KL can dominate."""
        return dict(zip(("loss_term", "kl_term"), model["terms"].tolist(), strict=True)) if "terms" in model else {}

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        if mode == "mean":
            return predict_mean(model, x, ctx.task.net)
        scale = random_coordinates(ctx.task.net, self.params.bayes_norm)
        same = {"mu": model["mu"], "rho": inverse_softplus(model["nu"].exp())}
        return predict_mc(same, x, ctx.task.net, scale, ctx.protocol.mc_samples, ctx.rng("mc"))

    def _kl_weight(self, n: int, ctx: Ctx) -> Tensor | float:
        """The KL's weight beside the mean loss; 0 at point values."""
        weight: float = self.params.lam / n if self.params.kl_scale == "per_sample" else self.params.lam
        return random_coordinates(ctx.task.net, self.params.bayes_norm) * weight
