"""Per-FedAvg: the server's model is trained to be one gradient step away from good personal models (MAML).

min_w (1/N) sum_i f_i(w - alpha grad f_i(w))
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbench.algorithm import Ctx, Message, Params, State
from fedbench.models.network import Network
from fedbench.task import ClientData
from fedbench.training import (
    adjusted,
    fine_tune,
    gradient,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

from .fedavg import FedAvg


class PerFedAvgParams(Params):
    meta_gradient: Literal["fo", "hf"] = Field(
        "fo", description="fo: first order; hf: with the Hessian's part, by a finite difference of gradients"
    )
    lr_inner: float | None = Field(None, ge=0, description="alpha, rate of the inner step; default: lr without decay")
    delta: float = Field(1e-3, gt=0, description="length of the finite difference of hf, as a part of ||w||")
    adapt: Literal["one_step", "one_pass", "epochs"] = Field(
        "one_pass",
        description="personal model, on training data: one batch or one pass at rate alpha, or `passes` at rate lr",
    )
    passes: int = Field(5, ge=1, description="passes of `adapt: epochs`")


class PerFedAvg(FedAvg):
    """The rate of the meta step (the paper's beta) is the protocol's lr."""

    title = "Per-FedAvg"
    regression = True
    Params = PerFedAvgParams

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net, alpha, dropout = ctx.task.net, self._alpha(ctx), ctx.rng("dropout")
        net.use_generator(dropout)
        w = nn.Parameter(down["w"].clone(), requires_grad=False)
        w.grad = net.grad  # where `gradient` leaves its result
        optimizer = make_optimizer(w, ctx)
        restore_optimizer(optimizer, memory, "optimizer.")
        # B' comes from the stream of FedAvg's batches, so that alpha = 0 is FedAvg
        inner, outer = local_batches(data, ctx, rng=ctx.rng("inner_batches")), local_batches(data, ctx)
        curved = local_batches(data, ctx, rng=ctx.rng("curvature_batches"))
        for batch, other_batch in zip(inner, outer, strict=True):
            ahead = torch.add(w, gradient(net, *batch, 1, w), alpha=-alpha)  # w'
            gradient(net, *other_batch, 1, ahead)
            if self.params.meta_gradient == "hf":
                self._subtract_curvature(w, next(curved), net, alpha, dropout)
            optimizer.step()
        return {"w": w.detach()}, optimizer_state(optimizer, ctx, "optimizer.")

    def _subtract_curvature(
        self, w: Tensor, batch: tuple[Tensor, Tensor], net: Network, alpha: float, dropout: torch.Generator
    ) -> None:
        """g' <- g' - alpha (grad CE(w + delta g'; B'') - grad CE(w - delta g'; B'')) / (2 delta), in the network.

        delta is such that ||delta g'|| is a given part of ||w||, or that part itself at w = 0.
        """
        g, length = net.grad.clone(), w.norm()
        delta = self.params.delta * torch.where(length > 0, length, 1.0) / g.norm().clamp_min(1e-12)
        masks = dropout.get_state()
        above = gradient(net, *batch, 1, w + delta * g).clone()
        dropout.set_state(masks)  # the difference is of weights, not of masks
        below = gradient(net, *batch, 1, w - delta * g)
        below.sub_(above).mul_(alpha / (2 * delta)).add_(g)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The server's model, adapted on the client's training data as `adapt` says, or for so many epochs."""
        adapt = self.params.adapt
        if adapt != "epochs":  # plain steps at rate alpha, like the inner one
            rate = self._alpha(ctx) if ctx.protocol.adapt_lr is None else ctx.protocol.adapt_lr
            ctx = adjusted(ctx, optimizer="sgd", momentum=0.0, adapt_lr=rate)
        if epochs is None and adapt == "one_step":
            return {"w": fine_tune(server["w"], data, ctx, steps=1)}
        passes = self.params.passes if adapt == "epochs" else 1
        return {"w": fine_tune(server["w"], data, ctx, passes if epochs is None else epochs)}

    def _alpha(self, ctx: Ctx) -> float:
        return float(ctx.protocol.lr if self.params.lr_inner is None else self.params.lr_inner)
