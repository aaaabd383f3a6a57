"""pFedBayes: every client fits its own Gaussian posterior, with the server's Gaussian as its prior.

min_w (1/N) sum_i F_i(w),   F_i(w) = min_{q_i} E_{q_i}[-log p(D_i | theta)] + zeta KL(q_i || w)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.bayes import (
    Gaussian,
    aggregate_gaussians,
    initial_gaussian,
    predict_mc,
    predict_mean,
    random_coordinates,
    set_elbo_grad,
    set_prior_grad,
)
from fedbench.task import ClientData
from fedbench.training import gradient, local_batches, make_optimizer, optimizer_state, restore_optimizer


class PFedBayesParams(Params):
    zeta: float = Field(10.0, ge=0, description="weight of the KL to the server's posterior")
    kl_scale: Literal["samples", "batches", "steps"] = Field(
        "samples",
        description="KL weight beside the mean loss: zeta/n_i (paper), zeta/(R b) (public code), zeta/R (BPFed's code)",
    )
    rho0: float = Field(-2.5, ge=-12, le=5, description="initial rho; sigma = softplus(rho) (public code: -3)")
    mu_std: float = Field(0.1, ge=0, description="standard deviation of the initial means")
    noise_scale: float = Field(1.0, ge=0, description="factor on the weight noise (public code: 0.001)")
    personal_steps: int = Field(1, ge=1, description="K_p, personal steps per batch (public code: 5)")
    samples: int = Field(1, ge=1, description="weight samples per personal step")
    lr_global: float | None = Field(None, gt=0, description="rate of the global copy; default: lr")
    agg: Literal["param", "moment"] = Field("param", description="server: average (mu, rho), or match moments")
    bayes_norm: Literal["point", "gaussian"] = Field(
        "point", description="normalisation parameters: point or posterior"
    )
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
        return initial_gaussian(ctx, p.rho0, p.mu_std, p.bayes_norm)

    def init_client(self, ctx: Ctx) -> State:
        return self.init_server(ctx.at(None))

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        p, net = self.params, ctx.task.net
        own, shared = Gaussian(memory["mu"], memory["rho"]), Gaussian(down["mu"], down["rho"])
        own_optimizer = make_optimizer(own.parameter, ctx)
        shared_optimizer = make_optimizer(shared.parameter, ctx, p.lr_global)
        restore_optimizer(own_optimizer, memory, "own.")
        restore_optimizer(shared_optimizer, memory, "shared.")
        noise, random = ctx.rng("noise"), random_coordinates(net, p.bayes_norm)
        n_factor = data.n if p.loss_scale == "sum" else 1
        kl_weight = random * (n_factor * self._kl_weight(data.n, ctx))

        for x, y in local_batches(data, ctx):
            loss_grad = partial(gradient, net, x, y, n_factor)
            for _ in range(p.personal_steps):  # CE(theta; B) + KL weight * KL(own || shared), over own
                set_elbo_grad(own, shared, kl_weight, loss_grad, random * p.noise_scale, p.samples, noise)
                own.step(own_optimizer)
            set_prior_grad(shared, own, kl_weight)  # KL(own || shared), over shared
            shared.step(shared_optimizer)

        message = shared.state()
        if isinstance(random, Tensor):  # point values have no KL to learn from: the client's own are averaged
            message["mu"] = torch.where(random.bool(), message["mu"], own.mu)
        kept = optimizer_state(own_optimizer, ctx, "own.") | optimizer_state(shared_optimizer, ctx, "shared.")
        return message, own.state() | kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return aggregate_gaussians(server, uploads, ctx, self.params.agg)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        return memory

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        if mode == "mean":
            return predict_mean(model, x, ctx.task.net)
        scale = random_coordinates(ctx.task.net, self.params.bayes_norm) * self.params.noise_scale
        return predict_mc(model, x, ctx.task.net, scale, ctx.protocol.mc_samples, ctx.rng("mc"))

    def _kl_weight(self, n: int, ctx: Ctx) -> float:
        """The KL's weight beside the mean loss of a batch."""
        protocol = ctx.protocol
        per_pass = -(-n // protocol.batch_size)
        steps = protocol.tau if protocol.local_unit == "batch" else protocol.tau * per_pass
        divisor = {"samples": n, "batches": steps * protocol.batch_size, "steps": steps}
        return float(self.params.zeta / divisor[self.params.kl_scale])
