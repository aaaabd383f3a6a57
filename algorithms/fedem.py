"""FedEM: every client's data is a mixture of K distributions that all share; a client has its own mixing weights.

min -sum_i sum_(x,y) log sum_k pi_ik p_k(y | x)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.models.network import Network
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    average,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)


def responsibilities(losses: Tensor, pi: Tensor) -> Tensor:
    """q_jk proportional to pi_k exp(-loss_jk): which component a sample (row) comes from."""
    return (pi.log() - losses).softmax(-1)


def m_step(
    net: Network, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], y: Tensor, weights: Tensor
) -> None:
    """Train the network that is loaded on (1/b) sum_j q_j ce_j; the batches have sample numbers in place of labels."""
    for x, numbers in batches:
        net.zero_grad()
        losses = cross_entropy(net.logits(x, training=True), y[numbers], reduction="none")
        (weights[numbers] * losses).mean().backward()
        optimizer.step()


class FedEMParams(Params):
    K: int = Field(3, ge=1, description="number of components")
    gm_weights: Literal["e_step", "kept", "uniform"] = Field(
        "e_step",
        description="pi of the global model: from an E-step on the client's training data, of the client's last round, "
        "or 1/K",
    )


class FedEM(Algorithm):
    """The server's state is the components, a row each; a client keeps pi. With one component this is FedAvg."""

    title = "FedEM"
    Params = FedEMParams

    def init_server(self, ctx: Ctx) -> State:
        """Different draws: components that start alike would stay alike."""
        draws = ctx.rng("components", on_cpu=True)
        others = [ctx.task.another_start(draws) for _ in range(self.params.K - 1)]
        return {"components": torch.stack([ctx.task.initial, *others])}

    def init_client(self, ctx: Ctx) -> State:
        return {"pi": torch.full((self.params.K,), 1 / self.params.K, device=ctx.task.device)}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net, components = ctx.task.net, down["components"]
        q, pi = self._e_step(components, memory["pi"], data, ctx)
        numbered, fitted, kept = data.numbered(), [], State()
        for k, start in enumerate(components):
            net.load(start)
            optimizer = make_optimizer(net.vector, ctx)
            restore_optimizer(optimizer, memory, f"optimizer {k}.")
            m_step(net, optimizer, local_batches(numbered, ctx), data.y, q[:, k])
            fitted.append(net.vector.detach().clone())
            kept |= optimizer_state(optimizer, ctx, f"optimizer {k}.")
        return {"components": torch.stack(fitted)}, {"pi": pi, **kept}

    def _e_step(self, components: Tensor, pi: Tensor, data: ClientData, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """The responsibilities q of all training samples, as they are and without dropout, and the new pi, q's mean."""
        if not data.n:
            return pi.new_zeros((0, len(pi))), pi
        net, losses = ctx.task.net, []
        with torch.no_grad():
            for w in components:
                net.load(w)
                chunks = data.chunks(ctx.protocol.batch_size)
                losses.append(torch.cat([cross_entropy(net.logits(x), y, reduction="none") for x, y in chunks]))
        q = responsibilities(torch.stack(losses, dim=1), pi)
        return q, q.mean(0)

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """FedAvg's average of every component."""
        return average(server, uploads, ctx)

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        if self.params.gm_weights == "uniform":
            return server
        if self.params.gm_weights == "kept":
            return {**server, "pi": memory["pi"]}
        return {**server, "pi": self._e_step(server["components"], memory["pi"], data, ctx)[1]}

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The client's pi on the server's components; adapted: an E-step, then an M-step of so many epochs."""
        if epochs is None:
            return {**server, "pi": memory["pi"]}
        q, pi = self._e_step(server["components"], memory["pi"], data, ctx)
        ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
        adapted = [self._adapted(w, q[:, k], data, ctx, epochs) for k, w in enumerate(server["components"])]
        return {"components": torch.stack(adapted), "pi": pi}

    def _adapted(self, start: Tensor, weights: Tensor, data: ClientData, ctx: Ctx, epochs: int) -> Tensor:
        """A component's whole network after so many epochs of the M-step, as `fine_tune` would train it."""
        net = ctx.task.net
        whole = net.extended(start).clone()
        net.load(whole)
        part = net.head if ctx.protocol.adapt_part == "head" else slice(0, whole.numel())
        optimizer = make_optimizer(net.part_of_whole(part), ctx, adapt_rate(ctx))
        batches = data.numbered().batches(ctx.protocol.batch_size, ctx.rng("adapt"), epochs=epochs)
        m_step(net, optimizer, batches, data.y, weights)
        whole[part] = net.whole.detach()[part]  # all the rest is as it was, running statistics too
        return whole

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """sum_k pi_k softmax(h_k(x)), whatever the mode."""
        components = model["components"]
        by_component = torch.stack([super(FedEM, self).predict({"w": w}, x, ctx, mode) for w in components])
        return torch.tensordot(model["pi"], by_component, 1) if "pi" in model else by_component.mean(0)
