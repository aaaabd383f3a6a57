"""pFedMe: every client has its own model near the server's, which moves towards it (Moreau envelopes).

min_w (1/N) sum_i F_i(w),   F_i(w) = min_theta f_i(theta) + (lambda/2) ||theta - w||^2
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, Params, State
from fedbench.task import ClientData
from fedbench.training import (
    ExtraGrad,
    backward,
    fine_tune,
    learning_rate,
    local_batches,
    make_optimizer,
    optimizer_state,
    proximal,
    restore_optimizer,
)

from .fedavg import FedAvg


class PFedMeParams(Params):
    lam: float = Field(15.0, ge=0, description="lambda, weight of ||theta - w||^2 / 2; lr * lambda well below 2")
    personal_steps: int = Field(5, ge=1, description="K, steps of theta on each batch")
    lr_global: float | None = Field(None, gt=0, description="eta, rate of the client's w_i; default: lr")
    mu: float = Field(0.0, ge=0, description="weight decay within the steps of theta (public code: 0.001)")


class PFedMe(FedAvg):
    """A client's memory is theta; the rate of its steps (the paper's eta_p) is the protocol's lr."""

    title = "pFedMe"
    regression = True
    Params = PFedMeParams
    defaults: ClassVar = {"train_all": True}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net, w = ctx.task.net, down["w"].clone()
        net.load(w)
        theta, penalty = net.vector, self._penalty(w)
        optimizer = make_optimizer(theta, ctx)
        restore_optimizer(optimizer, memory, "optimizer.")
        eta = self.params.lr_global or learning_rate(ctx)
        for x, y in local_batches(data, ctx):
            for _ in range(self.params.personal_steps):
                backward(net, x, y)
                penalty(theta, net.grad)
                optimizer.step()
            w.lerp_(theta, eta * self.params.lam)  # w <- w - eta lambda (w - theta)
        return {"w": w}, {"w": theta.detach().clone(), **optimizer_state(optimizer, ctx, "optimizer.")}

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """theta, or the server's model before a client's first round; adapted: trained on with the server's as w."""
        own = memory or server
        if epochs is None:
            return own
        penalty = self._penalty(ctx.task.net.extended(server["w"]))
        steps = self.params.personal_steps
        return {"w": fine_tune(own["w"], data, ctx, epochs, extra_grad=penalty, repeats=steps)}

    def _penalty(self, w: Tensor) -> ExtraGrad:
        """Adds lambda (theta - w) + mu theta."""
        pull, mu = proximal(w, self.params.lam), self.params.mu

        def add(theta: Tensor, grad: Tensor) -> None:
            pull(theta, grad)
            if mu:
                grad.add_(theta, alpha=mu)

        return add
