"""FedHB-Mixture: clients are draws from a mixture of Gaussians around K prototypes; a network says which fits an input.

r_j ~ N(0, I),   theta_i ~ (1/K) sum_j N(r_j, sigma^2 I),   q_i = N(m_i, eps^2 I)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.clustered import summed_loss
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    backward,
    extrapolate,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
    weight_of,
)

from .fedhb_niw import backward_at


def responsibilities(m: Tensor, prototypes: Tensor, sigma2: float) -> Tensor:
    """c_j = softmax_j(-||m - r_j||^2 / (2 sigma^2)), in float64: the exponents are large and nearly equal."""
    distances: Tensor = torch.linalg.vector_norm(prototypes - m, dim=-1, dtype=torch.float64)
    return (distances.square() / (-2 * sigma2)).softmax(-1)


def add_penalty_grad(grad: Tensor, m: Tensor, prototypes: Tensor, c: Tensor, weight: float) -> None:
    """Add weight * sum_j c_j (m - r_j), the gradient of -weight sigma^2 log sum_j exp(-||m - r_j||^2/(2 sigma^2))."""
    grad.add_(m - c.to(m.dtype) @ prototypes, alpha=weight)


def em_step(weighted_mean: Tensor, mean_c: Tensor, sigma2: float, clients: int) -> Tensor:
    """r_j = [mean_i c(j|i) m_i] / [sigma^2 / N + mean_i c(j|i)], the means over the clients that took part."""
    return weighted_mean / (sigma2 / clients + mean_c)[:, None]


def is_orphan(mean_c: Tensor, sigma2: float, clients: int, guard: float) -> Tensor:
    """Whether a prototype has too little mass to be moved: the EM step would shrink it towards 0.

    Never so above half of an equal share: with very few clients no prototype at all would learn.
    """
    return mean_c < min(guard * sigma2 / clients, 0.5 / len(mean_c))


class FedHBMixtureParams(Params):
    K: int = Field(2, ge=1, description="number of prototypes")
    sigma2: float = Field(0.1, gt=0, description="variance of clients around their prototype")
    eps: float = Field(1e-4, ge=0, description="standard deviation of a client's posterior")
    eps_noise: bool = Field(False, description="clients take gradients at draws from their posterior, not at its mean")
    init: Literal["independent", "perturbed"] = Field(
        "independent", description="first prototypes: independent draws, or one draw with noise of 0.01 of its spread"
    )
    start: Literal["best", "centre", "last"] = Field(
        "best",
        description="where clients start: the prototype of the lowest loss on their data, the mean of the prototypes, "
        "or where they ended (at first: best)",
    )
    guard: float = Field(
        10.0, ge=0, description="keep a prototype whose mean responsibility is below this times sigma2 / N"
    )


class FedHBMixture(Algorithm):
    """The server's state is the prototypes, a row each, and for K > 1 the gate; its head is frozen."""

    title = "FedHB-Mixture"
    version = 2  # the best prototype is found by sums in float64
    Params = FedHBMixtureParams
    defaults: ClassVar = {"weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        p, draws, initial = self.params, ctx.rng("prototypes", on_cpu=True), ctx.task.initial
        if p.init == "independent":
            rows = [initial, *(ctx.task.another_start(draws) for _ in range(p.K - 1))]
        else:
            scale = 0.01 * _tensor_stds(initial, ctx)
            rows = [initial + scale * torch.randn(initial.shape, generator=draws).to(initial) for _ in range(p.K)]
        server = {"prototypes": torch.stack(rows)}
        return server if p.K == 1 else server | {"gate": ctx.task.companion(p.K)[1]}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net, prototypes = ctx.task.net, down["prototypes"]
        net.load(self._start(prototypes, memory, data, ctx))
        optimizer = make_optimizer(net.vector, ctx)
        restore_optimizer(optimizer, memory, "optimizer.")
        gate = None if self.params.K == 1 else _Gate(down["gate"], self.params.K, memory, ctx)
        noise = ctx.rng("posterior_noise")
        for x, y in local_batches(data, ctx):
            c = self._set_grad(net.vector, prototypes, data.n, (x, y), noise, ctx)
            if gate is not None:
                gate.step(x, int(c.argmax()))  # j*, the nearest prototype
            optimizer.step()
        message, kept = {"w": net.vector.detach().clone()}, optimizer_state(optimizer, ctx, "optimizer.")
        if gate is not None:
            message["gate"] = gate.net.vector.detach().clone()
            kept |= optimizer_state(gate.optimizer, ctx, "gate.")
        return message, kept | ({"w": message["w"]} if self.params.start == "last" else {})

    def _set_grad(
        self,
        vector: nn.Parameter,
        prototypes: Tensor,
        n: int,
        batch: tuple[Tensor, Tensor],
        noise: torch.Generator,
        ctx: Ctx,
    ) -> Tensor:
        """The gradient of CE(m; B) - (1/n) log sum_j exp(-||m - r_j||^2 / (2 sigma^2)); returns the responsibilities.

        m is the trained part of `vector`; a head that was frozen comes after it, without penalty.
        """
        p, net, grad = self.params, ctx.task.net, vector.grad
        assert grad is not None
        m = vector[: net.d]
        if p.eps_noise:
            drawn = torch.randn(m.shape, generator=noise, device=noise.device)
            backward_at(m + p.eps * drawn, m, net, *batch)
        else:
            backward(net, *batch)
        c = responsibilities(m, prototypes, p.sigma2)
        add_penalty_grad(grad[: net.d], m, prototypes, c, 1 / (n * p.sigma2))
        return c

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        p, prototypes, clients = self.params, server["prototypes"], len(ctx.task.members)
        total, mean_c, moved, gate = 0.0, torch.zeros(()), torch.zeros(()), torch.zeros(())
        for upload in uploads:
            weight, m = weight_of(upload, ctx), upload.message["w"]
            c = weight * responsibilities(m, prototypes, p.sigma2)
            total += weight
            mean_c = mean_c + c
            moved = moved + torch.outer(c, m.double())
            if p.K > 1:
                gate = gate + weight * upload.message["gate"]
        if not total:
            return server
        mean_c, moved = mean_c / total, moved / total
        found = em_step(moved, mean_c, p.sigma2, clients).float()
        orphans = is_orphan(mean_c, p.sigma2, clients, p.guard)
        merged = {"prototypes": torch.where(orphans[:, None], prototypes, found)}
        return extrapolate(server, merged if p.K == 1 else merged | {"gate": gate / total}, ctx)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """m after so many epochs of the client's own objective, with a head that was frozen trained along."""
        if epochs is None:
            return None
        net, protocol, prototypes = ctx.task.net, ctx.protocol, server["prototypes"]
        net.load(net.extended(self._start(prototypes, memory, data, ctx)))
        net.use_generator(ctx.rng("adapt_dropout"))
        optimizer = make_optimizer(net.whole, ctx, adapt_rate(ctx))
        noise, grad = ctx.rng("adapt_noise"), net.whole.grad
        assert grad is not None
        for batch in data.batches(protocol.batch_size, ctx.rng("adapt"), epochs=epochs):
            self._set_grad(net.whole, prototypes, data.n, batch, noise, ctx)
            if protocol.adapt_part == "head":
                grad[net.body] = 0.0
            optimizer.step()
        return {"w": net.whole.detach().clone()}

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """A personal model by itself; of the global one sum_j g_j(x) softmax(h(x; r_j)), whatever the mode."""
        if "w" in model:
            return super().predict(model, x, ctx, mode)
        by_prototype = [super(FedHBMixture, self).predict({"w": r}, x, ctx, mode) for r in model["prototypes"]]
        if self.params.K == 1:
            return by_prototype[0]
        gate, _ = ctx.task.companion(self.params.K)
        gate.load(model["gate"])
        return torch.einsum("nj,jnc->nc", gate.logits(x).softmax(-1), torch.stack(by_prototype))

    def _start(self, prototypes: Tensor, memory: State, data: ClientData, ctx: Ctx) -> Tensor:
        """Where a client begins."""
        if self.params.start == "last" and "w" in memory:
            return memory["w"]
        if self.params.K == 1:
            return prototypes[0]
        if self.params.start == "centre":
            return prototypes.mean(0)
        size = ctx.protocol.batch_size
        losses = torch.stack([summed_loss([r], data.chunks(size), ctx) for r in prototypes])
        return prototypes[int(losses.argmin())]


class _Gate:
    """The gating network in training: it learns to name the prototype that the client is nearest to."""

    def __init__(self, start: Tensor, outputs: int, memory: State, ctx: Ctx) -> None:
        self.net, _ = ctx.task.companion(outputs)
        self.net.load(start)
        self.net.use_generator(ctx.rng("gate_dropout"))
        self.optimizer = make_optimizer(self.net.vector, ctx)
        restore_optimizer(self.optimizer, memory, "gate.")

    def step(self, x: Tensor, nearest: int) -> None:
        """One step of cross-entropy with the same label for all inputs."""
        backward(self.net, x, torch.full((len(x),), nearest, device=x.device))
        self.optimizer.step()


def _tensor_stds(vector: Tensor, ctx: Ctx) -> Tensor:
    """At every coordinate the standard deviation of the weight or bias that it belongs to."""
    stds = torch.zeros_like(vector)
    for part in ctx.task.net.tensors:
        stds[part] = vector[part].std(correction=0)
    return stds
