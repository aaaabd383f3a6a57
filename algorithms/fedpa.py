"""FedPA: clients sample their local posteriors, and the server steps towards the mode of the product of all of them.

Delta_i = Sigma_i^{-1} (w - mu_i),   w <- w - eta_s mean_i Delta_i
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedbench.algorithm import Ctx, Message, Params, State, Upload
from fedbench.errors import FedbenchError
from fedbench.task import ClientData
from fedbench.training import (
    adjusted,
    average,
    backward,
    local_batches,
    local_steps,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

from .fedavg import FedAvg


def posterior_delta(w: Tensor, samples: Iterable[Tensor], rho: float) -> Tensor:
    """Sigma^{-1} (w - mean of the samples) in O(l^2 d), for l samples, without Sigma itself.

    Sigma = r I + (1-r) S with the unbiased covariance S of the samples and r = 1 / (1 + (l-1) rho). A sample x_t adds
    g_t u u^T to Sigma / r, where u = x_t - mean of those before and g_t = rho (t-1)/t (Sherman and Morrison).
    """
    drawn = iter(samples)
    mean = next(drawn).clone()
    delta = w - mean
    before: list[tuple[Tensor, float]] = []  # v_k and g_k / (1 + g_k <u_k, v_k>)
    for t, x in enumerate(drawn, start=2):
        u = x - mean
        v = u.clone()  # becomes (Sigma_{t-1} / r)^{-1} u
        for v_k, factor in before:
            v.sub_(v_k, alpha=factor * _dot(v_k, u))
        g, uv = rho * (t - 1) / t, _dot(u, v)
        c = g * (t * _dot(u, delta) - uv) / (1 + g * uv)
        delta.sub_(v, alpha=(1 + c) / t)
        before.append((v, g / (1 + g * uv)))
        mean.add_(u, alpha=1 / t)
    return delta.mul_(1 + len(before) * rho)


def _dot(a: Tensor, b: Tensor) -> float:
    """In float64: d is large, and the differences of iterates are small."""
    return float(torch.dot(a.double(), b.double()))


class FedPAParams(Params):
    samples: int = Field(5, ge=1, description="l, posterior samples of a client; fewer where it makes fewer steps")
    burnin_steps: int | None = Field(
        None, ge=0, description="local steps before the first sample, at least; default: about half of the round's"
    )
    steps_per_sample: int | None = Field(
        None, ge=1, description="iterates averaged into a sample; default: as many as the burn-in leaves"
    )
    rho: float = Field(0.01, ge=0, description="how much the samples' covariance counts beside the identity's")
    burnin_rounds: float = Field(
        0.1, ge=0, le=1, description="part of the rounds, the first ones, in which clients send their model as FedAvg's"
    )
    server_optimizer: Literal["sgd", "adam"] = Field("sgd", description="of the server; its rate eta_s is beta")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="of the server's SGD")

    @model_validator(mode="after")
    def _momentum_is_for_sgd(self) -> FedPAParams:
        if self.server_momentum and self.server_optimizer == "adam":
            raise ValueError("server_momentum is for server_optimizer: sgd")
        return self


class FedPA(FedAvg):
    """An upload is w - Delta_i, where the client alone would lead the server; in FedAvg's rounds that is its model."""

    title = "FedPA"
    Params = FedPAParams

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError where samples and burn-in do not fit into a client's steps."""
        if ctx.task.net.keeps_statistics:
            raise FedbenchError("FedPA would take running statistics for parameters.", "Use norm bn_nostats or gn.")
        for steps in sorted({local_steps(ctx.sizes[client], ctx) for client in ctx.task.members}):
            self._sampling(steps)
        return super().init_server(ctx)

    def download(self, server: State, ctx: Ctx) -> Message:
        return {"w": server["w"]}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        if ctx.round <= int(self.params.burnin_rounds * ctx.rounds + 1e-9) or not data.n:
            return super().update(down, memory, data, ctx)
        net, w = ctx.task.net, down["w"]
        net.load(w)
        optimizer = make_optimizer(net.vector, ctx)
        restore_optimizer(optimizer, memory, "optimizer.")
        delta = posterior_delta(w, self._draw(optimizer, data, ctx), self.params.rho)
        return {"w": w - delta}, optimizer_state(optimizer, ctx, "optimizer.")

    def _draw(self, optimizer: torch.optim.Optimizer, data: ClientData, ctx: Ctx) -> Iterator[Tensor]:
        """Train the network that is loaded; after the burn-in every mean of so many iterates is a sample (IASG)."""
        net, steps = ctx.task.net, local_steps(data.n, ctx)
        samples, length = self._sampling(steps)
        burnin = steps - samples * length
        mean = torch.empty_like(net.vector)
        for step, (x, y) in enumerate(local_batches(data, ctx), start=-burnin):
            backward(net, x, y)
            optimizer.step()
            if step >= 0:
                mean = net.vector.clone() if step % length == 0 else mean.lerp(net.vector, 1 / (step % length + 1))
                if step % length == length - 1:
                    yield mean

    def _sampling(self, steps: int) -> tuple[int, int]:
        """How many samples come from so many steps, and of how many iterates each; steps that are left burn in."""
        p = self.params
        if p.burnin_steps is None and p.steps_per_sample is None:
            samples = min(p.samples, max(1, steps))
            return samples, max(1, (steps - steps // 2) // samples)
        burnin = p.burnin_steps or 0
        length = p.steps_per_sample or max(1, (steps - burnin) // p.samples)
        if burnin + p.samples * length > steps:
            raise FedbenchError(
                f"{burnin} steps of burn-in and {p.samples} samples of {length} do not fit into the {steps} steps that "
                "a client makes in a round.",
                "Raise tau, lower samples, or leave out burnin_steps and steps_per_sample.",
            )
        return p.samples, length

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """A step of the server's optimiser along mean_i Delta_i, at the rate beta."""
        p = self.params
        if p.server_optimizer == "sgd" and not p.server_momentum:
            return average(server, uploads, ctx)  # the same, and bit for bit FedAvg's in FedAvg's rounds
        w = nn.Parameter(server["w"].clone(), requires_grad=False)
        w.grad = w - average({"w": server["w"]}, uploads, adjusted(ctx, beta=1.0))["w"]
        optimizer: torch.optim.Optimizer
        if p.server_optimizer == "adam":
            optimizer = torch.optim.Adam([w], lr=ctx.protocol.beta, fused=True)
        else:
            optimizer = torch.optim.SGD([w], lr=ctx.protocol.beta, momentum=p.server_momentum, fused=True)
        restore_optimizer(optimizer, server, "optimizer.")
        optimizer.step()
        return {"w": w.detach(), **optimizer_state(optimizer, adjusted(ctx, optim_state="persistent"), "optimizer.")}
