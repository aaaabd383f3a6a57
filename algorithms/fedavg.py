"""FedAvg: every client trains the server's model; the server averages."""

from __future__ import annotations

from collections.abc import Iterable

from fedbench.algorithm import Algorithm, Ctx, Message, State, Upload
from fedbench.task import ClientData
from fedbench.training import average, fine_tune, local_sgd


class FedAvg(Algorithm):
    title = "FedAvg"
    regression = True

    def init_server(self, ctx: Ctx) -> State:
        return {"w": ctx.task.initial}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        w, kept = local_sgd(down["w"], data, ctx, memory)
        return {"w": w}, kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return average(server, uploads, ctx)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The server's model, fine-tuned (+FT)."""
        return None if epochs is None else {"w": fine_tune(server["w"], data, ctx, epochs)}
