"""FedProx: FedAvg whose clients are held near the server's model, f_i(w) + (mu/2) ||w - w_t||^2."""

from __future__ import annotations

from pydantic import Field

from fedbench.algorithm import Ctx, Message, Params, State
from fedbench.task import ClientData
from fedbench.training import local_sgd, proximal

from .fedavg import FedAvg


class FedProxParams(Params):
    mu: float = Field(0.001, ge=0, description="weight of the proximal term; lr * mu must stay below 2")


class FedProx(FedAvg):
    title = "FedProx"
    regression = True
    Params = FedProxParams

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        w, kept = local_sgd(down["w"], data, ctx, memory, extra_grad=proximal(down["w"], self.params.mu))
        return {"w": w}, kept
