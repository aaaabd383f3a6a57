"""pFedBayes: every client fits its own Gaussian posterior, with the server's Gaussian as its prior.

min_w (1/N) sum_i F_i(w),   F_i(w) = min_{q_i} E_{q_i}[-log p(D_i | theta)] + zeta KL(q_i || w)
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
    KLDirection,
    aggregate_gaussians,
    initial_gaussian,
    predict_mc,
    predict_mean,
    random_coordinates,
    set_elbo_grad,
    set_prior_grad,
)
from fedbench.local_reparam import BatchLoss
from fedbench.task import ClientData
from fedbench.training import adapt_rate, local_batches, local_steps, make_optimizer, optimizer_state, restore_optimizer


class PFedBayesParams(GaussianParams):
    zeta: float = Field(10.0, ge=0, description="weight of the KL to the server's posterior")
    kl_scale: Literal["samples", "batches", "steps"] = Field(
        "samples",
        description="KL weight beside the mean loss: zeta/n_i (paper), zeta/(R b) (public code), zeta/R (BPFed's code)",
    )
    rho0: float = Field(-2.5, ge=-12, le=5, description="initial rho; sigma = softplus(rho) (public code: -3)")
    rho_std: float = Field(0.0, ge=0, description="standard deviation of the initial rho (BPFed's code: 0.1)")
    mu_std: float = Field(0.1, ge=0, description="standard deviation of the initial means")
    noise_scale: float = Field(1.0, ge=0, description="factor on the weight noise (public code: 0.001)")
    personal_steps: int = Field(1, ge=1, description="K_p, personal steps per batch (public code: 5)")
    samples: int = Field(1, ge=1, description="weight samples per personal step")
    lr_global: float | None = Field(None, gt=0, description="rate of the global copy; default: lr")
    agg: Literal["param", "moment"] = Field("param", description="server: average (mu, rho), or match moments")
    loss_scale: Literal["mean", "sum"] = Field("mean", description="loss per sample, or times n_i (matters for SGD)")


class PFedBayes(Algorithm):
    title = "pFedBayes"
    Params = PFedBayesParams
    defaults: ClassVar = {
        "optimizer": "adam",
        "lr": 0.001,
        "batch_size": 100,
        "optim_state": "persistent",
        "train_all": True,
        "weighting": "uniform",
    }

    def init_server(self, ctx: Ctx) -> State:
        p = self.params
        return initial_gaussian(ctx, p.rho0, p.mu_std, p.bayes_norm, rho_std=p.rho_std)

    def init_client(self, ctx: Ctx) -> State:
        return self.init_server(ctx.at(None))

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        own, shared = self._posterior(memory, ctx), self._posterior(down, ctx)
        own_optimizer = make_optimizer(own.parameter, ctx)
        shared_optimizer = make_optimizer(shared.parameter, ctx, self.params.lr_global)
        restore_optimizer(own_optimizer, memory, "own.")
        restore_optimizer(shared_optimizer, memory, "shared.")
        noise, random = ctx.rng("noise"), self._random(ctx)

        for batch in local_batches(data, ctx):
            self._personal_steps(own, shared, batch, own_optimizer, noise, data.n, ctx)
            self._set_shared_grad(shared, own, random * self._kl_weight(data.n, ctx))
            shared.step(shared_optimizer)

        message = shared.state()
        if isinstance(random, Tensor):  # point values have no KL to learn from: the client's own are averaged
            message["mu"] = torch.where(random.bool(), message["mu"], own.mu)
        kept = optimizer_state(own_optimizer, ctx, "own.") | optimizer_state(shared_optimizer, ctx, "shared.")
        return message, own.state() | kept

    def _personal_steps(
        self,
        own: Gaussian,
        shared: Gaussian,
        batch: tuple[Tensor, Tensor],
        optimizer: torch.optim.Optimizer,
        noise: torch.Generator,
        n: int,
        ctx: Ctx,
    ) -> None:
        """K_p steps over own on one batch: CE(theta; B) + KL weight * KL(own || shared)."""
        p, random = self.params, self._random(ctx)
        loss = BatchLoss(ctx.task.net, *batch, n if p.loss_scale == "sum" else 1)
        for _ in range(p.personal_steps):
            self._set_own_grad(own, shared, random * self._kl_weight(n, ctx), loss, noise, ctx)
            own.step(optimizer)

    # --- what variations of the method change ---

    def _posterior(self, state: State, ctx: Ctx) -> Gaussian:
        """A state as a posterior in training."""
        return Gaussian(state["mu"], state["rho"])

    def _set_own_grad(
        self,
        own: Gaussian,
        shared: Gaussian,
        kl_weight: Tensor | float,
        loss: BatchLoss,
        noise: torch.Generator,
        ctx: Ctx,
    ) -> None:
        """Set the gradient of the personal step over own."""
        p, scale = self.params, self._random(ctx) * self.params.noise_scale
        in_outputs = loss.outputs_grad if p.local_reparam else None
        set_elbo_grad(own, shared, kl_weight, loss.grad, scale, p.samples, noise, self._kl_direction, in_outputs)

    def _set_shared_grad(self, shared: Gaussian, own: Gaussian, weight: Tensor | float) -> None:
        """Set the gradient of KL(own || shared) over shared."""
        set_prior_grad(shared, own, weight, self._kl_direction)

    @property
    def _kl_direction(self) -> KLDirection:
        return "forward"

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return aggregate_gaussians(server, uploads, ctx, self.params.agg)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The client's posterior; adapted: trained on with the server's as prior. A newcomer starts at the prior."""
        if epochs is None:
            return memory
        start = server if ctx.client in ctx.task.newcomers else memory
        own, shared = self._posterior(start, ctx), self._posterior(server, ctx)
        optimizer, noise = make_optimizer(own.parameter, ctx, adapt_rate(ctx)), ctx.rng("adapt_noise")
        ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
        for batch in data.batches(ctx.protocol.batch_size, ctx.rng("adapt"), epochs=epochs):
            self._personal_steps(own, shared, batch, optimizer, noise, data.n, ctx)
        return own.state()

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        if mode == "mean":
            return predict_mean(model, x, ctx.task.net)
        scale = self._random(ctx) * self.params.noise_scale
        return predict_mc(model, x, ctx.task.net, scale, ctx.protocol.mc_samples, ctx.rng("mc"))

    def _random(self, ctx: Ctx) -> Tensor | float:
        """1 where a parameter has a posterior, 0 where it is a point value."""
        return random_coordinates(ctx.task.net, self.params.bayes_norm)

    def _kl_weight(self, n: int, ctx: Ctx) -> float:
        """The KL's weight beside the loss of a batch, at the loss's scale."""
        steps = local_steps(n, ctx)
        divisor = {"samples": n, "batches": steps * ctx.protocol.batch_size, "steps": steps}[self.params.kl_scale]
        scale = n if self.params.loss_scale == "sum" else 1
        return float(scale * self.params.zeta / divisor)
