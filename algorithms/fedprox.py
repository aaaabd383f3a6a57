"""FedProx: FedAvg whose clients are held near the server's model, f_i(w) + (mu/2) ||w - w_t||^2."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, Params, State
from fedbench.task import ClientData
from fedbench.training import local_sgd

from .fedavg import FedAvg


class FedProxParams(Params):
    mu: float = Field(0.001, ge=0, description="weight of the proximal term; lr * mu must stay below 2")


class FedProx(FedAvg):
    title = "FedProx"
    Params = FedProxParams

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        anchor = down["w"]

        def proximal(w: Tensor, grad: Tensor) -> None:
            grad.add_(w - anchor, alpha=self.params.mu)

        w, kept = local_sgd(anchor, data, ctx, memory, extra_grad=proximal)
        return {"w": w}, kept
