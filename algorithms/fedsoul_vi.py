"""FedSOUL-VI: the body is averaged, every client keeps a Gaussian posterior of its own head; both are fitted together.

BPFed's repository calls this FedSOUL, but downloads no body (`fedsoul_vi_local`). FedSOUL itself is `fedpop`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, Params, PredictMode, State
from fedbench.bayes import Gaussian, KLDirection, initial_gaussian, predict_mc, predict_mean, set_elbo_grad
from fedbench.partly_shared import PartlyShared, joined
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    backward,
    learning_rate,
    local_batches,
    local_steps,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

Batches = Iterable[tuple[Tensor, Tensor]]


class FedSOULVIParams(Params):
    zeta: float = Field(0.001, ge=0, description="weight of the KL to the head that the batch began with")
    kl_scale: Literal["steps", "samples"] = Field(
        "steps", description="KL weight beside the mean loss: zeta/R (public code), or zeta/n_i"
    )
    kl_direction: KLDirection = Field(
        "reverse", description="KL(reference || head) (public code), or forward: KL(head || reference)"
    )
    personal_steps: int = Field(5, ge=1, description="steps of body and head on each batch")
    samples: int = Field(1, ge=1, description="samples of the head per step")
    rho0: float = Field(-3.0, ge=-12, le=5, description="initial rho of the head; sigma = softplus(rho)")
    mu_std: float = Field(0.1, ge=0, description="standard deviation of the head's initial means")
    noise_scale: float = Field(1.0, ge=0, description="factor on the weight noise (public code: 0.001)")


class FedSOULVI(PartlyShared):
    """CE + KL weight * KL(reference || head), where the reference is the head itself as it was before the batch.

    A client's memory is the head's posterior (`mu`, `rho`) and both optimisers' histories.
    """

    title = "FedSOUL-VI"
    Params = FedSOULVIParams
    defaults: ClassVar = {"optimizer": "adam", "lr": 0.001, "batch_size": 100, "optim_state": "persistent"}

    def init_client(self, ctx: Ctx) -> State:
        """The same for all clients. The body starts where the network's does, the head as Gaussian layers do."""
        p, own = self.params, self.parts(ctx)["own"]
        whole = initial_gaussian(ctx.at(None), p.rho0, p.mu_std, "point")
        return {key: value[own].clone() for key, value in whole.items()}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        batches = local_batches(data, ctx)
        fitted = self._fit({**memory, **down}, batches, learning_rate(ctx), data.n, ctx.rng("noise"), ctx)
        return {"shared": fitted.pop("shared")}, fitted

    def _fit(self, state: State, batches: Batches, rate: float, n: int, noise: torch.Generator, ctx: Ctx) -> State:
        """Body, head and histories after some steps on every batch; the body of a newcomer stays as it is."""
        net, parts, weight = ctx.task.net, self.parts(ctx), self._kl_weight(n, ctx)
        net.load(joined({"shared": state["shared"], "own": state["mu"]}, parts))
        body, head = net.parameter(parts["shared"]), Gaussian(state["mu"], state["rho"])
        optimizers = {"head.": make_optimizer(head.parameter, ctx, rate)}
        if not ctx.novel:
            optimizers["body."] = make_optimizer(body, ctx, rate)
        for prefix, optimizer in optimizers.items():
            restore_optimizer(optimizer, state, prefix)
        for batch in batches:
            reference = Gaussian(head.mu, head.rho)
            for _ in range(self.params.personal_steps):
                self._set_grads(head, reference, weight, batch, noise, ctx)
                head.step(optimizers["head."])
                if not ctx.novel:
                    optimizers["body."].step()
        fitted = {"shared": state["shared"] if ctx.novel else body.detach().clone(), **head.state()}
        for prefix, optimizer in optimizers.items():
            fitted |= optimizer_state(optimizer, ctx, prefix)
        return fitted

    def _set_grads(
        self,
        head: Gaussian,
        reference: Gaussian,
        weight: float,
        batch: tuple[Tensor, Tensor],
        noise: torch.Generator,
        ctx: Ctx,
    ) -> None:
        """Set the gradients of a step, means over samples of the head: `head`'s own, and the body's in the network."""
        p, net, parts = self.params, ctx.task.net, self.parts(ctx)
        body_grad = torch.zeros_like(net.grad[parts["shared"]])

        def loss_grad(theta: Tensor) -> Tensor:
            net.vector[parts["own"]] = theta
            backward(net, *batch)
            body_grad.add_(net.grad[parts["shared"]], alpha=1 / p.samples)
            return net.grad[parts["own"]]

        set_elbo_grad(head, reference, weight, loss_grad, p.noise_scale, p.samples, noise, p.kl_direction)
        net.grad[parts["shared"]] = body_grad

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The server's body with the client's head; adapted: the head fitted on, the body as it is."""
        known = {**server, **memory}
        if epochs is not None:
            ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
            start = {key: known[key] for key in ("shared", "mu", "rho")}
            batches, fixed = (
                data.batches(ctx.protocol.batch_size, ctx.rng("adapt"), epochs=epochs),
                replace(ctx, novel=True),
            )
            known = self._fit(start, batches, adapt_rate(ctx), data.n, ctx.rng("adapt_noise"), fixed)
        return self._model(known["shared"], known, ctx)

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        net = ctx.task.net
        if mode == "mean":
            return predict_mean(model, x, net)
        scale = torch.zeros_like(model["mu"])  # the body is a point
        scale[self.parts(ctx)["own"]] = self.params.noise_scale
        return predict_mc(model, x, net, scale, ctx.protocol.mc_samples, ctx.rng("mc"))

    def _model(self, body: Tensor, head: State, ctx: Ctx) -> State:
        """A body and a head's posterior as one; the body's rho means nothing."""
        parts = self.parts(ctx)
        return {
            "mu": joined({"shared": body, "own": head["mu"]}, parts),
            "rho": joined({"shared": torch.zeros_like(body), "own": head["rho"]}, parts),
        }

    def _kl_weight(self, n: int, ctx: Ctx) -> float:
        divisor = n if self.params.kl_scale == "samples" else local_steps(n, ctx)
        return float(self.params.zeta / max(1, divisor))
