"""Centralised: SGD on the pooled data of each round's clients; nothing is sent. The reference of federated methods."""

from __future__ import annotations

from collections.abc import Iterable

from fedbench.algorithm import Ctx, Message, State, Upload
from fedbench.task import ClientData
from fedbench.training import adjusted, local_sgd

from .fedavg import FedAvg


class Centralised(FedAvg):
    """The server is the only trainer, so its state is also the memory of the optimiser."""

    title = "Centralised"
    regression = True
    pooled = True

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        """tau epochs on the pooled data; where tau counts batches, as many as the m clients would make in all."""
        if ctx.protocol.local_unit == "batch":
            ctx = adjusted(ctx, tau=ctx.protocol.tau * len(super().select(down, {}, ctx).train))
        w, kept = local_sgd(down["w"], data, ctx, memory=down)
        return {"w": w, **kept}, {}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """No averaging: what was trained is the new model."""
        (upload,) = uploads
        return upload.message
