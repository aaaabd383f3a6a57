"""Ditto: FedAvg, and beside it a personal model per client that is held near the server's.

v_i = argmin_v f_i(v) + (lambda/2) ||v - w||^2
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, Params, State
from fedbench.task import ClientData
from fedbench.training import fine_tune, local_sgd, proximal

from .fedavg import FedAvg


class DittoParams(Params):
    lam: float = Field(0.75, ge=0, description="lambda, weight of ||v - w||^2 / 2")


class Ditto(FedAvg):
    """A client's memory is v_i."""

    title = "Ditto"
    regression = True
    Params = DittoParams

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        """Both models take their steps on the same batches.

        v is held near the model of the download, not near the one in training. So they never meet within a round, and
        one after the other is the same as the steps in turn of the original.
        """
        message, kept = super().update(down, memory, data, ctx)
        hold = proximal(down["w"], self.params.lam)
        v, own = local_sgd(self._own(down, memory, ctx), data, ctx, memory, hold, prefix="own.")
        return message, {"w": v, **kept, **own}

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """v_i; adapted: trained on, still held near the server's model."""
        v = self._own(server, memory, ctx)
        if epochs is None:
            return {"w": v}
        hold = proximal(ctx.task.net.extended(server["w"]), self.params.lam)
        return {"w": fine_tune(v, data, ctx, epochs, extra_grad=hold)}

    def _own(self, shared: State, memory: State, ctx: Ctx) -> Tensor:
        """v_i, which starts at w_0; a newcomer's starts at the server's model."""
        if "w" in memory:
            return memory["w"]
        return shared["w"] if ctx.client in ctx.task.newcomers else ctx.task.initial
